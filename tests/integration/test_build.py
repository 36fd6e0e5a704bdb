"""Builds of a small project with the real CMake, Ninja, compilers and linker."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bakehouse.build import builder
from bakehouse.build.artifact import Artifact, Damaged, verify
from bakehouse.context import Context
from bakehouse.errors import BuildFailed, HostError
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.plan.types import BuildPlan
from bakehouse.runs.store import Run
from tests.support.small_engine import FILES, small_lock, small_plan, write_small

pytestmark = pytest.mark.integration


def build(ctx: Context, plan: BuildPlan, lock: Lock | None = None) -> Artifact:
    with Run.start(ctx, "build", "small") as run:
        return builder.ensure(ctx, lock or small_lock(), plan, run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The source is the small project; a test may change its files."""
    changes: dict[str, str] = {}

    def write(_ctx: Context, _lock: Lock, target: Path) -> None:
        write_small(target, changes)

    monkeypatch.setattr(builder, "write_source", write)
    return changes


def home(path: Path, **environment: str) -> Context:
    return Context(
        places=Places(path / "cache", path / "state"),
        recipes=path,
        environment={**os.environ, **environment},
    )


def left_over(ctx: Context) -> list[str]:
    """What lies in the builds folder beside finished artifacts and locks."""
    builds = ctx.places.builds
    found = [p for p in builds.iterdir() if p.name not in {".work", ".locks", ".seen", ".damaged"}]
    half = [str(p) for p in found if not (p / "build.json").exists()]
    return half + [str(p) for p in (builds / ".work").iterdir() if p.is_dir()]


def files_of(artifact: Artifact) -> dict[str, bytes]:
    return {f.path: (Path(artifact.folder) / f.path).read_bytes() for f in artifact.files}


def test_build_is_reused(context: Context, small: dict[str, str]) -> None:
    plan = small_plan(context)
    first = build(context, plan)
    assert not first.reused
    said = subprocess.run([first.server], capture_output=True, text=True, check=True, env={})
    assert said.stdout.splitlines() == [
        "/build/src/ggml.c",
        "/build/src/llama.cpp",
        "Nov 14 2023 22:13:20",
        "/build/build/build-info.cpp",
        "hello",
    ]
    assert [(f.path, f.mode) for f in first.files] == [
        ("bin/libggml.so.0", "0644"),
        ("bin/libllama.so.0", "0644"),
        ("bin/llama-server", "0755"),
    ]
    assert {c.verdict.value for c in first.checks} == {"passed"}
    for check in first.checks:
        where = check.where.rpartition(" in ")[2]
        assert Path(where).exists(), "what a check names is still there after the build"
    assert "configure.used" not in {c.id for c in first.checks}, "this recipe defines nothing"
    again = build(context, plan)
    assert again.reused
    assert again.files == first.files
    assert again.seconds < 2
    assert left_over(context) == []


def test_build_sees_the_pin_and_no_repository_around_it(
    context: Context, small: dict[str, str]
) -> None:
    context.places.cache.mkdir(parents=True)
    for argv in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "around"]):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(context.places.cache), *who, *argv], check=True)
    with Run.start(context, "build", "small") as run:
        builder.ensure(context, small_lock(), small_plan(context), run)
    log = (run.folder / "02-configure.log").read_text()
    assert "tree commit: abcdef012\n" in log


