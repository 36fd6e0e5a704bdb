"""The tasks `status`, `stop` and `logs`, and how commands find a server."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, NotHealthy, UsageError
from bakehouse.models import check
from bakehouse.probe.client import served
from bakehouse.probe.golden import known_of
from bakehouse.probe.models import Endpoint, ServedModel
from bakehouse.recipe.loader import find, load
from bakehouse.recipe.models import Probe
from bakehouse.redact import Redactor, clean, without_credentials
from bakehouse.resolver import lock_path, read_lock
from bakehouse.runs.store import Run
from bakehouse.server.containers import MARKED, clear_questions, recent_timeout
from bakehouse.server.launcher import kept_key
from bakehouse.server.status import ServerStatus, engine_error, folders, get_status, stop
from bakehouse.server.supervisor import Tail
from bakehouse.server.verification import ServerHandle, url_of
from bakehouse.system.http import Unreachable, web_fault

TICK_S = 0.2
BLOCK = 1 << 16
JSON_LINES = 1000
"""Maximum lines in a JSON document unless `--lines` is given."""


def server_name(recipe: str, instance: str) -> str:
    """Return the name of a server's folder; recipe names contain no `@`. Raises UsageError."""
    if instance and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,31}", instance):
        raise UsageError(
            f"invalid instance name '{instance}'",
            hint="use up to 32 lower-case letters, digits, '.', '_' and '-'",
        )
    return f"{recipe}@{instance}" if instance else recipe


def folder_of(ctx: Context, recipe: str) -> Path:
    """Return the folder of a recipe's server, which need not exist.

    A server that left a trace is found by its name, even if its recipe is gone or invalid. Raises
    NotFound if neither server nor recipe has the name, UsageError without a name.
    """
    if not recipe:
        raise UsageError("--recipe is required", hint="--recipe NAME, or a path to a recipe")
    plain = "/" not in recipe and recipe not in {".", ".."}
    mine = ctx.places.servers / recipe
    if plain and (mine in folders(ctx.places) or mine in folders(ctx.places, boxed=True)):
        return mine
    path = find(recipe, ctx.recipes)
    try:
        return ctx.places.servers / load(path).recipe.name
    except BakehouseError as error:
        if (ctx.places.servers / path.stem).is_dir():
            return ctx.places.servers / path.stem
        raise NotFound(
            f"no server of {recipe}, and its recipe is invalid: {error.what}",
            where=error.where, hint=f"invoke check --recipe {recipe}",
        ) from error  # fmt: skip


def as_data(seen: ServerStatus) -> dict[str, Any]:
    """Plain data of one server, for JSON."""
    state = seen.state
    data: dict[str, Any] = {
        "name": seen.name, "status": seen.word, "folder": str(seen.folder),
        "log": str(seen.folder / "server.log"), "pids": [p.pid for p in seen.processes],
        "trouble": seen.trouble,
        "containers": [{"name": c.name, "id": c.id, "state": c.state} for c in seen.containers],
    }  # fmt: skip
    if state is None:
        return data
    return data | {
        "pid": state.server.pid if state.server else None,
        "url": url_of(state.host, state.port) if state.port else None,
        "started": state.started, "proven": state.proven, "record": state.record,
        "plan": state.plan, "argv": list(state.argv), "findings": list(state.findings),
        "alarms": list(state.alarms), "ended": state.ended and vars(state.ended),
    }  # fmt: skip


def line(seen: ServerStatus) -> str:
    """One server in one line, for people."""
    data = as_data(seen)
    stop = f"invoke stop --recipe {seen.name}"
    if seen.word in {"running", "starting"}:
        rest = f"{data.get('url') or 'not listening yet'}  process {data.get('pid')}"
        rest += f"  since {data.get('started')}"
    elif seen.word == "paused":
        rest = f"{seen.trouble}; stop it with: {stop}"
    elif seen.error:
        rest = seen.trouble or ""
    elif seen.containers:
        rest = f"{seen.trouble}, without its supervisor; clean up with: {stop}"
    elif seen.word == "orphaned":
        rest = f"its supervisor died; clean up with: {stop}"
    elif seen.word == "unclear":
        rest = f"it runs, but {seen.trouble}; stop it with: {stop}"
    else:
        ended = data.get("ended") or {}
        rest = f"{ended.get('says') or seen.trouble or 'never ran'}  {ended.get('at') or ''}"
    severe = data.get("findings") or []
    more = f"\n    {severe[0]['severity']} in its log: {severe[0]['line'][:200]}" if severe else ""
    if alarms := data.get("alarms"):
        more += f"\n    memory guard, {alarms[-1]['at']}: {alarms[-1]['reason']}"
    return clean(f"{seen.name:<20} {seen.word:<9} {rest.rstrip()}{more}")


