"""Qwen 2 and 2.5 (dense): llama with biases on q, k and v, and a window in the layers from `max_window_layers` on."""

from __future__ import annotations

from penstock.models.hf.config import MAX_LAYERS, Config
from penstock.models.hf.decoder import (
    Defaults,
    Details,
    decoder,
    decoder_sources,
    layer_types_of,
)
from penstock.spec.model import ModelSpec

DEFAULTS = Defaults(max_positions=32768, kv_heads=32)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    window, layer_types = windows(config)
    return decoder(config, "qwen2", DEFAULTS, Details(qkv_bias=True), window=window, layer_types=layer_types)


def windows(config: Config) -> tuple[int | None, list[str]]:
    """The window (None unless `use_sliding_window`) and each layer's type. Raises BrokenModel and UnsupportedModel."""
    used = config.flag("use_sliding_window", False)
    window = config.optional_whole("sliding_window", 4096) if used else None
    # Layers below `max_window_layers` see everything, which is the opposite of what that name says.
    first = config.whole("max_window_layers", 28, lo=0, hi=MAX_LAYERS)
    return window, layer_types_of(config, lambda i: window is not None and i >= first)
