"""A recipe's pinned patches held against their manifests, before anything is fetched or built."""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.context import Context
from bakehouse.errors import Fault, NotFound, RecipeError
from bakehouse.patches.manifest import Manifest
from bakehouse.recipe.faults import shown
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.patches import Patch
from bakehouse.sources.manifests import manifest_path, patches_folder
from bakehouse.sources.patches import manifest_of, not_pinned, pin_command


def faults(ctx: Context, loaded: Loaded) -> tuple[Fault, ...]:
    """Patches without a manifest, manifests with faults, claims that a manifest does not make."""
    found: list[Fault] = []
    for place, patch in _pinned(loaded):
        key = loaded.recipe.patches_key
        origin = loaded.origin(*key, place)
        name = f"{'.'.join(key)}[{place}]"
        try:
            manifest = manifest_of(ctx, patch, loaded.recipe.engine)
        except NotFound:
            named = patch.key(loaded.recipe.engine)
            number = f"--pr {patch.pr}" if patch.pr else "--url, --commit or --file"
            hint = f"'invoke patch {number}' fetches it and writes one"
            found.append(origin.fault(f"{name}: there is no manifest of patch {named}", hint))
            continue
        except RecipeError as error:
            found += error.faults
            continue
        if extra := [rule for rule in patch.lifts if rule not in manifest.lifts]:
            message = f"{name}.lifts: its manifest does not say that it lifts {', '.join(extra)}"
            found.append(origin.fault(message, f"see {_shown(ctx, manifest)}"))
    return tuple(found)


def notes(ctx: Context, loaded: Loaded) -> tuple[str, ...]:
    """What is no fault of the recipe and still has to be done before it can be built."""
    return tuple(
        f"patch {manifest.name} is not pinned yet: run '{pin_command(manifest)}'"
        for manifest in _manifests(ctx, loaded)
        if not manifest.pinned
    )


def require(ctx: Context, loaded: Loaded) -> None:
    """Raise RecipeError with every fault, or LockError for a patch that is not pinned yet."""
    if found := faults(ctx, loaded):
        raise RecipeError(f"the patches of recipe {loaded.recipe.name} are not as it says", found)
    for manifest in _manifests(ctx, loaded):
        if not manifest.pinned:
            raise not_pinned(manifest, _shown(ctx, manifest))


def _pinned(loaded: Loaded) -> Iterator[tuple[int, Patch]]:
    everyone = enumerate(loaded.recipe.patches)
    return ((place, patch) for place, patch in everyone if not patch.file)


def _manifests(ctx: Context, loaded: Loaded) -> Iterator[Manifest]:
    for _, patch in _pinned(loaded):
        try:
            yield manifest_of(ctx, patch, loaded.recipe.engine)
        except (NotFound, RecipeError):
            continue


def _shown(ctx: Context, manifest: Manifest) -> str:
    return shown(manifest_path(patches_folder(ctx.recipes), manifest.repo, manifest.id))
