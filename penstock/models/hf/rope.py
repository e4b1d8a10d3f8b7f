"""Reads rotary positions from a config, by its old keys (`rope_theta`, `rope_scaling`) or its new one
(`rope_parameters`).

Values that transformers works out of several keys are worked out here. So `Rope.factors` is complete and needs no
further defaults. `spec.model.Rope` lists the factors of each kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.models.hf.config import Config, short
from penstock.spec.model import Rope

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeRules:
    """Differences between model types. `kinds`: the kinds of rope that a type has. `aliases`: other names for them.
    `partial`: a config may rotate a part of each head. Defaults for a config that does not say: `share`, the part of
    each head that is rotated; `original`, the context length before scaling (0: its whole length); `theta`, the base
    frequency."""

    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    aliases: dict[str, str] = field(default_factory=dict)
    partial: bool = False
    share: float = 1.0
    original: int = 0
    theta: float = 10_000.0


LLAMA_RULES = RopeRules()


def rope_of(config: Config, rules: RopeRules, head_dim: int, max_positions: int, layer_type: str) -> Rope:
    """The rope of the layers of one `layer_type`. Raises UnsupportedModel for a kind that the type does not have, and
    BrokenModel for a key that is missing or wrong."""
    scaling = _scaling(config, layer_type)
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    name = scaling.text(kind_key, "default") if scaling.has(kind_key) else "default"
    kind = rules.aliases.get(name, name)
    if kind not in rules.kinds:
        raise scaling.unsupported(kind_key, f"{short(name)} is not one of {', '.join(rules.kinds)}")

    # Old files have theta beside the scaling, new ones inside it. The one inside it counts.
    theta = (scaling if "rope_theta" in scaling.data else config).real("rope_theta", rules.theta, lo=1.001)
    dims = _dims(scaling if "partial_rotary_factor" in scaling.data else config, rules, head_dim)
    if kind == "default":
        return Rope(theta, dims)
    if kind == "dynamic":
        # It stretches nothing before a sequence is longer than `max_positions`, and none here ever is.
        scaling.real("factor")
        return Rope(theta, dims)
    if kind == "linear":
        return Rope(theta, dims, kind, (("factor", scaling.real("factor")),))

    original = _original(config, scaling, rules, max_positions)
    if kind == "llama3":
        low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
        if low >= high:
            raise scaling.broken("low_freq_factor", f"{low:g} should be less than high_freq_factor {high:g}")
        factors = {"factor": scaling.real("factor"), "low_freq_factor": low, "high_freq_factor": high}
        return Rope(theta, dims, kind, tuple(factors.items()) + ((_ORIGINAL, original),))

    factor = scaling.real("factor") if scaling.has("factor") else max_positions / original
    if kind == "yarn":
        factors = {
            "factor": factor,
            "attention_factor": _yarn_attention(scaling, factor),
            "beta_fast": _or_default(scaling, "beta_fast", 32.0),
            "beta_slow": _or_default(scaling, "beta_slow", 1.0),
            "truncate": float(scaling.flag("truncate", True)),
        }
        return Rope(theta, dims, kind, tuple(factors.items()) + ((_ORIGINAL, original),))

    if scaling.has("attention_factor"):
        attention = scaling.real("attention_factor")
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return Rope(
        theta,
        dims,
        kind,
        (("attention_factor", attention), (_ORIGINAL, original)),
        short_factor=scaling.reals("short_factor", dims // 2),
        long_factor=scaling.reals("long_factor", dims // 2),
    )


def _scaling(config: Config, layer_type: str) -> Config:
    """The object that holds the kind of rope and its factors. Where each layer type has its own, it is that of
    `layer_type`. It is empty where the config has none."""
    # transformers prefers a non-empty old key where a file has both.
    key = "rope_scaling" if config.data.get("rope_scaling") else "rope_parameters"
    if not config.has(key):
        return Config({}, config.where)
    scaling = config.inner(key)
    nested = any(isinstance(value, dict) for value in scaling.data.values())
    return scaling.inner(layer_type) if nested else scaling


def _dims(holder: Config, rules: RopeRules, head_dim: int) -> int:
    share = holder.real("partial_rotary_factor", hi=1.0) if holder.has("partial_rotary_factor") else rules.share
    if share != 1.0 and not rules.partial:
        raise holder.unsupported("partial_rotary_factor", f"{share:g} is not supported for this model_type")
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        raise holder.broken("head_dim", f"{head_dim} gives {dims} rotated dimensions; they should be even")
    return dims


def _original(config: Config, scaling: Config, rules: RopeRules, max_positions: int) -> float:
    """The context length before scaling. If the key stands beside the scaling, that one counts, unlike for all other
    keys: phi3 keeps it there. It is at least 2, since its logarithm is a divisor."""
    if rules.original:
        return float(config.whole(_ORIGINAL, rules.original, lo=2))
    holder = config if config.has(_ORIGINAL) else scaling
    return float(holder.whole(_ORIGINAL, max_positions, lo=2))


def _or_default(scaling: Config, key: str, default: float) -> float:
    return scaling.real(key) if scaling.data.get(key) else default


def _yarn_attention(scaling: Config, factor: float) -> float:
    """The factor by which yarn multiplies cos and sin. DeepSeek's two `mscale` keys are read too."""
    if scaling.has("attention_factor"):
        return scaling.real("attention_factor", lo=0.0)
    if scaling.data.get("mscale") and scaling.data.get("mscale_all_dim"):
        return mscale(factor, scaling.real("mscale")) / mscale(factor, scaling.real("mscale_all_dim"))
    return mscale(factor, 1.0)


def mscale(factor: float, scale: float) -> float:
    """yarn's factor on cos and sin for positions that are stretched by `factor`."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
