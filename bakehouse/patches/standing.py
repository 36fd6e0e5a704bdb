"""Patches of a recipe that are known, or were judged, to be unsound."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from bakehouse.context import Context
from bakehouse.errors import BakehouseError
from bakehouse.lock import Lock, PatchPin
from bakehouse.patches.manifest import Manifest, PatchVerdict
from bakehouse.signatures.catalogue import catalogue
from bakehouse.signatures.model import Severity
from bakehouse.sources.manifests import find_manifest, patches_folder

UNSOUND = ("experimental", "harmful")


@dataclass(frozen=True)
class Standing:
    """One unsound patch, reported at every serve."""

    patch: str
    word: str
    why: str
    verdict: PatchVerdict | None
    losses: frozenset[str] = frozenset()
    """Ids of lost-feature signatures that the verdict found, if it is of this recipe and base."""

    def line(self) -> str:
        """One line for the console."""
        return f"{self.word.upper()} patch {self.patch}: {self.why}"


def unsound(ctx: Context, lock: Lock, recipe: str) -> tuple[Standing, ...]:
    """Return a lock's patches that are experimental or harmful, by a verdict or by their manifest.

    A verdict on this recipe at this base takes precedence over others; one on another diff does
    not count. Manifests that cannot be read are skipped: loading the recipe reported them.
    """
    found = []
    for pin in lock.patches:
        manifest = None
        with suppress(BakehouseError):
            folder = patches_folder(ctx.recipes)
            manifest = find_manifest(folder, pin.repo, pin.id) if pin.repo else None
        if manifest and (one := _standing(manifest, pin, recipe)):
            found.append(one)
    return tuple(found)


def _standing(manifest: Manifest, pin: PatchPin, recipe: str) -> Standing | None:
    of_diff = [v for v in manifest.verdicts if v.sha256 == pin.file.sha256]
    own = [v for v in of_diff if (v.recipe, v.base) == (recipe, pin.base)]
    verdict = ([None] + (own or [v for v in of_diff if v.word in UNSOUND]))[-1]
    if verdict and verdict.word in UNSOUND:
        reasons = "; ".join(verdict.reasons[:2]) or "see its manifest"
        where = f"judged with {verdict.recipe} at {verdict.base[:12]}, {verdict.date}"
        losses = _losses(verdict) if own and verdict.word == "experimental" else frozenset()
        return Standing(manifest.name, verdict.word, f"{reasons} ({where})", verdict, losses)
    if manifest.experimental and not own:
        known = " ".join(manifest.notes.split("\n\n")[0].split())
        why = f"{known or 'known to be unsound'} (no verdict with {recipe} yet)"
        return Standing(manifest.name, "experimental", why, None)
    return None


def _losses(verdict: PatchVerdict) -> frozenset[str]:
    """The measured losses of a verdict; other ids in the file are ignored."""
    named = verdict.evidence.get("losses")
    ids = map(str, named) if isinstance(named, list | tuple) else ()
    rows = catalogue().rows
    return frozenset(one for one in ids if one in rows and rows[one].severity == Severity.LOST)
