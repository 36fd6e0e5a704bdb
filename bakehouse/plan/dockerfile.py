"""Dockerfiles from the templates in `docker/`: text in, text out."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from bakehouse.errors import BuildFailed
from bakehouse.places import shipped
from bakehouse.redact import clean

FOLDER = shipped("docker")
"""Not a Python package: one of that name would hide the Docker SDK."""


def render(template: str, **values: Any) -> str:
    """Fill a template; commands go through `tojson`, so that no shell reads them.

    Raises BuildFailed for a value with a line break or a space in it, such as a user that a foreign
    image's configuration names: it would be an instruction of its own.
    """
    for name, value in values.items():
        if isinstance(value, str) and not re.fullmatch(r"[!-~]+", value):
            raise BuildFailed(
                f"the image's {name} cannot stand in a Dockerfile",
                where=f"{template}: '{clean(value, one_line=True)}'", id="image-odd",
                hint="use another base image, or tell its publisher",
            )  # fmt: skip
    import jinja2  # slow to import, and few plans need it

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True, trim_blocks=True, autoescape=False,  # noqa: S701 - no HTML
    )  # fmt: skip
    environment.filters["tojson"] = _plain
    return environment.get_template(template).render(values)


def _plain(value: Any, **_: Any) -> str:
    import json

    return json.dumps(value)


def script(name: str) -> bytes:
    """A file of the folder that goes into a build as it is."""
    return (FOLDER / name).read_bytes()


def script_hashes(*names: str) -> dict[str, str]:
    """Sha256 of such files."""
    return {name: hashlib.sha256(script(name)).hexdigest() for name in names}
