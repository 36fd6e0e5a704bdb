"""Which Python files go over a vLLM image: made by pinned patches, or a branch's at a commit.

Only Python can be laid over an image. Whatever is compiled (kernels, the extension's bindings) is
the base image's, so a change that touches it is refused: the image would be half of each.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.build.able import ask_python
from bakehouse.context import Context
from bakehouse.engines.vllm import reading
from bakehouse.errors import BakehouseError, BuildFailed
from bakehouse.lock import GitPin, Lock, PatchPin
from bakehouse.ports.docker import ContainerSpec
from bakehouse.ports.git import Git, GitFailed
from bakehouse.redact import clean
from bakehouse.sources.archive import to_objects
from bakehouse.sources.diffs import FilePart, read_diff
from bakehouse.sources.fitting import try_patch
from bakehouse.sources.mirror import ensure_commit, make_bare
from bakehouse.sources.patches import diff_of, does_not_apply
from bakehouse.sources.refs import find_ref
from bakehouse.sources.tree import list_tree, materialise, repository_of, write_tree

PACKAGE = "vllm/"
COMPILED = re.compile(
    r"(?:csrc|cmake|rust)/|(?:.*/)?(?:CMakeLists\.txt|setup\.py|Cargo\.(?:toml|lock))$|"
    r".*\.(?:cu|cuh|cpp|cc|cxx|c|h|hpp|cmake|rs|so|pyx)$",
    re.IGNORECASE,
)
"""Paths that take part in what is compiled."""
MAX_READ = 64 * 2**20


@dataclass(frozen=True)
class Overlay:
    """Files by their path below the folder of the image's packages."""

    files: Mapping[str, bytes]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    """What changed and has no place in an image: tests, documentation."""

    @property
    def hashes(self) -> dict[str, str]:
        """Sha256 of each file that is laid over."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


def make_overlay(ctx: Context, lock: Lock, image: str) -> Overlay:
    """What has to be laid over the base `image`, which is here.

    Raises BuildFailed (6) where what is compiled would have to change, PatchError (5), LockError.
    """
    made = _branched(ctx, lock, image) if lock.source else _patched(ctx, lock.patches, image)
    if not made.files and not made.removed:
        raise BuildFailed(
            "nothing of it is Python of the package vllm, so there is nothing to lay over",
            where=", ".join(made.left_out[:8]) or image, id="overlay-empty",
            hint="use the image as it is",
        )  # fmt: skip
    return made


def refuse_compiled(paths: Iterable[str], where: str) -> None:
    """Raise BuildFailed where any of the changed files is compiled."""
    found = sorted(path for path in paths if COMPILED.match(path))
    if found:
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        raise BuildFailed(
            f"the change touches what is compiled: {', '.join(map(clean, found[:6]))}{more}",
            where=where,
            hint="the base image brings other compiled code: take an image that was built from "
            "this branch, or wait for one",
            id="overlay-compiled",
        )


def read_files(ctx: Context, image: str, names: Sequence[str]) -> tuple[str, dict[str, bytes]]:
    """The version that an image's vLLM was built as, and those of the files that it has."""
    sentinel = f"BAKEHOUSE-{secrets.token_hex(16)}"
    spec = ContainerSpec(
        image=image, entrypoint=("python3",), network="none",
        argv=("-c", Path(reading.__file__).read_text(), sentinel, *names),
    )  # fmt: skip
    said = ask_python(ctx, spec, image, max_bytes=MAX_READ)
    parts = said.out.split(sentinel)
    try:
        answer = json.loads(parts[-2] if len(parts) > 2 else "{}")
        files = {n: base64.b64decode(t) for n, t in answer["files"].items() if t is not None}
        return str(answer["version"]), files
    except (ValueError, KeyError, TypeError):
        last = (said.err.strip().splitlines() or ["it printed nothing"])[-1]
        raise BuildFailed(
            f"the files of the image's vLLM cannot be read: {clean(last)}", where=image,
            hint="see image.ref in the recipe: is it a vLLM image?", id="image-silent",
        ) from None  # fmt: skip


