"""`invoke diagnose`: what a CMake, build, server or container log says, first cause first."""

from __future__ import annotations

import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import HostError, NotFound, UsageError
from bakehouse.logscan.findings import ENGINES, STAGES, Finding, exit_code
from bakehouse.logscan.scanner import Scanner

_CHUNK = 1 << 18
_GZIP = b"\x1f\x8b"
_SAMPLE = 8192
_ONLY_ZEROS = 64 << 20
"""Bytes: a file that begins with more zeros than these is not a log."""
_CONTROLS = bytes(code for code in range(32) if code not in b"\a\b\t\n\v\f\r\x1b")
_ZEROS = re.compile(rb"\0{16,}")
"""A file system leaves such runs in a log that was open when the machine died."""
_COPY = "check its permissions, or give a copy of it"
_KINDS = {
    b"GGUF": "a GGUF model",
    b"\x7fELF": "a program",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "a file compressed with zstd",
    b"\xfd7zX": "a file compressed with xz",
    b"BZh": "a file compressed with bzip2",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"\x89PNG": "a picture",
    b"%PDF": "a PDF document",
}


Options = flags.Diagnose


def run(_: Context, options: Options) -> Outcome:
    """Judge one log. Exit 7 for anything fatal, 8 for silent corruption or a lost feature."""
    engine = _one_of("engine", options.engine, ENGINES)
    stage = _one_of("stage", options.stage, STAGES)
    scanner = Scanner(engine=engine, stage=stage)
    with _opened(options.file) as log:
        size = _feed(scanner, log, options.file)
    if not size:
        raise UsageError(
            f"{_named(options.file)} is empty, so it says nothing, neither good nor bad",
            hint="a server's log is on its standard error: redirect both (`> log 2>&1`)",
        )
    findings = scanner.finish()
    result = {
        "file": options.file,
        "engine": engine,
        "stage": stage,
        "lines": scanner.lines,
        "findings": [finding.to_data() for finding in findings],
    }
    return Outcome(result, _text(findings, scanner.lines), exit=exit_code(findings))


def _feed(scanner: Scanner, log: IO[bytes], file: str) -> int:
    """Read all of a log; return its size in bytes. Raises UsageError if it is no log, or HostError.

    Zeros at the start are skipped: a log that was cut while it was written begins with them.
    """
    size, judged = 0, False
    try:
        while data := log.read(_CHUNK):
            size += len(data)
            text = data if judged else data.lstrip(b"\0")
            if text and not judged:
                _must_be_text(data if data.startswith(tuple(_KINDS)) else text, file)
                judged = True
            elif not judged and size >= _ONLY_ZEROS:
                break
            scanner.feed_bytes(text)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{_named(file)} is a damaged gzip file: {error}",
            where=f"after {size} bytes of text",
            hint="unpack what can be saved with `zcat FILE > log` and give that",
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise HostError(
            f"{_named(file)} cannot be read: {reason}", where=f"after {size} bytes", hint=_COPY
        ) from None
    if size and not judged:
        raise UsageError(
            f"{_named(file)} holds nothing but zeros",
            hint="a log that was cut by a crash of the machine looks so; what it held is lost",
        )
    return size


def _one_of(flag: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is None or value in known:
        return value
    raise UsageError(f"--{flag} {value} is not known", hint=f"one of {', '.join(known)}")


def _named(file: str) -> str:
    return "standard input" if file == "-" else file


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    """Open a log, also a gzipped one. Raises NotFound, UsageError or HostError."""
    if file == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "standard input is a terminal, not a log", hint="pipe one in: `… 2>&1 | invoke …`"
            )
        yield sys.stdin.buffer
        return
    path = Path(os.path.expanduser(file))
    if path.is_dir():
        raise UsageError(f"{file} is a folder", hint="give the log file inside it")
    try:
        raw = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        hint = "check the path; `-` reads standard input"
        raise NotFound.named("log", file, where=str(path.absolute()), hint=hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise HostError(f"{file} cannot be opened: {reason}", hint=_COPY) from None
    with raw:
        packed = path.is_file() and _first_bytes(raw, file)[:2] == _GZIP
        yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw


def _first_bytes(raw: BufferedReader, file: str) -> bytes:
    try:
        return raw.peek(2)
    except OSError as error:
        raise HostError(f"{file} cannot be read: {error.strerror}", hint=_COPY) from None


def _must_be_text(head: bytes, file: str) -> None:
    kind = next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)
    sample = _ZEROS.sub(b"", head)[:_SAMPLE]
    if kind is None and len(sample) - len(sample.translate(None, _CONTROLS)) > len(sample) // 50:
        kind = "a binary file"
    if kind:
        hint = "convert it with iconv -f utf-16 -t utf-8" if "UTF" in kind else "give a log as text"
        raise UsageError(f"{_named(file)} is {kind}, not a log", hint=hint)


def _text(findings: tuple[Finding, ...], lines: int) -> str:
    if not findings:
        return (
            f"nothing known to be bad in {_count(lines)}\n"
            "That is no proof: only answers to known questions are (`invoke probe`)."
        )
    return "\n\n".join([*map(_paragraph, findings), _summary(findings, lines)])


def _paragraph(finding: Finding) -> str:
    often = f", {finding.count:,} lines" if finding.count > 1 else ""
    return "\n".join(
        (
            f"{finding.severity.upper()} {finding.id} ({finding.stage}{often})",
            f"  line {finding.line_number}: {finding.line}",
            f"  cause: {finding.cause}",
            f"  fix:   {finding.mend}",
        )
    )


def _summary(findings: tuple[Finding, ...], lines: int) -> str:
    bad = [finding for finding in findings if finding.bad]
    if not bad:
        kinds = f"{len(findings)} kind{'s' * (len(findings) != 1)} of line"
        return f"nothing bad in {_count(lines)}; {kinds} explained above"
    return f"first cause: {bad[0].id}, line {bad[0].line_number} of {lines}"


def _count(lines: int) -> str:
    return f"{lines} line{'s' * (lines != 1)}"
