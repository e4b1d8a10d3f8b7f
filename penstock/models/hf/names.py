"""Where the blocks of `spec.parts` stand in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.spec.format import FLOAT32
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts

EXPERT = "<expert>"  # in the names of tensors: the number of an expert

# A granule of these takes columns of its tensor; of every other block it takes rows.
_BY_COLUMN = ("o", "down")
_OWN_NAMES = ("router", "shared", "experts")  # kinds of parts whose blocks are called as others' are


class TensorSource(NamedTuple):
    """Granule g's block is the slice of `tensor` along `axis` (0 rows, 1 columns) that starts at
    offset + g * extent; extent is the block's rows (axis 0), its columns (axis 1), or for a vector its length.

    A part's last granule may stop short: it takes `part.rows_of(g, g + 1)` of `granule_rows`. In a fused
    tensor what follows it is the next matrix, so the tensor's end is not where to stop.

    Of experts g counts from the expert's first granule. Each has a tensor of its own, by the name with EXPERT replaced
    by its number; or, `stacked`, tensor[e] of one tensor with three axes, to which `axis` and `offset` apply.
    """

    tensor: str
    axis: int
    offset: int
    stacked: bool = False

    def of_expert(self, expert: int) -> str:
        """The name of the tensor that an expert's block stands in."""
        return self.tensor.replace(EXPERT, str(expert))

    def tensors(self, experts: int) -> list[str]:
        """The names of all tensors of a part with so many experts."""
        return [self.of_expert(e) for e in range(experts)] if EXPERT in self.tensor else [self.tensor]


def sources_of(
    spec: ModelSpec, layer: Mapping[str, str], ends: Mapping[str, str], offsets: Mapping[str, int] | None = None,
    stacked: bool = False,
) -> dict[tuple[str, str], TensorSource]:  # fmt: skip
    """(part key, block name) → TensorSource for all blocks that this spec has.

    `layer`: block name → tensor name, `{}` being the layer's number; "shared.up", "experts.up" and "router.scores" for
    the blocks of such parts. `ends`: the same for "embed.rows", "head.rows", "edges.final", … `offsets`: where a block
    starts inside a fused tensor. `stacked`: of experts, all in one tensor with three axes.
    """
    found: dict[tuple[str, str], TensorSource] = {}
    for part in parts(spec, FLOAT32):
        for block in part.blocks:
            key = f"{part.kind}.{block.name}" if part.kind in _OWN_NAMES else block.name
            name = layer[key].format(part.layer) if part.layer >= 0 else ends[f"{part.kind}.{block.name}"]
            axis, offset = 1 if block.name in _BY_COLUMN else 0, (offsets or {}).get(key, 0)
            found[part.key, block.name] = TensorSource(name, axis, offset, stacked and part.kind == "experts")
    return found
