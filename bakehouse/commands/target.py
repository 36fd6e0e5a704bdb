"""Which server `probe` and `watch` check: ours, or any that speaks the OpenAI API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from bakehouse import flags
from bakehouse.checks import check
from bakehouse.commands.servers import server_name
from bakehouse.context import Context
from bakehouse.errors import LockError, NotHealthy, UsageError
from bakehouse.ports.http import Unreachable, web_fault
from bakehouse.probe.ask import served
from bakehouse.probe.golden import known_of
from bakehouse.probe.types import Endpoint, Known
from bakehouse.recipe.gate import Probe
from bakehouse.recipe.load import find, load
from bakehouse.records.store import Run
from bakehouse.redact import clean, without_credentials
from bakehouse.resolve import lock_path, read_lock
from bakehouse.serve.control import engine_error, look
from bakehouse.serve.launch import kept_key
from bakehouse.serve.proof import ServerHandle

Which = flags.Probe | flags.Watch


@dataclass(frozen=True)
class Target:
    """The server to check, and the questions to ask it."""

    endpoint: Endpoint
    probe: Probe
    recipe: str | None
    secrets: tuple[str, ...] = ()
    """Names of environment variables whose values are hidden."""
    server: ServerHandle | None = None
    """If it is ours: the process that has to answer."""
    known: Known | None = None
    """If it is ours and locked: the model that it serves."""


def target_of(ctx: Context, which: Which, *, golden: bool = False) -> Target:
    """Find the server to check; `golden` if its golden values are to be recorded.

    Raises UsageError, NotFound, NotHealthy, LockError, and what the loader raises.
    """
    if bool(which.recipe) == bool(which.url):
        raise UsageError(
            "give either --recipe or --url",
            hint="--recipe NAME for a server that Bakehouse runs, --url http://HOST:PORT for any",
        )
    if which.recipe:
        if which.model or which.api_key_env:
            raise UsageError("--model and --api-key-env require --url")
        return _ours(ctx, which, golden=golden)
    ours = {"--set": which.set_, "--accept-golden": golden,
            "--instance": which.instance}  # fmt: skip
    if flag := next((flag for flag, given in ours.items() if given), None):
        raise UsageError(f"{flag} requires --recipe")
    headers = _key_header(ctx, which.api_key_env)
    endpoint = Endpoint(_base_url(which.url), which.model or None, headers)
    secrets = (which.api_key_env,) if which.api_key_env else ()
    return Target(endpoint, Probe(), None, secrets)


def _ours(ctx: Context, which: Which, *, golden: bool) -> Target:
    """Find the running server of a recipe. Raises NotHealthy if it does not run."""
    loaded = load(find(which.recipe, ctx.recipes), which.set_)
    recipe = loaded.recipe
    name = server_name(recipe.name, which.instance)
    folder = ctx.places.servers / name
    seen = look(folder)
    state = seen.state
    if seen.error:
        raise engine_error(seen, seen.error, "no question was asked")
    if seen.word == "paused":
        raise NotHealthy(
            f"'{name}' is paused: {seen.trouble}", where=str(folder), id="paused",
            hint=f"resume it, or stop it: invoke stop --recipe {name}",
        )  # fmt: skip
    says = state.ended.says if state and state.ended else "it never ran"
    how = f"it is {seen.word}" if seen.alive else says
    instance = f" --instance {which.instance}" if which.instance else ""
    if not seen.alive or state is None or state.server is None or not state.port:
        raise NotHealthy(
            f"no server of '{name}' is running: {how}",
            where=str(folder),
            hint=f"start it with: invoke serve --recipe {which.recipe}{instance}",
        )
    key = kept_key(folder)
    server = ServerHandle.of(folder, state, recipe.engine, key)
    context = recipe.serve.context
    endpoint = Endpoint(
        server.url, recipe.name, server.headers, recipe.engine,
        context // recipe.serve.slots if context else None,
    )  # fmt: skip
    lock = read_lock(lock_path(loaded.path))
    known = known_of(recipe, lock, loaded.folder, state.plan) if lock else None
    probe = recipe.asked
    if golden:
        if known is None:
            raise LockError(
                f"'{recipe.name}' has no lock, but golden values are for locked weights",
                where=str(lock_path(loaded.path)), hint=f"invoke lock --recipe {which.recipe}",
            )  # fmt: skip
        probe = _without_golden(probe)
    return Target(endpoint, probe, recipe.name, recipe.secrets, server, known)


def _without_golden(probe: Probe) -> Probe:
    """Leave out the suite that compares with golden values: they are about to be recorded."""
    suites = tuple(s for s in probe.suites or () if s != "reference")
    return probe.model_copy(update={"suites": suites or ("facts",)})


def _base_url(url: str) -> str:
    """Return a URL without `/v1`. Raises UsageError."""
    if fault := web_fault(url):
        hint = "write scheme, host and port, as in http://127.0.0.1:8000"
        if "@" in urlsplit(url).netloc:
            hint = "put the key into an environment variable and name it with --api-key-env"
        shown = clean(without_credentials(url), one_line=True)
        raise UsageError(f"--url '{shown}' is not the URL of a server: {fault}", hint=hint)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key_header(ctx: Context, name: str) -> dict[str, str]:
    """Read the API key from the environment. Raises UsageError if it is not set."""
    if not name:
        return {}
    key = ctx.environment.get(name, "").strip()
    if not key:
        raise UsageError(
            f"the environment variable {name} is not set",
            where="--api-key-env",
            hint="give the name of the variable with the key, not the key itself",
        )
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"the key in {name} has characters that an HTTP header cannot contain")
    return {"Authorization": f"Bearer {key}"}


def identify_any(ctx: Context, endpoint: Endpoint, run: Run) -> Endpoint:
    """Check that an unknown server serves the requested model, or take its first one.

    Some engines answer for any model name (llama-server does), so answers alone are no evidence.
    Raises NotHealthy if nobody answers, or it does not serve the model.
    """
    where = f"GET {endpoint.url}/v1/models"
    try:
        told = served(ctx.http, endpoint)
    except Unreachable as error:
        hint = "is the server up, and is this its port?"
        if "401" in error.why or "403" in error.why:
            hint = "it requires an API key: name its environment variable with --api-key-env"
        raise NotHealthy(
            f"cannot list the server's models: {error.why}", where=where, hint=hint
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
