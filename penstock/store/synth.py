"""Writes a packed model of a real shape with random weights, to measure without a download, for `penstock synth`.

Weights come out of a few pools of random numbers, which are read from another offset for every matrix: to draw billions
of numbers would take longer than to write them. All matrices have mean 0 and standard deviation 1 / sqrt(fan-in). So a
layer adds about as much as it reads, and activations stay finite over 80 layers.

Models with a ReLU can have neurons that fire at rates of their own: a number for each neuron, its `shift`, is added to
what the ReLU gets. It stands in the bias of the first matrix. Without such a bias it is added to every weight of the
neuron's row, and all inputs of the FFN have a part in common, which is the same for each element. A token's state must
then differ from others' in every layer, so layers add little to it (`Rated`).
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import BadRequest
from penstock.models import TensorSource, own_weights, sources
from penstock.spec.format import TILE_ROWS, Format
from penstock.spec.model import RELUS, ModelSpec
from penstock.spec.parts import Block, Part, parts
from penstock.store.byte_level import byte_characters
from penstock.store.files import read_bytes
from penstock.store.manifest import CONFIG, MAX_CONFIG_BYTES
from penstock.store.packed import read_config
from penstock.store.quantize import decode, decode_rows, encode, encode_rows, fields, row_view, words
from penstock.store.random_blocks import fill_blocks
from penstock.store.writer import SHARD_BYTES, Progress, write_packed

Array = npt.NDArray[Any]

# 2 Mi normals and 4 MiB of codes: larger than any L2 cache, so that streaming them is honest, and small beside a model.
_NORMALS = 2 << 20
_CODE_BYTES = 4 << 20
_SCALES = 64 << 10
_NORM_STD, _BIAS_STD = 0.1, 0.02
_INTO_RESIDUAL = ("o", "down", "o_bias", "down_bias")
# What attention adds in models with experts, relative to an FFN. Random attention averages over all positions: with 1.0
# the states of different tokens were parallel after 10 layers (cosine 0.88), and all tokens went to the same 25 of 128
# experts.
ROUTED_OUT = 0.1

# Of learned positions in models whose neurons fire at given rates: how much of a position's row the next one has, and
# how large rows are relative to tokens' embeddings. Successive tokens so share some of their live neurons.
POSITIONS_ALIKE, POSITIONS_STD = 0.95, 1.3

BOS, EOS = "<|bos|>", "<|eos|>"

Shifts = Mapping[int, Array]  # float32 [N] by layer


@dataclass(frozen=True)
class Rated:
    """Where the shifts of a model's neurons go. `matrix`: the block whose product the ReLU gets. `bias`: its bias, ""
    where it has none."""

    matrix: str
    bias: str

    @classmethod
    def of(cls, spec: ModelSpec) -> Rated:
        """Raises BadRequest for a model whose neurons do not all have a ReLU."""
        kinds = {(f.activation in RELUS, f.gated, f.up_bias) for layer in spec.layers for f in layer.ffns}
        if spec.is_routed or len(kinds) > 1 or not next(iter(kinds))[0]:
            said = ", ".join(sorted({f.activation for layer in spec.layers for f in layer.ffns}))
            what = f"this model has {'experts' if spec.is_routed else said}"
            raise BadRequest(f"neurons have rates where all FFNs are dense, alike, and of {' or '.join(RELUS)}: {what}")
        _, gated, has_bias = kinds.pop()
        matrix = "gate" if gated else "up"
        return cls(matrix, f"{matrix}_bias" if has_bias else "")


def synth(
    config: Path,
    dst: Path,
    weights: Format | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    spread: Path | None = None,
    router_skew: float = 0.0,
    shifts: Shifts | None = None,
) -> Path:
    """Writes the packed model `dst` of the shape that `config` (a folder or its config.json) describes.

    `weights`: the format, None for the config's own. `router_skew`: the norms of a router's rows fall as
    rank^-router_skew, so that some experts are asked for more often than others; with 0 all norms are alike. `shifts`:
    of the neurons of a model with ReLU (`serve.firing_rates` finds them); None for a model as random as others. The
    same arguments give the same bytes. A byte tokenizer and its generation_config.json are written too. Raises and
    resumes as `pack.pack`.
    """
    keys, spec = read_config(config)
    file = config / CONFIG if config.is_dir() else config
    weights = weights or own_weights(keys, spec, str(config))
    extras = {CONFIG: read_bytes(file, MAX_CONFIG_BYTES), **byte_tokenizer(spec)}
    fingerprint: dict[str, Any] = {"weights": weights.name, "seed": seed, "config": zlib.crc32(extras[CONFIG])}
    if router_skew:
        fingerprint["router_skew"] = str(router_skew)
    if shifts is not None:
        fingerprint["shifts"] = [zlib.crc32(shifts[layer].tobytes()) for layer in sorted(shifts)]
    maker = RandomWeights(spec, seed, router_skew, shifts)
    return write_packed(
        dst, parts(spec, weights), weights, fingerprint, maker.fill, extras, progress, shard_bytes, spread
    )


class RandomWeights:
    """Makes granules out of the pools. Matrices of whole granules are copied from a pool in the format. Vectors, and
    matrices of granules that are not full and so hold padding, are encoded.

    `shifts`: of neurons that fire at rates of their own; a layer that it lacks has none yet. None for all other models.
    """

    def __init__(self, spec: ModelSpec, seed: int, router_skew: float = 0.0, shifts: Shifts | None = None) -> None:
        self.spec, self.seed, self.router_skew, self.shifts = spec, seed, router_skew, shifts
        self.rated = None if shifts is None else Rated.of(spec)
        self.sources: dict[tuple[str, str], TensorSource] = sources(spec)
        self._pools: dict[tuple[str, Format, float], Array] = {}

    def fill(self, part: Part, lo: int, hi: int, out: Array) -> None:
        """Writes granules lo..hi of the part to `out`, uint8 [(hi - lo) · granule_bytes]."""
        shifts = None if self.shifts is None or part.kind != "ffn" else self.shifts.get(part.layer)
        for g in range(lo, hi):
            granule = out[(g - lo) * part.granule_bytes :][: part.granule_bytes]
            if part.by_neurons:
                granule[:] = 0
            end = 0
            for block in part.blocks:
                if block.stride:
                    self._neurons(part, block, g, granule)
                    end = block.end
                    continue
                granule[end : block.offset] = 0
                end = block.offset + block.nbytes
                self._block(part, block, g, granule[block.offset : end])
            granule[end:] = 0
            if shifts is not None:
                self._shift(part, granule, shifts[g * part.granule_rows :][: part.granule_rows])
            elif self.rated and part.key == "embed" and not self.rated.bias and self.spec.norm.kind == "rms":
                _add(granule, part.block("rows"), np.full(part.rows_of(g, g + 1), self.spec.d_embed**-0.5, np.float32))

    def _shift(self, part: Part, granule: Array, shifts: Array) -> None:
        """Adds its shift to what each neuron of a granule has before its ReLU. shifts float32 [rows]."""
        assert self.rated is not None
        if not self.rated.bias:
            _add(granule, part.block(self.rated.matrix), shifts)
            return
        block = part.block(self.rated.bias)
        granule[block.offset : block.offset + block.nbytes].view(np.float32)[: len(shifts)] = shifts

    def _block(self, part: Part, block: Block, g: int, out: Array) -> None:
        # Offsets are multiples of 64 elements: neighbouring matrices share no element at the same place.
        start = 64 * zlib.crc32(f"{self.seed}/{part.key}/{g}/{block.name}".encode())
        by_column = self.sources[part.key, block.name].axis == 1
        rows = part.rows_of(g, g + 1)
        vector = block.rows == 1 and not block.tiled
        scale = self._scale(block)
        if block.format.in_blocks:
            std = scale / math.sqrt(block.cols * part.rows / part.granule_rows if by_column else block.cols)
            bits, d = np.empty(block.nbytes, np.uint8), np.empty(block.nbytes // 2, np.float16)
            _tile(bits, self._pool("codes", block.format, 0.0), start)
            _tile(d, self._pool("scales", block.format, 1.0), start)
            filled = block.rows if by_column else block.rows * rows // part.granule_rows
            fill_blocks(out, filled, block.rows, block.cols, block.format, std, bits, d)
            return
        if not vector and rows == part.granule_rows:
            fan_in = block.cols * part.rows // part.granule_rows if by_column else block.cols
            if self.rated and block.name == "positions":
                encode(self.alike_rows(block), block.format, out=out, tiled=block.tiled)
                return
            if part.kind == "router" and block.name == "scores" and self.router_skew:
                encode(self.router_rows(part.layer, block), block.format, out=out, tiled=block.tiled)
                return
            self._whole(block.format, scale / math.sqrt(fan_in), start, block, out)
            return
        if vector:
            shape = (1, block.cols * rows // part.granule_rows)
            mean, std = (0.0, _BIAS_STD) if block.name.endswith("bias") else (1.0 - self.spec.norm.offset, _NORM_STD)
            if self.rated and block.name == "final":  # signs at random, or a tied head finds each token likest itself
                mean, std = -self.spec.norm.offset, 1.0
            elif self.rated and block.name in _INTO_RESIDUAL:
                std = scale
            elif self.rated and block.name == "ffn_in_bias" and not self.rated.bias:
                mean = 1.0  # what all inputs of the FFN have in common
        else:
            shape = (block.rows, block.cols * rows // part.granule_rows) if by_column else (rows, block.cols)
            mean, std = 0.0, scale / math.sqrt(part.rows if by_column else block.cols)
        values = np.empty(shape, np.float32)
        _tile(values.reshape(-1), self._pool("normals", Format("float32"), 1.0), start)
        values *= np.float32(std)
        values += np.float32(mean)
        encode(values, block.format, block.rows, block.cols, out, block.tiled)

    def _neurons(self, part: Part, block: Block, g: int, granule: Array) -> None:
        """Writes a block that lies neuron by neuron. A row's numbers follow each other as those of a tile do."""
        start = 64 * zlib.crc32(f"{self.seed}/{part.key}/{g}/{block.name}".encode())
        fan_in = part.rows if block.name == "down" else block.cols
        values = np.empty((part.rows_of(g, g + 1), block.cols), np.float32)
        _tile(values.reshape(-1), self._pool("normals", Format("float32"), 1.0), start)
        values *= np.float32(self._scale(block) / math.sqrt(fan_in))
        encode_rows(values, block, granule)

    def _scale(self, block: Block) -> float:
        """A factor for a block's numbers. With 1, a product is about as large as the numbers that go into it."""
        if self.rated and block.name in _INTO_RESIDUAL:  # over all layers no more than a token's embedding
            return float((self.spec.d_model * len(self.spec.layers)) ** -0.5)
        return ROUTED_OUT if block.name == "o" and self.spec.is_routed else 1.0

    def alike_rows(self, block: Block) -> Array:
        """float32 [positions, D]: learned positions of which each is like the one before (an AR(1) process)."""
        rng = np.random.default_rng([self.seed, 3])
        rows = rng.standard_normal((block.rows, block.cols), np.float32)
        for before, row in itertools.pairwise(rows):
            row *= np.float32((1 - POSITIONS_ALIKE**2) ** 0.5)
            row += np.float32(POSITIONS_ALIKE) * before
        rows *= np.float32(POSITIONS_STD / math.sqrt(block.cols))
        return rows

    def router_rows(self, layer: int, block: Block) -> Array:
        """float32 [X, D]: of a router with skew. Ranks are shuffled, in each layer differently."""
        rng = np.random.default_rng([self.seed, layer])
        norms = (1 + rng.permutation(block.rows)) ** -self.router_skew
        rows = rng.standard_normal((block.rows, block.cols), np.float32) / math.sqrt(block.cols)
        return rows * norms[:, np.newaxis].astype(np.float32)

    def _whole(self, fmt: Format, std: float, start: int, block: Block, out: Array) -> None:
        if not fmt.is_quantised:
            pool = self._pool("normals", fmt, std)
            _tile(out.view(pool.dtype), pool, start)
            if block.tiled:
                _clear_padding(words(out, block.rows, block.cols, fmt), block.rows)
                if fmt.kind == "bfloat16" and block.cols % 2:
                    words(out, block.rows, block.cols, fmt)[:, -1] &= 0xFFFF  # the upper half is the later column
            return
        codes, scales, minimums = fields(out, block.rows, block.cols, fmt)
        for view, pool_name in ((codes, "codes"), (scales, "scales"), (minimums, "minimums")):
            pool = self._pool(pool_name, fmt, 0.0 if pool_name == "codes" else std)
            drawn = np.empty(view.size, pool.dtype)
            _tile(drawn, pool, start)
            view[...] = drawn.reshape(view.shape)
        codes[:, -1] &= _tail_mask(block.cols, fmt)
        _clear_padding(codes.view(np.uint32)[..., 0], block.rows)
        _clear_padding(scales, block.rows)
        _clear_padding(minimums, block.rows)

    def _pool(self, name: str, fmt: Format, std: float) -> Array:
        key = (name, fmt, std)
        if key not in self._pools:
            self._pools[key] = self._make_pool(name, fmt, std)
        return self._pools[key]

    def _make_pool(self, name: str, fmt: Format, std: float) -> Array:
        rng = np.random.default_rng([self.seed, {"normals": 0, "codes": 1}.get(name, 2)])
        if name == "codes":
            return np.frombuffer(rng.bytes(_CODE_BYTES), np.uint8)
        if name == "normals":
            if std == 1.0 and fmt.kind == "float32":
                return rng.standard_normal(_NORMALS, np.float32)
            values = self._pool("normals", Format("float32"), 1.0) * np.float32(std)
            return encode(values.reshape(1, -1), fmt, tiled=False).view(np.uint32 if fmt.bits == 32 else np.uint16)
        if fmt.in_blocks:
            return (std * rng.uniform(0.75, 1.25, _SCALES)).astype(np.float16)
        # Codes are uniform over 0 .. levels, whose standard deviation is sqrt((levels + 1)² - 1) / sqrt(12).
        levels = 2**fmt.bits - 1
        scale = std * math.sqrt(12 / ((levels + 1) ** 2 - 1)) * rng.uniform(0.75, 1.25, _SCALES)
        rounded = scale.astype(np.float16)
        return rounded if name == "scales" else (rounded.astype(np.float32) * (-levels / 2)).astype(np.float16)


