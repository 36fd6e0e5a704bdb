"""Judging a patch by two servers in turn; all is real but the engine and its build."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.commands import patch_compare, serve
from bakehouse.commands.patch_compare import Judgement, judge_case
from bakehouse.context import Context
from bakehouse.errors import (
    Fault,
    HostError,
    NotHealthy,
    PatchError,
    RecipeError,
)
from bakehouse.patches.manifest import Expect, manifest_path, patches_folder, read_manifest
from bakehouse.paths import Places
from bakehouse.plan.types import BuildPlan
from bakehouse.server.processes import marked
from bakehouse.server.status import folders, get_status, stop
from tests.support.judging import MORE, RATE, Builds, case, make_home, write

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]

Judge = Callable[..., Judgement]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = Builds()
    monkeypatch.setattr(serve, "ensure_build", made)
    return made


@pytest.fixture
def home(tmp_path: Path, places: Places) -> Iterator[Path]:
    recipes = make_home(tmp_path)
    yield recipes
    for folder in folders(places):
        stop(folder)
        assert not marked(folder)


@pytest.fixture
def judged(context: Context, home: Path, builds: Builds) -> Judge:
    def call(
        without: Sequence[str] = (), patched: Sequence[str] = (), **expect: object
    ) -> Judgement:
        builds.without = (
            *without,
            *(() if any(f.startswith("rate") for f in without) else (RATE,)),
        )
        builds.patched = (
            *patched,
            *(() if any(f.startswith("rate") for f in patched) else (RATE,)),
        )
        return judge_case(context, case(context, home, Expect.model_validate(expect)))

    return call


def nothing_left(places: Places) -> bool:
    return not [f for f in folders(places) if get_status(f).alive or "judge" in f.name]


def test_judge_no_effect(judged: Judge, places: Places, builds: Builds) -> None:
    found = judged()
    outcome = found.outcome()
    assert found.judged.word == "no effect"
    assert outcome.error is None
    assert "NO EFFECT: nothing that was measured differs" in outcome.text
    assert nothing_left(places)
    record = json.loads(found.record.read_text())
    assert (record["ok"], record["exit"]) == (True, 0)
    assert record["facts"]["verdict"]["word"] == "no effect"
    assert builds.made == ["without", "with"]
    judged()
    assert builds.made == ["without", "with"], "a second run builds nothing"


def test_judge_errors_of_the_patched_server_only(judged: Judge, places: Places) -> None:
    """Found in the field: everything works, but one head fails at each request."""
    found = judged(patched=["grumbles=llama_decode[1] gave up, rc = -1"])
    outcome = found.outcome()
    assert found.judged.word == "experimental"
    assert outcome.error is None
    (change,) = found.judged.changes
    requests = found.sides[1].requests
    assert (change.how, change.without, change.patched) == ("new", 0, requests)
    assert change.text == "llama_decode[1] gave up, rc = <n>"
    assert f"EXPERIMENTAL: errors in the log, new: {requests} times, never without" in outcome.text
    assert found.evidence["errors"] == [{"line": change.text, "with": requests, "without": 0}]
    log = Path(found.sides[1].log)
    assert log.read_text().count("llama_decode[1]") == requests
    assert nothing_left(places)


def test_judge_measures_a_server_that_serve_would_stop(judged: Judge) -> None:
    """`llama_decode[1] returned -1` is a known loss: serve ends there, and the verdict does not."""
    found = judged(patched=["grumbles=llama_decode[1] returned -1"])
    assert found.judged.word == "experimental"
    assert found.sides[1].asked
    assert [g.id for g in found.sides[1].graves] == ["draft-head-failing"]


@pytest.mark.parametrize(
    ("patched", "says"),
    [
        (["wrong"], "suite facts passes without the patch only"),
        (["broken"], "HTTP 500"),
        (["dies-at=4"], "does not work with the patch"),
        (["exit=1"], "does not work with the patch"),
        (["signal=11"], "SIGSEGV"),
        (["drafts=20:1"], "acceptance is lost: 9 of 180 (5.0%), 108 of 180 (60.0%) without"),
    ],
)
def test_judge_harmful_patches(
    judged: Judge, places: Places, patched: list[str], says: str
) -> None:
    drafts = ["drafts=20:12"] if patched[0].startswith("drafts") else []
    found = judged(drafts, patched)
    outcome = found.outcome()
    assert found.judged.word == "harmful"
    assert says in " | ".join(found.judged.reasons)
    assert isinstance(outcome.error, PatchError)
    assert (outcome.error.id, outcome.error.exit_code) == ("patch-harmful", 5)
    assert json.loads(found.record.read_text())["exit"] == 5
    assert nothing_left(places)


def test_judge_measures_a_slower_server_twice(judged: Judge, places: Places) -> None:
    found = judged(patched=["rate=12"])
    assert found.judged.word == "harmful"
    assert "slower: x0.60" in found.judged.reasons[0]
    assert [len(one.rounds) for one in found.sides] == [6, 6]
    assert nothing_left(places)


def test_judge_faster_server_is_clean_and_other_answers_experimental(judged: Judge) -> None:
    found = judged(patched=["rate=30"])
    assert found.judged.word == "clean"
    assert found.judged.reasons[0].startswith("faster: x1.50")
    found = judged(patched=["says= So I think."])
    assert found.judged.word == "experimental"
    assert "' So I think.', without the patch ''" in found.judged.reasons[0]


def test_judge_expected_log_lines(judged: Judge) -> None:
    expect = {"must_not_appear": [{"pattern": r"head=\d failed"}]}
    found = judged(["grumbles=head=0 failed"], [], **expect)
    assert found.judged.word == "clean"
    assert found.sides[0].matches == {r"head=\d failed": found.sides[0].requests}


def test_judge_patch_that_does_not_build_is_harmful(
    judged: Judge, builds: Builds, places: Places
) -> None:
    builds.broken = True
    found = judged()
    assert found.judged.word == "harmful"
    assert "it does not build: server.cpp:7: expected ';'" in found.judged.reasons[0]
    assert nothing_left(places)


def test_judge_without_an_unpatched_server(judged: Judge, places: Places) -> None:
    found = judged(without=["exit=1"])
    assert found.judged.word == "experimental"
    assert "the unpatched server could not be measured" in found.judged.reasons[0]
    assert nothing_left(places)


def test_judge_flag_that_comes_with_the_patch(
    judged: Judge, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unpatched server does not take the command: said, and never clean."""

    def know(ctx: Context, build: BuildPlan, *_: object) -> tuple[()]:
        if "-p" not in build.inputs.stamp:
            fault = Fault("tiny.yaml", 12, 3, "serve.command: no --new-flag")
            error = RecipeError("the server does not take the command", [fault])
            error.id = "flag-unknown"
            raise error
        return ()

    monkeypatch.setattr(serve, "check_flags_supported", know)
    found = judged()
    assert found.judged.word == "experimental"
    assert "it does not accept the command: serve.command: no --new-flag" in found.judged.reasons[0]
    assert "judged by its own suites" in found.judged.reasons[0]
    assert builds.made == ["without", "with"]


