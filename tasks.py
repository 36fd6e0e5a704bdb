"""The tasks of Bakehouse: build, serve and prove local LLM servers from pinned recipes.

Each task parses its flags, calls `bakehouse.cli.main` and leaves with its exit code. Nothing of
Bakehouse is imported before a task runs, so that `invoke --list` stays instant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from invoke.context import Context
from invoke.tasks import task

RECIPE = "a name in recipes/, or a path to a recipe"
SERVER = f"{RECIPE}; NAME@INSTANCE is what serve --instance started"
SET = "override one key, e.g. serve.context=65536 (YAML; may be repeated)"
LOCKED = "refuse to create or change the lock"
PATCHES = {
    "patch": "add a pinned patch for this run: its number, or OWNER/NAME#ID (may be repeated)",
    "no_patch": "leave one of the recipe's patches out of this run (may be repeated)",
    "allow": "how loosely --patch may fit: offset or fuzz (default: exactly)",
}
WHICH = {
    "recipe": f"{RECIPE}, whose server runs",
    "set_": SET,
    "instance": "which of several servers of this recipe, as serve --instance named it",
    "url": "any OpenAI-compatible server, e.g. http://127.0.0.1:8000",
    "model": "the model to ask for (default: the first that the server lists)",
    "api_key_env": "the environment variable that holds the API key",
}

Flags = Sequence[str] | None


def _task(**flags: str) -> Callable[[Callable[..., None]], Any]:
    """Make an Invoke task: long flags only, no positionals, help for every flag."""
    common = {
        "json": "print one JSON document on standard output",
        "debug": "log what happens; print tracebacks",
    }
    repeated = [name for name, text in flags.items() if "may be repeated" in text]
    options: dict[str, Any] = {"auto_shortflags": False, "positional": (), "iterable": repeated}
    made: Callable[[Callable[..., None]], Any] = task(help={**flags, **common}, **options)
    return made


def _main(name: str, given: dict[str, Any]) -> None:
    """Hand a task's own arguments on, as its `locals()` has them."""
    flags = {flag: value for flag, value in given.items() if flag not in ("_", "json", "debug")}
    try:
        from bakehouse.cli import leave, main
    except KeyboardInterrupt:
        raise SystemExit(130) from None

    recipes = Path(__file__).resolve().with_name("recipes")
    leave(main(name, flags, json=given["json"], debug=given["debug"], recipes=recipes))


@_task()
def recipes(_: Context, json: bool = False, debug: bool = False) -> None:
    """List the recipes that there are, and whether each is locked."""
    _main("recipes", locals())


