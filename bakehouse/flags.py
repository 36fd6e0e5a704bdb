"""Every task and its flags, declared once: name, type, default and help.

Invoke's tasks, their `--help` and the options that a command's `run` gets are all made from these
classes. This module is all of Bakehouse that `--list` imports, so it holds plain data and imports
nothing but `typing` (hence no dataclasses, and no `from __future__ import annotations`).
"""

from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform

RECIPE = "a name in the recipes folder, or a path to a recipe"
SERVER = f"{RECIPE}; NAME@INSTANCE for a server started with --instance"

Recipe = Annotated[str, RECIPE]
Set = Annotated[tuple[str, ...], "override one key, e.g. serve.context=65536 (YAML; repeatable)"]
Locked = Annotated[bool, "refuse to create or change the lock"]
DryRun = Annotated[bool, "print what would run, without running it"]
AddPatch = Annotated[
    tuple[str, ...], "add a pinned patch for this run: its number, or OWNER/NAME#ID (repeatable)"
]
NoPatch = Annotated[tuple[str, ...], "leave out one of the recipe's patches (repeatable)"]
Allow = Annotated[str, "how loosely --patch may apply: offset or fuzz (default: exactly)"]
OurServer = Annotated[str, f"{RECIPE}; its server has to be running"]
Instance = Annotated[str, "which server of this recipe, as named by serve --instance"]
Url = Annotated[str, "any OpenAI-compatible server, e.g. http://127.0.0.1:8000"]
Model = Annotated[str, "model to query (default: the first that the server lists)"]
ApiKeyEnv = Annotated[str, "environment variable that holds the API key"]


class Flag(NamedTuple):
    """One flag of a task."""

    name: str
    """As in the options: `dry_run` for `--dry-run`, `set_` for `--set`."""
    kind: str
    """`text`, `switch` or `list` (repeatable)."""
    help: str
    required: bool = False

    @property
    def option(self) -> str:
        """As typed on the command line."""
        return "--" + self.name.strip("_").replace("_", "-")


COMMON = (
    Flag("json", "switch", "print one JSON document on standard output"),
    Flag("debug", "switch", "log every child and request; print tracebacks"),
)
RECIPES = Flag(
    "recipes", "text", "recipes folder (default: BAKEHOUSE_RECIPES, ./recipes, then your own)"
)


@dataclass_transform(frozen_default=True)
class Options:
    """Base of a task's options: annotations of a subclass are its flags."""

    flags: ClassVar[dict[str, Flag]] = {}
    module: ClassVar[str]
    function: ClassVar[str]
    """In that module of `bakehouse.commands`: `run`, or `run_TASK` if several tasks share it."""

    def __init_subclass__(cls, module: str = "") -> None:
        """Read the flags from the annotations."""
        name = cls.__name__.lower()
        cls.module, cls.function = module or name, f"run_{name}" if module else "run"
        cls.flags = {
            name: Flag(name, _kind(kind.__origin__), kind.__metadata__[0], not hasattr(cls, name))
            for name, kind in cls.__annotations__.items()
        }

    def __init__(self, *given: Any, **named: Any) -> None:
        values = dict(zip(self.flags, given, strict=False)) | named
        if len(values) != len(given) + len(named) or (wrong := values.keys() - self.flags.keys()):
            raise TypeError(f"{type(self).__name__}: {wrong if values else 'too many options'}")
        if missing := [f.name for f in self.flags.values() if f.required and f.name not in values]:
            raise TypeError(f"{type(self).__name__}: {', '.join(missing)} missing")
        vars(self).update(values)


def _kind(annotation: Any) -> str:
    if annotation is bool:
        return "switch"
    return "list" if getattr(annotation, "__origin__", None) is tuple else "text"


def flags_of(task: str) -> tuple[Flag, ...]:
    """Return all flags of a task: its own and the common ones."""
    own = TASKS[task].flags
    folder = (RECIPES,) if "recipe" in own or task == "recipes" else ()
    return (*own.values(), *folder, *COMMON)


class Recipes(Options, module="recipes"):
    """List recipes, and whether each is locked."""


class Show(Options, module="recipes"):
    """Print a recipe after includes and overrides."""

    recipe: Recipe
    set_: Set = ()


class Check(Options, module="recipes"):
    """Validate recipes and print all errors as file:line:column."""

    recipe: Annotated[str | None, f"{RECIPE} (default: all recipes)"] = None
    set_: Set = ()


class Lock(Options, module="lock"):
    """Resolve a recipe to exact pins and write its lock."""

    recipe: Recipe
    set_: Set = ()
    update: Annotated[bool, "update existing pins and print the changes"] = False


class Plan(Options):
    """Print every step of build and serve without running it."""

    recipe: Recipe
    set_: Set = ()
    patch: AddPatch = ()
    no_patch: NoPatch = ()
    allow: Allow = ""


class Fetch(Options, module="lock"):
    """Download sources and weights, verified and resumable."""

    recipe: Recipe
    set_: Set = ()
    locked: Locked = False
    rehash: Annotated[bool, "read and hash every weight file again, ignoring the cache"] = False


class Build(Options):
    """Build the engine from its pinned source, or reuse a build."""

    recipe: Recipe
    set_: Set = ()
    locked: Locked = False
    jobs: Annotated[str, "parallel compile jobs (default: by cores and free memory)"] = ""
    dry_run: DryRun = False
    patch: AddPatch = ()
    no_patch: NoPatch = ()
    allow: Allow = ""


