"""CMakeCache.txt of a recorded configure."""

from __future__ import annotations

import re


def cache_values(text: str) -> dict[str, str]:
    """Values by name, as `build/cmake_file_api.py` reads them from CMake's file API."""
    found = re.findall(r"^([^#/\s][^:=]*):[A-Z]+=(.*)$", text, re.MULTILINE)
    return dict(found)
