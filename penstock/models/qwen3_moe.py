"""Qwen 3 with experts: RMS norms on each head's q and k, no shared expert, one window for all layers."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder
from penstock.models.hf.experts import apart, softmax_routed, sparse_layers, stacked
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=32768, kv_heads=4)
COUNT_KEYS = ("num_experts", "num_local_experts")  # transformers 5 writes the second

sources, stacked_sources = apart, stacked


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    normalised = config.flag("norm_topk_prob", False)
    routed = softmax_routed(config, COUNT_KEYS, 128, 8, "moe_intermediate_size", normalised)
    window = config.optional_whole("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    details = Details(qkv_bias=bias, out_bias=bias, qk_norm=True)
    layers = [routed if sparse else None for sparse in sparse_layers(config)]
    return decoder(config, "qwen3_moe", DEFAULTS, details, window=window, routed=layers)
