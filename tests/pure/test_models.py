"""config.json → ModelSpec: real models have their published sizes, old keys and new mean the same."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models import TensorSource, model_types, planned_types, sources, spec_from_config, stacked_sources
from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.model import FfnSpec, ModelSpec, Rope, Router
from penstock.spec.parts import parts
from tests.pure.real_models import BY_NAME, LLAMA3_ROPE, PHI3_LONGROPE, REAL, TINY, Real

ALL = BY_NAME | TINY


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


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Mixtral-8x7B-v0.1", 12.9), ("Qwen1.5-MoE-A2.7B", 2.7), ("Qwen3-30B-A3B", 3.3), ("OLMoE-1B-7B-0924", 1.3),
     ("GLM-4.5-Air", 13.4)],
)  # fmt: skip
def test_a_token_goes_through_as_many_weights_as_published(name: str, billions: float) -> None:
    """GLM says 12: it leaves out embedding and head."""
    spec, active = spec_from_config(BY_NAME[name], "config.json"), 0
    for part in parts(spec, Format("bfloat16")):
        routed = spec.layers[part.layer].routed if part.kind == "experts" else None
        assert part.experts == (1 if routed is None else routed.experts)
        chosen = part.granules if routed is None else routed.active * part.expert_granules
        active += part.weights_of(part.granules - chosen, part.granules)
    assert active == pytest.approx(billions * 1e9, rel=0.02)


@pytest.mark.parametrize("name", ALL)
def test_every_block_has_one_source(name: str) -> None:
    spec = spec_from_config(ALL[name], "config.json")
    cut = {part.key: part for part in parts(spec, Format("int4", 64))}
    blocks = {(part.key, block.name) for part in cut.values() for block in part.blocks}
    stacked = stacked_sources(spec)
    assert (stacked is None) == (not spec.is_routed)
    for found in (sources(spec), stacked or {}):
        assert not found or set(found) == blocks
        # No two blocks come from the same place.
        places = [(t, *s[1:]) for (key, _), s in found.items() for t in s.tensors(cut[key].experts)]
        assert len(set(places)) == len(places)
        assert not any(mark in place[0] for place in places for mark in "{}<>")
        in_one = found is stacked or spec.model_type == "gpt_oss"  # which has no tensors of one expert
        assert all(source.stacked == (in_one and key.endswith("experts")) for (key, _), source in found.items())


@pytest.mark.parametrize("name", ALL)
def test_a_spec_survives_json(name: str) -> None:
    spec = spec_from_config(ALL[name], "config.json")
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


def test_glm_is_dense_first_and_turns_half_of_each_head() -> None:
    spec = spec_from_config(BY_NAME["GLM-4.5-Air"], "c")
    assert [layer.routed is None for layer in spec.layers[:3]] == [True, False, False]
    first, routed, attention = spec.layers[0].ffn, spec.layers[1].routed, spec.layers[1].attention
    assert isinstance(first, FfnSpec) and first.neurons == 10944 and routed is not None and routed.shared is not None
    assert (routed.experts, routed.active, routed.expert.neurons, routed.shared.neurons) == (128, 8, 1408, 1408)
    assert routed.router == Router("sigmoid", normalised=True, bias=True) and not routed.shared_gate
    assert attention.qkv_bias and not attention.out_bias and attention.rope is not None and attention.rope.dims == 64
    found = sources(spec)
    assert found["1.router", "bias"].tensor == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found["1.shared", "down"] == TensorSource("model.layers.1.mlp.shared_experts.down_proj.weight", 1, 0)
    assert found["0.ffn", "down"].tensor == "model.layers.0.mlp.down_proj.weight"


def test_two_shared_experts_are_one_of_twice_the_neurons() -> None:
    routed = spec_from_config(TINY["glm4_moe"] | {"n_shared_experts": 2}, "c").layers[1].routed
    assert routed is not None and routed.shared is not None and routed.shared.neurons == 88
    routed = spec_from_config(TINY["glm4_moe"] | {"n_shared_experts": 0}, "c").layers[1].routed
    assert routed is not None and routed.shared is None


def test_mixtral_calls_its_experts_otherwise() -> None:
    spec = spec_from_config(BY_NAME["Mixtral-8x7B-v0.1"], "c")
    found, moe = sources(spec)["3.experts", "up"], "model.layers.3.block_sparse_moe."
    assert found.of_expert(7) == f"{moe}experts.7.w3.weight"
    assert sources(spec)["3.router", "scores"].tensor == f"{moe}gate.weight"
    assert {key: spec_from_config(TINY["mixtral"] | {"sliding_window": key}, "c").layers[0].attention.window
            for key in (None, 24)} == {None: 0, 24: 24}  # fmt: skip


def test_stacked_experts_lie_in_two_tensors() -> None:
    spec = spec_from_config(TINY["qwen3_moe"], "c")
    found = stacked_sources(spec)
    assert found is not None
    both = "model.layers.2.mlp.experts.gate_up_proj"
    assert found["2.experts", "gate"] == TensorSource(both, 0, 0, True)
    assert found["2.experts", "up"] == TensorSource(both, 0, 44, True)
    assert found["2.experts", "down"] == TensorSource("model.layers.2.mlp.experts.down_proj", 1, 0, True)
    assert found["2.experts", "up"].tensors(9) == [both]


def test_olmoe_norms_all_heads_together() -> None:
    spec = spec_from_config(BY_NAME["OLMoE-1B-7B-0924"], "c")
    by_key = {part.key: part for part in parts(spec, Format("bfloat16"))}
    assert (by_key["0.attn"].granules, by_key["0.attn"].block("q").rows) == (1, 2048)
    assert (by_key["0.norms"].block("q_norm").cols, by_key["0.norms"].block("k_norm").cols) == (2048, 2048)


def test_qwen_has_experts_in_every_nth_layer() -> None:
    def dense(model_type: str = "qwen3_moe", **keys: Any) -> list[int]:
        spec = spec_from_config(TINY[model_type] | {"num_hidden_layers": 6} | keys, "c")
        return [i for i, layer in enumerate(spec.layers) if layer.routed is None]

    assert dense() == dense(mlp_only_layers=None) == dense("qwen2_moe", mlp_only_layers=[]) == []
    assert dense(decoder_sparse_step=2) == [0, 2, 4]
    assert dense(mlp_only_layers=[5, 0, -1, 77]) == [0, 5]
    assert dense("qwen2_moe", decoder_sparse_step=3, mlp_only_layers=[2]) == [0, 1, 2, 3, 4]
    assert dense(decoder_sparse_step=7) == [0, 1, 2, 3, 4, 5]


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


def test_falcons_heads_are_cut_by_stride() -> None:
    found = sources(spec_from_config(TINY["falcon"], "c"))
    fused = "transformer.h.1.self_attention.query_key_value.weight"  # of 2 KV heads: 2 q heads of 20 rows, k and v
    assert [found["1.attn", block] for block in "qkv"] == [
        TensorSource(fused, 0, offset, stride=80) for offset in (0, 40, 60)
    ]
    assert found["1.norms", "ffn_in"].tensor == "transformer.h.1.ln_mlp.weight"


@pytest.mark.parametrize(
    ("keys", "norms"),
    [({}, 1), ({"parallel_attn": False}, 0), ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 1)],
)
def test_falcons_norms(keys: dict[str, Any], norms: int) -> None:
    config = TINY["falcon"] | {"new_decoder_architecture": False} | keys
    spec = spec_from_config(config, "c")
    assert spec.layers[0].parallel_norms == norms
    blocks = {block.name for block in parts(spec, Format("float32"))[1].blocks}
    assert ("ffn_in" in blocks) == (norms != 1)


def test_falcons_that_are_not_known_are_refused() -> None:
    for keys in ({"alibi": True}, {"parallel_attn": False}, {"new_decoder_architecture": False,
                                                             "num_ln_in_parallel_attn": 2}):  # fmt: skip
        with pytest.raises(UnsupportedModel):
            spec_from_config(TINY["falcon"] | keys, "c")


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
    assert planned_types() == ("phimoe",) and not set(planned_types()) & set(model_types())


def test_gemma3_has_two_ropes_and_a_window_in_five_of_six_layers() -> None:
    keys = {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 24}
    spec = spec_from_config(TINY["gemma3_text"] | keys, "c")
    assert [layer.attention.window for layer in spec.layers] == [24, 24, 24, 24, 24, 0, 24]
    assert spec.layers[5].attention.rope == Rope(1e6, 256, "linear", (("factor", 8.0),))
    assert spec.layers[0].attention.rope == Rope(1e4, 256) and spec.layers[0].attention.qk_norm
    assert (spec.norm.offset, sources(spec)["0.norms", "q_norm"].added, spec.layers[0].norm_out) == (1.0, -1.0, True)
    for wrong in ({"attn_logit_softcapping": 50.0}, {"rope_parameters": {"rope_theta": 5.0}},
                  {"use_bidirectional_attention": True}):  # fmt: skip
        with pytest.raises(UnsupportedModel, match=next(iter(wrong))):
            spec_from_config(TINY["gemma3_text"] | wrong, "c")


def test_gemma3_with_pictures_is_its_text_model() -> None:
    text = TINY["gemma3_text"]
    spec, inner = spec_from_config(TINY["gemma3"] | {"torch_dtype": "bfloat16"}, "c"), spec_from_config(text, "c")
    assert (spec.layers, spec.dtype, inner.dtype) == (inner.layers, "bfloat16", "float32")
    assert sources(spec)["1.ffn", "up"].tensor == "language_model.model.layers.1.mlp.up_proj.weight"
    # The published 4B says no more than this.
    least = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    least |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = spec_from_config({"model_type": "gemma3", "text_config": least, "torch_dtype": "bfloat16"}, "c")
    assert (spec.vocab, spec.layers[0].attention.heads, spec.layers[0].attention.kv_heads) == (262208, 8, 4)
    assert weights(spec) == 3_880_263_168
    for wrong, says in ({"model_type": "qwen2"}, "not gemma3_text"), ({"final_logit_softcapping": 5.0}, "softcapping"):
        with pytest.raises(UnsupportedModel, match=rf"text_config\..*{says}"):
            spec_from_config({"model_type": "gemma3", "text_config": text | wrong}, "c")
    with pytest.raises(BrokenModel, match="text_config is missing"):
        spec_from_config({"model_type": "gemma3"}, "c")


def test_every_fourth_layer_of_smollm3_has_no_rope() -> None:
    spec = spec_from_config(TINY["smollm3"] | {"num_hidden_layers": 9}, "c")
    assert [i for i, layer in enumerate(spec.layers) if layer.attention.rope is None] == [3, 7]
    assert len({id(layer) for layer in spec.layers}) == 2
    for wrong in ([1, 1], [1, 1, 2], "111", [1, 1, None]):
        with pytest.raises(BrokenModel, match="no_rope_layers should be a list of 3 zeros and ones"):
            spec_from_config(TINY["smollm3"] | {"no_rope_layers": wrong}, "c")


def test_gpt_oss_has_gate_and_up_in_turns() -> None:
    spec = spec_from_config(TINY["gpt_oss"], "c")
    published, floats = sources(spec), stacked_sources(spec)
    assert floats is not None
    mlp = "model.layers.2.mlp.experts."
    for found, which, turned in ((published, "_blocks", False), (floats, "", True)):
        both = f"{mlp}gate_up_proj{which}"
        assert found["2.experts", "gate"] == TensorSource(both, 0, 0, True, step=2, turned=turned)
        assert found["2.experts", "up"] == TensorSource(both, 0, 1, True, step=2, turned=turned)
        assert found["2.experts", "down"] == TensorSource(f"{mlp}down_proj{which}", 1, 0, True, turned=turned)
        assert found["2.experts", "up_bias"] == TensorSource(f"{mlp}gate_up_proj_bias", 0, 1, True, step=2)
        assert found["2.norms", "experts_down_bias"] == TensorSource(f"{mlp}down_proj_bias", 0, 0, folded=5)
    rope = spec.layers[0].attention.rope
    assert rope is not None and (rope.theta, rope.kind, dict(rope.factors)["truncate"]) == (150_000.0, "yarn", 0.0)


# --- types that can only be planned --------------------------------------------------------------------------------

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "intermediate_size": 2880, "num_local_experts": 32, "vocab_size": 201088, "torch_dtype": "bfloat16",
}  # fmt: skip
PHIMOE: dict[str, Any] = {
    "model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 6400, "vocab_size": 32064, "attention_bias": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("config", [PHIMOE], ids=lambda config: str(config["model_type"]))
def test_a_planned_type_is_refused_but_to_plan(config: dict[str, Any]) -> None:
    says = f"c: model_type {config['model_type']} can be planned and does not run yet: there are no kernels for "
    with pytest.raises(UnsupportedModel, match=says):
        spec_from_config(config, "c")
    spec = spec_from_config(config, "c", to_plan=True)
    assert spec.cannot_run and codec.from_json(ModelSpec, json.loads(json.dumps(codec.to_json(spec)))) == spec
    with pytest.raises(UnsupportedModel, match=f"the plan: model_type {config['model_type']} can be planned"):
        sources(spec)
    with pytest.raises(BrokenModel, match="num_experts_per_tok should be from 1 to"):
        spec_from_config(config | {"num_experts_per_tok": 4097}, "c", to_plan=True)


def test_a_type_that_runs_can_run_where_it_is_planned() -> None:
    config = BY_NAME["Llama-3.1-8B"]
    assert spec_from_config(config, "c", to_plan=True) == spec_from_config(config, "c")
    assert not spec_from_config(config, "c").cannot_run
    with pytest.raises(UnsupportedModel, match="model_type 'planned' is not one of falcon"):
        spec_from_config(config | {"model_type": "planned"}, "c", to_plan=True)


def test_gpt_oss_by_hand() -> None:
    """Every number of its checkpoint: 20,914,757,184 in all; a token goes to 4 of 32 experts."""
    spec = spec_from_config(GPT_OSS, "c")
    d, layers, vocab = 2880, 24, 201088
    attention = d * (64 + 2 * 8) * 64 + (64 + 2 * 8) * 64 + 64 * 64 * d + d + 64  # q, k, v and o with biases, sinks
    expert = 3 * d * d + 2 * d + d  # gate, up and down with biases
    layer = attention + 32 * expert + 32 * d + 32 + 2 * d  # the router with its bias, two norms
    assert weights(spec) == layers * layer + 2 * vocab * d + d == 20_914_757_184
    assert [layer.attention.window for layer in spec.layers[:3]] == [128, 0, 128]
    assert (spec.layers[0].attention.kv_heads, spec.layers[0].attention.head_dim, spec.layers[0].active) == (8, 64, 4)
    own = {part.key: part for part in parts(spec, Format("int4", 64))}
    assert own["0.norms"].block("experts_down_bias").cols == 32 * d and own["0.norms"].block("sinks").cols == 64
    assert own["0.experts"].has("gate_bias") and own["0.router"].has("bias")


def test_phimoe_has_layer_norms_and_biases() -> None:
    spec = spec_from_config(PHIMOE, "c", to_plan=True)
    assert spec.norm.has_bias and spec.layers[0].attention.out_bias and spec.layers[0].active == 2
    assert weights(spec) == pytest.approx(41.87e9, rel=1e-3)  # without the head's bias
