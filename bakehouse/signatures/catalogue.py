"""The data files, read once for each engine, and the index that finds candidates for a line."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from bakehouse.signatures.model import Row
from bakehouse.signatures.pattern import Template, spellings

FOLDER = Path(__file__).parent

_COMMON = frozenset(
    b"""a all an and any are array as at available backend be being bool build by cache cannot
    capability class cmake code compatible completed config context could count cpu create cuda
    data default device devices did directory do does done engine error errors exception exit
    exited fail failed failure false fatal file files find for found from get ggml gguf given
    gpu has have if in index info init initialize initialized int into invalid is it its key
    kernel kv layers length line list llama load loaded loader loading log main max memory message
    missing mode model models module more must n name need no none not null num number of on one
    only open option or out process python query read ready request requests response run s
    server service set shape size slot slots so source space srv start started state str such
    supported system t tensor that the there this time to token tokens true try type unable
    unknown unsupported update use used using value version vllm vocab w warn warning was with
    worker you d e i m r""".split()
)
"""Words of every log: a poor choice to look a signature up by."""


@dataclass(frozen=True, eq=False)
class Signature:
    """One template of one row."""

    row: Row
    template: Template


@dataclass(frozen=True)
class Catalogue:
    """Rows, and their templates by the rarest word each of them must find in a line."""

    rows: dict[str, Row]
    by_word: dict[bytes, tuple[Signature, ...]]
    words: frozenset[bytes] = field(repr=False)
    every_word: frozenset[bytes] = field(repr=False)
    """Of all templates, the others of each as well."""

    def worth(self, words: Iterable[bytes]) -> frozenset[bytes]:
        """Give the rarest words of signatures whose words are all among those of some lines."""
        held = self.every_word.intersection(words)
        return frozenset(
            word
            for word in held & self.words
            if any(signature.template.words <= held for signature in self.by_word[word])
        )

    def candidates(self, words: Iterable[bytes]) -> tuple[Signature, ...]:
        """Give the signatures that a line of these words may show, in the files' order."""
        held = frozenset(words)
        return tuple(
            signature
            for word in held & self.words
            for signature in self.by_word[word]
            if signature.template.words <= held
        )


def build(rows: Iterable[Row]) -> Catalogue:
    """Index rows; ValueError for a double id or a template without words."""
    known: dict[str, Row] = {}
    index: dict[bytes, list[Signature]] = {}
    for row in rows:
        if row.id in known:
            raise ValueError(f"the id '{row.id}' stands twice")
        known[row.id] = row
        for template in (template for text in row.pattern for template in spellings(text)):
            anchor = max(template.words, key=lambda word: (word not in _COMMON, len(word), word))
            index.setdefault(anchor, []).append(Signature(row, template))
    frozen = {word: tuple(found) for word, found in index.items()}
    every = (s.template.words for found in frozen.values() for s in found)
    return Catalogue(known, frozen, frozenset(frozen), frozenset().union(*every))


def resolve(rows: Collection[Row]) -> None:
    """ValueError where a row refers to one that there is not."""
    ids = {row.id for row in rows}
    for row in rows:
        for name in (*row.needs, *row.unless):
            if name not in ids:
                raise ValueError(f"{row.id} refers to '{name}', which no row is called")


def read(path: Path) -> list[Row]:
    """Read one data file; strict, so that a misspelt key is an error."""
    from ruamel.yaml import YAML  # only who scans a log pays for it

    return [Row.model_validate(entry) for entry in YAML(typ="safe").load(path)]


def wanted(row: Row, engine: str | None) -> bool:
    """Whether a row can show in this engine's log: only rows of the other engine cannot.

    A server's log holds what Docker, CMake (kernels compiled at run time) and git say as well, so
    only rows that belong to nobody but the other server are left out.
    """
    servers = {"llama.cpp", "vllm"}
    return not (engine in servers and row.engine and set(row.engine) <= servers - {engine})


@lru_cache(maxsize=1)
def every_row() -> tuple[Row, ...]:
    """Give the rows of all data files, read from disk once a process."""
    rows = tuple(row for path in sorted(FOLDER.glob("*.yaml")) for row in read(path))
    resolve(rows)
    return rows


@lru_cache(maxsize=8)
def catalogue(engine: str | None = None) -> Catalogue:
    """Give all rows that can show in this engine's log."""
    return build(row for row in every_row() if wanted(row, engine))
