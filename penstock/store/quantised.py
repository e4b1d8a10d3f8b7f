"""Reads matrices that GPTQ, AWQ, compressed-tensors or float8 left in several tensors, number for number.

A quantised matrix [out, in] of a folder is codes, scales and perhaps zero points. `combine` finds the tensors that
belong together and puts one in their place: with the name of the matrix, its shape, and the name of a format of
`spec.blocks`. `rows_of` gives its rows as `encode_blocks` takes those of a GGUF file: a row is blocks of 128 columns,
each its header's words, then the words of its codes, in the order that tiles have them too.

How tensors lie (int32 holds 32 / bits codes, the first one lowest; G groups):

    gptq     qweight int32 [in / 8, out]: along inputs; qzeros int32 [G, out / 8]; scales [G, out]; g_idx int32 [in]
    awq      qweight int32 [in, out / 8]: along outputs, 0 2 4 6 1 3 5 7; qzeros int32 [G, out / 8], likewise;
             scales [G, out]
    packed   weight_packed int32 [out, in / 8]; weight_scale [out, G]; weight_zero_point int32 [out / 8, G] or
             int8 [out, G]; weight_g_idx int32 [in]
    bytes    weight int8 [out, in]; weight_scale [out, 1] or [1]; weight_zero_point int8 likewise
    float8   weight float8 [out, in]; weight_scale [out, 1] or [1], or weight_scale_inv [out / rows, in / columns]

Sources: AutoGPTQ's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM.from_linear`, compressed-tensors' `pack_to_int32`,
DeepSeek-V3's `weight_dequant`. (code - zero point) * scale is what each of them dequantises to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.models.hf.config import MAX_WIDTH
from penstock.models.hf.quantization import KEY, Quantization
from penstock.spec.blocks import BLOCKS, SCALE, ZERO_BITS
from penstock.store.header import KINDS, TensorInfo, quoted

Array = npt.NDArray[Any]
# Reads rows lo..hi of a tensor as they are: bfloat16 as uint16, float8 as uint8.
Read = Callable[[TensorInfo, int, int], Array]

# How numpy holds the elements of these tensors.
DTYPES: dict[str, npt.DTypeLike] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.uint32, "I8": np.uint8, "F8_E4M3": np.uint8,
}  # fmt: skip
_TURNED = (
    128  # rows that are turned at a time, so that both sides stay in a core's cache: five times as fast as all at once
)
_LARGEST_FLOAT8 = 448
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an int32 is of output 8c + _AWQ_ORDER[i]

# By layout: the name of the codes, of the scales, of the zero points and of the order of columns.
_NAMES = {
    "gptq": ("qweight", ("scales",), "qzeros", "g_idx"),
    "awq": ("qweight", ("scales",), "qzeros", None),
    "packed": ("weight_packed", ("weight_scale",), "weight_zero_point", "weight_g_idx"),
    "bytes": ("weight", ("weight_scale",), "weight_zero_point", None),
    "float8": ("weight", ("weight_scale_inv", "weight_scale"), None, None),
}
# Of activations and KV, which are not quantised here, and what follows from other shapes.
_DROPPED = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale", "k_scale", "v_scale",
    "q_scale", "weight_shape",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pieces:
    """The tensors of one quantised matrix [out, in]. `zeros`: None where the zero point is the middle code, or there is
    none. `order`: the group of each column; None where groups lie one after the other."""

    how: Quantization
    shape: tuple[int, int]
    codes: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    order: TensorInfo | None = None

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(t for t in (self.codes, self.scales, self.zeros, self.order) if t is not None)

    @property
    def by_column(self) -> bool:
        """Whether rows of the matrix lie apart in the file."""
        return self.how.layout in ("gptq", "awq")

    @property
    def is_ordered(self) -> bool:
        """Whether the columns of a group may lie apart."""
        return self.how.ordered and self.order is not None


def combine(tensors: dict[str, TensorInfo], how: Quantization) -> tuple[dict[str, TensorInfo], dict[str, Pieces]]:
    """Joins the tensors that hold a quantised matrix. Returns the folder's tensors with one for each such matrix in
    their place, and by that one's name the pieces that it is made of.

    Raises BrokenModel where a tensor is missing or has another shape or type than follows from the others."""
    kept, pieces = dict(tensors), dict[str, Pieces]()
    codes_name, *_ = _NAMES[how.layout]
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == codes_name and (codes_name != "weight" or tensor.dtype in ("I8", "F8_E4M3")):
            weight = _pieces(tensors, stem, how)
            for piece in weight.tensors:
                del kept[piece.name]
            whole = f"{stem}.weight"
            if whole in kept:
                raise BrokenModel(f"{tensor.file} has both {quoted(name)} and {quoted(whole)}")
            pieces[whole] = weight
            kept[whole] = TensorInfo(whole, how.kind.upper(), weight.shape, tensor.file, tensor.offset, tensor.nbytes)
        elif last in _DROPPED:
            kept.pop(name, None)
    return kept, pieces


def _pieces(tensors: dict[str, TensorInfo], stem: str, how: Quantization) -> Pieces:
    codes_name, scale_names, zeros_name, order_name = _NAMES[how.layout]
    codes = tensors[f"{stem}.{codes_name}"]
    scales = next((tensors[f"{stem}.{name}"] for name in scale_names if f"{stem}.{name}" in tensors), None)
    if scales is None:
        raise BrokenModel(
            f"{codes.file} lacks {quoted(f'{stem}.{scale_names[-1]}')}, the scales of {quoted(codes.name)}"
        )
    zeros = tensors.get(f"{stem}.{zeros_name}")
    if zeros is None and how.layout in ("gptq", "awq"):
        raise BrokenModel(f"{codes.file} lacks {quoted(f'{stem}.qzeros')}, the zero points of {quoted(codes.name)}")
    if zeros is None and how.layout in ("packed", "bytes") and not how.symmetric:
        raise BrokenModel(
            f"{codes.file} lacks {quoted(f'{stem}.{zeros_name}')}, the zero points of {quoted(codes.name)}"
        )
    shape = _shape(codes, how)
    pieces = Pieces(how, shape, codes, scales, zeros, tensors.get(f"{stem}.{order_name}"))
    _check(pieces)
    return pieces


def _shape(codes: TensorInfo, how: Quantization) -> tuple[int, int]:
    """[out, in] of the matrix that these codes are of. Raises BrokenModel."""
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise BrokenModel(f"{codes.file}: tensor {quoted(codes.name)} {list(codes.shape)} is no matrix")
    first, second = codes.shape
    per = 1 if how.layout in ("bytes", "float8") else 32 // how.bits
    rows, cols = {"gptq": (second, first * per), "awq": (second * per, first)}.get(how.layout, (first, second * per))
    if cols > MAX_WIDTH:  # the order of columns is read before config.json is asked for shapes
        raise BrokenModel(
            f"{codes.file}: tensor {quoted(codes.name)} is of a matrix with {cols} columns, more than {MAX_WIDTH}"
        )
    return rows, cols


def _check(pieces: Pieces) -> None:
    """Checks types and shapes. Raises BrokenModel."""
    how, (rows, cols) = pieces.how, pieces.shape
    groups, per = -(-cols // how.group) if how.group else 1, 32 // how.bits
    codes = "F8_E4M3" if how.layout == "float8" else "I8" if how.layout == "bytes" else "I32"
    _require(pieces.codes, (codes,), pieces.codes.shape)
    zeros = pieces.zeros
    if how.layout in ("gptq", "awq"):
        _require(pieces.scales, tuple(KINDS), (groups, rows))
        if rows % per:
            raise BrokenModel(
                f"{pieces.codes.file}: tensor {quoted(pieces.codes.name)} has {rows} outputs, no multiple of {per}"
            )
        assert zeros is not None
        _require(zeros, ("I32",), (groups, rows // per))
    elif how.layout == "float8" and how.block_rows > 1:
        _require(pieces.scales, tuple(KINDS), (-(-rows // how.block_rows), groups))
    else:
        one: tuple[tuple[int, ...], ...] = ((rows,), (), (1,), (1, 1)) if groups == 1 else ()
        _require(pieces.scales, tuple(KINDS), (rows, groups), *one)
        if zeros is not None and zeros.dtype == "I8":
            _require(zeros, ("I8",), (rows, groups), *one)
        elif zeros is not None:
            _require(zeros, ("I32", "I8"), (-(-rows // per), groups))
    if pieces.order is not None:
        _require(pieces.order, ("I32",), (cols,))


def _require(tensor: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises BrokenModel where a tensor has none of these types, or none of these shapes."""
    if tensor.dtype not in dtypes or tensor.shape not in shapes:
        raise BrokenModel(
            f"{tensor.file}: tensor {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}, where its matrix has"
            f" {' or '.join(dtypes)} {list(shapes[0])}"
        )


