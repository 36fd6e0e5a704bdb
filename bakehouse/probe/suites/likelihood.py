"""The suite `likelihood`: how likely the model finds fixed texts, in nats per token.

A server that answers simple questions may still be wrong: what a corrupted matrix, a wrong norm or
a wrong kernel does shows in the probabilities long before it shows in an answer. The mean negative
log-likelihood is compared with a ceiling and, two-sided, with the golden value of these weights:
a corruption may lower the mean as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bakehouse.models import Check, check, digest
from bakehouse.probe.client import Client
from bakehouse.probe.golden import golden_path
from bakehouse.probe.logprobs import Scored, score_text
from bakehouse.probe.models import Golden, SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.runs.store import SuiteVerdict

DATA = Path(__file__).parents[1] / "texts.yaml"


@dataclass(frozen=True)
class Bound:
    """How far a server may be from its golden values, in nats per token."""

    mean: float
    """The mean over all tokens, either way."""
    spread: float
    """The mean of the absolute differences of single tokens."""


SAME_SERVER = Bound(mean=0.004, spread=0.02)
"""The very server that the golden values are of: build, command and machine. Threads, batch sizes,
repacking and slots change nothing at all in one sequence that is decoded token by token."""
SAME_BACKEND = Bound(mean=0.02, spread=0.08)
"""Another build, other flags (flash attention) or another CPU: it rounds differently, and weights
quantised to 4 bits with activations to 8 make much of that."""
OTHER_BACKEND = Bound(mean=0.03, spread=0.25)
"""Golden values of the CPU, asked of a GPU: 4-bit weights meet 8-bit activations there and 16-bit
ones here. Measured on an H200: +0.0019 in the mean, 0.1205 in the spread. Each type of KV cache has
golden values of its own, so that its noise plays no part here. See docs/suites.md."""

FIVE_BIT = Bound(mean=0.03, spread=0.18)
FOUR_BIT = Bound(mean=0.08, spread=0.4)
COARSE = {
    **dict.fromkeys(("q5_0", "q5_1"), FIVE_BIT),
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl"), FOUR_BIT),
}
"""A coarse KV cache makes more of another rounding, by type. Measured: with the same weights held
as 16-bit floats 0.018 and 0.116 (q5_1), 0.045 and 0.246 (q4_0); see docs/gate.md, `kernel-`."""


FLOOR = 0.3
"""Nats a token. The texts were written for this purpose: no model knows them by heart."""
CERTAIN = -1e-3
"""A log-probability above this is that of a token without any other beside it."""
DISTINCT = 4
"""Values that probabilities of a real model take at least, to a thousandth of a nat."""


@cache
def texts() -> dict[str, str]:
    """Give the texts by name."""
    from ruamel.yaml import YAML  # only a probe needs it

    loaded: dict[str, str] = YAML(typ="safe", pure=True).load(DATA)
    return loaded


def data_digest() -> str:
    """Give the digest over the texts, 16 hex digits."""
    return digest(texts())[:16]


def ask(talk: Client, given: SuiteInput) -> dict[str, Scored]:
    """Score all texts; after one that brought nothing the rest would bring nothing either."""
    del given  # what is asked does not depend on it
    scored: dict[str, Scored] = {}
    with talk.progress.bar("probe", "texts") as bar:
        for name, text in texts().items():
            scored[name] = score_text(talk, text)
            bar.update(len(scored), len(texts()), "likelihood")
            if scored[name].trouble:
                break
    return scored


def judge(scored: Mapping[str, Scored], given: SuiteInput) -> SuiteProof:
    """Check the log-probabilities of all texts."""
    for name, one in scored.items():
        if one.trouble:
            return _no_numbers(name, one)
    means = {name: _mean(one.logprobs) for name, one in scored.items()}
    every = [number for one in scored.values() for number in one.logprobs]
    mean = _mean(every)
    if no_model := _no_model(every, next(iter(scored.values())).how):
        return _no_numbers("all texts", no_model)
    figures = {
        "nats_per_token": round(mean, 5), "scored_tokens": len(every),
        "texts": {name: round(value, 5) for name, value in means.items()},
        "how": next(iter(scored.values())).how,
    }  # fmt: skip
    ceiling = given.probe.likelihood.ceiling
    where = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    checks = [
        check(
            "probe.likelihood", f"at least {FLOOR:g} and at most {ceiling:g} nats a token",
            f"{mean:.4f} nats a token over {len(every)} tokens", where,
            ok=FLOOR <= mean <= ceiling,
        )
    ]  # fmt: skip
    if given.golden is None or given.golden.data != data_digest():
        why = (
            "no golden value yet" if given.golden is None else "its golden value is of other texts"
        )
        return _proof(checks, f"{mean:.3f} nats a token, {why}", figures)
    against, distance = _against(scored, given.golden, given)
    figures["golden"] = distance
    summary = f"{mean:.3f} nats a token"
    if "difference" in distance:
        summary += f" ({distance['difference']:+.4f} from the golden value)"
    return _proof([*checks, *against], summary, figures)


def _no_model(every: list[float], how: str) -> Scored | None:
    """Tell numbers that no model has: all certain (taken behind the sampler), or all the same."""
    if len(every) < 8 * DISTINCT:
        return None
    if min(every) > CERTAIN:
        why = "every token is certain: probabilities behind the sampler, which was told what to say"
        return Scored(problem=why, trouble="unable", how=how)
    if len({round(number, 3) for number in every}) < DISTINCT:
        why = (
            f"all {len(every)} tokens are equally likely ({every[0]:.3f} nats): no model does that"
        )
        return Scored(problem=why, trouble="numbers", how=how)
    return None


def _proof(checks: list[Check], summary: str, figures: dict[str, object]) -> SuiteProof:
    failed = [c for c in checks if not c.passed]
    verdict: SuiteVerdict = "true" if len(checks) > 1 else "true (provisional)"
    hint = None
    if failed:
        verdict = "wrong"
        summary = f"{summary}; expected {failed[0].expected}"
        hint = (
            "its probabilities are not those of this model as it was proven: suspect the build, "
            "the weights' files, and flags that change numbers (KV cache, RoPE, attention)"
        )
    return SuiteProof("likelihood", verdict, summary, tuple(checks), figures=figures, hint=hint)


def bound_for(golden: Golden, given: SuiteInput) -> Bound:
    """The recipe's bound, else what was measured for the cause of the noise."""
    wanted = given.probe.likelihood
    known = given.known
    measured = SAME_BACKEND
    if known and known.identity and known.identity == golden.identity:
        measured = SAME_SERVER
    elif known and known.backend != golden.backend:
        measured = OTHER_BACKEND
    coarse = COARSE.get(golden.kv_cache)
    if coarse and measured is not SAME_SERVER:
        measured = Bound(max(measured.mean, coarse.mean), max(measured.spread, coarse.spread))
    return Bound(wanted.tolerance or measured.mean, wanted.spread or measured.spread)


