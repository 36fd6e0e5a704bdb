"""The first error, in the words of each tool; recorded from real runs unless marked."""

from __future__ import annotations

import pytest

from bakehouse.build.error_parser import first_build_error, first_cmake_error

HEAD = ["[1/9 0.1] Building C object a.o", "FAILED: x.o ", "/usr/bin/c++ -c /w/src/x.cpp"]
TAIL = [
    "[2/9 0.3] Building C object b.o",
    "FAILED: y.o ",
    "/usr/bin/c++ -c y.cpp",
    "y.cpp:1:1: error: the second failure",
    "ninja: build stopped: subcommand failed.",
]

Place = tuple[str | None, int | None, int | None]
WORDINGS: list[tuple[list[str], Place, str]] = [
    (
        ["/w/src/x.cpp: In function 'int main()':",
         "/w/src/x.cpp:4:10: error: 'foo' was not declared in this scope"],
        ("x.cpp", 4, 10), "'foo' was not declared in this scope",
    ),
    (
        ["In file included from /w/src/x.cpp:1:",
         "/w/src/x.h:2:3: warning: unused",
         "/w/src/x.h:9:10: fatal error: nope.h: No such file or directory"],
        ("x.h", 9, 10), "nope.h: No such file or directory",
    ),
    (
        ["../src/x.cpp:7:5: internal compiler error: Segmentation fault"],
        ("x.cpp", 7, 5), "Segmentation fault",
    ),
    (["/w/src/start.S:3: Error: no such instruction: `mvo'"], ("start.S", 3, None),
     "no such instruction: `mvo'"),
    (
        ["/usr/bin/ld: a.o: in function `main':",
         "/w/src/x.cpp:3: undefined reference to `gone()'",
         "collect2: error: ld returned 1 exit status"],
        ("x.cpp", 3, None), "undefined reference to `gone()'",
    ),
    (
        ["/usr/bin/ld: a.o: in function `main':",
         "x.cpp:(.text.startup+0x5): undefined reference to `gone()'",
         "collect2: error: ld returned 1 exit status"],
        ("x.cpp", None, None), "undefined reference to `gone()'",
    ),
    (["/usr/bin/ld: cannot find -lnope: No such file or directory"], (None, None, None),
     "/usr/bin/ld: cannot find -lnope: No such file or directory"),
    (["ld.lld: error: undefined symbol: gone()"], (None, None, None),
     "ld.lld: error: undefined symbol: gone()"),
    (
        ["/usr/bin/ld: warning: x.o: missing .note.GNU-stack section",
         "/usr/bin/ld: final link failed: No space left on device"],
        (None, None, None), "/usr/bin/ld: final link failed: No space left on device",
    ),
    (["/w/src/ggml-cuda/mmq.cu(12): error: identifier \"x\" is undefined"],
     ("ggml-cuda/mmq.cu", 12, None), 'identifier "x" is undefined'),
    (["/w/src/a.cuh(3): error #20012-D: no such thing"], ("a.cuh", 3, None), "no such thing"),
    (["ptxas fatal   : Unresolved extern function '_Z3foov'"], (None, None, None),
     "ptxas fatal   : Unresolved extern function '_Z3foov'"),
    (["nvcc fatal   : Unsupported gpu architecture 'compute_121a'"], (None, None, None),
     "nvcc fatal   : Unsupported gpu architecture 'compute_121a'"),
    (["c++: fatal error: Killed signal terminated program cc1plus", "compilation terminated."],
     (None, None, None), "c++: fatal error: Killed signal terminated program cc1plus"),
    (["CMake Error at /w/src/scripts/ui.cmake:12 (message):", "  no assets", "", ""],
     ("scripts/ui.cmake", 12, None), "no assets"),
    (["/bin/sh: 1: glslc: not found"], (None, None, None), "/bin/sh: 1: glslc: not found"),
]  # fmt: skip


