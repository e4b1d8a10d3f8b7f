"""Falcon: attention and FFN read the same x, layer norms, a plain FFN. The 7B has one KV head and one norm a layer, the
40B and 180B (`new_decoder_architecture`) several KV heads and two norms."""

from __future__ import annotations

from penstock.models.hf.config import MAX_VOCAB, MAX_WIDTH, Config
from penstock.models.hf.decoder import TOKENIZER_BYTES_PER_ENTRY, layer_count, widths
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import LLAMA_RULES, rope_of
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec

_LAYER = "transformer.h.{}."
_QKV = _LAYER + "self_attention.query_key_value."
_LAYER_NAMES = {
    **dict.fromkeys(("q", "k", "v"), _QKV + "weight"),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), _QKV + "bias"),
    "o": _LAYER + "self_attention.dense.weight",
    "o_bias": _LAYER + "self_attention.dense.bias",
    "up": _LAYER + "mlp.dense_h_to_4h.weight",
    "up_bias": _LAYER + "mlp.dense_h_to_4h.bias",
    "down": _LAYER + "mlp.dense_4h_to_h.weight",
    "down_bias": _LAYER + "mlp.dense_4h_to_h.bias",
}
# Names of the norms before attention and before the FFN, by `Layer.parallel_norms`.
_NORMS = {
    0: ("input_layernorm", "post_attention_layernorm"),
    1: ("input_layernorm", "input_layernorm"),
    2: ("ln_attn", "ln_mlp"),
}
_END_NAMES = {
    "embed.rows": "transformer.word_embeddings.weight",
    "edges.final": "transformer.ln_f.weight",
    "edges.final_bias": "transformer.ln_f.bias",
    "head.rows": "lm_head.weight",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    if config.flag("alibi", False):
        raise config.unsupported("alibi", "true: penstock runs falcon with rotary positions")
    d_model, heads, head_dim = widths(config)
    vocab, bias = config.whole("vocab_size", hi=MAX_VOCAB), config.flag("bias", False)
    max_positions = config.whole("max_position_embeddings", 2048)
    layer = Layer(
        attention=Attention(
            heads=heads,
            kv_heads=_kv_heads(config, heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            out_bias=bias,
            rope=rope_of(config, LLAMA_RULES, head_dim, max_positions, ""),
        ),
        ffn=FfnSpec(
            neurons=config.optional_whole("ffn_hidden_size", None, hi=MAX_WIDTH) or 4 * d_model,
            activation=config.activation("activation", "gelu"),
            gated=False,
            up_bias=bias,
            down_bias=bias,
        ),
        parallel_norms=_parallel_norms(config),
    )
    return ModelSpec(
        model_type="falcon",
        dtype=config.dtype(),
        vocab=vocab,
        d_model=d_model,
        d_embed=d_model,
        max_positions=max_positions,
        layers=(layer,) * layer_count(config),
        norm=NormSpec("layer", config.real("layer_norm_epsilon", 1e-5, lo=0.0, hi=1.0)),
        final_norm=True,
        tied=config.flag("tie_word_embeddings", True),
        tokenizer_bytes=TOKENIZER_BYTES_PER_ENTRY * vocab,
    )


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """Of each KV head, its q heads, its k and its v follow each other."""
    layer = spec.layers[0]
    q_rows, kv_rows = layer.attention.heads_per_kv * layer.attention.head_dim, layer.attention.head_dim
    offsets = {"k": q_rows, "v": q_rows + kv_rows, "k_bias": q_rows, "v_bias": q_rows + kv_rows}
    strides = dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias"), q_rows + 2 * kv_rows)
    names = dict(_LAYER_NAMES)
    for block, norm in zip(("attn", "ffn"), _NORMS[layer.parallel_norms], strict=True):
        names |= {f"{block}_in": f"{_LAYER}{norm}.weight", f"{block}_in_bias": f"{_LAYER}{norm}.bias"}
    return sources_of(spec, names, _END_NAMES, offsets, strides=strides)


def _kv_heads(config: Config, heads: int) -> int:
    new = config.flag("new_decoder_architecture", False)
    if config.flag("multi_query", True) and not new:
        return 1
    kv_heads = config.optional_whole("num_kv_heads", None, hi=MAX_WIDTH) or heads
    if heads % kv_heads or (kv_heads != heads and not new):
        raise config.broken("num_kv_heads", f"{kv_heads} does not fit num_attention_heads {heads}")
    return kv_heads


def _parallel_norms(config: Config) -> int:
    new, parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    norms = config.optional_whole("num_ln_in_parallel_attn", None, hi=2) or (2 if new else 1)
    if not parallel:
        if new:
            raise config.unsupported("parallel_attn", "false beside new_decoder_architecture: not known")
        return 0
    if norms == 2 and not new:
        raise config.unsupported("num_ln_in_parallel_attn", "2 without new_decoder_architecture: not known")
    return norms
