"""Emits the FFNs of units whose records lie on a disk until somebody asks for them (`Unit.asked`). A part of the
lowering. `records` says which bytes these are.

A decode pass computes the activations of such a unit from the matrix that stays in RAM. Who fires is an answer, as a
router's is. The records of neurons that fire are then read in runs of whole pages, while the layer's other units are
computed. A hole between two runs is read through if that is no slower than to begin another read (`Plan.hole_bytes`).
Passes that do not ask stream such a unit whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.spec.places import HOST, kernels_of, lane_between

MOST_ROWS = 4  # of a batch: kernels for few rows alone take activations that are there (csrc/simd_*.h, kFewRows)


class AskedUnits:
    """The calls of a layer's units that are asked for."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._plan, self._layout = calls, calls.plan, calls.layout
        self._records: dict[str, Records] = {}

    def among(self, p: Pass, units: Sequence[int]) -> list[int]:
        """Those of some units that this pass asks for."""
        return [u for u in units if self._plan.units[u].asked] if p.stream.asks else []

    def ask(
        self, p: Pass, layer: int, units: Sequence[int], answer: Callable[[Call], Sequence[Sequence[int]]]
    ) -> Iterator[Task]:
        """Computes who fires, and emits the reads of their records."""
        emit = self._calls.emit
        fires = {u: [self._fire(layer, u, batch) for batch in p.batches] for u in units}
        emit.close(kernels_of(HOST))
        yield from emit.closed()
        for u, calls in fires.items():
            unit = self._plan.units[u]
            part = self._layout.parts[unit.part]
            live = sorted({neuron for call in calls for row in answer(call) for neuron in row})
            records = self._records.setdefault(unit.part, Records.of(part))
            runs = records.runs(live, part.granule_rows, self._plan.hole_bytes)
            asked = tuple(self.values(u, batch) for batch in p.batches)
            pick = ops.Pick(self._layout.asked[u], runs, asked)
            nbytes = sum(hi - lo for lo, hi in runs)
            emit.alone((lane_between(unit.home, HOST),), Call(pick, u, None, part.kinds(), nbytes, 0))
        yield from emit.closed()

    def values(self, u: int, batch: Batch) -> Slot:
        """What the activations of a unit's neurons are: float32 [granules, T, 64]."""
        unit = self._plan.units[u]
        each = 4 * batch.total_rows * self._layout.parts[unit.part].granule_rows
        whole = self._layout.act(HOST, batch.id, "values")
        return Slot(whole.arena, whole.lo + unit.lo * each, whole.lo + unit.hi * each)

    def _fire(self, layer: int, u: int, batch: Batch) -> Call:
        calls = self._calls
        part = self._layout.parts[self._plan.units[u].part]
        h = calls.rows(HOST, batch, "h")
        fire = ops.Fire(self._layout.kept[u], h, self.values(u, batch), calls.scratch(HOST), layer=layer)
        cost = calls.matrix_cost(u, (part.blocks[0].name,), batch.total_rows)
        return calls.add(HOST, fire, u, batch, part.kinds((part.blocks[0].name,)), cost)
