"""The variants of the real model that the gate is measured on: what is wrong, and what is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from scripts.bench import gate_edits as e
from scripts.bench.gate_edits import Edit


@dataclass(frozen=True)
class Variant:
    """One way to serve the model. A mutant is wrong by design; whether it shows is the question."""

    name: str
    what: str
    kind: Literal["mutant", "harmless"] = "mutant"
    edit: Edit | None = None
    flags: tuple[str, ...] = ()
    kv: str = "f16"
    """Type of the KV cache: there is a golden value for each."""
    rewrite: str = ""
    """An element type, or `tool:TYPE` for one that llama-quantize makes."""
    same: bool = True
    """Whether golden values of the model as it is hold for it; not so for other weights."""


def _override(key: str, kind: str, value: object) -> tuple[str, ...]:
    return ("--override-kv", f"{key}={kind}:{value}")


def _mutants(group: str, rows: dict[str, tuple[str, Edit]]) -> tuple[Variant, ...]:
    return tuple(Variant(f"{group}-{n}", what, edit=edit) for n, (what, edit) in rows.items())


ZEROED = _mutants("zero", {
    "down-10": ("feed-forward output of layer 10 zeroed", e.zero("blk.10.ffn_down.weight")),
    "gate-0": ("feed-forward gate of layer 0 zeroed", e.zero("blk.0.ffn_gate.weight")),
    "up-29": ("feed-forward input of the last layer zeroed", e.zero("blk.29.ffn_up.weight")),
    "out-15": ("attention output of layer 15 zeroed", e.zero("blk.15.attn_output.weight")),
    "q-3": ("queries of layer 3 zeroed", e.zero("blk.3.attn_q.weight")),
    "k-20": ("keys of layer 20 zeroed", e.zero("blk.20.attn_k.weight")),
    "v-5": ("values of layer 5 zeroed", e.zero("blk.5.attn_v.weight")),
    "layer-15": (
        "layer 15 adds nothing",
        e.each(e.zero("blk.15.attn_output.weight"), e.zero("blk.15.ffn_down.weight")),
    ),
    "quarter-10": ("every fourth row of one matrix", e.zero_share("blk.10.ffn_up.weight", 4)),
    "quarter-out-20": ("every fourth row, attention", e.zero_share("blk.20.attn_output.weight", 4)),
    "row-12": ("one row of one matrix", e.zero_rows("blk.12.ffn_down.weight", 100, 101)),
    "head-5": ("one head of layer 5", e.zero_heads("5", 0)),
    "head-all": ("the first head of every layer", e.zero_heads("*", 0)),
    "heads-18": ("one group of three heads of layer 18", e.zero_heads("18", 3, 4, 5)),
})  # fmt: skip

SWAPPED = _mutants("swap", {
    "out-10-11": (
        "attention outputs of two layers", e.swap("blk.10.attn_output.weight",
        "blk.11.attn_output.weight"),
    ),
    "down-3-4": ("feed-forward outputs of two layers", e.swap("blk.3.ffn_down.weight",
        "blk.4.ffn_down.weight")),
    "gate-up-12": ("gate and up in layer 12", e.swap("blk.12.ffn_gate.weight",
        "blk.12.ffn_up.weight")),
    "k-v-8": ("keys and values in layer 8", e.swap("blk.8.attn_k.weight", "blk.8.attn_v.weight")),
    "layers-14-15": ("two layers in the middle", e.swap_layers(14, 15)),
    "layer-twice": ("layer 20 in the place of layer 21", e.copy_layer(20, 21)),
    "transposed-7": ("attention output of layer 7", e.transpose("blk.7.attn_output.weight")),
    "kv-heads": ("key-value heads off by one, all layers", e.each(
        e.roll_heads("blk.*.attn_k.weight"), e.roll_heads("blk.*.attn_v.weight"))),
    "kv-heads-9": ("key-value heads off by one, layer 9", e.each(
        e.roll_heads("blk.9.attn_k.weight"), e.roll_heads("blk.9.attn_v.weight"))),
})  # fmt: skip

NORMS = _mutants("norm", {
    "plus-one": ("1 added to every norm (centred twice)", e.norm("*_norm.weight", plus=1.0)),
    "attn-half-10": ("attention norm of layer 10 halved", e.norm("blk.10.attn_norm.weight", 0.5)),
    "ffn-half-10": ("feed-forward norm of layer 10 halved", e.norm("blk.10.ffn_norm.weight", 0.5)),
    "ones-5": ("attention norm of layer 5 all ones", e.norm("blk.5.attn_norm.weight", 0.0, 1.0)),
    "all-1.1": ("all norms scaled by 1.1", e.norm("*_norm.weight", 1.1)),
    "all-1.01": ("all norms scaled by 1.01", e.norm("*_norm.weight", 1.01)),
    "out-1.2": ("output norm scaled by 1.2", e.norm("output_norm.weight", 1.2)),
    "out-shift": ("0.05 added to the output norm", e.norm("output_norm.weight", plus=0.05)),
    "rolled-16": ("norm of layer 16 off by one place", e.roll_norm("blk.16.attn_norm.weight")),
})  # fmt: skip

ROPE = (
    Variant("rope-base-10k", "rotary base 10,000 in place of 100,000",
        flags=("--rope-freq-base", "10000")),
    Variant("rope-base-1m", "rotary base 1,000,000", flags=("--rope-freq-base", "1000000")),
    Variant("rope-base-99k", "rotary base 99,000", flags=("--rope-freq-base", "99000")),
    Variant("rope-scaled", "positions halved", flags=("--rope-freq-scale", "0.5")),
    Variant("rope-yarn", "YaRN by 4, asked for by nobody",
        flags=("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "2048")),
    Variant("rope-order", "rows of queries and keys in the other order",
        edit=e.each(e.other_rope_order("blk.*.attn_q.weight"),
                    e.other_rope_order("blk.*.attn_k.weight"))),
    Variant("rope-order-9", "the same, layer 9 only",
        edit=e.each(e.other_rope_order("blk.9.attn_q.weight"),
                    e.other_rope_order("blk.9.attn_k.weight"))),
    Variant("rope-attention", "all queries a fifth too small, as a wrong attention scale does",
        edit=e.scale("blk.*.attn_q.weight", 0.8)),
    *(Variant(f"epsilon-{value}", f"epsilon of the norms {value} in place of 1e-5",
        flags=_override("llama.attention.layer_norm_rms_epsilon", "float", value))
      for value in ("1e-2", "1e-3", "1e-6")),
)  # fmt: skip

BYTES = _mutants("bytes", {
    **{f"flip-{rate:.0e}": (f"a bit flipped in {rate:.0e} of the bytes", e.flip(rate, 7))
       for rate in (1e-7, 1e-6, 1e-5, 1e-4)},
    "flip-tensor": ("a bit flipped in 1e-3 of one tensor", e.flip(1e-3, 7, "blk.6.ffn_up.weight")),
    "page": ("4 KiB zeroed", e.hole(0.6, 4096)),
    "hole": ("1 MiB zeroed", e.hole(0.5, 2**20)),
    "repeat": ("64 KiB read twice", e.repeat(0.7, 2**16)),
    "offset": ("one tensor read 32 bytes too early", e.shift_bytes("blk.13.ffn_gate.weight", 32)),
})  # fmt: skip

PACKED = _mutants("packed", {
    "nibbles-17": ("the same in one matrix", e.swap_nibbles("blk.17.ffn_down.weight")),
    "nibble-lost-4": ("half of one matrix's values lost", e.low_nibble_lost("blk.4.ffn_up.weight")),
    "minima-22": ("minima of one matrix forgotten", e.no_minima("blk.22.attn_v.weight")),
    "scale-1.05": ("all feed-forward outputs 5% too large", e.scale("blk.*.ffn_down.weight", 1.05)),
    "scale-0.99": ("all feed-forward outputs 1% small", e.scale("blk.*.ffn_down.weight", 0.99)),
    "negated-25": ("one matrix with the wrong sign", e.scale("blk.25.attn_output.weight", -1.0)),
    "coarse": ("scales cut to 4 bits", e.coarse_scales("blk.*.attn_output.weight", 6)),
    "jitter": ("values of all matrices off by up to a step", e.jitter("blk.*.ffn_up.weight", 3)),
    "jitter-1": ("values of one matrix off by up to a step", e.jitter("blk.11.ffn_up.weight", 3)),
})  # fmt: skip

NAN = _mutants("nan", {
    "down-10": ("NaN in one row of layer 10", e.spoil("blk.10.ffn_down.weight", 5, math.nan)),
    "norm-20": ("NaN in one norm weight", e.spoil("blk.20.ffn_norm.weight", 7, math.nan)),
    "inf-8": ("an infinite scale in layer 8", e.spoil("blk.8.attn_v.weight", 3, math.inf)),
    "token": ("NaN in the row of the token ' the'", e.spoil("token_embd.weight", 260, math.nan)),
    "rare-token": ("NaN in the row of a rare token", e.spoil("token_embd.weight", 40_000,
        math.nan)),
})  # fmt: skip

TOKENS = (
    Variant("token-rows", "embeddings of 1,000 rare tokens zeroed",
        edit=e.zero_rows("token_embd.weight", 48_000, 49_000)),
    Variant("token-meaning", "embeddings of ' the' and ' of' exchanged",
        edit=e.swap_rows("token_embd.weight", 260, 282)),
    Variant("token-texts", "texts of ' the' and ' and' exchanged",
        edit=e.swap_tokens("Ġthe", "Ġand")),
    Variant("token-control", "the turn marks declared plain text; the engine fixes that",
        edit=e.token_type(1, 1, 2)),
    Variant("token-split", "text split as another model splits it",
        flags=_override("tokenizer.ggml.pre", "str", "llama-bpe")),
    Variant("token-bos", "a first token that the model was not trained with",
        flags=_override("tokenizer.ggml.add_bos_token", "bool", "true")),
    Variant("token-eos", "another end token declared; the engine finds the right one too",
        flags=_override("tokenizer.ggml.eos_token_id", "int", 17)),
    Variant("template-llama2", "chat template of Llama 2", flags=("--chat-template", "llama2")),
    Variant("template-vicuna", "chat template of Vicuna", flags=("--chat-template", "vicuna")),
    Variant("template-broken", "a template that forgets the question",
        flags=("--jinja", "--chat-template",
               ("{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_end|>\n{% endfor %}"
               "<|im_start|>assistant\n"))),
)  # fmt: skip


def _other(kind: str, what: str) -> Variant:
    """Other weights: they have no golden value here."""
    return Variant(f"quant-{kind.rpartition(':')[2]}", what, "harmless", rewrite=kind, same=False)


def _kernel(kind: str) -> Variant:
    """Another kernel's arithmetic: the 4-bit weights are held as 16-bit floats."""
    cache = () if kind == "f16" else ("-ctk", kind, "-ctv", kind, "-fa", "on")
    what = f"the same weights held as 16-bit floats, KV cache {kind}"
    return Variant(f"kernel-{kind}", what, "harmless", None, cache, kind, "F16")