@pytest.mark.parametrize("launcher", ["with", "without"])
def test_build_gives_the_same_bytes_in_two_places(
    tmp_path: Path, small: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher == "without":
        monkeypatch.setattr("bakehouse.toolchain.LAUNCHER", "no-such-cache")
    elif not shutil.which("ccache"):
        pytest.skip("no ccache here")
    short = home(tmp_path / "a")
    long = home(tmp_path / "a much longer name with blanks" / ("x" * 80))
    one, other = (build(ctx, small_plan(ctx)) for ctx in (short, long))
    assert files_of(one) == files_of(other)
    assert (one.digest, one.content) == (other.digest, other.content)
    monkeypatch.setattr("bakehouse.toolchain.LAUNCHER", "no-such-cache")
    plain = home(tmp_path / "no cache")
    assert files_of(build(plain, small_plan(plain))) == files_of(one), "a cache changes no byte"


def test_build_uses_the_compiler_cache(context: Context, small: dict[str, str]) -> None:
    if not shutil.which("ccache"):
        pytest.skip("no ccache here")
    first = build(context, small_plan(context))
    shutil.rmtree(first.folder)
    again = build(context, small_plan(context))
    assert files_of(again) == files_of(first)
    stats = subprocess.run(
        ["ccache", "--print-stats"],
        env={"CCACHE_DIR": str(context.places.compiler_cache), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    counts = dict(line.split("\t") for line in stats.splitlines())
    hits = int(counts["direct_cache_hit"]) + int(counts["preprocessed_cache_hit"])
    assert hits >= 4


def test_build_with_another_flag_is_another_artifact(
    context: Context, small: dict[str, str]
) -> None:
    one = build(context, small_plan(context))
    other = build(context, small_plan(context, {"CMAKE_CXX_FLAGS": "-DNOTHING=1"}))
    assert one.digest != other.digest
    assert Path(one.folder).exists()
    assert Path(other.folder).exists()
    flags = "-DNOTHING=1 -ffile-prefix-map="
    plan = small_plan(context, {"CMAKE_CXX_FLAGS": "-DNOTHING=1"})
    assert any(a.startswith(f"-DCMAKE_CXX_FLAGS={flags}") for a in plan.step("configure").argv)


def test_build_passes_definitions_byte_for_byte(context: Context, small: dict[str, str]) -> None:
    greeting = 'set(SMALL_GREETING "hello" CACHE STRING "what the server says")\n'
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"].replace(
        greeting, greeting + 'file(WRITE "${CMAKE_BINARY_DIR}/seen" "${SMALL_GREETING}")\n'
        'file(COPY "${CMAKE_BINARY_DIR}/seen" DESTINATION "$ENV{TEST_SEEN}")\n'
        "set(SMALL_GREETING plain)\n",
    )  # fmt: skip
    seen = context.places.cache / "seen"
    env = {"TEST_SEEN": str(seen.parent)}
    for value in ("two words; a;b;c", "$HOME `x` $(y)", "back\\\\slash ü"):
        plan = small_plan(context, {"SMALL_GREETING": value})
        steps = tuple(s.model_copy(update={"env": {**s.env, **env}}) for s in plan.steps)
        build(context, plan.model_copy(update={"steps": steps}))
        assert seen.read_text() == value


def expect(kind: type[BuildFailed | HostError], ctx: Context, plan: BuildPlan) -> str:
    """Build, expect a failure, and give its text; nothing may be left behind."""
    with pytest.raises(kind) as caught:
        build(ctx, plan)
    assert left_over(ctx) == []
    assert not Path(plan.artifact).exists()
    return f"{caught.value.what}\n{caught.value.where}\n{caught.value.hint}"


def test_build_reports_the_first_of_several_errors(context: Context, small: dict[str, str]) -> None:
    small["llama.cpp"] = FILES["llama.cpp"] + "int broken = missing_one;\nint more = missing_two;\n"
    small["server.cpp"] = "#include <not-there.h>\n"
    said = expect(BuildFailed, context, small_plan(context, jobs=1))
    assert "missing_one" in said or "not-there.h" in said
    assert "missing_two" not in said
    assert "llama.cpp:13:14, " in said or "server.cpp:1:10, " in said
    assert "compile.log:" in said


def test_build_reports_a_missing_symbol(context: Context, small: dict[str, str]) -> None:
    small["server.cpp"] = "void nowhere();\nint main() { nowhere(); }\n"
    said = expect(BuildFailed, context, small_plan(context))
    assert "undefined reference to `nowhere()'" in said
    assert "server.cpp" in said


def test_build_reports_the_first_cmake_error(context: Context, small: dict[str, str]) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"].replace(
        "find_package(Git)", 'message(FATAL_ERROR "no\n  such luck")\nmessage(FATAL_ERROR "second")'
    )
    said = expect(BuildFailed, context, small_plan(context))
    assert "configure failed: no such luck\nCMakeLists.txt:11, " in said
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"] + "\nset(X\n"
    said = expect(BuildFailed, context, small_plan(context))
    assert "Parse error" in said
    assert "CMakeLists.txt" in said


def test_build_stops_before_compiling_for_a_typo_in_a_definition(
    context: Context, small: dict[str, str]
) -> None:
    plan = small_plan(context, {"SMAL_GREETING": "x"})
    said = expect(BuildFailed, context, plan)
    assert "SMAL_GREETING is not used (did you mean SMALL_GREETING?)" in said
    runs = list(context.places.runs.glob("*/*compile.log"))
    assert runs == []


READS_ALL = """
get_cmake_property(names VARIABLES)
foreach(name IN LISTS names)
    if(name MATCHES "^GGML_")
        string(APPEND expanded "${${name}}")
    endif()
endforeach()
"""
"""What ggml/CMakeLists.txt does, and by which CMake takes every GGML_ name for read."""


def test_build_stops_for_a_typo_that_the_project_seems_to_read(
    context: Context, small: dict[str, str]
) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"] + READS_ALL
    said = expect(BuildFailed, context, small_plan(context, {"GGML_NATIV": True}))
    assert "GGML_NATIV is not used (did you mean GGML_NATIVE?)" in said
    assert list(context.places.runs.glob("*/*compile.log")) == []


def test_build_takes_a_definition_that_is_read_and_not_declared(
    context: Context, small: dict[str, str]
) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"] + READS_ALL
    small["cuda.cmake"] = "if (GGML_CUDA_DEBUG)\nendif()\n"
    made = build(context, small_plan(context, {"GGML_CUDA_DEBUG": True}))
    assert not made.reused
    assert Path(made.server).is_file()


def test_build_refuses_a_target_that_does_not_exist(
    context: Context, small: dict[str, str]
) -> None:
    plan = small_plan(context, targets=("llama-server", "llama-benhc"))
    assert "llama-benhc does not exist (did you mean llama-bench?)" in expect(
        BuildFailed, context, plan
    )


def test_build_refuses_a_project_that_overrides_forced_definitions(
    context: Context, small: dict[str, str]
) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"].replace(
        "find_package(Git)", 'set(LLAMA_BUILD_UI ON CACHE BOOL "" FORCE)\nfind_package(Git)'
    )
    said = expect(BuildFailed, context, small_plan(context))
    assert "configure.forced failed: LLAMA_BUILD_UI=ON" in said


def test_build_refuses_a_server_that_dies_by_sigill(
    context: Context, small: dict[str, str]
) -> None:
    small["server.cpp"] = "#include <csignal>\nint main() { std::raise(SIGILL); }\n"
    said = expect(BuildFailed, context, small_plan(context))
    assert "ended by SIGILL (it contains instructions that this CPU does not have)" in said


def test_build_refuses_a_server_with_another_stamp(context: Context, small: dict[str, str]) -> None:
    small["build-info.cpp.in"] = FILES["build-info.cpp.in"].replace(
        "@LLAMA_BUILD_COMMIT@", "unknown"
    )
    said = expect(BuildFailed, context, small_plan(context))
    assert "commit unknown" in said
    assert "expected: build 77, commit abcdef012" in said


def test_build_refuses_another_run_path(context: Context, small: dict[str, str]) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"] + (
        "set_target_properties(llama-server PROPERTIES INSTALL_RPATH /opt/elsewhere)\n"
    )
    assert "/opt/elsewhere" in expect(BuildFailed, context, small_plan(context))


