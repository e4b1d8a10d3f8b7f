"""gpt-oss: experts with biases behind a clamped SwiGLU, attention with sinks, a window in every other layer.

Its experts are published in MXFP4, as `…_blocks` and `…_scales`: [X, 2 N, D] with gate and up row by row in turns, and
[X, D, N]. `store.checkpoint` reads both tensors as one. Float copies of a model have the experts' matrices turned:
[X, D, 2 N] and [X, N, D].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.models.hf.config import Config, short
from penstock.models.hf.decoder import (
    END_NAMES,
    LAYER_NAMES,
    Defaults,
    Details,
    decoder,
    layer_count,
    layer_types_of,
)
from penstock.models.hf.experts import active, experts, gated
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.quantization import MXFP4
from penstock.models.hf.rope import RopeRules
from penstock.spec.blocks import GROUP
from penstock.spec.format import Format, mixture
from penstock.spec.model import SWIGLU_LIMIT, ModelSpec, Routed, Router
from penstock.spec.parts import MIXED, parts

DEFAULTS = Defaults(max_positions=131072, kv_heads=8, head_dim=64, eps=1e-5)
COUNT_KEYS = ("num_local_experts", "num_experts")
QUANT_METHODS = (MXFP4,)

# Of a config that has no rope.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_MLP = "model.layers.{}.mlp."
_NAMES = LAYER_NAMES | {
    "sinks": "model.layers.{}.self_attn.sinks",
    "router.scores": _MLP + "router.weight",
    "router.bias": _MLP + "router.bias",
    "experts.gate": _MLP + "experts.gate_up_proj",
    "experts.up": _MLP + "experts.gate_up_proj",
    "experts.down": _MLP + "experts.down_proj",
    "experts.gate_bias": _MLP + "experts.gate_up_proj_bias",
    "experts.up_bias": _MLP + "experts.gate_up_proj_bias",
    "experts_down_bias": _MLP + "experts.down_proj_bias",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", SWIGLU_LIMIT)):
        if config.real(key, known) != known:
            raise config.unsupported(key, f"{short(config.data[key])} is not {known}, which gpt-oss has")
    count = experts(config, COUNT_KEYS, 128)
    # Whatever `hidden_act` says.
    expert = replace(gated(config, "intermediate_size"), activation="swiglu_clamped", up_bias=True, down_bias=True)
    router = Router("softmax", normalised=True, bias=True, bias_scored=True)
    routed = Routed(count, active(config, count, 4), expert, router)
    bias = config.flag("attention_bias", True)
    details = Details(qkv_bias=bias, out_bias=bias, sinks=True, rope=RopeRules(theta=150_000.0))
    layers = layer_count(config)
    has_rope = config.data.get("rope_scaling") or config.has("rope_parameters")
    yarn: dict[str, Any] = {} if has_rope else {"rope_scaling": _YARN}
    return decoder(
        Config({**config.data, **yarn}, config.where, config.prefix), "gpt_oss", DEFAULTS, details,
        window=config.optional_whole("sliding_window", 128),
        layer_types=layer_types_of(config, lambda i: i % 2 == 0),
        routed=[routed] * layers,
    )  # fmt: skip


def weights(spec: ModelSpec, method: str) -> Format:
    """The formats of a model that says quant_method `method`: experts in MXFP4, all others as the config says."""
    own, table = Format(spec.dtype), dict[str, Format]()
    for part in parts(spec, own):
        for block in part.blocks:
            if part.kind in MIXED and block.tiled:
                table[f"{part.key}.{block.name}"] = Format(method, GROUP) if part.kind == "experts" else own
    return mixture(table)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """Of a checkpoint with experts in MXFP4."""
    blocks = {f"experts.{block}": f"{_NAMES[f'experts.{block}']}_blocks" for block in ("gate", "up", "down")}
    return _sources(spec, _NAMES | blocks, turned=False)


def stacked_sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    """Of a float checkpoint."""
    return _sources(spec, _NAMES, turned=True)


def _sources(spec: ModelSpec, names: dict[str, str], turned: bool) -> dict[tuple[str, str], TensorSource]:
    sources = sources_of(spec, names, END_NAMES, {"experts.up": 1, "experts.up_bias": 1}, stacked=True)
    for (key, block), source in sources.items():
        if key.endswith(".experts"):
            in_turns = block in ("gate", "up", "gate_bias", "up_bias")
            is_matrix = block in ("gate", "up", "down")
            sources[key, block] = source._replace(step=2 if in_turns else 1, turned=turned and is_matrix)
        elif block == "experts_down_bias":
            routed = spec.layers[int(key.partition(".")[0])].routed
            assert routed is not None
            sources[key, block] = source._replace(folded=routed.experts)
    return sources
