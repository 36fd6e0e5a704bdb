"""Faults of servers: each gets a named check, and no process is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.commands.servers import folder_of, line
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, NotCorrect, NotHealthy
from bakehouse.models import Verdict, check
from bakehouse.probe.models import Endpoint, Proof
from bakehouse.probe.runner import run_probe
from bakehouse.recipe.models import Probe
from bakehouse.runs.store import Answer
from bakehouse.server import state as states
from bakehouse.server import supervisor as keeper
from bakehouse.server.launcher import ServerSpec
from bakehouse.server.session import VerifiedServer, start_or_reuse
from bakehouse.server.status import folders, get_status, stop
from tests.support.serving import Notes, agree, asking, left_of, order, proof

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _nothing_left(context: Context) -> Iterator[None]:
    yield
    for folder in folders(context.places):
        stop(folder)
        assert not left_of(context, folder.name)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    folder = tmp_path / "run"
    folder.mkdir()
    return Notes(folder)


def refused(
    ctx: Context, notes: Notes, wanted: ServerSpec, kind: type[BakehouseError] = NotHealthy,
    path: str = "",
) -> tuple[str, BakehouseError]:  # fmt: skip
    """Serve in vain; give the id of the first check that did not pass, and the error."""
    with pytest.raises(kind) as caught:
        start_or_reuse(ctx, wanted, asking(ctx, path) if path else agree, notes)
    assert not left_of(ctx)
    state = states.read(wanted.folder)
    assert state is not None
    assert state.phase == "ended"
    assert (notes.folder / "server.log").exists()
    failed = [c.id for c in notes.seen if not c.passed]
    assert failed
    return failed[0], caught.value


def test_serve_refuses_a_server_that_is_not_the_requested_one(
    context: Context, notes: Notes
) -> None:
    expected = {
        "html": "health",
        "garbage": "health",
        "unauthorized": "health",
        "old-nonce": "nonce",
        "wrong-name": "model-name",
        "router": "nonce",
        "model-path=/other.gguf": "model-path",
        "no-template": "chat-template",
        "context=100": "context",
    }
    got = {}
    for fault in expected:
        notes.seen.clear()
        got[fault] = refused(context, notes, order(context, fault, context=512))[0]
    assert got == expected


def test_serve_requires_evidence_of_features(context: Context, notes: Notes) -> None:
    wanted = order(context, speculation="draft-mtp", gpu_layers=9, flash_attn="on")
    refused(context, notes, wanted)
    failed = {c.id: c.verdict for c in notes.seen if not c.passed}
    assert failed == {
        "speculation": Verdict.FAILED,
        "gpu-layers": Verdict.UNKNOWN,
        "flash-attention": Verdict.UNKNOWN,
    }


def test_serve_reads_evidence_from_the_log(context: Context, notes: Notes) -> None:
    lines = "print=load_tensors: offloaded 9/9 layers to GPU|llama_context: flash_attn   = enabled"
    wanted = order(context, "speculates", lines, speculation="ngram-simple", gpu_layers=99,
                   flash_attn="on")  # fmt: skip
    start_or_reuse(context, wanted, agree, notes)
    assert all(c.passed for c in notes.seen)


def test_serve_names_the_signal_that_ended_a_server(context: Context, notes: Notes) -> None:
    for number, word in (4, "another CPU"), (6, "SIGABRT"), (9, "SIGKILL"), (11, "memory fault"):
        notes.seen.clear()
        began = time.monotonic()
        id_, error = refused(context, notes, order(context, f"signal={number}"))
        assert id_ == "alive"
        assert word in error.what
        assert signal.Signals(number).name in error.what
        assert time.monotonic() - began < 15  # at once, not after the timeout of 20 s


def test_serve_shows_the_first_cause_in_the_log(context: Context, notes: Notes) -> None:
    id_, error = refused(context, notes, order(context, "exit=1"))
    assert id_ == "alive"
    assert "exited by itself with 1" in error.what
    assert "server.log:2: " in str(error.where)
    assert "failed to load model" in str(error.where)


def test_serve_reports_a_missing_program(context: Context, notes: Notes) -> None:
    wanted = order(context, command=("/nowhere/llama-server", "-m", "/models/x.gguf"))
    id_, error = refused(context, notes, wanted)
    assert id_ == "alive"
    assert "127" in error.what
    assert str(error.where) == "server.log:1: /nowhere/llama-server: No such file or directory"


def test_readiness_has_a_deadline(context: Context, notes: Notes) -> None:
    id_, error = refused(context, notes, order(context, "never", "talks", ready=1.0, stall=30))
    assert id_ == "health"
    assert "not healthy within 1 s" in error.what
    assert "HTTP 503" in next(c.observed for c in error.checks)


def test_readiness_detects_a_stall_although_we_poll(context: Context, notes: Notes) -> None:
    id_, error = refused(context, notes, order(context, "never", "chatty", ready=60, stall=1.0))
    assert id_ == "loading"
    assert "stalled" in error.what


def test_readiness_waits_while_the_server_logs(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context, "slow=3", "talks", stall=1.5), agree, notes)
    assert ready.loading >= 2.5


def test_readiness_is_noticed_within_a_tenth_of_a_second(context: Context, notes: Notes) -> None:
    lags: list[float] = []
    for _ in range(3):
        wanted = order(context, "slow=0.5")

        def note(_: Endpoint) -> Proof:
            lags.append(time.monotonic())
            return proof()

        start_or_reuse(context, wanted, note, notes)
        log = (wanted.folder / "server.log").read_text()
        lags[-1] -= float(log.split("healthy from ")[1].split()[0])
        stop(wanted.folder)
    asking_about_features = 0.1
    assert min(lags) < 0.1 + asking_about_features


def test_readiness_of_a_server_that_never_listens(context: Context, notes: Notes) -> None:
    id_, error = refused(context, notes, order(context, "never-listen", ready=1.0))
    assert id_ == "health"
    assert "never listened" in next(c.observed for c in error.checks)


def test_verification_notices_a_death_during_the_probe(context: Context, notes: Notes) -> None:
    id_, error = refused(context, notes, order(context), path="/die")
    assert id_ == "alive-after"
    assert "ended" in error.what


def test_verification_checks_health_after_the_probe(context: Context, notes: Notes) -> None:
    assert refused(context, notes, order(context), path="/sicken")[0] == "health-after"


def test_verification_refuses_a_fault_in_the_log(context: Context, notes: Notes) -> None:
    line = "CUDA error: an illegal memory access was encountered"
    id_, error = refused(context, notes, order(context, f"print={line}"))
    assert id_ == "log"
    assert line in str(error.where)


def test_verification_reads_the_log_after_the_probe(context: Context, notes: Notes) -> None:
    assert refused(context, notes, order(context), path="/corrupt")[0] == "log-after"


def test_verification_notices_images_lost_by_a_draft_context(
    context: Context, notes: Notes
) -> None:
    """The suite names the draft context, and so does the log's first cause."""
    probe = Probe.model_validate({"suites": ["vision"]})
    proofs: list[Proof] = []

    def sees(endpoint: Endpoint) -> Proof:
        proofs.append(run_probe(context, endpoint, probe))
        return proofs[-1]

    wanted = order(context, "draft-lost", "speculates")
    with pytest.raises(NotHealthy) as caught:
        start_or_reuse(context, wanted, sees, notes)
    assert not left_of(context)
    assert "HTTP 500 with speculation on, text is answered" in proofs[0].summary
    assert proofs[0].word == "unable"
    assert "log-after" in {c.id for c in notes.seen if not c.passed}
    assert "ctx_dft" in str(caught.value.where)
    assert "--spec-type" in str(caught.value.hint)


