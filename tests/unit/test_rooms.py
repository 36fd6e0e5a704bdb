"""A room imports only rooms above it; modules and functions stay small; nothing wraps it all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bakehouse"

ROOMS = (
    "errors", "base", "atomic", "util", "checks", "places", "progress", "redact", "logs", "ports",
    "host", "recipe", "lock", "records", "context", "outcome", "signatures", "elf", "checkpoints",
    "sources", "toolkit", "toolchain", "engines", "memory", "resolve", "preflight", "plan",
    "build", "probe", "serve", "patches", "nightly", "console", "commands", "cli",
)  # fmt: skip
"""From the top of the house to the bottom."""
TYPES_FOR_ALL = {
    "bakehouse.plan.types", "bakehouse.probe.types", "bakehouse.build.types",
    "bakehouse.patches.manifest",
}  # fmt: skip
"""Types only: a room above may name what a room below will make."""

FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [*FILES, ROOT / "tasks.py", *sorted((ROOT / "scripts").rglob("*.py"))]


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _for_types(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`, whose imports never happen."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import of ours, also those inside functions."""
    known = {module_of(p) for p in FILES}
    tree = ast.parse(path.read_text())
    names_only = {id(n) for block in ast.walk(tree) if _for_types(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in names_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node.lineno, inner if inner in known else str(node.module)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    own = room_of(module_of(path))
    assert own == "" or own in ROOMS, f"{own} has no place in the order"
    for line, module in imports_of(path):
        room = room_of(module)
        if module.split(".")[0] == "tasks":
            pytest.fail(f"{path}:{line}: nothing imports tasks.py")
        if module.split(".")[0] != "bakehouse" or not room or module in TYPES_FOR_ALL:
            continue
        assert ROOMS.index(room) <= ROOMS.index(own), f"{path}:{line}: {own} imports {room}"


@pytest.mark.parametrize("path", OURS, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{path}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_edge_prints(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno}: prints"


def test_docker_is_not_a_package() -> None:
    assert not list((ROOT / "docker").rglob("__init__.py"))
