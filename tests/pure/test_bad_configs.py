"""A bad config.json gives one clear line: what is wrong, where, and for what is not supported, what would be."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.models import sources, spec_from_config, stacked_sources, switches
from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.parts import parts
from tests.pure.real_models import BY_NAME, LLAMA3_ROPE, PHI3_LONGROPE, REAL, TINY

LLAMA = TINY["llama"]
YARN = {"rope_type": "yarn", "factor": 4.0}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "80"}, "hidden_size should be a whole number, not '80'"),
    ({"hidden_size": 80.0}, "hidden_size should be a whole number, not 80.0"),
    ({"hidden_size": True}, "hidden_size should be a whole number, not True"),
    ({"hidden_size": None}, "hidden_size should be a whole number, not None"),
    ({"hidden_size": 10**5000}, "hidden_size should be from 1 to 1048576, not an integer of"),
    ({"vocab_size": [10**5000]}, "vocab_size should be a whole number, not a list"),
    ({"num_hidden_layers": 0}, "num_hidden_layers should be from 1 to 512, not 0"),
    ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers should be from 1 to 512"),
    ({"num_attention_heads": -4}, "num_attention_heads should be from 1"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads 3 should divide hidden_size 80"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 should divide num_attention_heads 4"),
    ({"head_dim": 0}, "head_dim should be from 1"),
    ({"head_dim": 15}, "head_dim 15 gives 15 rotated dimensions"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps should be a finite number, not nan"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps should be a finite number, not inf"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps should be a number"),
    ({"rope_theta": 10**400}, "rope_theta should be from"),
    ({"rope_theta": -1.0}, "rope_theta should be from"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be true or false"),
    ({"hidden_act": 7}, "hidden_act should be a string"),
    ({"dtype": 16}, "dtype should be a string"),
    ({"rope_scaling": "linear"}, "rope_scaling should be a JSON object"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type should be a string"),
    ({"rope_scaling": YARN | {"mscale": math.nan, "mscale_all_dim": 1.0}}, "rope_scaling.mscale should be a finite"),
    ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "low_freq_factor 1 should be less than"),
    ({"rope_scaling": PHI3_LONGROPE}, "short_factor should be a list of 10 numbers"),
    ({"rope_scaling": PHI3_LONGROPE | {"short_factor": [1.0] * 9 + ["x"]}}, r"short_factor\[9\] should be a number"),
    ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters.full_attention is missing"),
]  # fmt: skip
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not one of falcon, gemma2, gemma3, gemma3_text, glm4_moe"),
    ({"model_type": "qwen3_next"}, "qwen3_next are not run: most of its layers have a gated delta rule instead of"),
    ({"model_type": "deepseek_v3"}, "models of type deepseek_v3 are not run: its attention is latent"),
    ({"model_type": "../x"}, "is not one of falcon, gemma2"),
    ({"model_type": "hf"}, "is not one of falcon, gemma2"),
    ({"model_type": "codec"}, "is not one of falcon, gemma2"),
    ({"model_type": "__init__"}, "is not one of falcon, gemma2"),
    ({"model_type": ""}, "is not one of falcon, gemma2"),
    ({"model_type": "x" * 10_000}, "is not one of falcon, gemma2"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not one of silu"),
    ({"rope_scaling": {"type": "proportional"}}, "rope_scaling.type 'proportional' is not one of default, linear"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn' is not one of float32"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "line"), BROKEN)
def test_a_broken_config_names_key_and_file(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(BrokenModel, match=line) as caught:
        spec_from_config(LLAMA | keys, "there/config.json")
    assert caught.value.message.startswith("there/config.json") and "\n" not in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("keys", "line"), UNSUPPORTED)
def test_an_unsupported_config_says_what_would_do(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedModel, match=line) as caught:
        spec_from_config(LLAMA | keys, "there/config.json")
    assert caught.value.message.startswith("there/config.json") and "\n" not in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("key", sorted(LLAMA.keys() - {"num_key_value_heads"}))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(BrokenModel, match=f"there/config.json: {key} is missing"):
        spec_from_config({k: v for k, v in LLAMA.items() if k != key}, "there/config.json")


@pytest.mark.parametrize("config", [None, [], "llama", 3, {}, {"model_type": None}, {"model_type": ["llama"]}])
def test_what_is_no_config_at_all(config: Any) -> None:
    with pytest.raises(BrokenModel, match=r"config\.json"):
        spec_from_config(config, "config.json")


def test_gemma_and_phi_refuse_what_they_do_not_run() -> None:
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        spec_from_config(TINY["gemma2"] | {"use_bidirectional_attention": True}, "c")
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        spec_from_config(TINY["gemma2"] | {"layer_types": ["chunked_attention"] * 3}, "c")
    with pytest.raises(UnsupportedModel, match="is not one of default, longrope"):
        spec_from_config(TINY["phi3"] | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "c")


# --- experts -------------------------------------------------------------------------------------------------------


def test_more_experts_than_can_be_planned_are_refused() -> None:
    """In all layers: the fuzzer found 9 layers of 4096 that took over 5 s."""
    config = TINY["qwen3_moe"] | {"num_experts": 4096, "num_hidden_layers": 9}
    with pytest.raises(UnsupportedModel, match="36864 experts; at most 32768 can be planned"):
        spec_from_config(config, "c")


COUNTS = {
    "glm4_moe": "n_routed_experts",
    "mixtral": "num_local_experts",
    "olmoe": "num_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
WIDTHS = {"mixtral": "intermediate_size", "olmoe": "intermediate_size"}


@pytest.mark.parametrize("model_type", COUNTS)
@pytest.mark.parametrize(
    ("value", "line"),
    [
        (0, "should be from 1 to 4096, not 0"),
        (-8, "should be from 1 to 4096, not -8"),
        (4097, "should be from 1 to 4096, not 4097"),
        (10**9, "should be from 1 to 4096, not 1000000000"),
        (10**4000, "should be from 1 to 4096, not an integer of"),
        ("8", "should be a whole number, not '8'"),
        (8.0, "should be a whole number, not 8.0"),
        (True, "should be a whole number, not True"),
        (None, "should be a whole number, not None"),
        ([8], "should be a whole number, not"),
        (math.nan, "should be a finite number, not nan"),
    ],
)
def test_a_count_of_experts_that_is_none(model_type: str, value: Any, line: str) -> None:
    refused_experts(model_type, {COUNTS[model_type]: value}, f"{COUNTS[model_type]} {line}")


@pytest.mark.parametrize("model_type", COUNTS)
@pytest.mark.parametrize(
    ("value", "line"),
    [
        (0, "should be from 1 to {}, not 0"),
        (-1, "should be from 1 to {}, not -1"),
        (10, "should be from 1 to {}, not 10"),
        (10**400, "should be from 1 to {}, not an integer of"),
        ("2", "should be a whole number, not '2'"),
        (None, "should be a whole number, not None"),
        (math.inf, "should be a finite number, not inf"),
    ],
)
def test_more_active_than_there_are(model_type: str, value: Any, line: str) -> None:
    config = TINY[model_type]
    line = f"num_experts_per_tok {line.format(config[COUNTS[model_type]])}"
    refused_experts(model_type, {"num_experts_per_tok": value}, line)


@pytest.mark.parametrize("model_type", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**40, "44", None, 44.0, math.nan])
def test_experts_of_no_width(model_type: str, value: Any) -> None:
    key = WIDTHS.get(model_type, "moe_intermediate_size")
    refused_experts(model_type, {key: value}, f"{key} should be ")


BAD_EXPERTS: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe", {"n_group": 2}, "n_group 2 should divide n_routed_experts 9"),
    ("glm4_moe", {"n_group": 9}, "n_group should be from 1 to 4, not 9"),
    ("glm4_moe", {"n_group": 0}, "n_group should be from 1 to 4, not 0"),
    ("glm4_moe", {"n_group": None}, "n_group should be a whole number"),
    ("glm4_moe", {"n_group": 3, "topk_group": 4}, "topk_group should be from 1 to 3, not 4"),
    ("glm4_moe", {"n_group": 3, "topk_group": 0}, "topk_group should be from 1 to 3, not 0"),
    ("glm4_moe", {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 4}, "per_tok should be from 1 to 3, not 4"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts should be from 0 to 64"),
    ("glm4_moe", {"n_shared_experts": 65}, "n_shared_experts should be from 0 to 64"),
    ("glm4_moe", {"n_shared_experts": 64, "moe_intermediate_size": 2**20}, "moe_intermediate_size should be from 1 to"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace should be from 0 to 512"),
    ("glm4_moe", {"first_k_dense_replace": 10**9}, "first_k_dense_replace should be from 0 to 512"),
    ("glm4_moe", {"first_k_dense_replace": True}, "first_k_dense_replace should be a whole number"),
    ("glm4_moe", {"routed_scaling_factor": -2.5}, "routed_scaling_factor should be from 1e-12 to 1e[+]12, not -2.5"),
    ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor should be from"),
    ("glm4_moe", {"routed_scaling_factor": math.nan}, "routed_scaling_factor should be a finite number, not nan"),
    ("glm4_moe", {"routed_scaling_factor": "1"}, "routed_scaling_factor should be a number"),
    ("glm4_moe", {"norm_topk_prob": 1}, "norm_topk_prob should be true or false"),
    ("glm4_moe", {"use_qk_norm": "no"}, "use_qk_norm should be true or false"),
    ("glm4_moe", {"partial_rotary_factor": 0}, "partial_rotary_factor should be from"),
    ("glm4_moe", {"partial_rotary_factor": 0.05}, "head_dim 20 gives 1 rotated dimensions"),
    ("olmoe", {"clip_qkv": "8"}, "clip_qkv is set"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size should be from 1"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size should be a whole"),
    ("qwen2_moe", {"norm_topk_prob": None}, "norm_topk_prob should be true or false"),
    ("qwen2_moe", {"qkv_bias": "true"}, "qkv_bias should be true or false"),
    ("qwen2_moe", {"max_window_layers": 10**6}, "max_window_layers should be from 0 to 512"),
    *[
        (model_type, {"mlp_only_layers": value}, "mlp_only_layers should be a list of up to 512 layers, not ")
        for model_type in ("qwen2_moe", "qwen3_moe")
        for value in (["0", "1"], [True], [0.0], [None], [[1]], [math.nan], {"0": 1}, {}, 0, 3, "", "01", False,
                      ["x" * 10_000], [10**5000, "1"], list(range(513)))
    ],
    *[
        (model_type, {"decoder_sparse_step": value}, "decoder_sparse_step should be ")
        for model_type in ("qwen2_moe", "qwen3_moe")
        for value in (0, -1, None, "1", 1.5, True, 2**40)
    ],
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "keys", "line"), BAD_EXPERTS)
def test_bad_experts(model_type: str, keys: dict[str, Any], line: str) -> None:
    refused_experts(model_type, keys, line)


def refused_experts(model_type: str, keys: dict[str, Any], line: str) -> None:
    with pytest.raises((BrokenModel, UnsupportedModel), match=line) as caught:
        spec_from_config(TINY[model_type] | keys, "there/config.json")
    assert caught.value.message.startswith("there/config.json: ") and "\n" not in caught.value.message
    assert len(caught.value.message) < 200


def test_clipping_is_not_run() -> None:
    for value in (8.0, 0, False):
        with pytest.raises(UnsupportedModel, match="clip_qkv is set; penstock runs models without it"):
            spec_from_config(TINY["olmoe"] | {"clip_qkv": value}, "c")
    assert spec_from_config(TINY["olmoe"] | {"clip_qkv": None}, "c").is_routed


@pytest.mark.parametrize("model_type", COUNTS)
def test_a_missing_width_of_experts_is_named(model_type: str) -> None:
    key = WIDTHS.get(model_type, "moe_intermediate_size")
    with pytest.raises(BrokenModel, match=f"there/config.json: {key} is missing"):
        spec_from_config({k: v for k, v in TINY[model_type].items() if k != key}, "there/config.json")


LARGE = {
    "qwen3-235b-a22b": BY_NAME["Qwen3-30B-A3B"]
    | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "moe_intermediate_size": 1536},
    "the most layers and experts": BY_NAME["Qwen1.5-MoE-A2.7B"]
    | {"num_hidden_layers": 512, "num_experts": 64, "num_experts_per_tok": 64, "vocab_size": 2**22},
    "the longest list": TINY["qwen3_moe"] | {"num_hidden_layers": 512, "mlp_only_layers": list(range(511, 1023))},
}


@pytest.mark.parametrize("name", LARGE)
def test_the_largest_are_read(name: str) -> None:
    spec = spec_from_config(LARGE[name], "config.json")
    for found in (sources(spec), stacked_sources(spec)):
        assert found is not None and len(found) == sum(len(part.blocks) for part in parts(spec, Format("int4", 64)))
    assert sum(part.weights_of(0, part.granules) for part in parts(spec, Format("int4", 64))) > 1e6
    switches(LARGE[name], "config.json")


def test_reading_a_config_makes_no_name_for_each_expert() -> None:
    """Four experts or 64 in each of 512 layers: as many calls of Python functions, not 30,720 times some more."""
    config = LARGE["the most layers and experts"]
    _, few, many = (calls_of_reading(config | {"num_experts": n, "num_experts_per_tok": n}) for n in (4, 4, 64))
    assert abs(many - few) < 1000  # what a collection of garbage calls meanwhile is not ours


def calls_of_reading(config: dict[str, Any]) -> int:
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        spec = spec_from_config(config, "config.json")
        sources(spec), stacked_sources(spec), parts(spec, Format("int4", 64)), switches(config, "config.json")
    finally:
        sys.setprofile(before)
    return calls


# --- fuzz ----------------------------------------------------------------------------------------------------------

# Keys that any of the types reads: what the real configs have, and what none of them sets.
KEYS = sorted(
    {key for real in REAL for key in real.config}
    | {"rope_parameters", "partial_rotary_factor", "layer_types", "dtype", "enable_bias", "quantization_config"}
    | {"layer_norm_elementwise_affine", "use_bidirectional_attention", "qkv_bias"}
)
ROPE_KEYS = sorted(set(LLAMA3_ROPE) | set(PHI3_LONGROPE) | {"rope_theta", "attention_factor", "beta_fast", "mscale"})

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 64)
    | st.sampled_from([0, -1, 2**31, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "longrope", "llama3", "linear", "su", "full_attention", "sliding_attention", "relu"])
)
values = st.recursive(
    scalars | st.dictionaries(st.sampled_from(ROPE_KEYS), scalars, max_size=6),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
bases = st.sampled_from([*TINY.values(), *BY_NAME.values()])
kinds = st.sampled_from(["linear", "llama3", "yarn", "longrope"])


@pytest.mark.fuzz
@given(bases, st.dictionaries(st.sampled_from(KEYS), values, max_size=3), st.sets(st.sampled_from(KEYS), max_size=2))
def test_no_config_does_worse_than_a_clear_error(
    base: dict[str, Any], changes: dict[str, Any], dropped: set[str]
) -> None:
    check({key: value for key, value in (base | changes).items() if key not in dropped})


@pytest.mark.fuzz
@given(bases, kinds, st.dictionaries(st.sampled_from(ROPE_KEYS), scalars, max_size=3))
def test_no_rope_does_worse_than_a_clear_error(base: dict[str, Any], kind: str, changes: dict[str, Any]) -> None:
    half = 48 if base["hidden_size"] == 3072 else 10
    sound = LLAMA3_ROPE | {"rope_type": kind, "short_factor": [1.0] * half, "long_factor": [2.0] * half}
    check(base | {"rope_scaling": sound | changes})


def check(mutated: dict[str, Any]) -> None:
    try:
        spec = spec_from_config(mutated, "config.json")
    except PenstockError as error:
        assert "config.json" in error.message and len(error.message) < 400
        return
    # What is accepted can be cut, named and written down.
    blocks = {(part.key, block.name) for part in parts(spec, Format("int4", 64)) for block in part.blocks}
    assert set(sources(spec)) == blocks
    assert set(stacked_sources(spec) or blocks) == blocks
    json.dumps(codec.to_json(spec), allow_nan=False)