@_task(recipe=RECIPE, set_=SET)
def show(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Print a recipe as it is after includes and overrides."""
    _main("show", locals())


@_task(recipe=f"{RECIPE}; without it, all of them", set_=SET)
def check(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Name every fault in a recipe, as file:line:column: message."""
    _main("check", locals())


@_task(recipe=RECIPE, set_=SET, update="move pins that are there, and print what moved")
def lock(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    update: bool = False,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Resolve a recipe to exact pins and write them beside it."""
    _main("lock", locals())


@_task(recipe=RECIPE, set_=SET, **PATCHES)
def plan(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    patch: Flags = None,
    no_patch: Flags = None,
    allow: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Print every step that build and serve would run; run none."""
    _main("plan", locals())


@_task(
    recipe=RECIPE,
    set_=SET,
    locked=LOCKED,
    rehash="read every weight file again, whatever is remembered of it",
)
def fetch(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    locked: bool = False,
    rehash: bool = False,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Fetch sources and weights, by hash, resuming what is there."""
    _main("fetch", locals())


@_task(
    recipe=RECIPE,
    set_=SET,
    locked=LOCKED,
    jobs="how many files to compile at once (default: by cores and free memory)",
    dry_run="print what would be run, and run nothing",
    **PATCHES,
)
def build(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    locked: bool = False,
    jobs: str | None = None,
    dry_run: bool = False,
    patch: Flags = None,
    no_patch: Flags = None,
    allow: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Build the engine from its pinned source, or reuse a build."""
    _main("build", locals())


@_task(
    recipe=RECIPE,
    set_=SET,
    locked=LOCKED,
    port="the port to listen on; 0 takes a free one",
    host="the address to listen on; beyond this machine only with an API key",
    dry_run="print what would be run, and run nothing",
    accept_memory_risk="why to start it although it does not fit; kept in the record",
    foreground="stay, and stop the server when interrupted",
    watch="stay, and judge it again and again: the time between, e.g. 10m",
    instance="a name for a second server of this recipe, beside the first",
    **PATCHES,
)
def serve(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    locked: bool = False,
    port: str | None = None,
    host: str | None = None,
    dry_run: bool = False,
    foreground: bool = False,
    accept_memory_risk: str | None = None,
    watch: str | None = None,
    instance: str | None = None,
    patch: Flags = None,
    no_patch: Flags = None,
    allow: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Build, fetch, start and prove a server; done when it is READY."""
    _main("serve", locals())


@_task(recipe=f"{SERVER}; without it, all servers")
def status(_: Context, recipe: str | None = None, json: bool = False, debug: bool = False) -> None:
    """Say which servers run, and how others came to an end."""
    _main("status", locals())


@_task(
    recipe=SERVER,
    lines="only so many of the last lines",
    follow="go on printing until the server ends or you interrupt",
)
def logs(
    _: Context,
    recipe: str | None = None,
    lines: str | None = None,
    follow: bool = False,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Print a server's log."""
    _main("logs", locals())


@_task(recipe=SERVER, all_="every server that runs")
def stop(
    _: Context,
    recipe: str | None = None,
    all_: bool = False,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Stop a server and all its children."""
    _main("stop", locals())


@_task(
    **WHICH,
    accept_golden="keep what it answers as golden values of its weights, if it proves itself",
)
def probe(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    instance: str | None = None,
    url: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    accept_golden: bool = False,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Judge a running server by questions with known answers."""
    _main("probe", locals())


@_task(
    **WHICH,
    every="time between two rounds, e.g. 90s or 1h (default: 10m)",
    count="how many rounds (default: until interrupted)",
    on_failure="restart, stop, or a command with its arguments (default: end with the failure)",
    **PATCHES,
)
def watch(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    instance: str | None = None,
    url: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    every: str | None = None,
    count: str | None = None,
    on_failure: str | None = None,
    patch: Flags = None,
    no_patch: Flags = None,
    allow: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Judge a running server again and again."""
    _main("watch", locals())


@_task(
    file="the log to read, plain or gzipped; - reads standard input",
    engine="llama.cpp, vllm, cmake, docker or git, where it is known",
    stage="such as configure, build, launch, load, ready or steady, where it is known",
)
def diagnose(
    _: Context,
    file: str | None = None,
    engine: str | None = None,
    stage: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Say what a build or server log means, first cause first."""
    _main("diagnose", locals())


@_task(
    recipe=RECIPE,
    set_=SET,
    hub="a repository on the Hugging Face Hub, OWNER/NAME, in place of a recipe",
    revision="its branch, tag or commit (default: main)",
    context="tokens that have to fit",
    host="a machine to plan for: gb10, h200, ..., unified:121GiB, gpu:24GiB, cpu:64GiB",
    kv_cache="type of the cache, such as f16 or q8_0",
    speculation="tokens a pass that speculation brings: 1 + accepted / drafts",
)
def fit(
    _: Context,
    recipe: str | None = None,
    set_: Flags = None,
    hub: str | None = None,
    revision: str | None = None,
    context: str | None = None,
    host: str | None = None,
    kv_cache: str | None = None,
    speculation: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Say which quantisations fit a machine, and with what context."""
    _main("fit", locals())


@_task(
    checkpoint="the folder of a safetensors checkpoint",
    out="a new folder for the shards",
    max_shard="the most that a shard may have, e.g. 4GB or 3.5GiB (default: 4GB)",
)
def reshard(
    _: Context,
    checkpoint: str | None = None,
    out: str | None = None,
    max_shard: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Rewrite a checkpoint into small shards, and verify them."""
    _main("reshard", locals())


@_task(recipe=f"{RECIPE} (may be repeated)", **PATCHES)
def nightly(
    _: Context,
    recipe: Flags = None,
    patch: Flags = None,
    no_patch: Flags = None,
    allow: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Check, build, serve, prove and stop each recipe; sum it up."""
    _main("nightly", locals())


@_task(
    pr="a pull request's number",
    url="the address of a diff, a commit or a pull request",
    file="a diff on this machine",
    commit="a commit's 40 hex digits",
    repo="whose it is, OWNER/NAME (default: the engine's upstream)",
    recipe=f"{RECIPE}, to try it on; without it, all recipes of that engine",
    set_=SET,
    update="accept that it is another one than was pinned",
    vendor="keep the diff itself beside its manifest",
    allow="how loosely it may fit: offset or fuzz (default: exactly)",
    dry_run="fetch, compare and try; write nothing",
    judge="build and serve the recipe with it and without it, compare, and write down the verdict",
    accept_memory_risk="why --judge serves although it does not fit; kept in the records",
)
def patch(
    _: Context,
    pr: str | None = None,
    url: str | None = None,
    file: str | None = None,
    commit: str | None = None,
    repo: str | None = None,
    recipe: str | None = None,
    set_: Flags = None,
    update: bool = False,
    vendor: bool = False,
    allow: str | None = None,
    dry_run: bool = False,
    judge: bool = False,
    accept_memory_risk: str | None = None,
    json: bool = False,
    debug: bool = False,
) -> None:
    """Fetch and pin a patch, and try it on the recipes' sources."""
    _main("patch", locals())


@_task()
def doctor(_: Context, json: bool = False, debug: bool = False) -> None:
    """Say what this machine has and lacks, and how to mend it."""
    _main("doctor", locals())
