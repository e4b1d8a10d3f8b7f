"""Qwen 2 with experts: a shared expert behind a gate of its own. Two keys say which layers are dense."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.hf.config import MAX_LAYERS, Config
from penstock.models.hf.decoder import Defaults, Details, decoder, layer_types_of
from penstock.models.hf.experts import apart, gated, softmax_routed, sparse_layers, stacked
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=32768, kv_heads=16)
COUNT_KEYS = ("num_experts",)

sources, stacked_sources = apart, stacked


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    normalised = config.flag("norm_topk_prob", False)
    routed = softmax_routed(config, COUNT_KEYS, 60, 4, "moe_intermediate_size", normalised)
    routed = replace(routed, shared=gated(config, "shared_expert_intermediate_size"), shared_gate=True)
    used = config.flag("use_sliding_window", False)
    window = config.optional_whole("sliding_window", 4096) if used else None
    # Below `max_window_layers` every other layer has the window, beginning with layer 0.
    most = config.whole("max_window_layers", 28, lo=0, hi=MAX_LAYERS)
    details = Details(qkv_bias=config.flag("qkv_bias", True))
    layers = [routed if sparse else None for sparse in sparse_layers(config)]
    return decoder(
        config,
        "qwen2_moe",
        DEFAULTS,
        details,
        window=window,
        layer_types=layer_types_of(config, lambda i: window is not None and i % 2 == 0 and i < most),
        routed=layers,
    )
