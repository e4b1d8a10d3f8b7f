"""Sizes as people write them."""

from __future__ import annotations

import pytest

from penstock.errors import BadRequest
from penstock.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("4096", 4096), ("1500MiB", 1500 << 20), ("6GiB", 6 << 30), ("6g", 6 << 30), ("12GB", 12 * 10**9),
        (" 1.5 kib ", 1536), ("0.1GB", 10**8), ("0.5TiB", 1 << 39), ("007b", 7),
        # Exact where a float would not be: a minimum that was refused must be the minimum that is taken.
        ("9007199254740993", 9007199254740993), ("9007199254740993KiB", 9007199254740993 << 10),
    ],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "+1", "1e9", "1.", ".5", "1.5.5", "1 2", "0x10", "nan", "1XB", "١", "9" * 400]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadRequest, match=r"--flag .* is not a size") as caught:
        parse_bytes(text, "--flag")
    assert len(caught.value.message) < 150
