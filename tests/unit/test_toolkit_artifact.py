"""What a built library holds and which GPUs it serves."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bakehouse.cuda.elf import NotElf, read_cuda_file
from bakehouse.cuda.toolkit import Requested, Toolkit
from bakehouse.cuda.verify import accept_artifact, accept_devices, covers, parse_devices
from bakehouse.host import Gpu
from bakehouse.models import Verdict

REAL = {"a": 1 << 20, "f": 1 << 21, "": 0}


def fat_binary(*entries: tuple[int, int, str]) -> bytes:
    body = b""
    for kind, number, letter in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, 40) + bytes(8) + struct.pack("<HH", 8, 1)
        head += struct.pack("<I", number) + bytes(8) + struct.pack("<Q", 0x11 | REAL[letter])
        body += head.ljust(64, b"\0") + b"\x55" * 40
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(needed: tuple[str, ...], run_path: str, code: bytes) -> bytes:
    """A smallest ELF file: one loaded segment, a dynamic one, and section `.nv_fatbin`."""
    names = b"\0.nv_fatbin\0"
    strings, tags = b"\0", b""
    for tag, text in [*((1, n) for n in needed), *([(29, run_path)] if run_path else [])]:
        tags += struct.pack("<QQ", tag, len(strings))
        strings += text.encode() + b"\0"
    dynamic_at = 64 + 2 * 56
    strings_at = dynamic_at + len(tags) + 32
    tags += struct.pack("<QQ", 5, strings_at) + bytes(16)
    code_at = (strings_at + len(strings) + 7) // 8 * 8
    names_at = code_at + len(code)
    table = (names_at + len(names) + 7) // 8 * 8
    whole = table + 3 * 64
    data = b"\x7fELF\x02\x01\x01" + bytes(9)
    data += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, table, 0, 64, 56, 2, 64, 3, 2)
    data += struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, whole, whole, 8)
    data += struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, 0, len(tags), len(tags), 8)
    data = (data + tags + strings).ljust(code_at, b"\0") + code + names
    rows = [(0, 0, 0), (1, code_at, len(code)), (0, names_at, len(names))]
    sections = [
        struct.pack("<IIQQQQIIQQ", n, 1, 0, 0, at, size, 0, 0, 8, 0) for n, at, size in rows
    ]
    return data.ljust(table, b"\0") + b"".join(sections)


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    root = tmp_path / "cuda"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "libcudart.so.13").write_text("runtime")
    return Toolkit(
        root=str(root), version="13.0.88", nvcc=f"{root}/bin/nvcc", include=f"{root}/include",
        library=f"{root}/lib", libraries={"cudart": f"{root}/lib/libcudart.so.13"},
    )  # fmt: skip


def place(folder: Path, content: bytes, name: str = "libggml-cuda.so.0.9") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def verdicts(folder: Path, toolkit: Toolkit, *architectures: str) -> dict[str, Verdict]:
    requested = Requested(version="13.0", architectures=architectures)
    return {c.id: c.verdict for c in accept_artifact(folder, toolkit, requested)}


CODE = fat_binary((2, 90, "")) + fat_binary((2, 121, "a"), (1, 90, ""))


def test_cuda_artifact_is_accepted(tmp_path: Path, toolkit: Toolkit) -> None:
    made = elf(("libcudart.so.13", "libc.so.6"), f"$ORIGIN:{toolkit.library}", CODE)
    folder = place(tmp_path / "artifact", made)
    found = verdicts(folder, toolkit, "90", "121-real")
    assert set(found.values()) == {Verdict.PASSED}
    assert set(found) == {"cuda.library", "cuda.linked", "cuda.no-stub", "cuda.embedded"}


def test_cuda_artifact_with_other_code_than_requested_fails(
    tmp_path: Path, toolkit: Toolkit
) -> None:
    folder = place(tmp_path / "artifact", elf(("libcudart.so.13",), toolkit.library, CODE))
    for architectures in (("90-real",), ("90", "121a"), ("90", "121a-real", "75")):
        assert verdicts(folder, toolkit, *architectures)["cuda.embedded"] is Verdict.FAILED


def test_cuda_artifact_with_links_to_elsewhere_fails(tmp_path: Path, toolkit: Toolkit) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "libcudart.so.13").write_text("another")
    for needed, run_path in (
        ("libcudart.so.13", f"{other}:{toolkit.library}"),
        ("libcudart.so.12", toolkit.library),
        ("libcudart.so.13", ""),
    ):
        folder = place(tmp_path / "artifact", elf((needed,), run_path, CODE))
        assert verdicts(folder, toolkit, "90", "121a-real")["cuda.linked"] is Verdict.FAILED


def test_cuda_artifact_may_hold_a_copy_of_the_runtime(tmp_path: Path, toolkit: Toolkit) -> None:
    folder = place(tmp_path / "artifact", elf(("libcudart.so.13",), "$ORIGIN", CODE))
    (folder / "libcudart.so.13").write_text("runtime")
    assert verdicts(folder, toolkit, "90", "121a-real")["cuda.linked"] is Verdict.PASSED


def test_cuda_artifact_static_runtime_is_unknown_and_stub_in_run_path_fails(
    tmp_path: Path, toolkit: Toolkit
) -> None:
    stub = f"{toolkit.library}/stubs"
    folder = place(tmp_path / "artifact", elf(("libc.so.6",), stub, CODE))
    found = verdicts(folder, toolkit, "90", "121a-real")
    assert found["cuda.linked"] is Verdict.UNKNOWN
    assert found["cuda.no-stub"] is Verdict.FAILED


def test_cuda_artifact_without_library_fails_and_static_program_is_found(
    tmp_path: Path, toolkit: Toolkit
) -> None:
    folder = place(tmp_path / "artifact", b"#!/bin/sh\n" + bytes(80), "llama-server")
    assert verdicts(folder, toolkit, "90") == {"cuda.library": Verdict.FAILED}
    place(folder, elf(("libcudart.so.13",), toolkit.library, CODE), "llama-server")
    assert verdicts(folder, toolkit, "90", "121a-real")["cuda.embedded"] is Verdict.PASSED


def test_elf_reader_reports_damaged_files(tmp_path: Path) -> None:
    whole = elf(("libcudart.so.13",), "$ORIGIN", CODE)
    for cut in (10, 70, 200, len(whole) - 40):
        path = tmp_path / f"cut-{cut}.so"
        path.write_bytes(whole[:cut])
        with pytest.raises(NotElf):
            read_cuda_file(path)
    broken = bytearray(whole)
    broken[whole.index(CODE) + 8 : whole.index(CODE) + 16] = struct.pack("<Q", 2**40)
    (tmp_path / "broken.so").write_bytes(broken)
    with pytest.raises(NotElf, match="longer than its section"):
        read_cuda_file(tmp_path / "broken.so")


def test_cuda_artifact_damaged_library_fails_as_a_check(tmp_path: Path, toolkit: Toolkit) -> None:
    whole = elf(("libcudart.so.13",), "$ORIGIN", CODE)
    folder = place(tmp_path / "artifact", whole[:200])
    assert verdicts(folder, toolkit, "90") == {"cuda.library": Verdict.FAILED}


def test_cuda_code_that_a_gpu_runs() -> None:
    rows: list[tuple[set[str], str, str | None]] = [
        ({"sm_90"}, "9.0", "sm_90"),
        ({"sm_80"}, "8.6", "sm_80"),
        ({"sm_86"}, "8.0", None),
        ({"sm_80"}, "9.0", None),
        ({"compute_80"}, "9.0", "compute_80"),
        ({"compute_80", "sm_90"}, "9.0", "sm_90"),
        ({"sm_120a"}, "12.1", None),
        ({"sm_121a"}, "12.1", "sm_121a"),
        ({"sm_120f"}, "12.1", "sm_120f"),
        ({"compute_120f"}, "12.1", "compute_120f"),
        ({"compute_90a"}, "12.1", None),
        ({"sm_50", "sm_75", "sm_120"}, "12.1", "sm_120"),
        (set(), "9.0", None),
    ]
    got = [(e, gpu, covers(frozenset(e), gpu)) for e, gpu, _ in rows]
    assert got == rows


LISTED = "Available devices:\n  CUDA0: NVIDIA H200 (143155 MiB, 141829 MiB free)\n"


def test_cuda_devices_are_compared_with_the_driver() -> None:
    gpu = Gpu(index=0, name="NVIDIA H200", compute_capability="9.0", driver="580.1")
    assert parse_devices(LISTED) == (("CUDA0", "NVIDIA H200"),)
    assert parse_devices("Available devices:\n  (none)\n") == ()
    good = accept_devices(LISTED, [gpu], frozenset({"sm_90"}))
    assert [c.verdict for c in good] == [Verdict.PASSED, Verdict.PASSED]
    blind = accept_devices("Available devices:\n  (none)\n", [gpu], frozenset({"sm_121a"}))
    assert [c.verdict for c in blind] == [Verdict.FAILED, Verdict.FAILED]
    assert accept_devices(LISTED, [], frozenset())[0].verdict is Verdict.UNKNOWN
