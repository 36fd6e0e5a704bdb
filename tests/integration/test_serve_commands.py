"""`serve`, `status`, `logs` and `stop` as a user calls them; only the engine is fake."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.commands import serve
from bakehouse.paths import Places
from bakehouse.resolver import lock_path
from bakehouse.server.processes import marked
from bakehouse.server.status import folders, get_status, stop
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.serving import write

pytestmark = pytest.mark.integration

Invoke = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("BAKEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(serve, "ensure_build", lambda *_: None)
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("a", 8, 4)]))
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("x/CMakeLists.txt")
        entry.size, entry.mtime = 2, 1_700_000_000
        archive.addfile(entry, io.BytesIO(b"#\n"))
    write(tmp_path)
    yield tmp_path
    for folder in folders(Places.from_environment()):
        stop(folder)
        assert not marked(folder)


@pytest.fixture
def invoke(home: Path, capsys: pytest.CaptureFixture[str]) -> Invoke:
    def call(task: str, **options: Any) -> tuple[int, dict[str, Any], str]:
        code = cli.main(task, options, json=True, recipes=home)
        out = capsys.readouterr()
        return code, json.loads(out.out), out.err

    return call


def test_serve_status_logs_and_stop(home: Path, invoke: Invoke) -> None:
    code, said, _ = invoke("serve", recipe="tiny")
    assert said["error"] is None
    assert code == 0
    result = said["result"]
    assert not result["again"]
    assert result["answers"][0]["verdict"] == "right"
    record = json.loads(Path(result["record"]).read_text())
    assert record["ok"]
    assert record["verdict"].startswith("READY at http://127.0.0.1:")
    assert {c["id"] for c in record["checks"]} >= {"nonce", "build", "nonce-after"}
    assert (Path(result["record"]).parent / "server.log").exists()

    again = invoke("serve", recipe="tiny")[1]["result"]
    assert again["again"]
    assert again["pid"] == result["pid"]

    (one,) = invoke("status")[1]["result"]["servers"]
    assert (one["status"], one["url"], one["pid"]) == ("running", result["url"], result["pid"])
    log = invoke("logs", recipe="tiny", lines="1")[1]["result"]["lines"]
    assert log[0].startswith("0.00.000.004 I srv")

    code, said, _ = invoke("stop", recipe="tiny")
    assert (code, said["result"]["servers"][0]["ran"]) == (0, True)
    code, said, _ = invoke("stop", recipe="tiny")
    assert (code, said["result"]["servers"][0]["ran"]) == (0, False)
    (one,) = invoke("status", recipe="tiny")[1]["result"]["servers"]
    assert (one["status"], one["ended"]["why"]) == ("ended", "stopped")
    assert invoke("stop", all_=True)[0] == 0


def test_serve_prints_what_people_need(
    home: Path, invoke: Invoke, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main("serve", {"recipe": "tiny"}, recipes=home) == 0
    text = capsys.readouterr().out
    for part in ("What is 2+2?", "READY   http://127.0.0.1:", "record  ", "log     ",
                 "invoke stop --recipe tiny"):  # fmt: skip
        assert part in text
    assert cli.main("status", {}, recipes=home) == 0
    assert "tiny" in capsys.readouterr().out
    assert cli.main("logs", {"recipe": "tiny"}, recipes=home) == 0
    assert "listening on" in capsys.readouterr().out
    assert cli.main("stop", {"all_": True}, recipes=home) == 0
    assert "tiny: stopped" in capsys.readouterr().out
    assert cli.main("stop", {"all_": True}, recipes=home) == 0
    assert "no server runs" in capsys.readouterr().out


def test_serve_of_wrong_answers_exits_with_8(home: Path, invoke: Invoke) -> None:
    write(home, more="--fault wrong")
    code, said, _ = invoke("serve", recipe="tiny")
    assert code == 8
    assert said["error"]["id"] == "not-correct"
    record = json.loads((Path(said["result"]["record"]) / "record.json").read_text())
    assert record["answers"][0]["verdict"] == "wrong"
    assert record["exit"] == 8
    assert not get_status(Places.from_environment().servers / "tiny").alive


def test_serve_refuses_bad_flags(home: Path, invoke: Invoke) -> None:
    rows: list[tuple[dict[str, Any], int, str]] = [
        ({"recipe": "tiny", "port": "x"}, 2, "--port takes a number"),
        ({"recipe": "tiny", "port": "65536"}, 2, "--port takes a number"),
        ({"recipe": "tiny", "host": "0.0.0.0"}, 2, "API key"),
        ({"recipe": "tiny", "host": "nowhere"}, 2, "not an IP address"),
        ({"recipe": "tiny", "host": "192.0.2.1"}, 2, "API key"),
        ({"recipe": "other"}, 3, "other"),
        ({"recipe": "tiny", "locked": True}, 4, "lock"),
        ({}, 2, "--recipe"),
        ({"recipe": "tiny", "foreground": True}, 2, "--foreground"),
    ]
    got = []
    for options, _, words in rows:
        if "locked" in options:
            lock_path(home / "tiny.yaml").unlink()
        elif options.get("recipe") == "tiny":
            assert invoke("lock", recipe="tiny")[0] == 0
        found, said, _ = invoke("serve", **options)
        got.append((options, found, words in str(said["error"]) and words))
    assert got == rows


def test_serve_names_the_line_of_a_reserved_flag(home: Path, invoke: Invoke) -> None:
    write(home, more="--port=1")
    code, said, _ = invoke("serve", recipe="tiny")
    assert code == 2
    assert "tiny.yaml:" in said["error"]["where"]
    assert "--port (set serve.port)" in said["error"]["where"]


def test_serve_dry_run_starts_nothing(home: Path, invoke: Invoke) -> None:
    assert invoke("serve", recipe="tiny", dry_run=True)[0] == 4  # nor is a lock written
    assert invoke("lock", recipe="tiny")[0] == 0
    code, said, _ = invoke("serve", recipe="tiny", dry_run=True)
    assert code == 0
    assert "tiny,~bakehouse-{nonce}" in said["result"]["serve"]["argv"]
    assert not folders(Places.from_environment())


def test_status_logs_and_stop_of_an_unknown_server_exit_with_3(home: Path, invoke: Invoke) -> None:
    assert [invoke(task, recipe="nobody")[0] for task in ("status", "logs", "stop")] == [3, 3, 3]


def test_stop_of_a_recipe_that_never_ran(
    home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to stop is no error, also if a Docker Engine is installed and does not run."""
    for engine in ("", "unix:///nowhere/docker.sock", "tcp://127.0.0.1:1"):
        if engine:
            monkeypatch.setenv("DOCKER_HOST", engine)
        assert invoke("stop", recipe="tiny")[0] == 0
        assert invoke("stop", recipe=str(home / "tiny.yaml"))[0] == 0
        assert invoke("logs", recipe="tiny")[0] == 3
        (one,) = invoke("status", recipe="tiny")[1]["result"]["servers"]
        assert one["status"] == "ended"
    assert invoke("stop")[0] == 2
    assert invoke("stop", recipe="tiny", all_=True)[0] == 2


