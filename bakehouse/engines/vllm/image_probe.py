"""Ask an image what it supports.

The version that an image reports decides nothing: support for a new architecture arrives on a
branch, and a branch is versioned from wherever it forked.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from bakehouse.context import Context
from bakehouse.engines.base import RequiredCapabilities
from bakehouse.engines.vllm.command import parse
from bakehouse.engines.vllm.scripts import query_capabilities
from bakehouse.errors import BuildFailed, HostError
from bakehouse.models import Check, Frozen, check, not_passed, to_json
from bakehouse.recipe.models import Recipe
from bakehouse.redact import clean
from bakehouse.system.docker.models import Answered, ContainerSpec
from bakehouse.util.files import write_atomic


class Cuda(Frozen):
    """The CUDA release of the image's torch."""

    version: str | None = None
    architectures: tuple[str, ...] = ()


class ImageCapabilities(Frozen):
    """An image's own answer. A part that is None could not be read: `errors` says why."""

    versions: dict[str, str] = {}
    cuda: Cuda = Cuda()
    tools: dict[str, str] = {}
    architectures: dict[str, str] | None = None
    """Architecture to `module:class`."""
    lacking: dict[str, str] = {}
    """Of the architectures named in the query, those whose code needs a missing package, and
    Python's message."""
    fallbacks: tuple[str, ...] = ()
    """Classes of the Transformers backend."""
    reasoning_parsers: tuple[str, ...] | None = None
    tool_parsers: tuple[str, ...] | None = None
    speculation: tuple[str, ...] | None = None
    errors: dict[str, str] = {}

    @property
    def version(self) -> str:
        """The vLLM version that the image reports."""
        return self.versions.get("vllm", "no version")

    def falls_back(self, architecture: str) -> bool:
        """Whether only the Transformers backend implements an architecture."""
        module, _, name = (self.architectures or {}).get(architecture, "").partition(":")
        return name in self.fallbacks or "transformers" in module.rpartition("models.")[2]


def required_capabilities(recipe: Recipe, argv: Sequence[str]) -> RequiredCapabilities:
    """Return what the image must support for a recipe whose rendered command is `argv`."""
    command = parse(argv)
    # Architectures that the command names instead of those in config.json.
    named: object = None
    with suppress(ValueError, AttributeError):
        named = json.loads(command.text("--hf-overrides") or "").get("architectures")
    names = tuple(n for n in named if isinstance(n, str)) if isinstance(named, list) else ()
    return RequiredCapabilities(
        roles=tuple(role for role, _ in recipe.weights.items() if role in ("model", "drafter")),
        overridden={"model": names} if names else {},
        reasoning_parser=command.text("--reasoning-parser") or None,
        tool_parser=command.text("--tool-call-parser") or None,
        speculation=command.method or ("draft_model" if command.drafter else None),
        compute_capability=recipe.host.compute_capability,
    )


class Unreadable(Exception):
    """The output of an image holds no answer."""


def parse_answer(text: str, sentinel: str) -> ImageCapabilities:
    """Find the answer between two sentinels. Raises Unreadable."""
    parts = text.split(sentinel)
    if len(parts) < 3:
        raise Unreadable("it printed no answer")
    try:
        return ImageCapabilities.model_validate(json.loads(parts[-2]))
    except (ValueError, ValidationError) as error:
        raise Unreadable(f"its answer cannot be read: {str(error).splitlines()[0]}") from error


def draft_names(architecture: str, method: str | None) -> tuple[str, ...]:
    """Return the names under which vLLM looks for a drafter of this architecture.

    As `transformers_utils/configs/eagle.py` of vLLM 0.32 rewrites them.
    """
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}.get(method or "")
    if prefix is None or prefix in architecture:
        return (architecture,)
    return (f"{prefix}{architecture}", architecture)


def names_of(
    architectures: Mapping[str, Sequence[str]], needs: RequiredCapabilities
) -> tuple[str, ...]:
    """Return every name under which vLLM may look for the architectures of each role."""
    return tuple(dict.fromkeys(n for _, names in _wanted(architectures, needs) for n in names))


def _wanted(
    architectures: Mapping[str, Sequence[str]], needs: RequiredCapabilities
) -> list[tuple[str, tuple[str, ...]]]:
    """Role and possible names of each architecture."""
    return [
        (role, draft_names(name, needs.speculation if role == "drafter" else None))
        for role, names in architectures.items()
        for name in names
    ]


