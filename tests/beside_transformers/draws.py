"""Draws cases of `tests.beside_transformers`: a real model's config with few layers, and what such a config may say."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.beside_transformers.ropes import draw_rope
from tests.beside_transformers.shapes import NAMES, config_of

VOCABULARY = 1280
ROOM = 512  # tokens of a context
MOST_NUMBERS = 200 << 20  # of a case with more than one layer
MOST_QUANTISED = 90 << 20  # the packers of tests are slow
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
QUANTISED = ("gptq", "gptq-act-order", "gptq-8", "awq", "fp8-blocks", "fp8-rows", "packed", "packed-zeros", "int8")


@dataclass(frozen=True)
class Case:
    """`config`: what transformers is given, and with `as_published` what stands in config.json (else what transformers
    writes). `quantised`: "" or a method. `files`: how many hold the weights, about. `stacked`: all experts of a layer
    stand in one tensor."""

    number: int
    shape: str
    config: dict[str, Any]
    dtype: str
    as_published: bool
    quantised: str
    files: int
    stacked: bool

    def __str__(self) -> str:
        plain = config_of(self.shape)
        own = {key: _brief(each) for key, each in self.config.items() if plain.get(key, "") != each}
        own = {key: each for key, each in own.items() if key not in _ALWAYS}
        marks = [self.dtype, self.quantised, "as published" if self.as_published else "", f"{self.files} files"]
        marks += ["stacked"] if self.stacked else []
        return f"case {self.number}: {self.shape}, {', '.join(mark for mark in marks if mark)}, {own}"


_ALWAYS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def _brief(value: Any) -> Any:
    """A value without long lists."""
    if isinstance(value, dict):
        return {key: _brief(each) for key, each in value.items()}
    return f"{len(value)} values" if isinstance(value, list) and len(value) > 8 else value


def draw(number: int) -> Case:
    rng = random.Random(number)
    shape = NAMES[number % len(NAMES)]  # each in turn, for a short search has few cases
    config = config_of(shape)
    kind = config["model_type"]
    config |= {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config |= _VARY.get(kind, dict)(rng) if kind in _OWN else _of_llama(config, rng) | _VARY.get(kind, _none)(rng)
    draw_rope(config, rng)
    for key in EXPERTS:
        if key in config:
            most = rng.choice((6, 12, 24)) if config["hidden_size"] < 4000 else 3
            config[key] = 6 if config.get("n_group", 1) > 1 else min(config[key], most)
            config["num_experts_per_tok"] = min(config["num_experts_per_tok"], config[key])
    quantised = _quantised(config, rng)
    layers = rng.randint(1, 5 if kind in ("smollm3", "gemma3_text") else 3)
    while layers > 1 and numbers(config, layers) > (MOST_QUANTISED if quantised else MOST_NUMBERS):
        layers -= 1
    config["num_hidden_layers"] = layers
    _by_layer(config, layers, rng)
    return Case(
        number, shape, config, "float16" if quantised in ("gptq", "awq") else rng.choice(DTYPES),
        as_published=rng.random() < 0.5,
        quantised=quantised,
        files=1 if quantised else rng.choice((1, 1, 2, 5)),
        stacked=not quantised and any(key in config for key in EXPERTS) and rng.random() < 0.4,
    )  # fmt: skip


def numbers(config: dict[str, Any], layers: int) -> int:
    """About so many weights."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    neurons = config.get("moe_intermediate_size") or config.get("intermediate_size") or config.get("ffn_dim")
    experts = next((config[key] for key in EXPERTS if key in config), 1)
    return int(layers * hidden * (3 * (neurons or 4 * hidden) * experts + 3 * heads * head_dim))


def _quantised(config: dict[str, Any], rng: random.Random) -> str:
    kind = config["model_type"]
    if kind == "gpt_oss":
        return "mxfp4" if rng.random() < 0.5 else ""
    if kind in ("opt", "falcon") or numbers(config, 1) > MOST_QUANTISED or rng.random() < 0.5:
        return ""
    runs_ordered = kind != "olmo2" and not any(key in config for key in EXPERTS)
    return rng.choice([method for method in QUANTISED if runs_ordered or method != "gptq-act-order"])


def _none(rng: random.Random) -> dict[str, Any]:
    return {}