class Serve(Options):
    """Build, download, start and verify a server, until READY."""

    recipe: Recipe
    set_: Set = ()
    port: Annotated[str, "port to listen on; 0 picks a free one"] = ""
    host: Annotated[str, "address to listen on; beyond this machine only with an API key"] = ""
    locked: Locked = False
    foreground: Annotated[bool, "stay attached, and stop the server when interrupted"] = False
    dry_run: DryRun = False
    accept_memory_risk: Annotated[
        str, "why to start it although it does not fit in memory; kept in the record"
    ] = ""
    watch: Annotated[str, "stay, and verify it at this interval, e.g. 10m"] = ""
    instance: Annotated[str, "name for a second server of this recipe, beside the first"] = ""
    patch: AddPatch = ()
    no_patch: NoPatch = ()
    allow: Allow = ""


class Status(Options, module="servers"):
    """List servers and how stopped ones ended."""

    recipe: Annotated[str, f"{SERVER} (default: all servers)"] = ""


class Logs(Options, module="servers"):
    """Print a server's log."""

    recipe: Annotated[str, SERVER] = ""
    lines: Annotated[str, "number of last lines to print"] = ""
    follow: Annotated[bool, "keep printing until the server ends or you interrupt"] = False


class Stop(Options, module="servers"):
    """Stop a server and all its child processes."""

    recipe: Annotated[str, SERVER] = ""
    all_: Annotated[bool, "stop every running server"] = False


class Probe(Options):
    """Test a running server with questions of known answer."""

    recipe: OurServer = ""
    set_: Set = ()
    instance: Instance = ""
    url: Url = ""
    model: Model = ""
    api_key_env: ApiKeyEnv = ""
    accept_golden: Annotated[
        bool, "save its answers as golden values of these weights, if it passes"
    ] = False


class Watch(Options):
    """Test a running server repeatedly."""

    recipe: OurServer = ""
    set_: Set = ()
    instance: Instance = ""
    url: Url = ""
    model: Model = ""
    api_key_env: ApiKeyEnv = ""
    every: Annotated[str, "interval between rounds, e.g. 90s or 1h (default: 10m)"] = "10m"
    count: Annotated[str, "number of rounds (default: until interrupted)"] = ""
    on_failure: Annotated[
        str, "restart, stop, or a command with its arguments (default: exit with the failure)"
    ] = ""
    patch: AddPatch = ()
    no_patch: NoPatch = ()
    allow: Allow = ""


class Diagnose(Options):
    """Explain a build or server log, first cause first."""

    file: Annotated[str, "log to read, plain or gzipped; - reads standard input"]
    engine: Annotated[str | None, "llama.cpp, vllm, cmake, docker or git, if known"] = None
    stage: Annotated[
        str | None, "configure, build, launch, load, ready, steady, ..., if known"
    ] = None  # fmt: skip


class Fit(Options):
    """Show which quantisations fit a machine, and the context."""

    recipe: Annotated[str | None, RECIPE] = None
    set_: Set = ()
    hub: Annotated[str | None, "Hugging Face repository OWNER/NAME, instead of a recipe"] = None
    revision: Annotated[str | None, "its branch, tag or commit (default: main)"] = None
    context: Annotated[str | None, "context length that has to fit, in tokens"] = None
    machine: Annotated[
        str | None, "machine to plan for: gb10, h200, ..., unified:121GiB, gpu:24GiB, cpu:64GiB"
    ] = None
    host: Annotated[str | None, "older name of --machine"] = None
    kv_cache: Annotated[str | None, "KV cache type, such as f16 or q8_0"] = None
    speculation: Annotated[
        str | None, "mean tokens per pass with speculation: 1 + accepted / drafts"
    ] = None


class Reshard(Options):
    """Split a checkpoint into small shards, and verify them."""

    checkpoint: Annotated[str, "folder of a safetensors checkpoint"]
    out: Annotated[str, "new folder for the shards"]
    max_shard: Annotated[str, "maximum size of a shard, e.g. 4GB or 3.5GiB (default: 4GB)"] = "4GB"


class Nightly(Options):
    """Check, build, serve, verify and stop each recipe."""

    recipe: Annotated[tuple[str, ...], f"{RECIPE} (repeatable)"] = ()
    patch: AddPatch = ()
    no_patch: NoPatch = ()
    allow: Allow = ""


class Patch(Options):
    """Pin a patch, and try it on the recipes' sources."""

    pr: Annotated[str, "number of a pull request"] = ""
    url: Annotated[str, "URL of a diff, a commit or a pull request"] = ""
    file: Annotated[str, "a local diff"] = ""
    commit: Annotated[str, "a commit, 40 hex digits"] = ""
    repo: Annotated[str, "repository OWNER/NAME (default: the engine's upstream)"] = ""
    recipe: Annotated[str, f"{RECIPE}, to try it on (default: all recipes of that engine)"] = ""
    update: Annotated[bool, "accept that it differs from what was pinned"] = False
    vendor: Annotated[bool, "keep the diff beside its manifest"] = False
    allow: Annotated[str, "how loosely it may apply: offset or fuzz (default: exactly)"] = ""
    dry_run: Annotated[bool, "download, compare and try; write nothing"] = False
    judge: Annotated[
        bool, "build and serve the recipe with and without it, compare, and record the verdict"
    ] = False
    set_: Set = ()
    accept_memory_risk: Annotated[
        str, "why --judge serves although it does not fit in memory; kept in the records"
    ] = ""


class Doctor(Options):
    """Check this machine's prerequisites and suggest fixes."""


TASKS: dict[str, type[Options]] = {
    kind.__name__.lower(): kind
    for kind in (
        Recipes, Show, Check, Lock, Plan, Fetch, Build, Serve, Status, Logs, Stop, Probe, Watch,
        Diagnose, Fit, Reshard, Nightly, Patch, Doctor,
    )
}  # fmt: skip
