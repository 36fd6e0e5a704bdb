"""Structured events: one for each step, in the run's folder and with `--debug`."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from bakehouse import debug_log
from bakehouse.context import Context
from bakehouse.runs.store import EVENTS, Run


def test_events_of_a_run_name_its_steps_without_secrets(context: Context) -> None:
    context = replace(context, environment={"HF_TOKEN": "hf-very-secret"})
    stream = io.StringIO()
    debug_log.configure(stream, context.redactor, as_json=True)
    try:
        with Run.start(context, "build", "x") as run:
            with run.step("configure", ["cmake", "hf-very-secret"]) as step:
                step.code = 0
            with pytest.raises(ValueError, match="late"), run.step("compile"):
                run.hide("late-secret")
                debug_log.debug("http", url="only in debug")
                raise ValueError("late")
    finally:
        debug_log.silence()
    lines = (run.folder / EVENTS).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [(e["event"], e["id"], e["code"], e["run"]) for e in events] == [
        ("step", "configure", 0, run.id),
        ("step", "compile", None, run.id),
    ]
    assert "hf-very-secret" not in stream.getvalue() + "".join(lines)
    assert "only in debug" in stream.getvalue()


def test_events_without_a_run_or_debug_go_nowhere() -> None:
    debug_log.event("step", id="x")
    debug_log.debug("http")