def require_order(pieces: Pieces, read: Read, may_lack_it: bool = False) -> None:
    """Raises UnsupportedModel where the columns of a group lie apart (act-order) though config.json says otherwise, or
    groups have other than their columns; BrokenModel where columns are in no group. `may_lack_it`: zeros stand for what
    is not there."""
    if pieces.order is None:
        return
    order, (_, cols), group = read(pieces.order, 0, pieces.shape[1]).view(np.int32), pieces.shape, pieces.how.group
    own = np.arange(cols, dtype=np.int32) // (group or cols)
    if (order == own).all() or (order == -1).all() or (may_lack_it and not order.any()):
        return
    where = f"{pieces.order.file}: tensor {quoted(pieces.order.name)}"
    if order.min() < 0 or order.max() > own[-1]:
        raise BrokenModel(f"{where} names groups {order.min()} to {order.max()}, of {own[-1] + 1}")
    if not pieces.how.ordered:
        raise UnsupportedModel(f"{where} has the columns of a group apart (act-order), but {KEY} says no desc_act")
    if not np.array_equal(np.bincount(order, minlength=own[-1] + 1), np.bincount(own)):
        raise UnsupportedModel(
            f"{where} has other than {group} columns in a group: kernels multiply groups of as many columns"
        )


def order_of(pieces: Pieces, read: Read) -> npt.NDArray[np.int64] | None:
    """The columns of a matrix in the order in which their groups lie together, int64 [in]: column i is column order[i]
    of the checkpoint's. None where groups lie together there. Only of what `require_order` has let pass."""
    if pieces.order is None or not pieces.how.ordered:
        return None
    order = np.argsort(read(pieces.order, 0, pieces.shape[1]).view(np.int32), kind="stable")
    return None if (order == np.arange(len(order))).all() else order


