"""Adds recipes, patches and Docker templates to the wheel; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "patches", "docker")


class BuildWithShippedFiles(build_py):
    """Copies them to `bakehouse/shipped`; an editable install uses those of the checkout."""

    def run(self) -> None:
        """Build, then copy."""
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib, "bakehouse", "shipped")
        shutil.rmtree(shipped, ignore_errors=True)
        for name in SHIPPED:
            shutil.copytree(name, shipped / name)


setup(cmdclass={"build_py": BuildWithShippedFiles})
