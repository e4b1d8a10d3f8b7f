"""Phi-3.5-MoE: Mixtral's experts, layer norms, and a router of its own (sparse mixing). It does not run yet.

ModelSpec leaves out three details: how the router chooses and weighs (for each of the two experts it drops scores far
below the best one), the factors of the long rope, and the head's bias, which is 32,064 numbers of 41.9e9.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, layer_count
from penstock.models.hf.experts import softmax_routed
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec, NormSpec

CANNOT_RUN = "there are no kernels for its router and the head's bias"

DEFAULTS = Defaults(max_positions=131072, kv_heads=8, eps=1e-5)
COUNT_KEYS = ("num_local_experts",)


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    routed = softmax_routed(config, COUNT_KEYS, 16, 2, "intermediate_size", normalised=False)
    bias = config.flag("attention_bias", False)
    details = Details(qkv_bias=bias, out_bias=bias, rope=RopeRules(kinds=("default",), theta=1e6))
    window = config.optional_whole("sliding_window", None)
    plain = decoder(config, "phimoe", DEFAULTS, details, window=window, routed=[routed] * layer_count(config))
    return replace(plain, norm=NormSpec("layer", plain.norm.eps), cannot_run=CANNOT_RUN)
