"""Draws cases of `tests.beside_llamacpp`: a real model's width with few layers, in a mix, as some writer writes it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = 1280
ROOM = 512  # tokens of a context, here and there: longrope takes its long factors by it
MOST_NUMBERS = 200 << 20  # of a case: its file in float32 takes four times as many bytes
MIXES = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s", "q5_k_m",
    "q6_k", "q8_0", "iq4_nl", "iq4_xs", "f16", "bf16", "all_f32",
)  # fmt: skip
OVERRIDES = ("q8_0", "q4_k", "q6_k", "q5_0", "iq4_xs", "q3_k", "f16", "bf16")
OVERRIDDEN = ("attn_v", "attn_q", "attn_k", "attn_qkv", "attn_output", "ffn_up", "ffn_gate", "ffn_down")


@dataclass(frozen=True)
class Shape:
    """Widths as the real model of that name has them; of experts fewer than it has."""

    name: str
    architecture: str
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    active: int = 0
    theta: float = 10_000.0
    layers: int = 3  # at most


SHAPES = (
    Shape("llama-3.2-1b", "llama", 2048, 8192, 32, 8, 64, theta=5e5),
    Shape("llama-3.1-8b", "llama", 4096, 14336, 32, 8, 128, theta=5e5),
    Shape("tinyllama-1.1b", "llama", 2048, 5632, 32, 4, 64),
    Shape("llama-2-7b", "llama", 4096, 11008, 32, 32, 128),
    Shape("mistral-nemo-12b", "llama", 5120, 14336, 32, 8, 128, theta=1e6, layers=1),
    Shape("mixtral-8x7b", "llama", 4096, 14336, 32, 8, 128, 3, 2, theta=1e6, layers=1),
    Shape("qwen2.5-0.5b", "qwen2", 896, 4864, 14, 2, 64, theta=1e6),
    Shape("qwen2.5-3b", "qwen2", 2048, 11008, 16, 2, 128, theta=1e6),
    Shape("qwen2.5-7b", "qwen2", 3584, 18944, 28, 4, 128, theta=1e6),
    Shape("qwen3-0.6b", "qwen3", 1024, 3072, 16, 8, 128, theta=1e6),
    Shape("qwen3-4b", "qwen3", 2560, 9728, 32, 8, 128, theta=1e6),
    Shape("qwen3-30b-a3b", "qwen3moe", 2048, 768, 32, 4, 128, 24, 8, theta=1e6),
    Shape("gemma-2-2b", "gemma2", 2304, 9216, 8, 4, 256),
    Shape("gemma-2-9b", "gemma2", 3584, 14336, 16, 8, 256, layers=2),
    Shape("gemma-3-1b", "gemma3", 1152, 6912, 4, 1, 256, theta=1e6, layers=7),
    Shape("gemma-3-4b", "gemma3", 2560, 10240, 8, 4, 256, theta=1e6),
    Shape("phi-3-mini", "phi3", 3072, 8192, 32, 32, 96),
    Shape("phi-4", "phi3", 5120, 17920, 40, 10, 128, theta=25e4, layers=1),
    Shape("gpt-oss-20b", "gpt-oss", 2880, 2880, 64, 8, 64, 6, 4, theta=15e4, layers=2),
    Shape("smollm3-3b", "smollm3", 2048, 11008, 16, 4, 128, theta=5e6, layers=5),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`keys`: metadata behind the architecture's prefix. `rope`: a table of divisors or none. `biases`: which blocks
    have one. `overrides`: formats of single kinds of tensors. `files`: how many the model is split into. `fused`: q, k
    and v stand in one tensor."""

    number: int
    shape: Shape
    layers: int
    keys: dict[str, Any]
    rope: str
    biases: tuple[str, ...]
    tied: bool
    mix: str
    pure: bool
    overrides: tuple[tuple[str, str], ...]
    alignment: int
    shuffled: bool
    files: int
    fused: bool = False

    def __str__(self) -> str:
        marks = [f"rope {self.rope}" if self.rope else "", "tied" if self.tied else "", "pure" if self.pure else ""]
        marks += [f"{part} in {kind}" for part, kind in self.overrides]
        marks += [f"biases of {', '.join(self.biases)}" if self.biases else "", f"{self.files} files"]
        marks += ["q, k and v in one"] if self.fused else []
        own = {key: value for key, value in self.keys.items() if key in _TOLD}
        told = ", ".join(mark for mark in marks if mark)
        return f"case {self.number}: {self.shape.name}, {self.layers} layers in {self.mix}, {told}, {own}"


_TOLD = (
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "attention.head_count_kv", "rope.freq_base",
)  # fmt: skip


