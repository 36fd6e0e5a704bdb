"""Lay Python files of pinned patches or a branch over a vLLM image, and run mods in it.

Only Python can be laid over an image. Compiled code (kernels, the extension's bindings) stays the
base image's, so a change that touches it is refused: the image would be half of each.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.build import builder
from bakehouse.build.builder import digest_lock
from bakehouse.build.image import BuiltImage, DockerBuild, built_already, check_labels
from bakehouse.context import Context
from bakehouse.engines.vllm.image_probe import run_script
from bakehouse.engines.vllm.scripts import read_files as reader
from bakehouse.errors import BakehouseError, BuildFailed
from bakehouse.lock import GitPin, Lock
from bakehouse.models import check
from bakehouse.patches.apply import diff_of, does_not_apply, try_apply
from bakehouse.patches.diff import FilePart, read_diff
from bakehouse.patches.source_tree import list_tree, materialise, repository_of, write_tree
from bakehouse.plan.image import script
from bakehouse.plan.types import ImagePlan
from bakehouse.redact import clean
from bakehouse.resolver import copy_mod
from bakehouse.runs.store import Run
from bakehouse.sources.archives import to_objects
from bakehouse.sources.git_mirror import ensure_commit, find_ref, make_bare
from bakehouse.system.git import Git, GitFailed

PACKAGE = "vllm/"
COMPILED = re.compile(
    r"(?:csrc|cmake|rust)/|(?:.*/)?(?:CMakeLists\.txt|setup\.py|Cargo\.(?:toml|lock))$|"
    r".*\.(?:cu|cuh|cpp|cc|cxx|c|h|hpp|cmake|rs|so|pyx)$",
    re.IGNORECASE,
)
"""Paths that are compiled, or decide what is."""
MAX_READ = 64 * 2**20
"""Bytes of an image's files that are read at once."""


@dataclass(frozen=True)
class Overlay:
    """Files by their path below the folder of the image's packages."""

    files: Mapping[str, bytes]
    removed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Changed files that have no place in an image: tests, documentation."""

    @property
    def hashes(self) -> dict[str, str]:
        """Sha256 of each file that is laid over."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


def lay_over(ctx: Context, lock: Lock, plan: ImagePlan, run: Run, *, recipes: Path) -> BuiltImage:
    """Build the plan's image over its base, which is here.

    `recipes` is the folder that mods are relative to.
    Raises BuildFailed (6), PatchError (5), HostError (9), LockError (4).
    """
    job = DockerBuild.start(ctx, plan, run)
    with digest_lock(ctx, ctx.places.images, plan.digest):
        if kept := built_already(ctx, plan):
            return kept
        overlay = Overlay({})
        if lock.source or lock.patches:
            with run.step("overlay"):
                make = _from_branch if lock.source else _patched
                overlay = make(ctx, lock, plan.pin.ref)
                if not overlay.files and not overlay.removed:
                    raise BuildFailed(
                        "the change has no Python files of the package vllm, so there is nothing "
                        "to lay over", id="overlay-empty", hint="use the image as it is",
                        where=", ".join(overlay.left_out[:8]) or plan.pin.ref,
                    )  # fmt: skip
        run.fact("overlay", {"files": overlay.hashes, "removed": list(overlay.removed),
                             "left out": list(overlay.left_out)})  # fmt: skip
        shutil.rmtree(job.folder, ignore_errors=True)
        try:
            _write_files(job.folder / "overlay" / "files", overlay.files)
            (job.folder / "overlay" / "removed.json").write_text(json.dumps(overlay.removed))
            (job.folder / "overlay" / "lay.py").write_bytes(script("lay.py"))
            (job.folder / "Dockerfile").write_text(str(plan.dockerfile))
            for number, mod in enumerate(lock.mods, 1):
                copy_mod(recipes, mod, job.folder / "mods" / str(number))
            job.docker("build")
        finally:
            shutil.rmtree(job.folder, ignore_errors=True)
        return _verify_overlay(job, overlay)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _verify_overlay(job: DockerBuild, overlay: Overlay) -> BuiltImage:
    """Check that the image has exactly the changed bytes, our labels and its base's user."""
    plan, found = job.plan, job.result()
    names = (*overlay.files, *overlay.removed)
    inside = read_files(job.ctx, found.id, names)[1] if names else {}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in inside.items()}
    wrong = sorted(n for n in names if hashes.get(n) != overlay.hashes.get(n))
    laid = check("image.overlay", f"{len(names)} changed files", ", ".join(wrong) or "all of them",
                 plan.image, ok=not wrong)  # fmt: skip
    before, after = plan.pin.user or "root", found.user or "root"
    checks = (
        check_labels(plan, found),
        *([laid] if names else []),
        check("image.user", before, after, plan.image, ok=before == after),
    )
    job.run.checks(checks)
    builder.all_passed("the built image is not as planned", checks)
    return job.keep(found, checks)


def refuse_compiled(paths: Iterable[str], where: str) -> None:
    """Raise BuildFailed if any of the changed files is compiled."""
    found = sorted(path for path in paths if COMPILED.match(path))
    if found:
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        raise BuildFailed(
            f"the change touches compiled code: {', '.join(map(clean, found[:6]))}{more}",
            where=where,
            hint="the compiled code in the base image is older: use an image that was built from "
            "this branch, or wait for one",
            id="overlay-compiled",
        )


