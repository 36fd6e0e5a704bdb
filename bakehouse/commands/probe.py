"""`probe`: judge a running server, ours or any that speaks the OpenAI API."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from bakehouse.checks import Verdict, check, not_passed
from bakehouse.commands.servers import server_name
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, LockError, NotCorrect, NotHealthy, UsageError
from bakehouse.outcome import Outcome
from bakehouse.ports.http import Unreachable
from bakehouse.probe.accept import change, take_golden
from bakehouse.probe.ask import served
from bakehouse.probe.golden import known_of, read_golden, write_golden
from bakehouse.probe.prove import answer_lines, explain, prove
from bakehouse.probe.types import Endpoint, Golden, Known, Proof
from bakehouse.recipe.gate import Probe, SuiteName
from bakehouse.recipe.load import find, load
from bakehouse.records.store import Run
from bakehouse.resolve import lock_path, read_lock
from bakehouse.serve.control import look
from bakehouse.serve.launch import kept_key
from bakehouse.serve.proof import Running, identity, running


@dataclass(frozen=True)
class Options:
    """Flags of `probe`: exactly one of `recipe` and `url`."""

    recipe: str = ""
    set_: tuple[str, ...] = ()
    instance: str = ""
    """Which of several servers of the recipe."""
    url: str = ""
    model: str = ""
    api_key_env: str = ""
    accept_golden: bool = False
    """Keep what this server answers as the golden values of its weights, if it proves itself."""


@dataclass(frozen=True)
class Target:
    """What is judged, and by which questions."""

    endpoint: Endpoint
    probe: Probe
    recipe: str | None
    secrets: tuple[str, ...] = ()
    """Names of the variables whose values are hidden."""
    server: Running | None = None
    """Where it is ours: who has to be the one that answers."""
    known: Known | None = None
    """Where it is ours and locked: the model that it serves."""


def run(ctx: Context, options: Options) -> Outcome:
    """Ask and judge. Exit 0 correct, 7 not reachable or not healthy, 8 not correct."""
    target = target_of(ctx, options)
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


def _judge(ctx: Context, target: Target, run: Run, known: Known | None) -> Proof:
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
        proof = prove(ctx, endpoint, target.probe, known=known, spare=spare)
    run.answers(proof.answers)
    run.suites(suite.record() for suite in proof.suites)
    run.checks(proof.checks)
    return proof


def _accept(ctx: Context, endpoint: Endpoint, known: Known, run: Run) -> Path:
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


def target_of(ctx: Context, options: Options) -> Target:
    """Find out what is to be judged. Raises UsageError, NotFound, and what the loader raises."""
    if bool(options.recipe) == bool(options.url):
        raise UsageError(
            "say what to judge: either --recipe or --url",
            hint="--recipe NAME for a server that Bakehouse runs, --url http://HOST:PORT for any",
        )
    if options.recipe:
        if options.model or options.api_key_env:
            raise UsageError("--model and --api-key-env belong to --url")
        return _ours(ctx, options)
    ours = {"--set": options.set_, "--accept-golden": options.accept_golden,
            "--instance": options.instance}  # fmt: skip
    if flag := next((flag for flag, given in ours.items() if given), None):
        raise UsageError(f"{flag} belongs to --recipe")
    headers = _key_header(ctx, options.api_key_env)
    endpoint = Endpoint(_base_url(options.url), options.model or None, headers)
    secrets = (options.api_key_env,) if options.api_key_env else ()
    return Target(endpoint, Probe(), None, secrets)


def _ours(ctx: Context, options: Options) -> Target:
    """Find the running server of a recipe. Raises NotHealthy where it does not run."""
    loaded = load(find(options.recipe, ctx.recipes), options.set_)
    recipe = loaded.recipe
    name = server_name(recipe.name, options.instance)
    folder = ctx.places.servers / name
    seen = look(folder)
    state = seen.state
    says = state.ended.says if state and state.ended else "it never ran"
    how = f"it is {seen.word}" if seen.alive else says
    if not seen.alive or state is None or state.server is None or not state.port:
        raise NotHealthy(
            f"no server of '{name}' answers: {how}",
            where=str(folder),
            hint=f"invoke serve --recipe {options.recipe}{_instance_flag(options)} starts it",
        )
    key = kept_key(folder)
    server = running(folder, state, recipe.engine, key)
    context = recipe.serve.context
    endpoint = Endpoint(
        server.url, recipe.name, server.headers, recipe.engine,
        context // recipe.serve.slots if context else None,
    )  # fmt: skip
    lock = read_lock(lock_path(loaded.path))
    known = known_of(recipe, lock, loaded.folder, state.plan) if lock else None
    probe = recipe.asked
    if options.accept_golden:
        if known is None:
            raise LockError(
                f"'{recipe.name}' has no lock, and golden values belong to locked weights",
                where=str(lock_path(loaded.path)), hint=f"invoke lock --recipe {options.recipe}",
            )  # fmt: skip
        probe = _without_golden(probe)
    return Target(endpoint, probe, recipe.name, recipe.secrets, server, known)


def _instance_flag(options: Options) -> str:
    return f" --instance {options.instance}" if options.instance else ""


def _without_golden(probe: Probe) -> Probe:
    """Leave out what needs golden values: they are what is about to be made."""
    suites = tuple(s for s in probe.suites or () if s != "reference")
    return probe.model_copy(update={"suites": suites or ("facts",)})


def _base_url(url: str) -> str:
    """Take a URL with or without `/v1`. Raises UsageError."""
    try:
        parts = urlsplit(url)
        good = (
            url.isprintable()
            and " " not in url
            and parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port or 1) > 0
        )
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"'{url}' is not the URL of a server",
            where="--url",
            hint="write scheme, host and port, as in http://127.0.0.1:8000",
        )
    if parts.username or parts.password:
        raise UsageError(
            "a URL with a user or a password ends up in logs",
            where="--url",
            hint="put the key into an environment variable and name it with --api-key-env",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key_header(ctx: Context, name: str) -> dict[str, str]:
    """Read the API key from the environment. Raises UsageError where it is not set."""
    if not name:
        return {}
    key = ctx.environment.get(name, "").strip()
    if not key:
        raise UsageError(
            f"the environment variable {name} is not set",
            where="--api-key-env",
            hint="give the name of the variable that holds the key, not the key itself",
        )
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the key in {name} holds characters that no header can carry")
    return {"Authorization": f"Bearer {key}"}


def identify_any(ctx: Context, endpoint: Endpoint, run: Run) -> Endpoint:
    """Ask which models there are, and judge whether the one that is wanted is among them.

    An engine may answer for a model that it does not have (llama-server does), so the answers alone
    would not tell. Raises NotHealthy where nobody answers.
    """
    where = f"GET {endpoint.url}/v1/models"
    try:
        told = served(ctx.http, endpoint)
    except Unreachable as error:
        hint = "is the server up, and is this its port?"
        if "401" in error.why or "403" in error.why:
            hint = "it wants an API key: name the variable that holds it with --api-key-env"
        raise NotHealthy(
            f"the server does not say which models it serves: {error.why}", where=where, hint=hint
        ) from error
    models = told.models
    wanted = endpoint.model or (models[0] if models else "")
    run.check(
        check(
            "probe.model",
            f"serves {endpoint.model}" if endpoint.model else "serves a model",
            ", ".join(models)[:300] or None,
            where,
            ok=wanted in models if models else None,
        )
    )
    if wanted not in models:
        raise NotHealthy(
            f"the server does not serve '{wanted}'" if wanted else "the server lists no model",
            where=where,
            hint=f"it serves {', '.join(models)[:300]}" if models else "is it still loading?",
        )
    return replace(endpoint, model=wanted, engine=told.engine)
