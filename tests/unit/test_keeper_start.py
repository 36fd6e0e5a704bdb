"""The supervisor: how it is started, and that it survives a log that cannot be scanned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bakehouse.server import launcher
from bakehouse.server.launcher import start_supervisor
from bakehouse.server.state import SupervisorInput
from bakehouse.server.supervisor import Supervisor


def test_supervisor_can_import_what_we_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages may come from PYTHONPATH, which no child inherits."""
    seen: dict[str, str] = {}

    def popen(_argv: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.update(env)
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    monkeypatch.setattr(subprocess, "Popen", popen)
    start_supervisor(tmp_path, cast(SupervisorInput, SimpleNamespace(to_json=lambda: "{}"))).close()
    found = seen["PYTHONPATH"].split(":")
    assert str(tmp_path / "site") in found
    assert found[0] == str(Path(launcher.__file__).resolve().parents[2])


def test_supervisor_reports_once_that_a_log_cannot_be_scanned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    noted: list[dict[str, Any]] = []

    def findings() -> list[dict[str, Any]]:
        raise ModuleNotFoundError("No module named 'pydantic'")

    keeper = cast(Any, object.__new__(Supervisor))
    keeper.state = SimpleNamespace(phase="proven", findings=())
    keeper.log = SimpleNamespace(findings=findings)
    keeper.blind = False
    keeper._note = lambda **changes: noted.append(changes)
    keeper._read_log()
    keeper._read_log()
    (only,) = noted
    (found,) = only["findings"]
    assert found["severity"] == "lost"
    assert "pydantic" in found["line"]
    assert "ModuleNotFoundError" in capsys.readouterr().err
