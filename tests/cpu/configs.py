"""config.json of tiny models that together use every branch of the ops."""

from __future__ import annotations

import json

_COMMON = {"vocab_size": 300, "hidden_size": 80, "num_hidden_layers": 2, "max_position_embeddings": 256}

TINY_CONFIGS = {
    # Grouped heads, tied, a tail of 44 neurons, long rope.
    "llama": json.dumps(
        {
            "model_type": "llama", **_COMMON, "intermediate_size": 172, "num_attention_heads": 8, "head_dim": 16,
            "num_key_value_heads": 4, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64},
        }
    ),
    # q and k norms, biases, untied.
    "qwen3": json.dumps(
        {
            "model_type": "qwen3", **_COMMON, "intermediate_size": 200, "num_attention_heads": 4, "head_dim": 24,
            "num_key_value_heads": 4, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
            "rms_norm_eps": 1e-6, "attention_bias": True,
        }
    ),
    # Sandwich norms, soft caps, sliding windows on every other layer.
    "gemma2": json.dumps(
        {
            "model_type": "gemma2", **_COMMON, "intermediate_size": 130, "num_attention_heads": 4, "head_dim": 32,
            "num_key_value_heads": 1, "hidden_activation": "gelu_pytorch_tanh", "torch_dtype": "float32",
            "sliding_window": 8, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    ),
    # Experts with a tail, a shared one behind a gate, a dense layer.
    "qwen2_moe": json.dumps(
        {
            "model_type": "qwen2_moe", **_COMMON, "intermediate_size": 100, "num_experts": 7,
            "num_experts_per_tok": 3, "moe_intermediate_size": 72, "shared_expert_intermediate_size": 300,
            "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_only_layers": [1], "torch_dtype": "float32",
        }
    ),
    # Sinks, windows in every other layer, experts with biases, yarn.
    "gpt_oss": json.dumps(
        {
            "model_type": "gpt_oss", **_COMMON, "intermediate_size": 72, "num_local_experts": 6,
            "num_experts_per_tok": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
            "sliding_window": 8, "torch_dtype": "float32",
        }
    ),
    # All heads normed together.
    "olmoe": json.dumps(
        {
            "model_type": "olmoe", **_COMMON, "intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
        }
    ),
    # Attention and FFN beside each other, each with its norm, biases, ReLU.
    "falcon": json.dumps(
        {
            "model_type": "falcon", **_COMMON, "ffn_hidden_size": 172, "num_attention_heads": 4, "num_kv_heads": 2,
            "new_decoder_architecture": True, "bias": True, "activation": "relu", "torch_dtype": "float32",
        }
    ),
    # Learned positions, layer norms after the residual, projected embeddings, ReLU.
    "opt": json.dumps(
        {
            "model_type": "opt", **_COMMON, "ffn_dim": 192, "num_attention_heads": 5, "word_embed_proj_dim": 48,
            "do_layer_norm_before": False, "activation_function": "relu", "torch_dtype": "bfloat16",
        }
    ),
}  # fmt: skip
