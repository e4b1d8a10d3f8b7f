"""Random matrices in the formats of `spec.blocks`, as files hold them, for tests. Needs `gguf`."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format
from penstock.store.blocks import encode_blocks, row_bytes

# Where the float16 numbers of a block of a file lie.
_HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (),
           "q4_1": (0, 2), "q5_1": (0, 2)}  # fmt: skip


def random_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """Random rows of a GGUF tensor, uint8 [rows, bytes]: any codes and integer scales, d about `size`. Or of a matrix
    in a format of folders."""
    raw = rng.integers(0, 256, (rows, row_bytes(kind, cols)), np.uint8)
    if kind in BLOCKS and BLOCKS[kind].word:
        return random_words(raw, kind, rng, size)
    blocks = raw.reshape(rows, -1, 20 if kind == "q4_1" else BLOCKS[kind].nbytes)
    for at in _HALVES.get(kind, (0,)):
        d = (size * rng.normal(size=blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = d[..., None].view(np.uint8)
    if kind == "mxfp4" and size == 1.0:
        blocks[:, :, 0] = np.minimum(blocks[:, :, 0], 252)  # beyond, 6 times the scale is infinite
    if kind == "mxfp4" and size != 1.0:
        blocks[:, :, 0] = 128 + int(np.log2(size)) + rng.integers(-2, 2, blocks.shape[:2])
    return raw


def random_words(raw: np.ndarray, kind: str, rng: np.random.Generator, size: float) -> np.ndarray:
    """Random rows with scales and zero points of a format of folders."""
    headers = 128 // BLOCKS[kind].scaled
    words = raw.view(np.uint32).reshape(len(raw), -1, BLOCKS[kind].nbytes // 4)
    scales = (size * rng.normal(size=(*words.shape[:2], headers))).astype(np.float32)
    if kind == "float8":
        words[:, :, headers:] &= 0xFEFEFEFE  # no NaN
        words[:, :, :headers] = scales.view(np.uint32)
    else:
        zeros = rng.integers(0, (17 if kind.startswith("uint4") else 257), scales.shape).astype(np.uint32)
        words[:, :, :headers] = scales.astype(np.float16).astype(np.float32).view(np.uint32) | zeros
    return raw


def numbers_of_words(raw: np.ndarray, kind: str) -> np.ndarray:
    """What rows in a format of folders hold, float32 [rows, cols], column by column."""
    headers, scaled = 128 // BLOCKS[kind].scaled, BLOCKS[kind].scaled
    blocks = raw.reshape(len(raw), -1, BLOCKS[kind].nbytes)
    out = np.zeros((len(raw), blocks.shape[1] * 128), np.float32)
    for c in range(out.shape[1]):
        block, i = blocks[:, c // 128], c % 128
        word = np.ascontiguousarray(block[:, 4 * (i // scaled) :][:, :4]).view(np.uint32)[:, 0]
        if kind == "float8":
            code = torch.from_numpy(block[:, 4 * headers + i].copy()).view(torch.float8_e4m3fn).float().numpy()
            out[:, c] = code * word.view(np.float32)
            continue
        byte = block[:, 4 * headers + (i if kind.startswith("uint8") else 4 * (i // 8) + i % 4)].astype(np.int64)
        if kind.startswith("uint4"):
            byte = byte >> 4 if i % 8 > 3 else byte & 15
        scale = (word & ~np.uint32(511)).view(np.float32)
        out[:, c] = (byte - (word & 511).astype(np.int64)).astype(np.float32) * scale
    return out


def numbers_of(raw: np.ndarray, kind: str) -> np.ndarray:
    """What the rows hold, float32 [rows, cols], by `gguf`'s own code."""
    if kind in BLOCKS and BLOCKS[kind].word:
        return numbers_of_words(raw, kind)
    numbers: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    return numbers


def usual_size(kind: str) -> float:
    """The d for which numbers are about 1."""
    largest = {"q2_k": 45, "q3_k": 128, "q4_k": 900, "q5_k": 1900, "q6_k": 4000, "iq4_xs": 4000, "iq4_nl": 128,
               "q8_0": 128, "mxfp4": 16, "uint8_g32": 128, "uint8_g128": 128, "float8": 448}  # fmt: skip
    return 2.0 ** -int(np.log2(largest.get(kind, 8)) - 0.5)


def random_matrix(fmt: Format, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """A random matrix with numbers about 1 in tiles, uint8 [fmt.matrix_bytes(rows, cols)]."""
    whole = -(-cols // BLOCKS[fmt.kind].columns) * BLOCKS[fmt.kind].columns
    raw = random_blocks(fmt.kind, rows, whole, rng, usual_size(fmt.kind))
    return encode_blocks(raw, fmt.kind, rows, cols)
