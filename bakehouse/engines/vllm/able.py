"""What a vLLM image said that it supports, held against what a recipe needs. Pure.

The version is what an image calls itself; it is reported, and decides nothing: support for a new
architecture arrives on a branch, and a branch is versioned from wherever it forked.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from bakehouse.base import Frozen
from bakehouse.checks import Check, check
from bakehouse.plan.types import Asks
from bakehouse.redact import clean


class Cuda(Frozen):
    """The CUDA release of the image's torch."""

    version: str | None = None
    architectures: tuple[str, ...] = ()


class Able(Frozen):
    """An image's own answer. A part that is None could not be asked: `errors` says why."""

    versions: dict[str, str] = {}
    cuda: Cuda = Cuda()
    tools: dict[str, str] = {}
    architectures: dict[str, str] | None = None
    """Architecture to `module:class`."""
    lacking: dict[str, str] = {}
    """Of those that were asked for by name, the ones whose code needs a package that is not there,
    and what Python says."""
    fallbacks: tuple[str, ...] = ()
    """Classes of the Transformers backend."""
    reasoning_parsers: tuple[str, ...] | None = None
    tool_parsers: tuple[str, ...] | None = None
    speculation: tuple[str, ...] | None = None
    errors: dict[str, str] = {}

    @property
    def claimed(self) -> str:
        """The version that the image claims."""
        return self.versions.get("vllm", "no version")

    def falls_back(self, architecture: str) -> bool:
        """Whether the Transformers backend stands behind an architecture."""
        module, _, name = (self.architectures or {}).get(architecture, "").partition(":")
        return name in self.fallbacks or "transformers" in module.rpartition("models.")[2]


class Unreadable(Exception):
    """There is no answer in what the image printed."""


def parse(text: str, sentinel: str) -> Able:
    """Find the answer between two sentinels. Raises Unreadable."""
    parts = text.split(sentinel)
    if len(parts) < 3:
        raise Unreadable("it printed no answer")
    try:
        return Able.model_validate(json.loads(parts[-2]))
    except (ValueError, ValidationError) as error:
        raise Unreadable(f"its answer cannot be read: {str(error).splitlines()[0]}") from error


def draft_names(architecture: str, method: str | None) -> tuple[str, ...]:
    """Names under which vLLM looks for a drafter of this architecture.

    As `transformers_utils/configs/eagle.py` of vLLM 0.32 rewrites them.
    """
    prefix = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash"}.get(method or "")
    if prefix is None or prefix in architecture:
        return (architecture,)
    return (f"{prefix}{architecture}", architecture)


def names_of(architectures: Mapping[str, Sequence[str]], asks: Asks) -> tuple[str, ...]:
    """Every name under which vLLM may look for what the roles declare."""
    found = (
        one
        for role, names in architectures.items()
        for name in names
        for one in _names(role, name, asks)
    )
    return tuple(dict.fromkeys(found))


def _names(role: str, name: str, asks: Asks) -> tuple[str, ...]:
    method = asks.speculation if role == "drafter" else None
    return (name,) if method is None else draft_names(name, method)


def judge(
    able: Able, asks: Asks, architectures: Mapping[str, Sequence[str]], where: str
) -> tuple[Check, ...]:
    """Hold an answer against what a recipe needs.

    `architectures` are those in each role's config.json. What could not be asked is unknown.
    """
    checks = [
        _architecture(able, role, _names(role, name, asks), where)
        for role, names in architectures.items()
        for name in names
    ]
    needs = (
        ("reasoning-parser", asks.reasoning_parser, able.reasoning_parsers),
        ("tool-parser", asks.tool_parser, able.tool_parsers),
        ("speculation", asks.speculation, able.speculation),
    )
    for what, name, known in needs:
        if name:
            ok = None if known is None else name in known
            seen = _seen(name, known, able)
            checks.append(check(f"image.{what}", name, seen, where, ok=ok))
    if asks.compute_capability:
        checks.append(_capability(able.cuda, asks.compute_capability, where))
    return tuple(checks)


def _capability(cuda: Cuda, wanted: str, where: str) -> Check:
    """Whether the image's torch has code for a GPU: its own, an older one of the same major
    number, or PTX, which the driver compiles for any newer one.
    """
    major, minor = (int(part) for part in wanted.split(".", 1))
    fits = False
    for flag in cuda.architectures:
        kind, _, number = flag.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        own = divmod(int(digits), 10)
        same = own[0] == major and own[1] <= minor and (digits == number or own == (major, minor))
        fits |= (kind == "sm" and same) or (kind == "compute" and own <= (major, minor))
    seen = " ".join(cuda.architectures) or (
        "none, torch is without CUDA" if not cuda.version else ""
    )
    known = bool(cuda.architectures) or not cuda.version
    expected = f"torch has code for compute capability {wanted}"
    return check("image.cuda", expected, clean(seen), where, ok=fits if known else None)


def _architecture(able: Able, role: str, names: Sequence[str], where: str) -> Check:
    known = able.architectures
    expected = f"{' or '.join(names)}, by vLLM's own code"
    if known is None:
        seen = able.errors.get("architectures", "it does not say which it knows")
        return check(f"image.{role}", expected, clean(seen), where, ok=None)
    found = next((one for one in names if one in known), None)
    if found is None:
        return check(f"image.{role}", expected, _seen(names[-1], known, able), where, ok=False)
    if able.falls_back(found):
        fallback = (
            f"{found} only by the Transformers fallback ({known[found]}), which may load and "
            f"answer wrongly; vLLM {able.claimed}"
        )
        return check(f"image.{role}", expected, clean(fallback), where, ok=False)
    if why := able.lacking.get(found):
        broken = f"{found} is registered ({known[found]}), and its code cannot be imported: {why}"
        seen = clean(f"{broken}; vLLM {able.claimed}")
        return check(f"image.{role}", expected, seen, where, ok=False)
    return check(f"image.{role}", expected, f"{found} ({known[found]})", where, ok=True)


def _seen(name: str, known: Iterable[str] | None, able: Able) -> str | None:
    """What there is in place of a name: the nearest ones, and what the image claims to be."""
    if known is None:
        return None
    there = sorted(known)
    if name in there:
        return name
    near = ", ".join(nearest(name, there)) or "nothing near it"
    return clean(f"not among the {len(there)} that it has; nearest: {near}; vLLM {able.claimed}")


def nearest(name: str, known: Sequence[str], count: int = 4) -> list[str]:
    """Names like this one: those that begin alike first, a family's members, then by spelling."""
    family = [one for one in known if _begin(one.lower(), name.lower()) >= max(4, len(name) // 3)]
    family.sort(key=lambda one: -_begin(one.lower(), name.lower()))
    alike = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    return list(dict.fromkeys((*family[:count], *alike)))[:count]


def _begin(one: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
