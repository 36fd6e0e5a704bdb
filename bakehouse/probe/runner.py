"""Run suites and conclude."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.models import Verdict, check
from bakehouse.probe.answers import overall
from bakehouse.probe.client import DEFAULT_LIMITS, Client, ProbeContext, RequestLimits, served
from bakehouse.probe.golden import read_golden
from bakehouse.probe.logprobs import Generated, Scored, greedy, score_text, score_tokens
from bakehouse.probe.models import (
    Endpoint,
    Golden,
    GoldenText,
    Proof,
    ServedModel,
    SuiteInput,
    SuiteProof,
)
from bakehouse.probe.suites import REGISTRY
from bakehouse.probe.suites.base import run_suite
from bakehouse.probe.suites.likelihood import SAME_BACKEND, data_digest, texts
from bakehouse.probe.suites.reference import PLACES, PROMPT, TOP, places_of
from bakehouse.recipe.models import Probe, SuiteName, default_suites
from bakehouse.runs.store import Answer, SuiteVerdict
from bakehouse.system.http import Unreachable

WORST: tuple[SuiteVerdict, ...] = (
    "wrong", "never started", "unstable", "unable", "true (provisional)", "true",
)  # fmt: skip
"""Which verdict speaks for all suites: the first of these that any of them came to."""

SUSPECTS = (
    "do not trust this server: suspect the build (toolkit, kernels), the quantisation, the chat "
    "template and the last flag that changed, in this order"
)


def run_probe(
    ctx: ProbeContext,
    endpoint: Endpoint,
    probe: Probe,
    *,
    known: ServedModel | None = None,
    patience: RequestLimits = DEFAULT_LIMITS,
    spare: Collection[SuiteName] = (),
) -> Proof:
    """Run the suites of a recipe. Never raises for what a server does.

    Suites that are `spare` are left out if the server does not support them. Raises LockError if
    the golden values of `known` cannot be read.
    """
    if not endpoint.model:  # take the first that the server lists
        with suppress(Unreachable):  # the questions will show it
            if models := served(ctx.http, endpoint).models:
                endpoint = replace(endpoint, model=models[0])
    given = SuiteInput(endpoint, probe, known, read_golden(known))
    proofs: list[SuiteProof] = []
    for name in probe.suites or default_suites(endpoint.engine):
        if lost := next((p for p in proofs if p.lost), None):
            why = f"not asked, since nobody answered {lost.suite}"
            unknown = check(f"probe.{name}", "answers", None, why, ok=None)
            proofs.append(SuiteProof(name, "unstable", why, (unknown,), lost=True))
        else:
            proofs.append(run_suite(ctx, REGISTRY[name], given, patience))
    kept = [p for p in proofs if not (p.suite in spare and p.verdict == "unable")]
    return conclude(kept or proofs)


def conclude(proofs: Sequence[SuiteProof]) -> Proof:
    """Give the verdict over all suites, and one summary sentence."""
    checks = tuple(c for p in proofs for c in p.checks)
    word = worst(proofs).verdict
    verdict = overall(checks)
    says = {
        Verdict.PASSED: _PASSED.get(word, "answers correctly"),
        Verdict.FAILED: "does not answer correctly",
        Verdict.UNKNOWN: "is not proven",
    }[verdict]
    named = proofs if verdict is Verdict.PASSED else [p for p in proofs if not p.good]
    summary = f"the server {says}: " + "; ".join(f"{p.suite} {p.summary}" for p in named)
    answers = tuple(a for p in proofs for a in p.answers)
    return Proof(checks, answers, verdict, summary, tuple(proofs), word)


_PASSED = {"true (provisional)": "answers correctly (provisional: no golden value to hold it to)"}


def worst(proofs: Sequence[SuiteProof]) -> SuiteProof:
    """Give the suite that speaks for all: the first of those with the worst verdict."""
    return min(proofs, key=lambda p: WORST.index(p.verdict))


def explain(proof: Proof, where: str) -> BakehouseError | None:
    """Give the error that says why this is not a proof; None if it is one.

    NotHealthy if too little was answered or a capability is missing, NotCorrect if answers were
    wrong or the model never came to an answer.
    """
    if proof.passed:
        return None
    first = worst(proof.suites)
    failed = any(c.verdict is Verdict.FAILED for c in first.checks)
    kind: type[BakehouseError] = NotCorrect
    if first.verdict == "unable" or (first.verdict == "unstable" and not failed):
        kind = NotHealthy
    return kind(proof.summary, where=where, hint=first.hint or SUSPECTS, checks=proof.checks)


def answer_lines(answers: Sequence[Answer]) -> list[str]:
    """One line an answer: verdict, question, text. Untrusted text, not cleaned."""
    width = max((len(a.verdict) for a in answers), default=0)
    lines: list[str] = []
    for answer in answers:
        text = " ".join((answer.content.strip() or answer.reasoning.strip())[:400].split())
        short = text if len(text) <= 80 else f"{text[:77]}..."
        line = f"{answer.verdict:{width}}  {answer.question}  -> {short or 'nothing'}"
        if answer.verdict != "right":
            line += f" ({answer.why})"
        elif answer.found_in == "reasoning":
            line += " (found in the reasoning)"
        lines.append(line)
    return lines


def take_golden(
    ctx: ProbeContext,
    endpoint: Endpoint,
    known: ServedModel,
    *,
    version: str = "",
    patience: RequestLimits = DEFAULT_LIMITS,
) -> Golden:
    """Ask for everything that golden values hold. Raises NotHealthy where the server cannot.

    Whether the server may be believed is for the caller to know.
    """
    talk = Client(ctx, endpoint, patience)

    def need(one: Scored | Generated) -> None:
        if one.problem:
            raise NotHealthy(
                f"golden values cannot be taken: {one.problem}", where=endpoint.url,
                hint="the engine must return probabilities of tokens", id="golden",
            )  # fmt: skip

    scored: dict[str, Scored] = {}
    for name, text in texts().items():
        need(one := score_text(talk, text))
        scored[name] = one
    need(run := greedy(talk, PROMPT, PLACES))
    prompt = tuple(token for token in run.prompt if isinstance(token, int))
    need(reference := score_tokens(talk, (*prompt, *run.tokens), top=TOP))
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
        prompt=prompt,
        places=places_of(reference, len(run.tokens)),
    )


def change(before: Golden, after: Golden) -> str | None:
    """Say how far new golden values are from those that they replace; None where they are near."""
    pairs = [
        (was, now)
        for name, old in before.texts.items()
        if (new := after.texts.get(name)) and new.tokens == old.tokens
        for was, now in zip(old.logprobs, new.logprobs, strict=True)
    ]
    if not pairs:
        return "the old golden values are for other texts or tokens"
    mean = math.fsum(was - now for was, now in pairs) / len(pairs)
    spread = math.fsum(abs(was - now) for was, now in pairs) / len(pairs)
    if abs(mean) <= SAME_BACKEND.mean and spread <= SAME_BACKEND.spread:
        return None
    return (
        f"the old golden values differ: {mean:+.4f} nats a token now, single tokens "
        f"{spread:.4f} apart; one of the two servers is wrong, or something was changed on purpose"
    )
