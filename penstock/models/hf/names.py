"""Where the blocks of `spec.parts` stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.spec.format import FLOAT32
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts

# A granule of these takes columns of its tensor; of every other block it takes rows.
_BY_COLUMN = ("o", "down")


class TensorSource(NamedTuple):
    """Granule g's block is the slice of `tensor` along `axis` (0 rows, 1 columns) that starts at
    offset + g * extent; extent is the block's rows (axis 0), its columns (axis 1), or for a vector its length.

    A part's last granule may stop short: it takes `part.rows_of(g, g + 1)` of `granule_rows`. In a fused
    tensor what follows it is the next matrix, so the tensor's end is not where to stop.
    """

    tensor: str
    axis: int
    offset: int


def sources_of(
    spec: ModelSpec, layer: Mapping[str, str], ends: Mapping[str, str], offsets: Mapping[str, int] | None = None
) -> dict[tuple[str, str], TensorSource]:
    """(part key, block name) → TensorSource for all blocks that this spec has.

    `layer`: block name → tensor name, `{}` being the layer's number. `ends`: the same for "embed.rows",
    "head.rows", "edges.final", … `offsets`: where a block starts inside a fused tensor.
    """
    found: dict[tuple[str, str], TensorSource] = {}
    for part in parts(spec, FLOAT32):
        for block in part.blocks:
            if part.layer < 0:
                name = ends[f"{part.kind}.{block.name}"]
            else:
                name = layer[block.name].format(part.layer)
            axis = 1 if block.name in _BY_COLUMN else 0
            found[part.key, block.name] = TensorSource(name, axis, (offsets or {}).get(block.name, 0))
    return found
