"""The tools of a build: CMake, Ninja, C and C++ compilers, strip, a compiler cache.

CMake and Ninja come from the environment that Bakehouse runs in (they are PyPI packages), else
from PATH; compilers from `CC` and `CXX`, else from PATH. The identity of a tool is part of the
build digest: version line, target, assembler, linker, C and C++ library; its path is not.

To identify the tools takes a dozen short processes, so results are cached on disk for as long as
every file that they depend on keeps its size, modification time and inode: `plan` then starts none.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.models import Frozen, to_json
from bakehouse.redact import clean
from bakehouse.system.process import environment
from bakehouse.util import files

ANSWER_S = 20.0
"""Time limit in seconds for a tool to print its version."""
OLDEST_CMAKE = (3, 20)
"""The first version whose file API reports toolchains."""
SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
LAUNCHER = "ccache"
"""The compiler cache that is used. Not sccache: it drops SOURCE_DATE_EPOCH on the way to the
compiler (seen with 0.16.0), so that a build with it would differ from one without."""
STAND_INS = ("ccache", "sccache")
"""Compiler caches: called by a compiler's name, or in front of it."""
C = ("cc", "gcc", "clang")
CXX = ("c++", "g++", "clang++")
MEMORY_FILE = "toolchain.json"

Stamp = tuple[str, int, int, int]
"""Path, size in bytes, modification time in ns, inode."""


class Tool(Frozen):
    """A program and what it is."""

    path: str
    version: str
    """The bare number, such as 12.2.0, as CMake reports it for compilers."""
    identity: str
    """Everything about it that can change its output."""


class Tools(Frozen):
    """Everything that a build calls."""

    cmake: Tool
    ninja: Tool
    cc: Tool
    cxx: Tool
    strip: Tool
    launcher: str | None = None
    """Path of ccache, if installed; it never changes a result."""

    @property
    def search_path(self) -> str:
        """PATH for the build's children: the compilers' folders and the system's, no others."""
        folders = [str(Path(tool.path).parent) for tool in (self.cc, self.cxx)]
        return os.pathsep.join(dict.fromkeys([*folders, *SYSTEM_PATH]))


def find_tools(ctx: Context) -> Tools:
    """Find and identify all tools. Raises HostError (9) for one that is missing or broken."""
    found = inspect_tools(ctx, save=True)
    for tool in found.values():
        if isinstance(tool, HostError):
            raise tool
    tools = {name: tool for name, tool in found.items() if isinstance(tool, Tool)}
    launcher = shutil.which(LAUNCHER, path=_search(ctx))
    return Tools(cxx=tools.pop("c++"), launcher=launcher, **tools)


def inspect_tools(ctx: Context, *, save: bool = False) -> dict[str, Tool | HostError]:
    """Identify each tool, or give the reason why it cannot be used; `save` caches new results."""
    cache = _Cache(ctx.places.cache / MEMORY_FILE)
    finders: dict[str, Callable[[], Tool]] = {
        "cmake": lambda: _cmake(ctx, cache),
        "ninja": lambda: _identify(ctx, cache, _beside_python(ctx, "ninja")),
        "cc": lambda: _compiler(ctx, cache, _compiler_path(ctx, "CC", C), "c"),
        "c++": lambda: _compiler(ctx, cache, _compiler_path(ctx, "CXX", CXX), "c++"),
        "strip": lambda: _strip(ctx, cache),
    }
    found: dict[str, Tool | HostError] = {}
    for name, find in finders.items():
        try:
            found[name] = find()
        except HostError as error:
            found[name] = error
    if save:
        cache.save()
    return found


