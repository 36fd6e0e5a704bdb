"""Running a task: one JSON document whatever happens, an error in three lines, the exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from bakehouse import errors, flags
from bakehouse.cli import main, make_options
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, Fault, RecipeError, UsageError
from bakehouse.models import check
from bakehouse.runs.store import Run

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"
CHECK = check("offload", "33/33", "0/33", "server.log:7", ok=False)


@dataclass(frozen=True)
class Options:
    word: str = "none"
    flag: bool = False
    all_: bool = False
    set_: tuple[str, ...] = ()
    module = "try"
    function = "run"


Body = Callable[[Context, Any], Outcome]
Install = Callable[[Body], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Give a way to make the task `try` do something."""
    monkeypatch.setenv("BAKEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_TOKEN", SECRET)

    def put(body: Body) -> None:
        module = types.ModuleType("bakehouse.commands.try")
        module.__dict__.update(run=body)
        monkeypatch.setitem(cast(Any, flags.TASKS), "try", Options)
        monkeypatch.setitem(sys.modules, "bakehouse.commands.try", module)

    return put


def raises(error: BaseException) -> Body:
    def body(ctx: Context, options: Any) -> Outcome:
        raise error

    return body


def call(capfd: pytest.CaptureFixture[str], **options: Any) -> tuple[int, dict[str, Any], str]:
    code = main("try", options, json=True)
    printed = capfd.readouterr()
    document = json.loads(printed.out)
    assert set(document) == {"schema", "task", "ok", "exit", "result", "checks", "error"}
    assert (document["schema"], document["task"]) == (1, "try")
    assert (document["exit"], document["ok"]) == (code, code == 0)
    return code, document, printed.err


def every_class() -> list[type[BakehouseError]]:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    return [k for k in kinds if issubclass(k, BakehouseError) and k is not RecipeError]


