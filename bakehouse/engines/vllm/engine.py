"""vLLM: what a command must not contain (`refuse`), added flags, what a running server has to show.

What each flag and variable may name is in `command.py`. Shapes as in vLLM 0.32. A field that is
missing or of another type makes a check unknown. The settings in effect are in one line of the log,
`Initializing a V1 LLM engine (vVERSION) with config: …`.

The engine finds each of these problems late, after minutes of loading, and blames something else.

Inside the container the server listens on all of the container's own addresses; outside, its port
is published on one address of the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bakehouse.cuda.configure import Conflict
from bakehouse.engines.base import (
    NONCE_ALIAS,
    Answer,
    Requirements,
    as_features,
    check_text,
    first_match,
    samples,
)
from bakehouse.engines.vllm.command import (
    ENVIRONMENT,
    FLAGS,
    OFFLINE,
    Command,
    Pinned,
    Problem,
    check_flags,
    check_variables,
    parse,
    shortened,
)
from bakehouse.errors import RecipeError
from bakehouse.lock import Lock
from bakehouse.models import Check, check
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.template import Paths
from bakehouse.recipe.types import Origin

ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
SETTINGS = re.compile(r"Initializing a V\d LLM engine \(v(\S+)\) with config: (.*)")
FALLBACK = "Transformers"
"""Prefix of the classes of the generic implementation."""
CACHE_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
SHARDS = re.compile(r"Loading \w+ checkpoint shards: +(\d+)% Completed \| (\d+)/(\d+)")
_STAGES = (
    (re.compile(r"Application startup complete"), "started"),
    (re.compile(r"Starting vLLM server on"), "starting the API"),
    (re.compile(r"init engine \("), "engine initialised"),
    (re.compile(r"KV cache size|Available KV cache memory"), "making the KV cache"),
    (re.compile(r"Capturing (?:CUDA|CPU) graph|Graph capturing"), "capturing graphs"),
    (
        re.compile(r"Dynamo bytecode transform|Compiling a graph|torch\.compile (?:takes|took)"),
        "compiling",
    ),
    (re.compile(r"Loading drafter model"), "loading the drafter"),
    (re.compile(r"Model loading took|Loading weights took"), "weights loaded"),
    (re.compile(r"Starting to load model"), "opening the model"),
    (re.compile(r"Initializing a V\d LLM engine"), "initialising"),
)


class Features(Requirements):
    """Expected features of a vLLM server. The context is of the longest sequence, in tokens."""

    draft_tokens: int | None = None
    dtype: str | None = None
    kv_cache: str | None = None
    fallback: bool = False
    """Whether the recipe itself asks for the generic implementation of Transformers."""


def engine_settings(log: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the place of the log line with the engine's settings, and the plain ones of them.

    Only settings at the top level count: `dtype=torch.float32`, but nothing inside
    `ObservabilityConfig(…)`. Without such a line the dict is empty.
    """
    where, line = first_match(SETTINGS, log)
    if line is None:
        return where, {}
    settings = {"version": line[1]}
    depth, begin = 0, 0
    quote = ""
    for at, letter in enumerate(f"{line[2]},"):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        elif letter == "," and depth == 0:
            name, equals, value = line[2][begin:at].strip().partition("=")
            if equals and name.isidentifier():
                settings[name] = value.strip("'\"")
            begin = at + 1
    return where, settings


def _models(body: Any) -> list[Mapping[str, Any]]:
    """Entries of a response of `/v1/models`; empty if it has another shape."""
    data = body.get("data") if isinstance(body, Mapping) else None
    return [e for e in data if isinstance(e, Mapping)] if isinstance(data, list) else []


COMMAND = ("serve", "command")
BATCHED_DRAFTERS = frozenset({"dflash"})
"""Methods whose drafter puts the draft tokens of every sequence in one batch."""
SOURCE = "Muse Glimmer on a DGX Spark, the write-up of 2026-08-19"
MIN_SHM = 2**30
"""Bytes of /dev/shm for several workers."""
DEFAULT_SEQUENCES = 1024
"""max_num_seqs of vLLM 0.32 with 70 GiB of memory and more."""


