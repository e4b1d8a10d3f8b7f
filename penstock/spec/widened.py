"""Formats that a file's matrices cannot keep here, though float32 holds their numbers: what is widened, and why.

Matrices that multiply the same rows are quantised or not together, for kernels take these rows rounded in groups, or as
floats. And granules cut the columns of `o`, where a head of 80 columns ends within a group of 32.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.spec.blocks import GROUP
from penstock.spec.format import FLOAT32, Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Block, parts

ONE_INPUT = (("q", "k", "v"), ("gate", "up"))


def as_kept(table: Mapping[str, Format], model: ModelSpec) -> dict[str, Format]:
    """The formats of matrices by part and block ("7.attn.q"), with float32 for quantised ones of a file that cannot be
    kept. It holds their numbers exactly."""
    cut = {f"{part.key}.{b.name}" for part in parts(model, FLOAT32) for b in part.blocks if cuts_groups(b)}
    kept = {name: FLOAT32 if fmt.is_quantised and name in cut else fmt for name, fmt in table.items()}
    return _laid_out_alike(kept)


def cuts_groups(block: Block) -> bool:
    """Whether a granule's columns of a matrix end within a group of columns of a file's formats."""
    return block.tiled and block.cols % GROUP > 0


def _laid_out_alike(table: Mapping[str, Format]) -> dict[str, Format]:
    """The formats, with float32 for quantised matrices whose input floats multiply too. Some files leave a few matrices
    of a layer in 16 bits."""
    alike = dict(table)
    for key in {name.rpartition(".")[0] for name in table}:
        for blocks in ONE_INPUT:
            names = [name for block in blocks if (name := f"{key}.{block}") in table]
            if len({table[name].is_quantised for name in names}) > 1:
                alike |= {name: FLOAT32 for name in names if table[name].is_quantised}
    return alike
