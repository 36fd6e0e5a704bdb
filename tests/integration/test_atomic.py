"""What a writer leaves that is killed in the middle goes with the next write, and nothing else."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bakehouse.util import files

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
HALT = """
import os, sys, time
from datetime import UTC, datetime
from pathlib import Path
from bakehouse.util import files
def halt(*_):
    print("in the middle", flush=True)
    time.sleep(60)
vars(files.os)["replace"] = halt
folder = Path(sys.argv[1])
"""
WRITERS = {
    "lock": (
        "recipes/r.lock.json",
        (
            "from bakehouse.lock import Lock\nfrom bakehouse.resolver import _write\n"
            "_write(folder / 'recipes/r.lock.json',"
            " Lock(recipe='r', engine='llama.cpp', wants='', weights={}))"
        ),
    ),
    "manifest": (
        "patches/o/n/7.yaml",
        (
            "from bakehouse.patches.manifest import Manifest\n"
            "from bakehouse.patches.manifest import write_manifest\n"
            "write_manifest(folder / 'patches/o/n/7.yaml',"
            " Manifest(id='7', repo='o/n', source='https://x.org/7'))"
        ),
    ),
    "vendored diff": (
        "patches/o/n/7.diff",
        (
            "from bakehouse.util.files import write_atomic\n"
            "write_atomic(folder / 'patches/o/n/7.diff', b'x' * 100_000)"
        ),
    ),
    "golden values": (
        "recipes/golden/" + "0" * 16 + "-f16.json",
        (
            "from bakehouse.probe.golden import write_golden\n"
            "from bakehouse.probe.models import Golden, ServedModel\n"
            "known = ServedModel(weights16='0' * 16, kv_cache='f16', backend='cpu', identity='',"
            " goldens=folder / 'recipes/golden')\n"
            "write_golden(known, Golden.model_construct())"
        ),
    ),
    "kept patch": (
        "home/cache/patches/" + "a" * 64 + ".patch",
        (
            "from bakehouse.paths import Places\nfrom bakehouse.patches.apply import keep\n"
            "keep(Places(folder / 'home/cache', folder / 'home/state'), 'a' * 64, b'diff')"
        ),
    ),
}


@contextmanager
def writing(folder: Path, words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of a write: all is written, and not yet in its place."""
    child = subprocess.Popen(
        [sys.executable, "-c", HALT + words, str(folder)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "in the middle\n"
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f".*{files.SUFFIX}"))


@pytest.mark.parametrize("writer", WRITERS)
def test_atomic_write_removes_leftovers_of_killed_writers(writer: str, tmp_path: Path) -> None:
    name, words = WRITERS[writer]
    target = tmp_path / name
    target.parent.mkdir(parents=True)
    with writing(tmp_path, words) as child:
        (left,) = parts(tmp_path)
        assert left.parent == target.parent
        assert left.stat().st_size
        files.write(target.with_name("another"), b"new")
        assert parts(tmp_path) == [left], "its writer lives"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert parts(tmp_path) == [left]
    assert not target.exists()
    files.write(target.with_name("another"), b"newer")
    assert not parts(tmp_path)
    assert [p.name for p in target.parent.iterdir()] == ["another"]


def test_atomic_sweep_removes_a_record_that_was_cut_off(tmp_path: Path) -> None:
    words = (
        "from bakehouse.context import Context\nfrom bakehouse.paths import Places\n"
        "from bakehouse.runs.store import Run\n"
        "ctx = Context(places=Places(folder / 'cache', folder / 'state'), recipes=folder)\n"
        "with Run.start(ctx, 'build', 'r') as run:\n    run.save()\n"
    )
    with writing(tmp_path, words):
        assert len(parts(tmp_path)) == 1
    (left,) = parts(tmp_path)
    assert files.sweep(left.parent) == 1
    assert not parts(tmp_path)


def test_atomic_sweep_removes_only_own_files(tmp_path: Path) -> None:
    names = [".x.yaml.4711.tmp", "x.part", f"x{files.SUFFIX}", ".gitignore", ".x.bakehouse-part~"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    folder, link = tmp_path / f".d{files.SUFFIX}", tmp_path / f".l{files.SUFFIX}"
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    link.symlink_to(tmp_path / "precious")
    files.write(tmp_path / "y", b"data")
    there = {p.name for p in tmp_path.iterdir()}
    assert there == {*names, folder.name, link.name, "precious", "y"}
    assert (tmp_path / "precious").read_text() == "mine"


def test_atomic_write_keeps_the_old_file_on_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    files.write(path, b"old")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_atomic_write_uses_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "x", b"data")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_atomic_write_without_file_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / f".x.1{files.SUFFIX}").write_bytes(b"whose?")
    files.write(tmp_path / "x", b"data")
    assert (tmp_path / "x").read_bytes() == b"data"
    assert len(parts(tmp_path)) == 1


def test_atomic_write_with_long_names(tmp_path: Path) -> None:
    files.write(tmp_path / ("n" * 255), b"data")
    files.write(tmp_path / ("ü" * 120), b"data")
    assert len(list(tmp_path.iterdir())) == 2


def test_atomic_write_from_many_threads(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(100):
                files.write(tmp_path / f"x{turn % 3}", b"%d" % number * 1000, sync=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x0", "x1", "x2"]
    assert all(len(set(p.read_bytes())) == 1 for p in tmp_path.iterdir())
