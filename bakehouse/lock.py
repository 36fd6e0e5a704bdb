"""The lock: the exact pins of a recipe. `resolve` writes them.

Kept in git as `recipes/NAME.lock.json` beside the recipe.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from bakehouse.errors import HostError
from bakehouse.models import Frozen, digest


class FilePin(Frozen):
    """A file by content."""

    path: str
    """Relative to what contains it, with forward slashes."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: str


class SubmodulePin(Frozen):
    """A submodule, pinned by the tree that names it."""

    path: str
    url: str
    commit: str
    tree: str


class GitPin(Frozen):
    """A commit of a repository and the tree that it names."""

    kind: Literal["git"] = "git"
    url: str
    ref: str | None = None
    ref_commit: str | None = None
    """The commit of `ref` when the lock was written; a later difference is drift."""
    commit: str
    tree: str
    date: int
    """The commit's time, in seconds since 1970: SOURCE_DATE_EPOCH."""
    number: int | None = None
    """Commits reachable from this one, if the history is known."""
    submodules: tuple[SubmodulePin, ...] = ()


class ArchivePin(Frozen):
    """An archive file, and the git tree id of the folder in it that is used."""

    kind: Literal["archive"] = "archive"
    origin: str
    """`pypi:NAME==VERSION`, a URL, or a path."""
    file: FilePin
    folder: str
    tree: str
    date: int
    """Newest modification time inside the archive: SOURCE_DATE_EPOCH."""
    number: int = 0


class PatchPin(Frozen):
    """A patch by content."""

    id: str
    file: FilePin
    """`path` is that of a file beside the recipe, or `OWNER/NAME#ID` for a pinned patch."""
    repo: str | None = None
    """`OWNER/NAME` of a pinned patch; its manifest is `patches/OWNER/NAME/ID.yaml`."""
    source: str | None = None
    """Where a pinned patch was fetched from."""
    head: str | None = None
    """The pull request's head commit when it was pinned."""
    base: str | None = None
    """Its base: the source's commit, or the tree of an archive."""
    allow: Literal["exact", "offset", "fuzz"] = "exact"


class WeightPin(Frozen):
    """A model's files."""

    origin: str
    """`pypi:NAME==VERSION`, `hub:OWNER/NAME`, a URL, or a path."""
    revision: str | None = None
    """The commit of a hub repository."""
    files: tuple[FilePin, ...]
    wheel: FilePin | None = None
    """The wheel that ships the files."""

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: tuple[FilePin, ...]) -> tuple[FilePin, ...]:
        """Refuse paths that lead out of the download folder."""
        for file in files:
            parts = file.path.split("/")
            if {"", ".", ".."}.intersection(parts) or "/" in file.sha256:
                raise ValueError(f"{file.path!r} does not stay in its folder")
        return files


class WheelPin(FilePin):
    """One wheel of a toolkit for one architecture; `path` is its file name."""

    requirement: str
    """`NAME==VERSION` in the package index."""
    arch: str
    """`x86_64` or `aarch64`."""


class ToolkitPin(Frozen):
    """A CUDA toolkit that Bakehouse provides: all wheels for both architectures."""

    release: str
    """NVIDIA's number of the release."""
    version: str
    """Full version of its nvcc, as in 13.0.88."""
    wheels: tuple[WheelPin, ...]


class ModPin(Frozen):
    """A folder with a script that changes an image, file by file."""

    folder: str
    files: tuple[FilePin, ...]


class ImagePin(Frozen):
    """A container image for one architecture, by content."""

    reference: str
    """As the recipe writes it."""
    name: str
    """The whole repository, registry included, as in docker.io/vllm/vllm-openai."""
    local: bool = False
    """Whether it exists only on this machine, in no registry."""
    index: str | None = None
    """Digest of the list of platforms, if the reference names one."""
    digest: str | None = None
    """Digest of the manifest for this architecture; None for a local image."""
    id: str
    """Digest of the configuration, by which most engines know an image."""
    size: int
    """Compressed bytes to pull; uncompressed bytes of a local image."""
    layers: int = 0
    created: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""
    """Empty or 0 is root."""
    workdir: str = ""
    labels: dict[str, str] = {}

    @property
    def ref(self) -> str:
        """What the image is called from now on: never by a tag."""
        return f"{self.name}@{self.digest}" if self.digest else self.id


SourcePin = Annotated[GitPin | ArchivePin, Field(discriminator="kind")]


