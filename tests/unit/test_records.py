"""Records are whole however a run ends and hold no secrets; the index follows the folders."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import HostError, NotFound, NotHealthy
from bakehouse.models import check
from bakehouse.paths import Places
from bakehouse.runs.index import SCHEMA, Index
from bakehouse.runs.store import Record, Run, read_record, record_of

PASSED = check("a", "1", "1", "here", ok=True)
FAILED = check("b", "1", "2", "here", ok=False)


def read(run: Run) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run.record.read_text())
    Record.model_validate(data)
    return data


def test_record_of_a_good_run(context: Context) -> None:
    with Run.start(context, "serve", "smollm2-cpu") as run:
        run.check(PASSED)
        run.fact("url", "http://127.0.0.1:1")
        run.version("engine", "b1")
        run.pin(lock="l" * 64, build="d" * 64)
        with run.step("launch", ["server", "-m", "x"]) as step:
            step.log.write_text("loading\n")
            step.code = 0
        run.finish("READY")
    data = read(run)
    assert (data["ok"], data["exit"], data["verdict"]) == (True, 0, "READY")
    assert data["steps"][0]["log"] == "01-launch.log"
    assert data["steps"][0]["code"] == 0
    assert data["build"] == "d" * 64
    assert run.folder.name.split("-", 1)[1].startswith("serve-smollm2-cpu-")
    latest, *_ = Index(context.places).list(task="serve", recipe="smollm2-cpu")
    assert (latest.id, latest.ok, latest.verdict) == (run.id, True, "READY")
    assert read_record(context.places, run.id).versions == {"engine": "b1"}


def test_record_is_unfinished_until_the_run_ends(context: Context) -> None:
    with Run.start(context, "build", "x") as run:
        assert read(run)["verdict"] == "unfinished"
        with run.step("compile", ["ninja"]):
            assert read(run)["steps"][0]["id"] == "compile"
            assert read(run)["ok"] is False
        found, *_ = Index(context.places).list()
        assert found.verdict == "unfinished"


def test_record_is_not_ok_if_a_check_failed(context: Context) -> None:
    with Run.start(context, "probe", None) as run:
        run.check(PASSED, FAILED)
    assert read(run)["ok"] is False
    assert read(run)["exit"] == 1


def test_record_holds_the_error_that_ended_the_run(context: Context) -> None:
    unhealthy = NotHealthy("it died", where="log:3", hint="look", checks=[FAILED])
    ends: list[tuple[BaseException, int, str]] = [
        (unhealthy, 7, "not-healthy"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oops"), 1, "unexpected"),
        (SystemExit(3), 1, "unexpected"),
    ]
    for error, exit_code, id_ in ends:
        with pytest.raises(type(error)) as caught, Run.start(context, "serve", "x") as run:
            with run.step("load"):
                pass
            raise error
        data = read(run)
        assert (data["ok"], data["exit"], data["error"]["id"]) == (False, exit_code, id_)
        assert record_of(caught.value) == str(run.folder)
        assert (run.folder / "traceback.txt").exists() == (id_ == "unexpected")
        if error is unhealthy:
            assert data["checks"] == [FAILED.to_data()]
            assert data["error"]["hint"] == "look"


def test_record_and_logs_hide_secrets(context: Context) -> None:
    secrets = {"HF_TOKEN": "hf-very-secret", "MINE": "s3cret", "FILEKEY": "from/a file+key"}
    context = replace(context, environment={**context.environment, **secrets})
    with (
        pytest.raises(NotHealthy),
        Run.start(context, "serve", "x", secrets=["MINE"]) as run,
    ):
        run.hide(secrets["FILEKEY"])
        run.fact("seen", {"deep": [f"key={v}" for v in secrets.values()]})
        with run.step("launch", ["s", "--api-key", *secrets.values()]) as step:
            step.log.write_bytes("\n".join(secrets.values()).encode() + b"\n\xff\xfe tail")
        raise NotHealthy(f"bad key {secrets['MINE']}", where=secrets["HF_TOKEN"])
    everything = b"".join(p.read_bytes() for p in context.places.state.rglob("*") if p.is_file())
    assert b"tail" in everything
    assert b"\xff\xfe" in everything
    for value in secrets.values():
        assert value.encode() not in everything


def test_record_holds_values_that_json_cannot(context: Context) -> None:
    with Run.start(context, "probe", "x") as run:
        run.fact("odd", {"nan": float("nan"), "surrogate": "\ud800", "path": Path("/x"), 1: {2}})
    odd = read(run)["facts"]["odd"]
    assert odd == {"nan": "nan", "surrogate": "?", "path": "/x", "1": [2]}


def test_record_names_a_state_folder_that_is_not_writable(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    context = Context(places=Places(tmp_path / "cache", blocked / "state"), recipes=tmp_path)
    with pytest.raises(HostError) as caught, Run.start(context, "serve", "x"):
        pytest.fail("must not begin")
    assert str(blocked) in str(caught.value.where)
    assert "BAKEHOUSE_HOME" in str(caught.value.hint)


def test_record_of_an_unknown_run_is_not_found(context: Context) -> None:
    with pytest.raises(NotFound):
        read_record(context.places, "nothing")
    with pytest.raises(NotFound):
        read_record(context.places, "../../etc")


def make(context: Context, recipe: str) -> str:
    with Run.start(context, "serve", recipe) as run:
        run.finish(f"READY {recipe}")
    return run.id


def remove(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    path.write_bytes(b"this is not a database, whatever it says" * 100)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def older(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE runs")
        db.execute("CREATE TABLE runs (something TEXT)")
        db.execute(f"PRAGMA user_version = {SCHEMA - 1}")
    db.close()


def stripped(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE runs")
    db.close()


def swapped(path: Path) -> None:
    """A page that opens well and lies: the automatic index names rows that the table lacks."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        pages = dict(db.execute("SELECT name, rootpage FROM sqlite_master").fetchall())
    db.close()
    data, size = bytearray(path.read_bytes()), 4096
    begin = (pages["sqlite_autoindex_runs_1"] - 1) * size
    data[begin + 100 : begin + size] = bytes(size - 100)
    path.write_bytes(data)


def test_index_is_rebuilt_from_the_folders(context: Context) -> None:
    ids = {make(context, "one"), make(context, "two")}
    for harm in (remove, damage, cut, older, stripped, swapped):
        harm(context.places.index)
        assert {e.id for e in Index(context.places).list()} == ids, harm.__name__
        harm(context.places.index)
        ids.add(make(context, "three"))
        assert {e.id for e in Index(context.places).list()} == ids, harm.__name__


def test_index_drops_deleted_runs_and_skips_unreadable_ones(
    context: Context,
) -> None:
    gone, kept = make(context, "gone"), make(context, "kept")
    for file in (context.places.runs / gone).iterdir():
        file.unlink()
    (context.places.runs / gone).rmdir()
    (context.places.runs / "rubbish").mkdir()
    (context.places.runs / "rubbish" / "record.json").write_text("[1, 2")
    assert [e.id for e in Index(context.places).list()] == [kept]
    assert [e.recipe for e in Index(context.places).list(recipe="gone")] == []


def test_index_lists_newest_first_up_to_a_limit(context: Context) -> None:
    made = [make(context, "same") for _ in range(3)]
    assert {e.id for e in Index(context.places).list(ok=True)} == set(made)
    assert len(Index(context.places).list(limit=2)) == 2
    assert Index(context.places).list(ok=False) == ()
    starts = [e.started for e in Index(context.places).list()]
    assert starts == sorted(starts, reverse=True)
