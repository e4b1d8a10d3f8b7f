"""Seed-OSS: llama, with other biases."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, decoder_sources
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=524_288, kv_heads=8, head_dim=128)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    details = Details(
        qkv_bias=config.flag("attention_bias", True),
        out_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    return decoder(config, "seed_oss", DEFAULTS, details)
