"""Makes, serves and judges one variant after another, and keeps what was measured."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.probe.client import Client, RequestLimits
from bakehouse.probe.golden import read_golden, write_golden
from bakehouse.probe.models import GOOD, Endpoint, ServedModel, SuiteInput
from bakehouse.probe.runner import take_golden
from bakehouse.probe.suites import REGISTRY
from bakehouse.recipe.loader import find, load
from bakehouse.recipe.models import SuiteName, default_suites
from bakehouse.system.http import Unreachable
from scripts.bench.gate_measure import NotServed, decoded, ruler, served
from scripts.bench.gate_variants import REFERENCE, Variant
from scripts.bench.gate_weights import Weights, requantise, rewrite

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "bakehouse/probe", "bakehouse/recipe/models.py", "recipes/smollm2-cpu.yaml",
    "scripts/bench/gate_measure.py",
)  # fmt: skip
"""What can change a result, beside the variant, the model and the engine."""
CONTEXT = 1024
"""Tokens of the shortest context that a variant is served with."""
PROBE = load(find("smollm2-cpu", ROOT / "recipes")).recipe.probe
"""What the recipe of this model asks."""
DECIDING = PROBE.suites or default_suites("llama.cpp")
HASTE = RequestLimits(base=30.0, per_token=0.2, attempts=2, longest_wait=1.0)


class NoTool(Exception):
    """A variant needs a program that is not there."""


@dataclass(frozen=True)
class Judged:
    """What one suite came to, and what it would have come to without a golden value."""

    verdict: str
    summary: str
    alone: str
    """The verdict where no golden value is known."""
    same: str
    """The verdict where the golden values are of this very server (build, command, machine)."""
    seconds: float
    tokens: int
    """Decoded, by the server's own counter."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def detected(self) -> bool:
        """Whether the suite refuses the server."""
        return self.verdict not in GOOD

    @property
    def detected_alone(self) -> bool:
        """Whether it would do so without a golden value."""
        return self.alone not in GOOD

    @property
    def detected_same(self) -> bool:
        """Whether it would do so with golden values of this very server."""
        return self.same not in GOOD

    @property
    def golden(self) -> dict[str, float]:
        """What was measured against the golden values; empty where there are none."""
        found: dict[str, float] = self.figures.get("golden", {})
        return found


@dataclass(frozen=True)
class Row:
    """One variant as it was measured."""

    name: str
    what: str
    kind: str
    golden: bool
    """Whether a golden value stood for these weights and this KV cache."""
    ruler_nats: float | None = None
    """Of all the ruler's texts together; None where some probability was not a number."""
    ruler_tokens: int = 0
    not_served: str | None = None
    suites: dict[str, Judged] = field(default_factory=dict)
    """Those of the recipe, which decide, and `reference`."""

    def deciding(self) -> list[Judged]:
        """Give the suites that decide."""
        return [judged for name, judged in self.suites.items() if name in DECIDING]

    @property
    def decoded(self) -> int:
        """Tokens that the deciding suites made the server decode."""
        return sum(judged.tokens for judged in self.deciding())

    @property
    def seconds(self) -> float:
        """For the deciding suites, without loading."""
        return sum(judged.seconds for judged in self.deciding())

    @property
    def detected(self) -> bool:
        """Whether anything refuses the server."""
        return self.not_served is not None or any(s.detected for s in self.deciding())

    @property
    def detected_alone(self) -> bool:
        """Whether it is refused where no golden value is known."""
        return self.not_served is not None or any(s.detected_alone for s in self.deciding())

    @property
    def detected_same(self) -> bool:
        """Whether it is refused where the golden values are of this very server."""
        return self.not_served is not None or any(s.detected_same for s in self.deciding())


def read_row(data: dict[str, Any]) -> Row:
    """Read a row as it was kept."""
    suites = {name: Judged(**judged) for name, judged in data["suites"].items()}
    return Row(**{**data, "suites": suites})


