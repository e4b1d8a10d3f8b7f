"""Folders that others quantised (GPTQ, AWQ, compressed-tensors, float8): the numbers and the logits of what they
dequantise to; and one line for each that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import describe
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.own import own_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.verify import verify
from tests.cpu import quantised
from tests.cpu.commands import MACHINE
from tests.cpu.oracle import VARIANTS, Oracle, Variant, prompt, save
from tests.cpu.quantised import Quantise, awq, compressed, float8, gptq, integers, packed

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

# Widths in whole groups of 32, and nothing in whole groups of 128.
LLAMA = Variant(
    "llama-quantised",
    "llama",
    next(v for v in VARIANTS if v.name == "llama-gqa").keys
    | {"hidden_size": 160, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 352},
)
WIDE = replace(
    LLAMA,
    keys=LLAMA.keys
    | {
        "hidden_size": 256,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 384,
    },
)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[Variant, Quantise, dict[str, Any], str]] = {
    "gptq": (LLAMA, gptq(), GPTQ, "uint4_g32"),
    "gptq-symmetric-64": (WIDE, gptq(group=64, symmetric=True), GPTQ | {"group_size": 64, "sym": True}, "uint4_g64"),
    "gptq-v2-128": (
        WIDE, gptq(group=128, v2=True), GPTQ | {"group_size": 128, "checkpoint_format": "gptq_v2"}, "uint4_g128",
    ),
    "gptq-rows": (LLAMA, gptq(group=-1), GPTQ | {"group_size": -1}, "uint4_g128"),
    "gptq-last-group": (LLAMA, gptq(group=128), GPTQ | {"group_size": 128}, "uint4_g128"),
    "gptq-desc-act": (LLAMA, gptq(), GPTQ | {"desc_act": True, "static_groups": True}, "uint4_g32"),
    "gptq-no-order": (LLAMA, gptq(order="none"), GPTQ, "uint4_g32"),
    "gptq-8": (LLAMA, gptq(bits=8), GPTQ | {"bits": 8}, "uint8_g32"),
    "gptq-8-rows": (WIDE, gptq(bits=8, group=-1, symmetric=True), GPTQ | {"bits": 8, "group_size": -1}, "uint8_g128"),
    "awq": (LLAMA, awq(), AWQ, "uint4_g32"),
    "awq-128": (WIDE, awq(128), AWQ | {"group_size": 128}, "uint4_g128"),
    "packed": (LLAMA, packed(), compressed(INT4), "uint4_g32"),
    "packed-zeros": (LLAMA, packed(symmetric=False), compressed(INT4 | {"symmetric": False}), "uint4_g32"),
    "packed-zeros-int8": (
        WIDE, packed(group=128, symmetric=False, bytes_=True, dtype=torch.float16),
        compressed(INT4 | {"symmetric": False, "group_size": 128}), "uint4_g128",
    ),
    "packed-8-rows": (
        LLAMA, packed(bits=8, group=-1), compressed({"num_bits": 8, "type": "int", "strategy": "channel"}),
        "uint8_g128",
    ),
    "int8": (
        LLAMA, integers(), compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        "uint8_g128",
    ),
    "int8-matrix": (
        LLAMA, integers(False), compressed({"num_bits": 8, "type": "int", "strategy": "tensor"}, "int-quantized"),
        "uint8_g128",
    ),
    "float8-blocks": (
        replace(WIDE, keys=WIDE.keys | {"hidden_size": 288}), float8(128, 128, "weight_scale_inv"),
        FP8 | {"weight_block_size": [128, 128]}, "float8",
    ),
    "float8-rows": (LLAMA, float8(1), {"quant_method": "fbgemm_fp8"}, "float8"),
    "float8-matrix": (LLAMA, float8(scalar=True), FP8 | {"activation_scheme": "static"}, "float8"),
    "float8-compressed": (
        LLAMA, float8(1), compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        "float8",
    ),
}  # fmt: skip


def folder_of(tmp_path: Path, variant: Variant, quantise: Quantise, config: dict[str, Any], **how: Any) -> Path:
    save(variant, tmp_path / "hf")
    quantised.write(tmp_path / "hf", tmp_path / "q", quantise, config, **how)
    return tmp_path / "q"


def same_answers(kept: Path, wide: Path, variant: Variant) -> None:
    """The same logits as transformers has of the numbers in float32, and as our own; the same tokens."""
    ids, oracle = prompt(variant, 40), Oracle(wide)
    ask, exact = Ask(context=128, score=True, kv="float32"), Loading(machine=MACHINE, exact=True)
    with closing(Engine.load(kept, ask, exact)) as one:
        np.testing.assert_allclose(one.logits(ids), oracle.logits(ids), atol=1e-3)
        tokens = one.generate_ids(ids, GREEDY)
    with closing(Engine.load(pack(wide, wide.with_name("wide-packed")), ask, exact)) as other:
        assert tokens == other.generate_ids(ids, GREEDY)


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_folder_says_what_its_numbers_say(name: str, tmp_path: Path) -> None:
    variant, quantise, config, kind = CASES[name]
    folder = folder_of(tmp_path, variant, quantise, config)
    kept = pack(folder, tmp_path / "kept")
    packed_model = open_packed(kept)
    assert packed_model.weights.name == f"{kind}+float32" == own_format(folder).name
    assert {b.format.name for b in packed_model.parts["0.ffn"].blocks} == {kind}
    verify(kept)
    same_answers(kept, tmp_path / "q-wide", variant)


def test_experts_and_matrices_that_were_left(tmp_path: Path) -> None:
    """A model with experts, of which no router and not all attention was quantised."""
    keys = next(v for v in VARIANTS if v.name.startswith("qwen3-moe")).keys
    keys = keys | {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "moe_intermediate_size": 96,
                   "intermediate_size": 96}  # fmt: skip
    variant = Variant("qwen3-moe-quantised", "qwen3_moe", keys)
    left = ("o_proj", "layers.1.self_attn")
    config = AWQ | {"modules_to_not_convert": ["mlp.gate.", *left]}
    folder = folder_of(tmp_path, variant, awq(), config, skip=left)
    kept = pack(folder, tmp_path / "kept")
    model = open_packed(kept)
    assert {b.name: b.format.name for b in model.parts["0.attn"].blocks if b.tiled} == {
        "q": "uint4_g32", "k": "uint4_g32", "v": "uint4_g32", "o": "float32",
    }  # fmt: skip
    assert model.parts["1.attn"].block("q").format.name == "float32"
    assert describe(folder)[1] == own_format(folder) == model.weights
    (folder / "model.safetensors").unlink()
    assert describe(folder / "config.json")[1] == model.weights
    same_answers(kept, tmp_path / "q-wide", variant)
