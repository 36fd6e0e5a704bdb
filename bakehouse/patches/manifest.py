"""Types of a patch manifest, `patches/OWNER/NAME/ID.yaml`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.fields import Hub, InnerPath, PatchId, Sha256
from bakehouse.recipe.gate import SuiteName
from bakehouse.recipe.scalars import Anything, Filled, Flag, Misplaced, Number, Text, Whole

Commit = Annotated[Text, Field(pattern=r"^[0-9a-f]{40}$")]
Count = Annotated[Whole, Field(ge=0)]
Fit = Literal["exact", "offset", "fuzz"]
"""How loosely a patch may fit: at its line numbers, elsewhere, with less context."""
Word = Literal["clean", "experimental", "harmful", "no effect"]
PINNED: Final = "pinned"
NOT_PINNED: Final = "not pinned yet"


class TouchedFile(Frozen):
    """One file that a diff changes, and the number of lines added and removed."""

    path: Filled
    added: Count = 0
    removed: Count = 0


class Shape(Frozen):
    """The size of a diff that nobody has fetched yet; the first fetch is compared with it."""

    files: Count
    added: Count
    removed: Count

    def __str__(self) -> str:
        """Describe it: `2 files, +16 -6`."""
        return f"{self.files} file{'s' * (self.files != 1)}, +{self.added} -{self.removed}"


class LogPattern(Frozen):
    """A regular expression over log lines, and how many lines it may or must match.

    It is searched for in the first 4,096 characters of each line.
    """

    pattern: Filled
    least: Count | None = None
    """Lines at least. Without either bound: one in `must_appear`, none in `must_not_appear`."""
    most: Count | None = None
    """Lines at most."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise Misplaced(f"'{self.pattern}' is not a regular expression: {error}", "pattern",
                            about=("pattern",)) from error  # fmt: skip
        if self.least is not None and self.most is not None and self.least > self.most:
            raise Misplaced(f"least {self.least} is above most {self.most}", "least",
                            about=("least", "most"))  # fmt: skip
        return self


class Acceptance(Frozen):
    """Bounds on the share of drafted tokens that the model accepts, from 0 to 1."""

    least: Annotated[Number, Field(ge=0, le=1)] | None = None
    most: Annotated[Number, Field(ge=0, le=1)] | None = None


class Expect(Frozen):
    """What is expected of a server with the patch."""

    must_appear: tuple[LogPattern, ...] = ()
    must_not_appear: tuple[LogPattern, ...] = ()
    acceptance: Acceptance | None = None
    suites: tuple[SuiteName, ...] = ()
    """Suites that must pass, in addition to the recipe's."""
    speed: Annotated[Number, Field(gt=0)] | None = None
    """Smallest share of the unpatched server's decode speed, by default 0.9; above 1, the gain that
    the patch is for."""
    answers_may_differ: Flag = False
    """If false, answers at temperature 0 must be word for word those without the patch."""


class PatchVerdict(Frozen):
    """The verdict on a patch with one recipe at one base."""

    recipe: Filled
    base: Filled
    """The commit (or, of an archive, the tree) it was applied to."""
    sha256: Sha256
    """Of the diff that was judged; the verdict does not count for another one."""
    word: Word
    reasons: tuple[Text, ...] = ()
    evidence: dict[str, Anything] = {}
    date: Filled


class Manifest(Frozen):
    """A patch, pinned or not yet. Files are written with their keys in this order."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    id: PatchId
    """The number of a pull request, or a name."""
    pr: Annotated[Whole, Field(ge=1)] | None = None
    repo: Hub
    """`OWNER/NAME` of its upstream."""
    title: Text = ""
    source: Filled
    """URL of the pull request, commit or diff, or a path."""
    status: Literal["pinned", "not pinned yet"] = NOT_PINNED
    upstream: Text = ""
    """Its state upstream: open, held, merged."""
    head: Commit | None = None
    """The pull request's head commit when it was pinned."""
    base: Commit | None = None
    """The commit it starts from."""
    sha256: Sha256 | None = None
    """Of the diff."""
    size: Count | None = None
    """Bytes of the diff."""
    files: tuple[TouchedFile, ...] = ()
    known: Shape | None = None
    date: Text | None = None
    """When it was pinned, ISO 8601, UTC."""
    vendored: InnerPath | None = None
    """File name of the diff beside this file."""
    lifts: tuple[Filled, ...] = ()
    """Ids of known-bad rules that it makes obsolete."""
    experimental: Flag = False
    """Whether it is known to be unsound, with or without a verdict."""
    notes: Text = ""
    expect: Expect = Expect()
    verdicts: tuple[PatchVerdict, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = {"sha256": self.sha256, "size": self.size, "date": self.date}
        if self.status == PINNED and (missing := [k for k, v in needed.items() if v is None]):
            raise Misplaced(f"a pinned patch needs {', '.join(missing)}", "status",
                            about=("status", *needed))  # fmt: skip
        if self.status != PINNED and (given := [k for k, v in needed.items() if v is not None]):
            raise Misplaced(f"{', '.join(given)} belong to a pinned patch", "status",
                            about=("status", *needed))  # fmt: skip
        if self.pr is not None and self.id != str(self.pr):
            raise Misplaced("the id of a pull request is its number", "id", about=("id", "pr"))
        return self

    @property
    def pinned(self) -> bool:
        """Whether its content is pinned by a hash."""
        return self.status == PINNED

    @property
    def name(self) -> str:
        """`ggml-org/llama.cpp#25144`."""
        return f"{self.repo}#{self.id}"

    def verdict(self, recipe: str, base: str) -> PatchVerdict | None:
        """Return the latest verdict on this diff with a recipe at a base; None without one."""
        fitting = [
            v for v in self.verdicts
            if (v.recipe, v.base, v.sha256) == (recipe, base, self.sha256)
        ]  # fmt: skip
        return fitting[-1] if fitting else None

    def with_verdict(self, verdict: PatchVerdict) -> Manifest:
        """Return a copy with this verdict, which replaces one of the same recipe and base."""
        same = (verdict.recipe, verdict.base)
        others = tuple(v for v in self.verdicts if (v.recipe, v.base) != same)
        return self.changed(verdicts=(*others, verdict))

    def changed(self, **values: Any) -> Manifest:
        """Return a validated copy with other values."""
        data = {name: getattr(self, name) for name in type(self).model_fields}
        return Manifest.model_validate({**data, **values})
