"""Layers, heads and state of a model, from GGUF metadata."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from bakehouse.checkpoints.gguf import Array
from bakehouse.errors import CheckpointError


class LayerKind(StrEnum):
    """Kind of state that a layer keeps about earlier tokens."""

    FULL = "full attention"
    SLIDING = "sliding-window attention"
    LATENT = "latent attention (MLA)"
    RECURRENT = "linear or recurrent"
    NONE = "no memory of its own"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's memory. Widths are elements for each token, over all KV heads."""

    kind: LayerKind
    keys: int = 0
    values: int = 0
    """0 where the keys hold both (MLA)."""
    index: int = 0
    """Keys of a sparse-attention indexer."""
    state: int = 0
    """Elements of recurrent state for each sequence, whatever the context is."""


@dataclass(frozen=True, slots=True)
class Vision:
    """Vision encoder; 0 for what is not declared."""

    layers: int = 0
    width: int = 0
    image: int = 0
    """Side of the input image, in pixels."""
    patch: int = 0
    """Side of a patch, in pixels."""
    projected: int = 0
    """Width of the vectors given to the language model."""


@dataclass(frozen=True)
class ModelShape:
    """Architecture figures as a GGUF's metadata or a config.json declares them."""

    architecture: str
    """Empty if the file names none."""
    layers: tuple[Layer, ...]
    """The trunk."""
    mtp: tuple[Layer, ...] = ()
    """Layers that predict further tokens (multi-token prediction)."""
    heads: int = 0
    """Maximum query heads of a layer."""
    kv_heads: int = 0
    """Maximum KV heads of a layer."""
    key_length: int = 0
    value_length: int = 0
    embedding: int = 0
    feed_forward: int = 0
    """Feed-forward width for one token, all used experts together."""
    vocabulary: int = 0
    context_limit: int | None = None
    window: int | None = None
    """Tokens that sliding-window layers look back."""
    experts: int = 0
    experts_used: int = 0
    experts_shared: int = 0
    vision: bool = False
    pictures: Vision | None = None
    assumptions: tuple[str, ...] = ()
    """What the file does not declare and was assumed, in favour of more memory."""

    def count(self, kind: LayerKind) -> int:
        """Number of trunk layers of a kind."""
        return sum(layer.kind is kind for layer in self.layers)

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent (MLA)."""
        return any(layer.kind is LayerKind.LATENT for layer in (*self.layers, *self.mtp))

    def to_data(self) -> dict[str, object]:
        """Plain data for a JSON document, layers counted by kind."""
        kinds = {kind.value: n for kind in LayerKind if (n := self.count(kind))}
        return {
            "architecture": self.architecture,
            "layers": len(self.layers),
            "layer_kinds": kinds,
            "mtp_layers": len(self.mtp),
            **{f.name: getattr(self, f.name) for f in fields(self)[3:]},
            "pictures": asdict(self.pictures) if self.pictures else None,
            "assumptions": list(self.assumptions),
        }


MAX_LAYERS = 4096

SWA_PERIODS: dict[str, tuple[int, bool]] = {
    "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "cohere2": (4, False),
    "gpt-oss": (2, False), "llama4": (4, False), "olmo2": (4, False), "exaone4": (4, False),
    "plamo3": (8, False), "smallthinker": (4, True), "mellum": (4, False),
    "muse-glimmer": (4, False), "afmoe": (4, False),
}  # fmt: skip
"""Architecture to (period, whether the full layer comes first) for files without a pattern: one
layer in each period is full. From src/models/*.cpp, `load_swa_pattern`."""

FULL_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Hybrids: every how many layers attention is full, if the file does not say."""

PURELY_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
RECURRENT_BY_HEADS = {
    "jamba", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "kimi-linear",
    "bailingmoe3", "kimi-k3", "glm5-next", "plamo2",
}  # fmt: skip
"""Hybrids in which a layer without KV heads is a recurrent one."""


@dataclass(frozen=True)
class _Keys:
    """Typed access to `ARCH.name` keys; errors name the key."""

    metadata: dict[str, Any]
    architecture: str
    where: str

    def number(self, name: str, default: int = 0) -> int:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list) and value:
            value = max(value, key=lambda v: v if isinstance(v, int) else -1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
            raise self.wrong(name, value)
        return value

    def per_layer(self, name: str, layers: int, default: int) -> list[int]:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, Array) or (isinstance(value, list) and len(value) < layers):
            raise self.wrong(name, value)
        values = value[:layers] if isinstance(value, list) else [value] * layers
        if any(not isinstance(v, int) or not 0 <= v < 2**40 for v in values):
            raise self.wrong(name, value)
        return [int(v) for v in values]

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def flags(self, name: str, trunk: int, total: int) -> list[bool] | None:
        """A flag for each layer, False after the trunk; None if the key is not a list."""
        if not isinstance(self.metadata.get(f"{self.architecture}.{name}"), list):
            return None
        return [bool(f) for f in self.per_layer(name, trunk, 0)] + [False] * (total - trunk)

    def wrong(self, name: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"invalid value {str(value)[:80]!r} for the metadata key '{self.architecture}.{name}'",
            where=self.where,
            hint="the file is damaged or was converted wrongly; download it again",
        )


def gguf_shape(metadata: dict[str, Any], where: str) -> ModelShape:
    """Read the shape; `where` is the file's name. Raises CheckpointError for invalid values."""
    architecture = metadata.get("general.architecture", "")
    if not isinstance(architecture, str):
        architecture = ""
    keys = _Keys(metadata, architecture, where)
    total = keys.number("block_count")
    if total > MAX_LAYERS:
        raise keys.wrong("block_count", total)
    mtp = keys.number("nextn_predict_layers")
    if mtp and mtp >= total:
        raise keys.wrong("nextn_predict_layers", mtp)
    trunk = total - mtp
    vision = _Keys(metadata, "clip.vision", where)
    assumptions: list[str] = []
    layers = _layers(keys, total, trunk, assumptions)
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocabulary = keys.number("vocab_size") or (
        tokens.length if isinstance(tokens, Array) else len(tokens or ())
    )
    heads = max(keys.per_layer("attention.head_count", total, 0), default=0)
    return ModelShape(
        architecture=architecture,
        layers=tuple(layers[:trunk]),
        mtp=tuple(layers[trunk:]),
        heads=heads,
        kv_heads=max(keys.per_layer("attention.head_count_kv", total, heads), default=0),
        key_length=_head(keys, "key"),
        value_length=_head(keys, "value"),
        embedding=keys.number("embedding_length"),
        feed_forward=max(
            keys.number("feed_forward_length"),
            keys.number("expert_feed_forward_length") * keys.number("expert_used_count"),
        ),
        vocabulary=vocabulary,
        context_limit=keys.number("context_length") or None,
        window=keys.number("attention.sliding_window") or None,
        experts=keys.number("expert_count"),
        experts_used=keys.number("expert_used_count"),
        experts_shared=keys.number("expert_shared_count"),
        vision=bool(metadata.get("clip.has_vision_encoder")),
        pictures=Vision(
            layers=vision.number("block_count"),
            width=vision.number("embedding_length"),
            image=vision.number("image_size"),
            patch=vision.number("patch_size"),
            projected=vision.number("projection_dim"),
        )
        if metadata.get("clip.has_vision_encoder")
        else None,
        assumptions=tuple(assumptions),
    )


def _head(keys: _Keys, side: str, suffix: str = "") -> int:
    """Elements of one head's keys or values; llama.cpp's default is embedding / heads."""
    for name in (f"attention.{side}_length{suffix}", f"attention.{side}_length"):
        if keys.has(name):
            return keys.number(name)
    heads = keys.number("attention.head_count")
    return keys.number("embedding_length") // heads if heads else 0


def _layers(keys: _Keys, total: int, trunk: int, assumptions: list[str]) -> list[Layer]:
    heads = keys.per_layer("attention.head_count", total, 0)
    kv_heads = keys.per_layer("attention.head_count_kv", total, 0)
    if not keys.has("attention.head_count_kv"):
        kv_heads = heads
    sliding = _sliding(keys, total, trunk, assumptions)
    recurrent = _recurrent(keys, total, trunk, kv_heads)
    latent = bool(keys.number("attention.key_length_mla"))
    shared_from = total - keys.number("attention.shared_kv_layers")
    state = _state(keys)
    if any(recurrent) and not state:
        assumptions.append("the size of the recurrent state is not declared; counted as 0")
    both = keys.architecture == "falcon-h1"
    index_full = keys.per_layer("attention.indexer.types", min(trunk, total), 1)
    layers = []
    for i in range(total):
        index = keys.number("attention.indexer.key_length")
        if i < trunk and not index_full[i]:
            index = 0
        if recurrent[i]:
            layers.append(Layer(LayerKind.RECURRENT, state=state))
        elif not kv_heads[i] or (i >= shared_from and i < trunk):
            layers.append(Layer(LayerKind.NONE))
        elif latent:
            keys_wide = _head(keys, "key") * kv_heads[i]
            layers.append(Layer(LayerKind.LATENT, keys=keys_wide, index=index))
        else:
            suffix = "_swa" if sliding[i] else ""
            layers.append(
                Layer(
                    LayerKind.SLIDING if sliding[i] else LayerKind.FULL,
                    keys=_head(keys, "key", suffix) * kv_heads[i],
                    values=_head(keys, "value", suffix) * kv_heads[i],
                    index=index,
                    state=state if both else 0,
                )
            )
    return layers


def _sliding(keys: _Keys, total: int, trunk: int, assumptions: list[str]) -> list[bool]:
    """Whether each layer uses a sliding window."""
    none = [False] * total
    if not keys.number("attention.sliding_window"):
        return none
    pattern = "attention.sliding_window_pattern"
    if (flags := keys.flags(pattern, trunk, total)) is not None:
        return flags
    period, dense_first = SWA_PERIODS.get(keys.architecture, (0, False))
    period = keys.number(pattern) if keys.has(pattern) else period
    if not period:
        assumptions.append(
            "a sliding window is declared, but not for which layers: all are counted as full"
        )
        return none
    if dense_first:
        return [i < trunk and i % period != 0 for i in range(total)]
    return [i < trunk and i % period < period - 1 for i in range(total)]


def _recurrent(keys: _Keys, total: int, trunk: int, kv_heads: list[int]) -> list[bool]:
    """Whether each layer is linear or recurrent."""
    architecture = keys.architecture
    if (flags := keys.flags("attention.recurrent_layers", trunk, total)) is not None:
        return flags
    if architecture in PURELY_RECURRENT:
        return [True] * total
    interval = keys.number("full_attention_interval", FULL_INTERVALS.get(architecture, 0))
    if interval:
        return [i < trunk and (i + 1) % interval != 0 for i in range(total)]
    by_heads = architecture in RECURRENT_BY_HEADS or keys.has("kda.head_dim")
    # Nemotron-H also has layers with a feed-forward network only.
    feed_forward = [0] * total
    if architecture.startswith("nemotron_h"):
        feed_forward = keys.per_layer("feed_forward_length", total, 0)
    return [by_heads and not h and not f for h, f in zip(kv_heads, feed_forward, strict=True)]


def _state(keys: _Keys) -> int:
    """Elements of a recurrent layer's state for one sequence (`n_embd_r` + `n_embd_s`)."""
    embedding = keys.number("embedding_length")
    heads = keys.number("attention.head_count")
    kernel = keys.number("ssm.conv_kernel")
    if size := keys.number("wkv.head_size"):
        return keys.number("token_shift_count", 2) * embedding + embedding * size
    if cache := keys.number("shortconv.l_cache"):
        return embedding * (cache - 1)
    if head := keys.number("kda.head_dim"):
        return 3 * (kernel - 1 if kernel else 3) * heads * head + head * head * heads
    if keys.architecture == "minimax-01":
        return _head(keys, "key") ** 2 * heads
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    groups = keys.number("ssm.group_count")
    return max(kernel - 1, 0) * (inner + 2 * groups * state) + state * inner
