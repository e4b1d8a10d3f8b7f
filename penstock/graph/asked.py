"""Emits the FFNs of units whose records of neurons are read from a disk only when they are asked for (`Unit.asked`). A
part of the lowering. `records` says which bytes these are.

A decode pass computes the activations of such a unit from the matrix that stays in RAM. Which neurons fire is an
answer, as a router's is. If the plan has predictors, the neurons that they call active are the answer, and no
activation is computed before it. The records of these neurons are then read in runs of whole pages, while the CPU
computes the layer's other units. A hole between two runs is read through if that is no slower than to begin another
read (`Plan.hole_bytes`). A unit may have slots for records that were asked for often (`Unit.recent_slots`). A record
that has a slot is not read. After the read, one call brings the records from their slots to their places, and copies
records that were read into slots (`recent`). Passes that do not ask stream such a unit whole.

Predictors that hear the layer before theirs (`Predictor.ahead`) are asked as soon as that layer's FFN has its input.
So a disk has the next layer's reads before it is done with this layer's, and need not wait for attention. There is
room for the records of one unit more than a layer has (`Layout.asked_turns`). A unit's read is emitted as soon as the
unit that had its room is computed. Rejected: room for two whole layers, which leaves less memory to neurons that stay.
Of OPT-6.7B within 2.4 GB, 3 % of the neurons stayed instead of 6 %, and a token read 184 MB instead of 132
(docs/LOG.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.calls import Calls
from penstock.graph.recent import PAIR_BYTES, RecentRecords
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.spec.places import HOST, Executor, kernels_of, lane_between

# The most rows of a batch that asks. Only the kernels for few rows take activations that were computed before, and
# records without biases (csrc/simd_*.h, kFewRows).
MOST_ROWS = 4

Ask = Callable[[Call], Sequence[Sequence[int]]]


class AskedUnits:
    """Emits the calls of a layer's units that are asked for. `predicted`: for each layer and batch id, the latest call
    that said which neurons are active."""

    def __init__(self, calls: Calls) -> None:
        self._calls, self._plan, self._layout = calls, calls.plan, calls.layout
        self._records: dict[str, Records] = {}
        self.predicted: dict[tuple[int, int], Call] = {}
        units = self._plan.units
        self._recent = {
            u: RecentRecords(units[u].recent_slots, *self._plan.unit_rows(units[u])) for u in self._layout.recent
        }
        self._recalls: dict[int, ops.Recall] = {}  # by the unit's number, of layers at hand
        self._ahead = {each.layer for each in self._plan.predictors if each.hears < each.layer}
        self._waiting: deque[Call] = deque()  # reads that wait for room
        self._taken: set[int] = set()  # turns whose room has a read that is not computed on yet

    def among(self, p: Pass, units: Sequence[int]) -> list[int]:
        """The units among these whose records this pass asks for."""
        return [u for u in units if self._plan.units[u].asked] if p.stream.asks else []

    def ask(self, p: Pass, layer: int, executor: Executor, answer: Ask) -> Iterator[Task]:
        """Emits the reads of the records that a pass asks for of a layer's units: of the neurons that fire, whose
        activations are computed first, or of the neurons that a predictor has called active."""
        units = self.among(p, self._calls.shares(layer, "ffn", p.purpose).get(executor, ()))
        if not units:
            return
        emit, foretold = self._calls.emit, self._plan.sparsity == "predict"
        fires = {} if foretold else {u: [self._fire(layer, u, batch) for batch in p.batches] for u in units}
        emit.close(kernels_of(HOST))
        yield from emit.closed()
        active = _rising(map(answer, (self.predicted[layer, batch.id] for batch in p.batches))) if foretold else []
        asks = tuple(self._calls.active(layer, HOST, batch) for batch in p.batches) if foretold else ()
        follows = foretold and layer in self._ahead
        for u in units:
            unit = self._plan.units[u]
            part = self._layout.parts[unit.part]
            if foretold:
                lo, hi = self._plan.unit_rows(unit)
                live = active[bisect_left(active, lo) : bisect_left(active, hi)]
            else:
                live, asks = _rising(map(answer, fires[u])), tuple(self.values(u, batch) for batch in p.batches)
            records = self._records.setdefault(unit.part, Records.of(part))
            recent = self._recent.get(u)
            held, missing = recent.ask(live) if recent is not None else (b"", live)
            runs = records.runs(missing, part.granule_rows, self._plan.hole_bytes)
            pick = ops.Pick(self._layout.asked[u], runs, asks, follows)
            follows = follows or bool(runs)  # the disk is at work from the first read on
            nbytes = sum(hi - lo for lo, hi in runs)
            self._waiting.append(Call(pick, u, None, part.kinds(), nbytes, 0))
            yield from self._begin()  # the disk reads while what follows is decided
            if recent is not None:
                kept = recent.admit(live, missing)
                self._recalls[u] = ops.Recall(self._layout.asked[u], self._layout.recent[u], held, kept)

    def computed(self, u: int) -> Iterator[Task]:
        """Emits the reads that waited for the room of a unit. All calls that read the unit have been emitted."""
        self._taken.discard(self._layout.asked_turns[u])
        yield from self._begin()

    def _begin(self) -> Iterator[Task]:
        """Emits the reads for which there is room, in the order in which they were asked for."""
        while self._waiting and (turn := self._layout.asked_turns[self._waiting[0].unit]) not in self._taken:
            self._taken.add(turn)
            call = self._waiting.popleft()
            self._calls.emit.alone((lane_between(self._plan.units[call.unit].home, HOST),), call)
            yield from self._calls.emit.closed()

    def recall(self, u: int) -> None:
        """Emits the call that copies records from a unit's slots to their places, and records that were read into
        slots."""
        recall = self._recalls.pop(u, None)
        if recall is None or not (recall.held or recall.kept):
            return
        part = self._layout.parts[self._plan.units[u].part]
        nbytes = (len(recall.held) + len(recall.kept)) // PAIR_BYTES * Records.of(part).stride
        # A task of its own, so that those around it are like earlier ones.
        self._calls.emit.alone((kernels_of(HOST),), Call(recall, u, None, part.kinds(), nbytes, 0))

    def warm(self, u: int, rates: Sequence[float]) -> None:
        """Makes a unit's slots as they are after many passes that asked for each of its neurons at its rate."""
        self._recent[u].warm(rates)

    def values(self, u: int, batch: Batch) -> Slot:
        """The slot of the activations of a unit's neurons, float32 [granules, T, 64]."""
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


def _rising(answers: Iterable[Sequence[Sequence[int]]]) -> list[int]:
    """The neurons that some row of some batch names, in rising order."""
    rows = [row for rows in answers for row in rows]
    if len(rows) == 1:  # the disk waits for this, and a row is in rising order
        return list(rows[0])
    return sorted({neuron for row in rows for neuron in row})