def rows_of(pieces: Pieces, read: Read, lo: int, hi: int) -> Array:
    """Rows lo..hi as uint8 [hi - lo, bytes of a row]. Of layouts that are cut by columns, all rows: lo is 0. Columns
    lie in the order of `order_of`.

    Raises UnsupportedModel for scales that the format cannot hold, StorageFailed."""
    blocks, layout = BLOCKS[pieces.how.kind], pieces.how.layout
    count = -(-pieces.shape[1] // blocks.columns)
    raw = np.zeros((hi - lo, count, blocks.nbytes // 4), np.uint32)
    header = blocks.columns // blocks.scaled
    codes, bits, order = raw[:, :, header:], pieces.how.bits, order_of(pieces, read)
    if layout == "gptq":
        words = read(pieces.codes, 0, pieces.codes.shape[0])
        for row in range(0, len(codes), _TURNED):
            some = words[:, row : row + _TURNED]
            some = some if order is None else _permuted(some.T, order, bits).T
            _put(codes[row : row + _TURNED], _in_order(some, bits).T)
    elif layout == "awq":
        for nth, eighth in enumerate(_awq_words(read(pieces.codes, 0, pieces.codes.shape[0]))):
            _put(codes[_AWQ_ORDER[nth] :: 8], eighth.T)
    elif layout == "packed":
        words = read(pieces.codes, lo, hi)
        for row in range(0, len(codes), _TURNED):
            some = words[row : row + _TURNED]
            some = some if order is None else _permuted(some, order, bits)
            _put(codes[row : row + _TURNED], _in_order(some, bits))
    else:
        rows = read(pieces.codes, lo, hi)
        _put(codes, (rows ^ 0x80 if layout == "bytes" else rows).view(np.uint32))
    scales = _words(pieces, read, lo, hi)
    raw[:, :, :header] = _blocked(scales, count * header).reshape(hi - lo, count, header)
    return raw.view(np.uint8).reshape(hi - lo, -1)


def _blocked(words: Array, length: int) -> Array:
    """words [r, n] with zeros behind them: [r, length]."""
    if words.shape[1] == length:
        return words
    out = np.zeros((len(words), length), words.dtype)
    out[:, : words.shape[1]] = words
    return out


def _put(into: Array, words: Array) -> None:
    """into [r, blocks, n] = words [r, m], with zeros behind them."""
    length = into.shape[2]
    whole = words.shape[1] // length
    into[:, :whole] = words[:, : whole * length].reshape(len(words), whole, length)
    if whole < into.shape[1]:
        rest = words[:, whole * length :]
        into[:, whole, : rest.shape[1]] = rest


def _in_order(words: Array, bits: int) -> Array:
    """int32 with eight codes each, the first one lowest → with the low nibbles of their bytes first (`spec.blocks`).
    Four codes of 8 bits stay as they are."""
    if bits == 8:
        return words

    def apart(four: Array) -> Array:
        """Four nibbles, each into the low half of a byte."""
        four = (four | four << np.uint32(8)) & np.uint32(0x00FF00FF)
        spread: Array = (four | four << np.uint32(4)) & np.uint32(0x0F0F0F0F)
        return spread

    joined: Array = apart(words & np.uint32(0xFFFF)) | apart(words >> np.uint32(16)) << np.uint32(4)
    return joined


def _permuted(words: Array, order: npt.NDArray[np.int64], bits: int) -> Array:
    """Rows of words, uint32 [r, in · bits / 32], with their codes in an order."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)).reshape(len(words), -1)[:, order]
    moved: Array = np.bitwise_or.reduce(codes.reshape(len(words), -1, len(shifts)) << shifts, axis=2)
    return moved


def _awq_words(words: Array) -> list[Array]:
    """uint32 [in, out / 8] of eight outputs each → for each of the eight the words of eight inputs, [in / 8, out /
    8]."""
    eights = words.reshape(len(words) // 8, 8, -1)
    blocks = []
    for nth in range(8):
        out = np.zeros((len(eights), eights.shape[2]), np.uint32)
        for k in range(8):
            out |= (eights[:, k] >> np.uint32(4 * nth) & np.uint32(15)) << np.uint32(8 * (k % 4) + 4 * (k // 4))
        blocks.append(out)
    return blocks


def _words(pieces: Pieces, read: Read, lo: int, hi: int) -> Array:
    """The words of headers of rows lo..hi, uint32 [r, in / scaled]."""
    how, cols, blocks = pieces.how, pieces.shape[1], BLOCKS[pieces.how.kind]
    scales, zeros = _by_row(pieces, pieces.scales, read, lo, hi), _zeros(pieces, read, lo, hi)
    floats = _float32(scales)
    largest = _LARGEST_FLOAT8 if how.layout == "float8" else 1 << how.bits  # of a code less its zero point
    if not bool((np.abs(floats) <= np.finfo(np.float32).max / largest).all()):
        raise BrokenModel(
            f"{pieces.scales.file}: tensor {quoted(pieces.scales.name)} holds NaN or infinite scales, or such as make"
            " numbers beyond float32"
        )
    words = floats.view(np.uint32)
    if blocks.word != SCALE:
        low = np.uint32((1 << ZERO_BITS) - 1)
        if (words & low).any():
            raise UnsupportedModel(
                f"{pieces.scales.file}: tensor {quoted(pieces.scales.name)} has scales in float32 that need more than"
                f" {23 - ZERO_BITS + 1} bits; such scales are read in float16 and bfloat16"
            )
        words = words | zeros
    group_of = np.arange(0, cols, blocks.scaled) // (how.group or cols)
    repeated: Array = words[:, group_of]
    return repeated


def _by_row(pieces: Pieces, tensor: TensorInfo, read: Read, lo: int, hi: int) -> Array:
    """A tensor of scales or of zero points in bytes, of rows lo..hi: [r, groups]."""
    if pieces.by_column:
        return np.ascontiguousarray(read(tensor, 0, tensor.shape[0]).T)
    if not tensor.shape or tensor.shape[0] == 1 != pieces.shape[0]:
        return np.repeat(read(tensor, 0, 1).reshape(1, -1), hi - lo, axis=0)
    rows = pieces.how.block_rows if pieces.how.block_rows > 1 else 1
    first = lo // rows
    packed_rows = read(tensor, first, -(-hi // rows))
    return packed_rows.reshape(len(packed_rows), -1)[np.arange(lo, hi) // rows - first]


def _zeros(pieces: Pieces, read: Read, lo: int, hi: int) -> Array:
    """Zero points of rows lo..hi for codes without a sign, uint32 [r, groups]."""
    how, tensor, half = pieces.how, pieces.zeros, np.uint32(1 << (pieces.how.bits - 1))
    if tensor is None:
        return half.reshape(1, 1)
    if tensor.dtype == "I8":
        signed = _by_row(pieces, tensor, read, lo, hi).view(np.int8).astype(np.int32)
        if signed.min() < -int(half) or signed.max() >= half:
            raise BrokenModel(f"{tensor.file}: tensor {quoted(tensor.name)} has zero points that are no codes")
        return (signed + np.int32(half)).view(np.uint32)
    per, mask = 32 // how.bits, np.uint32((1 << how.bits) - 1)
    if how.layout == "packed":  # along rows
        first = lo // per
        packed = read(tensor, first, -(-hi // per))
        codes = np.stack([packed >> np.uint32(how.bits * i) & mask for i in range(per)], axis=1)
        return codes.reshape(-1, packed.shape[1])[lo - first * per :][: hi - lo]
    packed = read(tensor, 0, tensor.shape[0])
    codes = np.empty((packed.shape[0], packed.shape[1], per), np.uint32)
    for i in range(per):
        codes[:, :, _AWQ_ORDER[i] if how.layout == "awq" else i] = packed >> np.uint32(how.bits * i) & mask
    # Less one was taken within the bits of a code: what became of 0 is the largest one. AutoGPTQ's torch kernels add
    # the one within them too.
    zeros = codes.reshape(packed.shape[0], -1) + np.uint32(how.zero_is_less) & mask
    return np.ascontiguousarray(zeros.T)


def _float32(scales: Array) -> npt.NDArray[np.float32]:
    """float32, float16 or bfloat16's bits → float32."""
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(scales, np.float32)
