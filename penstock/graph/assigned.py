"""Says which executor computes which rows of a batch, if a device and the CPU share the rows of prompts (ScheInfer's
token assignment). A part of the lowering."""

from __future__ import annotations

from typing import NamedTuple

from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass
from penstock.spec.plan import Plan


class Piece(NamedTuple):
    """Some rows of a batch, from row `lo` on. `batch`: the batch itself, or a batch of as many rows that stands for
    these rows. `purpose`: the rows are computed by the executors for such passes."""

    batch: Batch
    lo: int
    purpose: str


class AssignedRows:
    """Cuts batches into pieces. The first rows of a batch are computed as in any pass that reads prompts. The other
    rows are computed by the executors for decode, as in passes that have answers too. So each row's result is the one
    that such a pass would give."""

    def __init__(self, plan: Plan) -> None:
        self._tables = {table.layer: table for table in plan.device_rows}

    def pieces(self, p: Pass, layer: int, kind: str, batch: Batch) -> list[Piece]:
        """The pieces of a batch in a layer's block. `kind`: attn or ffn."""
        table = self._tables.get(layer) if kind == "ffn" and p.purpose == "prefill" else None
        t = batch.total_rows
        n_g = t if table is None else table.on_device(t)
        if n_g == t:
            return [Piece(batch, 0, p.purpose)]
        return [Piece(_some(batch, n_g), 0, p.purpose), Piece(_some(batch, t - n_g), n_g, "mixed")]

    def shared(self, p: Pass, layer: int, kind: str) -> bool:
        """Whether the CPU takes rows of any batch of the pass."""
        return any(len(self.pieces(p, layer, kind, batch)) > 1 for batch in p.batches)


def _some(batch: Batch, rows: int) -> Batch:
    """A batch that stands for so many rows of another batch. No call asks it for positions or pages."""
    return Batch(batch.id, (0,), (0,), (rows,), (), some=True)
