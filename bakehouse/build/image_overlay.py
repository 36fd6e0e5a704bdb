"""A vLLM image with other Python files than its base: laid over, and seen to be in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bakehouse.build import steps
from bakehouse.build.image_build import (
    Made,
    build_environment,
    built_already,
    docker_build,
    keep_record,
    labelled,
    name_bases,
)
from bakehouse.build.overlay import Overlay, make_overlay, read_files
from bakehouse.build.work import digest_lock
from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.errors import BuildFailed
from bakehouse.lock import Lock
from bakehouse.plan.dockerfile import script
from bakehouse.plan.types import ImagePlan
from bakehouse.ports.docker import ImageFacts
from bakehouse.records.store import Run
from bakehouse.sources.mods import copy_mod


def lay_over(ctx: Context, lock: Lock, plan: ImagePlan, run: Run, *, recipes: Path) -> Made:
    """Build the plan's image over its base, which is here.

    `recipes` is the folder that mods are relative to.
    Raises BuildFailed (6), PatchError (5), HostError (9), LockError (4).
    """
    env = build_environment(ctx)
    name_bases(ctx, plan)
    folder = ctx.places.images / ".work" / plan.digest
    with digest_lock(ctx, ctx.places.images, plan.digest):
        if there := built_already(ctx, plan):
            return there
        overlay = Overlay({}, (), ())
        if lock.source or lock.patches:
            with run.step("overlay"):
                overlay = make_overlay(ctx, lock, plan.pin.ref)
        run.fact("overlay", {"files": overlay.hashes, "removed": list(overlay.removed),
                             "left out": list(overlay.left_out)})  # fmt: skip
        steps.clear(folder)
        try:
            _write_context(plan, overlay, folder)
            for number, mod in enumerate(lock.mods, 1):
                copy_mod(recipes, mod, folder / "mods" / str(number))
            docker_build(ctx, plan.step("build"), run, env, folder, lambda _: None, _no_error)
        finally:
            steps.clear(folder)
        found, checks = _verify(ctx, plan, overlay, run)
        return keep_record(ctx, plan, found, checks)


def _no_error(*_: object) -> None:
    """There is no compiler whose first error could be looked for."""


def _write_context(plan: ImagePlan, overlay: Overlay, folder: Path) -> None:
    files = folder / "overlay" / "files"
    files.mkdir(parents=True)
    for name, data in overlay.files.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes(data)
    (folder / "overlay" / "removed.json").write_text(json.dumps(overlay.removed))
    (folder / "overlay" / "lay.py").write_bytes(script("lay.py"))
    (folder / "Dockerfile").write_text(str(plan.dockerfile))


def _verify(
    ctx: Context, plan: ImagePlan, overlay: Overlay, run: Run
) -> tuple[ImageFacts, tuple[Check, ...]]:
    """See that the changed files, and only those bytes, are in the image."""
    found = ctx.docker.image(plan.image)
    if found is None:
        raise BuildFailed("the build left no image", where=plan.image, hint="see its log")
    names = (*overlay.files, *overlay.removed)
    inside = read_files(ctx, found.id, names)[1] if names else {}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in inside.items()}
    wrong = sorted(n for n in names if hashes.get(n) != overlay.hashes.get(n))
    same_user = (found.user or "root") == (plan.pin.user or "root")
    laid = check("image.overlay", f"{len(names)} changed files", ", ".join(wrong) or "all of them",
                 plan.image, ok=not wrong)  # fmt: skip
    checks = (
        labelled(plan, found),
        *([laid] if names else []),
        check("image.user", plan.pin.user or "root", found.user or "root", plan.image,
              ok=same_user),
    )  # fmt: skip
    run.checks(checks)
    steps.all_passed("the image that was built is not the one that was planned", checks)
    return found, checks