def _add(granule: Array, block: Block, shifts: Array) -> None:
    """Adds a number to all weights of each of the block's first rows. shifts float32 [rows]."""
    if block.stride:
        _add_rows(granule, block, shifts)
        return
    packed, fmt = granule[block.offset : block.offset + block.nbytes], block.format
    if fmt.is_quantised:  # the same number more in every minimum
        minimums = fields(packed, block.rows, block.cols, fmt)[2]  # [tiles, G, 16]
        by_row = np.zeros((len(minimums) * TILE_ROWS, 1), np.float32)
        by_row[: len(shifts), 0] = shifts
        minimums[...] = minimums + by_row.reshape(-1, 1, TILE_ROWS)
        return
    values = decode(packed, block.rows, block.cols, fmt)
    values[: len(shifts)] += shifts[:, np.newaxis]
    encode(values, fmt, out=packed)


def _add_rows(granule: Array, block: Block, shifts: Array) -> None:
    """As `_add`, of a block that lies neuron by neuron."""
    if not block.format.is_quantised:
        values = decode_rows(granule, block)[: len(shifts)]
        encode_rows(values + shifts[:, np.newaxis], block, granule)
        return
    rows, groups = row_view(granule, block)[: len(shifts)], block.format.groups(block.cols)
    begin = block.format.codes_bytes(block.cols) + 2 * groups  # behind codes and scales
    minimums = np.ascontiguousarray(rows[:, begin : begin + 2 * groups]).view(np.float16)
    moved = (minimums + shifts[:, np.newaxis]).astype(np.float16)
    rows[:, begin : begin + 2 * groups] = moved.view(np.uint8)