class Lock(Frozen):
    """Everything that a recipe pins."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    recipe: str
    engine: str
    wants: str
    """Digest of the resolved parts of the recipe; see `resolver.wants`."""
    source: SourcePin | None = None
    patches: tuple[PatchPin, ...] = ()
    source_tree: str | None = None
    """Git tree id of the source after all patches."""
    toolkit: ToolkitPin | None = None
    weights: dict[str, WeightPin]
    images: dict[str, dict[str, ImagePin]] = {}
    """By role (`image`; `builder` and `runtime` of a build), then by architecture."""
    mods: tuple[ModPin, ...] = ()

    def image(self, arch: str, role: str = "image") -> ImagePin:
        """Return the image for an architecture. Raises HostError if the recipe names none."""
        pins = self.images.get(role, {})
        if arch not in pins:
            named = " and ".join(sorted(pins)) or "no architecture"
            raise HostError(
                f"this machine is {arch}, and the recipe names an image for {named}",
                where=f"recipe {self.recipe}, {role}",
                hint=f"add one for {arch}, then run 'invoke lock --update'; an image for another "
                "architecture would not start",
                id="image-platform",
            )
        return pins[arch]

    @property
    def stamp(self) -> str:
        """The commit that the engine must report: the pin, and a hash of the patches if any.

        The hash is a single patch's own sha256, or one over several, in order.
        """
        if isinstance(self.source, GitPin):
            base = self.source.commit[:9]
        elif isinstance(self.source, ArchivePin):
            base = self.source.file.sha256[:9]
        else:
            return ""
        hashes = [patch.file.sha256 for patch in self.patches]
        if not hashes:
            return base
        return f"{base}-p{(hashes[0] if len(hashes) == 1 else digest(hashes))[:7]}"

    @property
    def base(self) -> str | None:
        """The base of the patches: a commit, the tree of an archive, or an image."""
        if isinstance(self.source, GitPin):
            return self.source.commit
        if self.source:
            return self.source.tree
        pins = self.images.get("image")
        if not pins:
            return None
        lists = {pin.index for pin in pins.values()}
        if len(lists) == 1 and (one := lists.pop()):
            return one
        return digest({arch: pin.digest or pin.id for arch, pin in pins.items()})

    @property
    def build_number(self) -> int:
        """The build number in the engine's stamp; 0 if the history is unknown."""
        return (self.source.number or 0) if self.source else 0


class Drift(Frozen):
    """One difference between a recipe and its lock."""

    reason: str
    where: str
    locked: str
    now: str


def describe(lock: Lock) -> list[str]:
    """Return a lock's pins as text, one line each."""
    return [f"locked {where}: {pin}" for where, pin in _pins(lock).items()]


def _pins(lock: Lock) -> dict[str, str]:
    pins: dict[str, str] = {}
    if isinstance(lock.source, GitPin):
        pins["source"] = f"{lock.source.url} commit {lock.source.commit}"
        if lock.source.ref:
            pins["ref"] = f"{lock.source.ref} at {lock.source.ref_commit}"
        for part in lock.source.submodules:
            pins[f"submodule {part.path}"] = f"{part.url} commit {part.commit}"
    elif isinstance(lock.source, ArchivePin):
        pins["source"] = f"{lock.source.origin} sha256 {lock.source.file.sha256}"
    for patch in lock.patches:
        on = f" on {patch.base}" if patch.base else ""
        pins[f"patch {patch.file.path}"] = f"sha256 {patch.file.sha256}{on}"
    if lock.source_tree:
        pins["source tree"] = lock.source_tree
    if lock.toolkit:
        pins["toolkit"] = f"CUDA {lock.toolkit.version}, {len(lock.toolkit.wheels)} wheels"
        for wheel in lock.toolkit.wheels:
            pins[f"toolkit {wheel.path}"] = f"{wheel.size:,} bytes, sha256 {wheel.sha256}"
    for role, by_arch in lock.images.items():
        pins |= {f"{role} {arch}": f"{i.reference} is {i.ref}" for arch, i in by_arch.items()}
    for mod in lock.mods:
        pins |= {f"mod {mod.folder}/{file.path}": f"sha256 {file.sha256}" for file in mod.files}
    for role, pin in lock.weights.items():
        at = f" revision {pin.revision}" if pin.revision else ""
        pins[role] = f"{pin.origin}{at}"
        for file in pin.files:
            pins[f"{role} {file.path}"] = f"{file.size:,} bytes, sha256 {file.sha256}"
    return pins


def changes(old: Lock, new: Lock) -> tuple[Drift, ...]:
    """Return the pins that differ between two locks."""
    before, after = _pins(old), _pins(new)
    return tuple(
        Drift(reason="moved", where=where, locked=before.get(where, "none"),
              now=after.get(where, "none"))
        for where in dict.fromkeys((*before, *after))
        if before.get(where) != after.get(where)
    )  # fmt: skip


def moved_line(change: Drift) -> str:
    """Return one changed pin as text."""
    return f"moved {change.where}: {change.locked} -> {change.now}"
