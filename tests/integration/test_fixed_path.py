"""A work folder at a fixed path: seen by one command and its children, and gone with them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.build import builder
from bakehouse.build.artifact import Artifact
from bakehouse.context import Context
from bakehouse.engines.llamacpp.cmake import PLACE, Extra, fixed_place, mounting
from bakehouse.errors import BuildFailed
from bakehouse.host import read_host
from bakehouse.paths import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.types import BuildPlan
from bakehouse.runs.store import Run
from bakehouse.system import mount_namespace
from bakehouse.system.process import Finished, Processes, environment
from bakehouse.toolchain import find_tools
from tests.support.small_engine import FILES, small_lock, small_recipe, write_small

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def allowed(context: Context) -> None:
    if why := fixed_place(context):
        pytest.skip(why)


def run(folder: Path, *argv: str) -> Finished:
    return Processes().run((*mounting(str(folder)), *argv), env=environment())


def test_fixed_path_is_seen_by_the_command_only(tmp_path: Path) -> None:
    (tmp_path / "found").write_text("here\n")
    done = run(tmp_path, "sh", "-c", "pwd; cat found; id -u; echo made > made; exit 7")
    assert done.lines == (PLACE, "here", str(os.geteuid()))
    assert done.code == 7
    made = tmp_path / "made"
    assert (made.read_text(), made.stat().st_uid) == ("made\n", os.geteuid())
    assert list(Path(PLACE).iterdir()) == []


def test_fixed_path_of_two_commands_at_once(tmp_path: Path) -> None:
    said: dict[str, tuple[str, ...]] = {}

    def one(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "name").write_text(name)
        said[name] = run(folder, "sh", "-c", "sleep 0.3; cat name").lines

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {"a": ("a",), "b": ("b",)}


@pytest.mark.parametrize("kind", ["a file", "a link", "nowhere"])
def test_fixed_path_that_cannot_be_mounted(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "a file":
        place.touch()
    elif kind == "a link":
        place.symlink_to(tmp_path)
    else:
        place = Path("/proc/nowhere")
    argv = [*mounting(str(tmp_path)), "touch", "ran"]
    argv[argv.index(PLACE)] = str(place)
    done = Processes().run(argv, env=environment())
    assert done.code == mount_namespace.REFUSED
    assert f"no folder can be mounted at {place}" in done.lines[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_fixed_path_keeps_the_user(tmp_path: Path) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv")
    folder = Path("/tmp") / f"bakehouse-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    script = folder / "fixed_path.py"
    try:
        shutil.copyfile(str(mount_namespace.__file__), script)
        script.chmod(0o644)
        python = next(p for p in ("/usr/bin/python3", sys.executable) if os.access(p, os.X_OK))
        user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        argv = (*user, python, "-I", "-S", str(script), str(folder), PLACE, "--")
        done = subprocess.run(
            (*argv, "sh", "-c", "id -u; touch made"), capture_output=True, text=True, check=False
        )
        if done.returncode == mount_namespace.REFUSED:
            assert "no folder can be mounted" in done.stderr
            pytest.skip(done.stderr)
        assert (done.returncode, done.stdout) == (0, "65534\n"), done.stderr
        assert (folder / "made").stat().st_uid == 65534
    finally:
        shutil.rmtree(folder)


def test_fixed_path_command_ends_with_its_parent(tmp_path: Path) -> None:
    mark = f"31.{os.getpid()}"
    code = (
        "from bakehouse.system.process import Processes, environment\n"
        "from bakehouse.engines.llamacpp.cmake import mounting\n"
        f"argv = (*mounting({str(tmp_path)!r}), 'sh', '-c', 'setsid sleep {mark} & wait')\n"
        "Processes().run(argv, env=environment())\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 15
    while not sleeping(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 8
    while sleeping(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sleeping(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argv[:2] == [b"sleep", mark.encode()]:
            found.append(entry.name)
    return found


def planned(ctx: Context) -> BuildPlan:
    extra = Extra(place=PLACE, mount=mounting("{work}"))
    return plan_build(
        small_recipe(), small_lock(), find_tools(ctx), read_host(), ctx.places, extra=extra
    )


def build(ctx: Context, monkeypatch: pytest.MonkeyPatch, **changes: str) -> Artifact:
    monkeypatch.setattr(
        builder,
        "write_source",
        lambda _c, _k, target: write_small(
            target, {k.replace("__", "."): v for k, v in changes.items()}
        ),
    )
    with Run.start(ctx, "build", "small") as record:
        return builder.ensure(ctx, small_lock(), planned(ctx), record)


def test_fixed_path_build_names_fixed_paths(
    context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The paths in the objects are the fixed ones, without any help of a prefix map."""
    seen = FILES["ggml.c"].replace("__FILE__", "WHERE")
    lists = FILES["CMakeLists.txt"] + (
        'target_compile_definitions(ggml PRIVATE "WHERE=\\"${CMAKE_CURRENT_SOURCE_DIR}\\"")\n'
    )
    contents = []
    for name in ("one", "another"):
        ctx = replace(context, places=Places(tmp_path / name / "c", tmp_path / name / "s"))
        made = build(ctx, monkeypatch, ggml__c=seen, CMakeLists__txt=lists)
        library = Path(made.folder, "bin", "libggml.so.0").read_bytes()
        assert f"{PLACE}/src".encode() in library
        assert str(tmp_path).encode() not in library
        contents.append(made.content)
    assert contents[0] == contents[1]
    broken = replace(context, places=Places(tmp_path / "c", tmp_path / "s"))
    with pytest.raises(BuildFailed) as error:
        build(broken, monkeypatch, server__cpp="int main() { return wrong; }\n")
    assert (error.value.where or "").startswith("server.cpp:1:")


def test_fixed_path_is_shown_in_the_plan(context: Context) -> None:
    plan = planned(context)
    argv = plan.step("configure").argv
    assert argv[: argv.index("--") + 1] == mounting(plan.work)
    assert plan.bare("configure")[1:3] == ("-S", f"{PLACE}/src")
    assert plan.bare("verify") == plan.step("verify").argv
    assert plan.step("compile").env["TMPDIR"] == f"{PLACE}/tmp"
    assert plan.step("install").env["TMPDIR"] == f"{plan.work}/tmp"
