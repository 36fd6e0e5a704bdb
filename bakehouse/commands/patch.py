"""The task `patch`: fetch and pin a patch, and see how it fits each recipe's source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bakehouse import flags
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, PatchError, RecipeError, UsageError
from bakehouse.outcome import Outcome
from bakehouse.patches.for_run import parse_allow
from bakehouse.patches.pin import Kind, Pinned, Wish, pin
from bakehouse.patches.tried import Trials, Tried, engine_of, table
from bakehouse.recipe.faults import shown
from bakehouse.recipe.fields import matches_repo
from bakehouse.recipe.load import Loaded, find, load, names
from bakehouse.recipe.model import FULL_COMMIT
from bakehouse.recipe.patches import UPSTREAM
from bakehouse.redact import clean
from bakehouse.sources.diffs import counts, read_diff
from bakehouse.sources.upstream import host_of

Options = flags.Patch


def run(ctx: Context, options: Options) -> Outcome:
    """Pin, or compare with the pin; then try it on one recipe, or on all of its engine.

    With a recipe, anything but a patch that applies is exit 5; with `judge` a patch that harms too.
    """
    allow = parse_allow(options.allow)
    if options.judge and (not options.recipe or options.dry_run):
        raise UsageError(
            "--judge and --dry-run do not go together" if options.dry_run
            else "--judge needs a recipe to judge the patch with",
            hint="invoke patch --pr N --recipe NAME --judge builds, serves and compares",
        )  # fmt: skip
    if options.set_ and not options.recipe:
        raise UsageError("--set belongs to --recipe")
    if options.accept_memory_risk and not options.judge:
        raise UsageError("--accept-memory-risk belongs to --judge, which starts servers")
    loaded = load(find(options.recipe, ctx.recipes), options.set_) if options.recipe else None
    wish = read_wish(ctx, options, loaded)
    made = pin(ctx, wish, update=options.update, vendor=options.vendor, write=not options.dry_run)
    recipes = [loaded] if loaded else _recipes(ctx, engine_of(made.manifest.repo))
    key = f"{made.manifest.repo}#{made.manifest.id}"
    trials = Trials(ctx, key, made.data, allow=allow, fetch=bool(options.recipe))
    rows = [row if isinstance(row, Tried) else trials.on(row) for row in recipes]
    lines = [*_pin_lines(made, dry=options.dry_run), "", *table(rows)]
    result = _result(made, rows)
    checks = tuple(row.check() for row in rows)
    # A patch of an image meets its files when the derived image is built, which the judge does.
    later = options.judge and loaded is not None and loaded.recipe.tree is None
    error = _refusal(rows[0], key) if options.recipe and not rows[0].good and not later else None
    outcome = Outcome(result, "\n".join(lines), checks, error=error, told=True)
    if loaded and options.judge and error is None:
        from bakehouse.commands import patch_judge  # it brings in all of `serve`

        how = patch_judge.How(allow, options.set_, options.accept_memory_risk)
        return patch_judge.judge_pinned(ctx, loaded, made, how, outcome)
    return outcome


def read_wish(ctx: Context, options: Options, loaded: Loaded | None = None) -> Wish:
    """Which patch the flags mean. Raises UsageError."""
    kinds: tuple[Kind, ...] = ("pr", "url", "file", "commit")
    given: list[tuple[Kind, str]] = [(k, v) for k in kinds if (v := str(getattr(options, k)))]
    if len(given) != 1:
        what = "no patch is named" if not given else "several patches are named"
        raise UsageError(what, hint="exactly one of --pr N, --url, --commit and --file PATH")
    (kind, what) = given[0]
    if kind == "pr" and not (what.isascii() and what.isdigit() and 0 < int(what) < 2**31):
        raise UsageError(f"--pr takes a number, not '{clean(what, one_line=True)}'")
    if kind == "commit" and not FULL_COMMIT.fullmatch(what):
        raise UsageError(
            f"--commit takes all 40 hex digits, not '{clean(what, one_line=True)}'",
            hint="a short id may come to mean another commit",
        )
    repo = options.repo or UPSTREAM[loaded.recipe.engine if loaded else "llama.cpp"]
    if not matches_repo(repo):
        raise UsageError(f"--repo takes OWNER/NAME, not '{clean(repo, one_line=True)}'")
    number = str(int(what)) if kind == "pr" else what
    return Wish(kind, number, repo).known(host_of(ctx.environment))


def _recipes(ctx: Context, engine: str) -> list[Loaded | Tried]:
    """Every recipe of an engine; those with faults are unknown, never left out."""
    found: list[Loaded | Tried] = []
    for name in names(ctx.recipes):
        try:
            loaded = load(find(name, ctx.recipes))
        except RecipeError as error:
            found.append(Tried(name, "", None, error.what))
            continue
        if loaded.recipe.engine == engine:
            found.append(loaded)
    return found


_HOW = {
    "new": "pinned",
    "same": "pinned before, the same now",
    "moved": "moved, pinned anew",
    "offline": "pinned before, not compared",
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
        f"head      {manifest.head or 'not known'}",
        f"base      {manifest.base or 'not known'}",
        f"diff      {counts(parts)}, {len(made.data):,} bytes",
        f"sha256    {manifest.sha256}",
        *(", ".join((f"file      {f.path} +{f.added} -{f.removed}", *beside.get(f.path, ())))
          for f in manifest.files),
        *([f"upstream  {manifest.upstream}"] if manifest.upstream else []),
        *(["standing  experimental"] if manifest.experimental else []),
        *(f"verdict   {v.word}: {v.recipe} at {v.base[:12]}, {v.date}" for v in manifest.verdicts
          if v.sha256 == manifest.sha256),
        *(f"moved     {change}" for change in made.changes),
        *(f"note      {note}" for note in made.notes),
        f"manifest  {shown(made.path)}",
    ]  # fmt: skip
    if not dry and "://" not in manifest.source and not manifest.vendored:
        lines.append(
            "note      only this machine's cache has the diff: --vendor keeps it beside it"
        )
    return lines


def _result(made: Pinned, rows: Sequence[Tried]) -> dict[str, Any]:
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


def _refusal(row: Tried, key: str) -> BakehouseError:
    """Why a patch does not go with the one recipe that was named."""
    if row.fit is None:
        return HostError(
            f"whether patch {key} applies to recipe {row.recipe} is not known: {row.why}",
            where=row.recipe, hint=f"run 'invoke fetch --recipe {row.recipe}' first; for an image, "
            "--judge builds the derived one, and tells",
            id="patch-not-tried",
        )  # fmt: skip
    loose = row.word in ("applies with offset", "applies with fuzz")
    need = row.word.rpartition(" ")[2]
    return PatchError(
        f"patch {key} on recipe {row.recipe}: {row.word}",
        where="\n".join((f"at {row.base}", *row.fit.notes)),
        hint=f"look at where it lands, then allow it with --allow {need}" if loose
        else "make it anew against that commit, or move the recipe's pin to one that it fits",
        id=f"patch-{need if loose else row.word.replace(' ', '-')}",
    )  # fmt: skip
