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
from bakehouse.sources import archives
from bakehouse.sources.archives import check_links, choose_folder, unpack

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


def test_unpack_tar(tmp_path: Path) -> None:
    for mode in ("gz", "xz", "bz2"):
        script = tarfile.TarInfo("p-1/run")
        script.mode = 0o6755
        made = tar(
            tmp_path / f"a.{mode}", special("p-1", tarfile.DIRTYPE), ("p-1/a.txt", b"a"), script,
            special("p-1/link", tarfile.SYMTYPE, "a.txt"),
            special("p-1/hard", tarfile.LNKTYPE, "p-1/a.txt"), mode=f"w:{mode}",
        )  # fmt: skip
        out = tmp_path / mode
        dates = unpack(made, out)
        assert all_below(out) == {"p-1", "p-1/a.txt", "p-1/run", "p-1/link", "p-1/hard"}
        assert dates["p-1/a.txt"] == 1_600_000_000
        assert (out / "p-1/hard").read_bytes() == b"a"
        assert stat.S_IMODE((out / "p-1/run").stat().st_mode) == 0o755  # no setuid
        assert stat.S_IMODE((out / "p-1/a.txt").stat().st_mode) == 0o644
        assert choose_folder(made, out, ".") == out / "p-1"
        check_links(made, out / "p-1")


def test_unpack_zip(tmp_path: Path) -> None:
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


def test_unpack_refuses_names_that_leave_the_folder(tmp_path: Path) -> None:
    for number, name in enumerate(ESCAPES):
        for kind in ("tar", "zip"):
            base = tmp_path / f"{number}-{kind}"
            path = base / "in" / "a"
            path.parent.mkdir(parents=True)
            if kind == "tar":
                made = tar(path, ("ok", b"1"), (name, b"evil"))
            else:
                made = zipped(path, ("ok", b"1", 0), (name, b"evil", 0))
            with pytest.raises(LockError, match="unsafe or damaged"):
                unpack(made, base / "in" / "out")
            assert all_below(base) <= {"in", "in/a", "in/out", "in/out/ok"}, (name, kind)


def test_unpack_refuses_special_files(tmp_path: Path) -> None:
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z")
    for number, kind in enumerate(kinds):
        made = tar(tmp_path / f"a{number}", ("ok", b"1"), special("odd", kind))
        out = tmp_path / f"out{number}"
        try:
            unpack(made, out)
        except LockError:
            assert all_below(out) == {"ok"}
        else:  # what tar itself calls a regular file by another letter
            assert (out / "odd").is_file()
            assert not (out / "odd").is_symlink()
    for number, mode in enumerate((0o010644, 0o020644, 0o060644, 0o140644)):
        made = zipped(tmp_path / f"z{number}", ("odd", b"", mode))
        with pytest.raises(LockError, match="special"):
            unpack(made, tmp_path / f"zip{number}")


def test_unpack_writes_nothing_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    made = tar(tmp_path / "a", special("d", tarfile.SYMTYPE, str(outside)), ("d/evil", b"x"))
    with pytest.raises(LockError, match="both a symlink and a folder"):
        unpack(made, tmp_path / "out")
    assert not list(outside.iterdir())


def test_unpack_does_not_follow_a_link_to_a_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    made = tar(tmp_path / "a", special("f", tarfile.SYMTYPE, str(victim)), ("f", b"evil"))
    with pytest.raises(LockError, match="twice"):
        unpack(made, tmp_path / "out")
    assert victim.read_text() == "mine"


def test_unpack_refuses_links_that_leave_the_folder(tmp_path: Path) -> None:
    targets = ("/etc/passwd", "../x", "a/../../x", "sub/../../x", "up/../../x")
    for number, target in enumerate(targets):
        made = tar(
            tmp_path / f"a{number}", ("p/sub/f", b"1"), special("p/up", tarfile.SYMTYPE, "sub"),
            special("p/link", tarfile.SYMTYPE, target),
        )  # fmt: skip
        unpack(made, tmp_path / f"out{number}")
        folder = choose_folder(made, tmp_path / f"out{number}", ".")
        with pytest.raises(LockError, match="leaves the folder"):
            check_links(made, folder)


def test_unpack_refuses_links_that_leave_the_source_folder(tmp_path: Path) -> None:
    made = tar(
        tmp_path / "a", ("p/other/f", b"1"), ("p/src/f", b"1"),
        special("p/src/link", tarfile.SYMTYPE, "../other/f"),
    )  # fmt: skip
    unpack(made, tmp_path / "out")
    check_links(made, choose_folder(made, tmp_path / "out", "."))
    with pytest.raises(LockError, match="leaves the folder"):
        check_links(made, choose_folder(made, tmp_path / "out", "src"))