class _Cache:
    """Identified tools by path, each with the stamps of all files that it depends on."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.changed = False
        try:
            self.entries: dict[str, dict[str, object]] = dict(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            self.entries = {}

    def get(self, key: str) -> Tool | None:
        """Give the cached tool, unless a file that it depends on has changed."""
        with suppress(KeyError, TypeError, ValueError, IndexError, OSError):
            entry = self.entries[key]
            stamps = entry["files"]
            if isinstance(stamps, list) and stamps and all(stamp(s[0]) == tuple(s) for s in stamps):
                return Tool.model_validate(entry["tool"])
        return None

    def put(self, key: str, tool: Tool, files: Iterable[str]) -> Tool:
        """Cache a tool with the files that it depends on."""
        stamps = [list(stamp(f)) for f in dict.fromkeys(files) if os.path.exists(f)]
        self.entries[key] = {"tool": tool.to_data(), "files": stamps}
        self.changed = True
        return tool

    def save(self) -> None:
        """Write new results; a folder that is not writable only costs time at the next plan."""
        if self.changed:
            with suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                files.write(self.file, to_json(self.entries).encode(), sync=False)


def stamp(path: str) -> Stamp:
    """Size, modification time and inode of a file, links followed. Raises OSError if missing."""
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns, found.st_ino


def _ask(ctx: Context, argv: tuple[str, ...], stdin: bytes | None = None) -> str:
    """Run a tool and give its standard output. Raises HostError if it fails."""
    env = environment({"PATH": _search(ctx)}, ctx.environment)
    answer = ctx.processes.capture(argv, env=env, timeout=ANSWER_S, stdin=stdin)
    if not answer.ok:
        text = answer.err.strip() or answer.out.strip() or f"exit code {answer.code}"
        lines = text.splitlines()
        raise HostError(
            f"{Path(argv[0]).name} does not work: {clean(lines[0])}",
            where=shlex.join(argv),
            hint="repair or reinstall it, or name another in the environment (CC, CXX, PATH)",
        )
    return answer.out


def _number(text: str, argv0: str) -> str:
    """Find the first version number in a tool's output. Raises HostError if there is none."""
    if found := re.search(r"\d+(?:\.\d+)+", text):
        return found[0]
    raise HostError(
        f"{Path(argv0).name} prints no version, but '{_first_line(text)[:120]}'",
        where=argv0,
        hint="this is another program of that name; put the right one first on PATH",
    )


def _first_line(text: str) -> str:
    return clean(text.strip().partition("\n")[0].strip())


def _identify(ctx: Context, cache: _Cache, path: str, *, by_line: bool = False) -> Tool:
    """Identify a tool by its version number alone, or by the first line that it prints."""
    if known := cache.get(path):
        return known
    text = _ask(ctx, (path, "--version"))
    line = _first_line(text)
    version = _number(line if by_line else text, path)
    identity = line if by_line else f"{Path(path).name} {version}"
    return cache.put(path, Tool(path=path, version=version, identity=identity), (path,))


def _cmake(ctx: Context, cache: _Cache) -> Tool:
    tool = _identify(ctx, cache, _beside_python(ctx, "cmake"))
    if tuple(int(part) for part in tool.version.split(".")[:2]) < OLDEST_CMAKE:
        raise HostError(
            f"CMake {tool.version} is too old; 3.20 or newer is needed",
            where=tool.path,
            hint=f"run: {_pip()}",
        )
    return tool


def _strip(ctx: Context, cache: _Cache) -> Tool:
    path = shutil.which("strip", path=_search(ctx))
    if path is None:
        raise _missing("strip", _system_packages("binutils"))
    return _identify(ctx, cache, path, by_line=True)


_MACROS = """\
#ifdef __cplusplus
#include <cstddef>
#else
#include <stddef.h>
#include <limits.h>
#endif
bakehouse clang __clang_major__ __clang_minor__ __clang_patchlevel__
bakehouse gnu __GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__
bakehouse glibc __GLIBC__ __GLIBC_MINOR__
bakehouse libstdcxx _GLIBCXX_RELEASE __GLIBCXX__
bakehouse libcxx _LIBCPP_VERSION
"""


def _compiler(ctx: Context, cache: _Cache, path: str, language: str) -> Tool:
    """Identify a compiler, with the assembler, linker and libraries that it uses."""
    key = f"{language} {path}"
    if known := cache.get(key):
        return known
    line = _first_line(_ask(ctx, (path, "--version")))
    _number(line, path)
    # GCC starts this line with the name that it was called by: cc and gcc are the same thing.
    line = line.removeprefix(f"{Path(path).name} ")
    target = _ask(ctx, (path, "-dumpmachine")).strip()
    if not re.fullmatch(r"\w+(-[\w.]+)+", target):
        raise HostError(
            f"{Path(path).name} prints no target machine, but '{clean(target)[:80]}'",
            where=f"{path} -dumpmachine",
            hint="this is not a C or C++ compiler; set CC and CXX to one",
        )
    text = _ask(ctx, (path, "-E", "-x", language, "-"), stdin=_MACROS.encode())
    # Each name to those of its values that are numbers.
    printed = " ".join(line for line in text.splitlines() if not line.startswith("#"))
    parts = (words.split() for words in printed.split("bakehouse ")[1:])
    macros = {words[0]: [w for w in words[1:] if w.isdigit()] for words in parts if words}
    compiler = macros.get("clang") or macros.get("gnu") or []
    if len(compiler) < 3:
        raise HostError(
            f"{Path(path).name} is neither GCC nor Clang",
            where=shlex.join((path, "-E", "-x", language, "-")),
            hint="set CC and CXX to GCC or Clang",
        )
    identity = [line, f"target {target}"]
    depends = [path, os.path.realpath(path)]
    for name in ("as", "ld"):
        tool = _ask(ctx, (path, f"-print-prog-name={name}")).strip()
        tool = tool if os.path.isabs(tool) else shutil.which(tool, path=_search(ctx)) or ""
        if tool:
            identity.append(f"{name} {_first_line(_ask(ctx, (tool, '--version')))}")
            depends += [tool, os.path.realpath(tool)]
    identity += [
        f"{name} {'.'.join(macros[name])}"
        for name in ("glibc", "libstdcxx", "libcxx")
        if macros.get(name)
    ]
    depends += re.findall(r'^# 1 "(/[^"]+)"', text, re.MULTILINE)
    found = Tool(path=path, version=".".join(compiler), identity="; ".join(identity))
    return cache.put(key, found, depends)


