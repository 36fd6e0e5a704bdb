"""Invoke's tasks and the command `bakehouse`, both made from `bakehouse.flags`."""

from __future__ import annotations

from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from invoke.collection import Collection
from invoke.config import Config
from invoke.context import Context
from invoke.program import Program
from invoke.tasks import Task

from bakehouse import __version__
from bakehouse.flags import TASKS, flags_of


def make_tasks(recipes: Path | None = None) -> Collection:
    """Return all tasks; `recipes` is a checkout's folder of recipes, if they run in one."""
    return Collection(*(_task(name, recipes) for name in TASKS))


def _task(name: str, recipes: Path | None) -> Task[Any]:
    """Make an Invoke task: long flags only, no positional arguments, help for every flag.

    Every value is text, since Invoke answers a malformed integer with a traceback.
    """
    flags = flags_of(name)

    def body(_: Context, **given: Any) -> None:
        try:
            from bakehouse.cli import leave, main
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        json, debug = given.pop("json"), given.pop("debug")
        folder = given.pop("recipes", None)
        leave(main(name, given, json=json, debug=debug, recipes=folder, checkout=recipes))

    setattr(body, "__signature__", Signature([  # noqa: B010 - mypy knows no such attribute
        Parameter("_", Parameter.POSITIONAL_OR_KEYWORD),
        *(Parameter(f.name, Parameter.KEYWORD_ONLY,
                    default=False if f.kind == "switch" else None) for f in flags),
    ]))  # fmt: skip
    body.__name__, body.__doc__ = name, TASKS[name].__doc__
    return Task(
        body, help={f.name: f.help for f in flags}, auto_shortflags=False, positional=(),
        iterable=[f.name for f in flags if f.kind == "list"],
    )  # fmt: skip


class _Config(Config):
    """Settings of our own: `~/.invoke.yaml` belongs to other programs."""

    prefix = "bakehouse"
    env_prefix = "BAKEHOUSE_INVOKE"  # type: ignore[assignment]  # declared as None


def main() -> None:
    """Run the command `bakehouse`."""
    Program(
        version=__version__, namespace=make_tasks(), name="Bakehouse", binary="bakehouse",
        binary_names=["bakehouse"], config_class=_Config,
    ).run()  # fmt: skip
