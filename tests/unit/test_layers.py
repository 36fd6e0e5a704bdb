"""The order of packages: each imports only itself and those above it; only the edge prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bakehouse"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = """
    errors models redact paths progress flags debug_log
    util
    recipe
    system
    host
    context
    lock
    checkpoints
    sources
    cuda toolchain
    engines
    memory
    logscan
    patches
    preflight
    plan
    runs
    resolver
    build
    console
    cli
    probe
    server
    patch_review
    commands
    program
"""
"""Packages and top modules from the lowest layer to the highest; those of a line are peers."""


def layers() -> dict[str, int]:
    """Return the number of each package's layer."""
    lines = LAYERS.split("\n")
    return {name: number for number, line in enumerate(lines) for name in line.split()}


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


MODULES = {module_of(p) for p in FILES}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import at run time, also of those inside functions."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (
                    node.lineno,
                    inner if inner in MODULES else "." * node.level + str(node.module),
                )


def test_layers_import_only_what_is_above() -> None:
    order, wrong = layers(), []
    for path in FILES:
        own = package_of(module_of(path))
        for line, module in imports_of(path):
            other = package_of(module)
            ours = module.split(".")[0] == "bakehouse" and other
            if module.startswith((".", "tasks")) or (
                ours and own and order.get(other, 99) > order.get(own, -1)
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {module}")
    assert wrong == []


def test_layers_have_a_place_for_every_package() -> None:
    assert {package_of(module_of(p)) for p in FILES} - layers().keys() == {""}


def test_layers_only_the_edge_prints() -> None:
    printing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_layers_docker_is_not_a_package() -> None:
    """It would hide the Docker SDK."""
    assert not list((ROOT / "docker").rglob("__init__.py"))
