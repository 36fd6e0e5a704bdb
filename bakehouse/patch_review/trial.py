"""Try a patch on the sources of recipes, never in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, PatchError
from bakehouse.lock import ArchivePin, GitPin
from bakehouse.models import Check, check
from bakehouse.patches.apply import (
    ApplyResult,
    apply_patches,
    fit_hint,
    fit_id,
    loose_fit,
    pin_patches,
    try_apply,
)
from bakehouse.patches.manifest import Fit as Allowed
from bakehouse.patches.source_tree import repository_of
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import UPSTREAM, Recipe
from bakehouse.system.git import Git


@dataclass(frozen=True)
class TrialResult:
    """How a patch fits one recipe; `fit` is None if that is unknown, and `why` says why."""

    recipe: str
    base: str
    """The commit (or, of an archive, the tree) it was tried on; empty if unknown."""
    fit: ApplyResult | None
    why: str = ""
    allow: Allowed = "exact"

    @property
    def word(self) -> str:
        """The result in a word."""
        return self.fit.word if self.fit else "unknown"

    @property
    def good(self) -> bool:
        """Whether it applies as loosely as is allowed."""
        return self.fit is not None and self.fit.good(self.allow)

    def check(self) -> Check:
        """Return the result as a check."""
        seen = "; ".join((self.fit.word, *self.fit.notes[:1])) if self.fit else None
        where = f"{self.recipe} at {self.base[:12]}" if self.base else self.recipe
        expected = "applies" if self.allow == "exact" else f"applies, {self.allow} allowed"
        if self.fit is None:
            where = f"{where}: {self.why}"
        return check(f"patch.{self.recipe}", expected, seen, where, ok=self.good)

    def lines(self, name_width: int, word_width: int) -> list[str]:
        """Return the result as a table row, and its notes."""
        tail = f"  at {self.base[:12]}" if self.fit else f"  {self.why}"
        if loose_fit(self.word) and not self.good:
            tail += "  (refused unless allowed)"
        row = f"{self.recipe:{name_width}}  {self.word:{word_width}}{tail}"
        return [row, *(f"    {note}" for note in (self.fit.notes if self.fit else ()))]

    def error(self, key: str) -> BakehouseError:
        """The error for a patch that does not go with the one recipe that was named."""
        if self.fit is None:
            return HostError(
                f"cannot tell whether patch {key} applies to recipe {self.recipe}: {self.why}",
                where=self.recipe, id="patch-not-tried",
                hint=f"run 'invoke fetch --recipe {self.recipe}' first; for an image, --judge "
                "builds the derived one and thereby tries the patch",
            )  # fmt: skip
        return PatchError(
            f"patch {key} on recipe {self.recipe}: {self.word}",
            where="\n".join((f"at {self.base}", *self.fit.notes)),
            hint=fit_hint(self.fit), id=fit_id(self.fit),
        )  # fmt: skip


def table(rows: Sequence[TrialResult]) -> list[str]:
    """Return the results of several recipes as a table."""
    widths = [max((len(text) for text in column), default=0)
              for column in ([r.recipe for r in rows], [r.word for r in rows])]  # fmt: skip
    return [line for row in rows for line in row.lines(*widths)]


def engine_of(repo: str) -> str:
    """The engine whose upstream repository, or a fork of the same name, this is."""
    name = repo.rpartition("/")[2]
    return next((e for e, up in UPSTREAM.items() if up.endswith(f"/{name}")), "llama.cpp")


class PatchTrial:
    """One patch, tried on the sources of any number of recipes; the same source is tried once.

    `key` is its name in a lock, `OWNER/NAME#ID`.
    """

    def __init__(self, ctx: Context, key: str, data: bytes, *, allow: Allowed) -> None:
        self._ctx = ctx
        self._git = Git(ctx.processes, ctx.environment)
        self._key = key
        self._data = data
        self._allow: Allowed = allow
        self._fits: dict[tuple[str, ...], ApplyResult] = {}

    def allowed(self, recipe: Recipe) -> Allowed:
        """How loosely it may fit: by the flag, else by the recipe's own entry of it."""
        place = self._place(recipe)
        return (
            self._allow if place is None or self._allow != "exact" else recipe.patches[place].allow
        )

    def _place(self, recipe: Recipe) -> int | None:
        keys = [patch.key(recipe.engine) for patch in recipe.patches]
        return keys.index(self._key) if self._key in keys else None

    def apply_to(self, loaded: LoadedRecipe, source: GitPin | ArchivePin) -> TrialResult:
        """Try it on a source that is on this machine, after the patches before it in the recipe.

        If those do not apply, or the patch is invalid, the result is unknown, with the reason.
        """
        recipe, allow = loaded.recipe, self.allowed(loaded.recipe)
        base = source.commit if isinstance(source, GitPin) else source.tree
        try:
            pins = pin_patches(
                self._ctx, loaded.folder, recipe.patches[: self._place(recipe)], recipe.engine
            )
            known = (base, *(f"{pin.file.sha256} {pin.allow}" for pin in pins))
            if known not in self._fits:
                repository = repository_of(self._ctx.places, source)
                tree = apply_patches(self._ctx, self._git, repository, source.tree, pins)
                self._fits[known] = try_apply(self._git, repository, tree, self._data, self._key)
        except BakehouseError as error:
            return TrialResult(recipe.name, base, None, error.what, allow)
        return TrialResult(recipe.name, base, self._fits[known], allow=allow)
