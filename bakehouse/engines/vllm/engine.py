"""The vLLM engine: command rules, added flags, expected features. Flags as in vLLM 0.32.

Inside the container the server listens on all of the container's own addresses; outside, its port
is published on one address of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bakehouse.checks import Check
from bakehouse.engines.engine import NONCE_ALIAS, Answer, Asked
from bakehouse.engines.vllm import evidence
from bakehouse.engines.vllm.evidence import Features
from bakehouse.engines.vllm.flags import Command, read, shortened
from bakehouse.engines.vllm.reach import ENVIRONMENT, FLAGS, OFFLINE, Pinned, Problem, check_flags
from bakehouse.errors import RecipeError
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths

PROGRAM = ("vllm", "serve")
"""How a command begins; the image's own entrypoint is not used."""
PORT = 8000
"""Inside the container."""
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - of the container; the host publishes another address

JUDGED = (
    "--trust-remote-code", "--load-format", "--model-impl", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--dtype", "--kv-cache-dtype", "--quantization",
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size",
    "--reasoning-parser", "--tool-call-parser", "--speculative-config", "--gpu-memory-utilization",
    "--hf-overrides",
)  # fmt: skip
"""Flags that a rule reads; none of them may be abbreviated."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""File name endings that Python unpickles, which can run code."""


