"""Configs of real models, of each type that runs, whose widths the cases of `tests.beside_transformers` have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.serve.shapes import locate

BUNDLED = (
    "llama-3.2-1b", "llama-3.1-8b", "mistral-7b-v0.3", "mistral-nemo-12b", "qwen2.5-0.5b", "qwen2.5-3b", "qwen3-0.6b",
    "qwen3-4b", "gemma-2-2b", "phi-3-mini", "phi-4", "opt-1.3b", "mixtral-8x7b", "qwen2-57b-a14b", "qwen3-30b-a3b",
    "olmoe-1b-7b", "glm-4.5-air", "gpt-oss-20b",
)  # fmt: skip


def _of(model_type: str, hidden: int, neurons: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": neurons, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


_OTHERS = {
    "gemma-3-1b": _of(
        "gemma3_text", 1152, 6912, 4, 1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256,
        rope_theta=1e6, rope_local_base_freq=1e4,
    ),
    "smollm3-3b": _of("smollm3", 2048, 11008, 16, 4, rope_theta=5e6, no_rope_layer_interval=4),
    "stablelm-2-1.6b": _of("stablelm", 2048, 5632, 32, 32, use_qkv_bias=True, partial_rotary_factor=0.25),
    "starcoder2-3b": _of("starcoder2", 3072, 12288, 24, 2, sliding_window=4096, use_bias=True, rope_theta=1e6),
    "olmo-2-1b": _of("olmo2", 2048, 8192, 16, 16, rope_theta=5e5),
    "nemotron-minitron-4b": _of("nemotron", 3072, 9216, 24, 8, head_dim=128, partial_rotary_factor=0.5),
    "seed-oss-36b": _of("seed_oss", 5120, 27648, 80, 8, head_dim=128, rope_theta=1e7, attention_bias=True),
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True,
        "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "alibi": False,
        "torch_dtype": "bfloat16",
    },
    "falcon-11b": {
        "model_type": "falcon", "hidden_size": 4096, "num_attention_heads": 32, "num_kv_heads": 8,
        "num_ln_in_parallel_attn": 1, "new_decoder_architecture": True, "bias": False, "alibi": False,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
NAMES = (*BUNDLED, *_OTHERS)


def config_of(name: str) -> dict[str, Any]:
    """The content of a config.json, without the number of layers and tokens for all but bundled ones."""
    config = json.loads(locate(Path(name)).read_text()) if name in BUNDLED else dict(_OTHERS[name])
    if config.get("head_dim", 0) is None:
        del config["head_dim"]  # transformers fails on null beside yarn
    config.pop("architectures", None)
    return config
