"""Number formats of tensors in GGUF files, by the numbers that files call them by.

A row of a tensor is cut into blocks of so many numbers, which take so many bytes. Source: the GGUF specification,
"Tensors" (ggml_type), and the sizes of ggml's block structures. A test compares the table with the package `gguf`.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockFormat(NamedTuple):
    """`name` as llama.cpp spells it. A block of `numbers` numbers takes `nbytes` bytes."""

    name: str
    numbers: int
    nbytes: int


BLOCK_FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    4: BlockFormat("MXFP4", 32, 17),  # `IN_TURNS`
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    9: BlockFormat("Q8_1", 32, 40),
    10: BlockFormat("Q2_K", 256, 84),
    11: BlockFormat("Q3_K", 256, 110),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    15: BlockFormat("Q8_K", 256, 292),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136),
    24: BlockFormat("I8", 1, 1),
    25: BlockFormat("I16", 1, 2),
    26: BlockFormat("I32", 1, 4),
    27: BlockFormat("I64", 1, 8),
    28: BlockFormat("F64", 1, 8),
    29: BlockFormat("IQ1_M", 256, 56),
    30: BlockFormat("BF16", 1, 2),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17),
}

# What Ollama's files of gpt-oss call MXFP4, whose codes lie there in another order (`store.mxfp4`). No other file may
# have it: the number was that of Q4_2, which llama.cpp had before there was GGUF.
IN_TURNS = 4
