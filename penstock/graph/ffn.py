"""Emits the FFNs of layers without experts: the predictor, and the units. A part of the lowering.

If a model's neurons fire or not, a unit's cost is that of the neurons that are expected to be computed.
"""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.asked import AskedUnits
from penstock.graph.assigned import Piece
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.scratch_gpu import FEW_ROWS
from penstock.graph.tasks import Slot
from penstock.spec.places import HOST, Executor, is_device


class FfnCalls:
    """The calls of dense FFNs, and of shared experts. The lowering says which unit, layer and executor come next."""

    def __init__(self, calls: Calls, asked: AskedUnits) -> None:
        self._calls, self._plan, self._layout, self._asked = calls, calls.plan, calls.layout, asked
        self._predictors = {predictor.layer: predictor for predictor in self._plan.predictors}
        self._heard: dict[int, list[int]] = {}  # layer → layers whose predictors hear it, in rising order
        for predictor in self._plan.predictors:
            self._heard.setdefault(predictor.hears, []).append(predictor.layer)

    def predicts(self, purpose: str) -> bool:
        """Whether the rows of a pass have their neurons predicted. Where predictors run, all rows have, so that a row's
        result does not depend on the pass that it comes in. The plans of `solve/powerinfer` read prompts densely."""
        return self._plan.sparsity == "predict" or purpose == "decode"

    def foretold(self, layer: int) -> list[int]:
        """The layers whose predictors hear the input of this layer's FFN: this one, the next one, both, or none."""
        return self._heard.get(layer, [])

    def known(self, layer: int) -> list[int]:
        """The layers of which this layer's input tells which neurons count: by predictors, or by its activations."""
        return self.foretold(layer) if self._plan.sparsity == "predict" else [layer]

    def predict(self, layer: int, batch: Batch, hearing: list[Executor], executors: list[Executor]) -> None:
        """Predicts which neurons of the layer's FFN the batch needs (PowerInfer §4.2), and copies the answer to every
        executor that computes some of them. `hearing`: the executors that have what the predictor hears, beside the
        main one."""
        calls = self._calls
        predictor = self._predictors[layer]
        home, layout = predictor.home, self._layout
        if home not in (self._plan.main, *hearing):
            calls.copy(batch, "h", calls.rows(home, batch, "h").nbytes, self._plan.main, home)
        part = predictor.part(self._plan.target.spec)
        active = calls.active(layer, home, batch)
        h, scratch = calls.rows(home, batch, "h"), calls.scratch(home)
        cost = ops.matrix_cost(part, 0, 1, ops.PREDICTOR_BLOCKS, batch.total_rows)
        predict = ops.Predict(layout.predictors[layer], h, active, scratch, layer=layer)
        self._asked.predicted[layer, batch.id] = calls.add(home, predict, -1, batch, part.kinds(), cost)
        for executor in executors:
            if executor != home:
                calls.copy(batch, layout.active_name(layer), active.nbytes, home, executor)

    def unit(
        self, layer: int, u: int, executor: Executor, weights: Slot, piece: Piece, first: bool
    ) -> None:  # fmt: skip
        """Computes a unit for a piece of a batch. `weights`: where it lies; `first`: its sums are the first of the
        piece's in this layer."""
        batch, lo, purpose = piece
        calls = self._calls
        unit = self._plan.units[u]
        part = self._layout.parts[unit.part]
        h, partial, pending = (calls.rows(executor, batch, name, lo) for name in ("h", "partial", "pending"))
        cost = calls.matrix_cost(u, ops.FFN_BLOCKS, batch.total_rows)
        active: tuple[Slot, ...] = ()
        skips = self._plan.sparsity != "off" and part.kind == "ffn"
        values: tuple[Slot, ...] = ()
        is_asked = weights is self._layout.asked.get(u)
        if is_asked and not self._plan.activates_all(part):
            cost = ops.active_cost(cost, unit.active)
        elif is_asked:
            values = (self._asked.values(u, batch),)
            activated = calls.matrix_cost(u, (part.blocks[0].name,), batch.total_rows)
            cost = ops.active_cost((cost[0] - activated[0], cost[1] - activated[1]), unit.active)
        elif purpose == "decode" and unit.active < 1 and not self._computes_all(executor, batch):
            if self._plan.activates_all(part):
                activated = calls.matrix_cost(u, (part.blocks[0].name,), batch.total_rows)
                cost = ops.fired_cost(cost, activated, unit.active)
            else:
                cost = ops.active_cost(cost, unit.active)
        row_flops = self._row_flops(u, purpose, batch, cost[1]) if part.by_neurons and executor == HOST else 0
        if layer in self._predictors and self.predicts(purpose):
            active = (calls.active(layer, executor, batch),)
        ffn = ops.Ffn(
            weights, h, partial, pending, calls.scratch(executor), layer,
            starts_sum=first, continues_four=self._cuts_a_four(u, u - 1, purpose),
            leaves_four=self._cuts_a_four(u, u + 1, purpose), skips=skips, active=active,
            values=values, row_flops=row_flops,
            level=self._plan.levels[layer] if self._plan.levels and part.kind == "ffn" else 0.0,
        )  # fmt: skip
        calls.add(executor, ffn, u, batch, part.kinds(ops.FFN_BLOCKS), cost)

    def _row_flops(self, u: int, purpose: str, batch: Batch, flops: int) -> int:
        """Of the flops of a unit that lies neuron by neuron, those of rows one by one. A prompt's rows have none here:
        each of them leaves out neurons of its own, which saves what rows one by one cost (docs/LOG.md)."""
        part = self._layout.parts[self._plan.units[u].part]
        if purpose != "decode":
            return 0
        if part.by_records or u in self._layout.asked:
            return flops
        return max(0, flops - self._calls.matrix_cost(u, (part.blocks[0].name,), batch.total_rows)[1])

    def _computes_all(self, executor: Executor, batch: Batch) -> bool:
        """Whether a device computes all neurons of so many rows (`kernels/gpu/neurons`)."""
        return self._plan.sparsity != "off" and is_device(executor) and batch.total_rows > FEW_ROWS

    def _cuts_a_four(self, u: int, other: int, purpose: str) -> bool:
        """Whether a four of an FFN's granules lies partly in unit `u` and partly in its neighbour `other`, and the same
        executor computes both."""
        units = self._plan.units
        if other not in range(len(units)):
            return False
        unit, neighbour = units[u], units[other]
        if neighbour.part != unit.part or neighbour.executor(purpose) != unit.executor(purpose):
            return False
        return max(unit.lo, neighbour.lo) % self._layout.parts[unit.part].sum_granules != 0
