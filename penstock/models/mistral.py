"""Mistral 7B and its kin: llama with grouped heads by default and one window for all layers."""

from __future__ import annotations

from penstock.models.hf.config import Config
from penstock.models.hf.decoder import Defaults, Details, decoder, decoder_sources
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=131072, kv_heads=8)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    # Without the key the window is 4096, and null means none: v0.1 has 4096, v0.2 says null.
    return decoder(config, "mistral", DEFAULTS, Details(), window=config.optional_whole("sliding_window", 4096))
