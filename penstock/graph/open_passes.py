"""Open passes: passes of which everything is known except the answers of routers. If a model's experts come from a
disk, the passes of all its tokens are open passes.

Such a pass is lowered once per shape. Its calls come again with other positions, except loads of experts and the calls
that compute them. An open pass has marks in their places. At one kind of mark a router answers, and the experts that
its layer's cache misses are read. At another kind the experts that were asked for are computed. Whoever runs the pass
decides as the same cache does (`graph/cache`), and nothing is lowered between layers. Lowering took 0.1 ms from the end
of a router to the first read of a layer that missed (docs/LOG.md). The results must equal those of the lowering's
tasks. Tests run both, and `run_serial` runs only the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.repeats import Shape, shape_of
from penstock.graph.tasks import Call, Pass, Task
from penstock.spec.places import CPU, HOST
from penstock.spec.plan import Plan

_KEPT = 16  # shapes of passes that are remembered


class Action(Enum):
    """What is done at a mark.

    ASK      the router's answer is taken, and the experts that its layer's cache misses are read
    GUESS    the same with the router's answer to the input of the layer before
    COMPUTE  the experts that were asked for are computed: first those in the cache, then the others as they come
    """

    ASK = "ask"
    GUESS = "guess"
    COMPUTE = "compute"


class Mark(NamedTuple):
    """`action` is done before call number `at` of the pass. `call`: the call of the router that answers; for COMPUTE,
    one that computes experts."""

    at: int
    action: Action
    layer: int
    call: Call


class OpenPass(NamedTuple):
    """The calls of a pass in order, and marks in rising order. All calls but `Fetch` are the host's. `shape`: the shape
    of the passes that it stands for. `batch`: all calls are for a batch with this id, which has other positions in each
    pass."""

    shape: Shape
    calls: tuple[Call, ...]
    marks: tuple[Mark, ...]


class OpenPasses:
    """The open passes of a plan, by shape."""

    def __init__(self, plan: Plan) -> None:
        self._least_slots = min((cache.slots for cache in plan.caches), default=0)
        self._active = max((layer.active for layer in plan.target.spec.layers if layer.routed), default=0)
        self._known: dict[Shape, OpenPass | None] = {}  # None: it has something that no open pass has

    def may_be(self, p: Pass) -> bool:
        """Whether a pass whose stretches are known (`Stretches.apply`) can be an open pass: of one batch, whose rows
        want no more experts of a layer than it has slots."""
        return len(p.batches) == 1 and p.batches[0].total_rows * self._active <= self._least_slots

    def find(self, p: Pass) -> OpenPass | None:
        """The open pass of a pass that may be one; None where its shape is not known yet."""
        return self._known.get(shape_of(p))

    def keep(self, p: Pass, tasks: Iterator[Task]) -> Iterator[Task]:
        """Hands the tasks on, and remembers them as an open pass if they are one."""
        shape = shape_of(p)
        if shape in self._known:
            yield from tasks
            return
        seen: list[Task] = []
        for task in tasks:
            seen.append(task)
            yield task
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[shape] = opened(shape, seen)


def opened(shape: Shape, tasks: list[Task]) -> OpenPass | None:
    """The open pass of a pass that was lowered with some answers. None where its tasks are not those of one."""
    calls: list[Call] = []
    marks: list[Mark] = []
    computing: Call | None = None  # experts of the layer at hand
    for task in tasks:
        for call in task.calls:
            op = call.operands
            if isinstance(op, ops.Load) and op.target.arena == f"{HOST}.cache":
                continue
            if isinstance(op, ops.Experts) and op.outputs:
                computing = computing or call
                continue
            if task.lanes != (CPU,) and not isinstance(op, ops.Fetch):
                return None
            if isinstance(op, ops.Combine):
                if computing is None:
                    return None
                marks.append(Mark(len(calls), Action.COMPUTE, op.layer, computing))
                computing = None
            calls.append(call)
            if isinstance(op, ops.Route):
                marks.append(Mark(len(calls), Action.GUESS if op.guesses else Action.ASK, op.layer, call))
    asked = {mark.layer for mark in marks if mark.action is Action.COMPUTE}  # other layers' experts are all in RAM
    return OpenPass(shape, tuple(calls), tuple(mark for mark in marks if mark.layer in asked))
