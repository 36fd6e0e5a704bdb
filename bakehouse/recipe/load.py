"""A recipe file to a `Loaded` recipe: includes, overrides, the model, the template, all faults."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.errors import Fault, NotFound, RecipeError
from bakehouse.recipe.explain import Judged, Places, judge
from bakehouse.recipe.faults import Origin, printable, shown
from bakehouse.recipe.merge import Gathered, KeyPath, flatten, gather
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.variables import trial_variables
from bakehouse.util.text import did_you_mean

SUFFIX = ".yaml"
USED_IN_COMMANDS = {"serve", "weights", "host", "name"}
"""Top keys whose values a template may name."""


@dataclass(frozen=True)
class Loaded:
    """A recipe and where it came from."""

    recipe: Recipe
    path: Path
    files: tuple[Path, ...]
    """All files read: the recipe's own first, then its includes."""
    places: Mapping[KeyPath, Origin] = field(repr=False)
    """Where each value that a file or an override gives stands; defaults have no place."""

    @property
    def folder(self) -> Path:
        """What relative paths in the recipe are relative to."""
        return self.path.parent

    def origin(self, *path: str | int) -> Origin:
        """Give the place of a value, or of the nearest map around it."""
        return Places(self.places, {}).of(path)


def names(folder: Path) -> tuple[str, ...]:
    """Names of the recipes in a folder, sorted; files that begin with `_` are parts, no recipes."""
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    except OSError:
        return ()
    return tuple(sorted(n.removesuffix(SUFFIX) for n in found if not n.startswith(("_", "."))))


def find(name: str, folder: Path) -> Path:
    """Give the file that `--recipe` means: a name in `folder`, or a path. Raises NotFound."""
    is_path = "/" in name or name.endswith((SUFFIX, ".yml"))
    path = Path(name) if is_path else folder / f"{name}{SUFFIX}"
    if name and _is_there(path):
        return path
    there = names(folder)
    base = Path(name).name.removesuffix(".yml").removesuffix(SUFFIX)
    hint = did_you_mean(base, there) or (
        f"there are {', '.join(there)}" if there else f"{shown(folder)} holds no recipes"
    )
    leads = f", a link to {printable(os.readlink(path), 200)}" if os.path.islink(path) else ""
    where = f"{shown(path)}{leads}"
    raise NotFound.named("recipe", printable(name, 100), where=where, hint=hint)


def _is_there(path: Path) -> bool:
    """Whether something is there, perhaps nothing that can be read: loading it says what."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read, merge and validate a recipe. Raises RecipeError, which carries every fault."""
    gathered = Gathered()
    tree = gather(path, overrides, gathered)
    data, values, keys = flatten(tree)
    faults = list(gathered.faults)
    recipe = None
    if data or not gathered.broken:
        judged = judge(data, Places(values, keys), partial=gathered.broken)
        faults += judged.faults
        faults += _template_faults(judged, values)
        recipe = judged.recipe
    if recipe is None or faults:
        count = "a fault" if len(set(faults)) == 1 else f"{len(set(faults))} faults"
        raise RecipeError(f"the recipe {shown(path)} has {count}", faults)
    return Loaded(recipe, path, tuple(gathered.files), values)


def _template_faults(judged: Judged, values: Mapping[KeyPath, Origin]) -> list[Fault]:
    """Try the command's template with stand-ins for what is not built or fetched yet."""
    from bakehouse.recipe.argv import faults_of  # Jinja is slow to import

    path: KeyPath = ("serve", "command")
    written = judged.written(path)
    serve = judged.data.get("serve")
    command = serve.get("command") if isinstance(serve, dict) else None
    if not isinstance(command, str) or written not in values or path in judged.touched:
        return []
    # What a fault put out of sight may be just what the template asks for.
    blurred = any(t[0] in USED_IN_COMMANDS for t in judged.touched if t)
    if judged.mended is None or blurred:
        return faults_of(command, None, origin=values[written])
    return faults_of(command, trial_variables(judged.mended), origin=values[written])
