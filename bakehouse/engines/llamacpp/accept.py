"""Rules that a configured llama.cpp build has to pass before anything is compiled."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator

from bakehouse.checks import Check, check
from bakehouse.engines.configured import AcceptRule, Configured, Expected
from bakehouse.engines.llamacpp.cmake import SEEMS_READ, same, truth
from bakehouse.engines.llamacpp.cuda import cuda
from bakehouse.util.text import suggestion

_UNUSED = re.compile(r"\s*Manually-specified variables were not used by the project:")
_DOWNLOAD = re.compile(
    r"(?i)\b(download(?:ing|ed)\b|fetching\b|cloning into\b|https?://\S+ .*\d+%|could not resolve)"
)


def generator(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The generator is the planned one."""
    yield _same("configure.generator", expected.generator, configured.generator, configured)


def build_type(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The build type is the one asked for."""
    entry = configured.cache.get("CMAKE_BUILD_TYPE")
    seen = entry.value if entry else None
    yield _same("configure.build_type", expected.build_type, seen, configured)


def _same(name: str, wanted: str, seen: str | None, configured: Configured) -> Check:
    return check(name, wanted, seen, configured.cache_path, ok=seen == wanted)


def compilers(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every language is compiled by the planned compiler in the planned version."""
    for language, wanted in expected.compilers.items():
        found = configured.compilers.get(language)
        right = (
            found is not None
            and found.version == wanted.version
            and os.path.realpath(found.path) == os.path.realpath(wanted.path)
        )
        yield check(
            f"configure.compiler.{language}",
            f"{wanted.path} {wanted.version}",
            f"{found.path} {found.version}" if found else None,
            configured.cache_path,
            ok=right,
        )


def definitions(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The cache holds every definition as it was passed: the engine's and the recipe's."""
    yield _held("configure.forced", expected.forced, configured)
    if expected.asked:
        yield _held("configure.asked", expected.asked, configured)


def _held(id: str, wanted: dict[str, str], configured: Configured) -> Check:  # noqa: A002
    wrong = []
    for name, value in wanted.items():
        entry = configured.cache.get(name)
        if entry is None or not same(entry.value, value):
            seen = f"{name}={entry.value}" if entry else f"no {name}"
            wrong.append(f"{seen} instead of {value or 'nothing'}")
        elif entry.type == "BOOL" and truth(value) is None:
            wrong.append(f"{name}={value}, but the project expects ON or OFF")
    return check(
        id,
        f"{len(wanted)} definitions as they were passed",
        "; ".join(wrong) if wrong else "all of them",
        configured.cache_path,
        ok=not wrong,
    )


def used(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The project reads every definition of the recipe: one that it does not read is a typo."""
    if not expected.asked:
        return
    unused = {n: configured.line(at) for at, n in _unused(configured.log) if n in expected.asked}
    for name in sorted(expected.asked):
        if _only_seems_read(name, configured):
            unused.setdefault(name, configured.cache_path)
    declared = [n for n, e in configured.cache.items() if e.type not in {"UNINITIALIZED", "STATIC"}]
    yield check(
        "configure.used",
        f"the project reads all {len(expected.asked)} definitions of the recipe",
        "; ".join(f"{n} is not used{suggestion(n, declared)}" for n in unused) or "it does",
        next(iter(unused.values()), configured.log_path),
        ok=not unused,
    )


def _only_seems_read(name: str, configured: Configured) -> bool:
    """Whether a name that CMake counts as read appears nowhere in the source."""
    entry = configured.cache.get(name)
    undeclared = entry is not None and entry.type == "UNINITIALIZED"
    return name.startswith(SEEMS_READ) and undeclared and name not in configured.named


def _unused(log: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line number and name of each entry in CMake's list of unused definitions."""
    inside = False
    for number, line in enumerate(log, 1):
        if _UNUSED.match(line):
            inside = True
        elif inside and line.strip():
            if not line.startswith("    "):
                inside = False
                continue
            yield number, line.strip()


def no_download(configured: Configured, expected: Expected) -> Iterable[Check]:  # noqa: ARG001
    """Configure downloaded nothing."""
    found = [(n, ln) for n, ln in enumerate(configured.log, 1) if _DOWNLOAD.search(ln)]
    yield check(
        "configure.no_download",
        "no download in the log",
        found[0][1].strip() if found else "none",
        configured.line(found[0][0]) if found else configured.log_path,
        ok=not found if configured.log else None,
    )


def targets(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every target that will be built exists."""
    known = configured.targets
    missing = [
        f"{name} does not exist{suggestion(name, known)}"
        for name in expected.targets
        if name not in known
    ]
    yield check(
        "configure.targets",
        ", ".join(expected.targets),
        "; ".join(missing) or "all exist",
        configured.cache_path,
        ok=not missing if known else None,
    )


RULES: tuple[AcceptRule, ...] = (
    generator, compilers, build_type, definitions, used, targets, no_download, cuda,
)  # fmt: skip
"""All rules, in the order in which they are printed."""
