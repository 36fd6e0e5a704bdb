"""What vLLM's settings must not be together: rules over a rendered command, with their sources.

Pure. Each is something that the engine finds late, after minutes of loading, and blames on
something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.engines.vllm.environment import judge
from bakehouse.engines.vllm.flags import Command
from bakehouse.engines.vllm.reached import Pinned
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import Conflict

COMMAND = ("serve", "command")
STAGES_DRAFTS = frozenset({"dflash"})
"""Methods whose drafter stages the draft of every sequence in one batch."""
SEED = "Muse Glimmer on a DGX Spark, the write-up of 2026-08-19"
SHM_LEAST = 2**30
UNSEEN_SEQUENCES = 1024
"""What vLLM 0.32 takes for max_num_seqs on 70 GiB of memory and more."""


def conflicts(recipe: Recipe, command: Command) -> tuple[Conflict, ...]:
    """Everything in a vLLM recipe that cannot work together."""
    return (
        *_draft_space(command),
        *_context(recipe, command),
        *_cache(recipe, command),
        *_shared_memory(recipe, command),
        *_environment(recipe),
    )


def _draft_space(command: Command) -> Iterator[Conflict]:
    """A DFlash drafter writes past its input where the batch has no room for all drafts."""
    if command.method not in STAGES_DRAFTS:
        return
    drafts = command.draft_tokens
    sequences = command.number("--max-num-seqs")
    budget = command.number("--max-num-batched-tokens")
    needs = f"{command.method} needs max_num_seqs x (1 + num_speculative_tokens) tokens a batch"
    lacking = [
        name
        for name, value in (
            ("num_speculative_tokens", drafts),
            ("--max-num-seqs", sequences),
            ("--max-num-batched-tokens", budget),
        )
        if value is None
    ]
    if drafts is None or sequences is None or budget is None:
        yield Conflict(
            COMMAND,
            f"{needs}, and {' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} left to "
            f"the engine, which takes up to {UNSEEN_SEQUENCES} sequences and 2048 tokens; "
            f"without the room it dies of a device-side assert (known from: {SEED})",
            "set both, for instance --max-num-seqs 256 --max-num-batched-tokens 8192",
        )
        return
    wanted = sequences * (1 + drafts)
    if wanted > budget:
        fitting = budget // sequences - 1
        lower = f", or draft {fitting} tokens" if fitting > 0 else ""
        yield Conflict(
            COMMAND,
            f"{needs}: {sequences} x (1 + {drafts}) = {wanted}, and --max-num-batched-tokens is "
            f"{budget}; the draft input overruns, and the engine dies of a device-side assert "
            f"(known from: {SEED})",
            f"set --max-num-batched-tokens to {wanted} or more{lower}, or serve fewer sequences",
        )


def _context(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    told, asked = command.number("--max-model-len"), recipe.serve.context
    if told and asked and told != asked:
        yield Conflict(
            COMMAND,
            f"--max-model-len is {told}, and serve.context is {asked}",
            "write --max-model-len {{ serve.context }}",
        )


def _cache(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    told, asked = command.text("--kv-cache-dtype") or "auto", recipe.serve.kv_cache
    if asked and told != asked:
        yield Conflict(
            COMMAND,
            f"--kv-cache-dtype is {told}, and serve.kv_cache is {asked}",
            "write --kv-cache-dtype {{ serve.kv_cache }}",
        )


def _shared_memory(recipe: Recipe, command: Command) -> Iterator[Conflict]:
    """Workers talk through /dev/shm, of which a container has 64 MiB unless more is asked for."""
    workers = (command.number("--tensor-parallel-size") or 1) * (
        command.number("--pipeline-parallel-size") or 1
    )
    container = recipe.container
    enough = container and (container.ipc == "host" or (container.shm_size or 0) >= SHM_LEAST)
    if workers > 1 and not enough:
        yield Conflict(
            ("container",) if container else COMMAND,
            f"{workers} workers talk through /dev/shm, of which the container has 64 MiB: NCCL "
            "fails with 'unhandled system error'",
            "set container.ipc: host, or container.shm_size: 16GiB",
        )


def _environment(recipe: Recipe) -> Iterator[Conflict]:
    """What reaches past the pins, takes evidence away, or turns a crash into corruption."""
    there = Pinned(recipe)
    boxed = recipe.container.env if recipe.container else {}
    for room, given in (("container", boxed), ("serve", recipe.serve.env)):
        for name, (message, hint) in judge(given, there):
            yield Conflict((room, "env", name), f"{room}.env {message}", hint)