class Bench:
    """One engine, one model, and the file of results."""

    def __init__(self, server: Path, model: Path, work: Path, results: Path | None) -> None:
        self._server, self._model, self._work, self._results = server, model, work, results
        self._context = Context(Places(work / "cache", work / "state"), ROOT / "recipes")
        self._goldens = work / "goldens"
        self._goldens.mkdir(exist_ok=True)
        self._basis = _digest([*sorted(server.resolve().parent.iterdir()), model, *_sources()])
        kept = results and results.exists() and json.loads(results.read_text())
        self._kept: dict[str, Any] = kept or {}

    def kept(self, variant: Variant) -> Row | None:
        """Give what was measured of a variant; None where it was not, or is out of date."""
        kept = self._kept.get(variant.name) or {}
        return read_row(kept["row"]) if kept.get("digest") == self._digest_of(variant) else None

    def measure(self, variant: Variant) -> Row:
        """Give a variant's row, from the file of results or by serving it. Raises NoTool."""
        if row := self.kept(variant):
            return row
        if variant.same:
            self._have_golden(variant.kv)
        with self._file(variant) as model:
            row = self._judge(variant, model)
        self._kept[variant.name] = {"digest": self._digest_of(variant), "row": asdict(row)}
        self._keep()
        return row

    def _digest_of(self, variant: Variant) -> str:
        """Name everything that could change a variant's result."""
        how = (variant.flags, variant.kv, variant.rewrite, variant.same, _told(variant.edit))
        told = repr((variant.name, variant.what, how))
        return hashlib.sha256(f"{self._basis}{told}".encode()).hexdigest()[:16]

    def _keep(self) -> None:
        if self._results is None:
            return
        half = self._results.with_suffix(".half")
        half.write_text(json.dumps(self._kept, indent=1, sort_keys=True) + "\n")
        half.replace(self._results)

    @contextmanager
    def _file(self, variant: Variant) -> Iterator[Path]:
        """Make the variant's file; it is gone afterwards."""
        if not variant.edit and not variant.rewrite:
            yield self._model
            return
        path = self._work / "variant.gguf"
        try:
            self._make(variant, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make(self, variant: Variant, path: Path) -> None:
        if variant.edit:
            shutil.copyfile(self._model, path)
            weights = Weights(path, "r+")
            variant.edit(weights)
            return
        tool, _, kind = variant.rewrite.rpartition(":")
        if not tool:
            rewrite(self._model, path, kind)
            return
        program = self._server.with_name("llama-quantize")
        if not program.exists():
            raise NoTool(f"there is no {program}")
        requantise(program, self._model, path, kind)

    def _have_golden(self, kind: str) -> None:
        """Have golden values of the unchanged model with a type of KV cache."""
        reference = next(r for r in REFERENCE if r.kv == kind)
        known = self._known(reference)
        if read_golden(known) is None:
            with self._served(reference, self._model) as url:
                golden = take_golden(self._context, _endpoint(url), known, patience=HASTE)
            write_golden(known, golden)

    def _served(self, variant: Variant, model: Path) -> AbstractContextManager[str]:
        log = self._work / "server.log"
        return served(self._context.http, self._server, model, variant.flags, log)

    def _judge(self, variant: Variant, model: Path) -> Row:
        known = read_golden(self._known(variant)) is not None
        row = Row(variant.name, variant.what, variant.kind, known)
        try:
            with self._served(variant, model) as url:
                nats, tokens = ruler(Client(self._context, _endpoint(url), HASTE))
                suites: dict[str, Judged] = {
                    name: self._suite(name, url, variant) for name in asked()
                }
        except (NotServed, Unreachable) as error:
            return replace(row, not_served=str(error))
        return replace(row, suites=suites, ruler_tokens=tokens, ruler_nats=nats)

    def _suite(self, name: SuiteName, url: str, variant: Variant) -> Judged:
        """Ask one suite, and judge what was heard with and without golden values."""
        endpoint, known, http = _endpoint(url), self._known(variant), self._context.http
        given = SuiteInput(endpoint, PROBE, known, read_golden(known))
        before = decoded(http, url)
        talk = Client(self._context, endpoint, HASTE)
        heard = REGISTRY[name].ask(talk, given)
        proof = REGISTRY[name].judge(heard, given)
        alone = REGISTRY[name].judge(heard, replace(given, golden=None))
        same = REGISTRY[name].judge(heard, _of_this_server(given))
        return Judged(
            proof.verdict, proof.summary, alone.verdict, same.verdict, round(talk.cost.seconds, 2),
            decoded(http, url) - before, dict(proof.figures),
        )  # fmt: skip

    def _known(self, variant: Variant) -> ServedModel:
        """What is known of a variant: a mutant goes by the name of the weights that it spoils."""
        name = "smollm2" if variant.same else variant.rewrite
        weights16 = hashlib.sha256(name.encode()).hexdigest()[:16]
        return ServedModel(weights16, variant.kv, "cpu", "", self._goldens)


def asked() -> tuple[SuiteName, ...]:
    """Give the suites that each variant is judged by."""
    return tuple(dict.fromkeys((*DECIDING, "reference")))


def _endpoint(url: str) -> Endpoint:
    return Endpoint(url, model="default", engine="llama.cpp", context=CONTEXT)


def _of_this_server(given: SuiteInput) -> SuiteInput:
    """Let the golden values be those of the server that is judged, whose bounds are tighter."""
    golden, known = given.golden, given.known
    return replace(
        given, known=replace(known, identity="same") if known else None,
        golden=golden.model_copy(update={"identity": "same"}) if golden else None,
    )  # fmt: skip


def _told(value: object) -> str:
    """Tell an edit by its code and by what it was made with; anything else as it prints."""
    if isinstance(value, tuple):
        return ",".join(map(_told, value))
    if not isinstance(value, FunctionType):
        return repr(value)
    cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
    return f"{value.__qualname__} {value.__code__.co_code.hex()} {_told(cells)}"


def _sources() -> list[Path]:
    """Files of ours that can change a result."""
    found = [ROOT / part for part in SOURCES]
    return sorted(
        f
        for s in found
        for f in (s.rglob("*") if s.is_dir() else [s])
        if f.is_file() and f.suffix in (".py", ".yaml")
    )


def _digest(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
