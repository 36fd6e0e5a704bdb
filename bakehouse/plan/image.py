"""How an image comes to be on this machine: pulled by digest, or built; and what it is asked. Pure.

Which architecture is meant is the engine's, which on a plain machine is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

from bakehouse.base import digest
from bakehouse.engines.vllm.asks import asks_of
from bakehouse.lock import ImagePin, Lock
from bakehouse.plan import dockerfile
from bakehouse.plan.built import base_name, build_argv, labels_of, tag_of
from bakehouse.plan.types import Asks, ImagePlan, Step
from bakehouse.recipe.model import Recipe

RULES = 1
"""Raised when the same inputs would give another image."""


def uses_image(recipe: Recipe) -> bool:
    """Whether a recipe is served from a container image."""
    return recipe.image is not None or bool(recipe.build and recipe.build.where == "docker")


def plan_image(recipe: Recipe, lock: Lock, arch: str, command: Sequence[str]) -> ImagePlan:
    """Plan the image of a vLLM recipe for `arch`; `command` is the server's, with example paths.

    Raises HostError if the lock has no image for that architecture.
    """
    pin = lock.image(arch)
    asks = asks_of(recipe, command)
    if recipe.image and recipe.image.built:
        return _overlaid(recipe, lock, arch, pin, asks)
    return ImagePlan(
        digest=digest({"rules": RULES, "image": pin.ref, "arch": arch}),
        image=pin.ref,
        arch=arch,
        pins={"image": pin},
        server="vllm",
        asks=asks,
        steps=(pull_step("image", pin, arch), ask_step(pin.ref, asks)),
    )


def _overlaid(recipe: Recipe, lock: Lock, arch: str, pin: ImagePin, asks: Asks) -> ImagePlan:
    """Plan an image that is changed by pinned patches, a branch or mods, over the pinned base."""
    overlay = bool(lock.source or lock.patches)
    text = dockerfile.render(
        "vllm.Dockerfile.j2", base=base_name(pin), user=pin.user or "root", overlay=overlay,
        mods=lock.mods,
    )  # fmt: skip
    key = digest(
        {
            "rules": RULES, "dockerfile": text, "scripts": dockerfile.script_hashes("lay.py"),
            "image": pin.ref, "arch": arch, "source": lock.source_tree,
            "patches": [[patch.file.sha256, patch.allow] for patch in lock.patches],
            "mods": [[file.to_data() for file in mod.files] for mod in lock.mods],
        }
    )  # fmt: skip
    image, labels = tag_of(recipe.name, key), labels_of(recipe, lock, key)
    changes = "the branch's Python" if lock.source else "the patched Python files"
    made = Step(
        id="overlay",
        title=f"make {changes}, against the files that the base image has",
        expects=("nothing that is compiled changes", "every hunk fits"),
    )
    mods = "".join(f", run the mod {mod.folder}" for mod in lock.mods)
    steps = (
        pull_step("image", pin, arch),
        *([made] if overlay else []),
        Step(
            id="build",
            title=f"change the base image: {'lay them over' if overlay else 'as it is'}{mods}",
            argv=build_argv(image, {}, labels),
            expects=("exit code 0", "our labels", "the files in the image are those"),
        ),
        ask_step(image, asks),
    )
    return ImagePlan(
        digest=key, image=image, arch=arch, pins={"image": pin}, server="vllm", dockerfile=text,
        labels=labels, asks=asks, steps=steps,
    )  # fmt: skip


def pull_step(role: str, pin: ImagePin, arch: str) -> Step:
    """Have the pinned image here."""
    if pin.local:
        title = f"see that the engine holds the local image {pin.reference}"
    else:
        title = f"pull {pin.reference} by digest, unless it is here: {pin.size:,} bytes packed"
    return Step(
        id="pull" if role == "image" else f"pull-{role}",
        title=title,
        expects=(pin.ref, f"linux on {arch}"),
    )


def ask_step(image: str, asks: Asks) -> Step:
    """Ask the image itself what it supports."""
    expects = [f"the architectures of the {role}, by its config.json" for role in asks.roles]
    named = {
        "reasoning parser": asks.reasoning_parser,
        "tool parser": asks.tool_parser,
        "speculative method": asks.speculation,
    }
    expects += [f"{what} {name}" for what, name in named.items() if name]
    return Step(
        id="able",
        title=f"ask the Python of {image} what it supports; no GPU, no network",
        expects=tuple(expects),
    )