def check_image(
    found: ImageCapabilities,
    needs: RequiredCapabilities,
    architectures: Mapping[str, Sequence[str]],
    where: str,
) -> tuple[Check, ...]:
    """Compare an image's answer with what a recipe needs; parts without an answer are unknown.

    `architectures` are those in each role's config.json.
    """
    wanted = _wanted(architectures, needs)
    checks = [_check_architecture(found, role, names, where) for role, names in wanted]
    for what, name, known in (
        ("reasoning-parser", needs.reasoning_parser, found.reasoning_parsers),
        ("tool-parser", needs.tool_parser, found.tool_parsers),
        ("speculation", needs.speculation, found.speculation),
    ):
        if name:
            ok = None if known is None else name in known
            observed = name if ok or known is None else _alternatives(name, known, found)
            checks.append(check(f"image.{what}", name, observed, where, ok=ok))
    if needs.compute_capability:
        checks.append(_check_cuda(found.cuda, needs.compute_capability, where))
    return tuple(checks)


def _check_cuda(cuda: Cuda, wanted: str, where: str) -> Check:
    """Whether torch has code for a GPU: its own, of an older one with the same major number, or
    PTX, which the driver compiles for any newer one.
    """
    gpu = tuple(int(part) for part in wanted.split(".", 1))
    ok = False
    for flag in cuda.architectures:
        kind, _, number = flag.partition("_")
        digits = number.rstrip("af")
        if digits.isdigit():
            built = divmod(int(digits), 10)
            exact = digits != number  # with `a` or `f` it runs on that architecture only
            same = built == gpu if exact else built[0] == gpu[0] and built <= gpu
            ok |= (kind == "sm" and same) or (kind == "compute" and built <= gpu)
    without = "none, torch is without CUDA" if not cuda.version else ""
    observed = clean(" ".join(cuda.architectures) or without)
    known = bool(cuda.architectures) or not cuda.version
    expected = f"torch has code for compute capability {wanted}"
    return check("image.cuda", expected, observed, where, ok=ok if known else None)


def _check_architecture(
    image: ImageCapabilities, role: str, names: Sequence[str], where: str
) -> Check:
    known = image.architectures
    name = next((name for name in names if name in (known or ())), None)
    ok: bool | None = False
    if known is None:
        ok = None
        observed = image.errors.get("architectures", "the image does not list its architectures")
    elif name is None:
        observed = _alternatives(names[-1], known, image)
    elif image.falls_back(name):
        observed = (
            f"{name} only by the Transformers fallback ({known[name]}), which may load and "
            f"answer wrongly; vLLM {image.version}"
        )
    elif why := image.lacking.get(name):
        observed = (
            f"{name} is registered ({known[name]}), but its code cannot be imported: {why}; "
            f"vLLM {image.version}"
        )
    else:
        ok, observed = True, f"{name} ({known[name]})"
    expected = f"{' or '.join(names)}, by vLLM's own code"
    return check(f"image.{role}", expected, clean(observed), where, ok=ok)


def _alternatives(name: str, known: Collection[str], image: ImageCapabilities) -> str:
    """Describe a missing name: the nearest ones, and the image's version."""
    near = ", ".join(nearest(name, sorted(known))) or "no similar name"
    return clean(f"not among the {len(known)} that it has; nearest: {near}; vLLM {image.version}")


