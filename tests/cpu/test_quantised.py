"""Folders that others quantised (GPTQ, AWQ, compressed-tensors, float8): the numbers and the logits of what they
dequantise to; and one line for each that is refused."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.kernels import cpu
from penstock.kernels.reference.blocks import widen_blocks
from penstock.models import spec_from_config
from penstock.models.hf.quantization import quantization_of
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import describe
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.blocks import encode_blocks
from penstock.store.checkpoint import Checkpoint
from penstock.store.own import own_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.verify import verify
from tests.cpu import quantised
from tests.cpu.commands import MACHINE
from tests.cpu.engines import streaming
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.quantised import Quantise, awq, compressed, float8, gptq, integers, packed
from tests.cpu.variants import VARIANTS, Variant

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
# Biases of q, k, v, gate and up, which an order of neurons moves too; the widths of heads and of the model differ.
BIASED = replace(
    WIDE,
    keys=WIDE.keys | {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8, "num_key_value_heads": 2},
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
    "gptq-act-order": (LLAMA, gptq(order="apart"), GPTQ | {"desc_act": True}, "uint4_g32"),
    "gptq-act-order-128": (
        WIDE, gptq(group=128, order="apart"), GPTQ | {"group_size": 128, "desc_act": True}, "uint4_g128",
    ),
    "gptq-act-order-8": (
        BIASED, gptq(bits=8, order="apart", v2=True),
        GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"}, "uint8_g32",
    ),
    "gptq-act-order-none": (LLAMA, gptq(), GPTQ | {"desc_act": True}, "uint4_g32"),
    "packed-act-order": (LLAMA, packed(apart=True), compressed(INT4 | {"actorder": "group"}), "uint4_g32"),
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
    assert {b.format.name for b in packed_model.parts["0.ffn"].blocks if b.tiled} == {kind}
    verify(kept)
    same_answers(kept, tmp_path / "q-wide", variant)


def test_a_zero_point_of_0_was_stored_as_15(tmp_path: Path) -> None:
    """Of GPTQ's first convention: 0 less one, in the bits of a code."""
    folder = folder_of(tmp_path, LLAMA, gptq(), GPTQ)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qzeros"] = torch.full_like(tensors[f"{name}.qzeros"], -1)
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        raw = checkpoint.read(f"{name}.weight", 0, 0, 16)
    out = encode_blocks(raw, "UINT4_G32", 16, 160)
    found = widen_blocks(out.reshape(1, -1), 160, "uint4_g32")
    shifts = torch.arange(0, 32, 4)
    codes = (tensors[f"{name}.qweight"][:, None, :16] >> shifts[:, None] & 15).reshape(-1, 16).T
    scales = tensors[f"{name}.scales"].float().T[:16].repeat_interleave(32, 1)
    np.testing.assert_array_equal(found, (codes * scales).numpy())


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


@pytest.mark.parametrize("name", ["gptq", "awq", "packed"])
def test_codes_that_config_json_says_nothing_of(name: str, tmp_path: Path) -> None:
    """Old folders say how they were quantised in a file of their own."""
    variant, quantise, config, _ = CASES[name]
    folder = folder_of(tmp_path, variant, quantise, config)
    (folder / "config.json").write_bytes((tmp_path / "q-wide/config.json").read_bytes())
    for use in (lambda: pack(folder, tmp_path / "kept"), lambda: describe(folder)):
        with pytest.raises(UnsupportedModel, match="is quantised, but no quantization_config"):
            use()


@pytest.mark.parametrize(
    ("quantise", "config", "why"),
    [
        (gptq(order="apart"), GPTQ, "act-order.*says no desc_act"),
        (gptq(order="other"), GPTQ | {"desc_act": True}, "q_proj.*k_proj.*different orders"),
    ],
)
def test_what_of_act_order_is_refused_before_anything_is_written(
    quantise: Quantise, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, LLAMA, quantise, config)
    with pytest.raises(UnsupportedModel, match=why):
        pack(folder, tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir() if "kept" in path.name] == []


@pytest.mark.parametrize("order", ["own", "apart"])
def test_a_head_in_an_order_of_its_own_is_refused(order: str, tmp_path: Path) -> None:
    """Nothing brings its input into that order. A head without one runs."""
    quantise, variant = gptq(order=order), replace(LLAMA, keys=LLAMA.keys | {"vocab_size": 208})
    folder = folder_of(tmp_path, variant, quantise, GPTQ | {"desc_act": True, "lm_head": True})
    tensors = load_file(folder / "model.safetensors")
    made, _ = quantise(tensors.pop("lm_head.weight").float(), "lm_head")
    save_file(tensors | {f"lm_head.{last}": each for last, each in made.items()}, folder / "model.safetensors")
    if order == "own":
        pack(folder, tmp_path / "kept")
        return
    with pytest.raises(UnsupportedModel, match=r"lm_head.*order of columns of its own"):
        pack(folder, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, gptq(order="apart"), GPTQ | {"desc_act": True})
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name][tensors[name] == 3] = 2
    save_file(tensors, folder / "model.safetensors")
    for use in (lambda: pack(folder, tmp_path / "kept"), lambda: own_format(folder), lambda: describe(folder)):
        with pytest.raises(UnsupportedModel, match="other than 32 columns in a group"):
            use()


def test_act_order_beside_experts_is_refused() -> None:
    keys = next(v for v in VARIANTS if v.name.startswith("qwen3-moe")).keys
    config = {"model_type": "qwen3_moe", **keys, "quantization_config": GPTQ | {"desc_act": True}}
    with pytest.raises(UnsupportedModel, match="desc_act, which is not run for a qwen3_moe"):
        spec_from_config(config, "config.json")


