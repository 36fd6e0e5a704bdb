"""The task `stop`: end a server, its supervisor and all their children."""

from __future__ import annotations

from bakehouse import flags
from bakehouse.commands.servers import folder_of
from bakehouse.context import Context, Outcome
from bakehouse.errors import HostError, UsageError
from bakehouse.server.containers import MARKED, clear_questions
from bakehouse.server.status import folders, get_status, stop

Options = flags.Stop


def run(ctx: Context, options: Options) -> Outcome:
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