class Vllm:
    """See `engines.engine.Engine`."""

    name = "vllm"
    server = "vLLM"
    health = "HTTP 200"
    evidence: tuple[str, ...] = ("/v1/models", "/metrics", "/version")
    guarded = "/v1/models"
    inside_port = PORT
    key_variable = "VLLM_API_KEY"
    environment: Mapping[str, str] = ENVIRONMENT
    forced_environment: Mapping[str, str] = OFFLINE

    def served(self, weights: Paths) -> str:
        """Return the folder that /v1/models reports as the model's root."""
        return weights.path

    def arguments(self, command: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
        """Parse a command: each flag by its long spelling, with its first value."""
        found = read(command).flags.items()
        return tuple((flag, values[0] if values else None) for flag, values in found)

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Check a command. Rules about pinned files need a lock.

        Raises RecipeError for flags that Bakehouse sets itself and for inputs that are not pinned.
        """
        parsed, pinned = read(command), Pinned(recipe, lock)
        faults = [
            origin.fault(message, hint)
            for message, hint in (
                *_program(parsed, pinned),
                *_abbreviated(parsed),
                *check_flags(parsed, pinned),
                *_drafter(parsed, recipe, pinned),
                *(_pinned_code(parsed, lock) if lock else ()),
            )
        ]
        if faults:
            raise RecipeError("the command cannot be served as it is", faults)

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Return the arguments that readiness needs, and the index among them of the second name.

        Address and port are the container's own. The key comes through VLLM_API_KEY, since every
        user can read arguments.
        """
        del command, host, port, key_file
        names = ("--served-model-name", recipe.name, f"{NONCE_ALIAS}{{nonce}}")
        return (*names, "--host", ANY_ADDRESS, "--port", str(PORT)), 2

    def features(
        self, recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str
    ) -> Features:
        """Derive the expected features from the recipe's keys and the command."""
        del lock
        parsed = read(command)
        dtype, kv_cache = parsed.text("--dtype"), parsed.text("--kv-cache-dtype")
        return Features(
            name=recipe.name,
            model_path=model_path,
            context=parsed.number("--max-model-len") or recipe.serve.context,
            key=recipe.serve.api_key is not None,
            speculation=parsed.method,
            draft_tokens=parsed.draft_tokens,
            dtype=None if dtype == "auto" else dtype,
            kv_cache=None if kv_cache == "auto" else kv_cache,
            fallback=parsed.text("--model-impl") == "transformers",
        )

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Describe the expected features as text."""
        own = _own(asked)
        lines = [
            "/v1/models returns the nonce of the run, from our container's published port",
            "/health returns 200, before the probe and after it",
            f"/v1/models names {own.name} with root {own.model_path}",
            "/version returns the version that the image reported",
            "the log shows vLLM's own implementation, not the Transformers fallback",
        ]
        if own.context:
            lines.append(f"/v1/models shows max_model_len {own.context}")
            lines.append("the KV cache holds one sequence of that length")
        for name, value in (("dtype", own.dtype), ("KV cache", own.kv_cache)):
            if value:
                lines.append(f"the log shows {name} {value}")
        if own.speculation:
            drafts = f", {own.draft_tokens} tokens" if own.draft_tokens else ""
            lines.append(f"the log shows speculation with {own.speculation}{drafts}")
            lines.append("/metrics has the speculation counters")
        lines.append("no log line shows a fatal or a silent fault")
        return tuple(lines)

    def healthy(self, answer: Answer) -> bool:
        """Whether it is HTTP 200; vLLM does not answer at all while it loads."""
        return answer.status == 200

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Return the ids in an answer of `/v1/models`, one for each served name."""
        return evidence.model_names(body)

    def stage(self, line: str) -> str | None:
        """Return the loading stage that a log line shows, if any."""
        return evidence.stage(line)

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Check `/v1/models`, `/metrics`, `/version` and the log."""
        metrics = answers["/metrics"]
        return evidence.check_features(
            _own(asked), models=answers["/v1/models"].body,
            metrics=metrics.text if metrics.status == 200 else "", log=log,
            version=answers["/version"].body,
        )  # fmt: skip

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """Return the fallback's log signature if the recipe itself asks for the fallback."""
        return frozenset({"transformers-fallback"} if _own(asked).fallback else ())


def _own(asked: Asked) -> Features:
    if not isinstance(asked, Features):
        raise TypeError(f"vLLM cannot check {type(asked).__name__}")
    return asked


def _program(command: Command, pinned: Pinned) -> Iterator[Problem]:
    if command.program != PROGRAM:
        yield (
            f"serve.command begins with '{' '.join(command.program)}', not with 'vllm serve'",
            "begin with {{ server }} serve; the image's own entrypoint is not used",
        )
    for word in command.extra:
        yield f"serve.command has '{word}', which belongs to no flag", "vLLM serves one model"
    hint = "write {{ server }} serve {{ weights.model.path }}; the files are mounted read-only"
    if command.model is None:
        yield "serve.command names no model", hint
    elif not pinned.weights(command.model, "model"):
        yield f"serve.command serves '{command.model}', which is not pinned", hint


def _abbreviated(command: Command) -> Iterator[Problem]:
    for flag in command.flags:
        if meant := shortened(flag, (*FLAGS, *JUDGED)):
            yield (
                f"serve.command has {flag}, which vLLM may read as {meant}",
                "write the whole flag: the rules for commands do not see abbreviations",
            )


def _drafter(command: Command, recipe: Recipe, pinned: Pinned) -> Iterator[Problem]:
    if command.bad_json:
        yield (
            f"--speculative-config: {command.bad_json}",
            "write it with {{ {'method': …} | tojson }}, or in single quotes",
        )
        return
    drafter = command.drafter
    if drafter and not pinned.weights(drafter):
        yield (
            f"--speculative-config names the drafter '{drafter}', which is not pinned",
            "add it under weights.drafter, and write {{ weights.drafter.path }} as its model",
        )
    if recipe.weights.drafter and not drafter:
        yield (
            "weights.drafter is set, but the command does not use it",
            "add --speculative-config with model {{ weights.drafter.path }}, or drop the drafter",
        )
    if command.speculation and not command.method:
        yield (
            "--speculative-config names no method, so its effect cannot be checked",
            "add its method: ngram, draft_model, eagle3, mtp, dflash, …",
        )
    wanted = None if recipe.serve.speculation == "none" else recipe.serve.speculation or None
    if wanted != command.method:
        method = command.method or "nothing"
        yield (
            f"serve.speculation is {wanted or 'not set'}, but --speculative-config says {method}",
            "write the same in both; it is compared with the server's counters",
        )


def _pinned_code(command: Command, lock: Lock) -> Iterator[Problem]:
    paths = {role: [file.path for file in pin.files] for role, pin in lock.weights.items()}
    code = any(path.endswith(".py") for files in paths.values() for path in files)
    if "--trust-remote-code" in command.flags and not code:
        yield (
            "--trust-remote-code runs the model's Python, but the lock pins no .py file",
            "widen weights.model.files so that its .py files are pinned, and read them first",
        )
    for role, files in paths.items():
        if found := [path for path in files if path.endswith(PICKLES)]:
            yield (
                f"weights.{role} has {', '.join(found[:3])}: unpickling such a file can run code",
                f"use safetensors, and narrow weights.{role}.files to them",
            )
