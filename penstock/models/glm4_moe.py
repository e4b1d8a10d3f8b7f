"""GLM 4.5 and 4.6: experts by sigmoid scores, with a bias that only the choice uses, in groups, and a shared expert.
The first layers are dense. Half of each head is rotated."""

from __future__ import annotations

from penstock.models.hf.config import MAX_LAYERS, Config
from penstock.models.hf.decoder import Defaults, Details, decoder, layer_count
from penstock.models.hf.experts import APART_NAMES, active, apart, experts, gated, stacked
from penstock.models.hf.names import TensorSource
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec, Routed, Router

DEFAULTS = Defaults(max_positions=131072, kv_heads=8, eps=1e-5)
COUNT_KEYS = ("n_routed_experts", "num_local_experts")

_BIAS = {"router.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"}
_SHARED = "shared_experts"


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    count, shared = experts(config, COUNT_KEYS, 128), config.whole("n_shared_experts", 1, lo=0, hi=64)
    groups = config.whole("n_group", 1, hi=max(1, count // 2))  # a group has two experts at least
    if count % groups:
        raise config.broken("n_group", f"{groups} should divide n_routed_experts {count}")
    router = Router(
        "sigmoid", config.flag("norm_topk_prob", True), bias=True, groups=groups,
        groups_kept=config.whole("topk_group", 1, hi=groups), scale=config.real("routed_scaling_factor", 1.0),
    )  # fmt: skip
    routed = Routed(
        count, active(config, count // groups * router.groups_kept, 8),
        gated(config, "moe_intermediate_size"), router,
        shared=gated(config, "moe_intermediate_size", shared) if shared else None,
    )  # fmt: skip
    dense = config.whole("first_k_dense_replace", 1, lo=0, hi=MAX_LAYERS)
    details = Details(
        qkv_bias=config.flag("attention_bias", False), qk_norm=config.flag("use_qk_norm", False),
        rope=RopeRules(partial=True, share=0.5),
    )  # fmt: skip
    layers = [None if i < dense else routed for i in range(layer_count(config))]
    return decoder(config, "glm4_moe", DEFAULTS, details, routed=layers)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return apart(spec, _SHARED, APART_NAMES | _BIAS)


def stacked_sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return stacked(spec, _SHARED, _BIAS)
