"""What `status`, `logs` and `stop` share: which server is meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, NotFound, UsageError
from bakehouse.redact import clean
from bakehouse.serve.control import ServerStatus, folders


def server_name(recipe: str, instance: str) -> str:
    """Name a server's folder; no recipe's name holds an `@`. Raises UsageError."""
    if instance and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,31}", instance):
        raise UsageError(
            f"'{instance}' cannot be an instance's name",
            hint="lower-case letters, digits, '.', '_' and '-', at most 32 of them",
        )
    return f"{recipe}@{instance}" if instance else recipe


def folder_of(ctx: Context, recipe: str) -> Path:
    """Give the folder of the server that is meant, which need not exist.

    A server that left a trace is found by its name alone, also when its recipe is gone or no longer
    valid. Raises NotFound where neither server nor recipe has the name, UsageError for no name.
    """
    if not recipe:
        raise UsageError("no recipe is named", hint="--recipe NAME, or a path to a recipe")
    plain = "/" not in recipe and recipe not in {".", ".."}
    mine = ctx.places.servers / recipe
    if plain and (mine in folders(ctx.places) or mine in folders(ctx.places, boxed=True)):
        return ctx.places.servers / recipe
    from bakehouse.recipe.load import find, load  # not needed for a server that is known

    path = find(recipe, ctx.recipes)
    try:
        return ctx.places.servers / load(path).recipe.name
    except BakehouseError as error:
        if (ctx.places.servers / path.stem).is_dir():
            return ctx.places.servers / path.stem
        raise NotFound(
            f"there is no server of {recipe}, and the recipe cannot be read: {error.what}",
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
    from bakehouse.serve.proof import url_of  # brings in more than a stopped server needs

    ended = state.ended
    return data | {
        "pid": state.server.pid if state.server else None,
        "url": url_of(state.host, state.port) if state.port else None,
        "started": state.started,
        "proven": state.proven,
        "record": state.record,
        "plan": state.plan,
        "argv": list(state.argv),
        "findings": list(state.findings),
        "alarms": list(state.alarms),
        "ended": ended
        and {"at": ended.at, "why": ended.why, "code": ended.code, "says": ended.says},
    }


def line(seen: ServerStatus) -> str:
    """One server in one line, for people."""
    data = as_data(seen)
    if seen.word in {"running", "starting"}:
        rest = f"{data.get('url') or 'not listening yet'}  process {data.get('pid')}"
        rest += f"  since {data.get('started')}"
    elif seen.word == "paused":
        rest = f"{seen.trouble}; invoke stop --recipe {seen.name} ends it"
    elif seen.error:
        rest = seen.trouble or ""
    elif seen.containers:
        rest = f"{seen.trouble}, without its keeper; invoke stop --recipe {seen.name} removes it"
    elif seen.word == "orphaned":
        rest = f"its keeper is gone; invoke stop --recipe {seen.name} ends what is left of it"
    elif seen.word == "unclear":
        rest = f"it runs, and {seen.trouble}; invoke stop --recipe {seen.name} ends it"
    else:
        ended = data.get("ended") or {}
        rest = f"{ended.get('says') or seen.trouble or 'never ran'}  {ended.get('at') or ''}"
    grave = data.get("findings") or []
    warning = f"\n    {grave[0]['severity']} in its log: {grave[0]['line'][:200]}" if grave else ""
    if alarms := data.get("alarms"):
        warning += f"\n    memory guard, {alarms[-1]['at']}: {alarms[-1]['reason']}"
    return clean(f"{seen.name:<20} {seen.word:<9} {rest.rstrip()}{warning}")
