"""Patches added or dropped for one run: in the digest and on record, not in the lock file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

from bakehouse.context import Context
from bakehouse.errors import LockError, NotFound, UsageError
from bakehouse.lock import Lock
from bakehouse.patches import pin as pinned
from bakehouse.patches.manifest import Fit, manifest_path, patches_folder, read_manifest
from bakehouse.recipe.loader import LoadedRecipe, load
from bakehouse.recipe.models import UPSTREAM, Patch
from bakehouse.redact import clean
from bakehouse.resolver import ensure_lock, wants

if TYPE_CHECKING:
    from bakehouse.runs.store import Run

_NAME = re.compile(r"(?:([\w.-]+/[\w.-]+)#)?([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


class Flags(Protocol):
    """A task's options about patches."""

    @property
    def patch(self) -> tuple[str, ...]:
        """Patches to add for this run."""

    @property
    def no_patch(self) -> tuple[str, ...]:
        """Patches to drop for this run."""

    @property
    def allow(self) -> str:
        """How loosely added ones may fit."""


@dataclass(frozen=True)
class PatchOverrides:
    """Patches that a run's flags add and drop; true if there are any."""

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    allow: Fit = "exact"

    def __bool__(self) -> bool:
        return bool(self.add or self.drop)

    def change(self, ctx: Context) -> Callable[[LoadedRecipe], LoadedRecipe]:
        """Return the function that changes a recipe's patches for this run."""
        return lambda loaded: _changed(ctx, loaded, self)


def parse_overrides(flags: Flags) -> PatchOverrides:
    """Read a task's flags about patches. Raises UsageError."""
    for name in (*flags.patch, *flags.no_patch):
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{clean(name, one_line=True)}' is not the name of a patch",
                hint="a pull request's number, as in --patch 25144, or OWNER/NAME#ID",
            )
    if both := set(flags.patch) & set(flags.no_patch):
        raise UsageError(
            f"--patch and --no-patch both name {min(both)}", hint="give only one of them"
        )
    if flags.allow and not flags.patch:
        raise UsageError(
            "--allow needs --patch",
            hint="a recipe's own patches have a key for it: allow: offset",
        )
    return PatchOverrides(flags.patch, flags.no_patch, parse_allow(flags.allow))


def parse_allow(text: str) -> Fit:
    """Read how loosely a patch may fit. Raises UsageError."""
    choices: tuple[Fit, ...] = get_args(Fit)
    for choice in choices:
        if text in (choice, ""):
            return choice
    raise UsageError(f"--allow takes offset or fuzz, not '{clean(text, one_line=True)}'")


def _changed(ctx: Context, loaded: LoadedRecipe, want: PatchOverrides) -> LoadedRecipe:
    recipe = loaded.recipe
    if not want:
        return loaded
    patches = list(recipe.patches)
    for name in want.drop:
        patches.remove(_listed(patches, name, recipe.engine, recipe.name))
    for name in want.add:
        made = _added(ctx, name, recipe.engine, want.allow)
        if any(p.key(recipe.engine) == made.key(recipe.engine) for p in patches):
            ctx.progress.say(f"patch {name} is already applied")
        else:
            patches.append(made)
    return dataclasses.replace(loaded, recipe=recipe.with_patches(tuple(patches)))


