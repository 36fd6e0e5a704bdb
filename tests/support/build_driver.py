"""Builds the small project in a process of its own, so that a test can kill it.

Called as `python -m tests.support.build_driver HOME SLOW`; prints what it says, then one line of
JSON. SLOW is `configure` or `compile`: that step then sleeps for as long as HOME/slow says.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import FrameType

from bakehouse.build import builder
from bakehouse.context import Context
from bakehouse.errors import BakehouseError
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.runs.store import Run
from tests.support.small_engine import FILES, small_lock, small_plan, write_small

SLOW = {
    "configure": "execute_process(COMMAND sleep {seconds})\n",
    "compile": "add_custom_command(OUTPUT slow.txt COMMAND sleep {seconds} && touch slow.txt)\n"
    "add_custom_target(slow DEPENDS slow.txt)\nadd_dependencies(llama-server slow)\n",
    "nothing": "",
}


class Talking:
    """Progress that prints."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def bar(self, title: str, unit: str = "") -> Talking:
        print(title, flush=True)
        return self

    def __enter__(self) -> Talking:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        print(f"{done:g}/{total:g}", flush=True)


def main() -> int:
    home, slow = Path(sys.argv[1]), sys.argv[2]
    seconds = (home / "slow").read_text() if (home / "slow").exists() else "60"
    changes = {"CMakeLists.txt": FILES["CMakeLists.txt"] + SLOW[slow].format(seconds=seconds)}

    def write(_ctx: Context, _lock: Lock, target: Path) -> None:
        write_small(target, changes)

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    setattr(builder, "write_source", write)  # noqa: B010 - its argument names differ
    signal.signal(signal.SIGTERM, stop)
    ctx = Context(Places(home / "cache", home / "state"), home, progress=Talking())
    try:
        with Run.start(ctx, "build", "small") as run:
            done = builder.ensure(ctx, small_lock(), small_plan(ctx, jobs=2), run)
    except BakehouseError as error:
        print(json.dumps({"error": error.what}))
        return error.exit_code
    print(json.dumps({"reused": done.reused, "folder": done.folder, "content": done.content}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