def test_an_ordered_model_says_the_same_however_it_runs(tmp_path: Path) -> None:
    """All kernels, streamed weights, prompts in chunks and beside other sequences: the tokens of the reference."""
    folder = folder_of(tmp_path, BIASED, gptq(order="apart"), GPTQ | {"desc_act": True})
    kept = pack(folder, tmp_path / "kept")
    ids, ask = prompt(BIASED, 40), Ask(context=128, kv="float32")
    said: list[list[int]] = []
    for kernels in (*cpu.available(), "reference"):
        with closing(Engine.load(kept, ask, Loading(machine=MACHINE, exact=True, kernels=kernels))) as engine:
            said.append(engine.generate_ids(ids, GREEDY))
    plan = streaming(open_packed(kept), ("norms", "edges"))
    with closing(Engine.load(kept, Ask(), Loading(machine=MACHINE, plan=plan, exact=True, poisoned=True))) as engine:
        said.append(engine.generate_ids(ids, GREEDY))
    assert all(tokens == said[0] for tokens in said)


def test_a_plan_needs_headers_alone(tmp_path: Path) -> None:
    """Of a model that is not here, holes stand for the weights."""
    folder = folder_of(tmp_path, LLAMA, gptq(), GPTQ)
    want, file = own_format(folder), folder / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:header] + bytes(len(content) - header))
    assert describe(folder)[1] == want
    with pytest.raises(UnsupportedModel, match="act-order"):
        pack(folder, tmp_path / "kept")


def test_biases_of_zeros_are_no_matter(tmp_path: Path) -> None:
    """AutoGPTQ's first versions wrote them for every matrix; others would not be used."""
    folder = folder_of(tmp_path, LLAMA, gptq(), GPTQ)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.zeros(128)}, folder / "model.safetensors")
    pack(folder, tmp_path / "kept")
    save_file(tensors | {name: torch.ones(128)}, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match="would not be used"):
        pack(folder, tmp_path / "again")


def test_numbers_are_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, LLAMA, awq(), AWQ)
    with pytest.raises(UnsupportedModel, match="keeps its numbers"):
        pack(folder, tmp_path / "kept", parse_format("int4"))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("how", ["awq", "gptq"])
def test_mixtral_as_it_is_published_quantised(how: str, tmp_path: Path) -> None:
    """Each expert's matrices apart; routers in floats, which AWQ's config names by their last part and GPTQ's not at
    all."""
    found = next(v for v in VARIANTS if v.model_type == "mixtral")
    keys = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    variant = replace(found, keys=found.keys | keys | {"intermediate_size": 96})
    quantise, config = {"awq": (awq(), AWQ | {"modules_to_not_convert": ["gate"]}), "gptq": (gptq(), GPTQ)}[how]
    folder = folder_of(tmp_path, variant, quantise, config, skip=("block_sparse_moe.gate",))
    packed_model = open_packed(kept := pack(folder, tmp_path / "kept"))
    for part in ("0.experts", "0.attn"):
        assert {b.format.name for b in packed_model.parts[part].blocks if b.tiled} == {"uint4_g32"}
    same_answers(kept, tmp_path / "q-wide", variant)


def test_a_quantised_router_is_refused(tmp_path: Path) -> None:
    variant = next(v for v in VARIANTS if v.model_type == "mixtral")
    save(variant, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    router = next(name for name in tensors if name.endswith("gate.weight"))
    made, _ = awq(16)(tensors.pop(router).float(), "")
    stem = router.removesuffix(".weight")
    save_file(tensors | {f"{stem}.{last}": t for last, t in made.items()}, tmp_path / "hf/model.safetensors")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "quantization_config": AWQ}))
    with pytest.raises(PenstockError, match="gate"):
        pack(tmp_path / "hf", tmp_path / "kept")


def test_absurd_widths_are_refused_before_the_order_of_columns_is_read(tmp_path: Path) -> None:
    """A file of holes may claim any size."""
    file, cols = tmp_path / "model.safetensors", 2**40
    sizes = {
        "qweight": ([cols // 8, 8], cols * 4), "qzeros": ([cols // 32, 1], cols // 8),
        "scales": ([cols // 32, 8], cols), "g_idx": ([cols], cols * 4),
    }  # fmt: skip
    header, end = dict[str, Any](), 0
    for last, (shape, nbytes) in sizes.items():
        dtype = "F32" if last == "scales" else "I32"
        header[f"model.layers.0.mlp.down_proj.{last}"] = {
            "dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes],
        }  # fmt: skip
        end += nbytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        with file.open("r+b") as opened:
            opened.truncate(8 + len(text) + end)
    except OSError as error:
        pytest.skip(f"no file of {end} bytes here: {error}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": GPTQ}))
    with pytest.raises(BrokenModel, match="columns, more than"):
        Checkpoint.open(tmp_path)


def test_a_name_that_ends_is_not_the_beginning_of_another() -> None:
    def skips(config: dict[str, Any], module: str) -> bool:
        how = quantization_of({"quantization_config": config}, "config.json")
        assert how is not None
        return how.skips(module)

    named = compressed(INT4) | {"ignore": ["model.layers.1.mlp.gate", "re:.*mlp.shared_expert_gate$"]}
    assert skips(named, "model.layers.1.mlp.gate") and skips(named, "model.layers.7.mlp.shared_expert_gate")
    assert not skips(named, "model.layers.1.mlp.gate_proj")
    assert skips(compressed(INT4) | {"ignore": ["re:.*self_attn.*"]}, "model.layers.0.self_attn.q_proj")
    assert skips(GPTQ | {"dynamic": {"-:.*attn.*": {}}}, "model.layers.0.self_attn.q_proj")