def nearest(name: str, known: Sequence[str], count: int = 4) -> list[str]:
    """Return similar names: first those with a long common beginning, then by spelling."""

    def common(other: str) -> int:
        pairs = zip(name.lower(), other.lower(), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(name), len(other)))

    family = [other for other in known if common(other) >= max(4, len(name) // 3)]
    family.sort(key=common, reverse=True)
    alike = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    return list(dict.fromkeys((*family[:count], *alike)))[:count]


QUERY_TIMEOUT_S = 300.0
"""Importing vLLM takes about 10 s from a warm disk, and minutes from a cold network disk."""
MAX_ANSWER = 4 * 2**20
"""Bytes."""
QUERY_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
_SHOWN_LINES = 12


def run_script(
    ctx: Context,
    script: ModuleType,
    image: str,
    arguments: Sequence[str],
    *,
    name: str,
    max_bytes: int,
) -> tuple[Answered, str]:
    """Run a script in an image's Python; return the answer and the sentinel around its document.

    The container has no network and no GPU, and runs as the image's user. Raises BuildFailed for
    an image without python3, HostError.
    """
    sentinel = f"BAKEHOUSE-{secrets.token_hex(16)}"
    spec = ContainerSpec(
        image=image, entrypoint=("python3",), network="none", env=QUERY_ENVIRONMENT,
        argv=("-c", _text(script), sentinel, *arguments),
    )  # fmt: skip
    try:
        return ctx.docker.ask(spec, timeout=QUERY_TIMEOUT_S, max_bytes=max_bytes), sentinel
    except HostError as error:
        if error.id != "image-command":
            raise
        raise BuildFailed(
            "the image has no python3, so it is not a vLLM image", where=name, id="image-silent",
            hint="see image.ref in the recipe",
        ) from None  # fmt: skip


def _text(script: ModuleType) -> str:
    return Path(str(script.__file__)).read_text()


def probe_image(
    ctx: Context, image: str, name: str, architectures: Sequence[str] = ()
) -> tuple[ImageCapabilities, bool]:
    """Return what an image supports, and whether a kept answer was used.

    `image` is its id, which no tag can change; `name` is shown to people. The query imports the
    code of `architectures`.

    Raises BuildFailed (6) for an image that does not answer, HostError for a Docker failure.
    """
    text = "\0".join((_text(query_capabilities), *sorted(architectures)))
    query = hashlib.sha256(text.encode()).hexdigest()[:16]
    kept = ctx.places.images / f"{image.removeprefix('sha256:')[:64]}-{query}.json"
    with suppress(OSError, ValueError):  # no answer yet, or a damaged one: query the image
        return ImageCapabilities.model_validate_json(kept.read_bytes()), True
    ctx.progress.say(f"querying {name} for supported models (may take a minute)")
    answer, sentinel = run_script(
        ctx, query_capabilities, image, architectures, name=name, max_bytes=MAX_ANSWER
    )
    try:
        found = parse_answer(answer.out, sentinel)
    except Unreadable as error:
        why = str(error)
        if answer.timed_out:
            why = f"no answer within {QUERY_TIMEOUT_S:g} s"
        elif answer.oom_killed:
            why = "the kernel's OOM killer stopped it"
        elif answer.code:
            why = f"{why} and ended with {answer.code}"
        last = answer.err.strip().splitlines()[-_SHOWN_LINES:]
        raise BuildFailed(
            f"the image did not report what it supports: {why}",
            where="\n".join([name, *(clean(line, one_line=True) for line in last)]),
            hint="try its Python by hand: docker run --rm --entrypoint python3 IMAGE -c "
            "'import vllm'",
            id="image-silent",
        ) from error
    if found.architectures is not None:  # an import that failed may succeed next time
        write_atomic(kept, to_json(found).encode())
    return found, False


def require_capabilities(
    found: ImageCapabilities,
    needs: RequiredCapabilities,
    architectures: Mapping[str, Sequence[str]],
    image: str,
) -> tuple[Check, ...]:
    """Check an image's answer. Raises BuildFailed (6) unless it supports all that is needed."""
    checks = check_image(found, needs, architectures, image)
    if missing := not_passed(checks):
        hint = (
            "use an image that has that package, or add it with image.mods"
            if any(why in str(one.observed) for one in missing for why in found.lacking.values())
            else f"use an image with the support, whatever its version (this one is "
            f"{clean(found.version)}): support for a new model is often in a branch's own tag; or "
            "add the branch with image.source"
        )
        lines = "; ".join(f"{one.id}: {one.expected}: {one.observed}" for one in missing)
        raise BuildFailed(
            f"the image does not support what the recipe needs: {missing[0].expected}",
            where=f"{image}\n{lines}",
            hint=hint,
            id="image-unable",
            checks=checks,
        )
    return checks


def summary(found: ImageCapabilities) -> str:
    """Return the versions in an image, as one line."""
    cuda = f"CUDA {found.cuda.version}" if found.cuda.version else "no CUDA"
    parts = [f"vLLM {found.version}", f"torch {found.versions.get('torch', 'unknown')}", cuda,
             f"Python {found.versions.get('python', 'unknown')}"]  # fmt: skip
    return clean(", ".join(parts), one_line=True)


def as_facts(found: ImageCapabilities) -> dict[str, object]:
    """Return what a record keeps: lengths instead of the long tables."""
    data = found.to_data()
    tables = ("architectures", "reasoning_parsers", "tool_parsers", "speculation", "fallbacks")
    counts = {name: len(data.pop(name) or ()) for name in tables}
    return {**data, "counts": counts}
