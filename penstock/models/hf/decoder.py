"""Makes the spec of a llama-like decoder: norms before the blocks, rotary positions, in most types RMS norms and gated
FFNs. Model types of this kind differ in defaults and details."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.models.hf.config import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Config, short
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import LLAMA_RULES, RopeRules, rope_of
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Routed

FULL, SLIDING = "full_attention", "sliding_attention"

# A tokenizer's peak is 0.84 KB an entry (105 MiB for 128 k). The store replaces this estimate once it sees the file.
TOKENIZER_BYTES_PER_ENTRY = 840

LAYER_NAMES = {
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "gate_bias": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{}.mlp.up_proj.bias",
    "down_bias": "model.layers.{}.mlp.down_proj.bias",
    "attn_in": "model.layers.{}.input_layernorm.weight",
    "ffn_in": "model.layers.{}.post_attention_layernorm.weight",
}
# Of models that norm a block's output too: `post_attention_layernorm` is that of attention, where llama norms the FFN's
# input with it.
NORMED_OUT_NAMES = LAYER_NAMES | {
    "attn_out": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_in": "model.layers.{}.pre_feedforward_layernorm.weight",
    "ffn_out": "model.layers.{}.post_feedforward_layernorm.weight",
}
END_NAMES = {
    "embed.rows": "model.embed_tokens.weight",
    "edges.final": "model.norm.weight",
    "head.rows": "lm_head.weight",
}
# Of models with layer norms, which have biases.
LAYER_NORM_NAMES = LAYER_NAMES | {
    "attn_in_bias": "model.layers.{}.input_layernorm.bias",
    "ffn_in_bias": "model.layers.{}.post_attention_layernorm.bias",
}
LAYER_NORM_END_NAMES = END_NAMES | {"edges.final_bias": "model.norm.bias"}


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of the transformers class of a type for keys that a config leaves out.

    `kv_heads` None: as many as heads. `head_dim` None: hidden_size / heads. For both, `null` in a config means the
    same."""

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    eps: float = 1e-6
    tied: bool = False
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class Details:
    """Differences of a type from the plain llama layer. `scale` None: head_dim ** -0.5. Softcaps: 0 is none."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    sinks: bool = False
    scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    norm: str = "rms"
    norm_eps_key: str = "rms_norm_eps"
    norm_offset: float = 0.0
    norm_out: bool = False
    scale_embedding: bool = False
    gated: bool = True
    activation_key: str = "hidden_act"
    rope: RopeRules = LLAMA_RULES


def decoder(
    config: Config,
    model_type: str,
    defaults: Defaults,
    details: Details,
    *,
    window: int | None = None,
    layer_types: Sequence[str] | None = None,
    routed: Sequence[Routed | None] | None = None,
) -> ModelSpec:
    """The spec of a llama-like model. `window` holds in the layers whose type is sliding, or in all layers if
    `layer_types` is None. `routed`: the experts of each layer, None for a dense layer.

    Raises BrokenModel, and UnsupportedModel for an activation, a rope or a number format that penstock does not run."""
    d_model = config.whole("hidden_size", hi=MAX_WIDTH)
    max_positions = config.whole("max_position_embeddings", defaults.max_positions)
    vocab = config.whole("vocab_size", hi=MAX_VOCAB)
    if layer_types is None:
        layer_types = [FULL if window is None else SLIDING] * layer_count(config)
    elif SLIDING in layer_types and window is None:
        raise config.broken("sliding_window", f"is not set (or not in use), but layer_types has {SLIDING}")

    ffns: list[FfnSpec | Routed | None] = list(routed or [None] * len(layer_types))
    if None in ffns:
        dense = FfnSpec(
            neurons=config.whole("intermediate_size", hi=MAX_WIDTH),
            activation=config.activation(details.activation_key, defaults.activation),
            gated=details.gated,
            up_bias=details.mlp_bias,
            down_bias=details.mlp_bias,
        )
        ffns = [dense if ffn is None else ffn for ffn in ffns]
    kinds: dict[tuple[str, FfnSpec | Routed | None], Layer] = {}  # layers that are alike are one object
    for kind, ffn in zip(layer_types, ffns, strict=True):
        assert ffn is not None
        if (kind, ffn) not in kinds:
            attention = _attention(config, defaults, details, d_model, max_positions, kind, window)
            kinds[kind, ffn] = Layer(attention=attention, ffn=ffn, norm_out=details.norm_out)
    return ModelSpec(
        model_type=model_type,
        dtype=config.dtype(),
        vocab=vocab,
        d_model=d_model,
        d_embed=d_model,
        max_positions=max_positions,
        layers=tuple(kinds[kind, ffn] for kind, ffn in zip(layer_types, ffns, strict=True)),
        norm=NormSpec(
            details.norm, config.real(details.norm_eps_key, defaults.eps, lo=0.0, hi=1.0), details.norm_offset
        ),
        final_norm=True,
        tied=config.flag("tie_word_embeddings", defaults.tied),
        embed_scale=d_model**0.5 if details.scale_embedding else 1.0,
        logit_softcap=details.logit_softcap,
        tokenizer_bytes=TOKENIZER_BYTES_PER_ENTRY * vocab,
    )


def decoder_sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, LAYER_NAMES, END_NAMES)


def layer_count(config: Config) -> int:
    """The number of layers. Raises BrokenModel."""
    return config.whole("num_hidden_layers", hi=MAX_LAYERS)


def head_dim_of(config: Config, d_model: int, heads: int, default: int | None = None) -> int:
    """`head_dim` of the config, or its default. Where that is None it is hidden_size / heads. Raises BrokenModel."""
    given = config.optional_whole("head_dim", default, hi=MAX_WIDTH)
    return divided(config, d_model, heads) if given is None else given


def widths(config: Config) -> tuple[int, int, int]:
    """(hidden_size, heads, width of a head) of a type whose heads share out hidden_size. Raises BrokenModel."""
    d_model = config.whole("hidden_size", hi=MAX_WIDTH)
    heads = config.whole("num_attention_heads", hi=MAX_WIDTH)
    return d_model, heads, divided(config, d_model, heads)


def divided(config: Config, d_model: int, heads: int) -> int:
    """hidden_size / heads. Raises BrokenModel where that is no whole number."""
    if d_model % heads:
        raise config.broken("num_attention_heads", f"{heads} should divide hidden_size {d_model}")
    return d_model // heads


def layer_types_of(config: Config, has_window: Callable[[int], bool]) -> list[str]:
    """`layer_types` of the config. Where it is null or absent, `has_window` tells of each layer. Raises BrokenModel and
    UnsupportedModel."""
    layers = layer_count(config)
    if not config.has("layer_types"):
        return [SLIDING if has_window(i) else FULL for i in range(layers)]
    layer_types = config.data["layer_types"]
    if not isinstance(layer_types, list) or len(layer_types) != layers:
        raise config.broken("layer_types", f"should be a list of {layers} names, not {short(layer_types)}")
    for name in layer_types:
        if not isinstance(name, str) or name not in (FULL, SLIDING):
            raise config.unsupported("layer_types", f"has {short(name)}; penstock runs {FULL} and {SLIDING}")
    return layer_types


def _attention(
    config: Config,
    defaults: Defaults,
    details: Details,
    d_model: int,
    max_positions: int,
    layer_type: str,
    window: int | None,
) -> Attention:
    heads = config.whole("num_attention_heads", hi=MAX_WIDTH)
    kv_heads = config.optional_whole("num_key_value_heads", defaults.kv_heads, hi=MAX_WIDTH) or heads
    if heads % kv_heads:
        raise config.broken("num_key_value_heads", f"{kv_heads} should divide num_attention_heads {heads}")
    head_dim = head_dim_of(config, d_model, heads, defaults.head_dim)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if details.scale is None else details.scale,
        softcap=details.attention_softcap,
        window=(window or 0) if layer_type == SLIDING else 0,
        qkv_bias=details.qkv_bias,
        out_bias=details.out_bias,
        qk_norm=details.qk_norm,
        norms_all_heads=details.norms_all_heads,
        sinks=details.sinks,
        rope=rope_of(config, details.rope, head_dim, max_positions, layer_type),
    )
