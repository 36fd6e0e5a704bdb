"""The task `build`: build the engine from its pinned source, or pull or build its image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.base import digest
from bakehouse.build.artifact import Artifact
from bakehouse.build.ensure import ensure
from bakehouse.build.image import ImageArtifact
from bakehouse.build.image import ensure as ensure_image
from bakehouse.commands.planned import build_lines, is_built, parse_jobs
from bakehouse.context import Context
from bakehouse.lock import Lock
from bakehouse.outcome import Outcome
from bakehouse.patches import for_run
from bakehouse.plan.types import BuildPlan, ImagePlan
from bakehouse.plan.whole import plan_engine, survey
from bakehouse.preflight import combinations
from bakehouse.recipe.load import Loaded, find
from bakehouse.records.store import Run

Options = flags.Build


def run(ctx: Context, options: Options) -> Outcome:
    """Build or reuse; with `dry_run` only print the steps."""
    jobs = parse_jobs(options.jobs)
    asked = for_run.asked(options)
    path = find(options.recipe, ctx.recipes)
    loaded = combinations.load_good(path, options.set_, asked.change(ctx))
    if options.dry_run:
        lock = for_run.ensure(ctx, loaded, asked, options.set_, locked=True, fetch=False)
        plan = plan_engine(loaded, lock, survey(ctx, loaded.recipe, lock), ctx.places, jobs=jobs)
        result = {**plan.to_data(), "built": is_built(plan)}
        return Outcome(result=result, text="\n".join(build_lines(plan)))
    with Run.start(ctx, "build", loaded.recipe.name, secrets=loaded.recipe.secrets) as record:
        lock = for_run.ensure(ctx, loaded, asked, options.set_, locked=options.locked)
        record.pin(lock=digest(lock))
        for_run.note(asked, lock, record)
        here = survey(ctx, loaded.recipe, lock, make=True)
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
    ctx: Context, loaded: Loaded, lock: Lock, plan: BuildPlan | ImagePlan, record: Run
) -> None:
    """Refuse known-bad combinations; report and record warnings and acknowledged ones."""
    cuda = None if isinstance(plan, ImagePlan) else plan.expected.cuda
    found = combinations.known_bad(
        loaded,
        lock=lock,
        toolkit=cuda.toolkit.version if cuda else None,
        capabilities=combinations.meant_for(ctx, loaded),
    )
    combinations.note(ctx, loaded, found, record)


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