def test_cli_prints_every_class_of_error(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind in every_class():
        install(raises(kind("it broke", where="file:3", hint="fix it", checks=[CHECK])))
        code, document, _ = call(capfd)
        assert code == kind.exit_code
        assert document["error"] == {
            "id": kind.default_id, "what": "it broke", "where": "file:3", "hint": "fix it",
        }  # fmt: skip
        assert document["checks"] == [CHECK.to_data()]
        assert main("try", {}) == kind.exit_code
        printed = capfd.readouterr()
        assert printed.out == ""
        assert printed.err.splitlines() == [
            "failed   offload  expected: 33/33; observed: 0/33; at: server.log:7",
            "error: it broke",
            "  at:   file:3",
            "  hint: fix it",
        ]


def test_cli_recipe_error_has_its_faults(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [Fault("a.yaml", 3, 5, "unknown key 'bild'", "build?"), Fault("a.yaml", 0, 0, "no")]
    install(raises(RecipeError("two faults", faults)))
    code, document, _ = call(capfd)
    assert code == 2
    assert document["result"]["faults"][1]["line"] == 3
    assert "a.yaml:3:5: unknown key 'bild' (build?)" in document["error"]["where"]


def test_cli_explains_other_exceptions(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    wanted: list[tuple[BaseException, int, str]] = [
        (KeyboardInterrupt("SIGTERM"), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by zero"), 1, "unexpected"),
        (SystemExit(0), 1, "unexpected"),
        (RecursionError("deep"), 1, "unexpected"),
        (MemoryError(), 9, "environment"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 9, "environment"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), 9, "environment"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 9, "environment"),
        (OSError(errno.EMFILE, "Too many open files"), 9, "environment"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), 1, "unexpected"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "unexpected"),
    ]
    for error, code, id_ in wanted:
        install(raises(error))
        exit_code, document, err = call(capfd)
        assert (exit_code, document["error"]["id"]) == (code, id_), error
        assert "Traceback" not in err
        main("try", {})
        assert "Traceback" not in capfd.readouterr().err


def test_cli_saves_the_traceback_of_a_bug(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(raises(ValueError(f"token {SECRET}")))
    _, document, _ = call(capfd)
    details = Path(document["error"]["where"]).read_text()
    assert "Traceback" in details
    assert SECRET not in details
    assert SECRET not in json.dumps(document)

    def in_a_run(ctx: Context, options: Any) -> Outcome:
        with Run.start(ctx, "serve", "x"):
            raise ValueError("inside")

    install(in_a_run)
    _, document, _ = call(capfd)
    assert document["error"]["where"] == document["result"]["record"] + "/traceback.txt"
    assert Path(document["error"]["where"]).exists()


def test_cli_debug_prints_the_traceback_without_secrets(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(raises(UsageError(f"bad {SECRET}")))
    assert main("try", {}, debug=True) == 2
    printed = capfd.readouterr()
    assert "Traceback" in printed.err
    assert SECRET not in printed.err + printed.out


def test_cli_debug_logs_children_to_standard_error(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(ctx: Context, options: Any) -> Outcome:
        ctx.processes.capture(["true", SECRET], env={"PATH": os.environ["PATH"]})
        return Outcome({})

    install(body)
    assert main("try", {}, json=True, debug=True) == 0
    printed = capfd.readouterr()
    json.loads(printed.out)
    logged = json.loads(printed.err.splitlines()[0])
    assert (logged["event"], logged["argv"][0]) == ("process", "true")
    assert SECRET not in printed.err
    assert main("try", {}, debug=False) == 0
    assert capfd.readouterr().err == ""


def test_cli_prints_a_result_as_text_and_as_json(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    passed = check("stamp", "b1", "b1", "log:1", ok=True)

    def body(ctx: Context, options: Any) -> Outcome:
        print("a library that prints")
        ctx.progress.say("working")
        text = f"READY \x1b[31mred\x1b[0m {SECRET}"
        return Outcome({"url": "http://x", "odd": float("nan"), "key": SECRET}, text, (passed,))

    install(body)
    code, document, err = call(capfd)
    assert (code, document["result"]["url"]) == (0, "http://x")
    assert document["result"]["odd"] == "nan"
    assert SECRET not in json.dumps(document)
    assert "a library that prints" in err
    assert main("try", {}) == 0
    printed = capfd.readouterr()
    assert printed.err == "working\n"
    assert printed.out.splitlines() == [
        "a library that prints",
        "passed   stamp  b1",
        "READY \\x1b[31mred\\x1b[0m [hidden]",
    ]


def test_cli_prints_a_result_and_an_error_together(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    error = errors.NotCorrect("wrong", where="there")
    install(lambda ctx, options: Outcome({"n": 1}, "seen", (CHECK,), error=error))
    code, document, _ = call(capfd)
    assert (code, document["result"], document["error"]["id"]) == (8, {"n": 1}, "not-correct")
    assert main("try", {}) == 8
    printed = capfd.readouterr()
    assert printed.out.splitlines()[-1] == "seen"
    assert printed.err.splitlines()[0] == "error: wrong"


def test_cli_prints_lines_as_they_come(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    def lines() -> Iterator[str]:
        yield "one\x07"
        yield f"two {SECRET}"

    install(lambda ctx, options: Outcome({"n": 2}, "log", lines=lines()))
    assert main("try", {}) == 0
    assert capfd.readouterr().out == "log\none\\x07\ntwo [hidden]\n"
    assert call(capfd)[1]["result"] == {"n": 2}


def test_cli_options_by_the_names_of_flags(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"word": None, "flag": True, "all_": True, "set_": ["a=1", "b=2"]}
    assert make_options(Options, given) == Options("none", True, True, ("a=1", "b=2"))
    install(lambda ctx, options: Outcome(dict(vars(options))))
    code, document, _ = call(capfd, bogus="x")
    assert code == 2
    assert "--bogus" in document["error"]["what"]


def test_cli_refuses_an_empty_value(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    """`--word=$UNSET` would otherwise be read as no flag."""
    install(lambda ctx, options: Outcome(dict(vars(options))))
    code, document, _ = call(capfd, word="")
    assert code == 2
    assert "--word" in document["error"]["what"]


def test_cli_unknown_task(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    assert main("nonesuch", {}, json=True) == 1
    assert json.loads(capfd.readouterr().out)["error"]["id"] == "unexpected"


def test_cli_without_a_home_folder(
    install: Install, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BAKEHOUSE_HOME", "HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(nobody))
    install(lambda ctx, options: Outcome({}))
    code, document, _ = call(capfd)
    assert code == 9
    assert "BAKEHOUSE_HOME" in document["error"]["hint"]


def test_cli_state_folder_that_is_not_writable(
    install: Install,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "home").write_text("a file in the way")

    def body(ctx: Context, options: Any) -> Outcome:
        with Run.start(ctx, "serve", "x"):
            pytest.fail("must not begin")

    install(body)
    code, document, _ = call(capfd)
    assert (code, document["error"]["id"]) == (9, "state-not-writable")
    install(raises(ValueError("boom")))
    code, document, err = call(capfd)
    assert code == 1
    assert "could not be saved" in document["error"]["where"]
    assert "Traceback" not in err
