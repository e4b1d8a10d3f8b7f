"""Folders of GPTQ, AWQ and others that are broken or say something else are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.store.pack import pack
from tests.cpu.test_quantised import CASES, folder_of


def changed(tensors: dict[str, torch.Tensor], last: str, to: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Changes, or removes, the first layer's tensor of `down` with this last name."""
    name = f"model.layers.0.mlp.down_proj.{last}"
    made = to(tensors[name])
    if made is None:
        del tensors[name]
    else:
        tensors[name] = made.contiguous()


def with_nan(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.reshape(-1)[1] = torch.nan
    return t


BROKEN: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no-scales": ("gptq", "scales", lambda t: None, "lacks .*scales"),
    "no-zeros": ("gptq", "qzeros", lambda t: None, "lacks .*qzeros"),
    "awq-no-zeros": ("awq", "qzeros", lambda t: None, "lacks .*qzeros"),
    "packed-no-zeros": ("packed-zeros", "weight_zero_point", lambda t: None, "lacks .*weight_zero_point"),
    "fewer-rows": ("gptq", "qweight", lambda t: t[:-4], "where its matrix has|config.json leads to"),
    "fewer-outputs": ("gptq", "qweight", lambda t: t[:, :-8], "where its matrix has"),
    "fewer-groups": ("gptq", "scales", lambda t: t[:-1], "where its matrix has"),
    "flat": ("gptq", "qweight", lambda t: t.reshape(-1), "is no matrix"),
    "empty": ("gptq", "qweight", lambda t: t[:0], "is no matrix"),
    "floats": ("gptq", "qweight", lambda t: t.float(), "is F32"),
    "scales-int": ("gptq", "scales", lambda t: t.int(), "is I32"),
    "nan": ("gptq", "scales", with_nan, "NaN or infinite"),
    "overflow": ("packed", "weight_scale", lambda t: torch.full_like(t, 3e38), "beyond float32"),
    "overflow-float8": ("float8-rows", "weight_scale", lambda t: torch.full_like(t, 1e36), "beyond float32"),
    "infinite": ("packed", "weight_scale", lambda t: torch.full_like(t, torch.inf), "NaN or infinite"),
    "wide-scales": ("awq", "scales", lambda t: t.float() * 1.0001, "more than 15 bits"),
    "order-far": ("gptq", "g_idx", lambda t: t + 1, "names groups 1 to"),
    "order-negative": ("gptq", "g_idx", lambda t: -t, "names groups -"),
    "order-short": ("gptq", "g_idx", lambda t: t[1:], "where its matrix has"),
    "both": ("packed", "weight_shape", lambda t: t, ""),
    "float8-no-scale": ("float8-blocks", "weight_scale_inv", lambda t: None, "lacks .*weight_scale"),
    "float8-few-blocks": ("float8-blocks", "weight_scale_inv", lambda t: t[:-1], "where its matrix has"),
    "float8-nan-code": (
        "float8-rows", "weight", lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype), "NaN or infinite",
    ),
    "float8-nan-scale": ("float8-rows", "weight_scale", with_nan, "NaN or infinite"),
    "e5m2": ("float8-rows", "weight", lambda t: t.float().to(torch.float8_e5m2), "F8_E5M2"),
    "zero-point-far": ("packed-zeros-int8", "weight_zero_point", lambda t: t + 100, "no codes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(case: str, tmp_path: Path) -> None:
    """In one line that names the tensor, and nothing is left behind."""
    name, last, to, message = BROKEN[case]
    variant, quantise, config, _ = CASES[name]
    folder = folder_of(tmp_path, variant, quantise, config)
    tensors = load_file(folder / "model.safetensors")
    changed(tensors, last, to)
    save_file(tensors, folder / "model.safetensors")
    if not message:
        pack(folder, tmp_path / "kept")
        return
    with pytest.raises((BrokenModel, UnsupportedModel), match=message) as error:
        pack(folder, tmp_path / "kept")
    assert "\n" not in error.value.message and "down_proj" in error.value.message
    assert not (tmp_path / "kept").exists()
