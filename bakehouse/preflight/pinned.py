"""Check a recipe's pinned patches against their manifests, before anything is fetched or built."""

from __future__ import annotations

from bakehouse.context import Context
from bakehouse.errors import Fault, NotFound, RecipeError
from bakehouse.patches.manifest import Manifest
from bakehouse.recipe.faults import shown
from bakehouse.recipe.load import Loaded
from bakehouse.sources.manifests import manifest_path, patches_folder
from bakehouse.sources.patches import manifest_of, not_pinned, pin_command


def faults(ctx: Context, loaded: Loaded) -> tuple[Fault, ...]:
    """Return missing or invalid manifests, and lifted rules that a manifest does not name."""
    return _read(ctx, loaded)[1]


def notes(ctx: Context, loaded: Loaded) -> tuple[str, ...]:
    """Return what to do before the recipe can be built: patches to pin."""
    return tuple(
        f"patch {manifest.name} is not pinned yet: run '{pin_command(manifest)}'"
        for manifest in _read(ctx, loaded)[0]
        if not manifest.pinned
    )


def require(ctx: Context, loaded: Loaded) -> None:
    """Raise RecipeError with every fault, or LockError for a patch that is not pinned yet."""
    manifests, found = _read(ctx, loaded)
    if found:
        raise RecipeError(f"the patches of recipe {loaded.recipe.name} are invalid", found)
    for manifest in manifests:
        if not manifest.pinned:
            raise not_pinned(manifest, _shown(ctx, manifest))


def _read(ctx: Context, loaded: Loaded) -> tuple[list[Manifest], tuple[Fault, ...]]:
    """Return the manifests of a recipe's patches, and what is wrong with them."""
    recipe, manifests, found = loaded.recipe, [], []
    for place, patch in enumerate(recipe.patches):
        if patch.file:
            continue
        name = f"{'.'.join(recipe.patches_key)}[{place}]"
        origin = loaded.origin(*recipe.patches_key, place)
        try:
            manifest = manifest_of(ctx, patch, recipe.engine)
        except NotFound:
            number = f"--pr {patch.pr}" if patch.pr else "--url, --commit or --file"
            hint = f"'invoke patch {number}' fetches it and writes one"
            what = f"{name}: manifest of patch {patch.key(recipe.engine)} not found"
            found.append(origin.fault(what, hint))
            continue
        except RecipeError as error:
            found += error.faults
            continue
        manifests.append(manifest)
        if extra := [rule for rule in patch.lifts if rule not in manifest.lifts]:
            message = f"{name}.lifts: its manifest does not lift {', '.join(extra)}"
            found.append(origin.fault(message, f"see {_shown(ctx, manifest)}"))
    return manifests, tuple(found)


def _shown(ctx: Context, manifest: Manifest) -> str:
    return shown(manifest_path(patches_folder(ctx.recipes), manifest.repo, manifest.id))
