"""Llama 1 to 3.2, and the many models published as `llama`."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, decoder_sources
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=2048)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    attention_bias = config.flag("attention_bias", False)
    details = Details(
        qkv_bias=attention_bias,
        out_bias=attention_bias,  # the key means all four projections
        mlp_bias=config.flag("mlp_bias", False),
    )
    return decoder(config, "llama", DEFAULTS, details)
