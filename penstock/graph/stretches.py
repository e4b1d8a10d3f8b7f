"""Reuses the calls between the experts of one layer and those of the next, which are the same in every pass of a shape.

If experts are asked for, each layer's tasks depend on the router's answer. But from a layer's experts to the question
to the next router the calls are the same in each pass: the sum of the outputs, the merge, attention, a norm, the
router. These calls are a stretch: one task of the CPU. It is lowered once for each layer, and after that it is handed
out with other positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.graph.calls import Calls
from penstock.graph.demand import Demand
from penstock.graph.experts import ExpertCalls
from penstock.graph.ops import Route
from penstock.graph.repeats import KnownTask, Shape, shape_of
from penstock.graph.streams import Streams
from penstock.graph.tasks import Pass, Task
from penstock.spec.places import CPU, HOST

_KEPT = 16  # shapes of passes whose stretches are remembered


class _Stretch(NamedTuple):
    """A stretch's task, and the numbers of its calls of a router."""

    known: KnownTask
    routes: tuple[int, ...]


class Stretches:
    """The stretches of one plan, by shape of the pass and layer."""

    def __init__(self, calls: Calls, streams: Streams, experts: ExpertCalls, demand: Demand) -> None:
        plan = calls.plan
        self._calls, self._streams, self._experts, self._demand = calls, streams, experts, demand
        self._may = (
            bool(plan.caches)
            and plan.order == "overlapped"
            and all(cache.executor == HOST for cache in plan.caches)
            and all(unit.decode == HOST for unit in plan.units)
            and all(home.home == home.attend == HOST for home in plan.kv)
        )
        self._known: dict[Shape, dict[int, _Stretch]] = {}

    def apply(self, p: Pass) -> bool:
        """Whether this pass has stretches: it asks for experts, and no weights stream."""
        return self._may and p.purpose != "prefill" and p.stream.asks and self._streams.idle(p)

    def step(self, p: Pass, layer: int, lowered: Iterator[Task]) -> Iterator[Task]:
        """Yields the stretch before a layer's experts. `lowered`: lowers it, if it is not known yet."""
        emit, shape = self._calls.emit, shape_of(p)
        emit.close(CPU)
        yield from emit.closed()
        stretches = self._known.get(shape)
        if stretches is None:
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            stretches = self._known[shape] = {}
        if (stretch := stretches.get(layer)) is None:
            tasks = []
            for task in lowered:
                tasks.append(task)
                yield task
            emit.close(CPU)
            for task in emit.closed():
                tasks.append(task)
                yield task
            if len(tasks) == 1 and tasks[0].lanes == (CPU,):
                routes = [i for i, call in enumerate(tasks[0].calls) if isinstance(call.operands, Route)]
                known = KnownTask(self._calls.plan, self._calls.layout, tasks[0])
                stretches[layer] = _Stretch(known, tuple(routes))
            return
        self._demand.combined()
        calls, nbytes, flops = stretch.known.moved({batch.id: batch for batch in p.batches})
        emit.again(stretch.known.task, calls, nbytes, flops)
        for number in stretch.routes:
            call = calls[number]
            assert call.batch is not None
            self._experts.asked[call.batch.id] = call
        yield from emit.closed()
