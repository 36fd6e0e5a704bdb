"""Weight files and memory before a launch.

llama.cpp finds these faults late (exit 1 at load) or never (wrong answers at full speed).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.checkpoints.checkpoint import Checkpoint, read_paths
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError
from bakehouse.lock import Lock
from bakehouse.memory.budget import Weight
from bakehouse.memory.fit import (
    best_context,
    find_machine,
    fitting_quant,
    locked_weights,
    recipe_budget,
    refusal,
)
from bakehouse.memory.machines import Machine
from bakehouse.memory.requirements import Budget, Pool
from bakehouse.models import Check, Verdict, check
from bakehouse.patches.source_tree import repository_of
from bakehouse.preflight.rules import types_in
from bakehouse.recipe.models import Recipe
from bakehouse.system.git import Git, GitFailed

ARCHITECTURE_TABLE = "src/llama-arch.cpp"
"""The file of a llama.cpp source tree that lists the supported architectures."""
NOT_TEXT = {"clip": "a projector", "mmproj": "a projector"}
TOKENIZER = "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
MAX_TOKENIZER = 64 * 2**20
TEMPLATE_FLAGS = ("--chat-template", "--chat-template-file")


@dataclass(frozen=True)
class Inspected:
    """The checkpoints of all roles, and their checks."""

    checkpoints: Mapping[str, Checkpoint]
    checks: tuple[Check, ...]


def architectures_in(source: str) -> frozenset[str]:
    """Return the architecture names in llama.cpp's table; empty if `source` has no such table."""
    table = re.search(r"LLM_ARCH_NAMES\s*=\s*\{(.*?)\n\};", source, re.DOTALL)
    if table is None:
        return frozenset()
    names = re.findall(r"\{\s*LLM_ARCH_\w+\s*,\s*\"([^\"]+)\"\s*\}", table[1])
    return frozenset(names) - {"(unknown)"}


def inspect(
    files: Mapping[str, Sequence[Path]],
    *,
    architectures: frozenset[str] | None = None,
    chat: bool = True,
    argv: Sequence[str] = (),
) -> Inspected:
    """Read the headers of every role's files and check them; never raises for a bad file.

    `architectures` are those of the pinned source, if known; `chat` says whether chat requests
    will be made; `argv` is the server's command, which may name a template.
    """
    found: dict[str, Checkpoint] = {}
    checks: list[Check] = []
    for role, paths in files.items():
        where = str(paths[0]) if paths else role
        try:
            made = found[role] = read_paths(paths)
        except BakehouseError as error:
            observed = f"{error.what} ({error.hint})" if error.hint else error.what
            where, ok = error.where or where, False
        else:
            counts = f"{len(made.files)} files, {made.size} bytes"
            observed, ok = f"{counts}, {made.parameters} parameters", True
        expected = "whole weight files that belong together"
        checks.append(check(f"{role}-files", expected, observed, where, ok=ok))
    if (model := found.get("model")) and model.format == "gguf":
        checks += gguf_checks(model, architectures=architectures, chat=chat, argv=argv)
        if projector := found.get("projector"):
            checks.append(projector_check(model, projector))
    elif model and chat:
        checks.append(template_check(files["model"], argv))
    return Inspected(found, tuple(checks))


def gguf_checks(
    model: Checkpoint,
    *,
    architectures: frozenset[str] | None,
    chat: bool,
    argv: Sequence[str] = (),
) -> tuple[Check, ...]:
    """Check a language model's GGUF by its metadata."""
    where = model.files[0].name
    made = [_architecture(model.shape.architecture, architectures, where)]
    if model.metadata.get("tokenizer.ggml.model") == "gpt2":
        pre = model.metadata.get("tokenizer.ggml.pre")
        observed = repr(pre) if pre else "no tokenizer.ggml.pre: made by an old converter"
        made.append(
            check("model-pre-tokenizer", "the file names its pre-tokenizer", observed, where,
                  ok=bool(pre))
        )  # fmt: skip
    if chat:
        flag = next((a for a in argv if a.split("=")[0] in TEMPLATE_FLAGS), None)
        own = bool(model.metadata.get("tokenizer.chat_template"))
        observed = "in the file" if own else f"by {flag}" if flag else (
            "none: the engine would fall back to a template of its own"
        )  # fmt: skip
        made.append(
            check("model-chat-template", "a chat template, since chat is used", observed, where,
                  ok=own or flag is not None)
        )  # fmt: skip
    return tuple(made)


def template_check(files: Sequence[Path], argv: Sequence[str] = ()) -> Check:
    """Check whether a Hugging Face checkpoint has a chat template, by its pinned files.

    Without one each chat request fails with HTTP 400, while /health is 200. Some tokenizers have
    theirs in code, so a checkpoint without `tokenizer_config.json` is unknown.
    """
    names = {path.name: path for path in files}
    flag = next((a for a in argv if a.split("=")[0] in TEMPLATE_FLAGS), None)
    own = next((name for name in TEMPLATE_FILES if name in names), None)
    config = names.get(TOKENIZER)
    configured = _has_template(config) if config and not own else None
    where = TOKENIZER if config else "the pinned files"
    if own or flag or configured:
        observed: str | None = f"in {own}" if own else f"by {flag}" if flag else f"in {TOKENIZER}"
    else:
        observed = None if configured is None else "none: each chat request would end with 400"
    return check("model-chat-template", "a chat template, since chat is used", observed, where,
                 ok=bool(own or flag or configured))  # fmt: skip


def _has_template(path: Path) -> bool | None:
    """Whether a tokenizer's configuration has a template; None if it cannot be read."""
    try:
        found = json.loads(path.read_bytes()[:MAX_TOKENIZER])
    except (OSError, ValueError):
        return None
    return bool(found.get("chat_template")) if isinstance(found, dict) else None


