"""A CMake project shaped like llama.cpp, small enough to build in a second; and a plan for it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bakehouse.context import Context
from bakehouse.host import HostFacts, read_host
from bakehouse.lock import ArchivePin, FilePin, Lock
from bakehouse.paths import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.models import Recipe
from bakehouse.toolchain import Tool, Tools, find_tools

FILES: dict[str, str] = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" C CXX ASM)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
option(LLAMA_BUILD_UI "embedded web UI" ON)
option(LLAMA_USE_PREBUILT_UI "prebuilt web UI" ON)
option(LLAMA_OPENSSL "HTTPS" ON)
option(GGML_NATIVE "for this CPU" ON)
option(GGML_CCACHE "look for ccache" ON)
set(SMALL_GREETING "hello" CACHE STRING "what the server says")
find_package(Git)
execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --short HEAD
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
    OUTPUT_VARIABLE TREE_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE)
message(STATUS "tree commit: ${TREE_COMMIT}")
configure_file(build-info.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/build-info.cpp @ONLY)
add_library(ggml SHARED ggml.c)
set_target_properties(ggml PROPERTIES VERSION 0.26.0 SOVERSION 0)
add_library(llama SHARED llama.cpp start.S ${CMAKE_CURRENT_BINARY_DIR}/build-info.cpp)
set_target_properties(llama PROPERTIES VERSION 0.6.0 SOVERSION 0)
target_link_libraries(llama PRIVATE ggml)
target_compile_definitions(llama PRIVATE "SMALL_GREETING=\\"${SMALL_GREETING}\\"")
add_executable(llama-server server.cpp)
target_link_libraries(llama-server PRIVATE llama)
add_executable(llama-bench bench.cpp)
""",
    "build-info.cpp.in": """\
extern "C" int small_number() { return @LLAMA_BUILD_NUMBER@; }
extern "C" const char *small_commit() { return "@LLAMA_BUILD_COMMIT@"; }
extern "C" const char *small_generated() { return __FILE__; }
""",
    "ggml.c": """\
const char *ggml_where(void) { return __FILE__; }
""",
    "llama.cpp": """\
extern "C" const char *ggml_where();
extern "C" const char *small_generated();
extern "C" int small_start();
extern "C" const char *small_texts(int which) {
    switch (which) {
    case 0: return ggml_where();
    case 1: return __FILE__;
    case 2: return __DATE__ " " __TIME__;
    case 3: return small_generated();
    default: return small_start() == 42 ? SMALL_GREETING : "wrong";
    }
}
""",
    "start.S": """\
    .text
    .globl small_start
    .type small_start, @function
small_start:
#if defined(__x86_64__)
    movl $42, %eax
#else
    mov w0, #42
#endif
    ret
    .size small_start, .-small_start
    .section .note.GNU-stack,"",%progbits
""",
    "server.cpp": """\
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
extern "C" int small_number();
extern "C" const char *small_commit();
extern "C" const char *small_texts(int);
int main(int argc, char **argv) {
    std::vector<std::string> seen(argv, argv + argc);
    if (argc > 1 && seen[1] == "--version") {
        std::fprintf(stderr, "version: 0.6.0-dev (build %d, commit %s)\\n", small_number(),
                     small_commit());
        return 0;
    }
    for (int which = 0; which < 5; ++which) std::puts(small_texts(which));
}
""",
    "bench.cpp": "int main() { return 0; }\n",
}

TREE = "5" * 40


def small_recipe(
    cmake: Mapping[str, object] | None = None, targets: tuple[str, ...] = ("llama-server",)
) -> Recipe:
    return Recipe.model_validate(
        {
            "schema": 1,
            "name": "small",
            "engine": "llama.cpp",
            "source": {"archive": {"path": "small.tar", "sha256": "a" * 64}},
            "build": {"targets": list(targets), "cmake": dict(cmake or {})},
            "weights": {"model": {"path": "model.gguf"}},
            "serve": {"command": "{{ server }}"},
        }
    )


def small_lock(tree: str = TREE, number: int = 77) -> Lock:
    source = ArchivePin(
        origin="small.tar",
        file=FilePin(path="small.tar", size=10, sha256="abcdef012" + "3" * 55),
        folder=".",
        tree=tree,
        date=1_700_000_000,
        number=number,
    )
    return Lock(
        recipe="small", engine="llama.cpp", wants="0", source=source, source_tree=tree, weights={}
    )


def small_plan(
    ctx: Context,
    cmake: Mapping[str, object] | None = None,
    *,
    targets: tuple[str, ...] = ("llama-server",),
    lock: Lock | None = None,
    jobs: int | None = None,
) -> BuildPlan:
    recipe = small_recipe(cmake, targets)
    tools = find_tools(ctx)
    return plan_build(recipe, lock or small_lock(), tools, read_host(), ctx.places, jobs=jobs)


def write_small(folder: Path, changes: Mapping[str, str] | None = None) -> None:
    """Write the project; `changes` replace whole files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**FILES, **(changes or {})}.items():
        (folder / name).write_text(text)


FAKE_TOOLS = Tools(
    cmake=Tool(path="/opt/cmake/bin/cmake", version="4.1.0", identity="cmake 4.1.0"),
    ninja=Tool(path="/opt/ninja", version="1.13.0", identity="ninja 1.13.0"),
    cc=Tool(path="/usr/bin/cc", version="12.2.0", identity="(Debian 12.2.0-14) 12.2.0; target t"),
    cxx=Tool(path="/usr/bin/c++", version="12.2.0", identity="(Debian 12.2.0-14) 12.2.0; target t"),
    strip=Tool(path="/usr/bin/strip", version="2.40", identity="GNU strip 2.40"),
    launcher=None,
)
FAKE_HOST = HostFacts(
    arch="x86_64",
    system="Linux",
    cpus=16,
    cpu_model="Some CPU",
    cpu_flags="avx avx2",
    memory_total=64 * 2**30,
    memory_available=32 * 2**30,
)
FAKE_PLACES = Places(Path("/home/u/.cache/bakehouse"), Path("/home/u/.local/state/bakehouse"))


def pack(target: Path, changes: Mapping[str, str] | None = None) -> str:
    """Write the small project as an archive; give its sha256."""
    with tarfile.open(target, "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in sorted({**FILES, **(changes or {})}.items()):
            info = tarfile.TarInfo(f"small/{name}")
            info.size, info.mtime = len(text.encode()), 1_700_000_000
            archive.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(target.read_bytes()).hexdigest()


RECIPE = """\
schema: 1
name: small
engine: llama.cpp
source:
  archive: {{path: small.tar.gz, sha256: {sha256}, folder: small, number: 77}}
build:
  targets: [llama-server]
  cmake:
    SMALL_GREETING: good morning
weights:
  model: {{path: model.gguf}}
serve:
  command: "{{{{ server }}}} -m {{{{ weights.model.first }}}}"
"""
