"""The task `patch`: fetch and pin a patch, and try it on each recipe's source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bakehouse import flags, resolver
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, RecipeError, UsageError
from bakehouse.lock import ArchivePin, GitPin
from bakehouse.patch_review.overrides import parse_allow
from bakehouse.patch_review.trial import PatchTrial, TrialResult, engine_of, table
from bakehouse.patches.diff import counts, read_diff
from bakehouse.patches.fetch import host_of
from bakehouse.patches.pin import Kind, PatchRef, Pinned, pin
from bakehouse.patches.source_tree import ensure_source, source_is_here
from bakehouse.recipe.loader import LoadedRecipe, find, load, names
from bakehouse.recipe.models import FULL_COMMIT, UPSTREAM
from bakehouse.recipe.types import matches_repo, shown
from bakehouse.redact import clean
from bakehouse.resolver import lock_path, read_lock, source_drift
from bakehouse.sources import archives
from bakehouse.sources.git_mirror import commit_is_ready, mirror_folder
from bakehouse.system.git import Git

Options = flags.Patch


def run(ctx: Context, options: Options) -> Outcome:
    """Pin a patch, or compare it with its pin; then try it on one recipe, or on all of its engine.

    With a recipe, a patch that does not apply is exit 5; with `judge` a harmful one as well.
    """
    allow = parse_allow(options.allow)
    if options.judge and (not options.recipe or options.dry_run):
        raise UsageError(
            "--judge cannot be combined with --dry-run" if options.dry_run
            else "--judge needs a --recipe to compare servers with",
            hint="invoke patch --pr N --recipe NAME --judge builds, serves and compares",
        )  # fmt: skip
    if options.set_ and not options.recipe:
        raise UsageError("--set needs --recipe")
    if options.accept_memory_risk and not options.judge:
        raise UsageError("--accept-memory-risk needs --judge, which starts servers")
    loaded = load(find(options.recipe, ctx.recipes), options.set_) if options.recipe else None
    ref = read_ref(ctx, options, loaded)
    made = pin(ctx, ref, update=options.update, vendor=options.vendor, write=not options.dry_run)
    key = made.manifest.name
    trial = PatchTrial(ctx, key, made.data, allow=allow)
    if loaded:
        rows = [_try(ctx, trial, loaded, None)]
    else:
        rows = list(_try_all(ctx, trial, engine_of(made.manifest.repo)))
    lines = [*_pin_lines(made, dry=options.dry_run), "", *table(rows)]
    # A patch of an image is first tried when the derived image is built, by the judge.
    later = options.judge and loaded is not None and loaded.recipe.tree is None
    error = rows[0].error(key) if loaded and not rows[0].good and not later else None
    checks = tuple(row.check() for row in rows)
    outcome = Outcome(_result(made, rows), "\n".join(lines), checks, error=error, told=True)
    if loaded and options.judge and error is None:
        from bakehouse.commands import patch_compare

        how = patch_compare.JudgeOptions(allow, options.set_, options.accept_memory_risk)
        return patch_compare.judge_pinned(ctx, loaded, made, how, outcome)
    return outcome


def read_ref(ctx: Context, options: Options, loaded: LoadedRecipe | None = None) -> PatchRef:
    """Read from the flags which patch is meant. Raises UsageError."""
    kinds: tuple[Kind, ...] = ("pr", "url", "file", "commit")
    given: list[tuple[Kind, str]] = [(k, v) for k in kinds if (v := str(getattr(options, k)))]
    if len(given) != 1:
        what = "several patches are named" if given else "no patch is named"
        raise UsageError(what, hint="exactly one of --pr N, --url, --commit and --file PATH")
    (kind, what) = given[0]
    if kind == "pr" and not (what.isascii() and what.isdigit() and 0 < int(what) < 2**31):
        raise UsageError(f"--pr takes a number, not '{clean(what, one_line=True)}'")
    if kind == "commit" and not FULL_COMMIT.fullmatch(what):
        raise UsageError(
            f"--commit takes all 40 hex digits, not '{clean(what, one_line=True)}'",
            hint="a short id can become ambiguous",
        )
    repo = options.repo or UPSTREAM[loaded.recipe.engine if loaded else "llama.cpp"]
    if not matches_repo(repo):
        raise UsageError(f"--repo takes OWNER/NAME, not '{clean(repo, one_line=True)}'")
    number = str(int(what)) if kind == "pr" else what
    return PatchRef(kind, number, repo).resolved(host_of(ctx.environment))


def _try_all(ctx: Context, trial: PatchTrial, engine: str) -> Iterator[TrialResult]:
    """Try a patch on every recipe of an engine; invalid ones are unknown, never left out."""
    here: dict[str, bool] = {}
    for name in names(ctx.recipes):
        try:
            loaded = load(find(name, ctx.recipes))
        except RecipeError as error:
            yield TrialResult(name, "", None, error.what)
            continue
        if loaded.recipe.engine == engine:
            yield _try(ctx, trial, loaded, here)


def _try(
    ctx: Context, trial: PatchTrial, loaded: LoadedRecipe, here: dict[str, bool] | None
) -> TrialResult:
    try:
        source = _source(ctx, loaded, here)
    except BakehouseError as error:
        source = error.what
    if isinstance(source, str):
        return TrialResult(loaded.recipe.name, "", None, source, trial.allowed(loaded.recipe))
    return trial.apply_to(loaded, source)


def _source(
    ctx: Context, loaded: LoadedRecipe, here: dict[str, bool] | None
) -> GitPin | ArchivePin | str:
    """The recipe's source at its pinned commit, on this machine; or why it is not there.

    `here` remembers for each source whether it is on this machine; None fetches it.
    """
    git, wanted = Git(ctx.processes, ctx.environment), loaded.recipe.tree
    if wanted is None:
        return "it runs an image: a patch becomes a layer of a derived one"
    lock = read_lock(lock_path(loaded.path))
    pin = lock.source if lock and not source_drift(loaded.recipe, lock) else None
    if here is None:
        if pin:
            ensure_source(ctx, git, pin)
            return pin
        file = wanted.archive
        return (
            archives.pin_archive(ctx, git, file, loaded.folder) if file
            else resolver.pin_git(ctx, git, wanted)
        )  # fmt: skip
    if pin:
        key = str(pin)
        if key not in here:
            here[key] = source_is_here(ctx, git, pin)
        return pin if here[key] else "its source is not on this machine"
    if wanted.git and wanted.commit and FULL_COMMIT.fullmatch(wanted.commit):
        mirror = mirror_folder(ctx.places, wanted.git)
        if commit_is_ready(git, mirror, wanted.commit):
            tree = git.object_id(mirror, f"{wanted.commit}^{{tree}}")
            return GitPin(url=wanted.git, commit=wanted.commit, tree=tree, date=0)
    return "its source is not on this machine, and it has no lock"


_HOW = {
    "new": "pinned",
    "same": "pinned before, unchanged",
    "moved": "pinned again, changed",
    "offline": "pinned before, not compared with the host",
}


def _pin_lines(made: Pinned, *, dry: bool) -> list[str]:
    manifest = made.manifest
    parts = read_diff(made.data, manifest.name)
    beside: dict[str, list[str]] = {}
    for part in parts:
        moved = [f"renamed from {part.moved_from}"] if part.moved_from else []
        beside.setdefault(part.path, []).extend(moved + ([part.mode] if part.mode else []))
    how = _HOW[made.how]
    how = f"would be {how}" if dry and made.how in ("new", "moved") else how
    lines = [
        f"{manifest.name}  {how}",
        *([f"title     {manifest.title}"] if manifest.title else []),
        f"source    {manifest.source}",
        f"head      {manifest.head or 'unknown'}",
        f"base      {manifest.base or 'unknown'}",
        f"diff      {counts(parts)}, {len(made.data):,} bytes",
        f"sha256    {manifest.sha256}",
        *(", ".join((f"file      {f.path} +{f.added} -{f.removed}", *beside.get(f.path, ())))
          for f in manifest.files),
        *([f"upstream  {manifest.upstream}"] if manifest.upstream else []),
        *(["status    experimental"] if manifest.experimental else []),
        *(f"verdict   {v.word}: {v.recipe} at {v.base[:12]}, {v.date}" for v in manifest.verdicts
          if v.sha256 == manifest.sha256),
        *(f"moved     {change}" for change in made.changes),
        *(f"note      {note}" for note in made.notes),
        f"manifest  {shown(made.path)}",
    ]  # fmt: skip
    if not dry and "://" not in manifest.source and not manifest.vendored:
        lines.append(
            "note      the diff is only in this machine's cache; --vendor stores it here as well"
        )
    return lines


def _result(made: Pinned, rows: Sequence[TrialResult]) -> dict[str, Any]:
    return {
        "manifest": made.manifest.to_data(),
        "path": str(made.path),
        "how": made.how,
        "modes": {part.path: part.mode for part in read_diff(made.data, made.manifest.name)
                  if part.mode},
        "changes": list(made.changes),
        "notes": list(made.notes),
        "tried": [
            {
                "recipe": row.recipe, "base": row.base or None, "result": row.word,
                "applies": row.good if row.fit else None, "allow": row.allow,
                "tree": row.fit.tree if row.fit else None,
                "notes": list(row.fit.notes) if row.fit else [row.why],
            }
            for row in rows
        ],
    }  # fmt: skip
