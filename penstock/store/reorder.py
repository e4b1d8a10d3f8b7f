"""Writes a packed model again with the neurons of its FFNs in another order, for `penstock pack --profile`.

No number changes: whole rows and records move, and so do those of predictors that are there. In tiles of an integer
format the groups of `down` run along a granule's neurons, so there only whole groups move. Peak memory is that of
packing, and of one layer's FFN, or of all predictors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from penstock import _native
from penstock.errors import BadRequest, BrokenModel, PenstockError
from penstock.spec import codec
from penstock.spec.format import TILE_ROWS, Format, Mixed, tiles
from penstock.spec.order import NeuronOrder, moved_together
from penstock.spec.parts import Block, Part
from penstock.spec.profile import Profile
from penstock.store import predictors
from penstock.store.files import MAX_COPIED_BYTES, open_regular, read_bytes, storage_errors
from penstock.store.manifest import SUM_BYTES, SUMS
from penstock.store.pack import orders_by
from penstock.store.packed import Packed, check_files, damaged_granule, open_packed, read_files
from penstock.store.profile_file import file_of
from penstock.store.writer import SHARD_BYTES, Fill, Progress, write_packed

Array = npt.NDArray[Any]


def reorder(
    src: Path, dst: Path, profile: Profile, weights: Format | None = None, progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES, spread: Path | None = None, say: Callable[[str], None] | None = None,
) -> Path:  # fmt: skip
    """Packs the packed model `src` into the new folder `dst`, its neurons hot to cold by a profile, and returns `dst`.
    `weights`: None, or the format that they have. `progress`, `shard_bytes`, `spread`: as for `pack`. All bytes are
    compared with their checksums. Predictors beside `src` are kept beside `dst` too, for neurons in the new order.
    `say`: gets a line where they cannot be.

    Raises BadRequest, BrokenModel, DamagedModel, StorageFailed.
    """
    packed = open_packed(src)
    if packed.sums is None:
        raise BadRequest(f"{src} was packed by an older version, without checksums of its bytes: pack it again")
    if weights not in (None, packed.weights):
        have = packed.weights.name
        raise BadRequest(f"{src} has {have} weights, which stay as they are: give the checkpoint for others")
    if packed.weights.in_blocks or isinstance(packed.weights, Mixed):
        raise BadRequest(
            f"{src} has {packed.weights.name} weights, a format of quantised files: its neurons stay where they are"
        )
    check_files(src)
    orders = orders_by(profile, packed.spec, packed.orders, moved_together(packed.weights))
    extras = {file.name: read_bytes(src / file.name, MAX_COPIED_BYTES) for file in read_files(src) if file.name != SUMS}
    listed = tuple(NeuronOrder.of(layer, order) for layer, order in orders.items())
    fingerprint = {"weights": packed.weights.name, "orders": codec.to_json(listed), "source": packed.sums.hex()}
    places = {layer: _places(packed, layer, order) for layer, order in orders.items()}
    fill = _filler(packed, places)
    how = (progress, shard_bytes, spread, None, None, listed, file_of(profile))

    def carry(partial: Path) -> None:
        try:
            _carry_predictors(packed, partial, places)
        except PenstockError as error:
            if say is not None:
                say(f"the predictors of {src} were left out: {error.message}")

    return write_packed(
        dst, tuple(packed.parts.values()), packed.weights, fingerprint, fill, extras, *how, last=carry
    )  # fmt: skip


def _carry_predictors(packed: Packed, dst: Path, places: dict[int, npt.NDArray[np.int64]]) -> None:
    """Keeps the predictors beside a packed model beside `dst` too, where its neurons lie at other places. Raises
    BadRequest, BrokenModel, DamagedModel, StorageFailed."""
    known = predictors.kept(packed.folder, packed.spec)
    if known is None:
        return
    source, granules = predictors.with_predictors(packed), []
    for part in known.parts(packed.spec):
        before = _read(source, part, 0, 1)
        granules.append(move_foretold(part, before, places[part.layer])[0])
    named = replace(known, model_sha256=predictors.model_sha256(dst))
    predictors.keep(named, granules, dst, packed.spec)


def _places(packed: Packed, layer: int, order: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each place in the new order, the place where its neuron lies now. `order`: of the checkpoint's numbers."""
    place_of = np.arange(len(order))
    if layer in packed.orders:
        place_of[np.array(packed.orders[layer])] = np.arange(len(order))
    return np.asarray(place_of[np.array(order)])


def _filler(packed: Packed, places: dict[int, npt.NDArray[np.int64]]) -> Fill:
    kept: dict[str, Array] = {}  # the FFN at hand, uint8 [granules, granule_bytes]

    def fill(part: Part, lo: int, hi: int, out: Array) -> None:
        if part.kind != "ffn":
            out[:] = _read(packed, part, lo, hi).reshape(-1)
            return
        if part.key not in kept:
            kept.clear()
            kept[part.key] = _read(packed, part, 0, part.granules)
        out[:] = 0
        first = lo * part.granule_rows
        moved = places[part.layer][first : hi * part.granule_rows]
        move_neurons(part, kept[part.key], moved, out.reshape(hi - lo, -1), moved_together(packed.weights))
        if hi == part.granules:
            kept.clear()

    return fill