def test_verification_again_refuses_a_fault_logged_since(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context), agree, notes)
    context.http.ask("GET", f"{ready.server.url}/corrupt")
    wait_until(lambda: findings_of(ready.server.folder))
    with pytest.raises(NotHealthy) as caught:
        start_or_reuse(context, order(context), agree, notes)
    assert "illegal memory access" in caught.value.what
    assert not left_of(context)


def test_verification_of_wrong_answers_exits_with_8(context: Context, notes: Notes) -> None:
    wrong = proof(check("facts", "5 of 5", "1 of 5", "POST /v1", ok=False), verdict=Verdict.FAILED)
    with pytest.raises(NotCorrect) as caught:
        start_or_reuse(context, order(context), lambda _: wrong, notes)
    assert caught.value.exit_code == 8
    assert [c.id for c in notes.seen if not c.passed] == ["facts"]
    assert not left_of(context)
    ended = get_status(context.places.servers / "fake").state
    assert ended is not None
    assert ended.ended is not None
    assert ended.ended.why == "refused"
    assert "1 of 1 right" in ended.ended.says


def test_verification_needs_answers_that_can_be_judged(context: Context, notes: Notes) -> None:
    gap = proof(check("facts", "5 of 5", None, "POST /v1", ok=None), verdict=Verdict.UNKNOWN)
    answer = Answer(
        question="?", mode="chat", wanted=("x",), content="", verdict="unanswered", seconds=1.0
    )
    with pytest.raises(NotHealthy) as caught:
        start_or_reuse(context, order(context), lambda _: replace(gap, answers=(answer,)), notes)
    assert [c.id for c in caught.value.checks if not c.passed] == ["facts"]
    assert notes.said == [answer]
    assert not left_of(context)


