"""SmolLM 3: llama, but every fourth layer has no rope."""

from __future__ import annotations

from dataclasses import replace

from penstock.models.hf.config import MAX_LAYERS, Config, short
from penstock.models.hf.decoder import (
    Defaults,
    Details,
    decoder,
    decoder_sources,
    layer_count,
    layer_types_of,
)
from penstock.models.hf.rope import RopeRules
from penstock.spec.model import Layer, ModelSpec

DEFAULTS = Defaults(max_positions=32768, kv_heads=4, tied=True)

sources = decoder_sources


def spec(config: Config) -> ModelSpec:
    """Raises BrokenModel and UnsupportedModel."""
    bias, turned = config.flag("attention_bias", False), _turned(config)
    window = config.optional_whole("sliding_window", None) if config.flag("use_sliding_window", False) else None
    details = Details(
        qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False), rope=RopeRules(theta=2e6)
    )  # fmt: skip
    plain = decoder(
        config, "smollm3", DEFAULTS, details, window=window,
        layer_types=layer_types_of(config, lambda i: window is not None and not turned[i]),
    )  # fmt: skip
    unturned: dict[Layer, Layer] = {}  # layers that are alike are one object
    for layer in plain.layers:
        unturned.setdefault(layer, replace(layer, attention=replace(layer.attention, rope=None)))
    layers = [layer if rope else unturned[layer] for layer, rope in zip(plain.layers, turned, strict=True)]
    return replace(plain, layers=tuple(layers))


def _turned(config: Config) -> list[bool]:
    """Whether each layer has a rope. Raises BrokenModel."""
    count = layer_count(config)
    if not config.has("no_rope_layers"):
        interval = config.whole("no_rope_layer_interval", 4, hi=MAX_LAYERS)
        return [(i + 1) % interval != 0 for i in range(count)]
    given = config.data["no_rope_layers"]  # 1: the layer has one, whatever that name says
    if not isinstance(given, list) or len(given) < count or any(value not in (0, 1) for value in given):
        raise config.broken("no_rope_layers", f"should be a list of {count} zeros and ones, not {short(given)}")
    return [bool(value) for value in given[:count]]
