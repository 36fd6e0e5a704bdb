"""A patch tried on the sources of recipes: how it fits each, never in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.errors import BakehouseError
from bakehouse.lock import ArchivePin, GitPin
from bakehouse.patches.manifest import Fit as Allowed
from bakehouse.ports.git import Git
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import FULL_COMMIT, Source
from bakehouse.recipe.patches import UPSTREAM, Patch
from bakehouse.resolve import lock_path, read_lock
from bakehouse.sources import archive, gitpin
from bakehouse.sources.drift import source_drift
from bakehouse.sources.fitting import Fit, try_patch
from bakehouse.sources.mirror import commit_is_ready, mirror_folder
from bakehouse.sources.patches import apply_patches, pin_patches
from bakehouse.sources.tree import ensure_source, repository_of, source_is_here

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Tried:
    """How a patch fits one recipe; where `fit` is None that is not known, and `why` says why."""

    recipe: str
    base: str
    fit: Fit | None
    why: str = ""
    allow: Allowed = "exact"

    @property
    def word(self) -> str:
        """The result in a word."""
        return self.fit.word if self.fit else UNKNOWN

    @property
    def good(self) -> bool:
        """Whether it applies, as loosely as is allowed."""
        return self.fit is not None and self.fit.good(self.allow)

    def check(self) -> Check:
        """The same as a check."""
        seen = "; ".join((self.fit.word, *self.fit.notes[:1])) if self.fit else None
        where = f"{self.recipe} at {self.base[:12]}" if self.base else self.recipe
        expected = "applies" if self.allow == "exact" else f"applies, {self.allow} allowed"
        if self.fit is None:
            where = f"{where}: {self.why}"
        return check(f"patch.{self.recipe}", expected, seen, where, ok=self.good)


def engine_of(repo: str) -> str:
    """The engine that a repository, or a fork of it by the same name, is the source of."""
    name = repo.rpartition("/")[2]
    return next((e for e, up in UPSTREAM.items() if up.endswith(f"/{name}")), "llama.cpp")


class Trials:
    """One patch, tried on the sources of any number of recipes; each source is looked at once.

    `key` is how a lock would name the patch. With `fetch` a source that is not here is fetched;
    without, the result is unknown.
    """

    def __init__(self, ctx: Context, key: str, data: bytes, *, allow: Allowed, fetch: bool) -> None:
        self._ctx = ctx
        self._git = Git(ctx.processes, ctx.environment)
        self._key = key
        self._data = data
        self._allow: Allowed = allow
        self._fetch = fetch
        self._here: dict[str, bool] = {}
        self._fits: dict[tuple[str, ...], Fit] = {}

    def on(self, loaded: Loaded) -> Tried:
        """Try it after the recipe's own patches that come before it.

        Raises PatchError for what is no patch at all.
        """
        recipe = loaded.recipe
        before, own = _before(recipe.patches, self._key, recipe.engine)
        allow = own.allow if own and self._allow == "exact" else self._allow
        base = ""
        try:
            source = self._source(loaded)
            if isinstance(source, str):
                return Tried(recipe.name, "", None, source, allow)
            base = base_of(source)
            pins = pin_patches(self._ctx, loaded.folder, before, recipe.engine)
            known = (base, *(f"{pin.file.sha256} {pin.allow}" for pin in pins))
            if known not in self._fits:
                repository = repository_of(self._ctx.places, source)
                tree = apply_patches(self._ctx, self._git, repository, source.tree, pins)
                fit = try_patch(self._git, repository, tree, self._data, self._key)
                self._fits[known] = fit
        except BakehouseError as error:
            return Tried(recipe.name, base, None, error.what, allow)
        return Tried(recipe.name, base, self._fits[known], allow=allow)

    def _source(self, loaded: Loaded) -> GitPin | ArchivePin | str:
        """The source at the recipe's pinned commit, here; or why it is not."""
        ctx, wanted = self._ctx, loaded.recipe.tree
        if wanted is None:
            return "it runs an image: a patch becomes a layer of a derived one"
        lock = read_lock(lock_path(loaded.path))
        pin = lock.source if lock and not source_drift(loaded.recipe, lock) else None
        if pin is None and self._fetch:
            if wanted.archive:
                return archive.pin_archive(ctx, self._git, wanted.archive, loaded.folder)
            return gitpin.pin_git(ctx, self._git, wanted)
        if pin is None:
            return _without_lock(ctx, self._git, wanted)
        if self._fetch:
            ensure_source(ctx, self._git, pin)
            return pin
        base = base_of(pin)
        if base not in self._here:
            self._here[base] = source_is_here(ctx, self._git, pin)
        return pin if self._here[base] else "its source is not on this machine"


def base_of(source: GitPin | ArchivePin) -> str:
    """What a patch is applied to: a commit, or the tree of an archive."""
    return source.commit if isinstance(source, GitPin) else source.tree


def _before(
    patches: Sequence[Patch], key: str, engine: str
) -> tuple[tuple[Patch, ...], Patch | None]:
    """The patches that come before this one, and the recipe's own entry of it."""
    for place, patch in enumerate(patches):
        if patch.key(engine) == key:
            return tuple(patches[:place]), patch
    return tuple(patches), None


def _without_lock(ctx: Context, git: Git, wanted: Source) -> GitPin | str:
    """A git source whose commit is written out and already here."""
    if wanted.git and wanted.commit and FULL_COMMIT.fullmatch(wanted.commit):
        mirror = mirror_folder(ctx.places, wanted.git)
        if commit_is_ready(git, mirror, wanted.commit):
            tree = git.object_id(mirror, f"{wanted.commit}^{{tree}}")
            return GitPin(url=wanted.git, commit=wanted.commit, tree=tree, date=0)
    return "its source is not on this machine, and it has no lock"


def table(rows: Sequence[Tried]) -> list[str]:
    """How a patch fits each recipe, for people."""
    width = max((len(row.recipe) for row in rows), default=0)
    words = max((len(row.word) for row in rows), default=0)
    lines = []
    for row in rows:
        note = "" if row.good or row.fit is None else "  (refused unless allowed)"
        note = note if row.word in ("applies with offset", "applies with fuzz") else ""
        tail = f"  {row.why}" if row.fit is None else f"  at {row.base[:12]}{note}"
        lines.append(f"{row.recipe:{width}}  {row.word:{words}}{tail}")
        lines += [f"    {line}" for line in (row.fit.notes if row.fit else ())]
    return lines
