"""Nemotron and Minitron (dense): layer norms whose weights are stored less one, a plain FFN with squared ReLU, half of
each head rotated."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import LAYER_NORM_END_NAMES, LAYER_NORM_NAMES, Defaults, Details, decoder
from penstock.models.hf.names import TensorSource, sources_of
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=4096, eps=1e-5, activation="relu2")

# No Nemotron is published with another kind.
_ROPE = RopeRules(kinds=("default",), partial=True, share=0.5)


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    attention_bias = config.flag("attention_bias", False)
    details = Details(
        qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=config.flag("mlp_bias", False), norm="layer",
        norm_eps_key="norm_eps", norm_offset=1.0, gated=False, rope=_ROPE,
    )  # fmt: skip
    return decoder(config, "nemotron", DEFAULTS, details)


def sources(spec: ModelSpec) -> dict[tuple[str, str], TensorSource]:
    return sources_of(spec, LAYER_NORM_NAMES, LAYER_NORM_END_NAMES)
