"""A recipe's entry for a patch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.fields import Hub, PatchId, Sha256
from bakehouse.recipe.scalars import Filled, Misplaced, Whole

UPSTREAM = {"llama.cpp": "ggml-org/llama.cpp", "vllm": "vllm-project/vllm"}
"""The upstream repository of each engine."""


class Patch(Frozen):
    """A patch: a `file`, or one that is pinned in `patches/`, by its `pr` number or `id`."""

    file: Filled | None = None
    """A diff, relative to the recipe."""
    pr: Annotated[Whole, Field(ge=1)] | None = None
    """A pull request that `invoke patch --pr` pinned."""
    id: PatchId | None = None
    """Another patch that `invoke patch` pinned."""
    repo: Hub | None = None
    """The repository of `pr` or `id`, `OWNER/NAME`; by default the engine's upstream."""
    sha256: Sha256 | None = None
    """Of the diff."""
    lifts: tuple[Filled, ...] = ()
    """Ids of rules that the patch makes obsolete; only an experimental recipe may rely on it. The
    manifest of a pinned patch has to say so too."""
    allow: Literal["exact", "offset", "fuzz"] = "exact"
    """How loosely it may fit: where its hunks say, elsewhere in the file, with less context."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(o is not None for o in (self.file, self.pr, self.id)) != 1:
            raise Misplaced("give exactly one of file, pr and id")
        if self.repo and self.file:
            raise Misplaced("repo belongs to pr and id", "repo")
        return self

    @property
    def pinned_id(self) -> str | None:
        """Its id among pinned patches; None for a file."""
        return str(self.pr) if self.pr is not None else self.id

    def key(self, engine: str) -> str:
        """Its name in a lock: the file's path, or `OWNER/NAME#ID`."""
        if self.file:
            return self.file
        return f"{self.repo or UPSTREAM[engine]}#{self.pinned_id}"
