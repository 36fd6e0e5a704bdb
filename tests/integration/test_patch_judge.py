"""Patches are judged by two servers in turn; everything is real but the engine and its build."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.commands import serve as serve_command
from bakehouse.commands.patch_judge import Case, Verdict, judge_case
from bakehouse.context import Context
from bakehouse.errors import (
    BuildFailed,
    Fault,
    HostError,
    NotHealthy,
    PatchError,
    RecipeError,
)
from bakehouse.lock import Lock
from bakehouse.patches import for_run
from bakehouse.patches.manifest import Expect
from bakehouse.places import Places
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.load import load
from bakehouse.resolve import ensure_lock
from bakehouse.serve.control import folders, look, stop
from bakehouse.serve.processes import marked
from bakehouse.sources.manifests import manifest_path, patches_folder, read_manifest
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.serving import FAKE

pytestmark = pytest.mark.integration

RECIPE = """\
schema: 1
name: tiny
engine: llama.cpp
source:
  archive: {{path: source.tar.gz, sha256: {sha256}, number: 7}}
  patches: [{patches}]
weights:
  model: {{path: model.gguf}}
serve:
  port: 0
  stop_timeout: 2s
  ready_timeout: 20s
  command: "{{{{ server }}}} -m {{{{ weights.model.first }}}}"
probe:
  suites: [facts]
  facts: {{questions: [{{ask: "What is 2+2?", answers: ["4"]}}]}}
"""
PATCH = """\
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1 +1,2 @@
 #
+# mended
"""
MORE = """\
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -1,2 +1,3 @@
 #
 # mended
+# more
"""
RATE = "rate=20"

Judge = Callable[..., Verdict]


class Builds:
    """Stands for the build: an artifact is a script that runs the fake engine with its faults."""

    def __init__(self) -> None:
        self.without: Sequence[str] = (RATE,)
        self.patched: Sequence[str] = (RATE,)
        self.broken = False
        self.judged = "fix"
        """The patch that makes the difference."""
        self.made: list[str] = []

    def __call__(self, ctx: Context, lock: Lock, plan: BuildPlan, record: object) -> None:
        patched = any(pin.id == self.judged for pin in lock.patches)
        if patched and self.broken:
            raise BuildFailed("server.cpp:7: expected ';'", where="compile.log:9")
        server = Path(plan.server)
        if not server.exists():
            self.made.append("with" if patched else "without")
        server.parent.mkdir(parents=True, exist_ok=True)
        faults = (*(self.patched if patched else self.without), f"build=b7-{lock.stamp}")
        words = " ".join(f"--fault '{fault}'" for fault in faults)
        server.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S '{FAKE}' \"$@\" {words}\n")
        server.chmod(0o755)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = Builds()
    monkeypatch.setattr(serve_command, "ensure_build", made)
    return made


@pytest.fixture
def home(tmp_path: Path, places: Places) -> Iterator[Path]:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("a", 8, 4)]))
    with tarfile.open(recipes / "source.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("x/CMakeLists.txt")
        entry.size, entry.mtime = 2, 1_700_000_000
        archive.addfile(entry, io.BytesIO(b"#\n"))
    (recipes / "fix.patch").write_text(PATCH)
    write(recipes)
    yield recipes
    for folder in folders(places):
        stop(folder)
        assert not marked(folder)


def write(folder: Path, patches: str = "{file: fix.patch}") -> None:
    sha256 = hashlib.sha256((folder / "source.tar.gz").read_bytes()).hexdigest()
    (folder / "tiny.yaml").write_text(RECIPE.format(sha256=sha256, patches=patches))
    (folder / "tiny.lock.json").unlink(missing_ok=True)


@pytest.fixture
def judged(context: Context, home: Path, builds: Builds) -> Judge:
    def call(without: Sequence[str] = (), patched: Sequence[str] = (), **expect: object) -> Verdict:
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


def case(ctx: Context, home: Path, expect: Expect) -> Case:
    loaded = load(home / "tiny.yaml")
    lock = ensure_lock(ctx, loaded)
    (pin,) = lock.patches
    drop = for_run.Asked(drop=("fix",))
    without = for_run.ensure(ctx, drop.change(ctx)(loaded), drop)
    return Case(loaded, pin, lock, without, "fix", expect)


def nothing_left(places: Places) -> bool:
    return not [f for f in folders(places) if look(f).alive or "judge" in f.name]


def test_a_patch_that_does_nothing(judged: Judge, places: Places, builds: Builds) -> None:
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


def test_errors_that_only_the_patched_server_logs(judged: Judge, places: Places) -> None:
    """The seed's finding: everything works, and one head fails at each request."""
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