def test_verification_notices_a_second_owner_of_the_port(context: Context, notes: Notes) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

        def intrude(endpoint: Endpoint) -> Proof:
            port = int(endpoint.url.rsplit(":", 1)[1])
            other.bind(("127.0.0.1", port))
            other.listen()
            return proof()

        with pytest.raises(NotHealthy):
            start_or_reuse(context, order(context, "share-port"), intrude, notes)
    failed = {c.id: c.observed for c in notes.seen if not c.passed}
    assert "another process holds" in failed["socket-owner-after"]


def test_serve_refuses_a_taken_port_before_launch(context: Context, notes: Notes) -> None:
    for held, asked in (
        ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1"),
        ("127.0.0.1", "0.0.0.0"),
    ):  # fmt: skip
        family = socket.AF_INET6 if ":" in held else socket.AF_INET
        with socket.socket(family) as other:
            if family == socket.AF_INET6:
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            other.bind((held, 0))
            other.listen()
            port = other.getsockname()[1]
            wanted = order(context, port=port, host=asked, key="sekret-key-1")
            with pytest.raises(HostError) as caught:
                start_or_reuse(context, wanted, agree, notes)
        assert caught.value.exit_code == 9
        assert f"port {port} is taken" in caught.value.what
        assert f"process {os.getpid()}: " in str(caught.value.where), (held, asked)
        assert not left_of(context)
        assert not (wanted.folder / "server.log").exists()


def test_stop_kills_a_server_that_ignores_term_and_its_stray_child(
    context: Context, notes: Notes
) -> None:
    wanted = order(context, "ignore-term", "stray", stop_timeout="0.5s")
    start_or_reuse(context, wanted, agree, notes)
    assert len(left_of(context)) == 3  # keeper, server, stray
    stopped = stop(wanted.folder)
    assert stopped.killed
    assert "ignored TERM" in stopped.says
    assert not left_of(context)
    again = stop(wanted.folder)
    assert not again.ran


def test_supervisor_ends_the_stray_child_of_a_dead_server(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context, "stray"), agree, notes)
    ready.server.process.send(signal.SIGKILL)
    wait_until(lambda: not left_of(context))
    seen = get_status(ready.server.folder)
    assert seen.word == "ended"
    assert seen.state is not None
    assert seen.state.ended is not None
    assert seen.state.ended.code == -9
    assert "SIGKILL" in seen.state.ended.says


def test_supervisor_death_ends_the_server(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context, "stray"), agree, notes)
    keeper = get_status(ready.server.folder).processes[0]
    keeper.send(signal.SIGKILL)
    wait_until(lambda: not ready.server.process.alive)
    seen = get_status(ready.server.folder)
    assert seen.word == "orphaned"  # the stray child: nobody is left to end it
    assert stop(ready.server.folder).ran
    assert not left_of(context)


def test_supervisor_killed_before_the_verification(context: Context, notes: Notes) -> None:
    def kill_keeper(_: object) -> Proof:
        get_status(context.places.servers / "fake").processes[0].send(signal.SIGKILL)
        time.sleep(0.2)
        return proof()

    with pytest.raises(NotHealthy):
        start_or_reuse(context, order(context), kill_keeper, notes)
    assert next(c.id for c in notes.seen if not c.passed) == "alive-after"
    assert not left_of(context)


SERVE = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
{before}
from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.server.session import start_or_reuse
from tests.support.serving import Notes, order, proof
ctx = Context(Places(Path({cache!r}), Path({state!r})), Path("."))
def slowly(endpoint):
    print("proving", flush=True)
    time.sleep({wait})
    return proof()
run = Path({run!r})
try:
    ready = start_or_reuse(ctx, order(ctx, "stray", foreground={foreground}), slowly, Notes(run))
    print("again" if ready.again else "ready", flush=True)
    if ready.connection:
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


