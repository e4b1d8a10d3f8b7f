"""OPT: layer norms with biases, learned positions, a plain ReLU FFN. The 350m model has its norms after the blocks and
a narrower embedding."""

from __future__ import annotations

from penstock.models.hf.config import MAX_VOCAB, MAX_WIDTH, Config
from penstock.models.hf.decoder import TOKENIZER_BYTES_PER_ENTRY, layer_count, widths
from penstock.models.hf.names import TensorSource, sources_of
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec

# The default of torch.nn.LayerNorm. No OPT config names it.
_EPS = 1e-5

# The first rows of the position table stand for padding, which penstock never feeds.
_POSITION_OFFSET = 2

_LAYER = "model.decoder.layers.{}."
_LAYER_NAMES = {
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.out_proj.weight",
    "q_bias": _LAYER + "self_attn.q_proj.bias",
    "k_bias": _LAYER + "self_attn.k_proj.bias",
    "v_bias": _LAYER + "self_attn.v_proj.bias",
    "o_bias": _LAYER + "self_attn.out_proj.bias",
    "up": _LAYER + "fc1.weight",
    "down": _LAYER + "fc2.weight",
    "up_bias": _LAYER + "fc1.bias",
    "down_bias": _LAYER + "fc2.bias",
}
# The same two norms stand before the blocks, or after them.
for _place in ("in", "after"):
    _LAYER_NAMES |= {
        f"attn_{_place}": _LAYER + "self_attn_layer_norm.weight",
        f"attn_{_place}_bias": _LAYER + "self_attn_layer_norm.bias",
        f"ffn_{_place}": _LAYER + "final_layer_norm.weight",
        f"ffn_{_place}_bias": _LAYER + "final_layer_norm.bias",
    }
_END_NAMES = {
    "embed.rows": "model.decoder.embed_tokens.weight",
    "edges.positions": "model.decoder.embed_positions.weight",
    "edges.project_in": "model.decoder.project_in.weight",
    "edges.project_out": "model.decoder.project_out.weight",
    "edges.final": "model.decoder.final_layer_norm.weight",
    "edges.final_bias": "model.decoder.final_layer_norm.bias",
    "head.rows": "lm_head.weight",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    d_model, heads, head_dim = widths(config)
    vocab = config.whole("vocab_size", hi=MAX_VOCAB)
    max_positions = config.whole("max_position_embeddings", 2048, hi=MAX_WIDTH)
    bias = config.flag("enable_bias", True)
    norm_first = config.flag("do_layer_norm_before", True)
    layer = Layer(
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
        ),
        ffn=FfnSpec(
            neurons=config.whole("ffn_dim", hi=MAX_WIDTH),
            activation=config.activation("activation_function", "relu"),
            gated=False,
            up_bias=bias,
            down_bias=bias,
        ),
        norm_in=norm_first,
        norm_after=not norm_first,
    )
    return ModelSpec(
        model_type="opt",
        dtype=config.dtype(),
        vocab=vocab,
        d_model=d_model,
        d_embed=config.optional_whole("word_embed_proj_dim", None, hi=MAX_WIDTH) or d_model,
        max_positions=max_positions,
        layers=(layer,) * layer_count(config),
        norm=NormSpec("layer", _EPS, affine=config.flag("layer_norm_elementwise_affine", True)),
        final_norm=norm_first and not config.flag("_remove_final_layer_norm", False),
        tied=config.flag("tie_word_embeddings", True),
        position_rows=max_positions + _POSITION_OFFSET,
        position_offset=_POSITION_OFFSET,
        tokenizer_bytes=TOKENIZER_BYTES_PER_ENTRY * vocab,
    )


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, _LAYER_NAMES, _END_NAMES)
