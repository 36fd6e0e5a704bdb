"""What CMake configured, from its file API (CMake 3.20 and newer)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bakehouse.engines.base import CacheEntry, Compiler, Configured, Target

_QUERY = ".cmake/api/v1/query/client-bakehouse/query.json"
_REPLY = ".cmake/api/v1/reply"
_KINDS = (("codemodel", 2), ("cache", 2), ("toolchains", 1))


def ask(folder: Path) -> None:
    """Write the query into a build folder, before configure runs."""
    query = folder / _QUERY
    query.parent.mkdir(parents=True, exist_ok=True)
    query.write_text(questions())


def questions() -> str:
    """The query as JSON."""
    requests = [{"kind": kind, "version": version} for kind, version in _KINDS]
    return json.dumps({"requests": requests})


def read(folder: Path, log: Path, source: Path | None = None) -> Configured:
    """Read CMake's replies. Raises OSError or ValueError if there are none, or not all.

    `source` is the source folder, if CMake saw it elsewhere. CMake's cache is copied beside the
    log, so that the files that checks name exist after the build.
    """
    kept = log.with_name("CMakeCache.txt")
    shutil.copyfile(folder / "CMakeCache.txt", kept)
    replies, generator = _replies(folder / _REPLY)
    entries = replies.get("cache", {}).get("entries", [])
    cache = {e["name"]: CacheEntry(value=e["value"], type=e["type"]) for e in entries}
    targets = {}
    for configuration in replies.get("codemodel", {}).get("configurations", [])[:1]:
        for entry in configuration.get("targets", []):
            target = _json(folder / _REPLY / entry["jsonFile"])
            artifacts = tuple(a["path"] for a in target.get("artifacts", []))
            targets[target["name"]] = Target(target["name"], target.get("type", ""), artifacts)
    toolchains = replies.get("toolchains", {}).get("toolchains", [])
    return Configured(
        log=tuple(log.read_text(errors="replace").splitlines()),
        log_path=str(log),
        cache=cache,
        cache_path=str(kept),
        generator=generator,
        compilers={
            t["language"]: Compiler(**{k: t["compiler"].get(k, "") for k in Compiler.model_fields})
            for t in toolchains
        },
        targets=targets,
        named=_named(cache, source),
    )


def _named(cache: Mapping[str, CacheEntry], source: Path | None) -> frozenset[str]:
    """Undeclared entries of the cache that a CMake file of the source mentions."""
    home = cache.get("CMAKE_HOME_DIRECTORY")
    if home is None:
        return frozenset()
    undeclared = {name for name, entry in cache.items() if entry.type == "UNINITIALIZED"}
    found: set[str] = set()
    for folder, _, names in os.walk(source or home.value):
        for name in names:
            path = Path(folder, name)
            if (name == "CMakeLists.txt" or path.suffix == ".cmake") and path.is_file():
                words = re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace"))
                found |= undeclared.intersection(words)
    return frozenset(found)


def _replies(folder: Path) -> tuple[dict[str, Any], str]:
    """Replies by kind, and the generator's name, from the newest index."""
    indexes = sorted(folder.glob("index-*.json"))
    if not indexes:
        raise ValueError("no reply")
    index = _json(indexes[-1])
    own = index.get("reply", {}).get("client-bakehouse", {}).get("query.json", {})
    answers = {}
    for response in own.get("responses", []):
        if "jsonFile" in response:
            answers[response["kind"]] = _json(folder / response["jsonFile"])
    if missing := {kind for kind, _ in _KINDS} - answers.keys():
        raise ValueError(f"{min(missing)} is missing")
    return answers, index.get("cmake", {}).get("generator", {}).get("name", "")


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))