def test_judge_no_verdict_if_neither_serves(judged: Judge, places: Places) -> None:
    outcome = judged(["exit=1"], ["exit=1"]).outcome()
    assert outcome.result["verdict"] is None
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.exit_code == 7
    assert nothing_left(places)


def test_judge_leaves_running_servers_alone(
    judged: Judge, home: Path, places: Places, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, context: Context,
) -> None:  # fmt: skip
    monkeypatch.setenv("BAKEHOUSE_HOME", str(places.cache.parent))
    assert cli.main("serve", {"recipe": "tiny"}, json=True, recipes=home) == 0
    before = get_status(places.servers / "tiny")
    assert judged().judged.word == "no effect"
    after = get_status(places.servers / "tiny")
    assert after.word == "running"
    assert after.processes == before.processes
    stop(after.folder)


def test_judge_writes_the_verdict_into_the_manifest(
    home: Path, places: Places, builds: Builds, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Judged beside another patch, judged anew as one of the recipe's own, told at serve."""
    monkeypatch.setenv("BAKEHOUSE_HOME", str(places.cache.parent))
    more = home.parent / "more.patch"
    more.write_text(MORE)
    builds.judged, builds.patched = "more", (RATE, "grumbles=head=1 gave up")
    path = manifest_path(patches_folder(home), "ggml-org/llama.cpp", "more")

    def invoke(task: str, **options: object) -> tuple[int, dict[str, Any]]:
        code = cli.main(task, options, json=True, recipes=home)
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return code, document

    code, said = invoke("patch", file=str(more), recipe="tiny", judge=True)
    assert (code, said["result"]["verdict"]) == (0, "experimental")
    (kept,) = read_manifest(path).verdicts
    assert (kept.recipe, kept.word) == ("tiny", "experimental")
    assert kept.reasons == tuple(said["result"]["reasons"])
    assert kept.evidence["errors"][0]["line"] == "head=1 gave up"
    assert kept.evidence["run"] in said["result"]["record"]

    code, said = invoke("serve", recipe="tiny", patch=("more",))
    assert code == 0
    assert said["result"]["unsound_patches"][0].startswith("EXPERIMENTAL patch ggml-org/llama.cpp")
    invoke("stop", all_=True)

    write(home, "{file: fix.patch}, {id: more}")
    builds.patched = (RATE,)
    code, said = invoke("patch", file=str(more), recipe="tiny", judge=True)
    assert (code, said["result"]["verdict"]) == (0, "no effect")
    (kept,) = read_manifest(path).verdicts
    assert kept.word == "no effect"
    assert set(builds.made) == {"with", "without"}
    assert len(builds.made) == 2, "the same two artifacts, whichever way the patch is named"
    assert nothing_left(places)


def test_judge_refuses_flags(home: Path) -> None:
    for options in ({}, {"recipe": "tiny", "dry_run": True}):
        flags = {"file": str(home / "fix.patch"), "judge": True, **options}
        assert cli.main("patch", flags, json=True, recipes=home) == 2


def test_judge_ignores_log_lines_of_the_stop(judged: Judge) -> None:
    """The real vLLM ends with a traceback, sometimes."""
    found = judged(patched=["last-words=CUDA error: an illegal memory access was encountered"])
    assert found.judged.word == "no effect", found.judged.reasons


def test_judge_patch_of_an_image(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its own source nothing can be tried beforehand; the judge builds, and knows."""
    (home / "boxed.yaml").write_text(
        "schema: 1\nname: boxed\nengine: vllm\nimage: {ref: {x86_64: 'a/b:1', aarch64: 'a/b:1'}}\n"
        "weights: {model: {path: m}}\n"
        "serve: {command: '{{ server }} serve {{ weights.model.path }}'}\n"
    )
    flags = {"file": str(home / "fix.patch"), "recipe": "boxed"}
    assert cli.main("patch", flags, json=True, recipes=home) == 9
    assert "--judge" in json.loads(capsys.readouterr().out)["error"]["hint"]

    def judge_pinned(*given: Any) -> Any:
        return given[-1]

    monkeypatch.setattr(patch_compare, "judge_pinned", judge_pinned)
    assert cli.main("patch", {**flags, "judge": True}, json=True, recipes=home) == 0
    assert json.loads(capsys.readouterr().out)["checks"][0]["verdict"] == "unknown"


def test_judge_overrides_reach_both_servers(
    home: Path,
    builds: Builds,
    places: Places,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BAKEHOUSE_HOME", str(places.cache.parent))
    (home.parent / "more.patch").write_text(MORE)
    builds.judged = "more"
    set_ = ["memory.reserve=1000TiB"]
    flags = {"file": str(home.parent / "more.patch"), "recipe": "tiny", "judge": True, "set_": set_}
    assert cli.main("patch", flags, json=True, recipes=home) == 9
    assert json.loads(capsys.readouterr().out)["error"]["id"] == "memory"
    flags["accept_memory_risk"] = "it is my machine"
    assert cli.main("patch", flags, json=True, recipes=home) == 0
    said = json.loads(capsys.readouterr().out)["result"]
    assert said["verdict"] == "no effect"
    assert said["evidence"]["set"] == set_
    assert json.loads(Path(said["record"]).read_text())["facts"]["overrides"] == set_
    judged = [json.loads(p.read_text()) for p in places.runs.glob("*-judge-tiny-*/record.json")]
    taken = [r["facts"].get("memory_risk_accepted") for r in judged if r["exit"] == 0]
    assert taken.count("it is my machine") == 2, "each of the two servers was let in by it"
    (kept,) = read_manifest(Path(said["path"])).verdicts
    assert kept.evidence["set"] == set_
    assert nothing_left(places)


def test_judge_errors_of_this_machine_give_no_verdict(
    judged: Judge, builds: Builds, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise HostError("the disk is full", where="/")

    monkeypatch.setattr(serve, "ensure_build", full)
    with pytest.raises(HostError):
        judged()
    assert nothing_left(places)


@pytest.mark.parametrize(
    ("slow", "number", "code"),
    [
        ("without", signal.SIGINT, 130),
        ("with", signal.SIGINT, 130),
        ("with", signal.SIGTERM, 130),
        ("with", signal.SIGKILL, -9),
    ],
)
def test_judge_signal_leaves_nothing_running(
    home: Path, places: Places, slow: str, number: int, code: int
) -> None:
    """A real process is ended while the server that it started works on a request."""
    more = home.parent / "more.patch"
    more.write_text(MORE)
    environment = {**os.environ, "BAKEHOUSE_HOME": str(places.cache.parent)}
    judge = subprocess.Popen(
        [sys.executable, "-m", "tests.support.judging", str(home), str(more), slow],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and judge.poll() is None and not _asked(places, slow):
        time.sleep(0.05)
    judge.send_signal(number)
    said = judge.communicate(timeout=30)[1]
    assert judge.returncode == code, said
    while time.monotonic() < deadline and any(get_status(f).alive for f in folders(places)):
        time.sleep(0.05)
    assert not [f for f in folders(places) if get_status(f).alive or marked(f)]
    if code != -9:
        assert nothing_left(places)


def _asked(places: Places, name: str) -> bool:
    """Whether the server of a side works on a request."""
    logs = places.servers.glob(f"*@judge-*-{name}/server.log")
    return any("request POST" in log.read_text() for log in logs)


def test_judge_deletes_folders_of_killed_runs(judged: Judge, places: Places) -> None:
    old, fresh = (places.servers / f"tiny@judge-{name}-with" for name in ("0000", "ffff"))
    for folder in (old, fresh, places.servers / "tiny@other", places.servers / "else@judge-0-with"):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    judged()
    assert sorted(f.name for f in places.servers.iterdir() if f.is_dir()) == [
        "else@judge-0-with", "tiny@judge-ffff-with", "tiny@other",
    ]  # fmt: skip
