"""The task `status`: list servers and how stopped ones ended."""

from __future__ import annotations

from bakehouse import flags
from bakehouse.commands.servers import as_data, folder_of, line
from bakehouse.context import Context, Outcome
from bakehouse.server.containers import recent_timeout
from bakehouse.server.status import engine_error, folders, get_status

Options = flags.Status


def run(ctx: Context, options: Options) -> Outcome:
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