def test_build_error_is_found_in_the_words_of_each_tool() -> None:
    for code in ("", "[code=1] "):
        head = [line.replace("FAILED: ", f"FAILED: {code}") for line in HEAD]
        for lines, place, message in WORDINGS:
            found = first_build_error(head + lines + TAIL, ("/w/src", "../src"))
            assert found, lines
            assert (found.file, found.line, found.column) == place
            assert found.message == message
            assert (head + lines)[found.log_line - 1].endswith(message) or "CMake" in lines[0]


def test_build_error_without_a_wording() -> None:
    silent = first_build_error(HEAD + TAIL)
    assert silent
    assert silent.message == "x.o failed without a message"
    ninja = first_build_error(["ninja: error: loading 'build.ninja': No such file or directory"])
    assert ninja
    assert ninja.message.startswith("ninja: error: loading")
    assert first_build_error(["[1/1 0.0] Linking", "all is well"]) is None
    assert first_cmake_error(["-- Configuring done"]) is None


CMAKE = [
    "-- The C compiler identification is GNU 12.2.0",
    "CMake Warning at CMakeLists.txt:3 (message):",
    "  only a warning",
    "",
    "CMake Error at ggml/CMakeLists.txt:7 (find_package):",
    '  By not providing "FindX.cmake" this project has',
    "  asked CMake to find a package.",
    "",
    "  Could not find X.",
    "",
    "",
    "Call Stack (most recent call first):",
    "  CMakeLists.txt:1 (include)",
    "CMake Error at CMakeLists.txt:99 (message):",
    "  second",
]


def test_cmake_error_is_the_first_one() -> None:
    found = first_cmake_error(CMAKE)
    assert found
    assert (found.file, found.line, found.log_line) == ("ggml/CMakeLists.txt", 7, 5)
    assert found.message == (
        'By not providing "FindX.cmake" this project has asked CMake to find a package. '
        "Could not find X."
    )
    assert found.place("/l") == "ggml/CMakeLists.txt:7, /l:5"


@pytest.mark.parametrize("output", ["The output was:", "It fails with the following output:"])
def test_cmake_error_of_a_compiler_that_it_tried(output: str) -> None:
    quoted = [
        "-- The CUDA compiler identification is unknown",
        "CMake Error at /usr/share/cmake/CMakeDetermineCompilerId.cmake:739 (message):",
        "  Compiling the CUDA compiler identification source file",
        '  "CMakeCUDACompilerId.cu" failed.',
        "",
        "  Compiler: /usr/local/cuda/bin/nvcc",
        "",
        f"  {output}",
        "",
        *(f"  #$ step {number}" for number in range(90)),
        "",
        "  /usr/bin/ld: cannot find -lcudadevrt: No such file or directory",
        "  collect2: error: ld returned 1 exit status",
        "",
        "",
        "Call Stack (most recent call first):",
        "  CMakeLists.txt:29 (enable_language)",
    ]
    found = first_cmake_error(quoted)
    assert found
    assert found.message == (
        'Compiling the CUDA compiler identification source file "CMakeCUDACompilerId.cu" failed: '
        "/usr/bin/ld: cannot find -lcudadevrt: No such file or directory"
    )
    assert quoted[found.log_line - 1].endswith("cannot find -lcudadevrt: No such file or directory")


def test_cmake_error_without_a_line() -> None:
    for line, message in (
        ("CMake Error: CMake was unable to find a build program", "CMake was unable to find"),
        ("CMake Error in src/CMakeLists.txt:", "CMake gave no reason"),
    ):
        found = first_cmake_error([line])
        assert found
        assert found.message.startswith(message)


def test_build_error_cannot_control_the_terminal() -> None:
    found = first_build_error(["FAILED: x.o ", "cc", "x.c:1:1: error: \x1b[2Jgone"])
    assert found
    assert "\x1b" not in found.message


def test_build_error_search_takes_no_time_on_long_lines() -> None:
    """No pattern backtracks for long on the lines that compilers print: the test's time limit."""
    count = 20_000
    lines = ["FAILED: x ", "cc", "a/" * count, "x:" * count, "(" * count, " " * count + "error"]
    found = first_build_error([*lines, "x.c:3:1: error: the one that counts"])
    assert found
    assert "the one that counts" in found.message
