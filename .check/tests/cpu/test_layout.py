"""The bytes of a matrix at rest, against slow loops written from the description in `spec.format`, and what
the reference kernels read out of them."""

import struct

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph.scratch import matmul_bytes, slab_rows
from penstock.kernels.reference.matrix import Scratch, multiply, take_rows, widen
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import Block
from penstock.store.quantize import decode, encode

Floats = NDArray[np.float32]

INTEGERS = ("int4", "int8", "int4-g8", "int8-g8", "int4-g24", "int4-g32", "int8-g128")
FLOATS = ("float32", "bfloat16", "float16")
SHAPES = ((1, 1), (16, 64), (5, 72), (17, 7), (33, 69), (40, 130))


def slow_group(values: list[np.float32], levels: int) -> tuple[list[int], np.float16, np.float16]:
    """Codes, scale and minimum of one group: the minimum rounded down, the scale up."""
    low, high, zero = min(values), max(values), np.float16(0)
    minimum = np.float16(low)
    if np.float32(minimum) > low:
        minimum = np.nextafter(minimum, np.float16(-np.inf))
    exact = (high - np.float32(minimum)) / np.float32(levels)
    scale = np.float16(exact)
    if np.float32(scale) < exact:
        scale = np.nextafter(scale, np.float16(np.inf))
    inverse = np.float32(1) / np.float32(scale) if scale > zero else np.float32(0)
    return [int((v - np.float32(minimum)) * inverse + np.float32(0.5)) for v in values], scale, minimum


