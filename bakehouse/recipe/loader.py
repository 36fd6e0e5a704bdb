"""Load a recipe: includes, overrides, validation and the command, with every fault."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.errors import Fault, NotFound, RecipeError
from bakehouse.recipe.document import Gathered, KeyPath, flatten, gather
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin, printable, shown
from bakehouse.recipe.validation import Places, validate
from bakehouse.util.text import did_you_mean

SUFFIX = ".yaml"


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, its files and its command."""

    recipe: Recipe
    path: Path
    files: tuple[Path, ...]
    """All files read: the recipe's own first, then its includes."""
    places: Mapping[KeyPath, Origin] = field(repr=False)
    """Where each value of a file or an override is; defaults have no place."""
    command: tuple[str, ...]
    """The server's command, rendered with example paths of server and weights."""

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the recipe start from."""
        return self.path.parent

    def origin(self, *path: str | int) -> Origin:
        """Return the place of a value, or of the nearest map around it."""
        return Places(self.places, {}).of(path)


def names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of recipes in a folder, without files that begin with `_`."""
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    except OSError:
        return ()
    return tuple(sorted(n.removesuffix(SUFFIX) for n in found if not n.startswith(("_", "."))))


def find(name: str, folder: Path) -> Path:
    """Return the file of `--recipe`: a name in `folder`, or a path. Raises NotFound."""
    is_path = "/" in name or name.endswith((SUFFIX, ".yml"))
    path = Path(name) if is_path else folder / f"{name}{SUFFIX}"
    if name and _is_there(path):
        return path
    there = names(folder)
    base = Path(name).name.removesuffix(".yml").removesuffix(SUFFIX)
    hint = did_you_mean(base, there) or (
        f"available: {', '.join(there)}" if there else f"no recipes in {shown(folder)}"
    )
    leads = f", a link to {printable(os.readlink(path), 200)}" if os.path.islink(path) else ""
    where = f"{shown(path)}{leads}"
    raise NotFound.named("recipe", printable(name, 100), where=where, hint=hint)


def _is_there(path: Path) -> bool:
    """Whether the path exists, readable or not; loading reports the rest."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, merge and validate a recipe, and render its command once with example paths.

    Raises RecipeError with every fault.
    """
    gathered = Gathered()
    data, values, keys = flatten(gather(path, overrides, gathered))
    faults = list(gathered.faults)
    recipe: Recipe | None = None
    command: tuple[str, ...] = ()
    if data or not gathered.broken:
        recipe, found = validate(data, Places(values, keys), partial=gathered.broken)
        faults += found
    origin = values.get(("serve", "command"))
    if recipe and origin:
        command = _trial(recipe, origin, faults)
    elif origin and isinstance(template := data["serve"]["command"], str):
        from bakehouse.recipe.template import faults_of

        faults += faults_of(template, origin=origin)
    if recipe is None or faults:
        count = "a fault" if len(set(faults)) == 1 else f"{len(set(faults))} faults"
        raise RecipeError(f"the recipe {shown(path)} has {count}", faults)
    return LoadedRecipe(recipe, path, tuple(gathered.files), values, command)


def _trial(recipe: Recipe, origin: Origin, faults: list[Fault]) -> tuple[str, ...]:
    from bakehouse.recipe.template import render, trial_variables

    try:
        return render(recipe.serve.command, trial_variables(recipe), origin=origin)
    except RecipeError as error:
        faults += error.faults
        return ()
