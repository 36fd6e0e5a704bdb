from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bakehouse.build.builder import check_version, moved
from bakehouse.build.error_parser import NinjaWatch
from bakehouse.cuda.elf import NotElf, read_dynamic
from bakehouse.engines.llamacpp.cmake import git_stand_in
from bakehouse.models import Verdict
from bakehouse.plan.build import plan_build
from bakehouse.system.process import Captured
from tests.support.small_engine import FAKE_HOST, FAKE_PLACES, FAKE_TOOLS, small_lock, small_recipe


def version(code: int, err: str) -> list[tuple[str, Verdict, str]]:
    said = Captured(("llama-server", "--version"), code, "", err)
    return [(c.id, c.verdict, c.observed) for c in check_version(said, "abcdef012", 77, "log")]


def test_version_check_compares_with_the_pin() -> None:
    for line in ("version: 0.6.0-dev (build 77, commit abcdef012)", "version: 77 (abcdef012)"):
        verdicts = [v for _, v, _ in version(0, f"noise\n{line}\nbuilt with GNU 12\n")]
        assert verdicts == [Verdict.PASSED, Verdict.PASSED]
    for wrong in (
        "build 77, commit unknown",
        "build 7, commit abcdef012",
        "build 77, commit abcdef012-dirty",
        "build 777, commit abcdef0123",
    ):
        assert version(0, f"version: 0.6.0-dev ({wrong})")[1][1] is Verdict.FAILED


def test_version_check_of_a_server_that_does_not_run() -> None:
    (runs, stamp) = version(-4, "")
    assert runs[1] is Verdict.FAILED
    assert "SIGILL" in runs[2]
    assert stamp[1] is Verdict.UNKNOWN
    (runs, _) = version(127, "error while loading shared libraries: libx.so: cannot open")
    assert "libx.so" in runs[2]


def test_ninja_status_moves_the_bar() -> None:
    seen: list[tuple[float, float | None, str]] = []

    class Bar:
        def update(self, done: float, total: float | None = None, note: str = "") -> None:
            seen.append((done, total, note))

    watch = NinjaWatch(Bar())
    for line in ["ninja: Entering directory", "[10/210 20.000] Building", "x.c:1: warning [1/2 3]"]:
        watch.line(line)
    assert seen == [(10, 210, "")]


def test_git_stand_in_reports_the_pin(tmp_path: Path) -> None:
    git = tmp_path / "git"
    git.write_text(git_stand_in(small_lock()))
    git.chmod(0o755)

    def ask(*argv: str) -> tuple[int, str]:
        done = subprocess.run([str(git), *argv], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip()

    assert ask("rev-parse", "--short", "HEAD") == (0, "abcdef012")
    assert ask("describe", "--always") == (0, "abcdef012")
    assert ask("rev-list", "--count", "HEAD") == (0, "77")
    assert ask("diff-index", "--quiet", "HEAD", "--", ".") == (0, "")
    assert ask("--version")[1].startswith("git version ")
    assert ask("log", "-1")[0] == 128


def test_elf_reader_reads_this_python() -> None:
    found = read_dynamic(Path(sys.executable).resolve())
    assert found
    assert any(name.startswith("libc.") for name in found.needed)


def test_elf_reader_refuses_cut_files_and_skips_others(tmp_path: Path) -> None:
    path, data = tmp_path / "x", Path(sys.executable).resolve().read_bytes()
    for other in (b"", b"text", b"\x7fEL"):
        path.write_bytes(other)
        assert read_dynamic(path) is None
    for size in (4, 5, 20, 63, 64, 100, 400, 1000):
        path.write_bytes(data[:size])
        with pytest.raises(NotElf, match="damaged ELF"):
            read_dynamic(path)


def test_build_plan_moves_to_another_work_folder() -> None:
    plan = plan_build(small_recipe(), small_lock(), FAKE_TOOLS, FAKE_HOST, FAKE_PLACES)
    other = Path(plan.work).with_name("13")
    there = moved(plan, other)
    assert plan.work not in there.to_data()["steps"].__str__()
    assert there.digest == plan.digest
    assert moved(plan, Path(plan.work)) is plan
