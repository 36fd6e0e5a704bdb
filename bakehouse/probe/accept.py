"""Takes golden values from a server that has proven itself."""

from __future__ import annotations

import math

from bakehouse.errors import NotHealthy
from bakehouse.probe.score import Scored, greedy, score_text, score_tokens
from bakehouse.probe.suites.likelihood import SAME_BACKEND, data_digest, texts
from bakehouse.probe.suites.reference import PLACES, PROMPT, TOP, places_of
from bakehouse.probe.talk import PATIENT, Around, Patience, Talk
from bakehouse.probe.types import Endpoint, Golden, GoldenText, Known


def take_golden(
    ctx: Around,
    endpoint: Endpoint,
    known: Known,
    *,
    version: str = "",
    patience: Patience = PATIENT,
) -> Golden:
    """Ask for everything that golden values hold. Raises NotHealthy where the server cannot.

    Whether the server may be believed is for the caller to know.
    """
    talk = Talk(ctx, endpoint, patience)
    scored = {name: _good(score_text(talk, text), endpoint) for name, text in texts().items()}
    run = _good(greedy(talk, PROMPT, PLACES), endpoint)
    count = len(run.logprobs)
    reference = _good(score_tokens(talk, run.tokens, top=TOP), endpoint)
    return Golden(
        weights16=known.weights16,
        kv_cache=known.kv_cache,
        backend=known.backend,
        identity=known.identity,
        version=version,
        data=data_digest(),
        texts={
            name: GoldenText(tokens=one.tokens, logprobs=tuple(round(p, 4) for p in one.logprobs))
            for name, one in scored.items()
        },
        prompt=run.tokens[:-count],
        places=places_of(reference, count),
    )


def _good(scored: Scored, endpoint: Endpoint) -> Scored:
    if scored.trouble:
        raise NotHealthy(
            f"golden values cannot be taken: {scored.problem}", where=endpoint.url,
            hint="the engine must give probabilities of tokens", id="golden",
        )  # fmt: skip
    return scored


def change(before: Golden, after: Golden) -> str | None:
    """Say how far new golden values are from those that they replace; None where they are near."""
    pairs = [
        (was, now)
        for name, old in before.texts.items()
        if (new := after.texts.get(name)) and new.tokens == old.tokens
        for was, now in zip(old.logprobs, new.logprobs, strict=True)
    ]
    if not pairs:
        return "the golden values before were of other texts or tokens"
    mean = math.fsum(was - now for was, now in pairs) / len(pairs)
    spread = math.fsum(abs(was - now) for was, now in pairs) / len(pairs)
    if abs(mean) <= SAME_BACKEND.mean and spread <= SAME_BACKEND.spread:
        return None
    return (
        f"the golden values before were others: {mean:+.4f} nats a token now, single tokens "
        f"{spread:.4f} apart; one of the two servers is wrong, or something was changed on purpose"
    )
