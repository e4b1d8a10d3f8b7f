"""Configs of published models, as facts: their keys that say something, and what is known of the model."""

from __future__ import annotations

from typing import Any, NamedTuple


class Real(NamedTuple):
    """A published model: the keys of its config that say something, its number of weights, and its heads."""

    name: str
    config: dict[str, Any]
    weights: int
    layers: int
    heads: tuple[int, int, int]  # heads, KV heads, head_dim


def config(model_type: str, d: int, layers: int, heads: int, neurons: int, vocab: int, **keys: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim" if model_type == "opt" else "intermediate_size": neurons,
        "vocab_size": vocab,
        **keys,
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PHI3_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}

REAL = [
    Real(
        "Llama-3.2-1B",
        config(
            "llama", 2048, 16, 32, 8192, 128256, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
            max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE | {"factor": 32.0},
            tie_word_embeddings=True, torch_dtype="bfloat16", attention_bias=False, mlp_bias=False, hidden_act="silu",
        ),
        1_235_814_400, 16, (32, 8, 64),
    ),
    Real(
        "Llama-3.1-8B",
        config(
            "llama", 4096, 32, 32, 14336, 128256, num_key_value_heads=8, rms_norm_eps=1e-5,
            max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE,
            tie_word_embeddings=False, torch_dtype="bfloat16", attention_bias=False, mlp_bias=False, pretraining_tp=1,
        ),
        8_030_261_248, 32, (32, 8, 128),
    ),
    Real(
        "Mistral-7B-v0.1",
        config(
            "mistral", 4096, 32, 32, 14336, 32000, num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=4096,
            max_position_embeddings=32768, rope_theta=10000.0, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        7_241_732_096, 32, (32, 8, 128),
    ),
    Real(
        "Qwen2-7B",
        config(
            "qwen2", 3584, 28, 28, 18944, 152064, num_key_value_heads=4, rms_norm_eps=1e-6, sliding_window=131072,
            use_sliding_window=False, max_window_layers=28, max_position_embeddings=131072, rope_theta=1000000.0,
            tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        7_615_616_512, 28, (28, 4, 128),
    ),
    Real(
        "Qwen2.5-0.5B",
        config(
            "qwen2", 896, 24, 14, 4864, 151936, num_key_value_heads=2, rms_norm_eps=1e-6, sliding_window=32768,
            use_sliding_window=False, max_window_layers=24, max_position_embeddings=32768, rope_theta=1000000.0,
            tie_word_embeddings=True, torch_dtype="bfloat16",
        ),
        494_032_768, 24, (14, 2, 64),
    ),
    Real(
        "Qwen3-8B",
        config(
            "qwen3", 4096, 36, 32, 12288, 151936, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
            sliding_window=None, use_sliding_window=False, max_window_layers=36, max_position_embeddings=40960,
            rope_theta=1000000, rope_scaling=None, attention_bias=False, tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        8_190_735_360, 36, (32, 8, 128),
    ),
    Real(
        "OPT-125m",
        config(
            "opt", 768, 12, 12, 3072, 50272, word_embed_proj_dim=768, do_layer_norm_before=True,
            max_position_embeddings=2048, activation_function="relu", _remove_final_layer_norm=False,
            torch_dtype="float16",
        ),
        125_239_296, 12, (12, 12, 64),
    ),
    Real(
        "OPT-350m",
        config(
            "opt", 1024, 24, 16, 4096, 50272, word_embed_proj_dim=512, do_layer_norm_before=False,
            max_position_embeddings=2048, activation_function="relu", _remove_final_layer_norm=False,
            torch_dtype="float16",
        ),
        331_196_416, 24, (16, 16, 64),
    ),
    Real(
        "OPT-30B",
        config(
            "opt", 7168, 48, 56, 28672, 50272, word_embed_proj_dim=7168, do_layer_norm_before=True,
            max_position_embeddings=2048, activation_function="relu", _remove_final_layer_norm=False,
            torch_dtype="float16",
        ),
        29_974_540_288, 48, (56, 56, 128),
    ),
    Real(
        "gemma-2-9b",
        config(
            "gemma2", 3584, 42, 16, 14336, 256000, num_key_value_heads=8, head_dim=256, rms_norm_eps=1e-6,
            hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096, sliding_window_size=4096,
            max_position_embeddings=8192, rope_theta=10000.0, attention_bias=False, torch_dtype="float32",
            cache_implementation="hybrid",
        ),
        9_241_705_984, 42, (16, 8, 256),
    ),
    Real(
        "Phi-3-mini-4k",
        config(
            "phi3", 3072, 32, 32, 8192, 32064, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=2047,
            max_position_embeddings=4096, original_max_position_embeddings=4096, rope_theta=10000.0,
            rope_scaling=None, attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        3_821_079_552, 32, (32, 32, 96),
    ),
    Real(
        "Phi-3-mini-128k",
        config(
            "phi3", 3072, 32, 32, 8192, 32064, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=262144,
            max_position_embeddings=131072, original_max_position_embeddings=4096, rope_theta=10000.0,
            rope_scaling=PHI3_LONGROPE, attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        3_821_079_552, 32, (32, 32, 96),
    ),
    Real(
        "Mixtral-8x7B-v0.1",
        config(
            "mixtral", 4096, 32, 32, 14336, 32000, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
            rms_norm_eps=1e-5, sliding_window=None, max_position_embeddings=32768, rope_theta=1e6, hidden_act="silu",
            tie_word_embeddings=False, torch_dtype="bfloat16", output_router_logits=False, router_aux_loss_coef=0.02,
        ),
        46_702_792_704, 32, (32, 8, 128),
    ),
    Real(
        "Qwen1.5-MoE-A2.7B",
        config(
            "qwen2_moe", 2048, 24, 16, 5632, 151936, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
            decoder_sparse_step=1, rms_norm_eps=1e-6, sliding_window=32768, use_sliding_window=False,
            max_window_layers=21, max_position_embeddings=8192, rope_theta=1000000.0, tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        14_315_784_192, 24, (16, 16, 128),
    ),
    Real(
        "Qwen3-30B-A3B",
        config(
            "qwen3_moe", 2048, 48, 32, 6144, 151936, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
            mlp_only_layers=[], rms_norm_eps=1e-6, sliding_window=None, use_sliding_window=False,
            max_window_layers=48, max_position_embeddings=40960, rope_theta=1000000.0, rope_scaling=None,
            attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        30_532_122_624, 48, (32, 4, 128),
    ),
    Real(
        "Minitron-4B-Base",
        config(
            "nemotron", 3072, 32, 24, 9216, 256000, num_key_value_heads=8, head_dim=128, hidden_act="relu2",
            norm_eps=1e-5, partial_rotary_factor=0.5, max_position_embeddings=4096, rope_theta=10000.0,
            attention_bias=False, mlp_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        4_190_509_056, 32, (24, 8, 128),
    ),
    Real(
        "falcon-7b",
        config(
            "falcon", 4544, 32, 71, 18176, 65024, multi_query=True, parallel_attn=True, bias=False, alibi=False,
            new_decoder_architecture=False, layer_norm_epsilon=1e-5, torch_dtype="bfloat16",
        ),
        6_921_720_704, 32, (71, 1, 64),
    ),
    Real(
        "falcon-40b",
        config(
            "falcon", 8192, 60, 128, 32768, 65024, num_kv_heads=8, parallel_attn=True, bias=False, alibi=False,
            new_decoder_architecture=True, layer_norm_epsilon=1e-5, torch_dtype="bfloat16",
        ),
        41_303_293_952, 60, (128, 8, 64),
    ),
    Real(
        "OLMoE-1B-7B-0924",
        config(
            "olmoe", 2048, 16, 16, 1024, 50304, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
            norm_topk_prob=False, clip_qkv=None, rms_norm_eps=1e-5, max_position_embeddings=4096, rope_theta=10000.0,
            rope_scaling=None, attention_bias=False, tie_word_embeddings=False, torch_dtype="bfloat16",
        ),
        6_919_161_856, 16, (16, 16, 128),
    ),
    Real(
        # 110,468,824,832 with the layer that guesses a token ahead.
        "GLM-4.5-Air",
        config(
            "glm4_moe", 4096, 46, 96, 10944, 151552, num_key_value_heads=8, head_dim=128, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408, n_group=1, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1, attention_bias=True,
            use_qk_norm=False, partial_rotary_factor=0.5, num_nextn_predict_layers=1, rms_norm_eps=1e-5,
            max_position_embeddings=131072, rope_theta=1000000, rope_scaling=None, tie_word_embeddings=False,
            torch_dtype="bfloat16",
        ),
        106_852_251_264, 46, (96, 8, 128),
    ),
]  # fmt: skip

BY_NAME = {real.name: real.config for real in REAL}
# The least that each type needs, in an odd shape. (Some types default to more KV heads than these have heads.)
_MOE = {"moe_intermediate_size": 44, "num_key_value_heads": 2}
_TINY_KEYS: dict[str, dict[str, Any]] = {
    "opt": {},
    "gemma3": {"text_config": config("gemma3_text", 80, 3, 4, 172, 203, num_key_value_heads=2)},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "glm4_moe": {**_MOE, "n_routed_experts": 9},
    "gpt_oss": {"num_local_experts": 5, "num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 3, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "qwen2_moe": {**_MOE, "num_experts": 5, "shared_expert_intermediate_size": 100},
    "qwen3_moe": {**_MOE, "num_experts": 9},
}
TINY = {
    model_type: config(model_type, 80, 3, 4, 172, 203, **_TINY_KEYS.get(model_type, {"num_key_value_heads": 2}))
    for model_type in sorted(
        {
            "gemma2",
            "gemma3_text",
            "llama",
            "mistral",
            "nemotron",
            "phi3",
            "qwen2",
            "qwen3",
            "smollm3",
            "stablelm",
            "starcoder2",
            "seed_oss",
            "olmo2",
            *_TINY_KEYS,
        }
    )
}
