"""The task `build`: build the engine from its pinned source, or pull or build its image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.build.artifact import Artifact
from bakehouse.build.builder import ensure
from bakehouse.build.image import ImageArtifact
from bakehouse.build.image import ensure as ensure_image
from bakehouse.commands.plan import build_lines, is_built, parse_jobs
from bakehouse.context import Context, Outcome
from bakehouse.lock import Lock
from bakehouse.models import digest
from bakehouse.patch_review import overrides
from bakehouse.plan.planner import inspect_host, plan_engine
from bakehouse.plan.types import BuildPlan, ImagePlan
from bakehouse.preflight import rules
from bakehouse.recipe.loader import LoadedRecipe, find
from bakehouse.runs.store import Run

Options = flags.Build


def run(ctx: Context, options: Options) -> Outcome:
    """Build or reuse; with `dry_run` only print the steps."""
    jobs = parse_jobs(options.jobs)
    asked = overrides.parse_overrides(options)
    path = find(options.recipe, ctx.recipes)
    loaded = rules.load_and_check(path, options.set_, asked.change(ctx))
    if options.dry_run:
        lock = overrides.ensure(ctx, loaded, asked, options.set_, locked=True, fetch=False)
        plan = plan_engine(
            loaded, lock, inspect_host(ctx, loaded.recipe, lock), ctx.places, jobs=jobs
        )
        result = {**plan.to_data(), "built": is_built(plan)}
        return Outcome(result=result, text="\n".join(build_lines(plan)))
    with Run.start(ctx, "build", loaded.recipe.name, secrets=loaded.recipe.secrets) as record:
        lock = overrides.ensure(ctx, loaded, asked, options.set_, locked=options.locked)
        record.pin(lock=digest(lock))
        overrides.record_patches(asked, lock, record)
        here = inspect_host(ctx, loaded.recipe, lock, make=True)
        record.host(here.host.to_data())
        plan = plan_engine(loaded, lock, here, ctx.places, jobs=jobs)
        _judge(ctx, loaded, lock, plan, record)
        if isinstance(plan, ImagePlan):
            image = ensure_image(ctx, loaded, lock, plan, record)
            record.finish("image up to date" if image.reused else "image ready")
            return _image_outcome(image, record.record)
        artifact = ensure(ctx, lock, plan, record)
        record.finish("reused" if artifact.reused else f"built in {artifact.seconds:.0f} s")
    return _outcome(artifact, record.record)


def _judge(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, plan: BuildPlan | ImagePlan, record: Run
) -> None:
    """Refuse known-bad combinations; report and record warnings and acknowledged ones."""
    cuda = None if isinstance(plan, ImagePlan) else plan.expected.cuda
    found = rules.known_bad(
        loaded,
        lock=lock,
        toolkit=cuda.toolkit.version if cuda else None,
        capabilities=rules.meant_for(ctx, loaded),
    )
    rules.note(ctx, loaded, found, record)


def _image_outcome(image: ImageArtifact, record: Path) -> Outcome:
    lines = [
        f"image   {image.image}",
        f"id      {image.id}, {image.size:,} bytes, user {image.user or 'root'}",
        *([f"says    {image.says}"] if image.says else []),
        *([f"content {image.content[:16]}"] if image.content else []),
        f"        {'nothing to do' if image.reused else 'done'} in {image.seconds:.1f} s",
        f"record  {record}",
    ]
    result = {**image.to_data(), "record": str(record)}
    del result["checks"]
    return Outcome(result=result, text="\n".join(lines), checks=image.checks)


def _outcome(artifact: Artifact, record: Path) -> Outcome:
    size = sum(file.size for file in artifact.files)
    how = (
        f"reused, verified in {artifact.seconds:.2f} s (built in {artifact.build_seconds:.0f} s)"
        if artifact.reused
        else f"built in {artifact.seconds:.0f} s"
    )
    lines = [
        f"build   {artifact.digest}",
        f"        {how}",
        f"server  {artifact.server}",
        f"files   {len(artifact.files)}, {size:,} bytes, content {artifact.content[:16]}",
        f"record  {record}",
    ]
    result: dict[str, Any] = {**artifact.to_data(), "record": str(record)}
    del result["checks"]
    return Outcome(result=result, text="\n".join(lines), checks=artifact.checks)
