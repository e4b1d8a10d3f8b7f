"""Matrices of quantised folders that are held in float32, since their formats cannot be kept here (`spec/widened`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.serve.planning import describe
from penstock.store.own import own_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu.test_quantised import CASES, LLAMA, folder_of, same_answers


@pytest.mark.filterwarnings("ignore:.*held in float32")
@pytest.mark.parametrize("name", ["gptq-8", "awq-128", "packed-zeros", "int8", "float8-rows"])
def test_matrices_beside_floats_of_one_input_are_widened(name: str, tmp_path: Path) -> None:
    """k was left as it was, so q and v are float32 here, with the checkpoint's numbers."""
    variant, quantise, config, kind = CASES[name]
    key = "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    config = config | {key: ["lm_head", "re:.*k_proj"] if key == "ignore" else ["k_proj"]}
    if config["quant_method"] == "gptq":
        config = config | {"dynamic": {"-:.*k_proj": {}}}
    folder = folder_of(tmp_path, variant, quantise, config, skip=("k_proj",))
    model = open_packed(pack(folder, tmp_path / "kept"))
    assert {b.name: b.format.name for b in model.parts["1.attn"].blocks if b.tiled} == {
        "q": "float32", "k": "float32", "v": "float32", "o": kind,
    }  # fmt: skip
    assert describe(folder)[1] == own_format(folder) == model.weights
    (folder / "model.safetensors").unlink()
    assert describe(folder / "config.json")[1] == model.weights
    same_answers(tmp_path / "kept", tmp_path / "q-wide", variant)


_ODD_HEADS = {"head_dim": 20, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-8", "awq", "packed-zeros", "int8", "float8-matrix"])
def test_heads_that_end_within_a_group_have_an_output_in_float32(name: str, tmp_path: Path) -> None:
    _, quantise, config, kind = CASES[name]
    odd = replace(LLAMA, keys=LLAMA.keys | _ODD_HEADS)
    folder = folder_of(tmp_path, odd, quantise, config)
    ordered = name == "gptq-act-order"  # its granules are all heads: 160 columns
    told = pytest.warns(UserWarning, match="since heads end within a group of 32 columns")
    with nullcontext() if ordered else told:
        model = open_packed(pack(folder, tmp_path / "kept"))
    assert {b.name: b.format.name for b in model.parts["1.attn"].blocks if b.tiled} == {
        "q": kind, "k": kind, "v": kind, "o": kind if ordered else "float32",
    }  # fmt: skip
    assert describe(folder)[1] == own_format(folder) == model.weights
    same_answers(tmp_path / "kept", tmp_path / "q-wide", odd)
    (folder / "model.safetensors").unlink()
    assert describe(folder / "config.json")[1] == model.weights