def _search(ctx: Context) -> str:
    """PATH for finding compilers: the user's order, then the system's folders."""
    given = ctx.environment.get("PATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*filter(os.path.isabs, given), *SYSTEM_PATH]))


def _beside_python(ctx: Context, name: str) -> str:
    """Find CMake or Ninja: as PyPI installed it beside this Python, else on PATH."""
    # The `cmake` beside Python is a script around the program that lies in the package; going to
    # the program itself saves starting a Python each time that a build calls CMake.
    library = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    program = library / "site-packages" / name / "data" / "bin" / name
    for found in (program, Path(sys.executable).parent / name):
        if os.access(found, os.X_OK):
            return str(found)
    if on_path := shutil.which(name, path=_search(ctx)):
        return on_path
    raise _missing(name, _pip())


def _compiler_path(ctx: Context, variable: str, names: tuple[str, ...]) -> str:
    """Find the compiler in `CC` or `CXX`, without a cache in front of it; else by name."""
    given = ctx.environment.get(variable, "").strip()
    if not given:
        for name in names:
            if found := _which_compiler(ctx, name):
                return found
        kind = "C" if variable == "CC" else "C++"
        raise _missing(f"a {kind} compiler", _system_packages("compilers"))
    try:
        words = shlex.split(given)
    except ValueError:
        words = []
    if len(words) > 1 and Path(words[0]).name in STAND_INS:
        del words[0]
    if len(words) != 1:
        raise HostError(
            f"{variable} contains more than a compiler: '{clean(given)}'",
            where=f"environment variable {variable}",
            hint="put flags into the recipe, as build.cmake.CMAKE_C_FLAGS and CMAKE_CXX_FLAGS",
        )
    found = _which_compiler(ctx, words[0])
    if found is None:
        raise HostError(
            f"{variable} names '{clean(words[0])}', which does not exist",
            where=f"environment variable {variable}",
            hint=f"unset {variable}, or set it to a compiler that exists",
        )
    return found


def _which_compiler(ctx: Context, name: str) -> str | None:
    """Find a compiler by name or path, looking through a compiler cache that stands in for it.

    Debian's /usr/lib/ccache holds links named gcc that are ccache; ccache in front of such a link
    would call itself.
    """
    places = [os.path.dirname(name)] if os.path.dirname(name) else []
    for folder in [*places, *_search(ctx).split(os.pathsep)]:
        found = shutil.which(os.path.join(folder, os.path.basename(name)))
        if found and Path(os.path.realpath(found)).name not in STAND_INS:
            return os.path.abspath(found)
        if found is None and folder in places:
            return None
    return None


def _missing(what: str, command: str) -> HostError:
    return HostError(
        f"{what} not found",
        where="searched beside Python and on PATH",
        hint=f"run: {command}",
        id="tool-missing",
    )


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install 'cmake>=3.31.8,<5' 'ninja>=1.11'"


_PACKAGES: Mapping[str, Mapping[str, str]] = {
    "apt-get": {"compilers": "install -y gcc g++ libc6-dev", "binutils": "install -y binutils"},
    "dnf": {"compilers": "install -y gcc gcc-c++", "binutils": "install -y binutils"},
    "zypper": {"compilers": "install -y gcc gcc-c++", "binutils": "install -y binutils"},
    "pacman": {"compilers": "-S --noconfirm gcc", "binutils": "-S --noconfirm binutils"},
    "apk": {"compilers": "add build-base", "binutils": "add binutils"},
}


def _system_packages(what: str) -> str:
    """Give the command that installs compilers (or binutils) on this kind of system."""
    manager = next((m for m in _PACKAGES if shutil.which(m)), "apt-get")
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}{manager} {_PACKAGES[manager][what]}"
