"""How a container ended, by what the Docker Engine reports."""

from __future__ import annotations

from bakehouse.server.container_follower import ContainerExit
from bakehouse.server.state import LOST
from bakehouse.system.docker.client import Layers
from bakehouse.system.docker.models import ContainerFacts, Happening, happening

STARTED = "2026-01-01T00:00:00Z"


def facts(state: str = "exited", code: int = 0, **over: object) -> ContainerFacts:
    data = {
        "id": "c", "name": "c", "image": "i", "state": state, "exit_code": code, "restarts": 0,
        "oom_killed": False, "pid": 0, "error": "", "started": STARTED, "finished": "",
        "labels": {}, "ports": {},
    }  # fmt: skip
    return ContainerFacts.model_validate(data | over)


def events(*what: str) -> tuple[Happening, ...]:
    """`kill 15@2` is a signal in second 2; without a time each comes a second after the other."""
    made = []
    for number, text in enumerate(what):
        action, _, at = text.partition("@")
        name, _, signal = action.partition(" ")
        made.append(
            Happening(at=float(at or number), what=name, signal=int(signal) if signal else None)
        )
    return tuple(made)


def says(one: ContainerFacts | None, *what: str, **over: object) -> str:
    data = {"gone": False, "stopping": False, "interrupted": False, "lost": None} | over
    return ContainerExit(one, events(*what), started=STARTED, **data).verdict()[1]  # type: ignore[arg-type]


def test_container_end_names_its_cause() -> None:
    rows: list[tuple[int, tuple[str, ...], str]] = [
        (0, ("start", "kill 15", "die", "stop"), "stopped by somebody else (docker stop)"),
        (137, ("kill 15", "kill 9@10", "die@10", "stop@10"), "somebody else (docker stop)"),
        (137, ("start", "kill 9", "die"), "killed by somebody else (docker kill, SIGKILL)"),
        (0, ("start", "kill 15", "die"), "killed by somebody else (docker kill, SIGTERM)"),
        (130, ("start", "kill 2", "die"), "killed by somebody else (docker kill, SIGINT)"),
        (1, ("start", "kill 1", "die"), "exited by itself with 1"),  # HUP: read your files anew
        (1, ("start", "kill 15@5", "die@500"), "exited by itself with 1"),  # it took no notice
        (0, ("start", "die"), "exited by itself with 0"),
        (137, ("start", "die"), "died of SIGKILL: somebody killed it"),
        (139, ("start", "die"), "died of SIGSEGV"),
        (3, (), "exited by itself with 3"),
    ]
    got = [(said, says(facts(code=code), *what)) for code, what, said in rows]
    assert [one for one in got if one[0] not in one[1]] == []


def test_container_end_by_ourselves_has_no_external_cause() -> None:
    assert says(facts(code=0), "kill 15", "die", "stop", stopping=True) == "exited by itself with 0"
    assert says(facts(code=143), "kill 15", "die", "stop", stopping=True) == "died of SIGTERM"


def test_container_end_without_an_exit() -> None:
    assert "removed" in says(None, gone=True)
    assert "removed" in says(facts("removing", 137), "kill 9", "die")
    assert says(None, lost="no engine") == f"{LOST}: no engine"
    assert "not verified" in says(facts("running"), "kill 15", "die", "stop", "start")
    assert "not verified" in says(facts("exited", started="later"), "start", "die")
    assert "its memory limit" in says(facts(code=137, oom_killed=True), "oom", "die")
    assert "Docker Engine was away" in says(facts(code=0), interrupted=True)


def test_container_events_are_read() -> None:
    new = {"Action": "kill", "Actor": {"Attributes": {"signal": "9"}}, "timeNano": 1_500_000_000}
    assert happening(new) == Happening(at=1.5, what="kill", signal=9)
    assert happening({"status": "die", "time": 7}) == Happening(at=7.0, what="die")
    assert happening({}).what == ""


def test_pull_that_stalls_names_the_pending_layers() -> None:
    layers = Layers(None)
    for name, status, done, total in (
        ("1-x", "Pulling from some/thing", 0, 0), ("aaa", "Pull complete", 0, 0),
        ("bbb", "Downloading", 5, 1000), ("ccc", "Waiting", 0, 0), ("ddd", "Extracting", 9, 10),
    ):  # fmt: skip
        detail = {"current": done, "total": total}
        layers.take({"id": name, "status": status, "progressDetail": detail})
    layers.take({"status": "Digest: sha256:…"})
    error = layers.stalled("pulling x", 300)
    assert (error.exit_code, error.id) == (9, "pull-stalled")
    assert "layer bbb (downloading, 5 of 1,000 bytes), layer ddd (extracting, 9 of" in error.what
    assert "aaa" not in error.what
    assert "ccc" not in error.what
