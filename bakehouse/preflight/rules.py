"""Rules across keys of a recipe.

A recipe must not mount what controls the machine: the engine's socket, or the kernel's own file
systems.

`check` knows the recipe; `plan` and `build` also know the toolkit; `serve` also knows the headers
of the weights and this machine's GPUs.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

from bakehouse.checkpoints.checkpoint import Checkpoint, read_paths
from bakehouse.context import Context
from bakehouse.cuda.configure import ARCHITECTURES, Conflict, conflicts
from bakehouse.engines.base import engine_of
from bakehouse.engines.llamacpp.cmake import NOTHING, refusals
from bakehouse.errors import BakehouseError, Fault, RecipeError, UsageError
from bakehouse.lock import Lock
from bakehouse.models import Check, Verdict
from bakehouse.preflight.known_bad import PREFIX, Row, check_combinations, rows, situation_of
from bakehouse.recipe.loader import LoadedRecipe, load
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import shown
from bakehouse.system.docker.models import Mount, gpu_request


def bind_address(host: str, *, has_key: bool) -> str:
    """Return the IP address to listen on.

    Raises UsageError for anything else, and for an address other than loopback without API key.
    """
    literal = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        address = ipaddress.ip_address(literal)
    except ValueError:
        raise UsageError(
            f"'{host}' is not an IP address", where="serve.host",
            hint="write one address, such as 127.0.0.1, ::1 or 0.0.0.0", id="bad-host",
        ) from None  # fmt: skip
    if not address.is_loopback and not has_key:
        raise UsageError(
            f"{address} can be reached from other machines, and the recipe sets no API key",
            where="serve.host", id="key-needed",
            hint="set serve.api_key.env (or .file), or listen on 127.0.0.1",
        )  # fmt: skip
    return str(address)


WEIGHTS = PurePosixPath("/weights")
"""The pinned files of each role in the container: `/weights/model` and so on."""
SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock")
HOLDS_SOCKETS = ("/", "/run", "/var", "/var/run", "/run/containerd", "/run/podman", "/run/user")
KERNEL = ("/proc", "/sys")
"""These change the kernel's settings and show other processes' environments."""
CODE = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/opt", "/boot", "/run",
        "/proc", "/sys", "/dev", "/bakehouse")  # fmt: skip
"""Code and settings of the image, which was verified as it is."""
PACKAGES = (".local", "site-packages", "dist-packages")
"""Folders in which Python looks for code, anywhere."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]+")


def volumes(texts: Sequence[str], folder: str) -> tuple[Mount, ...]:
    """Parse `SOURCE:TARGET[:ro]`: a named volume, or a path of the host. Raises UsageError."""
    read = tuple(_volume(text, folder) for text in texts)
    targets: dict[str, str] = {}
    for text, mount in zip(texts, read, strict=True):
        if other := targets.get(inner := os.path.normpath(mount.target)):
            raise _bad_volume(text, f"has the same target as '{other}'", "give each its own folder")
        targets[inner] = text
    return read


def reaches(path: str, sockets: Sequence[str] = ()) -> str | None:
    """Return why a path of the host must not be mounted, links followed; None if it may be.

    `sockets` are the sockets of engines, which no mounted folder may contain.
    """
    real = os.path.realpath(path)
    for kernel in KERNEL:
        if real == kernel or real.startswith(f"{kernel}/"):
            return f"would give the container the kernel's own {kernel}"
    if real == "/dev":
        return "would give the container the devices of this machine"
    names = [os.path.join(real, name) for name in SOCKETS]
    above = [os.path.realpath(one) for one in sockets]
    if (
        real in HOLDS_SOCKETS
        or os.path.basename(real) in SOCKETS
        or any(map(_is_socket, (real, *names)))
        or any(one == real or one.startswith(f"{real}/") for one in above)
    ):
        return "would give the container the engine's own socket, and with it this machine"
    return None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _bad_volume(text: str, why: str, hint: str) -> UsageError:
    return UsageError(f"container.volumes: '{text}' {why}", hint=hint, id="bad-volume")


