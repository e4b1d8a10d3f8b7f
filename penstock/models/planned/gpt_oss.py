"""gpt-oss: experts with biases, attention with sinks, a window in every other layer. It does not run yet.

ModelSpec says all that has weights. It leaves out three details of the mathematics: `swiglu_limit` clamps gate and up,
1 is added to up, and the router's bias is part of the scores, not of the choice alone. The published experts are in
MXFP4 (4.25 bits a weight). That is no format of penstock, so a plan has another one.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import FULL, SLIDING, Defaults, Details, decoder, layer_count, layer_types_of
from penstock.models.hf.experts import active, experts, gated
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec, Routed, Router

CANNOT_RUN = "there are no kernels for attention sinks, a clamped SwiGLU and biases of experts"

DEFAULTS = Defaults(max_positions=131072, kv_heads=8, head_dim=64, eps=1e-5)
COUNT_KEYS = ("num_local_experts",)


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    count = experts(config, COUNT_KEYS, 128)
    # Whatever `hidden_act` says, the gate goes through x · sigmoid(1.702 x).
    expert = replace(gated(config, "intermediate_size"), activation="gelu_quick", up_bias=True, down_bias=True)
    routed = Routed(count, active(config, count, 4), expert, Router("softmax", normalised=True, bias=True))
    bias = config.flag("attention_bias", True)
    details = Details(qkv_bias=bias, out_bias=bias, sinks=True, rope=RopeRules(theta=150_000.0))
    layers = layer_count(config)
    found = decoder(
        config, "gpt_oss", DEFAULTS, details, window=config.optional_whole("sliding_window", 128),
        layer_types=layer_types_of(config, [FULL if i % 2 else SLIDING for i in range(layers)]),
        routed=[routed] * layers,
    )  # fmt: skip
    return replace(found, cannot_run=CANNOT_RUN)
