"""The `facts` suite: which questions are asked, and how many must be right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bakehouse.recipe.gate import BUILT_IN, Facts, Question

SAME = "same"
"""The key of the words that mean the same in all languages."""
DATA = Path(__file__).with_name("facts.yaml")


@cache
def _data() -> dict[str, list[Any]]:
    from ruamel.yaml import YAML  # only a probe needs it

    loaded: dict[str, list[Any]] = YAML(typ="safe", pure=True).load(DATA)
    return loaded


def languages() -> tuple[str, ...]:
    """Languages that there are built-in questions in, English first."""
    return tuple(key for key in _data() if key != SAME)


def _everywhere(answers: Sequence[str]) -> tuple[str, ...]:
    """Give answers and what they are called in other languages: a model may answer in its own."""
    groups = (group for group in _data()[SAME] if not set(group).isdisjoint(answers))
    return tuple(dict.fromkeys([*answers, *(word for group in groups for word in group)]))


def built_in(language: str = "en", mode: str = "chat") -> tuple[Question, ...]:
    """Give the built-in questions of a language, as questions or as sentences to go on with."""
    key = "complete" if mode == "completion" else "ask"
    return tuple(
        Question.model_validate(
            {"ask": row[key], "answers": _everywhere(row["answers"]), "mode": mode}
        )
        for row in _data()[language]
    )


def questions(facts: Facts) -> tuple[Question, ...]:
    """Give what is asked: the recipe's own questions, or the built-in ones."""
    return facts.questions or built_in(facts.language, facts.mode)


def must_pass(facts: Facts) -> int:
    """Give how many must be right, where the recipe does not say.

    All of a recipe's own: whoever writes them knows their model. All but one of the built-in ones:
    a small model may miss one, while a corrupted one misses nearly all.
    """
    if facts.must_pass:
        return facts.must_pass
    return len(facts.questions) if facts.questions else BUILT_IN - 1
