"""Tools as they are found and asked: the real compilers, and impostors of every kind."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse import toolchain
from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.system.process import Processes
from bakehouse.toolchain import find_tools

pytestmark = pytest.mark.integration


class Counting(Processes):
    """Counts the children that are started."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def capture(self, argv, **others):  # type: ignore[no-untyped-def]
        self.asked.append(tuple(argv))
        return super().capture(argv, **others)


def with_env(ctx: Context, **environment: str) -> Context:
    return replace(ctx, environment={**ctx.environment, **environment})


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def real(name: str) -> str:
    found = shutil.which(name)
    assert found
    return found


def test_tools_of_this_machine(context: Context) -> None:
    tools = find_tools(context)
    assert tools.cmake.version.count(".") >= 2
    for compiler in (tools.cc, tools.cxx):
        assert Path(compiler.path).is_absolute()
        assert "target " in compiler.identity
        assert "; as " in compiler.identity
        assert "; ld " in compiler.identity
        assert "; glibc 2." in compiler.identity
        assert compiler.path not in compiler.identity
    assert "; libstdcxx " in tools.cxx.identity


def test_tools_compiler_by_two_names_is_one(context: Context) -> None:
    if os.path.realpath(real("cc")) != os.path.realpath(real("gcc")):
        pytest.skip("cc is not gcc here")
    plain = find_tools(context)
    named = find_tools(with_env(context, CC="gcc", CXX="g++"))
    assert plain.cc.identity == named.cc.identity
    assert plain.cxx.identity == named.cxx.identity


def test_tools_are_identified_once(context: Context) -> None:
    first, second = Counting(), Counting()
    one = find_tools(replace(context, processes=first))
    other = find_tools(replace(context, processes=second))
    assert one == other
    assert len(first.asked) > 5
    assert second.asked == []


def test_tools_that_change_are_identified_again(context: Context, tmp_path: Path) -> None:
    gcc = real("gcc")
    fake = script(tmp_path / "bin" / "mycc", f'exec {gcc} "$@"')
    ctx = with_env(context, CC=str(fake))
    assert find_tools(ctx).cc.path == str(fake)
    script(fake, f'[ "$1" = --version ] && echo "mycc (Other) 99.1.0" && exit\nexec {gcc} "$@"')
    assert find_tools(ctx).cc.identity.startswith("(Other) 99.1.0; ")


def test_tools_cache_that_is_damaged_is_ignored(context: Context) -> None:
    good = find_tools(context)
    for damage in ("", "{", "[]", '{"c /usr/bin/cc": 3}', '{"c /usr/bin/cc": {}}'):
        (context.places.cache / toolchain.MEMORY_FILE).write_text(damage)
        assert find_tools(context) == good


def test_tools_are_identified_without_the_users_environment(context: Context) -> None:
    odd = with_env(context, LC_ALL="de_DE.UTF-8", GCC_COLORS="error=1", CFLAGS="-m32", CPATH="/x")
    assert find_tools(odd).cc == find_tools(context).cc


@pytest.mark.parametrize("cache", ["ccache", "sccache"])
def test_tools_compiler_cache_before_the_compiler(
    context: Context, tmp_path: Path, cache: str
) -> None:
    """It is looked through; of the two only ccache is used, and from PATH."""
    path = script(tmp_path / "bin" / cache, 'exec "$@"')
    search = f"{path.parent}:{os.environ['PATH']}"
    tools = find_tools(with_env(context, CC=f"{cache} gcc", PATH=search))
    assert tools.cc.path == real("gcc")
    assert (tools.launcher == str(path)) is (cache == "ccache")
    assert "sccache" not in (tools.launcher or "")


@pytest.mark.parametrize("how", ["PATH", "CC"])
def test_tools_compiler_cache_by_the_compilers_name(
    context: Context, tmp_path: Path, how: str
) -> None:
    cache = script(tmp_path / "real" / "ccache", 'exec "$@"')
    folder = tmp_path / "masked"
    folder.mkdir()
    for name in ("cc", "c++", "gcc", "g++"):
        (folder / name).symlink_to(cache)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ctx = with_env(context, **(path if how == "PATH" else {"CC": str(folder / "gcc")}))
    tools = find_tools(ctx)
    assert tools.cc.path == real("cc" if how == "PATH" else "gcc")
    assert str(folder) not in tools.search_path


IMPOSTORS = {
    "says nothing": ("true", "prints no version, but ''"),
    "says nonsense": ("echo hello", "prints no version, but 'hello'"),
    "fails": ("echo 'cannot load' >&2; exit 3", "does not work: cannot load"),
    "dies": ("kill -SEGV $$", "does not work"),
    "names no target": (
        '[ "$1" = --version ] && echo cc 1.2.3 && exit; echo',
        "prints no target machine",
    ),
    "steers the terminal": ("printf '\\033[2Jx'", "\\x1b"),
    "is no known compiler": (
        "case $1 in --version) echo tcc 1.2.3;; -dumpmachine) echo a-b-c;; *) cat;; esac",
        "is neither GCC nor Clang",
    ),
}


def test_tools_that_are_not_compilers_are_refused(context: Context, tmp_path: Path) -> None:
    for number, (text, said) in enumerate(IMPOSTORS.values()):
        fake = script(tmp_path / str(number) / "cc", text)
        with pytest.raises(HostError) as caught:
            find_tools(with_env(context, CC=str(fake)))
        assert said in caught.value.what
        assert "\x1b" not in caught.value.what
        assert caught.value.hint
        assert caught.value.exit_code == 9


def test_tools_compiler_that_hangs(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "ANSWER_S", 0.3)
    fake = script(tmp_path / "bin" / "cc", "exec sleep 60")
    with pytest.raises(HostError) as caught:
        find_tools(with_env(context, CC=str(fake)))
    assert "no answer within 0.3 s" in caught.value.what


def test_tools_cc_that_is_wrong_is_refused(context: Context) -> None:
    for value, said in (
        ("gcc -m32", "CC contains more than a compiler"),
        ("/nowhere/gcc", "names '/nowhere/gcc', which does not exist"),
        ("no-such-gcc", "names 'no-such-gcc', which does not exist"),
        ("'", "CC "), ('gcc "', "CC "), ("gcc \\", "CC "),
    ):  # fmt: skip
        with pytest.raises(HostError) as caught:
            find_tools(with_env(context, CC=value))
        assert said in caught.value.what


def test_tools_that_are_missing_are_reported(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cmake", "ninja", "cc", "c++", "strip", "as", "ld"):
        (folder / name).symlink_to(real(name))
    monkeypatch.setattr(toolchain, "SYSTEM_PATH", ())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ctx = replace(context, environment={"PATH": str(folder)})
    for missing in ("cmake", "ninja", "cc", "c++", "strip"):
        (folder / missing).rename(tmp_path / "aside")
        with pytest.raises(HostError) as caught:
            find_tools(ctx)
        assert caught.value.id == "tool-missing"
        assert (caught.value.hint or "").startswith("run: ")
        assert "\n" not in (caught.value.hint or "")
        (tmp_path / "aside").rename(folder / missing)


def test_tools_cmake_that_is_too_old(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "cmake", "echo cmake version 3.16.3")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(HostError) as caught:
        find_tools(context)
    assert "CMake 3.16.3 is too old" in caught.value.what


def test_tools_cmake_beside_this_python_comes_first(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    program = tmp_path / "lib" / version / "site-packages" / "cmake" / "data" / "bin" / "cmake"
    script(program, "echo cmake version 4.9.1")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = find_tools(context).cmake
    assert (found.path, found.version) == (str(program), "4.9.1")


def test_tools_are_not_searched_in_relative_folders(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "cc", "echo evil 6.6.6")
    monkeypatch.chdir(tmp_path)
    tools = find_tools(with_env(context, PATH=f".::{os.environ['PATH']}"))
    assert Path(tools.cc.path).parent != tmp_path


def test_tools_without_a_writable_cache(context: Context, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = replace(context.places, cache=tmp_path / "file" / "cache")
    assert find_tools(replace(context, places=places)).cc == find_tools(context).cc