def read_files(ctx: Context, image: str, names: Sequence[str]) -> tuple[str, dict[str, bytes]]:
    """Return the version that an image's vLLM was built as, and those of `names` that exist.

    Raises BuildFailed, HostError.
    """
    answer, sentinel = run_script(ctx, reader, image, names, name=image, max_bytes=MAX_READ)
    parts = answer.out.split(sentinel)
    try:
        found = json.loads(parts[-2] if len(parts) > 2 else "{}")
        files = {n: base64.b64decode(t) for n, t in found["files"].items() if t is not None}
        return str(found["version"]), files
    except (ValueError, KeyError, TypeError):
        last = (answer.err.strip().splitlines() or ["it printed nothing"])[-1]
        raise BuildFailed(
            f"the files of the image's vLLM cannot be read: {clean(last)}", where=image,
            hint="see image.ref in the recipe: is it a vLLM image?", id="image-silent",
        ) from None  # fmt: skip


def _patched(ctx: Context, lock: Lock, image: str) -> Overlay:
    diffs = [(pin, read_diff(diff_of(ctx, pin), pin.file.path)) for pin in lock.patches]
    paths = sorted({path for _, parts in diffs for part in parts for path in paths_of(part)})
    refuse_compiled(paths, image)
    inside = [path for path in paths if path.startswith(PACKAGE)]
    _, before = read_files(ctx, image, inside)
    git = Git(ctx.processes, ctx.environment)
    with tempfile.TemporaryDirectory(prefix="bakehouse-overlay-") as folder:
        scratch = Path(folder)
        repository, new = scratch / "git", scratch / "new"
        make_bare(ctx, git, repository)
        _write_files(scratch / "old", before)
        tree = to_objects(git, repository, scratch / "old", scratch / "index")
        for pin, parts in diffs:
            ours = [part for part in parts if part.path.startswith(PACKAGE)]
            if ours:
                fit = try_apply(git, repository, tree, b"".join(map(_text, ours)), pin.file.path)
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
    """Return every path that a part of a diff reads or writes."""
    found = {part.path}
    for line in part.header:
        if named := re.match(rb'(?:rename from |copy from |--- a/)"?([^"\t]+)', line):
            found.add(named[1].decode(errors="replace"))
    return found


def _text(part: FilePart) -> bytes:
    return b"\n".join((*part.header, *(row for hunk in part.hunks for row in hunk.body))) + b"\n"


def _from_branch(ctx: Context, lock: Lock, image: str) -> Overlay:
    source = lock.source
    if not isinstance(source, GitPin) or lock.source_tree is None:
        raise BuildFailed(
            "only a git branch can be laid over an image", where="image.source",
            id="overlay-source",
            hint="set image.source.git and commit: the changes come from its history",
        )  # fmt: skip
    git = Git(ctx.processes, ctx.environment)
    version, _ = read_files(ctx, image, ())
    with tempfile.TemporaryDirectory(prefix="bakehouse-overlay-") as folder:
        scratch = Path(folder)
        target = scratch / "tree"
        materialise(ctx, lock, target)
        repository = repository_of(ctx.places, source)
        base = base_commit(ctx, git, source, repository, version, image)
        changed = _changed(git, repository, base, lock.source_tree)
        refuse_compiled(changed, f"{source.url}, from {base[:12]} to {source.commit[:12]}")
        inside = {path: kind for path, kind in changed.items() if path.startswith(PACKAGE)}
        _require_base(ctx, git, repository, base, image, inside)
        files = {path: (target / path).read_bytes() for path, k in inside.items() if k != "D"}
    return Overlay(
        files=files,
        removed=tuple(path for path, kind in inside.items() if kind == "D"),
        left_out=tuple(path for path in changed if path not in inside),
    )


def _changed(git: Git, repository: Path, base: str, tree: str) -> dict[str, str]:
    """Paths that differ between two trees, with git's letter: A, D, M, T."""
    out = git.ask(repository, "diff-tree", "-r", "-z", "--no-renames", "--name-status", base, tree)
    words = out.split("\0")
    return dict(zip(words[1::2], words[0::2], strict=False))


def base_commit(
    ctx: Context, git: Git, source: GitPin, repository: Path, version: str, image: str
) -> str:
    """Return the commit that an image's vLLM was built from, by its version.

    A development build names its commit (`0.27.1.dev5+gabc1234`), a release its tag. Raises
    BuildFailed for an unknown commit.
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
            f"the commit of the base image is unknown: its vLLM is {version or '?'}",
            where=f"{image}; {source.url}: {getattr(error, 'what', error)}",
            hint="use a base image of a release whose tag the repository has, or of one of the "
            "branch's own commits",
            id="overlay-base",
        ) from error


def _require_base(
    ctx: Context, git: Git, repository: Path, base: str, image: str, changed: Mapping[str, str]
) -> None:
    """Check that the image's files are those of the commit: else the branch would not fit it."""
    ids = {entry.path: entry.id for entry in list_tree(git, repository, base)}
    _, found = read_files(ctx, image, tuple(changed))
    old = [path for path, kind in changed.items() if kind != "A"]
    other = [path for path in old if path not in found or _blob_id(found[path]) != ids[path]]
    other += [path for path in changed if path not in ids and path in found]
    if other:
        raise BuildFailed(
            f"{len(other)} files of the image differ from commit {base[:12]}: "
            f"{', '.join(map(clean, sorted(other)[:4]))}",
            where=image,
            hint="the image was patched, or built from another commit than its version says: use "
            "a released one",
            id="overlay-base",
        )


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
