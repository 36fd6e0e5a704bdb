"""Nightly runs: order of stages, failures that stay isolated, the worst exit code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from filelock import FileLock

from bakehouse.commands.nightly import Options, RecipeResult, run, run_stages, table, worst
from bakehouse.context import Context
from bakehouse.errors import BuildFailed, HostError, NotCorrect, UsageError


def ticks() -> Callable[[], float]:
    return map(float, count()).__next__


def nightly(*, failing: str | None = None, error: BaseException | None = None) -> RecipeResult:
    def stage(name: str) -> Callable[[str], str]:
        def run(recipe: str) -> str:
            if name == failing and error is not None:
                raise error
            return f"{name} of {recipe}"

        return run

    stages = {n: stage(n) for n in ("lock", "build", "serve")}
    return run_stages("tiny", stages, {"stop": stage("stop")}, ticks())


def test_nightly_runs_all_stages_in_order() -> None:
    result = nightly()
    assert [s.stage for s in result.stages] == ["lock", "build", "serve", "stop"]
    assert (result.exit, result.summary) == (0, "serve of tiny")


def test_nightly_failure_ends_its_recipe_and_stops_the_server() -> None:
    failures: dict[BaseException, int] = {
        BuildFailed("no compiler"): 6,
        NotCorrect("Paris is not in Italy"): 8,
        RuntimeError("a bug"): 1,
        OSError("no space"): 1,
    }
    for error, code in failures.items():
        result = nightly(failing="build", error=error)
        assert [s.stage for s in result.stages] == ["lock", "build", "stop"]
        assert result.exit == code
        assert result.summary.startswith("build: ")
        assert str(error) in result.summary


def test_nightly_reports_a_stop_that_fails() -> None:
    result = nightly(failing="stop", error=HostError("something still runs"))
    assert (result.exit, result.summary) == (9, "stop: something still runs")


def test_nightly_stops_the_server_when_interrupted() -> None:
    stopped: list[str] = []

    def stop(recipe: str) -> str:
        stopped.append(recipe)
        return "stopped"

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stages("tiny", {"serve": interrupted}, {"stop": stop}, ticks())
    assert stopped == ["tiny"]


def test_nightly_returns_the_worst_exit_code() -> None:
    codes = [[], [0, 0], [0, 9, 0], [9, 7], [7, 8, 1], [1, 2], [77]]
    assert [worst(exits) for exits in codes] == [0, 0, 9, 7, 8, 2, 77]


def test_nightly_refuses_no_recipe_and_a_second_run(context: Context) -> None:
    with pytest.raises(UsageError, match="no recipe given"):
        run(context, Options())
    context.places.state.mkdir(parents=True)
    with (
        FileLock(context.places.state / ".nightly.lock"),
        pytest.raises(HostError, match="another nightly run is in progress"),
    ):
        run(context, Options(("smollm2-cpu",)))
    missing = run(context, Options(("nonesuch",)))
    assert missing.exit == 3
    assert missing.text.splitlines()[1].startswith("nonesuch  3     0.0!")


def test_nightly_table_has_a_line_for_each_recipe() -> None:
    text = table([nightly(), nightly(failing="build", error=BuildFailed("no compiler"))])
    assert text.splitlines() == [
        "recipe  exit  lock  build  serve  stop  result",
        "tiny    0     1.0   1.0    1.0    1.0   serve of tiny",
        "tiny    6     1.0   1.0!   -      1.0   build: no compiler",
    ]
