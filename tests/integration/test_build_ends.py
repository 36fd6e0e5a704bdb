"""Builds that are interrupted, killed, or run twice at once: no half artifact, no child left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


class Driver:
    """A build in a process of its own."""

    def __init__(self, home: Path, slow: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.build_driver", str(home), slow],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, text: str) -> list[str]:
        """Read its output until a line holds `text`."""
        assert self.child.stdout
        seen = []
        for line in self.child.stdout:
            seen.append(line.rstrip())
            if text in line:
                return seen
        raise AssertionError(f"no '{text}' in {seen}")

    def result(self) -> dict[str, object]:
        out, _ = self.child.communicate(timeout=60)
        assert self.child.returncode == 0, out
        return dict(json.loads(out.splitlines()[-1]))

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(10)
        if self.child.stdout:
            self.child.stdout.close()


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.end()


def of_this_build(home: Path) -> list[str]:
    """Live processes that were started for a build of this home."""
    mark = f"HOME={home}/cache/builds/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def settle(home: Path) -> None:
    """Wait until no process of the build is left; the guard ends them within three seconds."""
    deadline = time.monotonic() + 8
    while left := of_this_build(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def half_made(home: Path) -> list[Path]:
    builds = home / "cache" / "builds"
    digests = [p for p in builds.glob("*") if not p.name.startswith(".")]
    return [p for p in digests if not (p / "build.json").exists()]


def finish(home: Path, drivers: list[Driver]) -> None:
    """A build after all that comes through and leaves no work folder."""
    (home / "slow").write_text("0")
    last = Driver(home, "compile")
    drivers.append(last)
    assert last.result()["folder"]
    assert not [p for p in (home / "cache" / "builds" / ".work").iterdir() if p.is_dir()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("slow", "sign"), [("configure", "configure"), ("compile", "1/"), ("compile", "5/")]
)
def test_build_ended_at_a_known_moment(
    tmp_path: Path, drivers: list[Driver], slow: str, sign: str, number: signal.Signals
) -> None:
    driver = Driver(tmp_path, slow)
    drivers.append(driver)
    driver.until(sign)
    deadline = time.monotonic() + 10
    while not any("sleep" in line for line in of_this_build(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.child.send_signal(number)
    driver.child.wait(10)
    settle(tmp_path)
    assert half_made(tmp_path) == []
    if number is not signal.SIGKILL:
        work = tmp_path / "cache" / "builds" / ".work"
        assert not [p for p in work.iterdir() if p.is_dir()], "an interrupted build cleans up"
    finish(tmp_path, drivers)


def test_build_killed_at_any_moment(tmp_path: Path, drivers: list[Driver]) -> None:
    (tmp_path / "slow").write_text("0")
    started = time.monotonic()
    whole = Driver(tmp_path, "compile")
    drivers.append(whole)
    artifact = Path(str(whole.result()["folder"]))
    takes = time.monotonic() - started
    steps = 8
    for step in range(steps):
        subprocess.run(["rm", "-rf", str(artifact)], check=True)
        driver = Driver(tmp_path, "compile")
        drivers.append(driver)
        time.sleep(takes * 0.3 + takes * 0.75 * step / steps)
        driver.child.kill()
        driver.child.wait(10)
        settle(tmp_path)
        assert half_made(tmp_path) == []
    finish(tmp_path, drivers)


def test_build_removes_leftovers_of_killed_builds(tmp_path: Path, drivers: list[Driver]) -> None:
    work = tmp_path / "cache" / "builds" / ".work"
    for name in ("0", "0-left-12", "3", "7-left-99"):
        (work / name / "src").mkdir(parents=True)
        (work / name / "src" / "read-only").touch(0o400)
    finish(tmp_path, drivers)
    assert sorted(p.name for p in work.iterdir()) == ["0.lock", "3.lock", "7.lock"]


def test_build_twice_at_once_builds_once(tmp_path: Path, drivers: list[Driver]) -> None:
    (tmp_path / "slow").write_text("2")
    first = Driver(tmp_path, "compile")
    drivers.append(first)
    first.until("configure")
    second = Driver(tmp_path, "compile")
    drivers.append(second)
    second.until("waiting for another process that is working on the same build")
    one, other = first.result(), second.result()
    assert one["reused"] is False
    assert other["reused"] is True
    assert one["content"] == other["content"]


def test_build_that_waits_goes_on_when_the_other_is_killed(
    tmp_path: Path, drivers: list[Driver]
) -> None:
    (tmp_path / "slow").write_text("60")
    first = Driver(tmp_path, "compile")
    drivers.append(first)
    first.until("1/")
    (tmp_path / "slow").write_text("0")
    second = Driver(tmp_path, "compile")
    drivers.append(second)
    second.until("waiting for another process")
    first.child.kill()
    assert second.result()["reused"] is False


def test_builds_of_different_plans_run_side_by_side(tmp_path: Path, drivers: list[Driver]) -> None:
    """They take different work folders, and both come out right."""
    (tmp_path / "slow").write_text("60")
    first = Driver(tmp_path, "compile")
    drivers.append(first)
    first.until("1/")
    environment = {**os.environ, "CC": "gcc", "PYTHONPATH": str(ROOT)}
    code = (
        "import tests.support.build_driver as d, tests.support.small_engine as s, sys\n"
        "sys.argv = ['', sys.argv[1], 'nothing']\n"
        "lock = s.small_lock('6' * 40, 78)\n"
        "d.small_lock = lambda: lock\n"
        "plan = d.small_plan\n"
        "d.small_plan = lambda ctx, jobs: plan(ctx, lock=lock, jobs=jobs)\n"
        "sys.exit(d.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reused"] is False
    assert "waiting" not in done.stdout
    assert of_this_build(tmp_path), "the first one still runs"
