"""Takes a recipe as far as acceptance, and prints the checks: `… HOME RECIPE [online]`.

Run by a test in a network namespace of its own, where nothing can be reached; with `online` the
source is fetched first, and nothing is configured.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

from bakehouse.build import builder
from bakehouse.build.builder import moved, work_folder, write_source
from bakehouse.context import Context
from bakehouse.lock import Lock
from bakehouse.patches.source_tree import ensure_tree
from bakehouse.paths import Places
from bakehouse.plan.planner import inspect_host, plan_engine
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.loader import load
from bakehouse.resolver import lock_path, read_lock
from bakehouse.runs.store import Run


def reachable() -> bool:
    """Whether anything can be reached from here (192.0.2.1 is nobody's, by RFC 5737)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(("192.0.2.1", 9)) == 0


def main() -> None:
    home, recipe = Path(sys.argv[1]), Path(sys.argv[2])
    ctx = Context(Places(home / "cache", home / "state"), recipe.parent)
    loaded = load(recipe)
    lock = read_lock(lock_path(recipe))
    assert isinstance(lock, Lock)
    if sys.argv[3:] == ["online"]:
        ensure_tree(ctx, lock)
        return
    plan = plan_engine(loaded, lock, inspect_host(ctx, loaded.recipe, lock), ctx.places)
    assert isinstance(plan, BuildPlan)
    with Run.start(ctx, "build", loaded.recipe.name) as run, work_folder(ctx, plan) as work:
        here = moved(plan, work)
        write_source(ctx, lock, work / "src")
        configured = builder.configure(ctx, lock, here, run)
        checks = builder.accept(run, configured, here.expected)
    print(
        json.dumps(
            {
                "network": reachable(),
                "checks": {c.id: c.verdict.value for c in checks},
                "log": list(configured.log),
            }
        )
    )


if __name__ == "__main__":
    main()
