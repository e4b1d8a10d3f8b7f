"""Qwen 3 (dense): Qwen 2's windows, RMS norms on each head's q and k, biases only on request."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, decoder_sources
from penstock.models.qwen2 import windows
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=32768, kv_heads=32, head_dim=128)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    window, layer_types = windows(config)
    attention_bias = config.flag("attention_bias", False)
    details = Details(qkv_bias=attention_bias, out_bias=attention_bias, qk_norm=True)
    return decoder(config, "qwen3", DEFAULTS, details, window=window, layer_types=layer_types)