def _patched(ctx: Context, pins: Sequence[PatchPin], image: str) -> Overlay:
    diffs = [(pin, read_diff(diff_of(ctx, pin), pin.file.path)) for pin in pins]
    paths = sorted({path for _, parts in diffs for part in parts for path in paths_of(part)})
    refuse_compiled(paths, image)
    inside = [path for path in paths if path.startswith(PACKAGE)]
    _, before = read_files(ctx, image, inside)
    git = Git(ctx.processes, ctx.environment)
    with tempfile.TemporaryDirectory(prefix="bakehouse-overlay-") as scratch:
        repository, old, new = (Path(scratch, name) for name in ("git", "old", "new"))
        make_bare(ctx, git, repository)
        _write(old, before)
        tree = to_objects(git, repository, old, Path(scratch, "index"))
        for pin, parts in diffs:
            mine = [part for part in parts if part.path.startswith(PACKAGE)]
            if mine:
                fit = try_patch(git, repository, tree, b"".join(map(_text, mine)), pin.file.path)
                if not fit.good(pin.allow) or fit.tree is None:
                    raise does_not_apply(pin, fit)
                tree = fit.tree
        write_tree(git, repository, tree, new)
        after = {p.relative_to(new).as_posix(): p.read_bytes() for p in new.rglob("*")
                 if p.is_file()}  # fmt: skip
    return Overlay(
        files={name: data for name, data in after.items() if before.get(name) != data},
        removed=tuple(sorted(set(before) - set(after))),
        left_out=tuple(path for path in paths if path not in inside),
    )


def paths_of(part: FilePart) -> set[str]:
    """Every path that a part of a diff reads or writes."""
    found = {part.path}
    for line in part.header:
        if named := re.match(rb'(?:rename from |copy from |--- a/)"?([^"\t]+)', line):
            found.add(named[1].decode(errors="replace"))
    return found


def _text(part: FilePart) -> bytes:
    return b"\n".join((*part.header, *(row for hunk in part.hunks for row in hunk.body))) + b"\n"


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _branched(ctx: Context, lock: Lock, image: str) -> Overlay:
    source = lock.source
    if not isinstance(source, GitPin) or lock.source_tree is None:
        raise BuildFailed(
            "only a git branch can be laid over an image", where="image.source",
            id="overlay-source",
            hint="give image.source.git and commit: what changed is told by its history",
        )  # fmt: skip
    git = Git(ctx.processes, ctx.environment)
    version, _ = read_files(ctx, image, ())
    with tempfile.TemporaryDirectory(prefix="bakehouse-overlay-") as scratch:
        target = Path(scratch, "tree")
        materialise(ctx, lock, target)
        repository = repository_of(ctx.places, source)
        base = base_commit(ctx, git, source, repository, version, image)
        changed = _changed(git, repository, base, lock.source_tree)
        refuse_compiled(changed, f"{source.url}, from {base[:12]} to {source.commit[:12]}")
        inside = {path: word for path, word in changed.items() if path.startswith(PACKAGE)}
        _same_base(ctx, git, repository, base, image, inside)
        files = {path: (target / path).read_bytes() for path, w in inside.items() if w != "D"}
    return Overlay(
        files=files,
        removed=tuple(path for path, word in inside.items() if word == "D"),
        left_out=tuple(path for path in changed if path not in inside),
    )


def _changed(git: Git, repository: Path, base: str, tree: str) -> dict[str, str]:
    """Paths that differ between two trees, with git's letter: A, D, M, T."""
    said = git.ask(repository, "diff-tree", "-r", "-z", "--no-renames", "--name-status", base, tree)
    words = said.split("\0")
    return dict(zip(words[1::2], words[0::2], strict=False))


def base_commit(
    ctx: Context, git: Git, source: GitPin, repository: Path, version: str, image: str
) -> str:
    """The commit that an image's vLLM was built from, by the version that it carries.

    A development build names its commit (`0.27.1.dev5+gabc1234`), a release its tag.
    """
    try:
        if named := re.search(r"[+.]g([0-9a-f]{7,40})\b", version):
            return git.object_id(repository, f"{named[1]}^{{commit}}")
        tag = f"refs/tags/v{version.partition('+')[0]}"
        name, commit = find_ref(ctx, git, source.url, tag)
        ensure_commit(ctx, git, source.url, commit, ref=name)
        return commit
    except (GitFailed, BakehouseError) as error:
        raise BuildFailed(
            f"the commit of the base image is not known: its vLLM is {version or '?'}",
            where=f"{image}; {source.url}: {getattr(error, 'what', error)}",
            hint="take a base image of a release whose tag the repository has, or of one of the "
            "branch's own commits",
            id="overlay-base",
        ) from error


def _same_base(
    ctx: Context,
    git: Git,
    repository: Path,
    base: str,
    image: str,
    changed: Mapping[str, str],
) -> None:
    """See that the image's files are those of the commit: else the branch would not fit it."""
    ids = {entry.path: entry.id for entry in list_tree(git, repository, base)}
    _, found = read_files(ctx, image, tuple(changed))
    old = [path for path, word in changed.items() if word != "A"]
    other = [path for path in old if path not in found or _blob(found[path]) != ids[path]]
    other += [path for path in changed if path not in ids and path in found]
    if other:
        raise BuildFailed(
            f"{len(other)} of the image's files are not those of commit {base[:12]}: "
            f"{', '.join(map(clean, sorted(other)[:4]))}",
            where=image,
            hint="the image was patched, or built from another commit than its version says: take "
            "a released one",
            id="overlay-base",
        )


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