def test_serve_hides_a_key_from_the_environment(
    home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home)
    text = (home / "tiny.yaml").read_text().replace("  port: 0", "  port: 0\n  api_key: {env: K1}")
    (home / "tiny.yaml").write_text(text)
    assert invoke("serve", recipe="tiny")[0] == 9
    monkeypatch.setenv("K1", "two words")
    assert invoke("serve", recipe="tiny")[0] == 9
    monkeypatch.setenv("K1", "sekret-key-1")
    code, said, err = invoke("serve", recipe="tiny", host="0.0.0.0")
    assert code == 0
    assert "sekret-key-1" not in json.dumps(said) + err
    record = Path(said["result"]["record"])
    assert "sekret-key-1" not in record.read_text()
    assert next(c for c in said["checks"] if c["id"] == "key")["verdict"] == "passed"


def test_logs_escapes_control_characters(
    home: Path, invoke: Invoke, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, more=r"""--fault 'print=\e[31mred'""".replace(r"\e", "\x1b"))
    (home / "tiny.yaml").write_text(
        (home / "tiny.yaml")
        .read_text()
        .replace("\x1b", "{{ vars.escape }}")
        .replace("  port: 0", '  port: 0\n  vars: {escape: "\\e"}')
    )
    assert invoke("serve", recipe="tiny")[0] == 0
    assert cli.main("logs", {"recipe": "tiny"}, recipes=home) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert r"\x1b[31mred" in text