def _volume(text: str, folder: str) -> Mount:
    parts = text.split(":")
    mode = parts.pop() if len(parts) == 3 else "rw"
    if len(parts) != 2 or mode not in ("ro", "rw") or not all(parts) or "\0" in text:
        raise _bad_volume(text, "is not a volume", "write SOURCE:TARGET or SOURCE:TARGET:ro")
    source, target = parts
    inner = PurePosixPath(os.path.normpath(target))
    if not target.startswith("/") or inner == PurePosixPath("/"):
        raise _bad_volume(
            text, "has no target folder in the container", "name one, such as /root/.cache/vllm"
        )
    if inner == WEIGHTS or WEIGHTS in inner.parents or inner in WEIGHTS.parents:
        raise _bad_volume(
            text, "hides the pinned weights", f"they are in {WEIGHTS}; name another folder"
        )
    if (
        inner in map(PurePosixPath, ("/root", "/home"))
        or set(PACKAGES) & set(inner.parts)
        or any(PurePosixPath(code) in (inner, *inner.parents) for code in CODE)
    ):
        raise _bad_volume(
            text,
            "hides code of the image, which was verified as it is",
            "mount data elsewhere, such as in /data or /root/.cache; change code with image.mods "
            "or image.patches",
        )
    if "/" not in source and not source.startswith(("~", ".")):
        if not _NAME.fullmatch(source):
            raise _bad_volume(
                text,
                "has an invalid volume name",
                "a name has two or more letters, digits, '_', '.' and '-'; a path begins with /, ~ "
                "or .",
            )
        return Mount(source=source, target=target, read_only=mode == "ro", volume=True)
    path = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
    if why := reaches(path):
        raise _bad_volume(text, why, "mount the one folder that the server needs")
    return Mount(source=path, target=target, read_only=mode == "ro")


