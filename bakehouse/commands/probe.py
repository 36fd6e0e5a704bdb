"""`probe`: judge a running server, ours or any that speaks the OpenAI API."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from bakehouse import flags
from bakehouse.commands.servers import Target, identify_any, target_of
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, LockError, NotCorrect, NotHealthy
from bakehouse.models import Verdict, not_passed
from bakehouse.probe.golden import read_golden, write_golden
from bakehouse.probe.models import Endpoint, Golden, Proof, ServedModel
from bakehouse.probe.runner import answer_lines, change, explain, run_probe, take_golden
from bakehouse.recipe.models import SuiteName
from bakehouse.runs.store import Run
from bakehouse.server.verification import identity

Options = flags.Probe


def run(ctx: Context, options: Options) -> Outcome:
    """Ask and judge. Exit 0 correct, 7 not reachable or not healthy, 8 not correct."""
    target = target_of(ctx, options, golden=options.accept_golden)
    proof: Proof | None = None
    golden: Path | None = None
    error: BakehouseError | None = None
    with (
        suppress(NotCorrect, NotHealthy),
        Run.start(ctx, "probe", target.recipe, secrets=target.secrets) as run,
    ):
        try:
            proof = _judge(ctx, target, run, None if options.accept_golden else target.known)
            error = explain(proof, target.endpoint.url)
            if options.accept_golden and target.known and not error:
                golden = _accept(ctx, target.endpoint, target.known, run)
        except NotHealthy as unhealthy:
            error = unhealthy
        if error:
            raise error
        run.finish(proof.summary if proof else "nothing was asked")
    answers = proof.answers if proof else ()
    result = {
        "url": target.endpoint.url,
        "recipe": target.recipe,
        "verdict": proof.verdict.value if proof else Verdict.UNKNOWN.value,
        "summary": proof.summary if proof else None,
        "answers": [a.to_data() for a in answers],
        "suites": [s.record().to_data() for s in proof.suites] if proof else [],
        "golden": str(golden) if golden else None,
        "record": str(run.folder),
    }
    lines = answer_lines(answers)
    if proof and not error:
        lines += [f"golden values: {golden}"] if golden else []
        lines += [f"CORRECT  {target.endpoint.url}  {proof.summary}", f"record: {run.record}"]
    return Outcome(result, "\n".join(lines), run.judged, error=error)


def _judge(ctx: Context, target: Target, run: Run, known: ServedModel | None) -> Proof:
    """Find out who answers, then ask. Raises NotHealthy where it is not the one that is wanted.

    Where golden values are about to be made, the old ones are not `known`.
    """
    run.hide(*(v.removeprefix("Bearer ") for v in target.endpoint.headers.values()))
    run.fact("url", target.endpoint.url)
    with run.step("identify"):
        if target.server:
            checks = identity(ctx, target.server)
            run.checks(checks)
            if missing := not_passed(checks):
                one = missing[0]
                raise NotHealthy(
                    f"{one.id}: expected {one.expected}; observed {one.observed}",
                    where=one.where,
                    hint=f"invoke status; the server's log is {target.server.log}",
                )
            endpoint = target.endpoint
        else:
            endpoint = identify_any(ctx, target.endpoint, run)
    run.fact("model", endpoint.model)
    with run.step("probe"):
        # Nobody asked for probabilities of a stranger's server: a proxy may well hide them.
        spare: tuple[SuiteName, ...] = () if target.server else ("likelihood",)
        proof = run_probe(ctx, endpoint, target.probe, known=known, spare=spare)
    run.answers(proof.answers)
    run.suites(suite.record() for suite in proof.suites)
    run.checks(proof.checks)
    return proof


def _accept(ctx: Context, endpoint: Endpoint, known: ServedModel, run: Run) -> Path:
    """Keep the golden values of a server that has just proven itself. Raises NotHealthy."""
    with run.step("golden"):
        golden = take_golden(ctx, endpoint, known)
        before: Golden | None = None
        with suppress(LockError):  # a damaged one is replaced
            before = read_golden(known)
        path = write_golden(known, golden)
    run.fact("golden", str(path))
    if before and (told := change(before, golden)):
        run.fact("golden_change", told)
        ctx.progress.say(told)
    return path
