"""The edge in real processes: signals, pipes, closed streams, kill -9, two writers, a full disk."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse.paths import Places
from bakehouse.runs.index import Index

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, types, time
from pathlib import Path
from dataclasses import dataclass
from bakehouse.cli import main
from bakehouse.context import Outcome
from bakehouse.flags import TASKS
from bakehouse.runs.store import Run

@dataclass(frozen=True)
class Options:
    how: str = ""
    module = "try"
    function = "run"

def run(ctx, options):
    if options.how == "long":
        return Outcome({"text": "x" * 10_000_000}, "line\\n" * 1_000_000)
    if options.how == "lines":
        return Outcome({}, lines=(f"line {n}" for n in range(10**9)))
    if options.how == "short":
        return Outcome({"done": True}, "done")
    with Run.start(ctx, "build", options.how) as run:
        with run.step("compile", ["sleep", "60"]) as step:
            print("STARTED", file=sys.stderr, flush=True)
            if options.how == "child":
                step.ended(ctx.processes.run(["sleep", "60"], env={"PATH": "/bin:/usr/bin"}))
            elif options.how == "wait":
                time.sleep(60)
        run.finish("built")
    return Outcome({}, "built")

module = types.ModuleType("bakehouse.commands.try")
module.run, TASKS["try"] = run, Options
sys.modules["bakehouse.commands.try"] = module
sys.exit(main("try", {"how": sys.argv[1]}, json="--json" in sys.argv))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if n in ("PATH", "LANG", "TMPDIR")}
    home = tmp_path / "home"
    return {**kept, "PYTHONPATH": str(ROOT), "BAKEHOUSE_HOME": str(home)}


def argv(how: str, *more: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, how, *more]


def start(env: dict[str, str], how: str, *more: str, **options: Any) -> subprocess.Popen[str]:
    """Start the program and wait until its step runs."""
    child = subprocess.Popen(
        argv(how, *more), env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options,
    )  # fmt: skip
    assert child.stderr is not None
    while "STARTED" not in (line := child.stderr.readline()):
        assert line, "the program ended early"
    return child


def record(env: dict[str, str]) -> dict[str, Any]:
    [file] = Path(env["BAKEHOUSE_HOME"]).glob("state/runs/*/record.json")
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def sleepers(session: int) -> list[str]:
    found = subprocess.run(
        ["ps", "-eo", "sess=,pid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=3) for line in found.stdout.splitlines()]
    return [" ".join(r) for r in rows if int(r[0]) == session and not r[2].startswith("Z")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("how", ["wait", "child"])
def test_signal_ends_a_task_cleanly(env: dict[str, str], number: int, how: str) -> None:
    child = start(env, how, "--json")
    began = time.monotonic()
    os.kill(child.pid, number)
    out, err = child.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert child.returncode == 130
    document = json.loads(out)
    assert document["error"]["id"] == "interrupted"
    assert signal.Signals(number).name in document["error"]["what"]
    assert "Traceback" not in err
    data = record(env)
    assert (data["exit"], data["error"]["id"], data["steps"][0]["id"]) == (
        130,
        "interrupted",
        "compile",
    )
    assert sleepers(child.pid) == []


def test_signals_in_a_row_count_as_one(env: dict[str, str]) -> None:
    child = start(env, "child")
    for _ in range(20):
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        time.sleep(0.005)
        if child.poll() is not None:
            break
    out, err = child.communicate(timeout=20)
    assert "Traceback" not in err
    assert "error: interrupted by" in err
    assert out == ""
    assert child.returncode == 130
    assert record(env)["exit"] == 130


def test_signal_hangup_stays_ignored(env: dict[str, str]) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    child = start(env, "wait", preexec_fn=ignore)
    os.kill(child.pid, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 130


def test_record_after_kill_9_is_unfinished(env: dict[str, str]) -> None:
    child = start(env, "child")
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=10)
    data = record(env)
    assert (data["ok"], data["verdict"], data["error"]) == (False, "unfinished", None)
    assert data["steps"][0]["argv"] == ["sleep", "60"]
    places = Places.from_environment(env)
    found, *_ = Index(places).list(limit=1)
    assert found.verdict == "unfinished"
    deadline = time.monotonic() + 5
    while sleepers(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers(child.pid) == []


def test_record_writers_lose_nothing(env: dict[str, str]) -> None:
    many = (
        "import sys\nfrom pathlib import Path\nfrom bakehouse.context import Context\n"
        "from bakehouse.paths import Places\nfrom bakehouse.runs.store import Run\n"
        "ctx = Context(places=Places.from_environment(), recipes=Path('.'))\n"
        "for n in range(25):\n"
        "    with Run.start(ctx, 'serve', sys.argv[1]) as run:\n"
        "        run.finish('READY')\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", many, f"r{n}"], env=env, stderr=subprocess.PIPE)
        for n in range(4)
    ]
    places = Places.from_environment(env)
    spoiled = 0
    while any(w.poll() is None for w in writers):
        if places.index.exists() and spoiled < 5:
            places.index.write_bytes(b"spoiled by somebody" * 500)
            spoiled += 1
        time.sleep(0.05)
    assert [(w.returncode, w.communicate()[1]) for w in writers] == [(0, b"")] * 4
    rows = Index(places).list(limit=1000)
    assert len(rows) == 100
    assert {r.verdict for r in rows} == {"READY"}
    with sqlite3.connect(places.index) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("how", ["long", "lines"])
def test_output_reader_may_go_away(env: dict[str, str], how: str, more: list[str]) -> None:
    if how == "lines" and more:
        pytest.skip("with --json lines are not asked for")
    child = subprocess.Popen(
        argv(how, *more), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == b""
    assert child.wait(20) == 0


def run(
    env: dict[str, str], redirect: str, how: str, *more: str
) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirect}', "sh", *argv(how, *more)]
    return subprocess.run(shell, env=env, capture_output=True, text=True, timeout=30, check=False)


def test_output_with_closed_streams(env: dict[str, str]) -> None:
    assert (done := run(env, ">&-", "short")).returncode == 0, done.stderr
    assert done.stderr == ""
    assert run(env, "2>&-", "short").stdout == "done\n"
    assert run(env, "<&- >&- 2>&-", "short").returncode == 0
    assert run(env, ">&-", "unknown-run", "--json").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_printed_is_an_error(env: dict[str, str]) -> None:
    done = run(env, ">/dev/full", "short", "--json")
    assert done.returncode == 9
    assert "could not be printed: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_in_any_terminal_encoding(env: dict[str, str]) -> None:
    program = PROGRAM.replace('"done")', '"Größe 你好 \\ud800")')
    for encoding in ("ascii", "latin-1", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", program, "short"],
            env={**env, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=30, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\\ud800" in done.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for next to nothing; only root may make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_full_is_reported(env: dict[str, str], small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 16384)
    done = run({**env, "BAKEHOUSE_HOME": str(small_disk)}, "", "run", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["id"]) == (9, "state-not-writable")
    assert "No space left" in document["error"]["what"]
    assert "Traceback" not in done.stderr


def test_disk_read_only_is_reported(env: dict[str, str], small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = run({**env, "BAKEHOUSE_HOME": str(small_disk)}, "", "run", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["id"]) == (9, "state-not-writable")
    assert "Read-only" in document["error"]["what"]


def invoke(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", *words],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_doctor_with_invoke(env: dict[str, str]) -> None:
    done = invoke(env, "doctor", "--json")
    document = json.loads(done.stdout)
    assert document["task"] == "doctor"
    assert done.returncode == document["exit"]
    assert {"python", "git", "cmake", "ninja", "cc", "cache"} <= set(document["result"]["needed"])


def test_doctor_on_a_bare_machine(env: dict[str, str]) -> None:
    bare = {**env, "PATH": "/nonexistent", "CC": "no-such-cc", "BAKEHOUSE_HOME": "/proc/nowhere"}
    done = invoke(bare, "doctor", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]["id"]) == (9, "environment")
    failed = {c["id"] for c in document["checks"] if c["verdict"] != "passed"}
    assert {"cc", "git", "cache", "state"} <= failed
    assert "apt-get install -y git" in document["error"]["hint"]
    assert "Traceback" not in done.stderr


def test_invoke_stops_after_a_failed_task(env: dict[str, str]) -> None:
    done = invoke(env, "probe", "--url", "nonsense", "doctor")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "python" not in done.stdout
