"""A bad config.json gives one clear line: what is wrong, where, and for what is not supported, what would be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.models import sources, spec_from_config
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
    ({"hidden_size": 10**5000}, "hidden_size should be from 1 to 16777216, not an integer of"),
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
    ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not one of gemma2, glm4_moe, llama, mistral, mixtral"),
    ({"model_type": "../x"}, "is not one of gemma2"),
    ({"model_type": "hf"}, "is not one of gemma2"),
    ({"model_type": "codec"}, "is not one of gemma2"),
    ({"model_type": "__init__"}, "is not one of gemma2"),
    ({"model_type": ""}, "is not one of gemma2"),
    ({"model_type": "x" * 10_000}, "is not one of gemma2"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not one of silu"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type 'dynamic' is not one of default, linear"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn' is not one of float32"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
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


# --- fuzz ----------------------------------------------------------------------------------------------------------

# Keys that any of the types reads: what the real configs have, and what none of them sets.
KEYS = sorted(
    {key for real in REAL for key in real.config}
    | {"rope_parameters", "partial_rotary_factor", "layer_types", "dtype", "enable_bias", "quantization_config"}
    | {"layer_norm_elementwise_affine", "use_bidirectional_attention"}
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
    json.dumps(codec.to_json(spec), allow_nan=False)