def _same(name: str, what: str, *flags: str, kv: str = "f16") -> Variant:
    return Variant(name, what, "harmless", flags=flags, kv=kv)


def _cache(kind: str) -> Variant:
    flags = ("-ctk", kind, "-ctv", kind, "-fa", "on", "-ub", "64")
    return _same(f"kv-{kind}", f"KV cache {kind}, small batches", *flags, kv=kind)


HARMLESS = (
    _same("again", "the same once more"),
    _same("threads-2", "two threads", "-t", "2", "-tb", "2"),
    _same("threads-3", "more threads than cores", "-t", "3", "-tb", "3"),
    _same("batch-32", "batches of 32", "-b", "32", "-ub", "32"),
    _same("ubatch-8", "batches computed by 8", "-ub", "8"),
    _same("flash-on", "flash attention on", "-fa", "on"),
    _same("flash-off", "flash attention off", "-fa", "off"),
    _same("flash-off-8", "flash attention off, batches computed by 8", "-fa", "off", "-ub", "8"),
    _same("flash-off-f32", "the same, KV cache f32", "-fa", "off", "-ctk", "f32", "-ctv", "f32",
          kv="f32"),
    _same("flash-off-bf16", "the same, KV cache bf16", "-fa", "off", "-ctk", "bf16", "-ctv", "bf16",
          kv="bf16"),
    _same("no-repack", "weights not repacked", "--no-repack"),
    _same("no-mmap", "weights read, not mapped", "--load-mode", "none"),
    _same("context-1024", "a short context", "-c", "1024"),
    _same("context-8192", "the longest context", "-c", "8192"),
    _same("slots-2", "two slots", "-np", "2", "-c", "4096"),
    _same("unified-2", "two slots that share one cache", "-np", "2", "-kvu"),
    *(_cache(kind) for kind in ("f32", "bf16", "q8_0", "q5_1", "q4_0")),
    *(_kernel(kind) for kind in ("f16", "q8_0", "q5_1", "q4_0")),
    *(_other(kind, f"all matrices in {kind}") for kind in ("BF16", "Q8_0", "Q5_1", "Q4_0")),
    *(_other(f"tool:{kind}", f"{kind} as llama-quantize makes it")
      for kind in ("Q4_K_M", "IQ4_NL", "Q3_K_M")),
)  # fmt: skip

MUTANTS = (*ZEROED, *SWAPPED, *NORMS, *ROPE, *BYTES, *PACKED, *NAN, *TOKENS)

REFERENCE = tuple(
    Variant(
        f"golden-{kind}", f"what the golden value for the KV cache {kind} is taken from",
        "harmless", flags=() if kind == "f16" else ("-ctk", kind, "-ctv", kind, "-fa", "on"),
        kv=kind,
    )
    for kind in ("f16", "f32", "bf16", "q8_0", "q5_1", "q4_0")
)  # fmt: skip
"""Served when golden values are needed; they are not judged."""

ALL = (*HARMLESS, *MUTANTS)
