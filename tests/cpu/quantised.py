"""Folders as GPTQ, AWQ, compressed-tensors and float8 leave them, out of a float checkpoint: a short reference for each
published layout, slow and plain. Codes are packed one by one, by what the makers' own code says."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
# matrix [out, in] float32, a name → the tensors that stand for it, and the numbers that these are
Quantise = Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_int32(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [r, c] → int32, 32 / bits neighbours along an axis in each, the first one lowest. `order`: which of them
    stands where, from the lowest."""
    per = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[1] % per)]).reshape(moved.shape[0], -1, per)
    words = np.zeros(moved.shape[:2], np.uint64)
    for i in range(per):
        words |= moved[:, :, order[i] if order else i] << np.uint64(bits * i)
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis).copy())


def grouped(
    w: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype, order: np.ndarray | None = None
) -> tuple[np.ndarray, torch.Tensor, np.ndarray, torch.Tensor]:
    """Codes [out, in], scales [out, G], zero points [out, G] and the numbers (code - zero point) * scale."""
    rows, cols = w.shape
    group = group if group > 0 else cols
    group_of = np.arange(cols) // group if order is None else order
    most = 2**bits - 1
    scales = torch.zeros(rows, int(group_of.max()) + 1, dtype=dtype)
    zeros, codes = np.zeros(scales.shape, np.int64), np.zeros((rows, cols), np.int64)
    for g in range(scales.shape[1]):
        part = w[:, group_of == g]
        lo, hi = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * torch.maximum(-lo, hi) if symmetric else hi - lo
        scales[:, g] = (span / most).to(dtype)
        scale = scales[:, g].float()
        zeros[:, g] = (most + 1) // 2 if symmetric else torch.round(-lo / scale).clamp(1, most).numpy()
        found = torch.round(part / scale[:, None]).numpy() + zeros[:, g, None]
        codes[:, group_of == g] = np.clip(found, 0, most)
    numbers = torch.from_numpy(codes - zeros[:, group_of]).float() * scales.float()[:, group_of]
    return codes, scales, zeros, numbers


def gptq(bits: int = 4, group: int = 32, symmetric: bool = False, v2: bool = False, order: str = "own") -> Quantise:
    """`order`: own, none (no g_idx), apart (act-order), or other (an order of each matrix' own)."""

    def quantise(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        cols = w.shape[1]
        own = np.arange(cols) // (group if group > 0 else cols)
        rng = np.random.default_rng(0 if order == "apart" else zlib.crc32(name.encode()))
        g_idx = rng.permutation(own) if order in ("apart", "other") else own
        codes, scales, zeros, numbers = grouped(w, bits, group, symmetric, torch.float16, g_idx)
        tensors = {
            "qweight": pack_int32(codes.T, bits, 0),
            "qzeros": pack_int32((zeros - (not v2)).T, bits, 1),
            "scales": scales.T.contiguous(),
        }
        if order != "none":
            tensors["g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
        return tensors, numbers

    return quantise


def awq(group: int = 32) -> Quantise:
    def quantise(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros, numbers = grouped(w, 4, group, False, torch.float16)
        tensors = {
            "qweight": pack_int32(codes.T, 4, 1, AWQ_ORDER),
            "qzeros": pack_int32(zeros.T, 4, 1, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return tensors, numbers

    return quantise


def packed(
    bits: int = 4, group: int = 32, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16, bytes_: bool = False,
    apart: bool = False,
) -> Quantise:  # fmt: skip
    """compressed-tensors' pack-quantized. `bytes_`: zero points as int8, as its first versions had them. `apart`: the
    columns of a group lie apart (actorder group)."""

    def quantise(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        g_idx = np.random.default_rng(1).permutation(np.arange(w.shape[1]) // group) if apart else None
        codes, scales, zeros, numbers = grouped(w, bits, group, symmetric, dtype, g_idx)
        tensors = {
            "weight_packed": pack_int32(codes, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(w.shape),
        }
        if g_idx is not None:
            tensors["weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
        if not symmetric:
            signed = torch.from_numpy((zeros - 2 ** (bits - 1)).astype(np.int8))
            tensors["weight_zero_point"] = signed if bytes_ else pack_int32(zeros, bits, 0)
        return tensors, numbers

    return quantise


def integers(per_row: bool = True) -> Quantise:
    """compressed-tensors' int-quantized: int8, symmetric."""

    def quantise(w: torch.Tensor, name: str) -> tuple[Tensors, torch.Tensor]:
        most = w.abs().amax(1, keepdim=True) if per_row else w.abs().amax().reshape(1)
        scale = (most / 127).bfloat16()
        codes = torch.round(w / scale.float()).clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return quantise


def float8(rows: int = 0, cols: int = 0, name: str = "weight_scale", scalar: bool = False) -> Quantise:
    """A scale for so many rows and columns, 0 for all of them. `scalar`: it has no axis."""

    def quantise(w: torch.Tensor, _: str) -> tuple[Tensors, torch.Tensor]:
        r, c = rows or w.shape[0], cols or w.shape[1]
        scale = torch.zeros(-(-w.shape[0] // r), -(-w.shape[1] // c))
        codes, numbers = torch.zeros(w.shape, dtype=torch.float8_e4m3fn), torch.zeros(w.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * r, (i + 1) * r), slice(j * c, (j + 1) * c)
                scale[i, j] = w[at].abs().max() / 448
                codes[at] = (w[at] / scale[i, j]).to(torch.float8_e4m3fn)
                numbers[at] = codes[at].float() * scale[i, j]
        return {"weight": codes, name: scale.reshape(()) if scalar else scale}, numbers

    return quantise


def write(source: Path, folder: Path, quantise: Quantise, config: dict[str, Any], skip: tuple[str, ...] = ()) -> Path:
    """Writes a checkpoint's folder quantised, and beside it, under `-wide`, one in float32 of the same numbers. Returns
    the latter. `skip`: parts of names of matrices that are left as they are."""
    tensors = load_file(source / "model.safetensors")
    kept, wide = dict[str, torch.Tensor](), dict(tensors)
    for name, tensor in tensors.items():
        is_linear = tensor.dim() == 2 and not any(part in name for part in ("embed", "lm_head", "mlp.gate.", *skip))
        if not is_linear:
            kept[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        made, wide[name] = quantise(tensor.float(), stem)
        kept |= {f"{stem}.{last}": each for last, each in made.items()}
    beside = folder.with_name(f"{folder.name}-wide")
    for target, content in ((folder, kept), (beside, wide)):
        target.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, target / "model.safetensors")
        for small in ("tokenizer.json", "generation_config.json"):
            if (source / small).exists():
                (target / small).write_bytes((source / small).read_bytes())
    plain = json.loads((source / "config.json").read_text())
    (beside / "config.json").write_text(json.dumps(plain))
    (folder / "config.json").write_text(json.dumps({**plain, "quantization_config": config}))
    return beside


def compressed(weights: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """compressed-tensors' quantization_config."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None, **more,
    }  # fmt: skip