def test_a_line_that_serve_refuses_is_measured_all_the_same(judged: Judge) -> None:
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
        (["dies-at=4"], "does not serve with the patch"),
        (["exit=1"], "does not serve with the patch"),
        (["signal=11"], "SIGSEGV"),
        (["drafts=20:1"], "acceptance is lost: 9 of 180 (5.0%), 108 of 180 (60.0%) without"),
    ],
)
def test_patches_that_harm(judged: Judge, places: Places, patched: list[str], says: str) -> None:
    drafts = ["drafts=20:12"] if patched[0].startswith("drafts") else []
    found = judged(drafts, patched)
    outcome = found.outcome()
    assert found.judged.word == "harmful"
    assert says in " | ".join(found.judged.reasons)
    assert isinstance(outcome.error, PatchError)
    assert (outcome.error.id, outcome.error.exit_code) == ("patch-harmful", 5)
    assert json.loads(found.record.read_text())["exit"] == 5
    assert nothing_left(places)


def test_a_slower_server_is_measured_twice(judged: Judge, places: Places) -> None:
    found = judged(patched=["rate=12"])
    assert found.judged.word == "harmful"
    assert "slower: x0.60" in found.judged.reasons[0]
    assert [len(one.rounds) for one in found.sides] == [6, 6]
    assert nothing_left(places)


def test_a_faster_server_is_clean(judged: Judge) -> None:
    found = judged(patched=["rate=30"])
    assert found.judged.word == "clean"
    assert found.judged.reasons[0].startswith("faster: x1.50")


def test_other_words_are_experimental(judged: Judge) -> None:
    found = judged(patched=["says= So I think."])
    assert found.judged.word == "experimental"
    assert "' So I think.' where '' is said without" in found.judged.reasons[0]


def test_what_is_expected_of_the_log(judged: Judge) -> None:
    expect = {"must_not_appear": [{"pattern": r"head=\d failed"}]}
    found = judged(["grumbles=head=0 failed"], [], **expect)
    assert found.judged.word == "clean"
    assert found.sides[0].matches == {r"head=\d failed": found.sides[0].requests}


def test_a_patch_that_does_not_build_harms(judged: Judge, builds: Builds, places: Places) -> None:
    builds.broken = True
    found = judged()
    assert found.judged.word == "harmful"
    assert "it does not build: server.cpp:7: expected ';'" in found.judged.reasons[0]
    assert nothing_left(places)


def test_without_an_unpatched_server_nothing_is_clean(judged: Judge, places: Places) -> None:
    found = judged(without=["exit=1"])
    assert found.judged.word == "experimental"
    assert "the unpatched server could not be compared with" in found.judged.reasons[0]
    assert nothing_left(places)


def test_a_flag_that_the_patch_brings(
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

    monkeypatch.setattr(serve_command, "know_flags", know)
    found = judged()
    assert found.judged.word == "experimental"
    assert "it does not take the command: serve.command: no --new-flag" in found.judged.reasons[0]
    assert "judged by its own suites" in found.judged.reasons[0]
    assert builds.made == ["without", "with"]


def test_where_neither_serves_nothing_is_judged(judged: Judge, places: Places) -> None:
    outcome = judged(["exit=1"], ["exit=1"]).outcome()
    assert outcome.result["verdict"] is None
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.exit_code == 7
    assert nothing_left(places)


def test_a_server_that_runs_already_is_left_alone(
    judged: Judge, home: Path, places: Places, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, context: Context,
) -> None:  # fmt: skip
    monkeypatch.setenv("BAKEHOUSE_HOME", str(places.cache.parent))
    assert cli.main("serve", {"recipe": "tiny"}, json=True, recipes=home) == 0
    before = look(places.servers / "tiny")
    assert judged().judged.word == "no effect"
    after = look(places.servers / "tiny")
    assert after.word == "running"
    assert after.processes == before.processes
    stop(after.folder)


def test_the_verdict_stands_in_the_manifest(
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


@pytest.mark.parametrize("options", [{}, {"recipe": "tiny", "dry_run": True}])
def test_what_cannot_be_judged(home: Path, options: dict[str, object]) -> None:
    flags = {"file": str(home / "fix.patch"), "judge": True, **options}
    assert cli.main("patch", flags, json=True, recipes=home) == 2


def test_this_machines_troubles_are_no_verdict(
    judged: Judge, builds: Builds, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise HostError("the disk is full", where="/")

    monkeypatch.setattr(serve_command, "ensure_build", full)
    with pytest.raises(HostError):
        judged()
    assert nothing_left(places)


@pytest.mark.parametrize("slow", ["without", "with"])
def test_an_interrupt_leaves_nothing(
    context: Context, home: Path, builds: Builds, places: Places, slow: str
) -> None:
    setattr(builds, "patched" if slow == "with" else "without", (RATE, "hangs"))

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            started = [f for f in folders(places) if f.name.endswith(f"-{slow}") and look(f).alive]
            log = started[0] / "server.log" if started else None
            if log and log.is_file() and "listening" in log.read_text():
                break
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        judge_case(context, case(context, home, Expect()))
    assert nothing_left(places)
