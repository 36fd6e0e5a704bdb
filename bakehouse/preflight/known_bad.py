"""Known-bad combinations: a data file, and a pure matcher.

A condition on an unknown fact (such as the quantisation before the weights are fetched) is open. A
row with only open conditions left is a *possible* match: it warns, and the probe decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bakehouse.cuda.toolkit import numbers, satisfies
from bakehouse.models import Check, Frozen, check
from bakehouse.recipe.models import Recipe

PREFIX = "known-bad."
"""What the ids of these checks begin with."""
_SPEC = re.compile(r"(<=|>=|<|>)?(\d+(?:\.\d+)*)")
_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d+_[A-Z0-9_]+|TQ\d_\d|(?:MX|NV)FP4|FP8|BF16|F16|F32)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def _specs(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _SPEC.fullmatch(value):
            raise ValueError(f"'{value}' is not a version condition; write 13.2, <13 or >=12.9")
    return values


Texts = Annotated[tuple[str, ...], Field(min_length=1)]
Versions = Annotated[Texts, AfterValidator(_specs)]


class When(Frozen):
    """Conditions; all that are given must hold, each by one of its values."""

    engine: Texts | None = None
    engine_version: Versions | None = None
    toolkit: Versions | None = None
    quantisation: Texts | None = None
    compute_capability: Texts | None = None
    environment: Texts | None = None
    """`NAME=value`; after `!` the condition is that it is not set so."""
    flags: Texts | None = None


class Row(Frozen):
    """One known-bad combination."""

    id: Annotated[str, Field(pattern=r"[a-z0-9][a-z0-9.-]*")]
    when: When
    effect: Literal["refuse", "warn"]
    what: str
    fix: str
    source: str


@dataclass(frozen=True)
class Situation:
    """The facts of a build or a launch; None if unknown."""

    engine: str | None = None
    engine_version: str | None = None
    toolkit: str | None = None
    quantisation: frozenset[str] | None = None
    compute_capability: frozenset[str] | None = None
    environment: Mapping[str, str] | None = None
    flags: tuple[str, ...] | None = None
    inapplicable: frozenset[str] = field(default=frozenset())
    """Facts that do not apply, such as the toolkit of a CPU build."""


@dataclass(frozen=True)
class Match:
    """A row that matches, or may match."""

    row: Row
    certain: bool
    unknown: tuple[str, ...] = ()


@cache
def rows() -> tuple[Row, ...]:
    """Read the data file. Raises ValidationError for an invalid row."""
    from ruamel.yaml import YAML  # slow to import

    text = resources.files("bakehouse.preflight").joinpath("known_bad.yaml").read_text()
    found = tuple(Row.model_validate(row) for row in YAML(typ="safe", pure=True).load(text))
    if len({row.id for row in found}) != len(found):
        raise ValueError("two rows of known_bad.yaml have one id")
    return found


def matches(situation: Situation, table: Iterable[Row] | None = None) -> tuple[Match, ...]:
    """Return all rows that match, or may match, a situation."""
    found = []
    for row in rows() if table is None else table:
        verdicts = {
            name: _holds(name, values, situation)
            for name in When.model_fields
            if (values := getattr(row.when, name)) is not None
        }
        if False in verdicts.values():
            continue
        unknown = tuple(name for name, verdict in verdicts.items() if verdict is None)
        found.append(Match(row, not unknown, unknown))
    return tuple(found)


def _holds(name: str, values: tuple[str, ...], situation: Situation) -> bool | None:
    if name in situation.inapplicable:
        return False
    fact = getattr(situation, name)
    if fact is None:
        return None
    if name in ("toolkit", "engine_version"):
        return any(meets(fact, value) for value in values)
    if name == "environment":
        pairs = [(v[0] == "!", *v.removeprefix("!").partition("=")[::2]) for v in values]
        is_set = [name in fact and fnmatchcase(fact[name], value) for _, name, value in pairs]
        return any(no != yes for (no, _, _), yes in zip(pairs, is_set, strict=True))
    facts = [fact] if isinstance(fact, str) else list(fact)
    upper = [f.upper() for f in facts] if name == "quantisation" else facts
    patterns = [v.upper() for v in values] if name == "quantisation" else values
    return any(fnmatchcase(one, value) for one in upper for value in patterns)


def meets(version: str, spec: str) -> bool:
    """Whether a version meets `13.2` (any 13.2.*), `<13`, `>=12.9` and so on."""
    found = _SPEC.fullmatch(spec)
    if found is None:
        return False
    sign, bound = found[1], found[2]
    if not sign:
        return satisfies(version, bound)
    want = numbers(bound)
    have = numbers(version)[: len(want)]
    return {"<": have < want, "<=": have <= want, ">": have > want, ">=": have >= want}[sign]


def quantisations(names: Iterable[str]) -> frozenset[str] | None:
    """Return the quantisations in file and repository names; None if there are none."""
    found = {m[0].upper() for name in names for m in _QUANTISATION.finditer(name)}
    return frozenset(found) or None


def situation_of(
    recipe: Recipe,
    command: Sequence[str] = (),
    *,
    toolkit: str | None = None,
    capabilities: Iterable[str] = (),
    tensor_types: Iterable[str] = (),
    engine_version: str | None = None,
) -> Situation:
    """Return the facts of a recipe, its rendered `command`, nvcc's version, GPUs and weights."""
    weights = recipe.weights.model
    names = [n for n in (weights.files, weights.hub, weights.path, weights.url) if n]
    words = tuple(command)
    pairs = [f"{a}={b}" for a, b in pairwise(words) if a.startswith("--") and "=" not in a]
    if recipe.engine == "vllm":  # which has several spellings of a flag
        from bakehouse.engines.vllm import arguments  # most recipes do without

        read = arguments.read(words).flags
        pairs += [f"{flag}={value}" for flag, values in read.items() for value in values]
    names += [pair for pair in pairs if pair.startswith("--quantization=")]
    known = {t.upper() for t in tensor_types} | (quantisations(names) or set())
    gpus = set(capabilities)
    if not gpus and recipe.host.compute_capability:
        gpus = {recipe.host.compute_capability}
    container = recipe.container.env if recipe.container else {}
    cmake = recipe.build.cmake if recipe.build else {}
    cuda = recipe.build.cuda if recipe.build else None
    inapplicable = set() if cuda else {"toolkit"}
    if recipe.engine == "vllm" and not (recipe.container and recipe.container.gpus) and not gpus:
        inapplicable.add("compute_capability")
    return Situation(
        engine=recipe.engine,
        engine_version=engine_version,
        toolkit=toolkit or (cuda.version if cuda else None),
        quantisation=frozenset(known) or None,
        compute_capability=frozenset(gpus) or None,
        environment={**container, **recipe.serve.env},
        flags=(*(f"{n}={v}" for n, v in cmake.items()), *words, *pairs),
        inapplicable=frozenset(inapplicable),
    )


def check_combinations(recipe: Recipe, situation: Situation, where: str) -> tuple[Check, ...]:
    """Return one check for each matching row: failed if it refuses, unknown if it warns.

    A row that the recipe acknowledges passes, with the reason, for the record.
    """
    found = []
    for match in matches(situation):
        row = match.row
        reason = recipe.acknowledge.get(row.id)
        observed = f"{row.what} (known from: {row.source})"
        if match.unknown:
            observed = f"perhaps: {observed}; not known: {', '.join(match.unknown)}"
        if reason:
            observed += f"; acknowledged: {reason}"
        ok = True if reason else (False if row.effect == "refuse" and match.certain else None)
        found.append(check(f"{PREFIX}{row.id}", row.fix, observed, where, ok=ok))
    return tuple(found)
