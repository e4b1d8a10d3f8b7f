"""Formats: floats to the bit, integers within the bound that `quantize` states, bad numbers refused."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from penstock.errors import BrokenModel, UnsupportedModel
from penstock.spec.format import Format, parse_format
from penstock.store.quantize import decode, encode, fields, widen

Floats = NDArray[np.float32]

INTEGERS = [parse_format(name) for name in ("int4", "int8", "int4-g32", "int8-g8", "int4-g128")]
FLOATS = [parse_format(name) for name in ("float32", "bfloat16", "float16")]
ALL = [*INTEGERS, *FLOATS]


def worst_excess(values: Floats, encoded: NDArray[np.uint8], fmt: Format) -> float:
    """How far the worst element lies beyond the bound: 0 where all keep it."""
    rows, cols = values.shape
    _, *halves = fields(encoded, rows, cols, fmt)  # [tiles, G, 16] → [rows, G]
    scales, minimums = (h.astype(np.float64).swapaxes(1, 2).reshape(-1, fmt.groups(cols))[:rows] for h in halves)
    reach = np.maximum(np.abs(minimums), np.abs(minimums + scales * (2**fmt.bits - 1)))
    bound = np.repeat(scales / 2 + 2.0**-20 * reach + 2.0**-140, fmt.group, axis=1)[:, :cols]
    error = np.abs(values.astype(np.float64) - decode(encoded, rows, cols, fmt).astype(np.float64))
    return float(np.max(error - bound, initial=0.0))


MAGNITUDES = st.one_of(
    st.floats(-65000, 65000, width=32),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),  # scales that are subnormal float16
    st.sampled_from([0.0, -0.0, 65504.0, -65504.0, 2.0**-140, 1.0, 1.0009765]),
)
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 140)), elements=MAGNITUDES)


@pytest.mark.fuzz
@given(MATRICES, st.sampled_from(INTEGERS))
def test_every_element_keeps_the_bound(values: Floats, fmt: Format) -> None:
    encoded = encode(values, fmt)
    assert encoded.dtype == np.uint8 and encoded.shape == (fmt.matrix_bytes(*values.shape),)
    assert worst_excess(values, encoded, fmt) == 0


@pytest.mark.fuzz
@given(st.integers(0, 2**32), st.integers(1, 70), st.integers(1, 200), st.floats(-18, 14), st.sampled_from(INTEGERS))
def test_random_matrices_keep_the_bound(seed: int, rows: int, cols: int, power: float, fmt: Format) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, cols)) + rng.standard_normal((rows, 1))).astype(np.float32)
    values = np.clip(values * np.float32(2.0**power), -65000, 65000)
    assert worst_excess(values, encode(values, fmt), fmt) == 0


@pytest.mark.parametrize("fmt", INTEGERS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.25, 65504.0, -65504.0, 2.0**-24])
def test_a_constant_that_float16_holds_is_exact(fmt: Format, constant: float) -> None:
    values = np.full((2, 70), constant, np.float32)
    assert np.array_equal(decode(encode(values, fmt), 2, 70, fmt), values)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_padding_is_zero_bits_and_widens_no_group(fmt: Format) -> None:
    values = np.random.default_rng(2).uniform(5, 6, (3, 44)).astype(np.float32)
    dirty = np.full(fmt.matrix_bytes(21, 64), 0xFF, np.uint8)
    encoded = encode(values, fmt, 21, 64, dirty)
    assert encoded is dirty and not dirty[fmt.tile_bytes(64) :].any()
    found = decode(encoded, 21, 64, fmt)
    assert np.array_equal(found[:3, :44], decode(encode(values, fmt), 3, 44, fmt))
    assert not found[3:].any()
    if fmt.is_quantised:
        codes, scales, minimums = fields(encoded, 21, 64, fmt)
        assert scales[0, 0, :3].max() <= 1 / (2**fmt.bits - 1) + 1e-2  # the range is 5..6, not 0..6
        assert not codes[..., 3:, :].any() and not scales[..., 3:].any() and not minimums[..., 3:].any()
        if fmt.group == 64:
            lines = 44 * fmt.bits // 32  # column 44 is the first of line 11, or the fifth of line 5
            assert codes[0, 0, lines, :3].any() == (fmt.kind == "int4")
            assert not codes[:, :, lines + (fmt.kind == "int4") :].any()
            if fmt.kind == "int4":
                assert not (codes[0, 0, lines] >> 4).any()
    else:
        assert not found[:, 44:].any()


@given(MATRICES, st.sampled_from(FLOATS))
def test_floats_round_to_nearest_even(values: Floats, fmt: Format) -> None:
    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    expected = values.astype(kinds[fmt.kind])
    encoded = encode(values, fmt, tiled=False)
    assert encoded.tobytes() == expected.tobytes()
    for tiled in (False, True):
        found = decode(encode(values, fmt, tiled=tiled), *values.shape, fmt, tiled)
        assert found.tobytes() == expected.astype(np.float32).tobytes()


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF]], np.uint32).view(np.float32)
    assert encode(ties, Format("bfloat16"), tiled=False).view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_same_format_is_copied_to_the_bit(kind: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    limit = 0x7C00 if kind == "float16" else 0x7F80
    bits = bits[(bits & 0x7FFF) < limit]  # all finite numbers, subnormals and -0 included
    raw = (bits.view(np.float16) if kind == "float16" else bits).reshape(2, -1)
    assert encode(raw, Format(kind), tiled=False).tobytes() == bits.tobytes()
    assert decode(encode(raw, Format(kind)), *raw.shape, Format(kind)).tobytes() == widen(raw).tobytes()
    dtype = np.float16 if kind == "float16" else ml_dtypes.bfloat16
    assert np.array_equal(widen(raw).ravel(), bits.view(dtype).astype(np.float32))
    assert encode(raw, Format("float32"), tiled=False).tobytes() == widen(raw).tobytes()


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(fmt: Format, bad: float) -> None:
    for position in (0, 69):
        values = np.ones((3, 70), np.float32)
        values[1, position] = bad
        for raw in (values, values.astype(np.float16), values.astype(ml_dtypes.bfloat16).view(np.uint16)):
            with pytest.raises(BrokenModel, match="NaN or infinite"):
                encode(raw, fmt)


def test_what_a_format_cannot_hold_is_refused() -> None:
    for name, value in (("int4", -7e4), ("int4", 1.2e6), ("int8", -1e6), ("float16", 65520.0), ("bfloat16", 3.4e38)):
        with pytest.raises(UnsupportedModel, match="values up to"):
            encode(np.array([[0.0, value]], np.float32), parse_format(name))
    # 7e4 is beyond float16, the scale that reaches it is not.
    fine = np.array([[0.0, 7e4]], np.float32)
    assert worst_excess(fine, encode(fine, parse_format("int4")), parse_format("int4")) == 0


def test_columns_of_a_wider_tensor_need_no_copy() -> None:
    whole = np.random.default_rng(3).standard_normal((9, 200)).astype(np.float32)
    for fmt in ALL:
        assert encode(whole[:, 64:128], fmt).tobytes() == encode(whole[:, 64:128].copy(), fmt).tobytes()
