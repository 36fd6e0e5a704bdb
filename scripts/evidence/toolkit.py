"""A whole toolkit of what a machine has in two places: nvcc in one, cuBLAS among Python's packages.

Images for PyTorch are often like that. The parts are copied, so that all lies inside one root.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from bakehouse.context import Context
from bakehouse.cuda.install import finish_layout
from bakehouse.cuda.toolkit import find_toolkits
from bakehouse.paths import Places


def find_parts(version: str) -> tuple[Path, Path] | None:
    """Give the root of a toolkit that lacks libraries, and the folder of packages with them."""
    ctx = Context(Places(Path("/nonexistent"), Path("/nonexistent")), recipes=Path())
    found = [t for t in find_toolkits(ctx).toolkits if t.version.startswith(f"{version}.")]
    if not found or any(not toolkit.faults for toolkit in found):
        return None
    major = version.partition(".")[0]
    for place in sys.path:
        packages = Path(place, "nvidia", f"cu{major}")
        if (packages / "lib" / f"libcublasLt.so.{major}").exists():
            return Path(found[0].root), packages
    return None


def assemble(root: Path, packages: Path, target: Path) -> list[str]:
    """Copy both into `target`, laid out as a toolkit; give what was taken from the packages."""
    for name in ("bin", "include", "lib", "nvvm"):
        shutil.copytree(root / name, target / name, symlinks=False, dirs_exist_ok=True)
    taken = []
    for pattern in ("lib/libcublas*.so.*", "include/cublas*"):
        for file in sorted(packages.glob(pattern)):
            shutil.copyfile(file, target / file.relative_to(packages))
            taken.append(str(file))
    places = Places(target / "unused", target / "unused")
    finish_layout(Context(places, recipes=target), target)
    return taken
