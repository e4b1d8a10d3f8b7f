"""Configs of tiny models in every way that families differ: what the oracle makes and the engine must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONGEST_PROMPT, NEW_TOKENS = 300, 64
CONTEXT, POSITIONS = 384, 512  # room that an engine should make, and that a model has


@dataclass(frozen=True)
class Variant:
    """`keys` go to the transformers config. `prompts`: lengths at which the engine is compared."""

    name: str
    model_type: str
    keys: dict[str, Any]
    prompts: tuple[int, ...] = (1, 17, LONGEST_PROMPT)

    @property
    def vocab(self) -> int:
        found: int = self.keys.get("text_config", self.keys)["vocab_size"]
        return found


def _shape(d: int = 80, heads: int = 4, neurons: int = 172, layers: int = 2, vocab: int = 203) -> dict[str, Any]:
    return {
        "hidden_size": d,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": neurons,
        "vocab_size": vocab,
        "max_position_embeddings": POSITIONS,
        # Some types' defaults lie beyond these vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def _opt(neurons: int = 172, **keys: Any) -> dict[str, Any]:
    shape = _shape() | keys
    del shape["intermediate_size"]
    return shape | {"ffn_dim": neurons}


def _falcon(neurons: int = 172, **keys: Any) -> dict[str, Any]:
    shape = _shape() | keys
    del shape["intermediate_size"]
    return shape | {"ffn_hidden_size": neurons}


def _experts(key: str, count: int, active: int, neurons: int | None = None) -> dict[str, Any]:
    found = {key: count, "num_experts_per_tok": active, "num_key_value_heads": 2}
    return found if neurons is None else found | {"moe_intermediate_size": neurons}


def _gated(activation: str) -> Variant:
    return Variant(f"llama-{activation}", "llama", _shape() | {"num_key_value_heads": 2, "hidden_act": activation})


def _longrope(original: int, *, partial: float = 1.0) -> dict[str, Any]:
    half = int(20 * partial) // 2
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(half)],
        "long_factor": [1.5 + 0.7 * i for i in range(half)],
    }
    return {
        "rope_scaling": scaling,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": original,
        "num_key_value_heads": 2,
    }


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4}


_GEMMA3 = _shape(d=72, layers=7) | {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 18,
    "rope_theta": 5e4,
    "rope_local_base_freq": 100.0,
}


_VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


VARIANTS = (
    Variant("llama-gqa", "llama", _shape() | {"num_key_value_heads": 2}),
    Variant("llama-mha-tied", "llama", _shape(d=96, heads=6) | {"head_dim": 24, "tie_word_embeddings": True}),
    Variant(
        "llama-mqa-biases",
        "llama",
        _shape(d=72, heads=3, neurons=100, vocab=67)
        | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    Variant("llama-llama3-rope", "llama", _shape() | {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    Variant("llama-linear-rope", "llama", _shape() | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    *map(_gated, ("relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu")),
    Variant("mistral-window", "mistral", _shape() | {"num_key_value_heads": 2, "sliding_window": 24}),
    Variant(
        "mistral-no-window", "mistral", _shape() | {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": None}
    ),
    Variant("qwen2", "qwen2", _shape() | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    Variant(
        "qwen2-late-window",
        "qwen2",
        _shape(layers=3)
        | {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    Variant("qwen2-yarn", "qwen2", _shape() | {"num_key_value_heads": 1, "rope_scaling": _YARN}),
    Variant("qwen3", "qwen3", _shape() | {"num_key_value_heads": 2, "head_dim": 32}),
    Variant(
        "qwen3-biases",
        "qwen3",
        _shape()
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Variant("opt", "opt", _opt()),
    Variant("opt-untied-gelu", "opt", _opt(tie_word_embeddings=False, activation_function="gelu")),
    Variant(
        "opt-no-biases",
        "opt",
        _opt(neurons=100, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="relu2"),
    ),
    Variant(
        "opt-post-norm", "opt", _opt(do_layer_norm_before=False, word_embed_proj_dim=36, activation_function="gelu")
    ),
    Variant("opt-no-final-norm", "opt", _opt(_remove_final_layer_norm=True)),
    Variant(
        "gemma2",
        "gemma2",
        _shape(d=72)
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 18,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    Variant(
        "gemma2-no-caps",
        "gemma2",
        _shape(layers=3)
        | {
            "num_key_value_heads": 1,
            "head_dim": 20,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    Variant("gemma3-text", "gemma3_text", _GEMMA3),
    Variant(
        "gemma3-text-caps",
        "gemma3_text",
        _shape(layers=3)
        | {
            "num_key_value_heads": 1,
            "head_dim": 20,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Variant("gemma3", "gemma3", {"text_config": _GEMMA3, "vision_config": _VISION, "pad_token_id": 0}, (17,)),
    Variant("smollm3", "smollm3", _shape(layers=5) | {"num_key_value_heads": 2}),
    Variant(
        "smollm3-window",
        "smollm3",
        _shape(layers=3)
        | {
            "num_key_value_heads": 1,
            "head_dim": 32,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_scaling": _LLAMA3,
        },
    ),
    Variant("phi3-window", "phi3", _shape() | {"num_key_value_heads": 2, "sliding_window": 24}),
    Variant("phi3-partial", "phi3", _shape() | {"partial_rotary_factor": 0.6}),
    # transformers takes the long factors once a pass goes beyond the original length, whatever is cached; an
    # engine chooses once, by its context. They can only be compared on one side of the switch.
    Variant("phi3-longrope-short", "phi3", _shape() | _longrope(480)),
    Variant(
        "phi3-longrope-long",
        "phi3",
        _shape() | _longrope(16, partial=0.8),
        prompts=(17, LONGEST_PROMPT),
    ),
    Variant("nemotron", "nemotron", _shape() | {"num_key_value_heads": 2}),
    Variant(
        "nemotron-biases",
        "nemotron",
        _shape(d=72, heads=3, neurons=100, vocab=67)
        | {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25}},
    ),
    Variant("stablelm", "stablelm", _shape(d=96) | {"num_key_value_heads": 2}),
    Variant(
        "stablelm-biases",
        "stablelm",
        _shape(d=96, heads=3, neurons=100, vocab=67)
        | {"num_key_value_heads": 1, "use_qkv_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}},
    ),
    Variant("starcoder2", "starcoder2", _shape() | {"num_key_value_heads": 2, "sliding_window": 24}),
    Variant(
        "starcoder2-no-biases",
        "starcoder2",
        _shape(d=72, heads=3, neurons=100)
        | {"num_key_value_heads": 1, "use_bias": False, "tie_word_embeddings": False},
    ),
    Variant("seed-oss", "seed_oss", _shape() | {"num_key_value_heads": 2, "head_dim": 32}),
    Variant(
        "seed-oss-biases",
        "seed_oss",
        _shape(neurons=100) | {"num_key_value_heads": 1, "head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    ),
    Variant("olmo2", "olmo2", _shape() | {"num_key_value_heads": 2}),
    Variant("olmo2-biases", "olmo2", _shape(neurons=100) | {"attention_bias": True, "rope_scaling": _YARN}),
    Variant("falcon", "falcon", _falcon()),
    Variant(
        "falcon-groups",
        "falcon",
        _falcon(neurons=100, new_decoder_architecture=True, num_kv_heads=2, bias=True, activation="relu"),
    ),
    Variant(
        "falcon-groups-one-norm",
        "falcon",
        _falcon(new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1, tie_word_embeddings=False),
    ),
    Variant("falcon-sequential", "falcon", _falcon(parallel_attn=False, multi_query=False, bias=True)),
    Variant("mixtral", "mixtral", _shape() | _experts("num_local_experts", 5, 2) | {"sliding_window": 24}),
    Variant(
        "qwen2-moe",
        "qwen2_moe",
        _shape(layers=3)
        | _experts("num_experts", 6, 3, neurons=44)
        | {"shared_expert_intermediate_size": 100, "mlp_only_layers": [1]},
    ),
    Variant(
        "qwen2-moe-window",
        "qwen2_moe",
        _shape()
        | _experts("num_experts", 3, 3, neurons=130)
        | {"shared_expert_intermediate_size": 70, "norm_topk_prob": True, "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 24},
    ),
    Variant(
        "qwen3-moe",
        "qwen3_moe",
        _shape(layers=3) | _experts("num_experts", 9, 4, neurons=72) | {"head_dim": 16, "decoder_sparse_step": 2},
    ),
    Variant(
        "qwen3-moe-normalised",
        "qwen3_moe",
        _shape() | _experts("num_experts", 33, 8, neurons=20) | {"norm_topk_prob": True, "attention_bias": True},
    ),
    Variant("olmoe", "olmoe", _shape(neurons=100) | _experts("num_experts", 7, 2)),
    Variant(
        "olmoe-biases",
        "olmoe",
        _shape(neurons=60) | _experts("num_experts", 4, 1) | {"attention_bias": True, "norm_topk_prob": True},
    ),
    Variant(
        "gpt-oss",
        "gpt_oss",
        _shape(neurons=100, layers=3)
        | _experts("num_local_experts", 5, 2)
        | {"head_dim": 16, "num_attention_heads": 6, "sliding_window": 24, "rope_scaling": _YARN | {"truncate": False}},
    ),
    Variant(
        "gpt-oss-no-biases",
        "gpt_oss",
        _shape(d=72, neurons=36)
        | _experts("num_local_experts", 33, 4)
        | {"head_dim": 20, "sliding_window": 40, "attention_bias": False, "tie_word_embeddings": True},
    ),
    Variant(
        "glm4-moe",
        "glm4_moe",
        _shape(layers=3)
        | _experts("n_routed_experts", 9, 3, neurons=50)
        | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    ),
    Variant(
        "glm4-moe-raw",
        "glm4_moe",
        _shape()
        | _experts("n_routed_experts", 6, 2, neurons=30)
        | {"n_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
)
