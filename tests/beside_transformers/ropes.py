"""Draws what a config says of its rope: the kind, its factors, how much of a head, under old and new keys."""

from __future__ import annotations

import random
from typing import Any

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Types that have a table of divisors in published files, and those without any rope or with one of their own.
_LONG, _NONE = ("phi3", "mistral", "llama", "qwen3"), ("opt", "nemotron")
_PARTIAL = ("phi3", "stablelm", "glm4_moe", "nemotron")


def draw_rope(config: dict[str, Any], rng: random.Random) -> None:
    """Changes the rope of a config, or leaves it as it is."""
    kind = config["model_type"]
    if kind in _PARTIAL and rng.random() < 0.4:
        config["partial_rotary_factor"] = rng.choice((0.25, 0.5, 0.75, 1.0))
    if kind == "opt" or rng.random() < 0.4:
        return
    config["rope_theta"] = rng.choice((1e4, 5e5, 1e6, 7e6))
    if kind in _NONE or rng.random() < 0.3:
        return
    if kind == "phi3":
        _longrope(config, rng)
        return
    name = rng.choice(("linear", "llama3", "dynamic", "yarn", "yarn", "longrope" if kind in _LONG else "yarn"))
    if name == "longrope":
        _longrope(config, rng)
        return
    if kind == "gemma3_text":
        name = "linear"
    scaling: dict[str, Any] = {rng.choice(("rope_type", "type")): name, "factor": rng.choice((2.0, 4.0, 8.0, 32.0))}
    if name == "llama3":
        scaling |= _LLAMA3 | {"original_max_position_embeddings": rng.choice((64, 8192))}
    if name == "yarn":
        scaling |= _yarn(rng)
    config["rope_scaling"] = scaling


def _yarn(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.8:
        found["original_max_position_embeddings"] = rng.choice((64, 128, 4096))
    if rng.random() < 0.2:
        found["attention_factor"] = rng.choice((0.7, 1.3))
    if rng.random() < 0.2:
        found |= {"mscale": 0.7, "mscale_all_dim": rng.choice((0.3, 1.0))}
    if rng.random() < 0.3:
        found |= {"beta_fast": rng.choice((16, 32.0)), "beta_slow": rng.choice((1, 2.0))}
    if rng.random() < 0.3:
        found["truncate"] = rng.random() < 0.5
    return found


def _longrope(config: dict[str, Any], rng: random.Random) -> None:
    """transformers takes the long divisors where a pass goes beyond the original length: so all cases do, or none."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    half = int(width * config.get("partial_rotary_factor", 1.0)) // 2
    factors = {
        which: [round(1 + most * i / half, 3) for i in range(half)] for which, most in (("short", 0.5), ("long", 30.0))
    }
    config["rope_scaling"] = {"type": "longrope", **{f"{which}_factor": each for which, each in factors.items()}}
    if rng.random() < 0.3:
        config["rope_scaling"]["attention_factor"] = 1.2
    holder = config if config["model_type"] == "phi3" or rng.random() < 0.5 else config["rope_scaling"]
    holder["original_max_position_embeddings"] = rng.choice((3, 2048))
