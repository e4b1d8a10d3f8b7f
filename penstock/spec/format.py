"""Number formats of weights and KV at rest: how bytes lie, and how many they are. This is format version 2 of a packed
model.

Matrices that are multiplied lie in tiles of 16 rows, one after the other, so that a SIMD kernel loads 16 rows of the
same columns at once. A matrix [R, C] has ceil(R / 16) tiles. Rows beyond R are zero bits. Inside a tile the rows'
numbers lie in words, and a line is one word of each of the 16 rows:

                  row 0    row 1           row 15
    line 0      | word 0 | word 0 |  …  | word 0 |     64 bytes (float16: 32)
    line 1      | word 1 | word 1 |  …  | word 1 |

    format      a word is                                        lines of a tile
    float32     4 bytes: column i                                C                  [C][16] float32
    float16     2 bytes: column i                                C                  [C][16] float16
    bfloat16    4 bytes: columns 2i, 2i + 1                      ceil(C / 2)        [ceil(C / 2)][16][2] bfloat16
    int8        4 bytes: codes of columns 4i … 4i + 3            group / 4 a group
    int4        4 bytes: codes of columns 8i … 8i + 7            group / 8 a group

In bfloat16 an odd C is padded with a column of zeros. In int4 byte b of word i holds column 8i + b in its low
nibble and column 8i + 4 + b in its high nibble.

Integer formats (FlexGen, groupwise quantisation) cut every row into G = ceil(C / group) groups. Each group of each row
has a 16-bit float scale and minimum:

    value = code * scale + minimum          code: 4 or 8 bits, unsigned; columns beyond C have code 0

A group of more than C columns has C of them (rounded up to a multiple of 8): int4 with groups of 128 has groups of 64
in `down` where granules have 64 columns, as in models with ReLU. Elsewhere granules have 128 or 256
(`spec.parts.ffn_width`).

    a tile:   | group 0 | group 1 |  …  | group G-1 |
    a group:  | lines of codes | scales float16 [16] | minimums float16 [16] |

int4 with groups of 64 takes 8 · 64 + 64 = 576 bytes for 16 x 64 weights: 4.5 bits a weight, as Q4_0 does.

The formats of GGUF files (`q4_k`, `q8_0`, `mxfp4`, …) lie in tiles too. `spec.blocks` draws them.

A packed model may have its FFNs neuron by neuron (`Format.neurons`), so that neurons which do not fire need not be
read. Then the matrix that is activated (the gate, or `up` where there is none) lies in tiles as above. What is
multiplied by its activation, a row of D columns of `up` (where there is a gate) and one of `down`, lies in one record
for each neuron, record after record. The groups of integer formats are inside a neuron:

    a record:   | up: row of D columns | down: row of D columns |           each row padded to 64 bytes
    a row:      | numbers or codes, padded to 32 columns | scales float16 [G] | minimums float16 [G] |

Or the matrix that is activated lies in the record too (`Format.records`), so that nothing need be read of neurons that
a predictor calls inactive:

    a record:   | gate: row of D columns | up: row of D columns | down: row of D columns |

In int8 a code takes a byte. In int4, of each 32 columns, byte b holds column b in its low nibble and column 16 + b in
its high nibble. Groups are multiples of 32.

Norm weights, biases and learned positions take part in no matrix product. They lie row by row without gaps, always as
floats.

The KV cache of a layer is two pools, K and V, of pages of P positions (a multiple of 64). A page has a block for each
KV head, and a block its P rows of head_dim numbers, one after the other:

    floats         | row 0 | row 1 |  …  | row P-1 |
    int8, int4     | codes 0 |  …  | codes P-1 | scales float16 [G][P] | minimums float16 [G][P] |

A row is cut into G groups by the same rule. The last group may have fewer numbers. So the bytes stored for a token
depend on that token alone. In int8 the codes of a row take a byte each, padded with zeros to a multiple of 16. In int4
they are padded to a multiple of 32. Of each 32 codes, byte b holds number b in its low nibble and number 16 + b in its
high nibble. Groups are multiples of 32, so that all numbers in a SIMD vector have one scale. 64 numbers in int4 take 36
bytes: 4.5 bits a number.

What multiplies integers is rounded, unless activations are to be exact (`--exact`): to int8 where they are weights or
keys in int4, to int16 where they are keys in int8 or values (`graph.ops.Attend`). Floats are multiplied with floats.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec.blocks import BLOCKS, GROUP
from penstock.spec.blocks import TILE_ROWS as TILE_ROWS
from penstock.units import round_up

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
_ASKED = tuple(_BITS)  # what users may ask for; the others are those of files
_BITS |= {kind: blocks.code.bits for kind, blocks in BLOCKS.items()}
_ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
DEFAULT_GROUP = 64
# The limits of formats. The native kernels have the same limits (csrc/shapes.h), and a test compares them.
WEIGHT_GROUP, KV_GROUP = 8, 32  # columns of a group are a multiple of this, for weights and for KV
LINE_COLUMNS = 32  # columns of a neuron's row are padded to a multiple of this, and its groups are multiples of it
MOST_GROUP = 1024  # the most columns of a group
PAGE_TOKENS = 64  # tokens of a page are a multiple of this: attention walks blocks of so many, each within one page
ROW_ALIGN = 64  # bytes: a neuron's rows begin at multiples of a cache line
_NEURONS, _RECORDS = "-neurons", "-records"
_LABEL = re.compile(r"[a-z0-9][a-z0-9_+.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Format:
    """`kind`: float32, bfloat16, float16, int8, int4, or one of `spec.blocks.BLOCKS`. `group`: columns per scale, 0 for
    floats; for the formats of `spec.blocks` it is 32, whatever their own scales have. `neurons`: the FFNs of a model in
    this format lie neuron by neuron; a block in this format lies so. `records`: the weights that are activated lie so
    too.

    Raises BadRequest for a kind or a group size that there is not."""

    kind: str
    group: int = 0
    neurons: bool = False
    records: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _BITS:
            raise BadRequest(f"unknown number format {self.kind!r}: there are {', '.join(_ASKED)}")
        if self.in_blocks and (self.group != GROUP or self.neurons):
            raise BadRequest(f"{self.kind} has groups of {GROUP} columns, and does not lie neuron by neuron")
        if self.is_quantised and (self.group < WEIGHT_GROUP or self.group % WEIGHT_GROUP or self.group > MOST_GROUP):
            raise BadRequest(
                f"group size {self.group} of {self.kind} should be a multiple of {WEIGHT_GROUP}, from {WEIGHT_GROUP} to"
                f" {MOST_GROUP}"
            )
        if not self.is_quantised and self.group:
            raise BadRequest(f"{self.kind} has no groups")
        if self.records and not self.neurons:
            raise BadRequest(f"{self.kind} with records, which have no neurons")
        if self.neurons and self.group % LINE_COLUMNS:
            raise BadRequest(f"group size {self.group}: for neurons it should be a multiple of {LINE_COLUMNS}")

    @property
    def bits(self) -> int:
        return _BITS[self.kind]

    @property
    def is_quantised(self) -> bool:
        return self.kind in ("int8", "int4") or self.kind in BLOCKS

    @property
    def in_blocks(self) -> bool:
        """Whether it is one of `spec.blocks.BLOCKS`."""
        return self.kind in BLOCKS

    @property
    def name(self) -> str:
        """`int4`, or `int4-g32` where the group is not the default; `int4-neurons` where neurons lie apart, and
        `int4-records` where each has all of its weights together."""
        plain = self.kind if self.group in (0, DEFAULT_GROUP) or self.in_blocks else f"{self.kind}-g{self.group}"
        return plain + (_RECORDS if self.records else _NEURONS if self.neurons else "")

    @property
    def for_cpu(self) -> bool:
        """Of a whole model's weights: whether kernels for devices cannot read them."""
        return self.in_blocks

    @property
    def from_file(self) -> bool:
        """Of a whole model's weights: whether a file was quantised to these numbers, by another program."""
        return self.in_blocks

    def of(self, key: str, block: str) -> Format:
        """Of a whole model's weights: the format of the part `key`'s matrix `block`, all in tiles, before `within`."""
        return self.in_tiles

    @property
    def in_tiles(self) -> Format:
        """The same numbers, all in tiles."""
        return Format(self.kind, self.group)

    def within(self, cols: int) -> Format:
        """The format, in tiles, of a matrix with so many columns: a group ends where the matrix does. So groups of 128
        are groups of 64 in a granule of 64 columns of `down`. (A block of `spec.blocks` is cut by `Blocks.span`.)"""
        if not self.is_quantised or self.in_blocks or self.group <= cols:
            return self
        return Format(self.kind, round_up(cols, WEIGHT_GROUP))

    def groups(self, cols: int) -> int:
        """Groups of a row of so many columns; 0 for floats."""
        return -(-cols // self.group) if self.is_quantised else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of a tile of int8 or int4: codes, scales and minimums of 16 rows."""
        return TILE_ROWS * (self.group * self.bits // 8 + 4)

    def tile_bytes(self, cols: int) -> int:
        """Bytes of a tile of a matrix with so many columns, padding included. Of the formats of `spec.blocks`, columns
        are a multiple of 32."""
        if self.in_blocks:
            blocks = BLOCKS[self.kind]
            span = blocks.span(cols)
            return cols // span * blocks.block_bytes(span)
        if self.is_quantised:
            return self.groups(cols) * self.group_bytes
        even = cols + cols % 2 if self.kind == "bfloat16" else cols
        return TILE_ROWS * even * self.bits // 8

    def matrix_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix in tiles."""
        return tiles(rows) * self.tile_bytes(cols)

    def codes_bytes(self, cols: int) -> int:
        """Bytes of the numbers, or the codes, in a neuron's row."""
        return -(-cols // LINE_COLUMNS) * LINE_COLUMNS * self.bits // 8

    def row_bytes(self, cols: int) -> int:
        """Bytes of a neuron's row, padding included."""
        return round_up(self.codes_bytes(cols) + 4 * self.groups(cols), ROW_ALIGN)

    def plain_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a float matrix that lies row by row."""
        return rows * cols * self.bits // 8

    def kv_codes_bytes(self, head_dim: int) -> int:
        """Bytes of a token's numbers in one KV head, K or V. Of integer formats these are the codes alone."""
        if not self.is_quantised:
            return self.plain_bytes(1, head_dim)
        lanes = 128 // self.bits  # codes in 16 bytes
        return -(-head_dim // lanes) * 16

    def kv_bytes(self, head_dim: int) -> int:
        """All bytes that a token takes in one KV head, K or V: numbers (or codes), scales and minimums."""
        return self.kv_codes_bytes(head_dim) + 4 * self.groups(head_dim)

    def check_kv(self) -> None:
        """Raises BadRequest if a KV cache cannot be kept in this format."""
        if self.neurons or self.in_blocks:
            raise BadRequest(f"a KV cache in {self.name}: take float16, bfloat16, float32, int8 or int4")
        if self.group % KV_GROUP:
            raise BadRequest(f"a KV cache in {self.name}: its groups should be multiples of {KV_GROUP}")


@dataclass(frozen=True, slots=True)
class Mixed(Format):
    """The formats of a whole model's weights, where matrices have several. `kind` and `group` are those of most
    matrices. `others`: the matrices that have another, as ("7.ffn.down", format), sorted. `label`: its name, as of a
    file with such a mixture (`q4_k_m`). Raises BadRequest for others that are not sorted, or a label that is none."""

    label: str = ""
    others: tuple[tuple[str, Format], ...] = ()

    def __post_init__(self) -> None:
        Format.__post_init__(self)  # `super()` knows no class whose slots were made afterwards
        names = [name for name, _ in self.others]
        if self.neurons or not self.others or names != sorted(set(names)) or not _LABEL.fullmatch(self.label):
            raise BadRequest(f"a mixture of formats {self.label[:40]!r} that is none: it should name others, sorted")

    @property
    def name(self) -> str:
        return self.label

    @property
    def for_cpu(self) -> bool:
        return True  # kernels for devices read the matrices of a part by the format of its first one

    @property
    def from_file(self) -> bool:
        return self.is_quantised or any(fmt.is_quantised for _, fmt in self.others)

    def of(self, key: str, block: str) -> Format:
        name = f"{key}.{block}"
        index = bisect_left(self.others, name, key=lambda other: other[0])
        return self.others[index][1] if index < len(self.others) and self.others[index][0] == name else self.in_tiles


def mixture(table: Mapping[str, Format], label: str = "") -> Format:
    """The formats of a model's matrices, by part and block: "7.ffn.down", "embed.rows". Where all have the same it is
    that one. `label` is the mixture's name, unless a format has that name: then it is the formats' own, `q4_0+q6_k`.
    Raises BadRequest for an empty table."""
    if not table:
        raise BadRequest(f"unknown number format {label[:40]!r}, and no matrices that would say what it is")
    count = Counter(table.values())
    most = sorted(count, key=lambda fmt: (-count[fmt], fmt.name))
    if len(most) == 1:
        return most[0]
    label = label.lower()
    with suppress(BadRequest):
        parse_format(label)
        label = ""
    others = tuple((key, table[key]) for key in sorted(table) if table[key] != most[0])
    name = label or "+".join(fmt.name for fmt in most)
    return Mixed(most[0].kind, most[0].group, label=name, others=others)


@dataclass(frozen=True, slots=True)
class Share:
    """What part of the bytes and of the multiplications of some matrices those of one kind of format have."""

    kind: str
    bytes: float
    flops: float


# The formats of the matrices of a call: the kind that all have, or a share for each kind.
Kinds = str | tuple[Share, ...]


def kinds_name(kinds: Kinds) -> str:
    """`int4`, or `q4_k+q6_k`."""
    return kinds if isinstance(kinds, str) else "+".join(share.kind for share in kinds)


def tiles(rows: int) -> int:
    """Tiles of a matrix with so many rows."""
    return -(-rows // TILE_ROWS)


FLOAT32 = Format("float32")


def parse_format(text: str) -> Format:
    """The format that a user names: `int4`, `int4-g32`, `bf16`, `int4-neurons`, `int4-records`, … Raises BadRequest."""
    plain = text.strip().lower()
    if plain.endswith((_NEURONS, _RECORDS)):
        plain, _, layout = plain.rpartition("-")
        if plain.endswith((_NEURONS, _RECORDS)):
            raise BadRequest(f"unknown number format {text[:40]!r}")
        of = parse_format(plain)
        return Format(of.kind, of.group, neurons=True, records=f"-{layout}" == _RECORDS)
    name, _, group = plain.partition("-g")
    kind = _ALIASES.get(name, name)
    if kind in BLOCKS and not group:
        return Format(kind, GROUP)
    if kind == "q4_1" and not group:
        return Format("int4", 32)
    if kind in ("int8", "int4"):
        if group and re.fullmatch("[0-9]{1,6}", group) is None:
            raise BadRequest(f"number format {text!r}: the group size should be a number, as in int4-g32")
        return Format(kind, int(group) if group else DEFAULT_GROUP)
    if group:
        raise BadRequest(f"number format {text!r}: only int8 and int4 have groups")
    return Format(kind)
