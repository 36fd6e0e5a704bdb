"""A green `/health` over counters that stand still while requests run is a deadlock."""

from __future__ import annotations

from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.engines.counters import Counters, read_counters
from bakehouse.ports.http import Unreachable
from bakehouse.probe.types import Endpoint

POLL_S = 2.0
ASK_S = 10.0


def counters(ctx: Context, endpoint: Endpoint) -> Counters | None:
    """Ask an engine for its counters; None where it has none, or does not answer."""
    url = endpoint.url.rstrip("/") + "/metrics"
    try:
        reply = ctx.http.ask("GET", url, headers=endpoint.headers, timeout=ASK_S)
    except Unreachable:
        return None
    return read_counters(reply.text) if reply.status == 200 else None


def progress(ctx: Context, endpoint: Endpoint, patience: float) -> Check | None:
    """Judge whether what runs moves, within `patience` seconds; None where nothing can be judged.

    One pass of a long prompt counts nothing until it ends: patience has to be longer than that.
    """
    first = counters(ctx, endpoint)
    if first is None:
        return None
    deadline = ctx.clock.monotonic() + patience
    now: Counters | None = first
    while now is None or now.busy:
        if now is not None and now.moved(first):
            return _check(f"{_work(now)}, and the counters move", ok=True)
        if ctx.clock.monotonic() >= deadline:
            return stalled(first, now, patience)
        ctx.clock.sleep(POLL_S)
        now = counters(ctx, endpoint)
    return _check("nothing runs", ok=True)


def stalled(before: Counters, now: Counters | None, seconds: float) -> Check:
    """Judge two readings, the second of which may not have come."""
    if now is None:
        return _check(f"/metrics has not answered for {seconds:.0f} s", ok=None)
    moved = now.moved(before)
    if moved is None:
        return _check(f"{_work(now)}; no counter of tokens", ok=None)
    what = "the counters move" if moved else f"no token in {seconds:.0f} s: a deadlock"
    return _check(f"{_work(now)}, and {what}", ok=moved)


def _work(now: Counters) -> str:
    return f"{now.running or 0:.0f} requests run, {now.waiting or 0:.0f} wait"


def _check(seen: str, *, ok: bool | None) -> Check:
    return check("watch.progress", "token counters move while requests run", seen, "GET /metrics",
                 ok=ok)  # fmt: skip
