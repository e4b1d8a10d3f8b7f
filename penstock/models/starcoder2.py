"""StarCoder 2: layer norms, a plain FFN, biases everywhere, one window for all layers."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import LAYER_NORM_END_NAMES, LAYER_NORM_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, kv_heads=2, eps=1e-5, tied=True, activation="gelu_pytorch_tanh")

_LAYER_NAMES = LAYER_NORM_NAMES | {
    "up": "model.layers.{}.mlp.c_fc.weight",
    "up_bias": "model.layers.{}.mlp.c_fc.bias",
    "down": "model.layers.{}.mlp.c_proj.weight",
    "down_bias": "model.layers.{}.mlp.c_proj.bias",
}


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    bias = config.flag("use_bias", True)
    details = Details(
        qkv_bias=bias, out_bias=bias, mlp_bias=bias, norm="layer", norm_eps_key="norm_epsilon", gated=False
    )  # fmt: skip
    window = config.optional_whole("sliding_window", None)
    return decoder(config, "starcoder2", DEFAULTS, details, window=window)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, _LAYER_NAMES, LAYER_NORM_END_NAMES)