def _architecture(name: str, known: frozenset[str] | None, where: str) -> Check:
    expected = "an architecture that the pinned source supports"
    if not name:
        observed: str | None = "no general.architecture: not a language model"
        ok: bool | None = False
    elif name in NOT_TEXT:
        observed, ok = f"'{name}': {NOT_TEXT[name]}, which belongs to weights.projector", False
    elif not known:
        observed, ok = f"'{name}'; the source's table could not be read", None
    elif name not in known:
        observed = f"'{name}' is not among the {len(known)} that this source supports"
        observed, ok = observed + ": a newer pin or a patch is needed", False
    else:
        observed, ok = f"'{name}'", True
    return check("model-architecture", expected, observed, where, ok=ok)


def projector_check(model: Checkpoint, projector: Checkpoint) -> Check:
    """Check whether a projector matches the model's embedding width."""
    width = model.shape.embedding
    where = f"{projector.files[0].name} with {model.files[0].name}"
    expected = f"a projector for the model's embedding width {width}"
    if projector.shape.architecture not in NOT_TEXT:
        observed = f"architecture '{projector.shape.architecture}' is not a projector"
        return check("projector-matches", expected, observed, where, ok=False)
    widths = {
        length
        for tensor in projector.tensors
        if tensor.name.startswith(("mm.", "mm_", "resampler.", "v.merger.", "a.proj"))
        for length in tensor.shape
    }
    declared = {
        value
        for key, value in projector.metadata.items()
        if key.endswith(".projection_dim") and isinstance(value, int)
    }
    if not width or not (widths or declared):
        return check("projector-matches", expected, None, where, ok=None)
    if width in widths or (not widths and width in declared):
        return check("projector-matches", expected, f"{width}", where, ok=True)
    dimensions = ", ".join(map(str, sorted(declared or widths)[:6]))
    observed = f"it projects to {dimensions}: it is for another size of this model"
    return check("projector-matches", expected, observed, where, ok=False)


@dataclass(frozen=True)
class Admission:
    """The checks of the weights, and the memory budget."""

    checks: tuple[Check, ...]
    budget: Budget
    types: frozenset[str]
    """Tensor types in the headers."""


def source_architectures(ctx: Context, lock: Lock) -> frozenset[str] | None:
    """Return the architectures that the patched source supports; None if it cannot be read."""
    if lock.source is None or lock.source_tree is None:
        return None
    place = f"{lock.source_tree}:{ARCHITECTURE_TABLE}"
    try:
        git = Git(ctx.processes, ctx.environment)
        text = git.ask(repository_of(ctx.places, lock.source), "cat-file", "blob", place)
    except (GitFailed, BakehouseError):
        return None
    return architectures_in(text) or None


def admit(
    ctx: Context,
    recipe: Recipe,
    lock: Lock,
    files: Mapping[str, Sequence[str]],
    argv: Sequence[str],
    *,
    risk_accepted: bool = False,
    machine: Machine | None = None,
) -> Admission:
    """Check weights that are all on this machine; `argv` is the server's command.

    Raises CheckpointError (exit 4) for files that cannot be served, HostError (exit 9) if they do
    not fit, unless `risk_accepted`. Unknown results are reported and not refused.
    """
    paths = {role: [Path(name) for name in names] for role, names in files.items()}
    chat = recipe.probe.facts.questions is None or any(
        question.mode == "chat" for question in recipe.probe.facts.questions
    )
    known = source_architectures(ctx, lock) if recipe.engine == "llama.cpp" else None
    inspected = inspect(paths, architectures=known, chat=chat, argv=argv)
    if failed := [one for one in inspected.checks if one.verdict is Verdict.FAILED]:
        raise CheckpointError(
            f"the weights cannot be served: {failed[0].observed}", where=failed[0].where,
            hint=f"expected: {failed[0].expected}", id=failed[0].id, checks=inspected.checks,
        )  # fmt: skip
    weights = {role: Weight.read(made) for role, made in inspected.checkpoints.items()}
    machine = machine or find_machine(ctx)
    budget = recipe_budget(machine, recipe, weights, argv)
    checks = (*inspected.checks, *budget.checks())
    if not budget.fits and not risk_accepted:
        raise refusal(
            budget,
            context=best_context(machine, recipe, weights, argv),
            quant=fitting_quant(ctx, machine, recipe, weights, argv, files=paths["model"]),
            mapped=recipe.engine == "llama.cpp",
        )
    return Admission(checks, budget, types_in(inspected.checkpoints.values()))


def refuse_by_size(
    ctx: Context,
    recipe: Recipe,
    lock: Lock,
    argv: Sequence[str],
    machine: Machine | None = None,
    *,
    files: Sequence[str] = (),
) -> None:
    """Refuse weights larger than all memory, before hours of fetching them.

    Only their sizes count; `files` are the model's, if the user's own are used in place. Raises
    HostError (exit 9).
    """
    machine = machine or find_machine(ctx)
    weights = locked_weights(lock, {})
    pools = (Pool.GPU, Pool.SYSTEM) if machine.discrete else (Pool.SYSTEM,)
    room = machine.available + (machine.gpu_free() if machine.discrete else 0)
    room -= sum(machine.reserve(pool) for pool in pools)
    if sum(weight.size for weight in weights.values()) <= room:
        return
    budget = recipe_budget(machine, recipe, weights, argv)
    if not budget.fits:
        at = [Path(name) for name in files]
        raise refusal(budget, quant=fitting_quant(ctx, machine, recipe, weights, argv, files=at))
