"""What readiness adds to a `vllm serve` command, what it refuses there, what the command asks for.

Flags as in vLLM 0.32. Inside the container the server listens on all of the container's own
addresses; outside, its port is published on one address of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bakehouse.engines.engine import NONCE_ALIAS, Asked
from bakehouse.engines.vllm.flags import Command, read, shortened
from bakehouse.engines.vllm.reach import FLAGS
from bakehouse.engines.vllm.reached import Pinned, judge
from bakehouse.errors import Fault, RecipeError
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe

PROGRAM = "vllm"
"""What `{{ server }}` is: the command inside the image, whatever the image's entrypoint is."""
PORT = 8000
"""Inside the container."""
ANY = "0.0.0.0"  # noqa: S104 - of the container alone; what the host publishes is another address

JUDGED = (
    "--trust-remote-code", "--load-format", "--model-impl", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--dtype", "--kv-cache-dtype", "--quantization",
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--reasoning-parser", "--tool-call-parser", "--speculative-config", "--gpu-memory-utilization",
)  # fmt: skip
"""Flags that are read here and by what judges a recipe; none of them may be shortened."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Endings of files that Python unpickles, which runs what they hold."""


class Features(Asked):
    """What a vLLM server has to show. The context is that of the longest sequence, in tokens."""

    draft_tokens: int | None = None
    dtype: str | None = None
    kv_cache: str | None = None
    sequences: int | None = None
    fallback: bool = False
    """Whether the recipe itself asks for the generic implementation of Transformers."""


def refuse(argv: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None) -> None:
    """Raise RecipeError, exit 2, for what Bakehouse sets itself and what nothing pins.

    What depends on the pinned files is judged once there is a lock.
    """
    command, there = read(argv), Pinned(recipe, lock)
    faults = [
        *_program(command, origin),
        *_model(command, there, origin),
        *_flags(command, there, origin),
        *_drafter(command, recipe, there, origin),
        *_remote_code(command, lock, origin),
        *_pickles(lock, origin),
    ]
    if faults:
        raise RecipeError("the command cannot be served as it stands", faults)


def _program(command: Command, origin: Origin) -> Iterator[Fault]:
    if command.program != (PROGRAM, "serve"):
        said = " ".join(command.program)
        yield origin.fault(
            f"serve.command begins with '{said}', and not with 'vllm serve'",
            "begin with {{ server }} serve; the image's own entrypoint is set aside",
        )
    for word in command.extra:
        yield origin.fault(
            f"serve.command holds '{word}', which belongs to no flag", "vLLM serves one model"
        )


def _model(command: Command, there: Pinned, origin: Origin) -> Iterator[Fault]:
    if command.model is None:
        yield origin.fault(
            "serve.command names no model", "write {{ server }} serve {{ weights.model.path }}"
        )
    elif not there.weights(command.model, "model"):
        yield origin.fault(
            f"serve.command serves '{command.model}', which nothing pins",
            "write {{ server }} serve {{ weights.model.path }}; the files are mounted read-only",
        )


def _flags(command: Command, there: Pinned, origin: Origin) -> Iterator[Fault]:
    for flag in command.flags:
        if meant := shortened(flag, (*FLAGS, *JUDGED)):
            yield origin.fault(
                f"serve.command holds {flag}, which vLLM may read as {meant}",
                "write the flag whole: what is shortened is not seen by what judges a command",
            )
    for message, hint in judge(command, there):
        yield origin.fault(message, hint)