def _tile(out: Array, pool: Array, start: int) -> None:
    """Fills `out` with the pool from element `start` on. After the pool's last element comes its first."""
    filled, start = 0, start % pool.size
    while filled < out.size:
        count = min(out.size - filled, pool.size - start)
        out[filled : filled + count] = pool[start : start + count]
        filled, start = filled + count, 0


def _clear_padding(field: Array, rows: int) -> None:
    """Sets rows beyond the last to zero bits. field [tiles, …, 16]."""
    if rows % TILE_ROWS:
        field[-1, ..., rows % TILE_ROWS :] = 0


def _tail_mask(cols: int, fmt: Format) -> Array:
    """A mask for the codes of a row's last group, uint8 [lines, 1, 4]: 0 where a column lies beyond the last."""
    inside = np.arange(fmt.group) < (cols % fmt.group or fmt.group)
    if fmt.kind == "int8":
        return np.where(inside.reshape(-1, 1, 4), np.uint8(0xFF), np.uint8(0))
    low, high = inside.reshape(-1, 2, 1, 4).swapaxes(0, 1)
    return np.where(low, np.uint8(0x0F), np.uint8(0)) | np.where(high, np.uint8(0xF0), np.uint8(0))


def byte_tokenizer(spec: ModelSpec) -> dict[str, bytes]:
    """tokenizer.json (for the `tokenizers` library), tokenizer_config.json and generation_config.json, by name. Token i
    is byte i; tokens 256 and 257 are bos and eos.

    A vocabulary below 258 has no bos and eos, one below 256 only the first bytes.
    """
    vocab = {character: i for i, character in enumerate(byte_characters()) if i < spec.vocab}
    special = {BOS: 256, EOS: 257} if spec.vocab >= 258 else {}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": [],
        },
    }  # fmt: skip
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.max_positions}
    generation: dict[str, Any] = {}
    if special:
        settings |= {"bos_token": BOS, "eos_token": EOS}
        generation = {"bos_token_id": special[BOS], "eos_token_id": special[EOS]}
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "generation_config.json": generation}
    return {name: (json.dumps(content, indent=1) + "\n").encode() for name, content in files.items()}
