"""What a model is made of, as far as memory and speed depend on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer remembers what came before."""

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
    """What looks at pictures; 0 for what is not declared."""

    layers: int = 0
    width: int = 0
    image: int = 0
    """Pixels of a picture's side."""
    patch: int = 0
    """Pixels of a patch's side."""
    projected: int = 0
    """Width of what it hands to the language model."""


@dataclass(frozen=True)
class ModelShape:
    """Architecture figures as a GGUF's metadata or a config.json declares them."""

    architecture: str
    """Empty where the file names none."""
    layers: tuple[Layer, ...]
    """The trunk."""
    mtp: tuple[Layer, ...] = ()
    """Layers that predict further tokens (multi-token prediction)."""
    heads: int = 0
    """Query heads, the most that a layer has."""
    kv_heads: int = 0
    """The most that a layer has."""
    key_length: int = 0
    value_length: int = 0
    embedding: int = 0
    feed_forward: int = 0
    """Width that one token passes in a layer's feed-forward network, used experts together."""
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
    """What the file does not say and was filled in, on the side of more memory."""

    def count(self, kind: LayerKind) -> int:
        """How many layers of the trunk are of a kind."""
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
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "key_length": self.key_length,
            "value_length": self.value_length,
            "embedding": self.embedding,
            "feed_forward": self.feed_forward,
            "vocabulary": self.vocabulary,
            "context_limit": self.context_limit,
            "window": self.window,
            "experts": self.experts,
            "experts_used": self.experts_used,
            "experts_shared": self.experts_shared,
            "vision": self.vision,
            "pictures": asdict(self.pictures) if self.pictures else None,
            "assumptions": list(self.assumptions),
        }
