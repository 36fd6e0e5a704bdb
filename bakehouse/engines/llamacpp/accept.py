"""Rules that a configured llama.cpp build has to meet before anything is compiled."""

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
    seen = configured.generator
    yield check(
        "configure.generator",
        expected.generator,
        seen,
        configured.cache_path,
        ok=seen == expected.generator,
    )


def compilers(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every language is compiled by the planned compiler in the planned version."""
    for language, wanted in expected.compilers.items():
        found = configured.compilers.get(language)
        seen = f"{found.path} {found.version}" if found else None
        right = found and found.version == wanted.version and _one_file(found.path, wanted.path)
        yield check(
            f"configure.compiler.{language}",
            f"{wanted.path} {wanted.version}",
            seen,
            configured.cache_path,
            ok=bool(right) if found else None,
        )


def _one_file(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def build_type(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The build type is the one asked for."""
    entry = configured.cache.get("CMAKE_BUILD_TYPE")
    yield check(
        "configure.build_type",
        expected.build_type,
        entry.value if entry else None,
        configured.cache_path,
        ok=entry is not None and entry.value == expected.build_type,
    )


def forced(configured: Configured, expected: Expected) -> Iterable[Check]:
    """What the engine forces holds."""
    yield _held("configure.forced", expected.forced, configured)


def asked(configured: Configured, expected: Expected) -> Iterable[Check]:
    """What the recipe asked for holds."""
    if expected.asked:
        yield _held("configure.asked", expected.asked, configured)


def _held(id: str, wanted: dict[str, str], configured: Configured) -> Check:  # noqa: A002
    """One check over definitions: what stands in the cache is what was passed."""
    wrong = []
    for name, value in wanted.items():
        entry = configured.cache.get(name)
        if entry is None or not same(entry.value, value):
            seen = f"{name}={entry.value}" if entry else f"no {name}"
            wrong.append(f"{seen} in place of {value or 'nothing'}")
        elif entry.type == "BOOL" and truth(value) is None:
            wrong.append(f"{name}={value}, where the project wants ON or OFF")
    return check(
        id,
        f"{len(wanted)} definitions as they were passed",
        "; ".join(wrong) if wrong else "all of them",
        configured.cache_path,
        ok=not wrong,
    )


def used(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The project read every definition of the recipe: one that it did not is a typing error."""
    if not expected.asked:
        return
    unused, where = [], configured.log_path
    for number, name in _unused(configured.log):
        if name in expected.asked:
            unused.append(name)
            where = configured.line(number) if len(unused) == 1 else where
    for name in sorted(expected.asked):
        if name not in unused and _only_seems_read(name, configured):
            where = where if unused else configured.cache_path
            unused.append(name)
    said = "it does"
    if unused:
        said = "; ".join(f"{name} is not used{_nearest(name, configured)}" for name in unused)
    yield check(
        "configure.used",
        f"the project reads all {len(expected.asked)} definitions of the recipe",
        said,
        where,
        ok=not unused,
    )


def _only_seems_read(name: str, configured: Configured) -> bool:
    """Whether nothing in the source knows a name that CMake takes for read."""
    entry = configured.cache.get(name)
    undeclared = entry is not None and entry.type == "UNINITIALIZED"
    return name.startswith(SEEMS_READ) and undeclared and name not in configured.named


def _unused(log: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Names (with line numbers) in CMake's list of definitions that nothing read."""
    inside = False
    for number, line in enumerate(log, 1):
        if _UNUSED.match(line):
            inside = True
        elif inside and line.strip():
            if not line.startswith("    "):
                inside = False
                continue
            yield number, line.strip()


def _nearest(name: str, configured: Configured) -> str:
    declared = [n for n, e in configured.cache.items() if e.type not in {"UNINITIALIZED", "STATIC"}]
    return suggestion(name, declared)


def no_download(configured: Configured, expected: Expected) -> Iterable[Check]:  # noqa: ARG001
    """Configure fetched nothing."""
    found = [(n, ln) for n, ln in enumerate(configured.log, 1) if _DOWNLOAD.search(ln)]
    yield check(
        "configure.no_download",
        "no line about a download",
        found[0][1].strip() if found else "none",
        configured.line(found[0][0]) if found else configured.log_path,
        ok=not found if configured.log else None,
    )


def targets(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every target that will be built exists."""
    missing = [t for t in expected.targets if t not in configured.targets]
    said = [f"{name} does not exist{suggestion(name, configured.targets)}" for name in missing]
    yield check(
        "configure.targets",
        ", ".join(expected.targets),
        "; ".join(said) if said else "all exist",
        configured.cache_path,
        ok=not missing if configured.targets else None,
    )


RULES: tuple[AcceptRule, ...] = (
    generator,
    compilers,
    build_type,
    forced,
    asked,
    used,
    targets,
    no_download,
    cuda,
)
"""All rules, in the order in which they are printed. What a toolkit asks for comes last."""