def run_status(ctx: Context, options: flags.Status) -> Outcome:
    """Return the status of one server or all; record the end of those that are gone.

    A server whose Docker Engine does not answer is unclear, and the outcome has an error.
    """
    one = (folder_of(ctx, options.recipe),) if options.recipe else ()
    seen = [get_status(folder) for folder in one or folders(ctx.places, boxed=True)]
    text = "\n".join(map(line, seen)) or "no server runs, and none has run yet"
    timeout = recent_timeout()
    if timeout:
        text += f"\ncontainers without a server folder were not searched: {timeout.what}"
    result = {
        "servers": [as_data(server) for server in seen],
        "unseen": timeout.what if timeout else None,
    }
    unclear = next(((server, server.error) for server in seen if server.error), None)
    error = engine_error(*unclear, "see the status of each server") if unclear else None
    return Outcome(result=result, text=text, error=error)


def run_stop(ctx: Context, options: flags.Stop) -> Outcome:
    """Stop one server or all; it is no error if nothing runs.

    Raises HostError if something of a server still runs afterwards.
    """
    if bool(options.recipe) == options.all_:
        raise UsageError("give either --recipe or --all", hint="--recipe NAME, or --all")
    wanted = folders(ctx.places, boxed=True) if options.all_ else (folder_of(ctx, options.recipe),)
    done, failed = [], []
    for folder in wanted:
        try:
            done.append(stop(folder))
        except HostError as error:  # stop the others first
            failed.append(error)
    if failed:
        raise failed[0]
    if options.all_ or any((folder / MARKED).exists() for folder in wanted):
        clear_questions()
    if left := [p for folder in wanted for p in get_status(folder).processes]:
        raise HostError(
            "still running: " + ", ".join(f"process {p.pid}" for p in left),
            hint="a process that hangs in the kernel ends when its driver releases it",
        )
    if boxes := [one.name for folder in wanted for one in get_status(folder).containers]:
        raise HostError(
            f"containers could not be removed: {', '.join(boxes)}",
            hint="docker rm --force NAME; then read the engine's log",
        )
    shown = [one for one in done if one.ran] if options.all_ else done
    result = {"servers": [vars(one) for one in done]}
    text = "\n".join(f"{one.name}: {one.says}" for one in shown) or "no server runs"
    return Outcome(result=result, text=text)


def run_logs(ctx: Context, options: flags.Logs) -> Outcome:
    """Return a server's log. Raises NotFound if it has none, UsageError for a bad number."""
    if options.lines and not (options.lines.isascii() and options.lines.isdigit()):
        raise UsageError(f"--lines takes a whole number, not '{options.lines}'")
    wanted = int(options.lines) if options.lines else None
    folder = folder_of(ctx, options.recipe)
    log = folder / "server.log"
    if not log.exists():
        raise NotFound(
            f"{folder.name} has no log yet", where=str(log),
            hint=f"start it with: invoke serve --recipe {folder.name}",
        )  # fmt: skip
    key = kept_key(folder)
    hide = Redactor((key,) if key else ())
    last = last_lines(log, JSON_LINES if wanted is None else wanted)[0]
    result = {"log": str(log), "lines": [hide.text(clean(text)) for text in last]}
    return Outcome(result=result, lines=_log_lines(ctx, folder, wanted, options.follow, hide))


def last_lines(log: Path, count: int) -> tuple[list[str], Tail]:
    """Return the last `count` whole lines, and a tail that continues after them.

    Reads from the end, so that a log of gigabytes costs no more than a small one.
    """
    size = log.stat().st_size
    span = BLOCK
    while True:
        start = max(size - span, 0)
        tail = Tail(log, start)
        kept: deque[str] = deque(maxlen=count)
        seen = 0
        while new := tail.lines():
            kept.extend(new)
            seen += len(new)
        if seen > count or not start:
            return list(kept), tail
        span *= 4


def _log_lines(
    ctx: Context, folder: Path, count: int | None, follow: bool, hide: Redactor
) -> Iterator[str]:
    """Yield the lines, and with `follow` new ones until the server ends."""
    tail = Tail(folder / "server.log")
    if count is not None:
        last, tail = last_lines(folder / "server.log", count)
        yield from map(hide.text, last)
    while True:
        alive = follow and bool(get_status(folder, inside=False).processes)
        while new := tail.lines():
            yield from map(hide.text, new)
        if not alive:
            break
        ctx.clock.sleep(TICK_S)
    if tail.rest:
        yield hide.text(tail.rest.decode(errors="replace"))


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
    known: ServedModel | None = None
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
    seen = get_status(folder)
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
    probe = recipe.effective_probe
    if golden:
        if known is None:
            raise LockError(
                f"'{recipe.name}' has no lock, but golden values are for locked weights",
                where=str(lock_path(loaded.path)), hint=f"invoke lock --recipe {which.recipe}",
            )  # fmt: skip
        # Without the suite that compares with the values which are about to be recorded.
        suites = tuple(s for s in probe.suites or () if s != "reference")
        probe = probe.model_copy(update={"suites": suites or ("facts",)})
    return Target(endpoint, probe, recipe.name, recipe.secrets, server, known)


def _base_url(url: str) -> str:
    """Return a URL without `/v1`. Raises UsageError."""
    if fault := web_fault(url):
        hint = "write scheme, host and port, as in http://127.0.0.1:8000"
        if "password" in fault:
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
