"""Mixtral: Mistral's attention, and experts in every layer. Scores are normalised over the chosen experts."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, layer_count
from penstock.models.hf.experts import apart, softmax_routed, stacked
from penstock.models.hf.names import EXPERT, TensorSource
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=131072, kv_heads=8, eps=1e-5)
COUNT_KEYS = ("num_local_experts", "num_experts")

_MOE = "model.layers.{}.block_sparse_moe."
_NAMES = {
    "router.scores": _MOE + "gate.weight",
    "experts.gate": f"{_MOE}experts.{EXPERT}.w1.weight",
    "experts.up": f"{_MOE}experts.{EXPERT}.w3.weight",
    "experts.down": f"{_MOE}experts.{EXPERT}.w2.weight",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    routed = softmax_routed(config, COUNT_KEYS, 8, 2, "intermediate_size", normalised=True)
    window = config.optional_whole("sliding_window", None)
    details = Details(rope=RopeRules(theta=1e6))
    return decoder(config, "mixtral", DEFAULTS, details, window=window, routed=[routed] * layer_count(config))


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return apart(spec, names=_NAMES)


def stacked_sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return stacked(spec)