def serving(
    ctx: Context, run: Path, wait: float, *, foreground: bool = False,
    paths: Sequence[str] = (), before: str = "",
) -> subprocess.Popen[str]:  # fmt: skip
    """A `serve` in a process of its own; `paths` precede this checkout's."""
    text = SERVE.format(
        paths=[*paths, str(Path(__file__).parents[2])], cache=str(ctx.places.cache),
        state=str(ctx.places.state), wait=wait, run=str(run), foreground=foreground, before=before,
    )  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def findings_of(folder: Path) -> object:
    state = states.read(folder)
    return state and state.findings


def wait_until(true: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not (callable(true) and true()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_serve_killed_takes_an_unverified_server_along(
    context: Context, notes: Notes, number: int
) -> None:
    with serving(context, notes.folder, 60) as child:
        assert child.stdout
        assert child.stdout.readline() == "proving\n"
        assert len(left_of(context)) == 3
        child.send_signal(number)
        code = child.wait(10)
        if number == signal.SIGINT:
            assert code == 130
            assert not left_of(context)
        wait_until(lambda: not left_of(context))
    state = states.read(context.places.servers / "fake")
    assert state is not None
    assert state.ended is not None
    assert state.ended.why == "unproven"


def test_serve_leaves_a_verified_server_running(context: Context, notes: Notes) -> None:
    with serving(context, notes.folder, 0) as child:
        assert child.wait(20) == 0
    assert get_status(context.places.servers / "fake").word == "running"


RENAME = """
from bakehouse.server import supervisor
supervisor.__name__ = "bakehouse.serve.keeper"
"""


def test_supervisor_of_another_version_is_found_verified_and_stopped(
    context: Context, notes: Notes, tmp_path: Path
) -> None:
    """Its module has another name, and its files are gone since an upgrade."""
    old = tmp_path / "old"
    source = Path(keeper.__file__)
    shutil.copytree(source.parents[1], old / "bakehouse")
    (old / "bakehouse/serve").mkdir()
    shutil.copy(source, old / "bakehouse/serve/keeper.py")
    with serving(context, notes.folder, 0, paths=[str(old)], before=RENAME) as child:
        assert child.wait(60) == 0
    folder = context.places.servers / "fake"
    time.sleep(1)  # until it has loaded the log signatures
    (old / "bakehouse").rename(old / "gone")
    supervisor = get_status(folder).processes[0]
    assert "bakehouse.serve.keeper" in supervisor.command
    assert get_status(folder).word == "running"
    assert start_or_reuse(context, order(context, "stray"), agree, notes).again
    supervisor.send(signal.SIGSTOP)
    states.path(folder).unlink()
    seen = get_status(folder)
    assert (seen.word, seen.processes[0]) == ("unclear", supervisor)
    supervisor.send(signal.SIGCONT)
    stopped = stop(folder)
    assert (stopped.ran, stopped.killed) == (True, False)
    assert not left_of(context)
    assert get_status(folder).word == "ended"


def test_serve_in_the_foreground_ends_its_server(context: Context, notes: Notes) -> None:
    with serving(context, notes.folder, 0, foreground=True) as child:
        assert child.stdout
        assert [child.stdout.readline() for _ in range(2)] == ["proving\n", "ready\n"]
        assert get_status(context.places.servers / "fake").word == "running"
        child.kill()
    wait_until(lambda: not left_of(context))


def test_serve_twice_at_once_starts_one_server(context: Context, notes: Notes) -> None:
    with serving(context, notes.folder, 0.5) as one, serving(context, notes.folder, 0.5) as two:
        said = [child.communicate(timeout=30)[0].split() for child in (one, two)]
        codes = (one.wait(5), two.wait(5))
    assert codes == (0, 0)
    assert sorted(said) == [["proving", "again"], ["proving", "ready"]]
    assert len(left_of(context)) == 3


def test_serve_refuses_other_settings_while_it_runs(context: Context, notes: Notes) -> None:
    start_or_reuse(context, order(context), agree, notes)
    before = left_of(context)
    with pytest.raises(HostError, match="other settings") as caught:
        start_or_reuse(context, order(context, "slow=0"), agree, notes)
    assert "invoke stop --recipe fake" in str(caught.value.hint)
    assert left_of(context) == before


def test_serve_stops_a_running_server_that_became_wrong(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context), agree, notes)
    assert isinstance(ready, VerifiedServer)
    with suppress(Exception):
        context.http.ask("GET", f"{ready.server.url}/sicken")
    with pytest.raises(NotHealthy):
        start_or_reuse(context, order(context), agree, notes)
    assert not left_of(context)


def test_serve_checks_the_key_and_hides_it(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context, key="sekret-key-1"), agree, notes)
    folder = ready.server.folder
    assert next(c for c in notes.seen if c.id == "key").passed
    assert (folder / "api-key").stat().st_mode & 0o777 == 0o600
    for process in left_of(context):
        assert "sekret-key-1" not in " ".join(process.command)
    assert "sekret-key-1" not in (folder / "state.json").read_text()
    with pytest.raises(HostError, match="other settings"):
        start_or_reuse(context, order(context, key="sekret-key-2"), agree, notes)


