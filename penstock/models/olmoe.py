"""OLMoE: q and k are normed over all heads together, and every layer has experts."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, layer_count
from penstock.models.hf.experts import apart, softmax_routed, stacked
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, eps=1e-5)
COUNT_KEYS = ("num_experts", "num_local_experts")

sources, stacked_sources = apart, stacked


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel. The latter also for a model that clips q, k and v: none is published."""
    if config.has("clip_qkv"):
        raise config.unsupported("clip_qkv", "is set; penstock runs models without it")
    routed = softmax_routed(config, COUNT_KEYS, 64, 8, "intermediate_size", config.flag("norm_topk_prob", False))
    bias = config.flag("attention_bias", False)
    details = Details(qkv_bias=bias, out_bias=bias, qk_norm=True, norms_all_heads=True)
    return decoder(config, "olmoe", DEFAULTS, details, routed=[routed] * layer_count(config))
