"""What a config leaves out means to us what it means to transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.kernels.rope import frequencies
from penstock.models import model_types, spec_from_config

NECESSARY = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "ffn_dim",
    "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
# glm4_moe by default has 96 heads that share 4096 columns: no such model can be made. gemma3 has its keys in an inner
# object.
SOUND: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128}, "gemma3": {"text_config": {"hidden_size": 640, "num_hidden_layers": 7}},
}  # fmt: skip


def least(model_type: str) -> dict[str, Any]:
    """The type's default config without all that may be left out."""
    full = AutoConfig.for_model(model_type).to_dict()
    return {key: value for key, value in full.items() if key in (*NECESSARY, "model_type")} | SOUND.get(model_type, {})


@pytest.mark.parametrize("model_type", model_types())
def test_absent_keys_have_the_defaults_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **SOUND.get(model_type, {}))
    expected = spec_from_config(config.to_dict(), "full")
    assert spec_from_config(least(model_type), "least") == expected
    # What `save_pretrained` writes.
    assert spec_from_config(config.to_diff_dict(), "diff") == expected


# transformers resolves these when the config is made; we read them as they stand in the file.
NULLS = [
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
    ("mistral", {"head_dim": None, "sliding_window": None}),
    ("qwen2", {"num_key_value_heads": None, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 3}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3", {"num_key_value_heads": None, "use_sliding_window": True, "max_window_layers": 0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": None}),
    ("gemma3_text", {"layer_types": None, "final_logit_softcapping": None, "sliding_window_pattern": 3}),
    ("smollm3", {"no_rope_layers": None, "num_key_value_heads": None, "no_rope_layer_interval": 3}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
    ("seed_oss", {"num_key_value_heads": None}),
    ("olmo2", {"num_key_value_heads": None}),
    ("starcoder2", {"sliding_window": 24}),
    ("opt", {"word_embed_proj_dim": None}),
    ("phi3", {"num_key_value_heads": None, "sliding_window": None, "rope_scaling": None}),
    ("falcon", {"num_kv_heads": None, "ffn_hidden_size": None, "new_decoder_architecture": True}),
    ("nemotron", {"num_key_value_heads": None, "head_dim": None}),
    ("mixtral", {"head_dim": None, "sliding_window": None}),
    ("qwen2_moe", {"mlp_only_layers": None, "layer_types": None}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3_moe", {"mlp_only_layers": None, "use_sliding_window": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}),
    ("olmoe", {"num_key_value_heads": None, "clip_qkv": None}),
    # Other names of one key.
    ("olmoe", {"num_local_experts": 16}),
    ("mixtral", {"num_experts": 4}),
    ("gpt_oss", {"num_experts": 16}),
    ("glm4_moe", {"num_local_experts": 16, "head_dim": 128}),
]


@pytest.mark.parametrize(("model_type", "keys"), NULLS)
def test_null_means_what_it_means_to_transformers(model_type: str, keys: dict[str, Any]) -> None:
    resolved = AutoConfig.for_model(model_type, **keys).to_dict()
    assert spec_from_config(least(model_type) | keys, "file") == spec_from_config(resolved, "resolved")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
ROPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"rope_theta": 500000.0}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}, "rope_theta": 500000.0}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    (
        "llama",
        {
            "rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 256,
        },
    ),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False, "beta_fast": 16, "beta_slow": 2}}),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 128}}),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3}}),
    ("mistral", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.25}}),
    ("mistral", {"rope_parameters": {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 64}}),
    ("gemma2", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"layer_types": ["sliding_attention"], "rope_local_base_freq": 500.0}),
    (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
            }
        },
    ),
    ("stablelm", {}),
    ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 5e4}),
    ("starcoder2", {"rope_theta": 5e4}),
    ("seed_oss", {"rope_theta": 1e7}),
    ("olmo2", {"rope_theta": 5e5}),
    ("smollm3", {"no_rope_layers": [1]}),
    ("smollm3", {"no_rope_layers": [1], "rope_theta": 5e6}),
    ("phi3", {"rope_theta": 20000.0, "partial_rotary_factor": 0.5}),
    ("phi3", {"rope_scaling": {"type": "yarn", **LONG}, "original_max_position_embeddings": 64}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG}, "max_position_embeddings": 8192}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "attention_factor": 1.5}}),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "factor": 16.0}, "original_max_position_embeddings": 64}),
    ("mixtral", {}),
    ("mixtral", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
    ("olmoe", {"rope_theta": 500000.0}),
    ("falcon", {"rope_theta": 5e4}),
    ("nemotron", {}),
    ("nemotron", {"partial_rotary_factor": 0.25, "rope_theta": 5e4}),
    ("glm4_moe", {}),
    ("glm4_moe", {"partial_rotary_factor": 0.25}),
    ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}}),
]


@pytest.mark.parametrize(("model_type", "keys"), ROPES)
@pytest.mark.parametrize("positions", [16, 384])
def test_rope_turns_as_in_transformers(model_type: str, keys: dict[str, Any], positions: int) -> None:
    file = least(model_type) | {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "vocab_size": 8,
        "head_dim": 16,
        "max_position_embeddings": 512,
        **keys,
    }
    if model_type == "falcon":
        del file["head_dim"]  # which follows there
    config = AutoConfig.for_model(**{key: _copy(value) for key, value in file.items()}, pad_token_id=None)
    rotary = AutoModelForCausalLM.from_config(config).base_model.rotary_emb
    kind = config.layer_types[0] if model_type == "gemma3_text" else None
    cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None], *([kind] if kind else []))

    rope = spec_from_config(file, "config.json").layers[0].attention.rope
    assert rope is not None
    inv_freq, factor = frequencies(rope, positions)
    half = rope.dims // 2
    turns = getattr(rotary, f"{kind}_inv_freq") if kind else rotary.inv_freq
    np.testing.assert_allclose(turns.numpy(), inv_freq, rtol=2e-6)
    assert cos.shape[-1] == rope.dims
    # At position 0 the angle is 0: what is left is the factor.
    np.testing.assert_allclose(cos[0, 0, :half].numpy(), factor, rtol=1e-6)
    assert not sin[0, 0].any()


def _copy(value: Any) -> Any:
    """transformers writes into the dicts that it is given."""
    return dict(value) if isinstance(value, dict) else value
