"""Reads files of an image's Python packages: this file's text runs in the image's own Python.

Arguments: a sentinel, then paths below the folder in which the package `vllm` lies. Prints, between
sentinels, the version that the package was built as and each file's bytes in base64, or null.
"""

import base64
import importlib.util
import json
import re
import sys
from pathlib import Path


def main() -> None:
    """Answer; the package is found, not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("this image has no package vllm")
    folder = Path(spec.origin).parent
    found = {}
    for name in sys.argv[2:]:
        path = folder.parent / name
        found[name] = base64.b64encode(path.read_bytes()).decode() if path.is_file() else None
    version = folder / "_version.py"
    text = version.read_text() if version.is_file() else ""
    said = re.search(r"""^(?:__version__|version) = (?:version = )?['"]([^'"]+)['"]""", text, re.M)
    number = said[1] if said else ""
    document = json.dumps({"version": number, "files": found})
    sys.stdout.write(f"\n{sys.argv[1]}{document}{sys.argv[1]}\n")


if __name__ == "__main__":
    main()
