"""The tasks: flags, help and lists; nothing of Bakehouse is imported before one runs."""

from __future__ import annotations

import builtins
import importlib
import inspect
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from invoke.tasks import Task

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
tasks = importlib.import_module("tasks")
sys.path.remove(str(ROOT))
TASKS: dict[str, Any] = {n: t for n, t in vars(tasks).items() if isinstance(t, Task)}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    given = dict(inspect.signature(TASKS[name].body).parameters)
    return dict(list(given.items())[1:])


@pytest.mark.parametrize("name", TASKS)
def test_every_flag_has_help_and_none_is_short_or_positional(name: str) -> None:
    task = TASKS[name]
    assert set(task.help) == set(parameters(name))
    assert not task.auto_shortflags
    arguments = task.get_arguments()
    assert not any(a.positional for a in arguments)
    assert not any(len(n) == 1 for a in arguments for n in a.names)


@pytest.mark.parametrize("name", TASKS)
def test_values_are_text_and_switches_are_off(name: str) -> None:
    for flag, parameter in parameters(name).items():
        assert parameter.default is None or parameter.default is False, flag


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_exactly_the_flags_of_its_command(name: str) -> None:
    command = importlib.import_module(f"bakehouse.commands.{name}")
    flags = {flag.strip("_"): p.default for flag, p in parameters(name).items()}
    wanted = {f.name.strip("_"): f.type for f in fields(command.Options)}
    assert set(flags) == {*wanted, "json", "debug"}
    for flag, kind in wanted.items():
        assert (kind == "bool") == (flags[flag] is False), flag


@pytest.mark.parametrize("name", TASKS)
def test_one_line_says_what_it_is_for(name: str) -> None:
    first = inspect.cleandoc(TASKS[name].__doc__).splitlines()
    assert len(first) == 1
    assert len(first[0]) <= 64, "wraps in `invoke --list` on 80 columns"


def test_a_list_imports_nothing_of_ours() -> None:
    program = (
        "import sys; sys.argv = ['invoke', '--list']\n"
        "from invoke.main import program\n"
        "try: program.run()\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('bakehouse', 'pydantic', 'rich', 'requests', 'structlog', 'ruamel')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *listed, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert all(any(name in line for line in listed) for name in TASKS)


def test_an_interrupt_while_we_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def interrupted(name: str, *rest: Any, **more: Any) -> Any:
        if name == "bakehouse.cli":
            raise KeyboardInterrupt
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as caught:
        TASKS["recipes"].body(None)
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("test", "nonsense"), 2, "there is no level 'nonsense'"),
        (("test", "lint", "nonsense"), 2, "there is no level 'nonsense'"),
        (("nightly",), 2, "no recipe is named"),
        (("nightly", "--nonsense"), 2, "--nonsense is not an option"),
        (("nightly", "--help"), 0, "usage: "),
    ],
)
def test_a_script_judges_its_arguments_before_it_installs_anything(
    tmp_path: Path, argv: tuple[str, ...], code: int, said: str
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script, *rest = argv
    done = subprocess.run(
        ["bash", f"scripts/{script}", *rest],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()
