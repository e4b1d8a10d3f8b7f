"""Families of kernels, also those that are not compiled here: the table has all kernels, and each family has all that
they are made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COPIES = {"amx"}  # copies the table of AVX-512, and adds its own products
FAMILIES = sorted({file.stem.removeprefix("kernels_") for file in CSRC.glob("kernels_*.cpp")} - COPIES)
DOTS = CSRC / "dots_avx2.h"  # the end of simd_avx2.h
HEADERS = sorted(CSRC.glob("simd_*.h"))
# Products of the KV cache's codes: families have a header of their own for them, or this one, and what it is made of.
LANES = CSRC / "codes_lanes.h"
LANES_ALONE = {"fours_of", "i_dot_twos"}


def members() -> list[str]:
    (body,) = re.findall(r"struct Kernels \{(.*?)\n\};", (CSRC / "kernels.h").read_text(), re.S)
    return ["isa", *re.findall(r"\(\*(\w+)\)", body)]


def test_the_table_has_every_kernel() -> None:
    assert re.findall(r"^ +\.(\w+) = ", (CSRC / "all-inl.h").read_text(), re.M) == members()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_table_under_its_name(family: str) -> None:
    text = (CSRC / f"kernels_{family}.cpp").read_text()
    (isa,) = re.findall(r"#define PENSTOCK_ISA (\w+)", text)
    assert f'{isa}::kernels_named("{isa}")' in text and '#include "all-inl.h"' in text


@pytest.mark.parametrize("header", HEADERS, ids=lambda file: file.stem)
def test_a_header_has_what_kernels_use(header: Path) -> None:
    """Functions and constants of the portable one."""

    def names(file: Path) -> set[str]:
        text = file.read_text() + (DOTS.read_text() if file.name == "simd_avx2.h" else "")
        return set(re.findall(r"^inline [\w: ]+?\b(\w+)\(", text, re.M)) | set(re.findall(r"\b(k[A-Z]\w+) = ", text))

    own = CSRC / header.name.replace("simd", "codes")
    codes, alone = (own, LANES_ALONE) if own.exists() else (LANES, set[str]())
    wanted = names(CSRC / "simd_portable.h") | names(LANES)
    assert wanted - names(header) - names(codes) - alone == set()
