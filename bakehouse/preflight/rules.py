"""Rules across a recipe's keys: pure, before anything is fetched or built."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bakehouse.engines.engine import engine_of
from bakehouse.engines.llamacpp.cmake import NOTHING, refusals
from bakehouse.engines.vllm import flags
from bakehouse.errors import Fault, RecipeError, UsageError
from bakehouse.ports.docker_facts import gpu_request
from bakehouse.preflight import vllm
from bakehouse.preflight.address import bind_address
from bakehouse.preflight.volumes import volumes
from bakehouse.recipe.load import Loaded, load
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import Conflict, conflicts

OWN_DRAFT_CACHE = ("draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""Speculation modes of llama.cpp that keep a KV cache of their own for the draft."""
PROJECTOR_RULE = "projector-with-"
"""With the speculation mode behind it, what a patch names in `lifts` that mends that one mode."""
_SPEC_TYPE = re.compile(r"--spec-type[=\s]+([\w,-]+)")


def rule_conflicts(recipe: Recipe) -> tuple[Conflict, ...]:
    """Everything in a recipe that contradicts itself across keys."""
    return (
        *conflicts(recipe.build),
        *_definitions(recipe),
        *_projector(recipe),
        *_address(recipe),
        *_acknowledged(recipe),
    )


def faults(loaded: Loaded) -> tuple[Fault, ...]:
    """The same, each at its place in the files, and what the command must not hold."""
    found = (
        loaded.origin(*c.keys).fault(f"{'.'.join(c.keys)}: {c.message}", c.hint)
        for c in rule_conflicts(loaded.recipe)
    )
    return (*found, *_container(loaded), *_command(loaded))


def require(loaded: Loaded) -> None:
    """Raise RecipeError (exit 2) with every fault, if there is one."""
    if found := faults(loaded):
        raise RecipeError(f"the recipe {loaded.recipe.name} contradicts itself", found)


def load_sound(
    path: Path,
    overrides: Sequence[str] = (),
    change: Callable[[Loaded], Loaded] | None = None,
) -> Loaded:
    """Load a recipe that does not contradict itself, `change` applied first where it is given.

    Raises RecipeError with every fault.
    """
    loaded = load(path, overrides)
    loaded = change(loaded) if change else loaded
    require(loaded)
    return loaded


def speculation_modes(recipe: Recipe) -> tuple[str, ...]:
    """Speculation modes that a recipe asks for, by its key or in its command."""
    written = _SPEC_TYPE.findall(recipe.serve.command)
    named = ",".join([recipe.serve.speculation or "", *written])
    return tuple(dict.fromkeys(mode.strip() for mode in named.split(",") if mode.strip()))


def _definitions(recipe: Recipe) -> tuple[Conflict, ...]:
    """Definitions that no llama.cpp build takes from a recipe, whatever its toolkit."""
    if recipe.engine != "llama.cpp" or recipe.build is None:
        return ()
    return tuple(
        Conflict(("build", "cmake", r.name), r.message, r.hint)
        for r in refusals(recipe.build.cmake, NOTHING)
    )


def _container(loaded: Loaded) -> tuple[Fault, ...]:
    """Volumes and GPUs that no container gets."""
    box = loaded.recipe.container
    found: list[Fault] = []
    for key, judge in (
        ("volumes", lambda: box and volumes(box.volumes, str(loaded.folder))),
        ("gpus", lambda: box and box.gpus is not None and gpu_request(box.gpus)),
    ):
        try:
            judge()
        except UsageError as error:
            message = error.what if key in error.what else f"container.{key}: {error.what}"
            found.append(loaded.origin("container", key).fault(message, error.hint or ""))
    return tuple(found)


def _command(loaded: Loaded) -> tuple[Fault, ...]:
    """What the command, rendered with example paths, must not contain, or lacks."""
    recipe, origin = loaded.recipe, loaded.origin("serve", "command")
    found: tuple[Fault, ...] = ()
    try:
        engine_of(recipe.engine).refuse(loaded.command, recipe, origin)
    except RecipeError as error:
        found = error.faults
    if recipe.engine == "vllm":
        found += tuple(
            loaded.origin(*c.keys).fault(c.message, c.hint)
            for c in vllm.conflicts(recipe, flags.read(loaded.command))
        )
    return found


def _address(recipe: Recipe) -> tuple[Conflict, ...]:
    try:
        bind_address(recipe.serve.host, has_key=recipe.serve.api_key is not None)
    except UsageError as error:
        return (Conflict(("serve", "host"), error.what, error.hint or ""),)
    return ()


def _projector(recipe: Recipe) -> tuple[Conflict, ...]:
    sees = recipe.weights.projector is not None or "--mmproj" in recipe.serve.command
    modes = [m for m in speculation_modes(recipe) if m in OWN_DRAFT_CACHE]
    if recipe.engine != "llama.cpp" or not sees or not modes:
        return ()
    lifted = (
        {rule for patch in recipe.patches for rule in patch.lifts} if recipe.experimental else ()
    )
    modes = [mode for mode in modes if f"{PROJECTOR_RULE}{mode}" not in lifted]
    if not modes:
        return ()
    rules = ", ".join(f"{PROJECTOR_RULE}{mode}" for mode in modes)
    return (
        Conflict(
            ("serve", "speculation") if recipe.serve.speculation else ("serve", "command"),
            f"{', '.join(modes)} keeps a KV cache of its own for the draft, which never learns of "
            "an image: with a projector, every image request ends with HTTP 500",
            "drop the speculation or the projector (ngram modes go with it); a patch that mends "
            f"this says so with lifts: [{rules}], and the recipe is experimental: true",
        ),
    )


def _acknowledged(recipe: Recipe) -> tuple[Conflict, ...]:
    if not recipe.acknowledge:
        return ()
    from bakehouse.preflight.known_bad import stale_acknowledgements

    return tuple(
        Conflict(
            ("acknowledge", name),
            f"no known-bad combination has the id '{name}'",
            "take it out; `invoke check` names the ids that apply",
        )
        for name in stale_acknowledgements(recipe)
    )
