"""Rules across a recipe's keys, checked before anything is fetched or built."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bakehouse.engines.engine import engine_of
from bakehouse.engines.llamacpp.cmake import NOTHING, refusals
from bakehouse.engines.vllm import flags
from bakehouse.errors import Fault, RecipeError, UsageError
from bakehouse.ports.docker import gpu_request
from bakehouse.preflight import vllm
from bakehouse.preflight.address import bind_address
from bakehouse.preflight.volumes import volumes
from bakehouse.recipe.load import Loaded, load
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import Conflict, conflicts

OWN_DRAFT_CACHE = ("draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""Speculation modes of llama.cpp that keep a KV cache of their own for the draft."""
PROJECTOR_RULE = "projector-with-"
"""With a speculation mode appended: the rule that a patch for that mode names in `lifts`."""
_SPEC_TYPE = re.compile(r"--spec-type[=\s]+([\w,-]+)")


def rule_conflicts(recipe: Recipe) -> tuple[Conflict, ...]:
    """Return every contradiction between keys of a recipe."""
    return (
        *conflicts(recipe.build),
        *_definitions(recipe),
        *_projector(recipe),
        *_address(recipe),
        *_acknowledged(recipe),
    )


def faults(loaded: Loaded) -> tuple[Fault, ...]:
    """Return contradictions and faults of the command, each at its place in the files."""
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
    """Load a recipe and check its rules, `change` applied first. Raises RecipeError."""
    loaded = load(path, overrides)
    loaded = change(loaded) if change else loaded
    require(loaded)
    return loaded


def speculation_modes(recipe: Recipe) -> tuple[str, ...]:
    """Return the speculation modes of a recipe, from its key and its command."""
    written = _SPEC_TYPE.findall(recipe.serve.command)
    named = ",".join([recipe.serve.speculation or "", *written])
    return tuple(dict.fromkeys(mode.strip() for mode in named.split(",") if mode.strip()))


def _definitions(recipe: Recipe) -> tuple[Conflict, ...]:
    """Return CMake definitions that a recipe must not set, whatever the toolkit."""
    if recipe.engine != "llama.cpp" or recipe.build is None:
        return ()
    return tuple(
        Conflict(("build", "cmake", r.name), r.message, r.hint)
        for r in refusals(recipe.build.cmake, NOTHING)
    )


def _container(loaded: Loaded) -> tuple[Fault, ...]:
    """Return invalid volumes and GPUs."""
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
            f"{', '.join(modes)} keeps its own KV cache for the draft, which never sees an "
            "image: with a projector, every image request ends with HTTP 500",
            "remove the speculation or the projector (ngram modes work with it), or use a patch "
            f"that fixes this, with lifts: [{rules}] and experimental: true",
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
            "remove it; `invoke check` lists the ids that apply",
        )
        for name in stale_acknowledgements(recipe)
    )
