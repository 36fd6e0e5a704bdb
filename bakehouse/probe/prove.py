"""Runs the suites of a recipe against a server: asks, judges, and gives the proof."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from bakehouse.checks import Verdict, check
from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.ports.http import Http, Unreachable
from bakehouse.probe.ask import served
from bakehouse.probe.golden import read_golden
from bakehouse.probe.judge import overall
from bakehouse.probe.suite import run_suite
from bakehouse.probe.suites import REGISTRY
from bakehouse.probe.talk import PATIENT, Around, Patience
from bakehouse.probe.types import Endpoint, Given, Known, Proof, SuiteProof
from bakehouse.recipe.gate import Probe, SuiteName, default_suites
from bakehouse.records.model import Answer, SuiteVerdict

WORST: tuple[SuiteVerdict, ...] = (
    "wrong", "never started", "unstable", "unable", "true (provisional)", "true",
)  # fmt: skip
"""Which verdict speaks for all suites: the first of these that any of them came to."""

SUSPECTS = (
    "do not trust this server: suspect the build (toolkit, kernels), the quantisation, the chat "
    "template and the last flag that changed, in this order"
)


def prove(
    ctx: Around,
    endpoint: Endpoint,
    probe: Probe,
    *,
    known: Known | None = None,
    patience: Patience = PATIENT,
    spare: Collection[SuiteName] = (),
) -> Proof:
    """Ask what the recipe wants asked, and judge it. Never raises for what a server does.

    Suites that are `spare` are left out where they are beyond the server. Raises LockError where
    the golden values of `known` cannot be read.
    """
    given = Given(_with_model(ctx.http, endpoint), probe, known, read_golden(known))
    proofs: list[SuiteProof] = []
    for name in probe.suites or default_suites(endpoint.engine):
        if lost := next((p for p in proofs if p.lost), None):
            proofs.append(_not_asked(name, lost))
        else:
            proofs.append(run_suite(ctx, REGISTRY[name], given, patience))
    kept = [p for p in proofs if not (p.suite in spare and p.verdict == "unable")]
    return conclude(kept or proofs)


def conclude(proofs: Sequence[SuiteProof]) -> Proof:
    """Give the verdict over all suites, with the one sentence that a person needs."""
    checks = tuple(c for p in proofs for c in p.checks)
    word = worst(proofs).verdict
    verdict = overall(checks)
    says = {
        Verdict.PASSED: _PASSED.get(word, "answers correctly"),
        Verdict.FAILED: "does not answer correctly",
        Verdict.UNKNOWN: "is not proven",
    }[verdict]
    told = proofs if verdict is Verdict.PASSED else [p for p in proofs if not p.good]
    summary = f"the server {says}: " + "; ".join(f"{p.suite} {p.summary}" for p in told)
    answers = tuple(a for p in proofs for a in p.answers)
    return Proof(checks, answers, verdict, summary, tuple(proofs), word)


_PASSED = {"true (provisional)": "answers correctly (provisional: no golden value to hold it to)"}


def worst(proofs: Sequence[SuiteProof]) -> SuiteProof:
    """Give the suite that speaks for all: the first of those with the worst verdict."""
    return min(proofs, key=lambda p: WORST.index(p.verdict))


def _not_asked(name: SuiteName, lost: SuiteProof) -> SuiteProof:
    why = f"not asked, since nobody answered {lost.suite}"
    unknown = check(f"probe.{name}", "answers", None, why, ok=None)
    return SuiteProof(name, "unstable", why, (unknown,), lost=True)


def _with_model(http: Http, endpoint: Endpoint) -> Endpoint:
    """Name the model to ask for, where nobody did: the first that the server lists."""
    if endpoint.model:
        return endpoint
    try:
        models = served(http, endpoint).models
    except Unreachable:
        return endpoint  # the questions will tell
    return replace(endpoint, model=models[0]) if models else endpoint


def explain(proof: Proof, where: str) -> BakehouseError | None:
    """Give the error that says why this is no proof; None where it is one.

    NotHealthy where too little was answered at all or a capability is missing, NotCorrect where
    answers were wrong, or where the model never came to an answer.
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
    """Give one line an answer: verdict, question, what was said. Untrusted text, not cleaned."""
    width = max((len(a.verdict) for a in answers), default=0)
    return [f"{a.verdict:{width}}  {a.question}  {_said(a)}" for a in answers]


def _said(answer: Answer) -> str:
    text = " ".join((answer.content.strip() or answer.reasoning.strip())[:400].split())
    short = text if len(text) <= 80 else f"{text[:77]}..."
    parts = [f"-> {short}" if short else f"-> nothing ({answer.why})"]
    if short and answer.verdict != "right":
        parts.append(f"({answer.why})")
    if answer.verdict == "right" and answer.found_in == "reasoning":
        parts.append("(found in the reasoning)")
    return " ".join(parts)
