"""Parser of `vllm serve` commands: flags, the model, speculation. Pure.

As in vLLM 0.32 (`engine/arg_utils.py`, `utils/argparse_utils.py`): `_` and `-` are the same in a
flag, `--flag=value` and `--flag value` as well, a JSON option may be written key by key
(`--speculative-config.method ngram`), and the last of two wins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHORT = {
    "-sc": "--speculative-config", "-q": "--quantization", "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size", "-ep": "--enable-expert-parallel",
    "-cc": "--compilation-config", "-ac": "--attention-config", "-dc": "--diffusion-config",
    "-n": "--nnodes", "-r": "--node-rank", "-asc": "--api-server-count",
    "-dp": "--data-parallel-size", "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank", "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address", "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend", "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb", "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--spec-method": "--speculative-config.method", "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
}  # fmt: skip
"""Other spellings of a flag."""
SPECULATION = "--speculative-config"
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w.-]*")
_WHOLE = re.compile(r"(\d{1,12})(?:\.0)?([kKmMgG]?)")
_FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


@dataclass(frozen=True)
class Command:
    """A parsed `vllm serve` command."""

    program: tuple[str, ...]
    """The words before the first flag and the model: `vllm serve`."""
    model: str | None
    """The first word that belongs to no flag."""
    extra: tuple[str, ...]
    """More such words, which vLLM does not accept."""
    flags: Mapping[str, tuple[str, ...]]
    """By long spelling: the words that follow; the last one wins."""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """The speculative settings; empty for none."""
    bad_json: str | None = None
    """Why the speculative settings are invalid."""

    def text(self, *names: str) -> str | None:
        """Return the first value of the first of these flags that has one."""
        for name in names:
            if values := self.flags.get(name):
                return values[0]
        return None

    def number(self, *names: str) -> int | None:
        """Return a whole number, as vLLM reads `8192`, `8k` (1000) and `8K` (1024)."""
        found = _WHOLE.fullmatch(self.text(*names) or "")
        return int(found[1]) * _FACTORS[found[2]] if found else None

    @property
    def method(self) -> str | None:
        """The speculative method, if the command names one."""
        value = self.speculation.get("method")
        return value if isinstance(value, str) and value else None

    @property
    def drafter(self) -> str | None:
        """The drafter's model, if the command names one."""
        value = self.speculation.get("model")
        return value if isinstance(value, str) and value not in ("", "ngram", "[ngram]") else None

    @property
    def draft_tokens(self) -> int | None:
        """Number of tokens drafted at once."""
        value = self.speculation.get("num_speculative_tokens")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def spelling(argument: str) -> str:
    """Return a flag's long spelling: without `=value`, and `_` as `-` in its first part."""
    name = argument.partition("=")[0]
    head, dot, rest = name.partition(".")
    head = head.replace("_", "-") if head.startswith("--") else head
    return SHORT.get(f"{head}{dot}{rest}", f"{SHORT.get(head, head)}{dot}{rest}")


def read(argv: Sequence[str]) -> Command:
    """Parse a command; never raises: the engine's `refuse` reports what is wrong."""
    begin = 2 if list(argv[1:2]) == ["serve"] else 1
    flags: dict[str, tuple[str, ...]] = {}
    alone: list[str] = []
    current: str | None = None
    for word in argv[begin:]:
        if _FLAG.match(word) and not re.fullmatch(r"-\d.*", word):
            current = spelling(word)
            _, equals, value = word.partition("=")
            flags[current] = (value,) if equals else ()
            if equals:
                current = None
        elif current is not None:
            flags[current] += (word,)
            current = None if current not in SEVERAL else current
        else:
            alone.append(word)
    speculation, bad = _speculation(flags)
    return Command(
        tuple(argv[:begin]), alone[0] if alone else None, tuple(alone[1:]), flags, speculation, bad
    )


def shortened(flag: str, judged: Iterable[str]) -> str | None:
    """Return the flag among `judged` that `flag` abbreviates; None for a whole flag.

    vLLM's parser takes every unambiguous beginning (`--trust-remote`), and a value without a space
    after a letter (`-n2`). `flag` is spelled as in `Command.flags`.
    """
    head = flag.partition(".")[0]
    whole = (one.partition(".")[0] for one in SHORT.values())
    known = sorted({*judged, *SHORT, *whole, *SEVERAL})
    if head in known:
        return None
    glued = [long for short, long in SHORT.items() if len(short) == 2 and head.startswith(short)]
    return next((one for one in (*known, *glued) if one.startswith(head) or one in glued), None)


SEVERAL = frozenset({
    "--served-model-name", "--lora-modules", "--middleware", "--api-key", "--prompt-adapters",
    "--allowed-media-domains", "--sleep-preserve-parameter-names", "--logits-processors",
    "--ignore-patterns", "--numa-bind-nodes", "--numa-bind-cpus", "--kv-cache-dtype-skip-layers",
    "--cpu-offload-params", "--offload-params", "--lora-target-modules",
    "--collect-detailed-traces", "--cudagraph-capture-sizes",
})  # fmt: skip
"""Flags that take all words up to the next flag."""


def _speculation(flags: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Any], str | None]:
    found: dict[str, Any] = {}
    if (whole := flags.get(SPECULATION)) is not None:
        try:
            read_ = json.loads(whole[0]) if whole else None
        except ValueError as error:
            return {}, f"invalid JSON: {error}"
        if not isinstance(read_, dict):
            return {}, "not a JSON object"
        found = read_
    for name, values in flags.items():
        if name.startswith(f"{SPECULATION}."):
            key, text = name.removeprefix(f"{SPECULATION}."), values[0] if values else ""
            found[key.replace("-", "_")] = int(text) if text.isdecimal() else text
    return found, None
