"""Counters of an engine at `/metrics`: its work and its progress. Pure.

Names as llama.cpp build 11434 (`tools/server/server-task.cpp`) and vLLM 0.32 give them, in the text
format of Prometheus. A counter that an engine does not publish is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MOST_POSITIONS = 1024
"""Maximum position of a draft; a higher label is invalid."""


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus text."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Counters:
    """What an engine has done since its start, in tokens unless stated otherwise."""

    generated: float | None = None
    prompted: float | None = None
    decodes: float | None = None
    """Passes through the model."""
    running: float | None = None
    """Requests in progress."""
    waiting: float | None = None
    """Requests in the queue."""
    drafts: float | None = None
    """Verified drafts."""
    draft_tokens: float | None = None
    accepted: float | None = None
    """Accepted draft tokens."""
    per_position: tuple[float, ...] = ()
    """Accepted tokens at each position of a draft, the first position first."""

    @property
    def busy(self) -> bool:
        """Whether there is work to do, as far as the counters show."""
        return bool((self.running or 0) + (self.waiting or 0))

    def moved(self, before: Counters) -> bool | None:
        """Whether there was progress since; None if no counter of progress is published.

        A counter that fell was reset, by another server on the same port.
        """
        pairs = [
            (getattr(before, name), getattr(self, name))
            for name in ("generated", "prompted", "decodes")
        ]
        known = [(old, new) for old, new in pairs if old is not None and new is not None]
        return any(old != new for old, new in known) if known else None

    def since(self, before: Counters) -> Counters:
        """Subtract an earlier reading; running and waiting requests stay as they are now."""
        changes: dict[str, float | None] = {}
        for field in fields(self):
            if field.name in ("running", "waiting", "per_position"):
                continue
            old, new = getattr(before, field.name), getattr(self, field.name)
            changes[field.name] = new - (old or 0) if new is not None else None
        old_positions = (*before.per_position, *(0.0,) * len(self.per_position))
        positions = (n - o for n, o in zip(self.per_position, old_positions, strict=False))
        return Counters(
            running=self.running, waiting=self.waiting, per_position=tuple(positions), **changes
        )


_NAMES = {
    "generated": ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total"),
    "prompted": ("llamacpp:prompt_tokens_total", "vllm:prompt_tokens_total"),
    "decodes": ("llamacpp:n_decode_total",),
    "running": ("llamacpp:requests_processing", "vllm:num_requests_running"),
    "waiting": ("llamacpp:requests_deferred", "vllm:num_requests_waiting"),
    "drafts": ("llamacpp:spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts_total"),
    "draft_tokens": (
        "llamacpp:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "accepted": (
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
}
_PER_POSITION = (
    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


def samples(text: str) -> tuple[Sample, ...]:
    """Parse a Prometheus text; other lines are skipped."""
    found = []
    for line in text.splitlines():
        if line.startswith("#") or not (matched := _SAMPLE.fullmatch(line)):
            continue
        try:
            value = float(matched[3])
        except ValueError:
            continue
        found.append(Sample(matched[1], dict(_LABEL.findall(matched[2] or "")), value))
    return tuple(found)


def read_counters(text: str | None) -> Counters | None:
    """Read an engine's counters, summed over its workers; None if the text has none."""
    seen = samples(text or "")
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for sample in seen:
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        where = sample.labels.get("position", "")
        if sample.name in _PER_POSITION and where.isdecimal() and int(where) < MOST_POSITIONS:
            positions[int(where)] = positions.get(int(where), 0.0) + sample.value
    values = {
        field: next((totals[name] for name in names if name in totals), None)
        for field, names in _NAMES.items()
    }
    if not any(value is not None for value in values.values()):
        return None
    last = max(positions, default=-1)
    return Counters(per_position=tuple(positions.get(n, 0.0) for n in range(last + 1)), **values)
