"""`quantization_config`: what is read, and one line for each that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.hf.quantization import Quantization, quantization_of

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def read(**config: Any) -> Quantization | None:
    return quantization_of({"quantization_config": config}, "config.json")


def compressed(weights: Any, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def test_what_is_read() -> None:
    assert quantization_of({}, "") is None and quantization_of({"quantization_config": None}, "") is None
    assert read(quant_method="gptq", bits=4, group_size=128) == Quantization(
        "gptq", "uint4_g128", 4, 128, zero_is_less=True
    )
    assert read(quant_method="awq", modules_to_not_convert=["gate"]) == Quantization(
        "awq", "uint4_g128", 4, 128, skipped=("gate",)
    )
    assert read(quant_method="fp8", weight_block_size=[128, 128]) == Quantization("float8", "float8", 8, 128, 128)
    assert read(quant_method="fp8", weight_block_size=None) == Quantization("float8", "float8", 8, 0, 0)
    assert read(**compressed([INT4], ignore=["lm_head", "re:.*mlp.gate$", "re:(a+)+b"])) == Quantization(
        "packed", "uint4_g128", 4, 128, symmetric=True, skipped=("lm_head.", "mlp.gate."), head=True
    )
    for without in ({}, {"config_groups": {}}, None):
        assert read(**compressed([INT4], transform_config=without)) == read(**compressed([INT4]))


@pytest.mark.parametrize(
    ("group", "kind"),
    [(-1, "uint4_g128"), (32, "uint4_g32"), (64, "uint4_g64"), (96, "uint4_g32"), (192, "uint4_g64"),
     (256, "uint4_g128"), (1024, "uint4_g128")],
)  # fmt: skip
def test_the_widest_format_that_divides_a_group(group: int, kind: str) -> None:
    found = read(quant_method="gptq", bits=4, group_size=group)
    assert found is not None and found.kind == kind and found.group == max(group, 0)


UNKNOWN = ("bitsandbytes", "hqq", "eetq", "aqlm", "quip", "quark", "torchao", "modelopt", "bitnet", "spqr", "vptq",
           "higgs", "quanto", "mxfp4x", "")  # fmt: skip


@pytest.mark.parametrize("method", UNKNOWN)
def test_unknown_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quant_method '{method}'"):
        read(quant_method=method, bits=4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
    ({"quant_method": "gptq", "bits": 2}, "bits 2"),
    ({"quant_method": "gptq", "group_size": 16}, "group_size 16"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "gptq", "is_marlin_format": True}, "Marlin"),
    ({"quant_method": "gptq", "pack_dtype": "int8"}, "pack_dtype"),
    ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    ({"quant_method": "awq", "bits": 8}, "bits 8"),
    ({"quant_method": "awq", "version": "gemv"}, "gemv"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64, 64"),
    (compressed([INT4], "marlin-24"), "marlin-24"),
    (compressed([INT4], "nvfp4-pack-quantized"), "nvfp4"),
    (compressed([INT4, INT4 | {"num_bits": 8}]), "config_groups"),
    (compressed([INT4 | {"num_bits": 3}]), "num_bits 3"),
    (compressed([INT4 | {"type": "float"}]), "type"),
    (compressed([INT4 | {"strategy": "tensor_group"}]), "strategy"),
    (compressed([INT4], sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    (compressed([INT4], transform_config={"config_groups": {"v": {"type": "hadamard"}}}), "transform_config"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_settings_that_are_not_read_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as error:
        read(**config)
    assert "\n" not in error.value.message and len(error.value.message) < 300


def gptq(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", **keys}


BROKEN: list[Any] = [
    7, [], "gptq", {}, {"quant_method": 4}, gptq(bits="4"), gptq(bits=10**40), gptq(group_size=0),
    gptq(group_size=2**60), gptq(group_size=float("nan")), gptq(dynamic=[]),
    {"quant_method": "awq", "modules_to_not_convert": "lm_head"},
    {"quant_method": "awq", "modules_to_not_convert": [1]},
    {"quant_method": "fp8", "weight_block_size": [128]}, {"quant_method": "fp8", "weight_block_size": [0, 128]},
    {"quant_method": "fp8", "weight_block_size": 128}, {"quant_method": "compressed-tensors"},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"symmetric": "yes"}}}},
]  # fmt: skip


@pytest.mark.parametrize("config", BROKEN)
def test_keys_that_make_no_sense(config: Any) -> None:
    with pytest.raises((BrokenModel, UnsupportedModel), match="quantization_config") as error:
        quantization_of({"quantization_config": config}, "config.json")
    assert "\n" not in error.value.message and len(error.value.message) < 300