def _listed(patches: Sequence[Patch], name: str, engine: str, recipe: str) -> Patch:
    """Find a recipe's patch by name. Raises UsageError."""

    def names(patch: Patch) -> set[str]:
        if patch.file:
            return {patch.file, Path(patch.file).name, Path(patch.file).stem}
        return {patch.key(engine), str(patch.pinned_id)}

    found = [patch for patch in patches if name in names(patch)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(patch.key(engine) for patch in patches) or "none"
    what = "several patches of that name" if found else f"no patch '{name}'"
    raise UsageError(f"recipe {recipe} has {what}", hint=f"its patches: {there}")


def _added(ctx: Context, name: str, engine: str, allow: Fit) -> Patch:
    """A recipe's entry for a pinned patch. Raises NotFound, RecipeError."""
    repo, _, ident = name.rpartition("#")
    repo = repo or UPSTREAM[engine]
    manifest = read_manifest(manifest_path(patches_folder(ctx.recipes), repo, ident))
    which = {"pr": manifest.pr} if manifest.pr is not None else {"id": manifest.id}
    own = None if repo == UPSTREAM[engine] else repo
    return Patch(**which, repo=own, lifts=manifest.lifts, allow=allow)


def ensure(
    ctx: Context,
    loaded: LoadedRecipe,
    want: PatchOverrides,
    overrides: Sequence[str] = (),
    *,
    locked: bool = False,
    fetch: bool = True,
) -> Lock:
    """Return the lock of a run: the recipe's own, or one made from it that is not written.

    `loaded` is the recipe as it is run. Without `fetch` the source must be on this machine if
    patches are added or dropped. Raises as `ensure_lock` does, and PatchError.
    """
    pinned.require_manifests(ctx, loaded)
    if not want:
        return ensure_lock(ctx, loaded, locked=locked)
    # Imported here because most plans need none of these.
    from bakehouse.patches.apply import pin_patches
    from bakehouse.patches.source_tree import ensure_source, patched_tree, source_is_here
    from bakehouse.system.git import Git

    base = load(loaded.path, overrides)
    lock = ensure_lock(ctx, base, locked=locked)
    recipe, source, tree = loaded.recipe, lock.source, lock.source_tree
    git = Git(ctx.processes, ctx.environment)
    if source is not None and not fetch and not source_is_here(ctx, git, source):
        raise LockError(
            "the source is not on this machine, so patches cannot be added or dropped",
            where=str(loaded.path),
            hint=f"run 'invoke fetch --recipe {recipe.name}' first",
            id="source-missing",
        )
    pins = pin_patches(ctx, loaded.folder, recipe.patches, recipe.engine)
    pins = tuple(pin.model_copy(update={"base": lock.base}) for pin in pins)
    if source is not None:
        ensure_source(ctx, git, source)
        tree = patched_tree(ctx, git, source, pins)
    changed = {"patches": pins, "source_tree": tree, "wants": wants(recipe)}
    return lock.model_copy(update=changed)


def describe_mismatch(ctx: Context, record: str | None, loaded: LoadedRecipe) -> str | None:
    """Describe how a running server's patches differ from the recipe's; None if they do not.

    `record` is the folder of the run that started it; `loaded` has the flags' patches already.
    """
    from bakehouse.runs.store import read_record

    recipe = loaded.recipe
    wanted = {patch.key(recipe.engine) for patch in recipe.patches}
    try:
        kept = read_record(ctx.places, Path(record).name) if record else None
    except NotFound:
        kept = None
    if kept is None:
        names = ", ".join(sorted(wanted))
        return f"the server's record is gone: unknown if it has patch {names}" if names else None
    applied = kept.facts.get("patches", {}).get("applied", ())
    has = {str(one["id"]) for one in applied}
    differ = [
        *(f"without patch {name}" for name in sorted(wanted - has)),
        *(f"with patch {name}" for name in sorted(has - wanted)),
    ]
    if not differ:
        return None
    return f"the running server was started {', '.join(differ)}: it is judged as it is"


def record_patches(want: PatchOverrides, lock: Lock, record: Run) -> None:
    """Record the patches of a run, and which its flags added or dropped."""
    if not lock.patches and not want:
        return
    fact = {
        "applied": [
            {"id": pin.file.path, "sha256": pin.file.sha256, "base": pin.base, "head": pin.head,
             "allow": pin.allow}
            for pin in lock.patches
        ],
        "added_for_this_run": list(want.add),
        "left_out_of_this_run": list(want.drop),
    }  # fmt: skip
    record.fact("patches", fact)
