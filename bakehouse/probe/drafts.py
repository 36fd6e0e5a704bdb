"""Judges speculative decoding: are drafts made and accepted, and is the text the model's own. Pure.

Speculation is lossless by its promise: at temperature 0 each token must be the one that the model
alone would say after the same text. Batches of other sizes round otherwise, so two tokens that are
nearly as likely may change places; anything more is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse.checks import Check, check
from bakehouse.engines.counters import Counters
from bakehouse.probe.greedy import Spoken, Step
from bakehouse.recipe.gate import Speculation


@dataclass(frozen=True)
class Text:
    """One text that was spoken with speculation, and what the model alone says at each place."""

    name: str
    spoken: Spoken
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Again:
    """A question that was answered wrongly with speculation, and how it went without."""

    question: str
    wrong: str
    """What was said with speculation."""
    alone: str
    """What was said without."""
    right_alone: bool


@dataclass(frozen=True)
class Parting:
    """The first place of a text at which the model alone would say something else."""

    text: str
    place: int
    """Tokens before it."""
    said: str
    alone: str
    gap: float
    """Nats by which the model's own token is likelier, or at least so many."""
    at_least: bool
    """Whether the token that was said is not even among the likeliest."""

    def __str__(self) -> str:
        """Give it in words."""
        least = "at least " if self.at_least else ""
        return (
            f"{self.text}, token {self.place + 1}: {self.said!r} where the model alone says "
            f"{self.alone!r}, {least}{self.gap:.3f} nats likelier"
        )


def gaps(text: Text) -> list[Parting | None]:
    """Hold each token against the model's own choice; None where they are the same."""
    found: list[Parting | None] = []
    for place, (token, step) in enumerate(zip(text.spoken.tokens, text.steps, strict=False)):
        if step.best is None or token == step.best[0]:
            found.append(None)
            continue
        best = step.best
        own = next((row for row in step.likely if row[0] == token), None)
        value = own[2] if own else step.likely[-1][2]
        said = own[1] if own else f"token {token}"
        found.append(Parting(text.name, place, said, best[1], best[2] - value, own is None))
    return found


def on(flags: Sequence[bool | None] | None, where: str) -> Check | None:
    """Judge what an engine itself says of speculation in its slots; None where it says nothing."""
    if flags is None:
        return None
    seen = ", ".join("unknown" if f is None else str(f).lower() for f in flags) or None
    return check(
        "probe.speculation.on", "speculation on in every slot", seen, where,
        ok=all(f is True for f in flags),
    )  # fmt: skip


def drafted(texts: Sequence[Text], counted: Counters | None) -> tuple[int | None, int | None]:
    """Give draft tokens made and accepted: by the answers themselves, else by the counters."""
    said = [t.spoken for t in texts if t.spoken.drafted is not None]
    if said:
        return sum(s.drafted or 0 for s in said), sum(s.accepted or 0 for s in said)
    if counted is None or counted.draft_tokens is None:
        return None, None
    return int(counted.draft_tokens), int(counted.accepted or 0)


def acceptance(
    texts: Sequence[Text], counted: Counters | None, wanted: Speculation
) -> tuple[Check, Check]:
    """Judge whether drafts are made, and whether the share that is accepted can be right."""
    made, kept = drafted(texts, counted)
    where = "timings of POST /completion" if made is not None and texts and (
        texts[0].spoken.drafted is not None
    ) else "GET /metrics"  # fmt: skip
    makes = check(
        "probe.speculation.drafts", "draft tokens are made",
        None if made is None else f"{made} in {len(texts)} texts", where,
        ok=None if made is None else made > 0,
    )  # fmt: skip
    low = "any at all" if wanted.min_acceptance is None else f"{wanted.min_acceptance:.0%}"
    expected = f"{low} to {wanted.max_acceptance:.0%} of the draft tokens accepted"
    if not made or kept is None:
        return makes, check("probe.speculation.acceptance", expected, None, where, ok=None)
    share = kept / made
    enough = kept > 0 if wanted.min_acceptance is None else share >= wanted.min_acceptance
    seen = f"{kept} of {made} ({share:.1%}){_by_position(counted)}"
    return makes, check(
        "probe.speculation.acceptance", expected, seen, where,
        ok=enough and share <= wanted.max_acceptance,
    )  # fmt: skip


def _by_position(counted: Counters | None) -> str:
    shown = [f"{n:.0f}" for n in (counted.per_position if counted else ())]
    more = " ..." if len(shown) > 8 else ""
    return f"; by position {' '.join(shown[:8])}{more}" if shown else ""


def sameness(texts: Sequence[Text], wanted: Speculation) -> tuple[Check, Check]:
    """Judge the text itself: token by token, and by what it loses in likelihood over all."""
    where = "POST /completion, one token a request"
    expected = f"each token the model's own, or within {wanted.near_tie:g} nats of it"
    mean = f"at most {wanted.loss:g} nats a token less likely than the model's own"
    found = [(text, gaps(text)) for text in texts]
    judged = sum(len(g) for _, g in found)
    whole = all(len(g) == len(t.spoken.tokens) for t, g in found)
    broken = any(step.problem for text in texts for step in text.steps)
    if not judged or not whole or broken:
        why = next((s.problem for t in texts for s in t.steps if s.problem), None)
        where = f"{where}: {why}" if why else where
        return (
            check("probe.speculation.same", expected, None, where, ok=None),
            check("probe.speculation.loss", mean, None, where, ok=None),
        )
    partings = [p for _, g in found for p in g if p]
    bad = [p for p in partings if p.gap > wanted.near_tie]
    seen = f"{judged - len(partings)} of {judged} tokens the same"
    if partings:
        kind = "" if bad else "a near-tie at "
        seen = f"{seen}; {kind}{bad[0] if bad else partings[0]}"
    loss = sum(p.gap for p in partings) / judged
    return (
        check("probe.speculation.same", expected, seen, where, ok=not bad),
        check("probe.speculation.loss", mean, f"{loss:.4f} nats a token", where,
              ok=loss <= wanted.loss),
    )  # fmt: skip


def facts_loss(again: Sequence[Again], answered: bool) -> Check:
    """Judge whether speculation cost a right answer; `answered` says that all were answered."""
    lost = [a for a in again if a.right_alone]
    seen = f"{len(again)} answered wrongly, none of them rightly alone" if answered else None
    if lost:
        seen = f"{lost[0].question!r} got {lost[0].wrong[:80]!r}, alone {lost[0].alone[:80]!r}"
    return check(
        "probe.speculation.facts", "no question answered rightly only without speculation", seen,
        "POST /v1/chat/completions, then one token a request", ok=not lost,
    )  # fmt: skip
