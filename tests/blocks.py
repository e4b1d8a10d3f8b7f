"""Random matrices in the formats of `spec.blocks`, as a GGUF file holds them, for tests. Needs `gguf`."""

from __future__ import annotations

import gguf
import numpy as np

from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format
from penstock.store.blocks import encode_blocks, row_bytes

# Where the float16 numbers of a block of a file lie.
_HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": (),
           "q4_1": (0, 2), "q5_1": (0, 2)}  # fmt: skip


def random_blocks(kind: str, rows: int, cols: int, rng: np.random.Generator, size: float = 1.0) -> np.ndarray:
    """Random rows of a GGUF tensor, uint8 [rows, bytes]: any codes and integer scales, d about `size`."""
    raw = rng.integers(0, 256, (rows, row_bytes(kind, cols)), np.uint8)
    blocks = raw.reshape(rows, -1, 20 if kind == "q4_1" else BLOCKS[kind].nbytes)
    for at in _HALVES.get(kind, (0,)):
        d = (size * rng.normal(size=blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = d[..., None].view(np.uint8)
    if kind == "mxfp4" and size != 1.0:
        blocks[:, :, 0] = 128 + int(np.log2(size)) + rng.integers(-2, 2, blocks.shape[:2])
    return raw


def numbers_of(raw: np.ndarray, kind: str) -> np.ndarray:
    """What the rows hold, float32 [rows, cols], by `gguf`'s own code."""
    numbers: np.ndarray = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    return numbers


def usual_size(kind: str) -> float:
    """The d for which numbers are about 1."""
    largest = {"q2_k": 45, "q3_k": 128, "q4_k": 900, "q5_k": 1900, "q6_k": 4000, "iq4_xs": 4000, "iq4_nl": 128,
               "q8_0": 128, "mxfp4": 16}  # fmt: skip
    return 2.0 ** -int(np.log2(largest.get(kind, 8)) - 0.5)


def random_matrix(fmt: Format, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """A random matrix with numbers about 1 in tiles, uint8 [fmt.matrix_bytes(rows, cols)]."""
    whole = -(-cols // BLOCKS[fmt.kind].columns) * BLOCKS[fmt.kind].columns
    raw = random_blocks(fmt.kind, rows, whole, rng, usual_size(fmt.kind))
    return encode_blocks(raw, fmt.kind, rows, cols)
