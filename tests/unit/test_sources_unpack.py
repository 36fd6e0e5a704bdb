"""Hostile archives: each is made here, and none may write anything outside its folder."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bakehouse.errors import LockError
from bakehouse.sources import unpack as room
from bakehouse.sources.unpack import check_links, choose_folder, unpack

Member = tuple[str, bytes | str, dict[str, object]]


def tar(path: Path, *members: tarfile.TarInfo | tuple[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                info.mtime = 1_600_000_000
                made.addfile(info, io.BytesIO(member[1]))
            else:
                made.addfile(member)
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


def zipped(path: Path, *members: tuple[str, bytes, int]) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, data, mode in members:
            info = zipfile.ZipInfo(name, (2020, 9, 13, 12, 26, 40))
            info.external_attr = mode << 16
            made.writestr(info, data)
    return path


def all_below(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_plain_tar(tmp_path: Path, mode: str) -> None:
    script = tarfile.TarInfo("p-1/run")
    script.mode = 0o6755
    made = tar(
        tmp_path / "a", special("p-1", tarfile.DIRTYPE), ("p-1/a.txt", b"a"), script,
        special("p-1/link", tarfile.SYMTYPE, "a.txt"),
        special("p-1/hard", tarfile.LNKTYPE, "p-1/a.txt"), mode=mode,
    )  # fmt: skip
    out = tmp_path / "out"
    dates = unpack(made, out)
    assert all_below(out) == {"p-1", "p-1/a.txt", "p-1/run", "p-1/link", "p-1/hard"}
    assert dates["p-1/a.txt"] == 1_600_000_000
    assert (out / "p-1/hard").read_bytes() == b"a"
    assert stat.S_IMODE((out / "p-1/run").stat().st_mode) == 0o755  # no setuid
    assert stat.S_IMODE((out / "p-1/a.txt").stat().st_mode) == 0o644
    assert choose_folder(made, out, ".") == out / "p-1"
    check_links(made, out / "p-1")


def test_a_plain_zip(tmp_path: Path) -> None:
    made = zipped(
        tmp_path / "a.zip", ("p/", b"", 0o40755), ("p/run", b"x", 0o100755), ("p/a", b"a", 0),
        ("p/link", b"a", 0o120777),
    )  # fmt: skip
    dates = unpack(made, tmp_path / "out")
    assert dates["p/run"] == 1_600_000_000
    assert os.access(tmp_path / "out/p/run", os.X_OK)
    assert os.readlink(tmp_path / "out/p/link") == "a"


ESCAPES = [
    "../up", "a/../../up", "/etc/passwd", "..", "a\\..\\..\\up", "C:/x", "a\nb", "a\x1bb",
    ".git/config", "a/.GIT/hooks/x", ".git /x", "GIT~1/x", ".g\u200cit/x", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_out(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "in" / "a"
    path.parent.mkdir()
    if kind == "tar":
        made = tar(path, ("ok", b"1"), (name, b"evil"))
    else:
        made = zipped(path, ("ok", b"1", 0), (name, b"evil", 0))
    with pytest.raises(LockError, match="refused"):
        unpack(made, tmp_path / "in" / "out")
    assert all_below(tmp_path) <= {"in", "in/a", "in/out", "in/out/ok"}


@pytest.mark.parametrize(
    "kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z"]
)
def test_special_files(tmp_path: Path, kind: bytes) -> None:
    made = tar(tmp_path / "a", ("ok", b"1"), special("odd", kind))
    try:
        unpack(made, tmp_path / "out")
    except LockError:
        assert all_below(tmp_path / "out") == {"ok"}
    else:  # what tar itself calls a regular file by another letter
        assert (tmp_path / "out" / "odd").is_file()
        assert not (tmp_path / "out" / "odd").is_symlink()


@pytest.mark.parametrize("mode", [0o010644, 0o020644, 0o060644, 0o140644])
def test_special_files_in_a_zip(tmp_path: Path, mode: int) -> None:
    made = zipped(tmp_path / "a", ("odd", b"", mode))
    with pytest.raises(LockError, match="special"):
        unpack(made, tmp_path / "out")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    made = tar(tmp_path / "a", special("d", tarfile.SYMTYPE, str(outside)), ("d/evil", b"x"))
    with pytest.raises(LockError, match="symlink and a folder"):
        unpack(made, tmp_path / "out")
    assert not list(outside.iterdir())


def test_a_link_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    made = tar(tmp_path / "a", special("f", tarfile.SYMTYPE, str(victim)), ("f", b"evil"))
    with pytest.raises(LockError, match="twice"):
        unpack(made, tmp_path / "out")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../x", "a/../../x", "sub/../../x", "up/../../x"]
)
def test_links_that_lead_out(tmp_path: Path, target: str) -> None:
    made = tar(
        tmp_path / "a", ("p/sub/f", b"1"), special("p/up", tarfile.SYMTYPE, "sub"),
        special("p/link", tarfile.SYMTYPE, target),
    )  # fmt: skip
    unpack(made, tmp_path / "out")
    folder = choose_folder(made, tmp_path / "out", ".")
    with pytest.raises(LockError, match="leads out"):
        check_links(made, folder)


def test_links_that_lead_out_of_the_chosen_folder_only(tmp_path: Path) -> None:
    made = tar(
        tmp_path / "a", ("p/other/f", b"1"), ("p/src/f", b"1"),
        special("p/src/link", tarfile.SYMTYPE, "../other/f"),
    )  # fmt: skip
    unpack(made, tmp_path / "out")
    check_links(made, choose_folder(made, tmp_path / "out", "."))
    with pytest.raises(LockError, match="leads out"):
        check_links(made, choose_folder(made, tmp_path / "out", "src"))


def test_a_hard_link_to_what_is_not_in_it(tmp_path: Path) -> None:
    made = tar(tmp_path / "a", ("ok", b"1"), special("h", tarfile.LNKTYPE, "../../etc/passwd"))
    with pytest.raises(LockError, match="leads out"):
        unpack(made, tmp_path / "out")
    made = tar(tmp_path / "b", special("s", tarfile.SYMTYPE, "/etc/passwd"),
               special("h", tarfile.LNKTYPE, "s"))  # fmt: skip
    with pytest.raises(LockError, match="no earlier file"):
        unpack(made, tmp_path / "out2")


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("a", "a", "twice"),
        ("a/f", "./a//f", "twice"),
        ("README", "Readme", "differ only"),
        ("Src/f", "src/g", "differ only"),
        ("caf\u00e9", "cafe\u0301", "differ only"),
        ("stra\u00dfe", "STRASSE", "differ only"),
        ("a", "a/b", "a file and a folder"),
        ("a/b", "a", "twice"),
    ],
)
def test_names_that_collide(tmp_path: Path, one: str, other: str, why: str) -> None:
    made = tar(tmp_path / "a", (one, b"1"), (other, b"2"))
    with pytest.raises(LockError, match=why):
        unpack(made, tmp_path / "out")


def test_bombs_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_BYTES", 10_000_000)
    made = tar(tmp_path / "a", *((f"f{i}", bytes(3_000_000)) for i in range(5)))
    assert made.stat().st_size < 30_000
    with pytest.raises(LockError, match="more than 10,000,000 bytes"):
        unpack(made, tmp_path / "out")
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) <= 10_000_000
    monkeypatch.setattr(room, "MAX_FILES", 10)
    made = tar(tmp_path / "b", *((f"f{i}", b"") for i in range(20)))
    with pytest.raises(LockError, match="more than 10 files"):
        unpack(made, tmp_path / "out2")


def test_a_zip_that_lies_about_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_BYTES", 100_000)
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("f", bytes(5_000_000))
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data.replace((5_000_000).to_bytes(4, "little"), b"\x0a\0\0\0"))
    with pytest.raises(LockError, match="refused"):
        unpack(tmp_path / "a", tmp_path / "out")


def truncate(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip, lambda _: b"", lambda _: b"<html>no</html>"])
@pytest.mark.parametrize("kind", ["w:gz", "w:xz", "zip"])
def test_damaged_archives(tmp_path: Path, damage: Callable[[bytes], bytes], kind: str) -> None:
    noise = os.urandom(20_000)
    made = tmp_path / "a"
    if kind == "zip":
        zipped(made, ("p/f", noise, 0), ("p/g", noise, 0))
    else:
        tar(made, ("p/f", noise), ("p/g", noise), mode=kind)
    made.write_bytes(damage(made.read_bytes()))
    with pytest.raises(LockError, match="refused"):
        unpack(made, tmp_path / "out")


def test_an_encrypted_zip(tmp_path: Path) -> None:
    zipped(tmp_path / "a", ("f", b"secret", 0))
    data = bytearray((tmp_path / "a").read_bytes())
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(magic) + offset] |= 1
    (tmp_path / "a").write_bytes(bytes(data))
    with pytest.raises(LockError, match="encrypted"):
        unpack(tmp_path / "a", tmp_path / "out")


def test_an_archive_without_files(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="no files"):
        unpack(tar(tmp_path / "a", special("d", tarfile.DIRTYPE)), tmp_path / "out")


@pytest.mark.parametrize("date", [-5, 2**40, 0])
def test_odd_dates_are_bounded(tmp_path: Path, date: int) -> None:
    info = tarfile.TarInfo("f")
    info.mtime = date
    dates = unpack(tar(tmp_path / "a", info), tmp_path / "out")
    assert 0 <= dates["f"] < 2**32


@pytest.mark.parametrize("folder", ["nope", "../out", "/etc", "src/../..", "f.txt", "link"])
def test_a_folder_that_is_none(tmp_path: Path, folder: str) -> None:
    made = tar(
        tmp_path / "a", ("p/src/f", b"1"), ("p/f.txt", b"1"),
        special("p/link", tarfile.SYMTYPE, "src"),
    )  # fmt: skip
    unpack(made, tmp_path / "out")
    with pytest.raises(LockError, match="refused"):
        choose_folder(made, tmp_path / "out", folder)


def test_the_folder_is_found_with_and_without_the_top_one(tmp_path: Path) -> None:
    made = tar(tmp_path / "a", ("p-1/src/f", b"1"), ("p-1/g", b"1"))
    out = tmp_path / "out"
    unpack(made, out)
    assert choose_folder(made, out, "src") == out / "p-1/src"
    assert choose_folder(made, out, "p-1/src/") == out / "p-1/src"
    assert choose_folder(made, out, "./src") == out / "p-1/src"
