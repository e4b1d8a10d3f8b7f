"""MXFP4 as gpt-oss has it in safetensors: codes and scales in two tensors, read as one that lies as in a GGUF file.

    NAME_blocks    uint8 [..., C / 32, 16]   byte i of a block: number 2i in its low nibble, 2i + 1 in its high one
    NAME_scales    uint8 [..., C / 32]       a block's scale, e8m0
    in GGUF        17 bytes a block          the scale; then byte i: number i in its low nibble, 16 + i in its high one
    Ollama's GGUF  17 bytes a block          the scale; then 16 bytes as in NAME_blocks

Sources: OCP Microscaling Formats 1.0, section 5.3 (e2m1 with a scale for 32 numbers); the names are those of the
model's files; Ollama's ml/backend/ggml, which reads the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel
from penstock.spec.blocks import GROUP
from penstock.store.header import TensorInfo, quoted

DTYPE = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_CODE_BYTES = GROUP // 2

Bytes = npt.NDArray[np.uint8]


def paired(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same tensors, but of each pair NAME_blocks holds both, with dtype MXFP4 and the shape of the numbers. Raises
    BrokenModel for a pair whose shapes do not fit."""
    by_name = dict(tensors)
    for name, codes in tensors.items():
        scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES) if name.endswith(_BLOCKS) else None
        if scales is None or codes.dtype != "U8" or scales.dtype != "U8":
            continue
        if len(codes.shape) < 3 or codes.shape[-1] != _CODE_BYTES or scales.shape != codes.shape[:-1]:
            raise BrokenModel(
                f"{codes.file}: tensors {quoted(name)} {list(codes.shape)} and {quoted(scales.name)}"
                f" {list(scales.shape)} are no pair in MXFP4"
            )
        shape = (*codes.shape[:-2], codes.shape[-2] * GROUP)
        by_name[name] = replace(codes, dtype=DTYPE, shape=shape, scales=scales)
        del by_name[scales.name]
    return by_name


def turned(raw: Bytes) -> Bytes:
    """Rows as Ollama's files have them, uint8 [rows, C / 32 · 17] → as llama.cpp's have them."""
    blocks = raw.reshape(len(raw), -1, 1 + _CODE_BYTES)
    return joined(blocks[:, :, 1:].reshape(len(raw), -1), blocks[:, :, 0])


def joined(codes: Bytes, scales: Bytes) -> Bytes:
    """codes uint8 [rows, C / 2] and scales uint8 [rows, C / 32] → uint8 [rows, C / 32 · 17], as in a GGUF file."""
    rows, blocks = scales.shape
    given = codes.reshape(rows, blocks, 2, _CODE_BYTES // 2)
    first, second = given[:, :, 0], given[:, :, 1]  # of numbers 0 … 15, and of 16 … 31
    out = np.empty((rows, blocks, 1 + _CODE_BYTES), np.uint8)
    out[:, :, 0] = scales
    out[:, :, 1::2] = (first & 15) | (second << 4)
    out[:, :, 2::2] = (first >> 4) | (second & 0xF0)
    return out.reshape(rows, -1)