def _of_llama(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """What nearly all types may say."""
    found: dict[str, Any] = {}
    eps = next((key for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon") if key in config), "")
    if eps and rng.random() < 0.5:
        found[eps] = rng.choice((1e-5, 1e-6, 1e-3))
    if rng.random() < 0.4:
        found["tie_word_embeddings"] = rng.random() < 0.5
    kind = config["model_type"]
    if kind not in ("gpt_oss", "gemma2", "gemma3_text") and rng.random() < 0.3:
        found["hidden_act"] = rng.choice(("gelu", "gelu_pytorch_tanh", "relu", "silu", "gelu_new", "relu2"))
    has_own_head_dim = kind not in ("phi3", "stablelm", "starcoder2", "olmo2", "olmoe", "qwen2", "qwen2_moe")
    if has_own_head_dim and rng.random() < 0.3:
        found["head_dim"] = rng.choice((64, 80, 96, 128, 192))
    if rng.random() < 0.3:
        heads = config["num_attention_heads"]
        found["num_key_value_heads"] = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    biases = {
        **dict.fromkeys(("llama", "nemotron", "smollm3"), ("attention_bias", "mlp_bias")),
        **dict.fromkeys(("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "olmoe"), ("attention_bias",)),
        "gpt_oss": ("attention_bias",),
        "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
        "glm4_moe": ("attention_bias", "use_qk_norm"), "stablelm": ("use_qkv_bias",), "starcoder2": ("use_bias",),
        "qwen2_moe": ("qkv_bias",),
    }  # fmt: skip
    for key in biases.get(kind, ()):
        if rng.random() < 0.3:
            found[key] = rng.random() < 0.6
    return found


def _window(rng: random.Random) -> dict[str, Any]:
    return {"sliding_window": rng.choice((None, 5, 100, 256, 4096))} if rng.random() < 0.6 else {}


def _qwen(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"use_sliding_window": rng.random() < 0.5, "sliding_window": 100}
    most = {"max_window_layers": rng.choice((0, 1, 2))}
    return {"use_sliding_window": True, "sliding_window": rng.choice((5, 64, 200)), **most}


def _qwen_moe(rng: random.Random) -> dict[str, Any]:
    routing = {"norm_topk_prob": rng.random() < 0.5, "num_experts_per_tok": rng.choice((1, 2, 4, 8))}
    return {**_qwen(rng), **routing, "decoder_sparse_step": rng.choice((1, 1, 2))}


def _olmoe(rng: random.Random) -> dict[str, Any]:
    return {"norm_topk_prob": rng.random() < 0.5, "num_experts_per_tok": rng.choice((1, 2, 4, 8))}


def _glm(rng: random.Random) -> dict[str, Any]:
    return {
        "n_group": rng.choice((1, 1, 3)), "topk_group": 1, "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice((1.0, 2.5)), "first_k_dense_replace": rng.choice((0, 1)),
        "n_shared_experts": rng.choice((1, 2)), "num_experts_per_tok": 1,
    }  # fmt: skip


def _gemma(rng: random.Random) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": rng.choice((None, 50.0, 5.0)),
        "final_logit_softcapping": rng.choice((None, 30.0)),
    }
    scale = {"query_pre_attn_scalar": rng.choice((256, 144, 100)), "sliding_window": rng.choice((5, 100, 4096))}
    return {**caps, **scale}


def _gemma3(rng: random.Random) -> dict[str, Any]:
    found = {**_gemma(rng), "rope_local_base_freq": rng.choice((1e4, 5e4))}
    del found["attn_logit_softcapping"]
    return found | ({"sliding_window_pattern": rng.choice((2, 3))} if rng.random() < 0.4 else {})


def _opt(rng: random.Random) -> dict[str, Any]:
    return {
        "do_layer_norm_before": rng.random() < 0.7, "enable_bias": rng.random() < 0.7,
        "layer_norm_elementwise_affine": rng.random() < 0.8, "tie_word_embeddings": rng.random() < 0.6,
        "activation_function": rng.choice(("relu", "gelu", "gelu_new", "silu")),
        "word_embed_proj_dim": rng.choice((2048, 2048, 512)), "_remove_final_layer_norm": rng.random() < 0.2,
        "max_position_embeddings": 2048, "pad_token_id": 1,
    }  # fmt: skip


def _falcon(rng: random.Random) -> dict[str, Any]:
    found = {
        "bias": rng.random() < 0.4, "tie_word_embeddings": rng.random() < 0.7, "max_position_embeddings": 2048,
        "activation": rng.choice(("gelu", "gelu", "relu", "silu")), "layer_norm_epsilon": rng.choice((1e-5, 1e-3)),
    }  # fmt: skip
    return found | ({"ffn_hidden_size": rng.choice((4096, 7000))} if rng.random() < 0.3 else {})


_OWN = ("opt", "falcon")
_VARY = {
    "mistral": _window, "mixtral": _window, "starcoder2": _window, "phi3": _window, "gpt_oss": lambda rng: {
        "sliding_window": rng.choice((5, 100, 128)), "num_experts_per_tok": rng.choice((1, 2, 4)),
    },
    "qwen2": _qwen, "qwen3": _qwen, "qwen2_moe": _qwen_moe, "qwen3_moe": _qwen_moe, "olmoe": _olmoe, "glm4_moe": _glm,
    "gemma2": _gemma, "gemma3_text": _gemma3, "opt": _opt, "falcon": _falcon,
    "smollm3": lambda rng: {"use_sliding_window": True, "sliding_window": 64} if rng.random() < 0.2 else {},
}  # fmt: skip


def _by_layer(config: dict[str, Any], layers: int, rng: random.Random) -> None:
    """What a config may say of each layer."""
    kind = config["model_type"]
    config.pop("layer_types", None)
    windowed = kind in ("gemma2", "gemma3_text", "gpt_oss") or (
        kind in ("qwen2", "qwen3") and config["use_sliding_window"]
    )
    if windowed and rng.random() < 0.4:
        config["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
    if kind == "smollm3" and rng.random() < 0.4:
        config["no_rope_layers"] = [rng.choice((0, 1)) for _ in range(layers)]
    if kind in ("qwen2_moe", "qwen3_moe"):
        config["mlp_only_layers"] = [i for i in range(layers) if rng.random() < 0.25]
