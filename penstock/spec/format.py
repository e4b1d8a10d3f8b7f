"""Number formats at rest, and what a matrix costs in each.

Float formats store a matrix row by row. Integer formats (FlexGen, groupwise quantisation) cut every
row into groups of `group` columns; each group has a 16-bit float scale and minimum:

    value = code * scale + minimum          code: 4 or 8 bits, unsigned

A matrix of R rows and C columns in an integer format lies as three runs without gaps:

    codes     uint8   [R, G * group * bits / 8]   G = ceil(C / group); columns beyond C have code 0
    scales    float16 [R, G]
    minimums  float16 [R, G]

In int4 byte j of a group holds column j in its low nibble and column j + group/2 in its high nibble.
Group 64 costs 4.5 bits a weight, as Q4_0 does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import BadRequest

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
DEFAULT_GROUP = 64
KV_KINDS = ("float32", "bfloat16", "float16")  # what a KV cache may be kept in


@dataclass(frozen=True, slots=True)
class Format:
    """`kind`: float32, bfloat16, float16, int8 or int4. `group`: columns per scale, 0 for floats."""

    kind: str
    group: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise BadRequest(f"unknown number format {self.kind!r}: there are {', '.join(_BITS)}")
        if self.is_quantised and (self.group < 2 or self.group % 2 or self.group > 4096):
            raise BadRequest(f"group size {self.group} of {self.kind} should be even, from 2 to 4096")
        if not self.is_quantised and self.group:
            raise BadRequest(f"{self.kind} has no groups")

    @property
    def bits(self) -> int:
        return _BITS[self.kind]

    @property
    def is_quantised(self) -> bool:
        return self.kind in ("int8", "int4")

    @property
    def name(self) -> str:
        """`int4`, or `int4-g32` where the group is not the default."""
        return self.kind if self.group in (0, DEFAULT_GROUP) else f"{self.kind}-g{self.group}"

    def groups(self, cols: int) -> int:
        return -(-cols // self.group) if self.is_quantised else 0

    def code_row_bytes(self, cols: int) -> int:
        """Bytes of one row without its scales and minimums."""
        if self.is_quantised:
            return self.groups(cols) * self.group * self.bits // 8
        return cols * self.bits // 8

    def matrix_bytes(self, rows: int, cols: int) -> int:
        return rows * (self.code_row_bytes(cols) + 4 * self.groups(cols))


FLOAT32 = Format("float32")


def parse_format(text: str) -> Format:
    """`int4`, `int4-g32`, `bf16`, … Raises BadRequest."""
    name, _, group = text.strip().lower().partition("-g")
    kind = _ALIASES.get(name, name)
    if kind in ("int8", "int4"):
        if group and re.fullmatch("[0-9]{1,6}", group) is None:
            raise BadRequest(f"number format {text!r}: the group size should be a number, as in int4-g32")
        return Format(kind, int(group) if group else DEFAULT_GROUP)
    if group:
        raise BadRequest(f"number format {text!r}: only int8 and int4 have groups")
    return Format(kind)
