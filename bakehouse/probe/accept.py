"""Takes golden values from a server that has proven itself."""

from __future__ import annotations

from bakehouse.errors import NotHealthy
from bakehouse.probe.score import Scored, greedy, score_text, score_tokens
from bakehouse.probe.suites.likelihood import data_digest, texts
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
