"""The image of a plan: pulled by digest or built, and proven able of what the recipe needs."""

from __future__ import annotations

from bakehouse.base import Frozen
from bakehouse.build.able import as_facts, ask_able, require_able, summary
from bakehouse.build.image_build import build_image, built_already
from bakehouse.build.image_overlay import lay_over
from bakehouse.checks import Check
from bakehouse.context import Context
from bakehouse.engines.vllm.able import Able, names_of
from bakehouse.lock import Lock
from bakehouse.plan.types import ImagePlan
from bakehouse.ports.docker import ImageFacts
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Build
from bakehouse.records.store import Run
from bakehouse.sources.configs import architectures
from bakehouse.sources.images import ensure_image
from bakehouse.toolkit.settle import for_builder


class ImageArtifact(Frozen):
    """An image that is here and was proven able. Size in bytes, unpacked."""

    image: str
    """What it is run by."""
    id: str
    """The engine's id of its content."""
    digest: str
    """Of the plan."""
    size: int
    user: str
    entrypoint: tuple[str, ...]
    says: str = ""
    """Versions that it claims."""
    version: str = ""
    """The engine's version that it claims; empty for an image that was not asked."""
    content: str = ""
    """Digest of the file tree, of an image that was built here."""
    checks: tuple[Check, ...]
    reused: bool
    """Whether nothing had to be pulled, built or asked."""
    seconds: float


def ensure(ctx: Context, loaded: Loaded, lock: Lock, plan: ImagePlan, run: Run) -> ImageArtifact:
    """Have the plan's image, and evidence that it is able of what the recipe needs.

    Raises HostError (9), LockError (4), NotFound (3), BuildFailed (6) where it is not able.
    """
    started = ctx.clock.monotonic()
    run.pin(build=plan.digest)
    found, content, made, reused = _have(ctx, loaded, lock, plan, run)
    checks, able, known = _able(ctx, loaded, lock, plan, found, run)
    return ImageArtifact(
        image=plan.image, id=found.id, digest=plan.digest, size=found.size, user=found.user,
        entrypoint=found.entrypoint, says=summary(able) if able else "", content=content,
        version=able.versions.get("vllm", "") if able else "", checks=(*made, *checks),
        reused=reused and known, seconds=round(ctx.clock.monotonic() - started, 3),
    )  # fmt: skip


def _have(
    ctx: Context, loaded: Loaded, lock: Lock, plan: ImagePlan, run: Run
) -> tuple[ImageFacts, str, tuple[Check, ...], bool]:
    """The image, its content's digest (of one that is built), checks, and if it was here."""
    if plan.dockerfile and (there := built_already(ctx, plan)):
        run.checks(there[2])
        return (*there, True)
    held = ctx.docker.image(plan.image)
    for role, pin in plan.pins.items():
        with run.step("pull" if role == "image" else f"pull-{role}"):
            found = ensure_image(ctx, pin, plan.arch)
    if not plan.dockerfile:
        return found, "", (), held is not None
    if loaded.recipe.image:
        return (*lay_over(ctx, lock, plan, run, recipes=loaded.folder), False)
    build = for_builder(ctx, loaded.recipe).build or Build()
    return (*build_image(ctx, lock, plan, build, run), False)


def _able(
    ctx: Context, loaded: Loaded, lock: Lock, plan: ImagePlan, found: ImageFacts, run: Run
) -> tuple[tuple[Check, ...], Able | None, bool]:
    """Ask and judge; give the checks, what the image says of itself, and if that was known."""
    if plan.asks is None:
        return (), None, True
    wanted = {
        role: plan.asks.overridden.get(role)
        or architectures(ctx, loaded.folder, loaded.recipe, lock, role)
        for role in plan.asks.roles
    }
    with run.step("able"):
        able, known = ask_able(ctx, found.id, plan.image, names_of(wanted, plan.asks))
    run.fact("image", {"ref": plan.image, "id": found.id, **as_facts(able)})
    for name, version in able.versions.items():
        run.version(name, version)
    checks = require_able(able, plan.asks, wanted, plan.image)
    run.checks(checks)
    return checks, able, known
