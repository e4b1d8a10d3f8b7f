"""Matrices that multiply the same rows: kernels take these rows rounded in groups, or as floats, for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.spec.format import FLOAT32, Format

ONE_INPUT = (("q", "k", "v"), ("gate", "up"))


def laid_out_alike(table: Mapping[str, Format]) -> dict[str, Format]:
    """The formats of matrices by part and block ("7.attn.q"), with float32 for quantised ones whose input floats
    multiply too. It holds their numbers exactly. Some files leave a few matrices of a layer in 16 bits."""
    alike = dict(table)
    for key in {name.rpartition(".")[0] for name in table}:
        for blocks in ONE_INPUT:
            names = [name for block in blocks if (name := f"{key}.{block}") in table]
            if len({table[name].is_quantised for name in names}) > 1:
                alike |= {name: FLOAT32 for name in names if table[name].is_quantised}
    return alike
