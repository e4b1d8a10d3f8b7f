"""Says where in a checkpoint the blocks of `spec.parts` stand: in which tensor, and where in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.spec.format import FLOAT32
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts

EXPERT = "<expert>"  # stands for the number of an expert in the names of tensors

# Blocks for which a granule takes columns of the tensor. For every other block it takes rows.
_BY_COLUMN = ("o", "down")
# By block of norms: a matrix whose columns lie in this order.
ORDER_OF = {"attn_order": "q", "o_order": "o", "ffn_order": "up"}
# Kinds of parts whose blocks have the same names as other parts' blocks. So their keys name the part too: "shared.up".
_OWN_NAMES = ("router", "shared", "experts")


class TensorSource(NamedTuple):
    """Granule g's block is the slice of `tensor` along `axis` (0 rows, 1 columns) that starts at offset + g * extent.
    The extent is the block's rows (axis 0), its columns (axis 1), or for a vector its length. With `stride` it starts
    at offset + g * stride (falcon: the q, k and v of a KV head follow each other).

    A part's last granule may be shorter: it takes `part.rows_of(g, g + 1)` of `granule_rows`. It may not read on to the
    end of the tensor, since in a fused tensor the next matrix follows.

    For experts, g counts from the expert's first granule. Each expert has a tensor of its own, whose name is `tensor`
    with EXPERT replaced by the expert's number. Or with `stacked`, expert e is tensor[e] of one tensor with three axes,
    and `axis` and `offset` count within that.

    `step`: the granule's rows (or numbers, of a vector) are every step-th one from there: gpt-oss has gate and up in
    turns. `turned`: the tensor, or each matrix of a stacked one, is the transpose. `folded`: a vector that the tensor
    has as so many rows, 0 for all others. `order`: not the tensor's numbers are meant, but the order of its columns.

    GGUF files have some tensors in another shape (`models.gguf.names`). `interleaved`: rows of each head in the tensor
    where the two halves of the rows of a head take turns, else 0. `added`: what the tensor's numbers have more than the
    block's.
    """

    tensor: str
    axis: int
    offset: int
    stacked: bool = False
    stride: int = 0
    step: int = 1
    turned: bool = False
    folded: int = 0
    order: bool = False
    interleaved: int = 0
    added: float = 0.0

    def of_expert(self, expert: int) -> str:
        """The name of the tensor that an expert's block stands in."""
        return self.tensor.replace(EXPERT, str(expert))

    def tensors(self, experts: int) -> list[str]:
        """The names of all tensors of a part with so many experts."""
        return [self.of_expert(e) for e in range(experts)] if EXPERT in self.tensor else [self.tensor]


def short_name(name: str) -> str:
    """A tensor's name without what one checkpoint has and another leaves out: "model." in front, and behind
    "language_model." too, the text model of one that sees pictures."""
    return name.removeprefix("model.").replace("language_model.model.", "language_model.", 1)


def spellings(name: str) -> tuple[str, ...]:
    """The names that checkpoints may have for a tensor, `name` first."""
    short = short_name(name)
    return (name, short, "model." + short, name.removeprefix("model."), "model." + name)


def sources_of(
    spec: ModelSpec, layer: Mapping[str, str], ends: Mapping[str, str], offsets: Mapping[str, int] | None = None,
    stacked: bool = False, strides: Mapping[str, int] | None = None,
) -> dict[tuple[str, str], TensorSource]:  # fmt: skip
    """(part key, block name) → TensorSource for all blocks that this spec has.

    `layer`: block name → tensor name, in which `{}` is the layer's number. Blocks of routers, shared experts and
    experts are named with their part: "shared.up", "experts.up", "router.scores". `ends`: the same for "embed.rows",
    "head.rows", "edges.final", … `offsets`: block name → its first row inside a fused tensor. `strides`: the same for
    `TensorSource.stride`. `stacked`: all experts of
    a layer stand in one tensor with three axes.
    """
    sources: dict[tuple[str, str], TensorSource] = {}
    for part in parts(spec, FLOAT32):
        for block in part.blocks:
            if block.name in ORDER_OF:
                sources[part.key, block.name] = TensorSource(
                    layer[ORDER_OF[block.name]].format(part.layer), 0, 0, order=True
                )
                continue
            key = f"{part.kind}.{block.name}" if part.kind in _OWN_NAMES else block.name
            name = layer[key].format(part.layer) if part.layer >= 0 else ends[f"{part.kind}.{block.name}"]
            axis, offset = 1 if block.name in _BY_COLUMN else 0, (offsets or {}).get(key, 0)
            stride = (strides or {}).get(key, 0)
            sources[part.key, block.name] = TensorSource(name, axis, offset, stacked and part.kind == "experts", stride)
    return sources