def test_status_and_stop_work_with_a_state_that_cannot_be_read(
    context: Context, notes: Notes
) -> None:
    folder = start_or_reuse(context, order(context), agree, notes).server.folder
    keeper = get_status(folder).processes[0]
    keeper.send(signal.SIGSTOP)
    for text in ("", "{", '{"schema": 1}', "[]", '{"schema": 99}', "\x00"):
        states.path(folder).write_text(text)
        seen = get_status(folder)
        assert (seen.alive, seen.word) == (True, "unclear"), text
        assert seen.trouble
        assert seen.trouble in line(seen)
    keeper.send(signal.SIGCONT)
    assert stop(folder).ran
    assert not left_of(context)
    assert get_status(folder).word in {"ended", "gone"}


def test_supervisor_rewrites_a_damaged_state(context: Context, notes: Notes) -> None:
    folder = start_or_reuse(context, order(context), agree, notes).server.folder
    good = states.path(folder).read_text()
    for damage in ("", "{", None):
        states.path(folder).unlink()
        if damage is not None:
            states.path(folder).write_text(damage)
        wait_until(lambda: get_status(folder).word == "running")
        assert states.path(folder).read_text() == good


def test_stop_finds_a_server_whose_folder_was_removed(context: Context, notes: Notes) -> None:
    folder = start_or_reuse(context, order(context), agree, notes).server.folder
    shutil.rmtree(context.places.state)
    assert folders(context.places) == (folder,)
    seen = get_status(folder)
    assert seen.word == "unclear"
    assert "state is missing" in line(seen)
    assert folder_of(context, "fake") == folder
    assert stop(folder).ran
    assert not left_of(context)
    assert folders(context.places) == ()


def test_supervisor_survives_a_full_disk(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context), agree, notes)
    folder, server = ready.server.folder, ready.server.process
    with unwritable(folder):
        states.path(folder).write_text("{")  # which the keeper would mend
        time.sleep(1.0)
        assert server.alive
        assert get_status(folder).word == "unclear"
    wait_until(lambda: get_status(folder).word == "running")


def test_serve_stops_a_server_whose_verification_cannot_be_recorded(
    context: Context, notes: Notes
) -> None:
    with ExitStack() as stack:

        def fill(_: Endpoint) -> Proof:
            stack.enter_context(unwritable(context.places.servers / "fake"))
            return proof()

        with pytest.raises(NotHealthy, match="could not be recorded"):
            start_or_reuse(context, order(context), fill, notes)
        assert not left_of(context)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Keep the keeper from writing the state: a folder lies where it would put the new one."""
    keeper = get_status(folder).processes[0]
    obstacle = folder / f".state.{keeper.pid}.part"
    obstacle.mkdir()
    try:
        yield
    finally:
        obstacle.rmdir()


def test_stop_never_signals_another_process(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context), agree, notes)
    folder = ready.server.folder
    good = states.path(folder).read_text()
    stop(folder)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        text = good.replace(f'"pid": {ready.server.process.pid}', f'"pid": {bystander.pid}')
        for start in (str(ready.server.process.start), str(own_start(bystander.pid))):
            states.path(folder).write_text(
                text.replace(f'"start": {ready.server.process.start}', f'"start": {start}')
            )
            assert not stop(folder).ran
            assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=5)


def own_start(pid: int) -> int:
    from bakehouse.server.processes import start_time

    return start_time(pid) or 0


def test_status_after_a_reboot_is_gone(context: Context, notes: Notes) -> None:
    ready = start_or_reuse(context, order(context), agree, notes)
    folder = ready.server.folder
    good = states.path(folder).read_text()
    stop(folder)
    state = states.read(folder)
    assert state is not None
    states.path(folder).write_text(good.replace(state.boot, "another-boot"))
    seen = get_status(folder)
    assert seen.word == "gone"
    assert seen.state is not None
    assert seen.state.ended is not None
    assert "restarted" in seen.state.ended.says
    assert get_status(folder).word == "ended"


def test_serve_that_fails_leaves_no_file_descriptor(context: Context, notes: Notes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        refused(context, notes, order(context, "exit=1"))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
