"""What can go wrong with weights, as edits of a mapped file: each returns a function that does it.

A tensor is named by a glob, `L` in builders stands for a layer's number. The model is SmolLM2-135M:
30 layers, 9 heads of 64 that share 3 key-value heads, matrices in Q4_1, embeddings in Q8_0 (also
the output matrix), norms in F32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scripts.bench.gate_weights import Weights

Edit = Callable[[Weights], None]
HEAD = 64
BLOCKS_A_HEAD = HEAD // 32


def each(*edits: Edit) -> Edit:
    """All of them, in order."""

    def edit(weights: Weights) -> None:
        for one in edits:
            one(weights)

    return edit


def zero(pattern: str) -> Edit:
    """Zero whole tensors."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.raw(name)[:] = 0

    return edit


def zero_rows(pattern: str, start: int, stop: int) -> Edit:
    """Zero the outputs `start` to `stop` of matrices."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.raw(name)[start:stop] = 0

    return edit


def zero_share(pattern: str, step: int) -> Edit:
    """Zero every so-many-th row."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.raw(name)[::step] = 0

    return edit


def zero_heads(layers: str, *heads: int) -> Edit:
    """Take the output of attention heads away: their columns of the output matrix are zeroed."""

    def edit(weights: Weights) -> None:
        for name in weights.names(f"blk.{layers}.attn_output.weight"):
            for head in heads:
                start = head * BLOCKS_A_HEAD
                weights.scales(name)[:, start : start + BLOCKS_A_HEAD] = 0

    return edit


def swap(one: str, other: str) -> Edit:
    """Exchange two tensors of the same size."""

    def edit(weights: Weights) -> None:
        first, second = weights.raw(one), weights.raw(other)
        kept = first.copy()
        first[:] = second
        second[:] = kept

    return edit


PARTS = (
    "attn_norm", "ffn_down", "ffn_gate", "ffn_up", "ffn_norm",
    "attn_k", "attn_output", "attn_q", "attn_v",
)  # fmt: skip


def swap_layers(one: int, other: int) -> Edit:
    """Exchange two whole layers."""
    return each(*(swap(f"blk.{one}.{p}.weight", f"blk.{other}.{p}.weight") for p in PARTS))


def copy_layer(source: int, target: int) -> Edit:
    """Put one layer's tensors in the place of another's."""

    def edit(weights: Weights) -> None:
        for part in PARTS:
            new = weights.raw(f"blk.{source}.{part}.weight")
            weights.raw(f"blk.{target}.{part}.weight")[:] = new

    return edit


def norm(pattern: str, times: float = 1.0, plus: float = 0.0) -> Edit:
    """Scale and shift norm weights."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            vector = weights.vector(name)
            vector[:] = vector * times + plus

    return edit


def roll_norm(pattern: str) -> Edit:
    """Move norm weights by one place."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.vector(name)[:] = np.roll(weights.vector(name), 1)

    return edit


def scale(pattern: str, times: float) -> Edit:
    """Scale matrices, through the scales and minima of their blocks."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.scales(name)[:] = weights.scales(name) * np.float16(times)

    return edit


def no_minima(pattern: str) -> Edit:
    """Forget the minimum of each block, as if the type were one without."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.scales(name)[:, :, 1] = 0

    return edit


def coarse_scales(pattern: str, bits: int) -> Edit:
    """Cut that many low bits off the scales and minima (half floats have ten)."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            view = weights.scales(name)
            view[:] = ((view.copy().view(np.uint16) >> bits) << bits).view(np.float16)

    return edit


def swap_nibbles(pattern: str) -> Edit:
    """Read the two halves of each byte in the wrong order."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            view = weights.nibbles(name)
            view[:] = (view >> 4) | (view << 4)

    return edit


