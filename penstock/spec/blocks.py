"""Formats that others quantise to, as GGUF files hold them (llama.cpp), or folders (GPTQ, AWQ, float8): how the same
numbers lie in tiles of 16 rows.

GGUF cuts a row into blocks of 32 or 256 columns, each with its own header. Here 16 rows lie together, as
`spec.format` draws it, and every code, scale and minimum keeps its bits. So a number is what the file says, and a
matrix takes the bytes that it takes there. A tile is a sequence of blocks of S columns of its 16 rows:

    a tile:    | block 0 | block 1 |  …  |
    a block:   | scale words | float16 [16] … | group 0 | group 1 |  …  |          a group is 32 columns
    a group:   | lines of low bits | lines of high bits |

    S is the largest divisor that C has in common with 64 (formats with a header for each 32 columns), 128 (formats of
    folders) or 256 (the others). So where C is less than that, as in `down` of a model with ReLU, whose granules have
    64 columns, or in `o` with 128 columns for a KV head's queries, the header is repeated for each S.

A line is a word of 4 bytes of each row. Columns 4l + b of a group, l = 0 … 7, are byte b of these words:

    4 low bits    4 lines   line l / 2, the low nibble where l is even, else the high one
    8 low bits    8 lines   line l
    2 low bits    2 lines   line l / 4, bits 2 (l mod 4) and above
    2 high bits   2 lines   as 2 low bits
    1 high bit    1 line    bit l

    code = low bits + high bits << (number of low bits)
    value = (code - offset) * scale, or code * scale - minimum, or table[code] * scale, in float32

    format   bits of a code   offset   scale words, then float16, of a block of S columns              bits of a weight
    q4_0     4                8        d of each group                                                 4.5
    q5_0     4 + 1            16       d of each group                                                 5.5
    q5_1     4 + 1                     d and m of each group; value = code * d + m                     6.0
    q8_0     8                128      d of each group                                                 8.5
    iq4_nl   4                table    d of each group                                                 4.5
    mxfp4    4                table    uint8 [S / 32][16]: scale = 2^(e - 128)                         4.25
    q2_k     2                         S / 16 bytes: scale in the low nibble, minimum in the high one; d, dmin     2.625
    q3_k     2 + 1            4        6 bits a scale, which is 32 less; d; 16 columns a scale         3.4375
    q4_k     4                         6 bits a scale and 6 bits a minimum; d, dmin                    4.5
    q5_k     4 + 1                     as q4_k                                                         5.5
    q6_k     4 + 2            32       int8 a scale; d; 16 columns a scale                             6.5625
    iq4_xs   4                table    6 bits a scale, which is 32 less; d                             4.25

    Of the last six, scale = d * (the integer scale), minimum = dmin * (the integer minimum). q8_0 keeps a signed byte
    plus 128. Tables have 128 added too (that of mxfp4 12), so that all codes are unsigned where they are multiplied.

Integer scales of S = 256 columns are packed as in the file's own header, whose bytes 4w … 4w + 3 are word w of the row:

    q4_k, q5_k   3 words   q3_k   3 words   q2_k, q6_k   4 words   iq4_xs   1 word of low bits, then uint16 of high bits

Of fewer columns they are bytes, padded to whole words: scales, then (q4_k, q5_k) minimums. So where S is 64, q4_k takes
5.0 bits, q5_k 6.0, q6_k 6.75. q4_1 is int4-g32: its d is the scale, its m the minimum.

Folders are quantised with a scale and an integer zero point for each group of columns of a row (GPTQ, AWQ,
compressed-tensors), or to float8 (e4m3) with a scale for each block of rows and columns (DeepSeek: 128 x 128). A header
has a word of 4 bytes of each row for each `scaled` columns, or one word where S is less than that:

    format       bits of a code   word                            value                           bits of a weight
    uint4_gN     4                scale: bits 9 … 31              (code - zero point) * scale     4 + 32 / min(N, S)
    uint8_gN     8                zero point: bits 0 … 8          as uint4_gN                     8 + 32 / min(N, S)
    float8       8                float32 scale                   (code as e4m3) * scale          8 + 32 / min(128, S)

The scale of uint4 and uint8 is the upper 23 bits of a float32: a sign, an exponent, and 14 bits of a mantissa. So it
holds every float16 and bfloat16. Zero points are 0 … 511, since GPTQ stores one less, and so may mean 256. The product
of a zero point and a scale has at most 24 bits, hence code * scale - zero point * scale is exact in float32.

N is 32, 64 or 128: the largest of them that divides the checkpoint's group. A group of 256, or a whole row, has its
word repeated for each 128 columns. So does a scale of float8 for more than 128 columns, or for a whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import NamedTuple

GROUP = 32  # columns of a group: activations that are rounded beside these formats have a scale for as many
TILE_ROWS = 16
SCALE, ZERO_POINT = 1, 2  # a header's word is a float32 scale; or a scale of 23 bits and a zero point of 9
ZERO_BITS = 9


class Code(NamedTuple):
    """A code of a format: how many low bits it has, how many high ones, which lie apart, and the offset that is taken
    from it, or from what a table has for it."""

    low: int
    high: int = 0
    offset: int = 0

    @property
    def bits(self) -> int:
        return self.low + self.high


@dataclass(frozen=True, slots=True)
class Blocks:
    """A row of the tables above. `columns`, `nbytes`: of a block of a row in a file. `scaled`: columns of a scale.
    `halves`: float16 numbers of a header. `integers`: bytes of a scale and its minimum, where they are unpacked.
    `word`: what a word of a header is, SCALE or ZERO_POINT; 0 for formats of GGUF files."""

    columns: int
    nbytes: int
    code: Code
    scaled: int
    halves: int
    integers: int = 1
    word: int = 0

    def span(self, cols: int) -> int:
        """S: columns of a block in a tile of a matrix with so many columns."""
        return gcd(cols, 64 if self.columns == GROUP else self.columns)

    def scale_bytes(self, span: int) -> int:
        """Bytes of a row's words, or integer scales and minimums, in the header of a block of `span` columns."""
        if self.word:
            return 4 * max(1, span // self.scaled)
        if self.columns == GROUP:
            return 0 if self.halves else span // GROUP
        if span == self.columns:
            return self.nbytes - 2 * self.halves - self.columns * self.code.bits // 8
        return -(-self.integers * (span // self.scaled) // 4) * 4

    def header_bytes(self, span: int) -> int:
        """Bytes of a row in that header."""
        return self.scale_bytes(span) + 2 * self.halves * (span // GROUP if self.columns == GROUP else 1)

    def block_bytes(self, span: int) -> int:
        """Bytes of a block of `span` columns of a tile."""
        return TILE_ROWS * (self.header_bytes(span) + span * self.code.bits // 8)


# The rows of the tables, by name. Sizes of blocks are those of ggml's structs.
BLOCKS = MappingProxyType({
    "q4_0": Blocks(32, 18, Code(4, 0, 8), 32, 1),
    "q5_0": Blocks(32, 22, Code(4, 1, 16), 32, 1),
    "q5_1": Blocks(32, 24, Code(4, 1), 32, 2),
    "q8_0": Blocks(32, 34, Code(8, 0, 128), 32, 1),
    "iq4_nl": Blocks(32, 18, Code(4, 0, 128), 32, 1),
    "mxfp4": Blocks(32, 17, Code(4, 0, 12), 32, 0),
    "q2_k": Blocks(256, 84, Code(2), 16, 2),
    "q3_k": Blocks(256, 110, Code(2, 1, 4), 16, 1),
    "q4_k": Blocks(256, 144, Code(4), 32, 2, integers=2),
    "q5_k": Blocks(256, 176, Code(4, 1), 32, 2, integers=2),
    "q6_k": Blocks(256, 210, Code(4, 2, 32), 16, 1),
    "iq4_xs": Blocks(256, 136, Code(4, 0, 128), 32, 1),
    "uint4_g32": Blocks(128, 80, Code(4), 32, 0, word=ZERO_POINT),
    "uint4_g64": Blocks(128, 72, Code(4), 64, 0, word=ZERO_POINT),
    "uint4_g128": Blocks(128, 68, Code(4), 128, 0, word=ZERO_POINT),
    "uint8_g32": Blocks(128, 144, Code(8), 32, 0, word=ZERO_POINT),
    "uint8_g128": Blocks(128, 132, Code(8), 128, 0, word=ZERO_POINT),
    "float8": Blocks(128, 132, Code(8), 128, 0, word=SCALE),
})  # fmt: skip

# What the codes of table formats stand for, in twice its number for mxfp4 (e2m1 of OCP MX, whose scale is halved).
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _e4m3(code: int) -> float:
    """OCP's 8-bit e4m3: a sign, 4 bits of an exponent, 3 of a mantissa; no infinities, and one NaN of each sign."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return (-1.0 if code > 127 else 1.0) * (mantissa + 8 * (exponent > 0)) * 2.0 ** (max(exponent, 1) - 10)


TABLES: MappingProxyType[str, tuple[float, ...]] = MappingProxyType({
    "iq4_nl": _IQ4, "iq4_xs": _IQ4, "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "float8": tuple(_e4m3(code) for code in range(256)),
})  # fmt: skip
