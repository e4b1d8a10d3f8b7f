"""OLMo 2: norms behind attention and FFN alone, q and k normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import END_NAMES, LAYER_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=2048, eps=1e-5)

_LAYER_NAMES = LAYER_NAMES | {
    "attn_out": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_out": "model.layers.{}.post_feedforward_layernorm.weight",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    bias = config.flag("attention_bias", False)
    details = Details(qkv_bias=bias, out_bias=bias, qk_norm=True, norms_all_heads=True, norm_out=True)
    plain = decoder(config, "olmo2", DEFAULTS, details)
    layer = replace(plain.layers[0], norm_in=False)  # all layers are alike
    return replace(plain, layers=(layer,) * len(plain.layers))


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, _LAYER_NAMES, END_NAMES)