def draw(number: int) -> Case:
    rng = random.Random(number)
    shape = SHAPES[number % len(SHAPES)]  # each in turn, for a short search has few cases
    is_wide = shape.hidden >= 2560
    layers = rng.randint(1, 2 if is_wide and shape.layers == 3 else shape.layers)
    while layers > 1 and _numbers(shape, layers) > MOST_NUMBERS:
        layers -= 1
    keys, rope = _keys(shape, layers, rng)
    later = random.Random(f"{number} later")  # so that older draws stay as they were
    if keys.get("rope.scaling.type") == "yarn" and shape.architecture != "gpt-oss" and later.random() < 0.3:
        keys["rope.scaling.attn_factor"] = 1.3
    mix = "mxfp4_moe" if shape.architecture == "gpt-oss" and rng.random() < 0.7 else rng.choice(MIXES)
    overrides = rng.sample(OVERRIDDEN, 2) if rng.random() < 0.3 else []
    return Case(
        number, shape, layers, keys, rope, _biases(shape, rng),
        tied=shape.architecture.startswith("gemma") or (shape.architecture != "gpt-oss" and rng.random() < 0.4),
        mix=mix,
        pure=mix != "mxfp4_moe" and rng.random() < 0.25,
        overrides=tuple((part, rng.choice(OVERRIDES)) for part in overrides),
        alignment=rng.choice((32, 32, 64, 4096)),
        shuffled=rng.random() < 0.3,
        files=rng.choice((1, 1, 1, 2, 3)),
        fused=shape.architecture != "phi3" and later.random() < 0.25,
    )  # fmt: skip


def _numbers(shape: Shape, layers: int) -> int:
    return layers * shape.hidden * (3 * shape.neurons * max(1, shape.experts) + 4 * shape.heads * shape.head_dim)


def _biases(shape: Shape, rng: random.Random) -> tuple[str, ...]:
    if shape.architecture == "qwen2":
        return ("attn_q", "attn_k", "attn_v")
    if shape.architecture == "gpt-oss":
        every = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp")
        return (*every, "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    if shape.architecture == "llama" and not shape.experts and rng.random() < 0.3:
        attention: tuple[str, ...] = ("attn_q", "attn_k", "attn_v", "attn_output")
        ffn: tuple[str, ...] = ("ffn_gate", "ffn_up", "ffn_down")
        return rng.choice((attention, attention[:3], ffn, attention + ffn))
    return ()


def _keys(shape: Shape, layers: int, rng: random.Random) -> tuple[dict[str, Any], str]:
    """Metadata, and which table of divisors the rope has."""
    keys: dict[str, Any] = {
        "block_count": layers, "context_length": 4096, "embedding_length": shape.hidden,
        "feed_forward_length": shape.neurons, "attention.head_count": shape.heads,
        "attention.layer_norm_rms_epsilon": rng.choice((1e-5, 1e-6)),
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.theta, "vocab_size": VOCABULARY,
    }  # fmt: skip
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.active}
        if shape.architecture != "llama":
            keys["expert_feed_forward_length"] = shape.neurons
    rope = _rope(shape, keys, rng)
    if shape.architecture == "gemma2" and rng.random() < 0.5:
        keys |= {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0}
    if shape.architecture in ("gemma2", "gemma3", "gpt-oss"):
        keys["attention.sliding_window"] = rng.choice((32, 100, 128, 256))
    if shape.architecture == "gemma3" and rng.random() < 0.5:
        keys["attention.sliding_window_pattern"] = 2
    if shape.architecture == "gemma3" and rng.random() < 0.3:
        keys["rope.freq_base_swa"] = 5e4
    if shape.architecture == "phi3" and rng.random() < 0.5:  # another one llama.cpp reads and does not heed
        keys["attention.sliding_window"] = rng.choice((0, 4096))
    _as_some_write(shape, layers, keys, rng)
    return keys, rope


def _as_some_write(shape: Shape, layers: int, keys: dict[str, Any], rng: random.Random) -> None:
    """Leaves out what follows from other keys, or says a number for each layer."""
    usual = shape.head_dim * shape.heads == shape.hidden
    optional = ["vocab_size", *(["attention.value_length", "attention.key_length"] if usual else [])]
    if shape.kv_heads == shape.heads:
        optional.append("attention.head_count_kv")
    if shape.theta == 10_000.0 and shape.architecture != "phi3":
        optional.append("rope.freq_base")
    if shape.architecture != "phi3":
        optional.append("rope.dimension_count")
    for key in optional:
        if rng.random() < 0.4:
            keys.pop(key, None)
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if key in keys and rng.random() < 0.15:
            keys[key] = [keys[key]] * layers


def _rope(shape: Shape, keys: dict[str, Any], rng: random.Random) -> str:
    if shape.architecture == "gpt-oss":
        # llama.cpp rounds both ends of yarn's ramp away from each other, and gpt-oss was trained without that. So they
        # are dimensions 16 and 25 here, but for a trifle.
        keys["rope.freq_base"] = 32 ** (32 / 9 * (1 + 1e-5))
        yarn = {"type": "yarn", "factor": 32.0}
        yarn["original_context_length"] = round(2 * math.pi * 32 ** (1 + 16 / 9) * (1 + 7.7e-5))
        keys |= {f"rope.scaling.{key}": value for key, value in yarn.items()}
        return ""
    if shape.architecture == "phi3":
        if rng.random() < 0.6:
            keys["rope.scaling.original_context_length"] = rng.choice((256, 2048))
            keys["rope.scaling.attn_factor"] = rng.choice((1.0, 1.19))
            return "long and short"
        return ""
    if shape.architecture == "llama" and rng.random() < 0.35:
        return "divisors"
    if shape.architecture in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3") and rng.random() < 0.35:
        kind = rng.choice(("linear", "yarn")) if shape.architecture != "gemma3" else "linear"
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rng.choice((2.0, 4.0, 8.0))}
        if kind == "yarn":
            keys["rope.scaling.original_context_length"] = rng.choice((64, 128, 2048))
    return ""
