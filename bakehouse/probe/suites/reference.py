"""The suite `reference`: the same greedy tokens, with the same probabilities, as a reference run.

The reference run belongs to the golden values of the weights, whichever backend or build made it.
The server is given the reference's own tokens, so that one near-tie that falls the other way does
not make the rest incomparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bakehouse.models import check
from bakehouse.probe.client import Client
from bakehouse.probe.golden import golden_path
from bakehouse.probe.logprobs import Scored, score_tokens
from bakehouse.probe.models import Golden, GoldenPlace, SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.runs.store import SuiteVerdict

PROMPT = "In the morning the baker opened the shop, and the first thing that he did was"
PLACES = 48
"""Tokens of the reference run."""
TOP = 10
"""Likeliest tokens that are kept and compared at each place."""
AGREEMENT = 0.9
"""Share of the places."""
SAME_BACKEND = 0.006
OTHER_BACKEND = 0.02
"""Nats. Measured with docs/gate.md: flash attention off and other types of the KV cache are up to
0.002 apart, a quarter of one matrix zeroed 0.008. Another backend rounds more than that."""


@dataclass(frozen=True)
class Bound:
    """How far a server may be from its reference run."""

    agreement: float
    """Share of places with the reference's token."""
    divergence: float
    """Mean over the places, in nats."""


FIVE_BIT = Bound(agreement=0.85, divergence=0.012)
FOUR_BIT = Bound(agreement=0.85, divergence=0.03)
COARSE = {
    **dict.fromkeys(("q5_0", "q5_1"), FIVE_BIT),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl"), FOUR_BIT),
}
"""A coarse KV cache makes more of another rounding, by type, unless it is the same server's run.
Measured with the same weights held as 16-bit floats: 43 of 48 tokens and 0.0056 nats (q5_1), 46 of
48 and 0.0147 (q4_0); twice that is borne. See docs/gate.md, `kernel-`."""


def ask(talk: Client, given: SuiteInput) -> Scored | None:
    """Score the tokens of the reference run; None where there is none."""
    golden = given.golden
    if golden is None or not golden.places:
        return None
    chosen = [place.tokens[0] for place in golden.places]
    return score_tokens(talk, [*golden.prompt, *chosen], top=TOP)


def judge(scored: Scored | None, given: SuiteInput) -> SuiteProof:
    """Compare each place with the reference: the likeliest token, and the divergence."""
    golden = given.golden
    if scored is None or golden is None:
        why = "there is no reference run of these weights"
        unknown = check("probe.reference", "a reference run", None, why, ok=None)
        hint = "invoke probe --recipe NAME --accept-golden keeps one, of a server that is proven"
        return SuiteProof("reference", "unable", why, (unknown,), hint=hint)
    if scored.trouble:
        why = scored.problem or ""
        ok = False if scored.trouble == "numbers" else None
        failed = check("probe.reference", "probabilities", why, "tokens", ok=ok)
        verdicts: dict[str, SuiteVerdict] = {"numbers": "wrong", "unable": "unable"}
        unable = scored.trouble == "unable"
        return SuiteProof(
            "reference", verdicts.get(scored.trouble, "unstable"), why, (failed,),
            hint="leave reference out of probe.suites" if unable else "look at the server's log",
            lost=scored.trouble == "lost",
        )  # fmt: skip
    bound = bound_for(golden, given)
    where = golden_path(given.known).name if given.known else "reference run"
    tops = scored.top[-len(golden.places) :]
    pairs = list(zip(golden.places, tops, strict=True))
    other = [i for i, (was, now) in enumerate(pairs) if not now or now[0][0] != was.tokens[0]]
    agreement = 1 - len(other) / len(pairs)
    divergences = [divergence(was, dict(now)) for was, now in pairs]
    mean = math.fsum(divergences) / len(divergences)
    checks = (
        check(
            "probe.reference.tokens",
            f"the reference's token at {bound.agreement:.0%} of {len(pairs)} places",
            f"{agreement:.0%}" + (f", the first other one at place {other[0]}" if other else ""),
            where, ok=agreement >= bound.agreement,
        ),
        check(
            "probe.reference", f"at most {bound.divergence:g} nats from the reference",
            f"{mean:.5f} nats, at most {max(divergences):.4f} at one place", where,
            ok=mean <= bound.divergence,
        ),
    )  # fmt: skip
    good = all(c.passed for c in checks)
    return SuiteProof(
        "reference", "true" if good else "wrong",
        f"{agreement:.0%} of {len(pairs)} tokens as in the reference run, {mean:.4f} nats apart",
        checks,
        figures={
            "agreement": round(agreement, 4), "divergence_nats": round(mean, 6),
            "worst_divergence_nats": round(max(divergences), 5), "places": len(pairs),
        },
        hint=None if good else "suspect the build, the backend, and flags that change numbers",
    )  # fmt: skip


def bound_for(golden: Golden, given: SuiteInput) -> Bound:
    """The recipe's bound, else what was measured for the cause of the noise."""
    wanted, known = given.probe.reference, given.known
    same_backend = known is None or known.backend == golden.backend
    divergence = SAME_BACKEND if same_backend else OTHER_BACKEND
    agreement = AGREEMENT
    same = known is not None and known.identity != "" and known.identity == golden.identity
    coarse = COARSE.get(golden.kv_cache)
    if coarse and not same:
        divergence = max(divergence, coarse.divergence)
        agreement = min(agreement, coarse.agreement)
    return Bound(wanted.agreement or agreement, wanted.divergence or divergence)


def divergence(was: GoldenPlace, now: Mapping[int, float]) -> float:
    """Give the Kullback-Leibler divergence of one place from its reference, in nats.

    Over the reference's likeliest tokens, with all other tokens as one. A token that the server
    does not name among its likeliest is taken to be as likely as the last of those.
    """
    least = min(now.values(), default=-50.0)
    reference = dict(zip(was.tokens, was.logprobs, strict=True))
    here = {token: now.get(token, least) for token in reference}
    rest_was = max(1e-6, 1 - math.fsum(math.exp(p) for p in reference.values()))
    rest_here = max(1e-6, 1 - math.fsum(math.exp(p) for p in here.values()))
    total = math.fsum(math.exp(p) * (p - here[token]) for token, p in reference.items())
    return max(0.0, total + rest_was * math.log(rest_was / rest_here))


def places_of(scored: Scored, count: int) -> tuple[GoldenPlace, ...]:
    """Give the last `count` places of a run, each with its own token first."""
    places = []
    own = list(zip(scored.tokens[1:], scored.logprobs, scored.top, strict=True))[-count:]
    for token, logprob, top in own:
        pairs = [(token, logprob), *((t, p) for t, p in top if t != token)][:TOP]
        places.append(
            GoldenPlace(
                tokens=tuple(t for t, _ in pairs), logprobs=tuple(round(p, 4) for _, p in pairs)
            )
        )
    return tuple(places)


SUITE = Suite("reference", ask, judge)
