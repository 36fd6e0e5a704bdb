"""Tasks: made from one table of flags; nothing else of Bakehouse is imported before one runs."""

from __future__ import annotations

import builtins
import importlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from invoke.context import Context

from bakehouse import flags, program

ROOT = Path(__file__).resolve().parents[2]
TASKS = program.make_tasks().tasks


def test_tasks_are_long_flags_with_help() -> None:
    faults = []
    for name, task in TASKS.items():
        arguments = {argument.names[0]: argument for argument in task.get_arguments()}
        assert arguments.keys() == {flag.option.strip("-") for flag in flags.flags_of(name)}
        for flag, argument in arguments.items():
            if argument.positional or len(argument.names) > 1 or not argument.help:
                faults.append((name, flag))
            if argument.default not in (None, False, []):
                faults.append((name, f"{flag}={argument.default}"))
        if len(str(task.__doc__)) > 64 or "\n" in str(task.__doc__):
            faults.append((name, "does not fit on a line of `--list`"))
    assert faults == []


def test_tasks_have_the_options_of_their_commands() -> None:
    for name, kind in flags.TASKS.items():
        command = importlib.import_module(f"bakehouse.commands.{kind.module}")
        assert callable(getattr(command, kind.function)), name
        required = {flag.name: "x" for flag in kind.flags.values() if flag.required}
        made = vars(kind(**required))
        assert made == required
        with pytest.raises(TypeError):
            kind(**required, bogus="x")
        if required:
            with pytest.raises(TypeError):
                kind()


def test_tasks_mean_one_thing_by_a_flag() -> None:
    """`--host` is an address to listen on; only `fit` keeps its older meaning as an alias."""
    kinds = Counter((flag.option, flag.kind) for t in TASKS for flag in flags.flags_of(str(t)))
    options = Counter(option for option, _ in kinds)
    assert [o for o, count in options.items() if count > 1] == ["--recipe"], "a list for nightly"
    hosts = {str(t): f.help for t in TASKS for f in flags.flags_of(str(t)) if f.option == "--host"}
    assert hosts.keys() == {"serve", "fit"}
    assert "--machine" in hosts["fit"]


def test_tasks_list_imports_only_the_flags() -> None:
    code = (
        "import sys; sys.argv = ['invoke', '--list']\n"
        "from invoke.main import program\n"
        "try: program.run()\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('bakehouse', 'pydantic', 'rich', 'requests', 'structlog', 'ruamel')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *listed, imported = done.stdout.splitlines()
    assert imported == "['bakehouse', 'bakehouse.flags', 'bakehouse.program']"
    assert all(any(str(name) in line for line in listed) for name in TASKS)


def test_tasks_interrupted_while_importing_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def interrupted(name: str, *rest: Any, **more: Any) -> Any:
        if name == "bakehouse.cli":
            raise KeyboardInterrupt
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as caught:
        TASKS["recipes"].body(Context(), json=False, debug=False)
    assert caught.value.code == 130


def run(*argv: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import sys; from bakehouse.program import main; sys.argv[0] = 'bakehouse'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **env},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_command_bakehouse_finds_recipes_from_any_folder(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "BAKEHOUSE_HOME": str(tmp_path / "home")}
    (tmp_path / ".invoke.yaml").write_text("this: [is not for us")

    def listed(*argv: str, cwd: Path = tmp_path, **env: str) -> list[str]:
        done = run("recipes", "--json", *argv, cwd=cwd, env={**home, **env})
        assert done.returncode == 0, done.stderr
        return [row["name"] for row in json.loads(done.stdout)["result"]["recipes"]]

    def folder(name: str) -> Path:
        made = tmp_path / name
        made.mkdir(parents=True)
        (made / f"{made.parent.name.strip('.')}.yaml").write_text("schema: 1\n")
        return made

    assert "smollm2-cpu" in listed()
    config = folder("conf/bakehouse/recipes")
    assert listed(XDG_CONFIG_HOME=str(tmp_path / "conf")) == ["bakehouse"]
    here = folder("here/recipes")
    near = {"cwd": here.parent}
    assert listed(XDG_CONFIG_HOME=str(config.parents[1]), **near) == ["here"]  # type: ignore[arg-type]
    named, given = folder("named/x"), folder("given/x")
    assert listed(BAKEHOUSE_RECIPES=str(named), **near) == ["named"]  # type: ignore[arg-type]
    assert listed("--recipes", str(given), BAKEHOUSE_RECIPES=str(named)) == ["given"]
    refused = run("recipes", "--recipes", "", cwd=tmp_path, env=home)
    assert (refused.returncode, "--recipes is empty" in refused.stderr) == (2, True)


def test_command_bakehouse_prints_the_recipes_folder_that_it_uses(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "BAKEHOUSE_HOME": str(tmp_path / "home")}
    line = f"recipes folder: {ROOT / 'recipes'}"
    assert line in run("plan", "--recipe", "smollm2-cpu", cwd=tmp_path, env=home).stderr
    assert line not in run("show", "--recipe", "smollm2-cpu", cwd=tmp_path, env=home).stderr


def test_command_bakehouse_has_version_and_help(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    assert run("--version", cwd=tmp_path, env=env).stdout == "Bakehouse 0.1.0\n"
    assert "--machine" in run("--help", "fit", cwd=tmp_path, env=env).stdout
    unknown = run("serve", "--nonsense", cwd=tmp_path, env=env)
    assert (unknown.returncode, "Traceback" in unknown.stderr) == (1, False)


def test_scripts_check_their_arguments_before_installing_anything(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    wanted = {
        ("test", "nonsense"): (2, "unknown level 'nonsense'"),
        ("test", "lint", "nonsense"): (2, "unknown level 'nonsense'"),
        ("nightly",): (2, "no recipe given"),
        ("nightly", "--nonsense"): (2, "unknown option --nonsense"),
        ("nightly", "--help"): (0, "usage: "),
    }
    for (script, *rest), (code, message) in wanted.items():
        done = subprocess.run(
            ["bash", f"scripts/{script}", *rest],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, message in done.stdout + done.stderr) == (code, True), done.stderr
    assert not (tmp_path / ".venv").exists()