def slow_integers(values: Floats, fmt: Format) -> bytes:
    rows, cols = values.shape
    g, found = fmt.group, bytearray()
    for tile in range((rows + 15) // 16):
        for j in range((cols + g - 1) // g):
            code = [[0] * g for _ in range(16)]
            scales, minimums = [np.float16(0)] * 16, [np.float16(0)] * 16
            for r in range(min(16, rows - 16 * tile)):
                known = list(values[16 * tile + r, j * g : min((j + 1) * g, cols)])
                codes, scales[r], minimums[r] = slow_group(known, 2**fmt.bits - 1)
                code[r][: len(codes)] = codes
            if fmt.kind == "int4":
                for i in range(g // 8):
                    for r in range(16):
                        found += bytes(code[r][8 * i + b] | code[r][8 * i + 4 + b] << 4 for b in range(4))
            else:
                for i in range(g // 4):
                    for r in range(16):
                        found += bytes(code[r][4 * i + b] for b in range(4))
            for halves in (scales, minimums):
                found += struct.pack("<16e", *map(float, halves))
    return bytes(found)


def slow_floats(values: Floats, fmt: Format) -> bytes:
    rows, cols = values.shape
    number = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[fmt.kind]

    def at(r: int, c: int) -> bytes:
        inside = r < rows and c < cols
        return np.array(values[r, c] if inside else 0, np.float32).astype(number).tobytes()

    found = bytearray()
    for tile in range((rows + 15) // 16):
        if fmt.kind == "bfloat16":
            for pair in range((cols + 1) // 2):
                for r in range(16 * tile, 16 * tile + 16):
                    found += at(r, 2 * pair) + at(r, 2 * pair + 1)
        else:
            for c in range(cols):
                for r in range(16 * tile, 16 * tile + 16):
                    found += at(r, c)
    return bytes(found)


def matrix(rows: int, cols: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng([seed, rows, cols])
    return (rng.standard_normal((rows, cols)) + rng.standard_normal((rows, 1))).astype(np.float32)


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_description(name: str, shape: tuple[int, int]) -> None:
    fmt, values = parse_format(name), matrix(*shape)
    slow = slow_integers(values, fmt) if fmt.is_quantised else slow_floats(values, fmt)
    assert len(slow) == fmt.matrix_bytes(*shape)
    assert encode(values, fmt).tobytes() == slow


@pytest.mark.parametrize("name", ["int4", "int8-g8", *FLOATS])
def test_many_tiles_at_a_time_are_the_same_bytes(name: str) -> None:
    """Encoding goes by chunks of rows; the last one is not whole."""
    fmt, values = parse_format(name), matrix(300, 1030)
    tiles = [encode(values[lo : lo + 16], fmt).tobytes() for lo in range(0, 300, 16)]
    assert encode(values, fmt).tobytes() == b"".join(tiles)


def test_golden_bytes_of_an_int4_tile() -> None:
    """Two rows and eight columns in one group; scale 1, minimums 0 and -8, so every code is plain to see."""
    values = np.array([[0, 1, 2, 3, 4, 5, 6, 15], [7, 6, 5, 4, 3, 2, 1, -8]], np.float32)
    expected = "405162f3" + "bfae9d0c" + "00000000" * 14  # the line: column 0 | column 4 << 4, …
    expected += "003c" * 2 + "0000" * 14  # scales
    expected += "0000" + "00c8" + "0000" * 14  # minimums
    assert encode(values, parse_format("int4-g8")).tobytes().hex() == expected


def test_sizes() -> None:
    assert parse_format("int4").matrix_bytes(16, 64) == 576
    assert parse_format("int4").matrix_bytes(64, 4096) == 64 * 4096 * 9 // 16  # 4.5 bits a weight
    assert parse_format("int8").matrix_bytes(17, 65) == 2 * 2 * (16 * 64 + 64)
    assert parse_format("bfloat16").matrix_bytes(17, 7) == 2 * 16 * 8 * 2
    assert parse_format("float16").matrix_bytes(17, 7) == 2 * 16 * 7 * 2
    assert parse_format("float32").matrix_bytes(17, 7) == 2 * 16 * 7 * 4
    assert parse_format("float16").plain_bytes(3, 7) == 42


@pytest.mark.parametrize("name", ["int4-g4", "int4-g2", "int8-g12", "int8-g4104", "int4-g0"])
def test_groups_that_fill_no_words_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="should be a multiple of 8"):
        parse_format(name)


# --- what the reference kernels make of them -------------------------------------------------------------------------


def granule(values: Floats, fmt: Format, offset: int = 128) -> tuple[NDArray[np.uint8], Block]:
    block = Block("x", *values.shape, fmt, offset)
    memory = np.full(offset + block.nbytes + 64, 0xFF, np.uint8)
    encode(values, fmt, out=memory[offset : offset + block.nbytes])
    return memory, block


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("shape", [*SHAPES, (600, 1030)])
def test_the_reference_reads_what_was_written(name: str, shape: tuple[int, int]) -> None:
    fmt, values = parse_format(name), matrix(*shape)
    rows, cols = shape
    memory, block = granule(values, fmt)
    expected = decode(memory[128:-64], rows, cols, fmt)
    assert np.abs(expected - values).max() <= {8: 0.05, 4: 0.4}.get(fmt.bits, 0.05)
    scratch = Scratch(np.empty(matmul_bytes(block, 3) + 64 * rows * cols, np.uint8))
    found = widen(memory[128:-64].reshape(-1, fmt.tile_bytes(cols)), cols, fmt, scratch)
    assert np.array_equal(found[:rows], expected) and found.shape == (-(-rows // 16) * 16, cols)
    x = matrix(3, cols, seed=1)
    exact = x.astype(np.float64) @ expected.astype(np.float64).T
    memory_of_product = np.full(matmul_bytes(block, 3), 0xFF, np.uint8)  # NaN; and no more than the plan counts
    out = np.full((3, rows), np.nan, np.float32)
    multiply(x, memory, block, out, Scratch(memory_of_product))
    assert np.abs(out - exact).max() <= 1e-3
    once = out.copy()
    multiply(x, memory, block, out, Scratch(memory_of_product), add=True)
    assert np.array_equal(out, once + once)


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS])
def test_single_rows_come_out_of_their_tiles(name: str) -> None:
    fmt, cols = parse_format(name), 1029
    made = [granule(matrix(64, cols, seed), fmt) for seed in range(3)]
    granules, block = np.stack([memory for memory, _ in made]), made[0][1]
    every = np.concatenate([decode(memory[128:-64], 64, cols, fmt) for memory, _ in made])
    tokens = np.random.default_rng(0).integers(0, len(every), 200).astype(np.int32)
    out = np.full((200, cols), np.nan, np.float32)
    take_rows(granules, block, tokens, out)
    assert np.array_equal(out, every[tokens])


def test_slabs_are_whole_tiles() -> None:
    fmt = parse_format("int4")
    for rows, cols in ((1, 5), (64, 4096), (1000, 300), (100, 100_000), (17, 1)):
        slab = slab_rows(Block("x", rows, cols, fmt, 0))
        assert slab % 16 == 0 and 16 <= slab <= -(-rows // 16) * 16
