"""config.json → ModelSpec: real models have their published sizes, old keys and new mean the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models import TensorSource, model_types, sources, spec_from_config
from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec, Rope
from penstock.spec.parts import parts
from tests.pure.real_models import BY_NAME, LLAMA3_ROPE, PHI3_LONGROPE, REAL, TINY, Real


def weights(spec: ModelSpec) -> int:
    return sum(part.weights_of(0, part.granules) for part in parts(spec, Format("bfloat16")))


# --- real models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_a_real_model_has_its_published_size(real: Real) -> None:
    spec = spec_from_config(real.config, "config.json")
    attention = spec.layers[0].attention
    assert (len(spec.layers), attention.heads, attention.kv_heads, attention.head_dim) == (real.layers, *real.heads)
    assert weights(spec) == real.weights
    assert spec.dtype == real.config["torch_dtype"]
    assert spec.tokenizer_bytes == 840 * spec.vocab


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_every_block_has_one_source(real: Real) -> None:
    spec = spec_from_config(real.config, "config.json")
    found = sources(spec)
    blocks = {(part.key, block.name) for part in parts(spec, Format("int4", 64)) for block in part.blocks}
    assert set(found) == blocks
    # No two blocks come from the same place.
    assert len(set(found.values())) == len(found)
    assert all("{" not in source.tensor for source in found.values())


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.name)
def test_a_spec_survives_json(real: Real) -> None:
    spec = spec_from_config(real.config, "config.json")
    assert codec.from_json(ModelSpec, json.loads(json.dumps(codec.to_json(spec), allow_nan=False))) == spec


def test_llama_rope_scaling() -> None:
    rope = spec_from_config(BY_NAME["Llama-3.1-8B"], "c").layers[0].attention.rope
    assert rope is not None and (rope.theta, rope.dims, rope.kind) == (500000.0, 128, "llama3")
    assert dict(rope.factors) == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }


def test_phi3_longrope() -> None:
    rope = spec_from_config(BY_NAME["Phi-3-mini-128k"], "c").layers[0].attention.rope
    assert rope is not None and (rope.kind, rope.dims, len(rope.short_factor)) == ("longrope", 96, 48)
    # Published with the model: sqrt(1 + ln(131072 / 4096) / ln(4096)).
    assert dict(rope.factors)["attention_factor"] == pytest.approx(1.1902380714238083)
    assert rope.long_factor == tuple(PHI3_LONGROPE["long_factor"])
    # The first release called it "su".
    su = BY_NAME["Phi-3-mini-128k"] | {"rope_scaling": PHI3_LONGROPE | {"type": "su"}}
    assert spec_from_config(su, "c").layers[0].attention.rope == rope


def test_gemma_norms_caps_and_windows() -> None:
    spec = spec_from_config(BY_NAME["gemma-2-9b"], "c")
    assert [layer.attention.window for layer in spec.layers[:4]] == [4096, 0, 4096, 0]
    assert (spec.logit_softcap, spec.layers[0].attention.softcap) == (30.0, 50.0)
    assert spec.layers[0].attention.scale == 256**-0.5
    assert spec.embed_scale == math.sqrt(3584) and spec.norm.offset == 1.0 and spec.tied
    assert spec.layers[0].norm_in and spec.layers[0].norm_out and not spec.layers[0].norm_after
    found = sources(spec)
    assert found["0.norms", "attn_out"].tensor == "model.layers.0.post_attention_layernorm.weight"
    assert found["0.norms", "ffn_in"].tensor == "model.layers.0.pre_feedforward_layernorm.weight"


def test_opt_350m_norms_stand_behind_and_its_embedding_is_projected() -> None:
    spec = spec_from_config(BY_NAME["OPT-350m"], "c")
    assert (spec.d_embed, spec.d_model, spec.position_rows, spec.position_offset) == (512, 1024, 2050, 2)
    assert spec.layers[0].norm_after and not spec.layers[0].norm_in and not spec.final_norm
    found = sources(spec)
    assert found["edges", "project_out"] == TensorSource("model.decoder.project_out.weight", 0, 0)
    assert found["3.norms", "ffn_after_bias"].tensor == "model.decoder.layers.3.final_layer_norm.bias"


def test_fused_tensors_are_cut_by_offset() -> None:
    found = sources(spec_from_config(TINY["phi3"], "c"))
    assert found["1.attn", "q"] == TensorSource("model.layers.1.self_attn.qkv_proj.weight", 0, 0)
    assert (found["1.attn", "k"].offset, found["1.attn", "v"].offset) == (80, 120)
    assert (found["1.ffn", "gate"].offset, found["1.ffn", "up"].offset) == (0, 172)
    assert found["1.ffn", "down"] == TensorSource("model.layers.1.mlp.down_proj.weight", 1, 0)


# --- old keys and new ----------------------------------------------------------------------------------------------


def rope_of(model_type: str = "llama", **keys: Any) -> Rope:
    rope = spec_from_config(TINY[model_type] | keys, "config.json").layers[0].attention.rope
    assert rope is not None
    return rope


def test_rope_reads_old_and_new_keys_alike() -> None:
    old = rope_of(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    assert rope_of(rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5}) == old
    nested = {"full_attention": LLAMA3_ROPE | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 7.0}}
    assert rope_of(rope_parameters=nested) == old
    assert rope_of(rope_scaling={"type": "linear", "factor": 2}) == Rope(10000.0, 20, "linear", (("factor", 2.0),))
    assert rope_of(rope_scaling=None, rope_parameters=None) == rope_of(rope_scaling={}) == Rope(10000.0, 20)


def test_yarn_works_out_its_attention_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    factors = dict(rope_of("qwen2", rope_scaling=yarn).factors)
    assert factors["attention_factor"] == pytest.approx(0.1 * math.log(4) + 1)
    assert (factors["beta_fast"], factors["beta_slow"], factors["truncate"]) == (32.0, 1.0, 1.0)
    factors = dict(rope_of("qwen2", rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}).factors)
    assert factors["attention_factor"] == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_phi3_rotates_a_part_of_each_head() -> None:
    assert rope_of("phi3", partial_rotary_factor=0.6).dims == 12
    assert rope_of("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.6}).dims == 12
    with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor 0\.5"):
        rope_of("llama", partial_rotary_factor=0.5)


def test_qwen_windows_start_at_max_window_layers() -> None:
    def windows(**keys: Any) -> list[int]:
        spec = spec_from_config(TINY["qwen2"] | {"sliding_window": 24} | keys, "c")
        return [layer.attention.window for layer in spec.layers]

    assert windows(max_window_layers=1) == [0, 0, 0]
    assert windows(max_window_layers=1, use_sliding_window=True) == [0, 24, 24]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(layer_types=kinds, use_sliding_window=True) == [24, 0, 0]
    with pytest.raises(BrokenModel, match="sliding_window"):
        windows(layer_types=kinds)


def test_null_is_not_absent() -> None:
    absent = {key: value for key, value in TINY["mistral"].items() if key != "num_key_value_heads"}
    wide = absent | {"num_attention_heads": 16, "hidden_size": 320}
    by_default = spec_from_config(wide, "c").layers[0].attention
    by_null = spec_from_config(wide | {"num_key_value_heads": None, "sliding_window": None}, "c").layers[0].attention
    assert (by_default.kv_heads, by_default.window) == (8, 4096)
    assert (by_null.kv_heads, by_null.window) == (16, 0)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": None, "torch_dtype": None}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_dtype(keys: dict[str, Any], dtype: str) -> None:
    assert spec_from_config(TINY["llama"] | keys, "c").dtype == dtype


def test_all_model_types_are_listed() -> None:
    assert model_types() == tuple(TINY)
