"""Patch manifests: types, reading and writing."""

from __future__ import annotations

import io
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from bakehouse.errors import Fault, HostError, NotFound, RecipeError
from bakehouse.models import Frozen
from bakehouse.recipe.document import KeyPath, Unreadable, compose, flatten
from bakehouse.recipe.loader import Places, message_of
from bakehouse.recipe.models import SuiteName
from bakehouse.recipe.types import (
    Anything,
    Filled,
    Flag,
    Hub,
    InnerPath,
    Misplaced,
    Number,
    Origin,
    PatchId,
    Sha256,
    Text,
    Whole,
    dotted,
    shown,
)
from bakehouse.util.files import write_atomic
from bakehouse.util.text import did_you_mean

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


MAX_BYTES = 2**20
SUFFIX = ".yaml"


def patches_folder(recipes: Path) -> Path:
    """Folder of the manifests: `patches/` beside the folder of recipes."""
    return recipes.parent / "patches"


def manifest_path(folder: Path, repo: str, id: str) -> Path:  # noqa: A002 - the manifest's key
    """Path of a manifest: `OWNER/NAME/ID.yaml` below the folder of patches."""
    return folder / repo / f"{id}{SUFFIX}"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises NotFound; RecipeError with every fault, as `file:line:column`."""
    name, unreadable = shown(path), "cannot read the patch manifest"
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block for ever
            raise RecipeError(unreadable, [Fault(name, 0, 0, "it is not a regular file")])
        raw = path.read_bytes()
    except FileNotFoundError:
        hint = "'invoke patch --pr NUMBER' fetches a pull request and writes its manifest"
        raise NotFound.named(
            "patch", path.stem, where=name, hint=hint, id="patch-unknown"
        ) from None
    except OSError as error:
        raise RecipeError(unreadable, [Fault(name, 0, 0, str(error.strerror))]) from error
    faults: list[Fault] = []
    found = _parse(name, raw, faults)
    if found is None or faults:
        count = "a fault" if len(set(faults)) == 1 else f"{len(set(faults))} faults"
        raise RecipeError(f"the patch manifest {name} has {count}", faults)
    right = manifest_path(path.parents[2], found.repo, found.id)
    if path.absolute() != right.absolute():
        what = f"this is the manifest of {found.name}: move it to {shown(right)}"
        raise RecipeError("a patch manifest is in the wrong place", [Fault(name, 1, 1, what)])
    return found


def find_manifest(folder: Path, repo: str, id: str) -> Manifest | None:  # noqa: A002
    """Read the manifest of a patch; None without one. Raises RecipeError."""
    path = manifest_path(folder, repo, id)
    return read_manifest(path) if path.exists() else None


def _parse(name: str, raw: bytes, faults: list[Fault]) -> Manifest | None:
    start = Origin(name, 1, 1)
    if len(raw) > MAX_BYTES:
        faults.append(start.fault("the file is larger than 1 MiB"))
        return None
    try:
        root = compose(raw.decode("utf-8-sig"), name, faults)
    except UnicodeDecodeError:
        faults.append(start.fault("the file is not UTF-8", "save it as UTF-8"))
        return None
    except Unreadable as error:
        faults.append(error.fault)
        return None
    data, values, keys = flatten(root) if root else (None, {}, {})
    if not isinstance(data, dict):
        faults.append(start.fault("expected a YAML map"))
        return None
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        places = Places(values, keys)
        faults += [_fault(one, places) for one in error.errors(include_url=False)]
        return None


def _fault(error: Any, places: Places) -> Fault:
    cause = error.get("ctx", {}).get("error")
    path: KeyPath = (*error["loc"], *getattr(cause, "at", ()))
    if error["type"] == "missing":
        return places.of_key(path[:-1]).fault(f"{dotted(path)} is missing")
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(str(path[-1]), list(_keys()) if len(path) == 1 else [])
        return places.of_key(path).fault(f"unknown key {dotted(path)}", hint)
    message, hint = message_of(error)
    return places.of(path).fault(f"{dotted(path)}: {message}" if path else message, hint)


def _keys() -> tuple[str, ...]:
    """The keys of a manifest in the file, in order."""
    return tuple(field.alias or name for name, field in Manifest.model_fields.items())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest; comments, the order of keys and unchanged values stay. Raises HostError."""
    from ruamel.yaml import YAML  # only writing needs the round trip

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    data = _without_empty(manifest.to_data())
    table = yaml.load(path.read_text(encoding="utf-8")) if path.exists() else None
    if table is None:
        table = data
    else:
        _update(table, data, _keys())
    out = io.StringIO()
    yaml.dump(_block_style(table), out)
    try:
        write_atomic(path, out.getvalue().encode())
    except OSError as error:
        raise HostError(
            f"cannot write the patch manifest: {error.strerror}",
            where=str(path), hint="check the permissions of its folder", id="disk",
        ) from error  # fmt: skip


_EMPTY: tuple[Any, ...] = (None, "", [], {}, False)


def _without_empty(value: Any) -> Any:
    """Drop empty values, but counts of zero and what is inside of evidence."""
    if isinstance(value, list):
        return [_without_empty(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v if k == "evidence" else _without_empty(v) for k, v in value.items()}
    return {k: v for k, v in kept.items() if v not in _EMPTY or k in ("added", "removed")}


def _update(table: Any, data: Mapping[str, Any], order: Sequence[str] = ()) -> None:
    """Change a map as it was read into `data`; new keys are inserted by `order`, else last."""
    for key in [k for k in table if k not in data and table[k] not in _EMPTY]:
        del table[key]
    order = [*order, *(k for k in data if k not in order)]
    for key, value in data.items():
        if key not in table:
            before = [k for k in order[: order.index(key)] if k in table]
            place = list(table).index(before[-1]) + 1 if before else 0
            table.insert(place, key, _block_style(value))
            continue
        old = table[key]
        if isinstance(old, dict) and isinstance(value, dict) and key != "evidence":
            _update(old, value)
        elif isinstance(old, list) and 0 < len(old) < len(value) and _same(old, value[: len(old)]):
            old.extend(_block_style(value[len(old) :]))
        elif not _same(old, value):
            table[key] = _block_style(value)


def _same(old: Any, value: Any) -> bool:
    """Whether a value that was read has the same meaning; `25144` may stand for '25144'."""
    if isinstance(old, dict) and isinstance(value, dict):
        return old.keys() == value.keys() and all(_same(old[k], value[k]) for k in old)
    if isinstance(old, list) and isinstance(value, list):
        return len(old) == len(value) and all(map(_same, old, value))
    if isinstance(value, str) and isinstance(old, int | float) and not isinstance(old, bool):
        return str(old) == value
    return bool(old == value)


def _block_style(value: Any) -> Any:
    """Write text of several lines as a YAML block."""
    from ruamel.yaml.scalarstring import LiteralScalarString

    if isinstance(value, str) and "\n" in value and not isinstance(value, LiteralScalarString):
        return LiteralScalarString(value)
    if isinstance(value, list | dict):
        for key, one in enumerate(value) if isinstance(value, list) else value.items():
            value[key] = _block_style(one)
    return value