def test_build_ignores_a_strict_umask(context: Context, small: dict[str, str]) -> None:
    before = os.umask(0o077)
    try:
        done = build(context, small_plan(context))
    finally:
        os.umask(before)
    folder = Path(done.folder)
    paths = [folder, *sorted(folder.rglob("*"))]
    assert [oct(p.stat().st_mode & 0o7777) for p in paths] == [
        "0o755", "0o755", "0o644", "0o644", "0o755", "0o644"
    ]  # fmt: skip


def test_build_installs_modules_and_libraries(context: Context, small: dict[str, str]) -> None:
    small["CMakeLists.txt"] = FILES["CMakeLists.txt"] + (
        "add_library(ggml-cpu-haswell MODULE ggml.c)\n"
        "add_dependencies(llama-server ggml-cpu-haswell)\n"
        "add_library(never-built MODULE ggml.c)\n"
        "add_library(alone SHARED ggml.c)\n"
    )
    done = build(context, small_plan(context, targets=("llama-server", "alone")))
    assert [f.path.removeprefix("bin/") for f in done.files] == [
        "libalone.so",
        "libggml-cpu-haswell.so",
        "libggml.so.0",
        "libllama.so.0",
        "llama-server",
    ]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    found = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def _dangle(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/no/where")


def _other_record(folder: Path) -> None:
    record = folder / "build.json"
    record.write_text(record.read_text().replace('"number": 77', '"number": 78'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "one bit, with its old time": lambda f: _flip(f / "bin" / "libllama.so.0"),
    "cut": lambda f: os.truncate(f / "bin" / "llama-server", 100),
    "gone": lambda f: (f / "bin" / "libggml.so.0").unlink(),
    "mode": lambda f: (f / "bin" / "llama-server").chmod(0o644),
    "link": lambda f: _link(f / "bin" / "libggml.so.0"),
    "stranger": lambda f: (f / "bin" / "libggml-evil.so").write_bytes(b""),
    "no record": lambda f: (f / "build.json").unlink(),
    "record cut": lambda f: os.truncate(f / "build.json", 50),
    "record of another build": _other_record,
    "empty folder": _empty,
    "a file in its place": _replace_by_file,
    "a link to nothing": _dangle,
}


def test_artifact_damage_is_found(context: Context, small: dict[str, str], tmp_path: Path) -> None:
    first = build(context, small_plan(context))
    for number, (kind, damage) in enumerate(DAMAGE.items()):
        for seen_before in (False, True):
            folder = tmp_path / f"{number}-{seen_before}" / first.digest
            shutil.copytree(first.folder, folder)
            if seen_before:
                assert verify(folder).content == first.content
            damage(folder)
            with pytest.raises(Damaged):
                verify(folder)
                pytest.fail(f"not found: {kind}")


def test_artifact_that_is_damaged_is_built_again(context: Context, small: dict[str, str]) -> None:
    first = build(context, small_plan(context))
    _flip(Path(first.folder) / "bin" / "libllama.so.0")
    listening = Listening([])
    talking = Context(places=context.places, recipes=context.recipes, progress=listening)
    again = build(talking, small_plan(context))
    assert not again.reused
    assert files_of(again) == files_of(first)
    assert any(
        "the artifact is damaged (bin/libllama.so.0 has changed since the build)" in line
        for line in listening.said
    )
    assert build(context, small_plan(context)).reused
    assert (context.places.builds / ".damaged" / first.digest).exists()


class Listening:
    """Progress that remembers what it was told."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.updates: list[tuple[float, float | None]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def bar(self, title: str, unit: str = "") -> Listening:
        self.said.append(title)
        return self

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        self.updates.append((done, total))


def test_build_progress_comes_from_ninja(context: Context, small: dict[str, str]) -> None:
    listening = Listening([])
    ctx = Context(places=context.places, recipes=context.recipes, progress=listening)
    build(ctx, small_plan(context))
    totals = {total for _, total in listening.updates}
    assert len(totals) == 1
    assert listening.updates[-1][0] == listening.updates[-1][1]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a file system of so many KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(size: int) -> Path:
        argv = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(argv, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("size", [8, 64, 200, 300, 350, 400, 500, 560])
def test_build_on_a_full_disk_leaves_nothing(
    context: Context, small: dict[str, str], disk: Callable[[int], Path], size: int
) -> None:
    folder = disk(size)
    ctx = Context(places=Places(folder / "cache", context.places.state), recipes=folder)
    plan = small_plan(ctx)
    try:
        build(ctx, plan)
    except HostError as error:
        assert "the disk is full" in error.what  # noqa: PT017 - the larger ones may be enough
    else:
        assert size > 400
        return
    if ctx.places.builds.exists():
        assert left_over(ctx) == []
    assert not Path(plan.artifact).exists()


def test_build_reports_a_cache_folder_that_is_not_writable(
    context: Context, small: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ctx = Context(
        places=Places(tmp_path / "file" / "cache", context.places.state), recipes=context.recipes
    )
    with pytest.raises(HostError) as caught:
        build(ctx, small_plan(ctx))
    assert "BAKEHOUSE_HOME" in (caught.value.hint or "")
