"""Which server `status`, `logs` and `stop` mean, and how it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, NotFound, UsageError
from bakehouse.redact import clean
from bakehouse.serve.control import ServerStatus, folders


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
    from bakehouse.recipe.load import find, load  # not needed for a known server

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
    from bakehouse.serve.proof import url_of  # imports more than a stopped server needs

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
