"""Rules across the settings of a vLLM command, each with its source. Pure.

The engine finds each of these problems late, after minutes of loading, and blames something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.engines.vllm.flags import Command
from bakehouse.engines.vllm.reach import Pinned, check_variables
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import Conflict

COMMAND = ("serve", "command")
BATCHED_DRAFTERS = frozenset({"dflash"})
"""Methods whose drafter puts the draft tokens of every sequence in one batch."""
SOURCE = "Muse Glimmer on a DGX Spark, the write-up of 2026-08-19"
MIN_SHM = 2**30
"""Bytes of /dev/shm for several workers."""
DEFAULT_SEQUENCES = 1024
"""max_num_seqs of vLLM 0.32 with 70 GiB of memory and more."""


def conflicts(recipe: Recipe, command: Command) -> tuple[Conflict, ...]:
    """Return everything in a vLLM recipe that cannot work together."""
    return (
        *_draft_space(command),
        *_same_values(recipe, command),
        *_shared_memory(recipe, command),
        *_environment(recipe),
    )


def _draft_space(command: Command) -> Iterator[Conflict]:
    """A DFlash drafter writes past its input if the batch has no room for all draft tokens."""
    if command.method not in BATCHED_DRAFTERS:
        return
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
        return
    wanted = sequences * (1 + drafts)
    if wanted > budget:
        fitting = budget // sequences - 1
        fewer = f", or draft {fitting} tokens" if fitting > 0 else ""
        yield Conflict(
            COMMAND,
            f"{needs}: {sequences} x (1 + {drafts}) = {wanted}, but --max-num-batched-tokens is "
            f"{budget}; the draft input overflows, and the engine crashes with a device-side "
            f"assert (known from: {SOURCE})",
            f"set --max-num-batched-tokens to {wanted} or more{fewer}, or serve fewer sequences",
        )


def _same_values(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    """A value in both the command and a key of the recipe must be the same."""
    serve, length = recipe.serve, command.number("--max-model-len")
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


def _shared_memory(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    """Workers communicate through /dev/shm; a container has 64 MiB of it by default."""
    workers = (command.number("--tensor-parallel-size") or 1) * (
        command.number("--pipeline-parallel-size") or 1
    )
    container = recipe.container
    enough = container and (container.ipc == "host" or (container.shm_size or 0) >= MIN_SHM)
    if workers > 1 and not enough:
        yield Conflict(
            ("container",) if container else COMMAND,
            f"{workers} workers communicate through /dev/shm, and the container has 64 MiB of it: "
            "NCCL fails with 'unhandled system error'",
            "set container.ipc: host, or container.shm_size: 16GiB",
        )


def _environment(recipe: Recipe) -> Iterator[Conflict]:
    pinned = Pinned(recipe)
    variables = recipe.container.env if recipe.container else {}
    for section, env in (("container", variables), ("serve", recipe.serve.env)):
        for name, (message, hint) in check_variables(env, pinned):
            yield Conflict((section, "env", name), f"{section}.env {message}", hint)