def _read(packed: Packed, part: Part, lo: int, hi: int) -> Array:
    """Granules lo..hi of a part, uint8 [hi - lo, granule_bytes]. Raises DamagedModel, BrokenModel, StorageFailed."""
    file, offset, nbytes = packed.locate(part.key, lo, hi)
    granules = np.empty((hi - lo, part.granule_bytes), np.uint8)
    data = granules.reshape(-1)
    done = 0
    with storage_errors("read", file), os.fdopen(open_regular(file), "rb", buffering=0) as stream:
        while done < nbytes:
            count = os.preadv(stream.fileno(), [data[done:].data], offset + done)
            if count == 0:
                raise BrokenModel(f"{file} is truncated in part {part.key}")
            done += count
        os.posix_fadvise(stream.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)
    sums = _native.granule_sums(granules.ctypes.data, hi - lo, part.granule_bytes)
    expected = packed.sums_of(part.key)[SUM_BYTES * lo : SUM_BYTES * hi]
    if sums != expected:
        wrong = next(i for i in range(len(sums)) if sums[i] != expected[i])
        raise damaged_granule(file, part.key, lo + wrong // SUM_BYTES)
    return granules


def move_neurons(part: Part, granules: Array, places: npt.NDArray[np.int64], out: Array, together: int = 1) -> None:
    """Neuron i of granules `out`, uint8 [g, granule_bytes], becomes the one at place `places[i]` of an FFN's granules,
    uint8 [G, granule_bytes]. `together`: so many of them lie beside each other at both places, but for the last ones,
    which have no others behind them (`spec.order.moved_together`)."""
    for block in part.blocks:
        _move(block, part.granule_rows, granules, places, out, together)


def move_foretold(part: Part, granules: Array, places: npt.NDArray[np.int64]) -> Array:
    """A layer's predictor, uint8 [1, granule_bytes], for neurons of which the one at place `places[i]` comes to place
    i. The columns behind the last neuron stay."""
    out = granules.copy()
    columns = part.block("neurons").rows
    every = np.concatenate([places, np.arange(len(places), columns)])
    for name in ("neurons", "neurons_bias"):
        _move(part.block(name), columns, granules, every, out, 1)
    return out


def _move(
    block: Block, granule_rows: int, granules: Array, places: npt.NDArray[np.int64], out: Array, together: int
) -> None:
    """Moves what neurons have of one block, as `move_neurons` does."""
    views = (_cells(each, block, together) for each in (granules, out))
    for before, after in zip(*views, strict=True):
        rows, lanes = after.shape[1:3]
        neurons = granule_rows // (rows * lanes)  # of a cell
        assert neurons in (1, together)
        source, target = places[::neurons] // neurons, np.arange(-(-len(places) // neurons))
        of, to = ((cells // (rows * lanes), cells // lanes % rows, cells % lanes) for cells in (source, target))
        after[to] = before[of]


def _cells(granules: Array, block: Block, together: int) -> list[Array]:
    """A block of granules as views [G, a, b, …] of cells. A cell is what one neuron has of the block; if `down` is
    quantised, what `together` neurons have, which share groups. Cell n of a granule is [n // b, n % b] of it.
    `granules`: uint8 [G, granule_bytes]."""
    fmt, n_tiles = block.format, tiles(block.rows)
    if block.stride:
        row = fmt.row_bytes(block.cols)
        shape, strides = (len(granules), block.rows, 1, row), (granules.strides[0], block.stride, row, 1)
        return [as_strided(granules[:, block.offset : block.end], shape, strides)]
    data = granules[:, block.offset : block.offset + block.nbytes]
    if not block.tiled:  # a vector of float32
        return [_cut(data.view(np.uint32), block.cols, 1)]
    if block.name == "down" and fmt.is_quantised:
        return [_cut(data, n_tiles, block.cols // together, -1).swapaxes(1, 2)[:, :, None]]
    if block.name == "down":
        width = 2 if fmt.kind == "bfloat16" else 1  # columns of a word
        numbers = data.view(np.uint32 if fmt.kind == "float32" else np.uint16)
        return [_cut(numbers, n_tiles, block.cols // width, TILE_ROWS, width).transpose(0, 2, 4, 1, 3)]
    if fmt.is_quantised:
        groups = _cut(data, n_tiles, fmt.groups(block.cols), fmt.group_bytes)
        codes = _cut(groups[..., : -4 * TILE_ROWS].view(np.uint32), -1, TILE_ROWS)  # [G, tiles, groups, lines, 16]
        factors = _cut(groups[..., -4 * TILE_ROWS :].view(np.uint16), 2, TILE_ROWS)  # [G, tiles, groups, 2, 16]
        return [np.moveaxis(numbers, 4, 2) for numbers in (codes, factors)]
    words = data.view(np.uint16 if fmt.kind == "float16" else np.uint32)
    return [_cut(words, n_tiles, -1, TILE_ROWS).swapaxes(2, 3)]


def _cut(data: Array, *shape: int) -> Array:
    """A view whose last axis is cut into several."""
    return data.reshape(*data.shape[:-1], *shape)
