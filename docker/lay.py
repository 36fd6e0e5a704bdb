"""Lays changed Python files over the packages of an image, and leaves nothing else behind.

Runs inside the image while it is built. /bakehouse/files holds them by their path below the folder
in which the package `vllm` lies; /bakehouse/removed.json names those that go.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

HERE = Path("/bakehouse")


def packages() -> Path:
    """The folder that the package vllm lies in; it is found, not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("this image has no package vllm")
    return Path(spec.origin).parent.parent


def main() -> None:
    """Write, remove, and drop what was compiled of the old files."""
    target = packages()
    files = HERE / "files"
    changed = [path.relative_to(files) for path in sorted(files.rglob("*")) if path.is_file()]
    removed = [Path(name) for name in json.loads((HERE / "removed.json").read_text())]
    for path in (*changed, *removed):
        for old in (target / path).parent.glob(f"__pycache__/{path.stem}.*"):
            old.unlink()
    for path in changed:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes((files / path).read_bytes())
    for path in removed:
        (target / path).unlink()
    shutil.rmtree(HERE)


main()
