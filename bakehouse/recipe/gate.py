"""The `probe` part of a recipe: suites that a server must pass to be ready, and their settings."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.fields import Answer
from bakehouse.recipe.scalars import Filled, Flag, Misplaced, Number, Whole

SuiteName = Literal[
    "facts", "fluency", "likelihood", "reference", "speculation", "vision", "context", "json",
    "tools", "determinism", "concurrency",
]  # fmt: skip
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)


class Question(Frozen):
    """A question with an unambiguous answer."""

    ask: Filled
    answers: Annotated[tuple[Answer, ...], Field(min_length=1)]
    """Any of these, as whole words, in any case, anywhere in the reply."""
    mode: Literal["chat", "completion"] = "chat"


BUILT_IN = 8
"""Built-in questions in each language."""


class Facts(Frozen):
    """The suite of questions whose answers are known."""

    questions: Annotated[tuple[Question, ...], Field(min_length=1)] | None = None
    """In place of the built-in ones."""
    language: Literal["en", "de", "es", "fr", "zh"] = "en"
    """Of the built-in ones."""
    mode: Literal["chat", "completion"] = "chat"
    """How the built-in ones are put."""
    must_pass: Annotated[Whole, Field(ge=1)] | None = None
    """How many must be right; by default all of one's own, all but one of the built-in ones."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        asked = len(self.questions or ()) or BUILT_IN
        if self.must_pass and self.must_pass > asked:
            kind = "questions" if self.questions else "built-in questions"
            raise Misplaced(
                f"must_pass is {self.must_pass}, but there are {asked} {kind}", "must_pass"
            )
        return self


class Request(Frozen):
    """What each question is sent with."""

    max_tokens: Annotated[Whole, Field(ge=1)] = 64
    temperature: Annotated[Number, Field(ge=0)] = 0.0
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class Fluency(Frozen):
    """The suite that lets the model write at length and looks for degenerate output."""

    max_tokens: Annotated[Whole, Field(ge=16)] = 64
    """For each text that it writes."""
    texts: Annotated[Whole, Field(ge=1, le=4)] = 1
    """How many texts it writes."""
    mode: Literal["chat", "completion"] = "chat"
    """Whether it is asked for a text, or goes on with one."""


class Likelihood(Frozen):
    """The suite that measures how likely the model finds fixed texts. Nats per token."""

    ceiling: Annotated[Number, Field(gt=0)] = 4.5
    """The mean may never be above it, whatever the golden value."""
    tolerance: Annotated[Number, Field(gt=0)] | None = None
    """How far the mean may be from the golden value, either way; by default what was measured."""
    spread: Annotated[Number, Field(gt=0)] | None = None
    """How far single tokens may be from theirs, as the mean of the absolute differences."""


class Reference(Frozen):
    """The suite that compares greedy tokens and their probabilities with a reference run."""

    agreement: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of positions at which the most likely token must be the same; by default what was
    measured."""
    divergence: Annotated[Number, Field(gt=0)] | None = None
    """Largest mean Kullback-Leibler divergence from the reference, in nats; by default what was
    measured."""


class Speculation(Frozen):
    """The suite that checks speculative decoding, and compares it with decoding alone."""

    min_acceptance: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Share of the draft tokens that has to be accepted; by default any at all."""
    max_acceptance: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share above which acceptance counts as a fault: no drafter is that good."""
    near_tie: Annotated[Number, Field(gt=0)] = 0.25
    """Nats. Two tokens this close may change places with the size of a batch."""
    loss: Annotated[Number, Field(gt=0)] = 0.02
    """Nats per token. How much likelier greedy decoding alone may be, on average."""
    max_tokens: Annotated[Whole, Field(ge=8, le=512)] = 64
    """For a text that n-gram modes can draft; half as many for a new sentence."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_acceptance is not None and self.min_acceptance > self.max_acceptance:
            raise Misplaced(
                f"min_acceptance {self.min_acceptance:g} is above "
                f"max_acceptance {self.max_acceptance:g}",
                "min_acceptance",
            )
        return self


class Vision(Frozen):
    """The suite that shows images, made when it runs, and asks what is on them."""

    distance: Annotated[Whole, Field(ge=0)] = 0
    """Levenshtein distance, in characters, at which a printed line still counts as read."""
    seed: Annotated[Whole, Field(ge=0)] | None = None
    """What the images are made from; by default another one each time, kept in the record."""


class LongContext(Frozen):
    """The suite that hides a fact in a long prompt and asks for it."""

    tokens: Annotated[Whole, Field(ge=256)] | None = None
    """Length of the prompt; by default 1024, or what the served context has room for."""
    whole: Flag = False
    """Fill the served context, however long that takes."""
    must_find: Annotated[Whole, Field(ge=1, le=3)] = 3
    """Of the facts at 10, 50 and 90% of the prompt."""


class Determinism(Frozen):
    """The suite that asks the same thing several times."""

    times: Annotated[Whole, Field(ge=2, le=20)] = 3
    max_tokens: Annotated[Whole, Field(ge=1)] = 32
    required: Flag = False
    """Whether a difference fails; else it is reported."""


class Concurrency(Frozen):
    """The suite that asks several things at once."""

    at_once: Annotated[Whole, Field(ge=2, le=64)] = 4
    required: Flag = False
    """Whether another answer than alone fails, even where it is right."""


class Probe(Frozen):
    """The suites that a server must pass to be ready, and their settings."""

    suites: Annotated[tuple[SuiteName, ...], Field(min_length=1)] | None = None
    """By default those of `default_suites` for the engine."""
    request: Request = Request()
    facts: Facts = Facts()
    fluency: Fluency = Fluency()
    likelihood: Likelihood = Likelihood()
    reference: Reference = Reference()
    speculation: Speculation = Speculation()
    vision: Vision = Vision()
    context: LongContext = LongContext()
    determinism: Determinism = Determinism()
    concurrency: Concurrency = Concurrency()


def default_suites(
    engine: str | None, *, speculation: bool = False, vision: bool = False
) -> tuple[SuiteName, ...]:
    """Return the suites of a recipe that names none, or of a server without recipe.

    Both engines report the probability of a given text; of an unknown server only answers are
    checked.
    """
    if engine not in ("llama.cpp", "vllm"):
        return ("facts",)
    more: tuple[SuiteName, ...] = ("speculation",) if speculation else ()
    return ("facts", "fluency", "likelihood", *more, *(("vision",) if vision else ()))
