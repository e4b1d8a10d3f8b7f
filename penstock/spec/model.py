"""An architecture as data: what `config.json` says, in one vocabulary for all model types.

ModelSpec holds no weights and no formats; `spec.parts` turns it and a format into parts and bytes.
Letters used in shapes: T rows (tokens), D d_model, V vocab, H heads, K kv_heads, G = H / K, E head_dim,
N neurons.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from penstock.errors import BadRequest

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions over the first `dims` of each head.

    `factors` holds all scalars of the kind, by name, worked out where a config leaves them to a rule:

    default   none
    linear    factor
    llama3    factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    yarn      factor, attention_factor, beta_fast, beta_slow, truncate (0 or 1), original_max_position_embeddings
    longrope  attention_factor, original_max_position_embeddings; its per-frequency divisors stand in
              `short_factor` and `long_factor` (dims / 2 each), long from the first sequence that exceeds it on

    `attention_factor` multiplies cos and sin.
    """

    theta: float
    dims: int
    kind: str = "default"
    factors: tuple[tuple[str, float], ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Norm:
    """kind "rms" or "layer"; `offset` is added to the weight (gemma stores weight - 1)."""

    kind: str
    eps: float
    offset: float = 0.0
    affine: bool = True

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.affine


@dataclass(frozen=True, slots=True)
class Attention:
    """`scale` multiplies the scores; `softcap` s squashes them to s·tanh(score/s), 0 = none; a query sees
    the last `window` positions, its own included, 0 = all. `qk_norm`: RMS norm of each head's q and k."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Ffn:
    """gated: down(act(gate x) * (up x)); else down(act(up x))."""

    neurons: int
    activation: str
    gated: bool
    up_bias: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise BadRequest(f"unknown activation {self.activation!r}")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Where its norms stand is the same for attention and FFN:

    norm_in: the block reads norm(x);  norm_out: norm(block output) is added to x (gemma2);
    norm_after: x becomes norm(x + block output) (OPT-350m).
    """

    attention: Attention
    ffn: Ffn
    norm_in: bool = True
    norm_out: bool = False
    norm_after: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    d_embed differs from d_model only where the embedding is projected (OPT-350m). `position_rows` > 0
    means learned positions, read at index position + `position_offset`. `dtype` is the checkpoint's own
    number format. `tokenizer_bytes` is what the tokenizer adds to the process at its peak.
    """

    model_type: str
    dtype: str
    vocab: int
    d_model: int
    d_embed: int
    max_positions: int
    layers: tuple[Layer, ...]
    norm: Norm
    final_norm: bool
    tied: bool
    embed_scale: float = 1.0
    position_rows: int = 0
    position_offset: int = 0
    logit_softcap: float = 0.0
    tokenizer_bytes: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once: of 80 layers it takes 35 µs, and a planner asks for a model's parts thousands of times."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __post_init__(self) -> None:
        for name in ("vocab", "d_model", "d_embed", "max_positions"):
            value = getattr(self, name)
            if not 0 < value < 2**31:
                raise BadRequest(f"{name} is {value}")
        if not self.layers:
            raise BadRequest("the model has no layers")
        for i, layer in enumerate(self.layers):
            a = layer.attention
            if min(a.heads, a.kv_heads, a.head_dim, layer.ffn.neurons) < 1 or a.heads % a.kv_heads:
                raise BadRequest(
                    f"layer {i}: {a.heads} heads, {a.kv_heads} KV heads of {a.head_dim}, {layer.ffn.neurons} neurons"
                )
