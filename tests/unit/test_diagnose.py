"""`invoke diagnose`: verdict, exit code and clear errors for whatever is given as a log."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bakehouse.cli import main
from bakehouse.commands import diagnose
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, NotFound, UsageError

FATAL = "error: invalid argument: --draft-n-max\n"
SILENT = "llm_load_vocab: missing pre-tokenizer type, using: 'default'\n"
FINE = "srv  llama_server: model loaded\n"


def _log(folder: Path, text: str | bytes, name: str = "a.log") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_diagnose_exit_codes(context: Context, tmp_path: Path) -> None:
    rows = [(FATAL, 7), (SILENT, 8), (FINE, 0), (SILENT + FATAL, 7), ("\n", 0)]
    rows.append((FATAL.rstrip(), 7))
    got = [
        (text, diagnose.run(context, diagnose.Options(_log(tmp_path, text))).exit)
        for text, _ in rows
    ]
    assert got == rows


def test_json_lists_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _log(tmp_path, FINE + FATAL + FATAL)

    code = main("diagnose", {"file": file, "engine": "llama.cpp", "stage": "launch"}, json=True)

    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    (finding,) = document["result"]["findings"]
    assert code == document["exit"] == 7
    assert document["result"]["lines"] == 3
    assert {"id", "severity", "stage", "line_number", "line", "cause", "mend", "count"} <= set(
        finding
    )
    assert (finding["id"], finding["line_number"], finding["count"]) == ("flag-unknown", 2, 2)
    assert finding["stage"] == "launch"


def test_people_read_the_first_cause_first(context: Context, tmp_path: Path) -> None:
    text = "E srv llama_server: exiting due to model loading error\n" + SILENT + FATAL

    outcome = diagnose.run(context, diagnose.Options(_log(tmp_path, text)))

    assert outcome.text.splitlines()[0].startswith("SILENT pre-tokenizer-missing")
    assert "first cause: pre-tokenizer-missing, line 2 of 3" in outcome.text


def test_nothing_found_is_not_called_proof(context: Context, tmp_path: Path) -> None:
    outcome = diagnose.run(context, diagnose.Options(_log(tmp_path, FINE)))

    assert "no proof" in outcome.text


def test_a_gzipped_log_is_read(context: Context, tmp_path: Path) -> None:
    file = _log(tmp_path, gzip.compress(FATAL.encode()), "a.log.gz")

    assert diagnose.run(context, diagnose.Options(file)).exit == 7


def test_a_log_that_was_cut_while_written_begins_with_zeros(
    context: Context, tmp_path: Path
) -> None:
    file = _log(tmp_path, bytes(1 << 19) + FATAL.encode())

    assert diagnose.run(context, diagnose.Options(file)).exit == 7


@pytest.mark.parametrize("data", [b"ok\n" + bytes(9000), b"ok\n" + bytes(9000) + FATAL.encode()])
def test_a_short_log_that_a_crash_filled_with_zeros(
    context: Context, tmp_path: Path, data: bytes
) -> None:
    done = diagnose.run(context, diagnose.Options(_log(tmp_path, data)))

    assert done.exit == (7 if FATAL.encode() in data else 0)


@pytest.mark.parametrize("text", ["", FATAL])
def test_standard_input(context: Context, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    if text:
        assert diagnose.run(context, diagnose.Options("-")).exit == 7
    else:
        with pytest.raises(UsageError, match="standard input is empty"):
            diagnose.run(context, diagnose.Options("-"))


NOT_LOGS: list[tuple[bytes, str]] = [
    (b"", "is empty"),
    (b"GGUF\x03\x00\x00\x00" + bytes(100), "is a GGUF model"),
    (b"\x7fELF" + bytes(100), "is a program"),
    (b"PK\x03\x04abc", "is a zip archive"),
    (bytes(range(256)) * 40, "is a binary file"),
    ("fatal: x\n".encode("utf-16"), "is UTF-16 text"),
    (gzip.compress(b"some log\n" * 999)[:-12], "is a damaged gzip file"),
    (bytes(5000), "nothing but zeros"),
    (b"\x1f\x8bnot really", "is a damaged gzip file"),
]


def test_diagnose_names_what_is_not_a_log(context: Context, tmp_path: Path) -> None:
    for data, message in NOT_LOGS:
        with pytest.raises(UsageError, match=message):
            diagnose.run(context, diagnose.Options(_log(tmp_path, data)))


WRONG_OPTIONS: list[tuple[diagnose.Options, type[BakehouseError], str]] = [
    (diagnose.Options("/nowhere/at/all.log"), NotFound, "log .* not found"),
    (diagnose.Options("/"), UsageError, "is a folder"),
    (diagnose.Options("a\0b"), HostError, "cannot be opened"),
    (diagnose.Options("x", engine="lama"), UsageError, "--engine lama"),
    (diagnose.Options("x", stage="lunch"), UsageError, "--stage lunch"),
]


def test_diagnose_refuses_wrong_options(context: Context) -> None:
    for options, kind, message in WRONG_OPTIONS:
        with pytest.raises(kind, match=message):
            diagnose.run(context, options)


@pytest.mark.parametrize(
    ("file", "kind", "message"),
    [
        ("/dev/zero", UsageError, "nothing but zeros"),
        ("/dev/null", UsageError, "is empty"),
        ("/proc/self/mem", HostError, "/proc/self/mem cannot be read"),
    ],
)
def test_files_that_are_no_files(
    context: Context, file: str, kind: type[BakehouseError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        diagnose.run(context, diagnose.Options(file))
    assert caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(context: Context, tmp_path: Path) -> None:
    file = _log(tmp_path, FATAL)
    Path(file).chmod(0)

    with pytest.raises(HostError, match="cannot be opened: Permission denied"):
        diagnose.run(context, diagnose.Options(file))


def test_a_file_that_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("diagnose", {"file": None}) == 2
    assert "--file is missing" in capsys.readouterr().err
