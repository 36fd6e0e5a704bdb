"""The table of what the gate detects, written from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.bench.gate_run import DECIDING, Row

COMMAND = "python scripts/bench/gate.py --server LLAMA_SERVER --model SMOLLM2.gguf"


def line(row: Row) -> str:
    """Give one line for a row as it comes."""
    if row.not_served:
        return f"{row.name:24} {row.kind:9} not served: {row.not_served}"
    words = "  ".join(f"{name} {judged.verdict}" for name, judged in row.suites.items())
    words += "".join(f"  {name} {value:+.4f}" for name, value in _golden(row).items())
    return f"{row.name:24} {row.kind:9} {_ruler(row, row.ruler_tokens):>6}  {words}  {_cost(row)}"


def _golden(row: Row) -> dict[str, float]:
    """What `likelihood` measured against golden values."""
    return row.suites["likelihood"].golden if "likelihood" in row.suites else {}


def _cost(row: Row) -> str:
    return f"{row.seconds:.1f} s, {row.decoded} tokens"


def _ruler(row: Row, tokens: int) -> str:
    if row.not_served:
        return "-"
    return "NaN" if row.ruler_nats is None else f"{row.ruler_nats / tokens:.3f}"


def worse(row: Row, bound: float) -> bool:
    """Whether the ruler finds a row worse than `bound` nats; what is not a number is worse."""
    return row.not_served is None and (row.ruler_nats is None or row.ruler_nats > bound)


def document(rows: Sequence[Row]) -> str:
    """Give the whole document, in Markdown; the first row is the model as it is."""
    reference = rows[0]
    harmless = [r for r in rows if r.kind == "harmless"]
    mutants = [r for r in rows if r.kind == "mutant"]
    parts = [
        _summary(reference, mutants, harmless),
        _by_suite(mutants, harmless),
        _missed(reference, mutants),
        "## Harmless variants\n\n" + _table(reference, harmless),
        "## Mutants\n\n" + _table(reference, mutants),
    ]
    return "\n\n".join([HEAD.format(command=COMMAND), *parts]) + "\n"


HEAD = """\
# What the gate catches

Mutants of a real model (SmolLM2-135M-Instruct, Q4_1, on the CPU) and harmless ways to serve it.
The real llama-server serves each of them, and the suites of the recipe `smollm2-cpu` decide what is
refused. The suite `reference` is shown as well, although that recipe does not use it. This file is
written by

    {command}

from `docs/gate.json`, which holds the measurements and the messages of the suites.

*Ruler* is the mean negative log-likelihood, in nats per token, of texts that the gate does not use:
it shows how bad a variant is, independently of the gate. *Shift* and *spread* compare the suite
`likelihood` with the golden values: the difference of the means, and the mean absolute difference
of single tokens. There are golden values for these weights and each type of KV cache, taken with
the engine's choice of flash attention. Another quantisation is another set of weights, so only
suites without golden values apply to it. The bounds are those for another build or other flags on
the same backend. For golden values of the same server (build, command and machine) they are
tighter; the last column shows where that matters. Seconds are for one thread on a machine with
other load."""


def _summary(reference: Row, mutants: Sequence[Row], harmless: Sequence[Row]) -> str:
    bound = max((r.ruler_nats or 0.0 for r in harmless), default=0.0)
    worst = [r for r in mutants if worse(r, bound)]
    caught = sum(r.detected for r in mutants)
    same = [r.ruler_nats or 0.0 for r in harmless if r.golden]
    bound_same = max(same, default=0.0)
    worst_same = [r for r in mutants if worse(r, bound_same)]
    tokens = reference.ruler_tokens
    rows = [
        ("mutants refused", f"{caught} of {len(mutants)}"),
        ("… without golden values", f"{sum(r.detected_alone for r in mutants)} of {len(mutants)}"),
        ("… with golden values of the same server",
         f"{sum(r.detected_same for r in mutants)} of {len(mutants)}"),
        ("harmless variants refused", f"{sum(r.detected for r in harmless)} of {len(harmless)}"),
        (f"mutants worse than the worst harmless variant ({bound / tokens:.3f}), refused",
         f"{sum(r.detected for r in worst)} of {len(worst)}"),
        (f"mutants worse than any with these weights ({bound_same / tokens:.3f}), refused",
         f"{sum(r.detected for r in worst_same)} of {len(worst_same)}"),
        ("the recipe's suites on the unchanged model", _cost(reference)),
        ("the most expensive harmless variant", _cost(max(harmless, key=lambda r: r.seconds))),
        ("the most expensive mutant", _cost(max(mutants, key=lambda r: r.seconds))),
    ]  # fmt: skip
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {what} | {how} |" for what, how in rows)


def _suites(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.suites))


def _by_suite(mutants: Sequence[Row], harmless: Sequence[Row]) -> str:
    lines = [
        "## By suite", "",
        "| suite | mutants refused | without golden values | only by it | harmless refused | s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name in _suites(mutants):
        asked = [r for r in mutants if name in r.suites]
        found = [r for r in asked if r.suites[name].detected]
        seconds = sorted(r.suites[name].seconds for r in asked)[len(asked) // 2]
        right = [r for r in harmless if name in r.suites and (r.golden or name in DECIDING)]
        wrong = f"{sum(r.suites[name].detected for r in right)} of {len(right)}"
        alone = bare = "-"
        if name in DECIDING:
            alone = str(sum(sum(s.detected for s in r.deciding()) == 1 for r in found))
            bare = str(sum(r.suites[name].detected_alone for r in asked))
        cells = (f"`{name}`", f"{len(found)} of {len(asked)}", bare, alone, wrong, f"{seconds:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _missed(reference: Row, mutants: Sequence[Row]) -> str:
    missed = [r for r in mutants if not r.detected]
    if not missed:
        return "## Not detected\n\nNothing."
    return (
        "## Not detected\n\nThese are wrong, were served, and passed. Their effect on the model is "
        "not larger than that of another\nrounding, or does not affect the questions.\n\n"
        + _table(reference, missed)
    )


def _table(reference: Row, rows: Sequence[Row]) -> str:
    suites = _suites(rows)
    heads = ["variant", "what", "ruler", *(f"`{s}`" for s in suites), "shift", "spread", "refused"]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(_cells(reference, row, suites)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _refused(row: Row) -> str:
    """Say whether a variant is refused, and what that takes."""
    if row.detected:
        return "yes" if row.detected_alone else "by golden values"
    same = row.kind == "mutant" and row.detected_same
    return "only by the same server's values" if same else "no"


def _cells(reference: Row, row: Row, suites: Sequence[str]) -> list[str]:
    words = [row.suites[s].verdict if s in row.suites else "-" for s in suites]
    golden = _golden(row)
    shift, spread = golden.get("difference"), golden.get("spread")
    refused = "not served" if row.not_served else _refused(row)
    return [
        row.name, row.what, _ruler(row, reference.ruler_tokens), *words,
        "-" if shift is None else f"{shift:+.3f}", "-" if spread is None else f"{spread:.3f}",
        refused,
    ]  # fmt: skip
