"""`status`: which servers run, and how others came to an end."""

from __future__ import annotations

from dataclasses import dataclass

from bakehouse.commands.servers import as_data, folder_of, line
from bakehouse.context import Context
from bakehouse.outcome import Outcome
from bakehouse.serve.containers import recent_timeout
from bakehouse.serve.control import engine_error, folders, look


@dataclass(frozen=True)
class Options:
    """What the task was given."""

    recipe: str = ""


def run(ctx: Context, options: Options) -> Outcome:
    """Look at one server or at all; what is gone is written down as gone.

    A server whose Docker Engine does not answer is unclear, and an error beside the result.
    """
    wanted = (
        (folder_of(ctx, options.recipe),) if options.recipe else folders(ctx.places, boxed=True)
    )
    seen = [look(folder) for folder in wanted]
    text = "\n".join(line(one) for one in seen) or "no server runs, and none has run yet"
    unseen = recent_timeout()
    if unseen:
        text += f"\nnot looked for, containers that left no folder: {unseen.what}"
    unclear = next(((one, one.error) for one in seen if one.error), None)
    result = {
        "servers": [as_data(one) for one in seen],
        "unseen": unseen.what if unseen else None,
    }
    error = engine_error(*unclear, "see what is said of each server") if unclear else None
    return Outcome(result=result, text=text, error=error)