def _drafter(command: Command, recipe: Recipe, there: Pinned, origin: Origin) -> Iterator[Fault]:
    if command.bad_json:
        yield origin.fault(
            f"--speculative-config: {command.bad_json}",
            "write it with {{ {'method': …} | tojson }}, or in single quotes",
        )
        return
    drafter = command.drafter
    if drafter and not there.weights(drafter):
        yield origin.fault(
            f"--speculative-config names the drafter '{drafter}', which nothing pins: it would be "
            "fetched inside the container",
            "name it under weights.drafter, and write {{ weights.drafter.path }} as its model",
        )
    if recipe.weights.drafter and not drafter:
        yield origin.fault(
            "weights.drafter is given, and the command drafts with nothing",
            "add --speculative-config with model {{ weights.drafter.path }}, or drop the drafter",
        )
    if command.speculation and not command.method:
        yield origin.fault(
            "--speculative-config names no method, so that what it came to cannot be judged",
            "add its method: ngram, draft_model, eagle3, mtp, dflash, …",
        )
    asked = recipe.serve.speculation
    asked = None if asked in (None, "none") else asked
    if asked != command.method:
        yield origin.fault(
            f"serve.speculation is {asked or 'not set'}, and --speculative-config says "
            f"{command.method or 'nothing'}",
            "say the same in both; what is asked for is then held against the server's counters",
        )


def _remote_code(command: Command, lock: Lock | None, origin: Origin) -> Iterator[Fault]:
    if "--trust-remote-code" not in command.flags or lock is None:
        return
    code = [f.path for p in lock.weights.values() for f in p.files if f.path.endswith(".py")]
    if not code:
        yield origin.fault(
            "--trust-remote-code runs the model's Python, and the lock pins none of it",
            "widen weights.model.files so that its .py files are pinned, and read them first",
        )


def _pickles(lock: Lock | None, origin: Origin) -> Iterator[Fault]:
    for role, pin in lock.weights.items() if lock else ():
        if found := [file.path for file in pin.files if file.path.endswith(PICKLES)]:
            yield origin.fault(
                f"weights.{role} holds {', '.join(found[:3])}: Python unpickles such a file, and "
                "runs what it holds",
                "take safetensors, and narrow weights." + role + ".files down to them",
            )


def additions(recipe: Recipe) -> tuple[tuple[str, ...], int]:
    """Give the arguments that readiness needs, and the index among them of the second name.

    A key comes through the environment (VLLM_API_KEY): arguments can be read by all.
    """
    names = ("--served-model-name", recipe.name, f"{NONCE_ALIAS}{{nonce}}")
    return (*names, "--host", ANY, "--port", str(PORT)), 2


def features(recipe: Recipe, argv: Sequence[str], model_path: str) -> Features:
    """Derive what to expect, from the recipe's keys and from the command itself."""
    command = read(argv)
    return Features(
        name=recipe.name,
        model_path=model_path,
        context=command.number("--max-model-len") or recipe.serve.context,
        key=recipe.serve.api_key is not None,
        speculation=command.method,
        draft_tokens=command.draft_tokens,
        dtype=_named(command.text("--dtype")),
        kv_cache=_named(command.text("--kv-cache-dtype")),
        sequences=command.number("--max-num-seqs"),
        fallback=command.text("--model-impl") == "transformers",
    )


def _named(value: str | None) -> str | None:
    return None if value in (None, "auto") else value


def expectations(asked: Features) -> tuple[str, ...]:
    """Say in words what readiness will ask of the server."""
    said = [
        "the nonce of the run comes back in /v1/models, from our container's published port",
        "/health answers 200, before the probe and after it",
        f"/v1/models names {asked.name} with root {asked.model_path}",
        "/version gives the version that the image gave when it was asked",
        "the log shows an implementation of vLLM's own, not the Transformers fallback",
    ]
    if asked.context:
        said.append(f"/v1/models shows max_model_len {asked.context}")
        said.append("the KV cache holds one sequence of that length")
    for name, value in (("dtype", asked.dtype), ("KV cache", asked.kv_cache)):
        if value:
            said.append(f"the log shows {name} {value}")
    if asked.speculation:
        drafts = f", {asked.draft_tokens} tokens" if asked.draft_tokens else ""
        said.append(f"the log shows speculation with {asked.speculation}{drafts}; its counters run")
    said.append("no log line carries a fatal or a silent fault")
    return tuple(said)
