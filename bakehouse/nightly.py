"""A night's work: every recipe locked, built, served, proven and stopped, one after another.

One recipe's failure stops none of the others. Which stages there are, and how they are run, is
given by the caller (`commands/nightly.py`); this module keeps the account.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bakehouse.base import Frozen
from bakehouse.errors import BakehouseError, Interrupted

WORST_FIRST = (8, 7, 6, 5, 4, 9, 3, 2, 1)
"""Exit codes by how bad the news is: wrong answers before anything that merely does not run."""

Stage = Callable[[str], str]
"""Does one stage for one recipe; gives a few words on what came of it, or raises."""


class StageResult(Frozen):
    """One stage of one recipe. `seconds` of wall time; `exit` 0 where it went well."""

    stage: str
    exit: int
    seconds: float
    says: str
    where: str | None = None
    hint: str | None = None


class RecipeResult(Frozen):
    """One recipe's night."""

    recipe: str
    exit: int
    stages: tuple[StageResult, ...]

    @property
    def says(self) -> str:
        """What matters most: the failure, or the last word of the proof."""
        failed = [s for s in self.stages if s.exit]
        if failed:
            return f"{failed[0].stage}: {failed[0].says}"
        return next((s.says for s in reversed(self.stages) if s.stage == "serve"), "done")


def worst(exits: Sequence[int]) -> int:
    """Give the exit code that stands for all of them; 0 for none at all."""
    bad = [code for code in exits if code]
    return min(bad, key=_badness, default=0)


def _badness(code: int) -> int:
    return WORST_FIRST.index(code) if code in WORST_FIRST else len(WORST_FIRST)


def run_recipe(
    recipe: str,
    stages: Mapping[str, Stage],
    always: Mapping[str, Stage],
    clock: Callable[[], float],
) -> RecipeResult:
    """Run the stages in order until one fails, then those in `always`, whatever happened.

    Only an interrupt leaves early; `always` is still run then.
    """
    done: list[StageResult] = []
    try:
        for name, stage in stages.items():
            done.append(_run_stage(name, stage, recipe, clock))
            if done[-1].exit:
                break
    finally:
        done += [_run_stage(name, stage, recipe, clock) for name, stage in always.items()]
    return RecipeResult(recipe=recipe, exit=worst([s.exit for s in done]), stages=tuple(done))


def _run_stage(name: str, stage: Stage, recipe: str, clock: Callable[[], float]) -> StageResult:
    started = clock()

    def result(exit_code: int, says: str, error: BakehouseError | None = None) -> StageResult:
        return StageResult(
            stage=name,
            exit=exit_code,
            seconds=round(clock() - started, 3),
            says=says,
            where=error.where if error else None,
            hint=error.hint if error else None,
        )

    try:
        return result(0, stage(recipe))
    except Interrupted:
        raise
    except BakehouseError as error:
        return result(error.exit_code, error.what, error)
    except Exception as error:  # a fault of ours must not cost the other recipes their night
        return result(1, f"unexpected {type(error).__name__}: {error}")


def table(results: Sequence[RecipeResult]) -> str:
    """Render the summary: a line a recipe, its exit code, seconds for each stage, one sentence."""
    names = list(dict.fromkeys(s.stage for r in results for s in r.stages))
    rows = [["recipe", "exit", *names, "what came of it"]]
    for result in results:
        seconds = {s.stage: f"{s.seconds:.1f}" + ("!" if s.exit else "") for s in result.stages}
        rows.append(
            [result.recipe, str(result.exit), *(seconds.get(n, "-") for n in names), result.says]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )
