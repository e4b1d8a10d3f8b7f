"""Tensors that a model has no use for: refused where config.json must be wrong, named where not, silent where known."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BrokenModel
from penstock.models import model_types
from penstock.store.index import INDEX
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.checkpoints import (
    EXPERTS,
    LLAMA,
    OPT,
    PHI3,
    Array,
    random_tensors,
    save_checkpoint,
    save_tensors,
    save_tokenizer,
)
from tests.cpu.commands import Call, here, refused

TIED = {**LLAMA, "tie_word_embeddings": True}
CONFIGS = {
    **{name: {**LLAMA, "model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3")},
    "gemma2": {**LLAMA, "model_type": "gemma2", "query_pre_attn_scalar": 12},
    "falcon": {**LLAMA, "model_type": "falcon", "num_kv_heads": 2, "new_decoder_architecture": True},
    "nemotron": {**LLAMA, "model_type": "nemotron", "hidden_act": "relu2"},
    **{name: {**LLAMA, "model_type": name} for name in ("gemma3_text", "smollm3", "starcoder2", "seed_oss", "olmo2")},
    "gemma3": {
        "model_type": "gemma3",
        "tie_word_embeddings": False,
        "text_config": {**LLAMA, "model_type": "gemma3_text"},
    },
    "stablelm": {**LLAMA, "model_type": "stablelm", "partial_rotary_factor": 0.5},
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2},
    "phi3": PHI3,
    "opt": OPT,
    **EXPERTS,
}


def deep(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model with so many layers."""
    inner = config.get("text_config")
    return {**config, **({"num_hidden_layers": layers} if inner is None else {"text_config": deep(inner, layers)})}


LAYER = "model.layers.0."
ATTENTION, FFN = LAYER + "self_attn.", LAYER + "mlp."


def checkpoint(folder: Path, config: dict[str, Any], more: dict[str, Array] | None = None) -> Path:
    save_checkpoint(folder / "src", config, {**random_tensors(config), **(more or {})})
    return folder / "src"


def packed(folder: Path, config: dict[str, Any], more: dict[str, Array] | None = None) -> list[str]:
    """Packs it. Returns the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pack(checkpoint(folder, config, more), folder / "dst")
    return [str(each.message) for each in told]


def not_packed(folder: Path, config: dict[str, Any], more: dict[str, Array] | None = None) -> str:
    """Asserts one line that names the file, and nothing left. Returns the line."""
    with pytest.raises(BrokenModel) as caught:
        pack(checkpoint(folder, config, more), folder / "dst")
    message = caught.value.message
    assert "\n" not in message and str(folder / "src" / "model.safetensors") in message
    assert sorted(path.name for path in folder.iterdir()) == ["src"]
    return message


def vector(length: int = 72) -> Array:
    return np.ones(length, np.float32)


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_types())
def test_a_config_of_fewer_layers(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    message = not_packed(tmp_path, deep(config, 3), random_tensors(deep(config, 4)))
    assert ("h.3." if name == "falcon" else "layers.3.") in message and message.endswith(
        "is of layer 3, counted from 0; config.json says num_hidden_layers 3"
    )


COUNTS = {"mixtral": "num_local_experts", "glm4_moe": "n_routed_experts"}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_config_of_fewer_experts(name: str, tmp_path: Path) -> None:
    """Their routers are shorter; where only the router was cut, there are experts too many."""
    config, key = EXPERTS[name], COUNTS.get(name, "num_experts")
    count, groups = config[key], {"n_group": 1, "topk_group": 1}
    more = random_tensors({**config, **groups, key: count + 3})
    message = not_packed(tmp_path / "whole", config, more)
    assert f"has shape [{count + 3}" in message and message.endswith(f": it says {key} {count}")
    kept = {tensor: values for tensor, values in more.items() if f"experts.{count}." in tensor}
    message = not_packed(tmp_path / "router", config, kept)
    assert f"experts.{count}." in message
    assert message.endswith(f"is of expert {count}, counted from 0; config.json says {key} {count}")


def test_a_config_that_counts_experts_otherwise(tmp_path: Path) -> None:
    config = {key: value for key, value in EXPERTS["mixtral"].items() if key != "num_local_experts"}  # 8 by default
    extra = {"model.layers.0.block_sparse_moe.experts.8.w1.weight": np.ones((44, 72), np.float32)}
    assert not_packed(tmp_path, config, extra).endswith("config.json leaves out num_local_experts")
    also = {**EXPERTS["qwen3_moe"], "num_local_experts": 5}
    del also["num_experts"]
    extra = {"layers.1.mlp.experts.99999999999999999999.x": vector()}
    assert not_packed(tmp_path / "also", also, extra).endswith("config.json says num_local_experts 5")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (FFN + "experts.0.up_proj.bias", "by its config.json a qwen2_moe model has none such"),
        (FFN + "experts.4.extra.weight", "by its config.json a qwen2_moe model has none such"),
        (FFN + "experts.x.up_proj.weight", "by its config.json a qwen2_moe model has none such"),
        (FFN + "experts.gate_up_proj", "by its config.json a qwen2_moe model has none such"),
        (FFN + "gate.e_score_correction_bias", "by its config.json a qwen2_moe model has none such"),
        (FFN + "shared_experts.up_proj.weight", "by its config.json a qwen2_moe model has none such"),
        (FFN + "up_proj.weight", "by its config.json a qwen2_moe model has none such"),
    ],
)
def test_what_is_beside_the_experts(name: str, says: str, tmp_path: Path) -> None:
    assert f"tensor '{name}' would not be used: {says}" in not_packed(tmp_path, EXPERTS["qwen2_moe"], {name: vector()})


def test_experts_in_a_layer_that_should_be_dense(tmp_path: Path) -> None:
    config = {**EXPERTS["qwen2_moe"], "mlp_only_layers": [1]}
    extra = {"model.layers.1.mlp.experts.0.up_proj.weight": np.ones((44, 72), np.float32)}
    assert "a qwen2_moe model has none such" in not_packed(tmp_path, config, extra)


@pytest.mark.parametrize(
    ("ahead", "layers", "message"),
    [(1, 3, None), (2, 4, None), (1, 4, "layer 3,"), (0, 3, "layer 2,"), (None, 3, "layer 2,"), (True, 3, "layer 2,"),
     ("1", 3, "layer 2,"), (-1, 3, "layer 2,"), (1.0, 3, "layer 2,")],
)  # fmt: skip
def test_layers_that_guess_tokens_ahead(ahead: Any, layers: int, message: str | None, tmp_path: Path) -> None:
    """GLM's checkpoints have one behind the last layer. It is not used, and that is said."""
    config = {**EXPERTS["glm4_moe"], "num_nextn_predict_layers": ahead}
    more = random_tensors({**config, "num_hidden_layers": layers}) | {"model.layers.2.eh_proj.weight": vector()}
    if message is not None:
        assert message in not_packed(tmp_path, config, more)
        return
    (told,) = packed(tmp_path, config, more)
    assert "tensors are not used: 'model.layers.2." in told
    assert len(open_packed(tmp_path / "dst").spec.layers) == 2


def test_a_run_of_it(call: Call, tmp_path: Path) -> None:
    """Gibberish, and exit code 0, it was."""
    config = {**LLAMA, "vocab_size": 300}
    source = checkpoint(tmp_path, config, random_tensors({**config, "num_hidden_layers": 5}))
    save_tokenizer(source, config)
    refused(call("run", source, "hi", "--cache", tmp_path / "cache"), "num_hidden_layers 2", "BrokenModel")
    assert not list(tmp_path.glob("cache/models/*"))


@pytest.mark.parametrize("name", ["layers.2.mlp.up_proj.weight", "model.layers.99999999999999999999.x"])
def test_layers_by_other_spellings(name: str, tmp_path: Path) -> None:
    assert "num_hidden_layers 2" in not_packed(tmp_path, LLAMA, {name: vector()})


def test_what_only_looks_like_a_layer(tmp_path: Path) -> None:
    names = {"model.layers.x.weight": vector(), "model.layers.²": vector(), "vision.layers.7.weight": vector()}
    assert "3 tensors are not used" in packed(tmp_path, LLAMA, names)[0]


def test_weights_of_a_shard_that_no_index_lists(tmp_path: Path) -> None:
    """Whoever loads the shard finds them."""
    save_checkpoint(tmp_path / "src", LLAMA)
    listed = {name: "model.safetensors" for name in random_tensors(LLAMA)}
    save_tensors(tmp_path / "src" / "model.safetensors", random_tensors({**LLAMA, "num_hidden_layers": 3}))
    (tmp_path / "src" / "model.safetensors").rename(tmp_path / "src" / "model-1.safetensors")
    (tmp_path / "src" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(listed, "model-1.safetensors")}))
    with pytest.raises(BrokenModel, match="is of layer 2"):
        pack(tmp_path / "src", tmp_path / "dst")


# --- biases and norms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        (LLAMA, ATTENTION + "q_proj.bias", "config.json leaves out attention_bias"),
        ({**LLAMA, "attention_bias": False}, ATTENTION + "o_proj.bias", "config.json says attention_bias false"),
        ({**LLAMA, "mlp_bias": False}, FFN + "down_proj.bias", "config.json says mlp_bias false"),
        (CONFIGS["qwen3"], ATTENTION + "v_proj.bias", "config.json leaves out attention_bias"),
        (CONFIGS["gemma2"], ATTENTION + "k_proj.bias", "config.json leaves out attention_bias"),
        ({**OPT, "enable_bias": False}, "model.decoder.layers.1.fc1.bias", "config.json says enable_bias false"),
        (
            {**OPT, "layer_norm_elementwise_affine": False},
            "model.decoder.layers.1.final_layer_norm.weight",
            "config.json says layer_norm_elementwise_affine false",
        ),
        (
            {**OPT, "_remove_final_layer_norm": True},
            "model.decoder.final_layer_norm.weight",
            "config.json says _remove_final_layer_norm true",
        ),
        # No flag of these types would use them: the config.json is another model's.
        (CONFIGS["qwen2"], ATTENTION + "o_proj.bias", "by its config.json a qwen2 model has none such"),
        (CONFIGS["mistral"], ATTENTION + "q_proj.bias", "by its config.json a mistral model has none such"),
        (LLAMA, ATTENTION + "q_norm.weight", "by its config.json a llama model has none such"),
        (LLAMA, LAYER + "pre_feedforward_layernorm.weight", "by its config.json a llama model has none such"),
        (LLAMA, LAYER + "block_sparse_moe.gate.weight", "by its config.json a llama model has none such"),
        (LLAMA, FFN + "gate_proj.lora_A.weight", "by its config.json a llama model has none such"),
        (LLAMA, LAYER + "input_layernorm.bias", "by its config.json a llama model has none such"),
        (LLAMA, "model.norm.bias", "by its config.json a llama model has none such"),
        (LLAMA, "lm_head.bias", "by its config.json a llama model has none such"),
        (LLAMA, "model.embed_tokens.bias", "by its config.json a llama model has none such"),
    ],
)  # fmt: skip
def test_what_would_change_results(config: dict[str, Any], name: str, says: str, tmp_path: Path) -> None:
    message = not_packed(tmp_path, config, {name: vector()})
    assert f"tensor '{name}' would not be used: {says}" in message


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TIED, {**OPT, "word_embed_proj_dim": 72}], ids=["llama", "opt"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_head_that_is_the_embedding(config: dict[str, Any], dtype: type, tmp_path: Path) -> None:
    """Tied, and there a second time: many published checkpoints are so."""
    tensors = random_tensors(config)
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors[name] = tensors[name].astype(np.float16).astype(np.float32)  # so that it is the same in either
    head = tensors[name].astype(dtype)
    assert packed(tmp_path, config, {name: tensors[name], "lm_head.weight": head}) == []


@pytest.mark.parametrize("where", [0, 7, -1])
def test_a_head_that_is_another(where: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not tie them then, whatever config.json says."""
    monkeypatch.setattr("penstock.store.unused._COMPARED_BYTES", 4096)  # so that several pieces are compared
    head = random_tensors(TIED)["model.embed_tokens.weight"].copy()
    head.reshape(-1)[where] += 1
    message = not_packed(tmp_path, TIED, {"lm_head.weight": head})
    assert "'lm_head.weight' would not be used: config.json says tie_word_embeddings true" in message


@pytest.mark.parametrize("head", [vector(), np.ones((203, 72), np.int8), np.ones((1, 0), np.float32)])
def test_a_head_that_is_none(head: Array, tmp_path: Path) -> None:
    assert "tie_word_embeddings" in not_packed(tmp_path, TIED, {"lm_head.weight": head})


# --- what is no harm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_types())
def test_what_is_known_is_not_spoken_of(name: str, tmp_path: Path) -> None:
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": vector(6),
        "layers.1.self_attn.rotary_emb.inv_freq": vector(6),
        "model.rotary_emb.inv_freq": vector(6),
        "model.decoder.version": vector(1),
    }
    assert packed(tmp_path, CONFIGS[name], more) == []


def test_others_are_named(tmp_path: Path) -> None:
    (told,) = packed(tmp_path, LLAMA, {"score.weight": vector()})
    assert told == f"{tmp_path / 'src'}: 1 tensor is not used: 'score.weight'"
    more = {f"vision_tower.{i}.\x1b[2Jbias\n": vector() for i in range(9)}
    (told,) = packed(tmp_path / "more", LLAMA, more)
    assert "9 tensors are not used" in told and told.endswith(" and 6 more") and told.isprintable()


def test_a_command_says_it_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = checkpoint(tmp_path, LLAMA, {"score.weight": vector()})
    done = here(capsys, "pack", source, tmp_path / "dst")
    assert done.code == 0
    assert f"penstock: {source}: 1 tensor is not used: 'score.weight'" in done.err.splitlines()


@given(names=st.dictionaries(st.text(max_size=40) | st.from_regex(r"(model\.)?layers\.\d*.*"), st.none(), max_size=4))
def test_any_names(names: dict[str, None], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packed or refused in one line, never anything else."""
    folder = tmp_path_factory.mktemp("names")
    save_checkpoint(folder / "src", LLAMA)
    more = {name: vector(3) for name in names if name != "__metadata__" and name not in random_tensors(LLAMA)}
    save_tensors(folder / "src" / "model.safetensors", {**random_tensors(LLAMA), **more})
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            pack(folder / "src", folder / "dst")
    except BrokenModel as error:
        assert "\n" not in error.message


def test_a_text_model_beside_pictures_has_two_kinds_of_names(tmp_path: Path) -> None:
    """`language_model.model.`, and as transformers has it in memory and some save it, `model.language_model.`."""
    config = {**CONFIGS["gemma3"], "tie_word_embeddings": True}
    tensors = random_tensors(config)
    other = {name.replace("language_model.model.", "model.language_model."): each for name, each in tensors.items()}
    assert tensors.keys().isdisjoint(other)
    sums = []
    for which, held in (("usual", tensors), ("other", other)):
        save_checkpoint(tmp_path / which, config, held)
        sums.append(open_packed(pack(tmp_path / which, tmp_path / f"{which} packed")).sums)
    assert sums[0] == sums[1]
    save_checkpoint(tmp_path / "deeper", deep(config, 1), other)
    with pytest.raises(BrokenModel, match=r"is of layer 1, counted from 0; config\.json says num_hidden"):
        pack(tmp_path / "deeper", tmp_path / "fewer")
