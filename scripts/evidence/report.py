"""The evidence of a GPU machine as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Found = Mapping[str, Any]


def markdown(evidence: Found) -> str:
    """Write what was found; what is missing is said to be missing."""
    parts = [
        f"# `{evidence.get('recipe')}` on a real GPU",
        "Made by `scripts/evidence/cuda` from what the commands below printed.",
        *machine_of(evidence),
        *_refusals(evidence),
        *_build(evidence),
        *_serve(evidence, "serve", "Served on the GPU"),
        *_serve(evidence, "cpu", "The same program and model without the GPU"),
        *_again(evidence),
        *_plain(evidence),
    ]
    failed = [f"- {name}: `{said}`" for name, said in evidence.items() if name.endswith(" failed")]
    if failed:
        parts += ["## Steps that failed", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def code(text: str) -> str:
    """A block of text as it is."""
    return f"```text\n{text.strip()}\n```"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table; bars and line breaks in it are escaped."""
    names = list(head)
    lines = [names, ["---"] * len(names), *[[str(v) for v in row] for row in rows]]
    cells = ([value.replace("|", "\\|").replace("\n", "<br>") for value in row] for row in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def result_of(said: Found | None) -> Found:
    """The result in a task's JSON document."""
    document = (said or {}).get("document") or {}
    return document.get("result") or {}


def error_of(said: Found | None) -> list[str]:
    """What a task that failed said."""
    error = ((said or {}).get("document") or {}).get("error")
    if not error:
        return [code((said or {}).get("err", ""))] if said and said.get("exit") else []
    return [code(f"error: {error.get('what')}\nwhere: {error.get('where')}\n"
                  f"hint:  {error.get('hint')}")]  # fmt: skip


def checks_table(checks: Iterable[Found]) -> str:
    """Checks with their verdicts."""
    rows = ((c["id"], c["verdict"], c["expected"], c["observed"]) for c in checks)
    return table(("check", "verdict", "expected", "observed"), rows)


def machine_of(evidence: Found) -> list[str]:
    """What the machine is."""
    said = evidence.get("machine") or {}
    rows = [
        (name, _first(said[name], name))
        for name in ("gpu", "nvcc", "kernel", "system", "gcc", "cmake", "ninja", "cpus")
        if name in said
    ]
    return ["## Machine", table(("", "says"), rows)]


def _first(text: str, name: str) -> str:
    lines = text.splitlines() or [""]
    if name == "gpu":
        return "\n".join(lines)
    if name == "nvcc":
        return next((ln for ln in lines if "release" in ln), lines[0])
    if name == "system":
        return next((ln for ln in lines if ln.startswith("PRETTY")), lines[0])
    return lines[0]


def _refusals(evidence: Found) -> list[str]:
    found = evidence.get("refusals") or {}
    rows = [
        (name, " ".join(f"`--set {s}`" for s in r["set"]), r["exit"], f"{r['seconds']} s",
         (r["error"] or {}).get("what", ""))
        for name, r in found.items()
    ]  # fmt: skip
    head = ("asked for", "with", "exit", "after", "says")
    return ["## Refused", table(head, rows)] if rows else []


def _build(evidence: Found) -> list[str]:
    build, record = evidence.get("build"), evidence.get("build.json") or {}
    if not build:
        return ["## Build", "not run"]
    checks = record.get("checks", ())
    took = (
        f"`invoke build --recipe {evidence.get('recipe')}`: exit {build['exit']}, "
        f"{build['seconds']} s, {build['cpu_seconds']} s of CPU time; "
        f"again: {(evidence.get('rebuild') or {}).get('seconds')} s."
    )
    parts = ["## Build", took]
    parts += error_of(build)
    lines = [c["where"] for c in checks if c["id"] == "cuda.pair"]
    if lines:
        parts += ["CMake's two lines:", code("\n".join(lines[0].split(" | ")))]
    if checks:
        parts.append(checks_table(checks))
    steps = [(s["id"], f"{s['seconds']} s") for s in record.get("steps", ())]
    if steps:
        parts.append(table(("step", "took"), steps))
    files = [(f["path"], f"{f['size']:,}", f["sha256"]) for f in record.get("files", ())]
    if files:
        parts.append(table(("file", "bytes", "sha256"), files))
    return parts


def _serve(evidence: Found, step: str, title: str) -> list[str]:
    said = evidence.get(step)
    if not said:
        return [f"## {title}", "not run"]
    result = result_of(said)
    parts = [f"## {title}", f"exit {said['exit']}", *error_of(said)]
    if "answers" in result:
        parts.append(
            f"Ready after {result.get('loading_seconds')} s, proven in "
            f"{result.get('proving_seconds')} s: {result.get('summary')}."
        )
        rows = [(a["question"], a["content"].strip(), a["verdict"]) for a in result["answers"]]
        parts.append(table(("question", "answer", "verdict"), rows))
    rates = [f"{s['timings']['predicted_per_second']:.0f}" for s in said.get("speed", ())]
    if rates:
        parts.append(f"256 tokens from a prompt of a few: {', then '.join(rates)} tokens/s.")
    if gpu := (said.get("gpu") or {}).get("out"):
        parts.append(code(gpu))
    if checks := (said.get("document") or {}).get("checks"):
        parts.append(checks_table(checks))
    return parts


def _again(evidence: Found) -> list[str]:
    said = evidence.get("again")
    if not said or "identical" not in said:
        return ["## Twice", "not compared", *error_of(said)]
    differ = ", ".join(said["differ"]) or "none"
    word = "identical, bit for bit" if said["identical"] else "not identical"
    text = (
        f"The same lock built in a second home, in {said['seconds']} s: {word}; of "
        f"{said['files']} files these differ: {differ}."
    )
    return ["## Twice", text]


def _plain(evidence: Found) -> list[str]:
    said = evidence.get("plain")
    if not said:
        return ["## Plain CMake", "not run"]
    rows = [
        (name, said[name]["exit"], f"{said[name]['seconds']} s", f"{said[name]['cpu_seconds']} s")
        for name in ("configure", "compile")
    ]
    steps = {
        s["id"]: s["seconds"] for s in (evidence.get("build.json") or {}).get("steps", ())
    }  # fmt: skip
    ours = [(f"Bakehouse's {n}", "", f"{steps[n]} s", "") for n in ("configure", "compile")
            if n in steps]  # fmt: skip
    head = ("step", "exit", "wall", "CPU")
    return ["## Plain CMake, the same definitions and jobs", table(head, [*rows, *ours])]