def _against(
    scored: Mapping[str, Scored], golden: Golden, given: SuiteInput
) -> tuple[list[Check], dict[str, float]]:
    """Compare with the golden values: the same tokens, the mean, and each token."""
    where = golden_path(given.known).name if given.known else "golden values"
    other = [
        name
        for name, one in scored.items()
        if name not in golden.texts or golden.texts[name].tokens != one.tokens
    ]
    tokens = check(
        "probe.likelihood.tokens", "the texts split into the same tokens as golden",
        f"other tokens in {', '.join(other)}" if other else "the same", where, ok=not other,
    )  # fmt: skip
    if other:
        return [tokens], {}
    pairs = [
        (was, now)
        for name, one in scored.items()
        for was, now in zip(golden.texts[name].logprobs, one.logprobs, strict=True)
    ]
    difference = _mean([now for _, now in pairs]) - _mean([was for was, _ in pairs])
    spread = math.fsum(abs(now - was) for was, now in pairs) / len(pairs)
    bound = bound_for(golden, given)
    wanted = _mean([was for was, _ in pairs])
    checks = [
        tokens,
        check(
            "probe.likelihood.golden", f"{wanted:.4f} nats a token, give or take {bound.mean:g}",
            f"{wanted + difference:.4f} ({difference:+.4f})", where,
            ok=abs(difference) <= bound.mean,
        ),
        check(
            "probe.likelihood.spread",
            f"single tokens at most {bound.spread:g} nats from golden on average",
            f"{spread:.4f} nats", where, ok=spread <= bound.spread,
        ),
    ]  # fmt: skip
    return checks, {"difference": round(difference, 5), "spread": round(spread, 5)}


def _no_numbers(name: str, one: Scored) -> SuiteProof:
    """The proof if there are no numbers: wrong ones, no capability, or no answer."""
    said = f"text '{name}': {one.problem}" if name in texts() else str(one.problem)
    ok = False if one.trouble == "numbers" else None
    failed = check("probe.likelihood", "a probability for each token", said, name, ok=ok)
    verdicts: dict[str, SuiteVerdict] = {"numbers": "wrong", "unable": "unable"}
    hints = {
        "numbers": "the engine computes no numbers: suspect NaN in weights, kernels or KV cache",
        "unable": "the engine gives no probabilities; leave likelihood out of probe.suites",
    }
    return SuiteProof(
        "likelihood", verdicts.get(one.trouble or "", "unstable"), said, (failed,),
        hint=hints.get(one.trouble or "", "look at the server's log"), lost=one.trouble == "lost",
    )  # fmt: skip


def _mean(logprobs: list[float] | tuple[float, ...]) -> float:
    """Give the mean negative log-likelihood, in nats."""
    return -math.fsum(logprobs) / len(logprobs)


SUITE = Suite("likelihood", ask, judge)