def test_unpack_refuses_hard_links_to_other_files(tmp_path: Path) -> None:
    made = tar(tmp_path / "a", ("ok", b"1"), special("h", tarfile.LNKTYPE, "../../etc/passwd"))
    with pytest.raises(LockError, match="leaves the folder"):
        unpack(made, tmp_path / "out")
    made = tar(tmp_path / "b", special("s", tarfile.SYMTYPE, "/etc/passwd"),
               special("h", tarfile.LNKTYPE, "s"))  # fmt: skip
    with pytest.raises(LockError, match="not an earlier file"):
        unpack(made, tmp_path / "out2")


def test_unpack_refuses_names_that_collide(tmp_path: Path) -> None:
    rows = (
        ("a", "a", "twice"),
        ("a/f", "./a//f", "twice"),
        ("README", "Readme", "differ only"),
        ("Src/f", "src/g", "differ only"),
        ("caf\u00e9", "cafe\u0301", "differ only"),
        ("stra\u00dfe", "STRASSE", "differ only"),
        ("a", "a/b", "both a file and a folder"),
        ("a/b", "a", "twice"),
    )
    for number, (one, other, why) in enumerate(rows):
        made = tar(tmp_path / f"a{number}", (one, b"1"), (other, b"2"))
        with pytest.raises(LockError, match=why):
            unpack(made, tmp_path / f"out{number}")


def test_unpack_stops_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 10_000_000)
    made = tar(tmp_path / "a", *((f"f{i}", bytes(3_000_000)) for i in range(5)))
    assert made.stat().st_size < 30_000
    with pytest.raises(LockError, match="more than 10,000,000 bytes"):
        unpack(made, tmp_path / "out")
    assert sum(p.stat().st_size for p in (tmp_path / "out").iterdir()) <= 10_000_000
    monkeypatch.setattr(archives, "MAX_FILES", 10)
    made = tar(tmp_path / "b", *((f"f{i}", b"") for i in range(20)))
    with pytest.raises(LockError, match="more than 10 files"):
        unpack(made, tmp_path / "out2")


def test_unpack_zip_that_lies_about_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 100_000)
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("f", bytes(5_000_000))
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data.replace((5_000_000).to_bytes(4, "little"), b"\x0a\0\0\0"))
    with pytest.raises(LockError, match="unsafe or damaged"):
        unpack(tmp_path / "a", tmp_path / "out")


def truncate(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


def test_unpack_refuses_damaged_archives(tmp_path: Path) -> None:
    damages: tuple[Callable[[bytes], bytes], ...] = (
        truncate, flip, lambda _: b"", lambda _: b"<html>no</html>",
    )  # fmt: skip
    noise = os.urandom(20_000)
    for kind in ("w:gz", "w:xz", "zip"):
        made = tmp_path / kind
        if kind == "zip":
            zipped(made, ("p/f", noise, 0), ("p/g", noise, 0))
        else:
            tar(made, ("p/f", noise), ("p/g", noise), mode=kind)
        whole = made.read_bytes()
        for number, damage in enumerate(damages):
            made.write_bytes(damage(whole))
            with pytest.raises(LockError, match="unsafe or damaged"):
                unpack(made, tmp_path / f"out-{kind}-{number}")


def test_unpack_refuses_an_encrypted_zip(tmp_path: Path) -> None:
    zipped(tmp_path / "a", ("f", b"secret", 0))
    data = bytearray((tmp_path / "a").read_bytes())
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(magic) + offset] |= 1
    (tmp_path / "a").write_bytes(bytes(data))
    with pytest.raises(LockError, match="encrypted"):
        unpack(tmp_path / "a", tmp_path / "out")


def test_unpack_refuses_an_archive_without_files(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="no files"):
        unpack(tar(tmp_path / "a", special("d", tarfile.DIRTYPE)), tmp_path / "out")


def test_unpack_bounds_dates(tmp_path: Path) -> None:
    for date in (-5, 2**40, 0):
        info = tarfile.TarInfo("f")
        info.mtime = date
        dates = unpack(tar(tmp_path / f"a{date}", info), tmp_path / f"out{date}")
        assert 0 <= dates["f"] < 2**32


def test_source_folder_that_is_not_one(tmp_path: Path) -> None:
    made = tar(
        tmp_path / "a", ("p/src/f", b"1"), ("p/f.txt", b"1"),
        special("p/link", tarfile.SYMTYPE, "src"),
    )  # fmt: skip
    unpack(made, tmp_path / "out")
    for folder in ("nope", "../out", "/etc", "src/../..", "f.txt", "link"):
        with pytest.raises(LockError, match="unsafe or damaged"):
            choose_folder(made, tmp_path / "out", folder)


def test_source_folder_with_and_without_the_top_one(tmp_path: Path) -> None:
    made = tar(tmp_path / "a", ("p-1/src/f", b"1"), ("p-1/g", b"1"))
    out = tmp_path / "out"
    unpack(made, out)
    assert choose_folder(made, out, "src") == out / "p-1/src"
    assert choose_folder(made, out, "p-1/src/") == out / "p-1/src"
    assert choose_folder(made, out, "./src") == out / "p-1/src"
