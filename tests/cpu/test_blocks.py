"""Formats of GGUF files: tiles hold the numbers of the file's blocks, bit for bit, by `gguf`'s own numpy code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel
from penstock.kernels.reference.blocks import widen_blocks
from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format, parse_format, tiles
from penstock.store.blocks import encode_blocks, format_of, row_bytes
from penstock.store.quantize import decode
from tests.blocks import numbers_of, random_blocks
from tests.blocks_by_numpy import encode_by_numpy

KINDS = [*BLOCKS, "q4_1"]
OF_GGUF = [kind for kind in KINDS if kind == "q4_1" or not BLOCKS[kind].word]


def widened(packed: np.ndarray, rows: int, cols: int, fmt: Format) -> np.ndarray:
    if not fmt.in_blocks:
        return decode(packed, rows, cols, fmt)
    return widen_blocks(packed.reshape(tiles(rows), -1), cols, fmt.kind)[:rows]


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.integers(1, 40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 16), st.integers(0, 20),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_tiles_hold_the_numbers_of_the_file(
    kind: str, rows: int, blocks: int, granule: int, groups: int, padding: int, seed: int
) -> None:
    """Of all columns, and of a granule's, with rows and columns beyond the file's."""
    fmt, rng, columns = format_of(kind), np.random.default_rng(seed), 256 * blocks
    assert fmt is not None
    raw = random_blocks(kind, rows, columns, rng)
    want = np.zeros((rows + padding, 2048), np.float32)
    with np.errstate(over="ignore"):
        want[:rows, :columns] = numbers_of(raw, kind)
    for lo, cols in ((0, columns), (32 * granule * groups, 32 * groups), (columns - 32, 32)):
        if lo >= columns:
            continue
        packed = encode_blocks(raw, kind, rows + padding, cols, lo)
        assert packed.nbytes == fmt.matrix_bytes(rows + padding, cols)
        found = widened(packed, rows + padding, cols, fmt)
        assert np.array_equal(found, want[:, lo : lo + cols])


@pytest.mark.parametrize("kind", OF_GGUF)
@given(
    st.integers(1, 40), st.integers(1, 3), st.integers(0, 20), st.sampled_from([32, 64, 96, 128, 256, 320, 512]),
    st.integers(1, 4), st.integers(0, 12), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_tiles_are_numpys_bit_by_bit(
    kind: str, rows: int, blocks: int, padding: int, cols: int, slices: int, first: int, seed: int
) -> None:
    """Of several slices of columns at once, of rows that lie further apart than they are long."""
    fmt, rng, columns = format_of(kind), np.random.default_rng(seed), 256 * blocks
    assert fmt is not None
    wide = np.zeros((rows, row_bytes(kind, columns) + 7), np.uint8)
    wide[:, :-7] = random_blocks(kind, rows, columns, rng)
    raw, nbytes = wide[:, :-7], fmt.matrix_bytes(rows + padding, cols)
    first = first * cols % columns // cols * cols
    slices = min(slices, -(-(columns - first) // cols))
    granules = np.full((slices, nbytes + 5), 0xAA, np.uint8)
    encode_blocks(raw, kind, rows + padding, cols, first, granules[:, :-5])
    for i in range(slices):
        want = encode_by_numpy(np.ascontiguousarray(raw), kind, rows + padding, cols, first + i * cols)
        assert np.array_equal(granules[i, :-5], want)
    assert (granules[:, -5:] == 0xAA).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_takes_the_bytes_of_the_file(kind: str) -> None:
    fmt = format_of(kind)
    assert fmt is not None and fmt.matrix_bytes(32, 1024) == 32 * row_bytes(kind, 1024)


def test_names() -> None:
    for kind in BLOCKS:
        assert format_of(kind.upper()) == parse_format(kind) and parse_format(kind).name == kind
        assert parse_format(kind) == Format(kind, 32)
        with pytest.raises(BadRequest):
            parse_format(f"{kind}-g64")
        with pytest.raises(BadRequest):
            parse_format(f"{kind}-neurons")
        with pytest.raises(BadRequest, match="KV cache"):
            parse_format(kind).check_kv()
    assert parse_format("q4_1") == parse_format("int4-g32") == format_of("Q4_1")
    assert [format_of(t) for t in ("F32", "BF16")] == [Format("float32"), Format("bfloat16")]
    assert format_of("IQ2_XXS") is None and format_of("I32") is None


def test_broken_blocks_are_refused() -> None:
    with pytest.raises(BrokenModel, match="whose blocks have 256"):
        row_bytes("Q4_K", 128)
    raw = random_blocks("q4_k", 3, 256, np.random.default_rng(0))
    raw[1, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(BrokenModel, match="infinite"):
        encode_blocks(raw, "Q4_K", 16, 256)


@pytest.mark.parametrize("exponent", [253, 255])
def test_exponents_whose_numbers_are_infinite_are_refused(exponent: int) -> None:
    raw = random_blocks("mxfp4", 16, 64, np.random.default_rng(0))
    encode_blocks(raw, "MXFP4", 16, 64)
    raw[3, BLOCKS["mxfp4"].nbytes] = exponent
    with pytest.raises(BrokenModel, match="beyond float32"):
        encode_blocks(raw, "MXFP4", 16, 64)