def conflicts(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    """Find everything in a vLLM recipe that cannot work together."""
    serve, container = recipe.serve, recipe.container
    if command.method in BATCHED_DRAFTERS:
        yield from _draft_space(command)
    length = command.number("--max-model-len")
    if length and serve.context and length != serve.context:
        yield Conflict(
            COMMAND,
            f"--max-model-len is {length}, but serve.context is {serve.context}",
            "write --max-model-len {{ serve.context }}",
        )
    kv_cache = command.text("--kv-cache-dtype") or "auto"
    if serve.kv_cache and kv_cache != serve.kv_cache:
        yield Conflict(
            COMMAND,
            f"--kv-cache-dtype is {kv_cache}, but serve.kv_cache is {serve.kv_cache}",
            "write --kv-cache-dtype {{ serve.kv_cache }}",
        )
    parallel = map(command.number, ("--tensor-parallel-size", "--pipeline-parallel-size"))
    workers = math.prod(number or 1 for number in parallel)
    enough = container and (container.ipc == "host" or (container.shm_size or 0) >= MIN_SHM)
    if workers > 1 and not enough:
        yield Conflict(
            ("container",) if container else COMMAND,
            f"{workers} workers communicate through /dev/shm, and the container has 64 MiB of it: "
            "NCCL fails with 'unhandled system error'",
            "set container.ipc: host, or container.shm_size: 16GiB",
        )
    pinned = Pinned(recipe)
    for section, env in (("container", container.env if container else {}), ("serve", serve.env)):
        for name, (message, hint) in check_variables(env, pinned):
            yield Conflict((section, "env", name), f"{section}.env {message}", hint)


def _draft_space(command: Command) -> Iterator[Conflict]:
    """A DFlash drafter writes past its input if the batch has no room for all draft tokens."""
    drafts = command.draft_tokens
    sequences = command.number("--max-num-seqs")
    budget = command.number("--max-num-batched-tokens")
    needs = f"{command.method} needs max_num_seqs x (1 + num_speculative_tokens) tokens a batch"
    if drafts is None or sequences is None or budget is None:
        values = {
            "num_speculative_tokens": drafts, "--max-num-seqs": sequences,
            "--max-num-batched-tokens": budget,
        }  # fmt: skip
        missing = " and ".join(name for name, value in values.items() if value is None)
        yield Conflict(
            COMMAND,
            f"{needs}, but the command does not set {missing}; the engine's defaults go up to "
            f"{DEFAULT_SEQUENCES} sequences and 2048 tokens, and it then crashes with a "
            f"device-side assert (known from: {SOURCE})",
            "set both, for instance --max-num-seqs 256 --max-num-batched-tokens 8192",
        )
    elif (wanted := sequences * (1 + drafts)) > budget:
        fitting = budget // sequences - 1
        fewer = f", or draft {fitting} tokens" if fitting > 0 else ""
        yield Conflict(
            COMMAND,
            f"{needs}: {sequences} x (1 + {drafts}) = {wanted}, but --max-num-batched-tokens is "
            f"{budget}; the draft input overflows, and the engine crashes with a device-side "
            f"assert (known from: {SOURCE})",
            f"set --max-num-batched-tokens to {wanted} or more{fewer}, or serve fewer sequences",
        )


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
    """See `engines.base.Engine`."""

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
        found = parse(command).flags.items()
        return tuple((flag, values[0] if values else None) for flag, values in found)

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Check a command. Rules about pinned files need a lock.

        Raises RecipeError for flags that Bakehouse sets itself and for inputs that are not pinned.
        """
        problems = _problems(parse(command), recipe, lock)
        if faults := [origin.fault(message, hint) for message, hint in problems]:
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
        parsed = parse(command)
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

    def expectations(self, requirements: Requirements) -> tuple[str, ...]:
        """Describe the expected features as text."""
        own = as_features(requirements, Features)
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
        """Return the ids in a response of `/v1/models`; empty for another shape."""
        names = (entry.get("id") for entry in _models(body))
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))

    def stage(self, line: str) -> str | None:
        """Return the loading stage that a log line shows; None for other lines."""
        if found := SHARDS.search(line):
            return f"loading shards, {found[2]} of {found[3]}"
        return next((word for pattern, word in _STAGES if pattern.search(line)), None)

    def check_features(
        self, requirements: Requirements, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Check `/v1/models`, `/metrics`, `/version` and the log."""
        wanted = as_features(requirements, Features)
        models, version = answers["/v1/models"].body, answers["/version"].body
        names = self.model_names(models)
        mine = next((e for e in _models(models) if e.get("id") == wanted.name), {})
        where, settings = engine_settings(log)
        # The generic implementation also runs unknown models, and may run them wrongly.
        at, found = first_match(ARCHITECTURE, log)
        observed = found[1] if found else None
        if generic := observed is not None and observed.startswith(FALLBACK):
            observed = f"{observed}: the Transformers fallback, which is no support"
        expected = (
            "any, since the recipe asks for the fallback" if wanted.fallback else "vLLM's own"
        )
        checks = [
            check("model-name", wanted.name, ", ".join(names) or None, "GET /v1/models",
                  ok=wanted.name in names),
            check_text("model-path", wanted.model_path, mine.get("root"), "GET /v1/models root"),
            check("implementation", expected, observed, at, ok=wanted.fallback or not generic),
        ]  # fmt: skip
        if wanted.context:
            value = mine.get("max_model_len")
            length = value if isinstance(value, int) and not isinstance(value, bool) else None
            at, found = first_match(CACHE_SIZE, log)
            tokens = int(found[1].replace(",", "")) if found else None
            checks += [
                check("context", f"{wanted.context} tokens in one sequence",
                      str(length) if length else None, "GET /v1/models max_model_len",
                      ok=length == wanted.context),
                check("cache-size", f"room for {wanted.context} tokens or more",
                      None if tokens is None else f"{tokens} tokens", at,
                      ok=(tokens or 0) >= wanted.context),
            ]  # fmt: skip
        if wanted.dtype:
            dtype = {"half": "float16", "float": "float32"}.get(wanted.dtype, wanted.dtype)
            logged = settings.get("dtype", "").removeprefix("torch.")
            checks.append(check_text("dtype", dtype, logged, where))
        if wanted.kv_cache:
            kv_cache = settings.get("kv_cache_dtype")
            checks.append(check_text("kv-cache", wanted.kv_cache, kv_cache, where))
        metrics = answers["/metrics"].text if answers["/metrics"].status == 200 else ""
        checks.append(_speculation(wanted, settings.get("speculative_config"), where, metrics))
        if wanted.version:
            reported = version.get("version") if isinstance(version, Mapping) else None
            checks.append(check_text("version", wanted.version, reported, "GET /version"))
        return tuple(checks)

    def expected_signatures(self, requirements: Requirements) -> frozenset[str]:
        """Return the fallback's log signature if the recipe itself asks for the fallback."""
        fallback = as_features(requirements, Features).fallback
        return frozenset({"transformers-fallback"} if fallback else ())


def _speculation(wanted: Features, setting: str | None, where: str, metrics: str) -> Check:
    """The settings name the method, and its counters are published.

    The suite `speculation` checks later that they move.
    """
    observed = None if setting is None else "off"
    if setting and setting != "None":
        method = re.search(r"method='([^']*)'", setting)
        drafts = re.search(r"num_spec(?:ulative)?_tokens=(\d+)", setting)
        observed = f"{method[1] if method else 'on'}, {drafts[1] if drafts else '?'} tokens"
    published = any(s.name == "vllm:spec_decode_num_drafts_total" for s in samples(metrics))
    if wanted.speculation is None:
        ok = observed == "off" and not published
        return check("speculation", "off", observed, where, ok=ok)
    tokens = f", {wanted.draft_tokens} tokens" if wanted.draft_tokens else ""
    expected = f"{wanted.speculation}{tokens}"
    ok = (observed or "").startswith(expected) and published
    if observed and not published:
        observed += "; no counters of drafts in /metrics"
    return check("speculation", expected, observed, f"{where}, GET /metrics", ok=ok)


def _problems(command: Command, recipe: Recipe, lock: Lock | None) -> Iterator[Problem]:
    """Everything that is wrong with a command, in the order in which it is reported."""
    pinned = Pinned(recipe, lock)
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
    for flag in command.flags:
        if meant := shortened(flag, (*FLAGS, *JUDGED)):
            yield (
                f"serve.command has {flag}, which vLLM may read as {meant}",
                "write the whole flag: the rules for commands do not see abbreviations",
            )
    yield from check_flags(command, pinned)
    yield from _drafter_problems(command, recipe, pinned)
    paths = {
        role: [f.path for f in pin.files] for role, pin in (lock.weights if lock else {}).items()
    }
    code = any(path.endswith(".py") for files in paths.values() for path in files)
    if lock and "--trust-remote-code" in command.flags and not code:
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


def _drafter_problems(command: Command, recipe: Recipe, pinned: Pinned) -> Iterator[Problem]:
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
