"""How a recipe's patches stand: which of them are known, or were judged, to be unsound."""

from __future__ import annotations

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
    """One patch that has to be spoken of at every serve."""

    patch: str
    word: str
    why: str
    verdict: PatchVerdict | None
    losses: frozenset[str] = frozenset()
    """Signatures of lost features that the verdict found, where it is of this recipe and base."""

    def line(self) -> str:
        """The same for people."""
        return f"{self.word.upper()} patch {self.patch}: {self.why}"


def unsound(ctx: Context, lock: Lock, recipe: str) -> tuple[Standing, ...]:
    """Patches of a lock that are experimental or harmful, by a verdict or by what is known.

    A verdict on this recipe at this base counts before those on others; a verdict on another diff
    does not count.
    """
    found = []
    for pin in lock.patches:
        manifest = _manifest(ctx, pin)
        if manifest is not None and (standing := _judge(manifest, pin, recipe)):
            found.append(standing)
    return tuple(found)


def _manifest(ctx: Context, pin: PatchPin) -> Manifest | None:
    if pin.repo is None:
        return None
    try:
        return find_manifest(patches_folder(ctx.recipes), pin.repo, pin.id)
    except BakehouseError:
        return None  # whoever needs it to be right has said so before


def _judge(manifest: Manifest, pin: PatchPin, recipe: str) -> Standing | None:
    of_this = [v for v in manifest.verdicts if v.sha256 == pin.file.sha256]
    own = [v for v in of_this if (v.recipe, v.base) == (recipe, pin.base)]
    said = (own or [v for v in of_this if v.word in UNSOUND])[-1:]
    for verdict in said:
        if verdict.word not in UNSOUND:
            continue
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
    """Read the losses that were measured; whatever else the file names there is no loss."""
    named = verdict.evidence.get("losses")
    if not isinstance(named, list | tuple):
        return frozenset()
    rows = catalogue().rows
    return frozenset(
        str(one) for one in named if str(one) in rows and rows[str(one)].severity == Severity.LOST
    )