OWN_DRAFT_CACHE = ("draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""Speculation modes of llama.cpp that keep a KV cache of their own for the draft."""
PROJECTOR_RULE = "projector-with-"
"""With a speculation mode appended: the rule that a patch for that mode names in `lifts`."""
_SPEC_TYPE = re.compile(r"--spec-type[=\s]+([\w,-]+)")


def rule_conflicts(recipe: Recipe) -> tuple[Conflict, ...]:
    """Return every contradiction between keys of a recipe."""
    found = list(conflicts(recipe.build))
    if recipe.engine == "llama.cpp" and recipe.build:
        refused = refusals(recipe.build.cmake, NOTHING)
        found += [Conflict(("build", "cmake", r.name), r.message, r.hint) for r in refused]
    found += _projector(recipe)
    try:
        bind_address(recipe.serve.host, has_key=recipe.serve.api_key is not None)
    except UsageError as error:
        found.append(Conflict(("serve", "host"), error.what, error.hint or ""))
    found += [
        Conflict(
            ("acknowledge", name),
            f"no known-bad combination has the id '{name}'",
            "remove it; `invoke check` lists the ids that apply",
        )
        for name in (sorted(set(recipe.acknowledge) - {row.id for row in rows()})
                     if recipe.acknowledge else ())
    ]  # fmt: skip
    return tuple(found)


def faults(loaded: LoadedRecipe) -> tuple[Fault, ...]:
    """Return contradictions and faults of the command, each at its place in the files."""
    recipe, box = loaded.recipe, loaded.recipe.container
    found = [
        loaded.origin(*c.keys).fault(f"{'.'.join(c.keys)}: {c.message}", c.hint)
        for c in rule_conflicts(recipe)
    ]
    for key, try_it in (
        ("volumes", lambda: box and volumes(box.volumes, str(loaded.folder))),
        ("gpus", lambda: box and box.gpus is not None and gpu_request(box.gpus)),
    ):
        try:
            try_it()
        except UsageError as error:
            message = error.what if key in error.what else f"container.{key}: {error.what}"
            found.append(loaded.origin("container", key).fault(message, error.hint or ""))
    try:
        engine_of(recipe.engine).refuse(loaded.command, recipe, loaded.origin("serve", "command"))
    except RecipeError as error:
        found += error.faults
    if recipe.engine == "vllm":
        from bakehouse.engines.vllm import arguments, engine  # most recipes do without

        found += [
            loaded.origin(*c.keys).fault(c.message, c.hint)
            for c in engine.conflicts(recipe, arguments.read(loaded.command))
        ]
    return tuple(found)


def require(loaded: LoadedRecipe) -> None:
    """Raise RecipeError (exit 2) with every fault, if there is one."""
    if found := faults(loaded):
        raise RecipeError(f"the recipe {loaded.recipe.name} contradicts itself", found)


def speculation_modes(recipe: Recipe) -> tuple[str, ...]:
    """Return the speculation modes of a recipe, from its key and its command."""
    written = _SPEC_TYPE.findall(recipe.serve.command)
    named = ",".join([recipe.serve.speculation or "", *written])
    return tuple(dict.fromkeys(mode.strip() for mode in named.split(",") if mode.strip()))


def _projector(recipe: Recipe) -> tuple[Conflict, ...]:
    sees = recipe.weights.projector is not None or "--mmproj" in recipe.serve.command
    patches = recipe.patches if recipe.experimental else ()
    lifted = {rule for patch in patches for rule in patch.lifts}
    modes = [
        mode
        for mode in speculation_modes(recipe)
        if mode in OWN_DRAFT_CACHE and f"{PROJECTOR_RULE}{mode}" not in lifted
    ]
    if recipe.engine != "llama.cpp" or not sees or not modes:
        return ()
    rules = ", ".join(f"{PROJECTOR_RULE}{mode}" for mode in modes)
    return (
        Conflict(
            ("serve", "speculation") if recipe.serve.speculation else ("serve", "command"),
            f"{', '.join(modes)} keeps its own KV cache for the draft, which never sees an "
            "image: with a projector, every image request ends with HTTP 500",
            "remove the speculation or the projector (ngram modes work with it), or use a patch "
            f"that fixes this, with lifts: [{rules}] and experimental: true",
        ),
    )


class Facts(Protocol):
    """A record that facts are added to."""

    def fact(self, name: str, value: object) -> None:
        """Record a fact."""


_ORDER = ("toolkit", "environment", "flags", "quantisation", "compute_capability")
"""The first of these conditions in a row decides which key to blame."""


def known_bad(
    loaded: LoadedRecipe,
    *,
    lock: Lock | None = None,
    toolkit: str | None = None,
    capabilities: Iterable[str] = (),
    types: Iterable[str] = (),
) -> tuple[Check, ...]:
    """Return a check for each known-bad combination that matches.

    `toolkit` is nvcc's full version, `types` are the tensor types in the headers of the weights. A
    check is failed if it refuses, unknown if it warns, passed if the recipe acknowledges it.
    """
    number = lock.build_number if lock and loaded.recipe.engine == "llama.cpp" else 0
    situation = situation_of(
        loaded.recipe,
        loaded.command,
        toolkit=toolkit,
        capabilities=capabilities,
        tensor_types=types,
        engine_version=str(number) if number else None,
    )
    return check_combinations(loaded.recipe, situation, shown(loaded.path))


def load_and_check(
    path: Path,
    overrides: Sequence[str] = (),
    change: Callable[[LoadedRecipe], LoadedRecipe] | None = None,
    *,
    combinations: bool = True,
) -> LoadedRecipe:
    """Load a recipe, `change` it, and check its rules and (`combinations`) known-bad combinations.

    Raises RecipeError.
    """
    loaded = load(path, overrides)
    loaded = change(loaded) if change else loaded
    require(loaded)
    if combinations:
        refuse(loaded, known_bad(loaded))
    return loaded


def meant_for(ctx: Context, loaded: LoadedRecipe) -> tuple[str, ...]:
    """Return the compute capabilities of a build: the recipe's, else those of this machine."""
    if named := loaded.recipe.host.compute_capability:
        return (named,)
    build = loaded.recipe.build
    if build is None or build.cuda is None or build.cmake.get(ARCHITECTURES) != "native":
        return ()
    return ctx.compute_capabilities


def types_in(checkpoints: Iterable[Checkpoint | None]) -> frozenset[str]:
    """Return the tensor formats of checkpoints."""
    return frozenset(name for one in checkpoints if one for name in one.formats)


def types_on_disk(files: Iterable[Sequence[str]]) -> frozenset[str]:
    """Return the tensor types of weights that are on this machine; damaged ones are skipped."""
    found: set[str] = set()
    for names in files:
        paths = [Path(name) for name in names]
        if paths and all(path.is_file() for path in paths):
            with suppress(BakehouseError):
                found |= read_paths(paths).formats
    return frozenset(found)


def combination_faults(loaded: LoadedRecipe, checks: Iterable[Check]) -> tuple[Fault, ...]:
    """Return the refused combinations, each at its key in the recipe."""
    by_id = {PREFIX + row.id: row for row in rows()}
    found = []
    for one in checks:
        if one.verdict is Verdict.FAILED and (row := by_id.get(one.id)):
            hint = f"{row.fix}; or accept it: acknowledge: {{{row.id}: why}}"
            message = f"known to be bad, {row.id}: {row.what}"
            found.append(loaded.origin(*_place(row, loaded.recipe)).fault(message, hint))
    return tuple(found)


def refuse(loaded: LoadedRecipe, checks: tuple[Check, ...]) -> None:
    """Raise RecipeError (exit 2) for a combination that must not be built or served."""
    if found := combination_faults(loaded, checks):
        error = RecipeError(
            f"the recipe {loaded.recipe.name} uses a combination that is known to fail", found
        )
        error.id = "known-bad"
        error.checks = checks
        raise error


def note(ctx: Context, loaded: LoadedRecipe, checks: tuple[Check, ...], record: Facts) -> None:
    """Record what matched, with the reasons of acknowledgements; then refuse or warn."""
    if checks:
        record.fact("known_bad", [one.to_data() for one in checks])
    refuse(loaded, checks)
    for line in warnings(checks):
        ctx.progress.say(line)


def warnings(checks: Iterable[Check]) -> list[str]:
    """Return one line for each warning and each acknowledged combination."""
    words = {Verdict.UNKNOWN: "warning", Verdict.PASSED: "acknowledged"}
    return [
        f"{words[one.verdict]}: {one.id.removeprefix(PREFIX)}: {one.observed} ({one.expected})"
        for one in checks
        if one.verdict in words
    ]


def _place(row: Row, recipe: Recipe) -> tuple[str, ...]:
    """Return the key to blame: one that meets a condition of the row."""
    conditions = {name: getattr(row.when, name) for name in _ORDER}
    names = [c.partition("=")[0] for c in conditions["environment"] or () if c[0] != "!"]
    if not names:  # a variable that is not set has no place
        conditions["environment"] = None
    first = next((name for name, values in conditions.items() if values), None)
    if first == "environment":
        room = "serve" if any(name in recipe.serve.env for name in names) else "container"
        return (room, "env", names[0])
    if first == "flags":
        return ("build", "cmake") if recipe.build and recipe.build.cmake else ("serve", "command")
    if first == "quantisation":
        model = recipe.weights.model
        key = next((key for key in ("hub", "path", "url") if getattr(model, key)), "hub")
        return ("weights", "model", key)
    places = {
        "toolkit": ("build", "cuda", "version"),
        "compute_capability": ("host", "compute_capability"),
    }
    return places.get(first or "", ("name",))
