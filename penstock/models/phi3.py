"""Phi-3 and Phi-4 (dense): llama with fused projections, longrope and partly rotated heads."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import END_NAMES, LAYER_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, eps=1e-5)

# The first releases called longrope "su" or "yarn".
_ROPE = RopeRules(
    kinds=("default", "longrope"), aliases={"su": "longrope", "yarn": "longrope"}, partial=True, original=4096
)

_QKV = "model.layers.{}.self_attn.qkv_proj.weight"
_GATE_UP = "model.layers.{}.mlp.gate_up_proj.weight"
_LAYER_NAMES = LAYER_NAMES | {"q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    window = config.optional_whole("sliding_window", None)
    return decoder(config, "phi3", DEFAULTS, Details(rope=_ROPE), window=window)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffns[0]
    q_rows, kv_rows = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    offsets = {"k": q_rows, "v": q_rows + kv_rows, "up": ffn.neurons}
    return sources_of(spec, _LAYER_NAMES, END_NAMES, offsets)