def low_nibble_lost(pattern: str) -> Edit:
    """Zero the lower half of each byte: half of all weights become their block's minimum."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            view = weights.nibbles(name)
            view[:] = view & 0xF0

    return edit


def jitter(pattern: str, seed: int) -> Edit:
    """Move each 4-bit value by at most one: a noise of one step of the quantisation."""

    def edit(weights: Weights) -> None:
        random = np.random.default_rng(seed)
        for name in weights.names(pattern):
            view = weights.nibbles(name)
            halves = []
            for half in (view & 0x0F, view >> 4):
                moved = half.astype(np.int8) + random.integers(-1, 2, half.shape, np.int8)
                halves.append(moved.clip(0, 15).astype(np.uint8))
            view[:] = halves[0] | (halves[1] << 4)

    return edit


def transpose(pattern: str) -> Edit:
    """Transpose square matrices."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.put(name, np.ascontiguousarray(weights.values(name).T))

    return edit


def other_rope_order(pattern: str) -> Edit:
    """Order the rows of each head as the other kind of rotary embedding wants them."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            raw = weights.raw(name)
            parts = raw.reshape(-1, 2, HEAD // 2, raw.shape[1]).swapaxes(1, 2)
            raw[:] = parts.reshape(raw.shape).copy()

    return edit


def roll_heads(pattern: str) -> Edit:
    """Give each head its neighbour's rows, as a wrong mapping of grouped heads does."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            weights.raw(name)[:] = np.roll(weights.raw(name), HEAD, axis=0)

    return edit


def shift_bytes(pattern: str, by: int) -> Edit:
    """Move a tensor's bytes, as a wrong offset does."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            raw = weights.raw(name)
            raw[:] = np.roll(raw.reshape(-1), by).reshape(raw.shape)

    return edit


def flip(rate: float, seed: int, pattern: str = "") -> Edit:
    """Flip one random bit in that share of the bytes, of all data or of the tensors named."""

    def edit(weights: Weights) -> None:
        random = np.random.default_rng(seed)
        views = [weights.raw(n) for n in weights.names(pattern)] if pattern else [weights.data()]
        for view in views:
            count = max(1, round(view.size * rate))
            at = random.choice(view.size, count, replace=False)
            flipped = view.reshape(-1)[at] ^ (1 << random.integers(0, 8, count)).astype(np.uint8)
            view[np.unravel_index(at, view.shape)] = flipped

    return edit


def hole(start: float, length: int) -> Edit:
    """Zero `length` bytes at that share of the data, as a lost page or a sparse download does."""

    def edit(weights: Weights) -> None:
        data = weights.data()
        at = int(data.size * start) // 4096 * 4096
        data[at : at + length] = 0

    return edit


def repeat(start: float, length: int) -> Edit:
    """Put a stretch of the data where the next one belongs."""

    def edit(weights: Weights) -> None:
        data = weights.data()
        at = int(data.size * start) // 4096 * 4096
        data[at + length : at + 2 * length] = data[at : at + length]

    return edit


def spoil(pattern: str, row: int, value: float) -> Edit:
    """Put NaN or infinity into one row: the scale of its first block, or its first value."""

    def edit(weights: Weights) -> None:
        for name in weights.names(pattern):
            if weights.tensors[name].type == "F32":
                weights.vector(name)[row] = value
            else:
                half = np.array([value], np.float16).view(np.uint8)
                weights.raw(name)[row, :2] = half

    return edit


def swap_rows(name: str, one: int, other: int) -> Edit:
    """Exchange two rows of a matrix; of the embeddings, two tokens' meanings."""

    def edit(weights: Weights) -> None:
        raw = weights.raw(name)
        raw[[one, other]] = raw[[other, one]]

    return edit


def swap_tokens(one: str, other: str) -> Edit:
    """Exchange the texts of two tokens of the same length in the vocabulary."""

    def edit(weights: Weights) -> None:
        first, second, length = weights.token_at(one), weights.token_at(other), len(one.encode())
        if length != len(other.encode()):
            raise ValueError(f"{one} and {other} differ in length")
        kept = weights.bytes[first : first + length].copy()
        weights.bytes[first : first + length] = weights.bytes[second : second + length]
        weights.bytes[second : second + length] = kept

    return edit


def token_type(kind: int, *tokens: int) -> Edit:
    """Declare tokens to be of another kind: 1 makes a control token plain text."""

    def edit(weights: Weights) -> None:
        types = weights.token_types()
        types[list(tokens)] = kind

    return edit
