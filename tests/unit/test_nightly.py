"""The account of a night: order, failures that stay alone, the exit code of the worst."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from bakehouse.errors import BuildFailed, HostError, NotCorrect
from bakehouse.nightly import RecipeResult, run_recipe, table, worst


def ticks() -> Callable[[], float]:
    return map(float, count()).__next__


def night(*, failing: str | None = None, error: BaseException | None = None) -> RecipeResult:
    def stage(name: str) -> Callable[[str], str]:
        def run(recipe: str) -> str:
            if name == failing and error is not None:
                raise error
            return f"{name} of {recipe}"

        return run

    return run_recipe(
        "tiny",
        {n: stage(n) for n in ("lock", "build", "serve")},
        {"stop": stage("stop")},
        ticks(),
    )


def test_all_stages_run_in_order_and_the_proof_is_what_is_told() -> None:
    result = night()
    assert [s.stage for s in result.stages] == ["lock", "build", "serve", "stop"]
    assert result.exit == 0
    assert result.says == "serve of tiny"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BuildFailed("no compiler"), 6),
        (NotCorrect("Paris is not in Italy"), 8),
        (RuntimeError("a bug"), 1),
        (OSError("no space"), 1),
    ],
)
def test_a_failure_ends_its_recipe_alone_and_the_server_is_stopped(
    error: BaseException, code: int
) -> None:
    result = night(failing="build", error=error)
    assert [s.stage for s in result.stages] == ["lock", "build", "stop"]
    assert result.exit == code
    assert result.says.startswith("build: ")
    assert str(error) in result.says


def test_a_stop_that_fails_is_not_lost_behind_good_news() -> None:
    result = night(failing="stop", error=HostError("something still runs"))
    assert result.exit == 9
    assert result.says == "stop: something still runs"


def test_an_interrupt_still_stops_the_server() -> None:
    stopped: list[str] = []

    def stop(recipe: str) -> str:
        stopped.append(recipe)
        return "stopped"

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(
            "tiny",
            {"serve": interrupted},
            {"stop": stop},
            ticks(),
        )
    assert stopped == ["tiny"]


@pytest.mark.parametrize(
    ("exits", "expected"),
    [([], 0), ([0, 0], 0), ([0, 9, 0], 9), ([9, 7], 7), ([7, 8, 1], 8), ([1, 2], 2), ([77], 77)],
)
def test_the_worst_news_gives_the_exit_code(exits: list[int], expected: int) -> None:
    assert worst(exits) == expected


def test_the_table_has_a_line_a_recipe_and_marks_what_failed() -> None:
    text = table([night(), night(failing="build", error=BuildFailed("no compiler"))])
    lines = text.splitlines()
    assert lines[0].split() == [
        "recipe", "exit", "lock", "build", "serve", "stop", "what", "came", "of", "it",
    ]  # fmt: skip
    assert lines[1].split()[:2] == ["tiny", "0"]
    assert "1.0!" in lines[2]
    assert "-" in lines[2].split()
    assert lines[2].endswith("build: no compiler")
