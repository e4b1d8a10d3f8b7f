"""Gemma 2: norms before and after each block, softcaps, a window in every other layer, a scaled embedding."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import (
    END_NAMES,
    NORMED_OUT_NAMES,
    Defaults,
    Details,
    decoder,
    layer_types_of,
)
from penstock.models.hf.names import TensorSource, sources_of
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=8192, kv_heads=4, head_dim=256, tied=True, activation="gelu_pytorch_tanh")


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    if config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention", "is set; penstock runs causal models")
    attention_bias = config.flag("attention_bias", False)
    details = Details(
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        scale=config.real("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=config.optional_real("attn_logit_softcapping", 50.0) or 0.0,
        logit_softcap=config.optional_real("final_logit_softcapping", 30.0) or 0.0,
        norm_offset=1.0,
        norm_out=True,
        # By sqrt(d_model). transformers rounds it to bfloat16 where it computes in that. We compute in float32.
        scale_embedding=True,
        activation_key="hidden_activation",
    )
    return decoder(
        config,
        "gemma2",
        DEFAULTS,
        details,
        window=config.optional_whole("sliding_window", 4096),
        layer_types=layer_types_of(config, lambda i: i % 2 == 0),
    )


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, NORMED_OUT_NAMES, END_NAMES)
