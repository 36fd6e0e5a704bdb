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
from bakehouse.models import digest
from bakehouse.patch_review import overrides
from bakehouse.plan.planner import inspect_host, plan_engine
from bakehouse.plan.types import ImagePlan
from bakehouse.preflight import rules
from bakehouse.recipe.loader import find
from bakehouse.runs.store import Run

Options = flags.Build


def run(ctx: Context, options: Options) -> Outcome:
    """Build or reuse; with `dry_run` only print the steps."""
    jobs = parse_jobs(options.jobs)
    patch_options = overrides.parse_overrides(options)
    path = find(options.recipe, ctx.recipes)
    loaded = rules.load_and_check(path, options.set_, patch_options.change(ctx))
    if options.dry_run:
        lock = overrides.ensure(ctx, loaded, patch_options, options.set_, locked=True, fetch=False)
        plan = plan_engine(
            loaded, lock, inspect_host(ctx, loaded.recipe, lock), ctx.places, jobs=jobs
        )
        result = {**plan.to_data(), "built": is_built(plan)}
        return Outcome(result=result, text="\n".join(build_lines(plan)))
    with Run.start(ctx, "build", loaded.recipe.name, secrets=loaded.recipe.secrets) as record:
        lock = overrides.ensure(ctx, loaded, patch_options, options.set_, locked=options.locked)
        record.pin(lock=digest(lock))
        overrides.record_patches(patch_options, lock, record)
        here = inspect_host(ctx, loaded.recipe, lock, make=True)
        record.host(here.host.to_data())
        plan = plan_engine(loaded, lock, here, ctx.places, jobs=jobs)
        # Known-bad combinations are refused; warnings and acknowledged ones are recorded.
        cuda = None if isinstance(plan, ImagePlan) else plan.expected.cuda
        found = rules.known_bad(
            loaded,
            lock=lock,
            toolkit=cuda.toolkit.version if cuda else None,
            capabilities=rules.meant_for(ctx, loaded),
        )
        rules.note(ctx, loaded, found, record)
        if isinstance(plan, ImagePlan):
            image = ensure_image(ctx, loaded, lock, plan, record)
            record.finish("image up to date" if image.reused else "image ready")
            return _outcome(image, record.record, _image_lines(image))
        artifact = ensure(ctx, lock, plan, record)
        record.finish("reused" if artifact.reused else f"built in {artifact.seconds:.0f} s")
    return _outcome(artifact, record.record, _build_lines(artifact))


def _image_lines(image: ImageArtifact) -> list[str]:
    return [
        f"image   {image.image}",
        f"id      {image.id}, {image.size:,} bytes, user {image.user or 'root'}",
        *([f"says    {image.says}"] if image.says else []),
        *([f"content {image.content[:16]}"] if image.content else []),
        f"        {'nothing to do' if image.reused else 'done'} in {image.seconds:.1f} s",
    ]


def _build_lines(artifact: Artifact) -> list[str]:
    size = sum(file.size for file in artifact.files)
    how = f"built in {artifact.seconds:.0f} s"
    if artifact.reused:
        built = f"built in {artifact.build_seconds:.0f} s"
        how = f"reused, verified in {artifact.seconds:.2f} s ({built})"
    return [
        f"build   {artifact.digest}",
        f"        {how}",
        f"server  {artifact.server}",
        f"files   {len(artifact.files)}, {size:,} bytes, content {artifact.content[:16]}",
    ]


def _outcome(made: Artifact | ImageArtifact, record: Path, lines: list[str]) -> Outcome:
    result: dict[str, Any] = {**made.to_data(), "record": str(record)}
    del result["checks"]
    text = "\n".join([*lines, f"record  {record}"])
    return Outcome(result=result, text=text, checks=made.checks)
