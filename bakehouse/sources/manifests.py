"""Manifests on disk: read strictly, every fault at its place; written with comments kept."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bakehouse.errors import Fault, HostError, NotFound, RecipeError
from bakehouse.patches.manifest import Manifest
from bakehouse.recipe.explain import Places, words
from bakehouse.recipe.faults import Origin, dotted, shown
from bakehouse.recipe.merge import KeyPath, flatten
from bakehouse.recipe.yaml import Unreadable, compose
from bakehouse.util.files import write_atomic
from bakehouse.util.text import did_you_mean

MAX_BYTES = 2**20
SUFFIX = ".yaml"


def patches_folder(recipes: Path) -> Path:
    """Where manifests lie: `patches/` beside the folder of recipes."""
    return recipes.parent / "patches"


def manifest_path(folder: Path, repo: str, id: str) -> Path:  # noqa: A002 - the manifest's key
    """Where a manifest lies: `OWNER/NAME/ID.yaml` below the folder of patches."""
    return folder / repo / f"{id}{SUFFIX}"


def all_paths(folder: Path) -> tuple[Path, ...]:
    """Every manifest below the folder of patches, sorted."""
    return tuple(sorted(folder.glob(f"*/*/*{SUFFIX}")))


def read_manifest(path: Path) -> Manifest:
    """Read one. Raises NotFound; RecipeError with every fault, as `file:line:column`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would make us wait for ever
            fault = Fault(shown(path), 0, 0, "it is not a regular file")
            raise RecipeError("the patch manifest cannot be read", [fault])
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise RecipeError(
            "the patch manifest cannot be read", [Fault(shown(path), 0, 0, str(error.strerror))]
        ) from error
    faults: list[Fault] = []
    found = _parse(path, raw, faults)
    if found is None or faults:
        count = "a fault" if len(set(faults)) == 1 else f"{len(set(faults))} faults"
        raise RecipeError(f"the patch manifest {shown(path)} has {count}", faults)
    wanted = manifest_path(path.parents[2], found.repo, found.id)
    if path.absolute() != wanted.absolute():
        fault = Fault(shown(path), 1, 1, f"this is the manifest of {found.name}: it belongs into "
                      f"{shown(wanted)}")  # fmt: skip
        raise RecipeError("a patch manifest lies in the wrong place", [fault])
    return found


def find_manifest(folder: Path, repo: str, id: str) -> Manifest | None:  # noqa: A002
    """Read the manifest of a patch; None where there is none."""
    path = manifest_path(folder, repo, id)
    return read_manifest(path) if path.exists() else None


def _missing(path: Path) -> NotFound:
    hint = "'invoke patch --pr NUMBER' fetches a pull request and writes its manifest"
    return NotFound.named("patch", path.stem, where=shown(path), hint=hint, id="patch-unknown")


def _parse(path: Path, raw: bytes, faults: list[Fault]) -> Manifest | None:
    name = shown(path)
    start = Origin(name, 1, 1)
    if len(raw) > MAX_BYTES:
        faults.append(start.fault("the file is larger than 1 MiB, no manifest is that long"))
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
        faults.append(start.fault("this is no map", "a patch manifest is a YAML map"))
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
        known = [f.alias or n for n, f in Manifest.model_fields.items()] if len(path) == 1 else []
        hint = did_you_mean(str(path[-1]), known)
        return places.of_key(path).fault(f"unknown key {dotted(path)}", hint)
    message, hint = words(error)
    return places.of(path).fault(f"{dotted(path)}: {message}" if path else message, hint)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest; comments, the order of keys and untouched values stay as they are."""
    from ruamel.yaml import YAML  # only writing needs the round trip

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    table = yaml.load(path.read_text(encoding="utf-8")) if path.exists() else None
    data = _spare(manifest.to_data())
    table = data if table is None else table
    if table is not data:
        _lay(table, data, {f.alias or n: f.default for n, f in Manifest.model_fields.items()})
    out = io.StringIO()
    yaml.dump(_styled(table), out)
    try:
        write_atomic(path, out.getvalue().encode())
    except OSError as error:
        raise HostError(
            f"the patch manifest cannot be written: {error.strerror}",
            where=str(path), hint="see that the folder may be written to", id="disk",
        ) from error  # fmt: skip


def _spare(data: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth writing: all but what is empty."""
    return {
        key: _spare(value) if isinstance(value, dict) and key != "evidence" else value
        for key, value in _listed(data)
        if value not in (None, "", [], {}, False) or key in ("added", "removed")
    }


def _listed(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, list):
            yield key, [_spare(v) if isinstance(v, dict) else v for v in value]
        elif isinstance(value, dict) and key != "evidence" and not _spare(value):
            continue
        else:
            yield key, value


def _lay(table: Any, data: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Change a map that was read into what it is to hold, touching nothing else."""
    for key in [k for k in table if k not in data and table[k] not in (None, "", [], {}, False)]:
        del table[key]
    order = [*known, *(k for k in data if k not in known)]
    for key, value in data.items():
        if key in table:
            old = table[key]
            if isinstance(old, dict) and isinstance(value, dict) and key != "evidence":
                _lay(old, value, {})
            elif _same(old, value):
                continue
            elif _longer(old, value):
                old.extend(_styled(value[len(old) :]))
            else:
                table[key] = _styled(value)
            continue
        before = [k for k in order[: order.index(key)] if k in table]
        place = list(table).index(before[-1]) + 1 if before else 0
        table.insert(place, key, _styled(value))


def _longer(old: Any, value: Any) -> bool:
    """Whether a list only grew."""
    grew = isinstance(old, list) and isinstance(value, list) and len(value) > len(old) > 0
    return grew and all(_same(a, b) for a, b in zip(old, value, strict=False))


def _same(old: Any, value: Any) -> bool:
    """Whether a value that was read means the same; `25144` may stand for the text '25144'."""
    if isinstance(old, dict) and isinstance(value, dict):
        return old.keys() == value.keys() and all(_same(old[k], value[k]) for k in old)
    if isinstance(old, list) and isinstance(value, list):
        return len(old) == len(value) and all(map(_same, old, value))
    if isinstance(value, str) and isinstance(old, int | float) and not isinstance(old, bool):
        return str(old) == value
    return bool(old == value)


def _styled(value: Any) -> Any:
    """Text of several lines as a block, everything else as it is."""
    from ruamel.yaml.scalarstring import LiteralScalarString

    if isinstance(value, str) and "\n" in value and not isinstance(value, LiteralScalarString):
        return LiteralScalarString(value)
    if isinstance(value, list):
        for place, one in enumerate(value):
            value[place] = _styled(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            value[key] = _styled(one)
    return value
