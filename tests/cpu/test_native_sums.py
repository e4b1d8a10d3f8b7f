"""Checksums of granules: one number by all kernels, that of the specification, and which granules were found right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native as native
from penstock.kernels.cpu import ISAS
from tests.xxh3 import xxh3_64

# Of the bytes (i² + 7) mod 251, by the reference implementation, XXH3_64bits of xxHash 0.8.
REFERENCE = {
    241: 0x93EFE22D19A8C80E,
    512: 0x3AC4A4EDC07C74D5,
    1024: 0x4602C51B7CD9520E,
    1025: 0xA399CB74819E394B,
    4096: 0x3B6F38ED3FFDC125,
    8192: 0x81DF089B9E531149,
    12345: 0xA9100374880BAFC6,
    1 << 20: 0xEDF0003C951690C4,
}


def has(isa: str) -> bool:
    try:
        native.granule_sums(0, 0, 4096, isa)
    except ValueError:
        return False
    return True


KERNELS = [isa for isa in ISAS if has(isa)]


def sums(data: bytes, stride: int, isa: str | None = None) -> list[int]:
    """The checksum of each granule."""
    array = np.frombuffer(data, np.uint8)
    found = native.granule_sums(array.ctypes.data, len(data) // stride, stride, isa)
    return np.frombuffer(found, "<u8").tolist()


@pytest.mark.parametrize("isa", [*KERNELS, None])
@pytest.mark.parametrize("nbytes", REFERENCE)
def test_the_reference_implementations_numbers(nbytes: int, isa: str | None) -> None:
    data = bytes((i * i + 7) % 251 for i in range(nbytes))
    assert sums(data, nbytes, isa) == [REFERENCE[nbytes]]
    if nbytes < 20000:
        assert xxh3_64(data) == REFERENCE[nbytes]


@given(
    st.integers(241, 5000), st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from(["random", "zeros", "ones"])
)
def test_all_kernels_give_the_specifications_number(stride: int, count: int, seed: int, kind: str) -> None:
    data = np.random.default_rng(seed).bytes(stride * count)
    data = {"random": data, "zeros": bytes(len(data)), "ones": b"\xff" * len(data)}[kind]
    expected = [xxh3_64(data[i * stride : (i + 1) * stride]) for i in range(count)]
    for isa in KERNELS:
        assert sums(data, stride, isa) == expected


@given(st.integers(0, 12287), st.integers(1, 255))
def test_one_changed_byte_changes_its_granule_alone(at: int, change: int) -> None:
    data = np.random.default_rng(3).bytes(12288)
    other = bytearray(data)
    other[at] ^= change
    before, after = sums(data, 4096), sums(bytes(other), 4096)
    assert [i for i in range(3) if before[i] != after[i]] == [at // 4096]


def test_wrong_arguments() -> None:
    for wrong in ((0, 1, 240), (0, -1, 4096), (0, 0, 4096, "sse9")):
        with pytest.raises(ValueError):
            native.granule_sums(*wrong)
    with pytest.raises(ValueError, match="8 bytes each"):
        native.Sums(bytes(9))
    found = native.Sums(bytes(16))
    assert len(found) == 2 and not found.checked(0, 1) and found.checked(2, 0)
    for first, count in ((0, 3), (-1, 1), (1, 2), (0, -1)):
        with pytest.raises(ValueError):
            found.checked(first, count)
