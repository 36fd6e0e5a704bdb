"""Patches for one run: added or left out by flags; in the digest, on record, in no lock file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from bakehouse.context import Context
from bakehouse.errors import LockError, NotFound, UsageError
from bakehouse.lock import Lock
from bakehouse.patches.manifest import Fit
from bakehouse.preflight import pinned
from bakehouse.recipe.load import Loaded, load
from bakehouse.recipe.patches import UPSTREAM, Patch
from bakehouse.redact import clean
from bakehouse.resolve import ensure_lock, wants
from bakehouse.sources.manifests import manifest_path, patches_folder, read_manifest

_NAME = re.compile(r"(?:([\w.-]+/[\w.-]+)#)?([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


class Flags(Protocol):
    """A task's options, as far as they are about patches."""

    @property
    def patch(self) -> tuple[str, ...]:
        """Added for this run."""

    @property
    def no_patch(self) -> tuple[str, ...]:
        """Left out of this run."""

    @property
    def allow(self) -> str:
        """How loosely those that are added may fit."""


class Facts(Protocol):
    """What a record takes in."""

    def fact(self, name: str, value: object) -> None:
        """Record something seen."""


@dataclass(frozen=True)
class Asked:
    """What a run's flags say about patches; true where they say anything."""

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    allow: Fit = "exact"

    def __bool__(self) -> bool:
        return bool(self.add or self.drop)

    def change(self, ctx: Context) -> Callable[[Loaded], Loaded]:
        """Give what makes of a recipe the one of this run."""
        return lambda loaded: _changed(ctx, loaded, self)


def asked(flags: Flags) -> Asked:
    """Read a task's flags. Raises UsageError."""
    for name in (*flags.patch, *flags.no_patch):
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"'{clean(name, one_line=True)}' names no patch",
                hint="a pull request's number, as in --patch 25144, or OWNER/NAME#ID",
            )
    if both := set(flags.patch) & set(flags.no_patch):
        raise UsageError(f"--patch and --no-patch both name {min(both)}", hint="say one of them")
    if flags.allow and not flags.patch:
        raise UsageError(
            "--allow is about --patch, and there is none",
            hint="a recipe's own patches say it themselves: allow: offset",
        )
    return Asked(flags.patch, flags.no_patch, parse_allow(flags.allow))


def parse_allow(text: str) -> Fit:
    """Read how loosely a patch may fit. Raises UsageError."""
    choices: dict[str, Literal["exact", "offset", "fuzz"]] = {
        "": "exact", "exact": "exact", "offset": "offset", "fuzz": "fuzz",
    }  # fmt: skip
    if text not in choices:
        raise UsageError(f"--allow takes offset or fuzz, not '{clean(text, one_line=True)}'")
    return choices[text]


def _changed(ctx: Context, loaded: Loaded, want: Asked) -> Loaded:
    recipe = loaded.recipe
    if not want:
        return loaded
    patches = list(recipe.patches)
    for name in want.drop:
        patches.remove(_listed(patches, name, recipe.engine, recipe.name))
    for name in want.add:
        made = _added(ctx, name, recipe.engine, want.allow)
        if any(p.key(recipe.engine) == made.key(recipe.engine) for p in patches):
            ctx.progress.say(f"patch {name} is there already")
        else:
            patches.append(made)
    return dataclasses.replace(loaded, recipe=recipe.with_patches(tuple(patches)))


def _listed(patches: Sequence[Patch], name: str, engine: str, recipe: str) -> Patch:
    """The recipe's patch that a name means. Raises UsageError."""

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
    loaded: Loaded,
    want: Asked,
    overrides: Sequence[str] = (),
    *,
    locked: bool = False,
    fetch: bool = True,
) -> Lock:
    """Give the lock of a run: the recipe's own, or one that is made of it and written nowhere.

    `loaded` is the recipe as it is run. Without `fetch` the source has to be here where patches
    are added or left out. Raises as `ensure_lock` does, and PatchError.
    """
    pinned.require(ctx, loaded)
    if not want:
        return ensure_lock(ctx, loaded, locked=locked)
    # Imported here because a plan passes through this module and mostly needs none of these.
    from bakehouse.ports.git import Git
    from bakehouse.sources.patches import pin_patches
    from bakehouse.sources.tree import ensure_source, patched_tree, source_is_here

    base = load(loaded.path, overrides)
    lock = ensure_lock(ctx, base, locked=locked)
    recipe, source, tree = loaded.recipe, lock.source, lock.source_tree
    git = Git(ctx.processes, ctx.environment)
    if source is not None and not fetch and not source_is_here(ctx, git, source):
        raise LockError(
            "the source is not on this machine, so what other patches make of it is not known",
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


def unlike(ctx: Context, record: str | None, loaded: Loaded) -> str | None:
    """Say in which patches a running server is not the recipe as it is asked for; None for none.

    `record` is the folder of the run that served it; `loaded` is changed by the flags already.
    """
    from bakehouse.records.store import read_record  # only who judges a running server asks

    recipe = loaded.recipe
    wanted = {patch.key(recipe.engine) for patch in recipe.patches}
    try:
        kept = read_record(ctx.places, Path(record).name) if record else None
    except NotFound:
        kept = None
    if kept is None:
        lost = f"the server's record is gone: whether it has patch {', '.join(sorted(wanted))} is "
        return f"{lost}not known" if wanted else None
    applied = kept.facts.get("patches", {}).get("applied", ())
    has = {str(one["id"]) for one in applied}
    said = [
        *(f"without patch {name}" for name in sorted(wanted - has)),
        *(f"with patch {name}" for name in sorted(has - wanted)),
    ]
    if not said:
        return None
    return f"the server that runs was served {', '.join(said)}: it is judged as it is"


def note(want: Asked, lock: Lock, record: Facts) -> None:
    """Put on record which patches the run has, and which of them only this run's flags brought."""
    if not lock.patches and not want:
        return
    fact: dict[str, Any] = {
        "applied": [
            {"id": pin.file.path, "sha256": pin.file.sha256, "base": pin.base, "head": pin.head,
             "allow": pin.allow}
            for pin in lock.patches
        ],
        "added_for_this_run": list(want.add),
        "left_out_of_this_run": list(want.drop),
    }  # fmt: skip
    record.fact("patches", fact)