def test_logs_follow_ends_with_the_server(
    home: Path, invoke: Invoke, capsys: pytest.CaptureFixture[str]
) -> None:
    write(home, more="--fault talks")
    assert invoke("serve", recipe="tiny")[0] == 0
    folder = Places.from_environment().servers / "tiny"
    threading.Timer(1.0, lambda: stop(folder)).start()
    assert cli.main("logs", {"recipe": "tiny", "follow": True, "lines": "2"}, recipes=home) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert lines[-1].startswith("loading ")


def test_serve_in_the_foreground_reports_a_death(
    home: Path, invoke: Invoke, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Places.from_environment().servers / "tiny"

    def kill() -> None:
        deadline = time.monotonic() + 60
        while get_status(folder).word != "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        state = get_status(folder).state
        if state and state.server:
            state.server.send(9)

    threading.Thread(target=kill).start()
    code = cli.main("serve", {"recipe": "tiny", "foreground": True}, recipes=home)
    out = capsys.readouterr()
    assert code == 7
    assert "READY" in out.out
    assert "SIGKILL" in out.err


RESERVE = "memory: {reserve: 1000TiB}"


def test_serve_refuses_what_does_not_fit_into_memory(home: Path, invoke: Invoke) -> None:
    write(home, tail=RESERVE)
    code, said, _ = invoke("serve", recipe="tiny")
    assert code == 9
    assert said["error"]["id"] == "memory"
    assert [c["verdict"] for c in said["checks"] if c["id"] == "memory-fits"] == ["failed"]
    assert not get_status(Places.from_environment().servers / "tiny").alive


def test_serve_records_an_accepted_memory_risk(home: Path, invoke: Invoke) -> None:
    write(home, tail=RESERVE)
    code, said, _ = invoke("serve", recipe="tiny", accept_memory_risk="it is my machine")
    assert (code, said["error"]) == (0, None)
    facts = json.loads(Path(said["result"]["record"]).read_text())["facts"]
    assert facts["memory_risk_accepted"] == "it is my machine"
    assert facts["memory"]["lines"]


def test_serve_refuses_a_broken_model_header(home: Path, invoke: Invoke) -> None:
    broken = gguf_bytes(llama_metadata(general__architecture=None), [f32("a", 8)])
    (home / "model.gguf").write_bytes(broken)
    code, said, _ = invoke("serve", recipe="tiny")
    assert (code, said["error"]["id"]) == (4, "model-architecture")
    assert "no general.architecture" in said["error"]["what"]


def test_plan_shows_the_memory_budget(home: Path, invoke: Invoke) -> None:
    write(home, more="-c 1024", name="tiny.yaml")
    assert invoke("lock", recipe="tiny")[0] == 0
    code, said, _ = invoke("plan", recipe="tiny")
    assert (code, said["error"]) == (0, None)
    lines = {line["item"]: line for line in said["result"]["memory"]["lines"]}
    assert lines["cache, full attention"]["bytes"] == 1024 * 2 * 2 * 32 * 2
    assert all(line["formula"] and line["source"] for line in lines.values())
    assert [c["id"] for c in said["checks"]] == ["memory-fits"]
    (home / "model.gguf").write_bytes(b"GGUF")
    assert invoke("plan", recipe="tiny")[1]["checks"][0]["verdict"] == "failed"
