"""Shared by types with experts: reads experts from a config, and says where they stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.models.hf.config import MAX_LAYERS, MAX_WIDTH, Config, short
from penstock.models.hf.decoder import END_NAMES, LAYER_NAMES, layer_count
from penstock.models.hf.names import EXPERT, TensorSource, sources_of
from penstock.spec.model import FfnSpec, ModelSpec, Routed, Router

# Of a layer, and of all layers: the largest models of today have 512, and 61 layers of 384. 262,144 took 11 s to plan.
MAX_EXPERTS, MAX_ALL_EXPERTS = 4096, 2**15

_MLP = "model.layers.{}.mlp."
_APART = f"{_MLP}experts.{EXPERT}."
ROUTER_NAMES = {
    "router.scores": _MLP + "gate.weight",
    "router.shared_gate": _MLP + "shared_expert_gate.weight",
}
APART_NAMES = {f"experts.{block}": f"{_APART}{block}_proj.weight" for block in ("gate", "up", "down")}
_STACKED_NAMES = {
    "experts.gate": _MLP + "experts.gate_up_proj",
    "experts.up": _MLP + "experts.gate_up_proj",
    "experts.down": _MLP + "experts.down_proj",
}


def shared_names(name: str) -> dict[str, str]:
    """Tensor names of the shared expert that a checkpoint calls `name`."""
    return {f"shared.{block}": f"{_MLP}{name}.{block}_proj.weight" for block in ("gate", "up", "down")}


def gated(config: Config, neurons_key: str, times: int = 1) -> FfnSpec:
    """A gated FFN without biases. It has `times` as many neurons as the key `neurons_key` says. Raises BrokenModel."""
    return FfnSpec(
        times * config.whole(neurons_key, hi=MAX_WIDTH // times), config.activation("hidden_act", "silu"), True
    )


def count_key(config: dict[str, Any], keys: Sequence[str]) -> str:
    """The first of a type's `keys` for the number of experts that the config has, or `keys[0]` if it has none."""
    return next((key for key in keys if key in config), keys[0])


def experts(config: Config, keys: Sequence[str], default: int) -> int:
    """The number of experts of a layer. Raises BrokenModel, and UnsupportedModel for more than can be planned in
    seconds."""
    key, layers = count_key(config.data, keys), layer_count(config)
    count = config.whole(key, default, hi=MAX_EXPERTS)
    if count * layers > MAX_ALL_EXPERTS:
        total = f"{count} in each of {layers} layers are {count * layers} experts"
        raise config.unsupported(key, f"of {total}; at most {MAX_ALL_EXPERTS} can be planned in seconds")
    return count


def active(config: Config, eligible: int, default: int) -> int:
    """The number of experts that a token goes to, at most `eligible`. Raises BrokenModel."""
    return config.whole("num_experts_per_tok", default, hi=eligible)


def softmax_routed(
    config: Config, keys: Sequence[str], count: int, chosen: int, neurons_key: str, normalised: bool
) -> Routed:  # fmt: skip
    """Experts behind a router whose scores go through a softmax. `count`, `chosen`: by default, of a layer and of a
    token. `normalised`: weights sum to one over the chosen experts. Raises BrokenModel and UnsupportedModel."""
    routed = experts(config, keys, count)
    return Routed(
        routed, active(config, routed, chosen), gated(config, neurons_key), Router("softmax", normalised=normalised)
    )  # fmt: skip


def sparse_layers(config: Config) -> list[bool]:
    """Whether each layer is routed, by Qwen's two keys: every `decoder_sparse_step`th layer is, except those in
    `mlp_only_layers`. Raises BrokenModel."""
    step, count = config.whole("decoder_sparse_step", 1), layer_count(config)
    dense = config.data["mlp_only_layers"] if config.has("mlp_only_layers") else []
    good = isinstance(dense, list) and len(dense) <= MAX_LAYERS
    if not good or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise config.broken("mlp_only_layers", f"should be a list of up to {MAX_LAYERS} layers, not {short(dense)}")
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def apart(
    spec: ModelSpec, shared: str = "shared_expert", names: dict[str, str] = APART_NAMES
) -> dict[tuple[str, str], TensorSource]:
    """`sources` of a checkpoint where each matrix of each expert is a tensor of its own. `shared`: the checkpoint's
    name of the shared expert. `names`: names of the experts' tensors, and of others that the type has."""
    return sources_of(spec, LAYER_NAMES | ROUTER_NAMES | shared_names(shared) | names, END_NAMES)


def stacked(
    spec: ModelSpec, shared: str = "shared_expert", names: dict[str, str] | None = None
) -> dict[tuple[str, str], TensorSource]:
    """`sources` of a checkpoint where all experts of a layer stand in two tensors: [X, 2 N, D] (gate, then up) and
    [X, D, N]."""
    routed = [layer.routed for layer in spec.layers if layer.routed is not None]
    offsets = {"experts.up": routed[0].expert.neurons} if routed else {}
    layer_names = LAYER_NAMES | ROUTER_NAMES | shared_names(shared) | (names or {}) | _STACKED_NAMES
    return sources_of(spec, layer_names, END_NAMES, offsets, stacked=True)
