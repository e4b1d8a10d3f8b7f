"""Runs the calls of tasks with the native kernels. Numpy still does what these lack: embeddings that are projected or
have learned positions.

If the lowering marks a task as one that comes again, it is bound once. Its calls become a `_native.Program`, which runs
without Python between the ops. Positions, KV pages and numbers of rows change from pass to pass, so they lie in tables
that the program points at. A call for experts that were asked for is a program too, in which the experts and their
addresses are replaced each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock import _native
from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.tasks import Call, Task, batch_of
from penstock.runtime.arena import Arenas
from penstock.runtime.batch_tables import BatchTables
from penstock.runtime.bind import experts_of
from penstock.runtime.bind_native_ops import NativeOps, Target
from penstock.runtime.kv_file import KvFile
from penstock.runtime.movers import DiskReader
from penstock.runtime.native_kernels import Native, native
from penstock.spec.plan import Plan

__all__ = ["Native", "NativeBinding", "Target", "native"]
# So many programs are remembered if a whole pass is one program. With caches of experts a layer has four.
_KEPT = 16


class _Bound(NamedTuple):
    """A task that was bound, to be run again and again."""

    steps: tuple[_native.Program | int, ...]  # in order: a program, or the index of a call that numpy does
    batches: dict[int, int]  # batch id → the index of one call of that batch


class NativeBinding(NativeOps):
    """Runs calls and tasks of native ops, and keeps those that come again as programs. Arguments as for `Binding`."""

    def __init__(
        self, plan: Plan, arenas: Arenas, reader: DiskReader | None, kernels: Native, poisoned: bool = False,
        kv_file: KvFile | None = None,
    ) -> None:  # fmt: skip
        super().__init__(plan, arenas, reader, kernels, poisoned, kv_file)
        self._tables_of: dict[Batch, BatchTables] = {}  # of calls that run alone, for this pass
        self._shared: dict[int, BatchTables] = {}  # of programs, by the batch's id
        self._moved: set[int] = set()  # ids of the batches whose tables are those of this pass
        # Where weights stream a pass has at most a task before each unit and one behind it.
        self._most_bound = _KEPT * (4 * len(self._spec.layers) if plan.asks else 1) + 2 * len(plan.units)
        self._bound: dict[int, _Bound] = {}  # by `Task.like`
        # Programs of one call for experts that were asked for, by all its operands but these experts.
        self._placed: dict[tuple[object, ...], _native.Program] = {}
        self._expert_bytes = {part.layer: part.least_bytes for part in self._parts.values() if part.kind == "experts"}

    def begin(self) -> None:
        super().begin()
        self._tables_of.clear()
        self._moved.clear()

    def forget(self) -> None:
        """Task ids start over: bound tasks are forgotten."""
        self._bound.clear()

    def run(self, task: Task) -> None:
        if self.hears:
            super().run(task)
            return
        if task.like < 0:
            for call in task.calls:
                if isinstance(call.operands, ops.Experts) and call.operands.outputs:
                    self._run_placed(call, call.operands)
                else:
                    self.call(call)
            return
        bound = self._bound.get(task.like)
        if bound is None:
            bound = self._bind(task)
            while len(self._bound) >= self._most_bound:
                del self._bound[next(iter(self._bound))]
            self._bound[task.like] = bound
        given = {batch.id: batch for batch in task.batches}
        for batch_id, number in bound.batches.items():
            if batch_id not in self._moved:
                self.move(self._shared[batch_id], given.get(batch_id) or batch_of(task.calls[number]))
                self._moved.add(batch_id)
        for step in bound.steps:
            if isinstance(step, int):
                super().call(task.calls[step])
            else:
                step.run()

    def _run_placed(self, call: Call, op: ops.Experts) -> None:
        """Computes experts that were asked for. All operands are the same in each pass, except which experts they are
        and where these lie."""
        key = (call.unit, call.total_rows, *op[1:6], op.starts_sum)
        program = self._placed.get(key)
        if program is None:
            while len(self._placed) >= self._most_bound:
                del self._placed[next(iter(self._placed))]
            program = self._placed[key] = self.new_program()
            self.record(program, call, None)
        arena, expert_bytes = op.weights[0].arena, self._expert_bytes[op.layer]
        base, weights, experts = self._arenas.start(arena), [], op.first_experts
        for slot in op.weights:
            weights.append(base + slot.lo)
            if slot.hi - slot.lo != expert_bytes or slot.arena != arena:
                placed = experts_of(op, self._parts[f"{op.layer}.experts"])
                weights, experts = [self._arenas.address(at) for _, at in placed], tuple(e for e, _ in placed)
                break
        program.place(weights, experts)
        program.run()

    def call(self, call: Call) -> None:
        if not self.is_native(call):
            super().call(call)
            return
        batch = batch_of(call)
        if batch not in self._tables_of:
            self._tables_of[batch] = self.new_tables(batch)
        self._natively[call.op](self._compute, call, call.operands, self._tables_of[batch])
        self._tell_route(call)
        self._tell_fired(call)

    def alone(self, call: Call) -> Callable[[], None]:
        """Returns a function that runs this one native call, with little Python around it. For probes."""
        assert self.is_native(call), f"{call.op} is not native here"
        batch = batch_of(call)
        if batch not in self._tables_of:
            self._tables_of[batch] = self.new_tables(batch)
        program = self.new_program()
        self.record(program, call, self._tables_of[batch])
        return program.run

    def _bind(self, task: Task) -> _Bound:
        steps: list[_native.Program | int] = []
        batches: dict[int, int] = {}
        for number, call in enumerate(task.calls):
            if not self.is_native(call):
                steps.append(number)
                continue
            batch = batch_of(call)
            if not batch.some:
                batches.setdefault(batch.id, number)
            if not steps or isinstance(steps[-1], int):
                steps.append(self.new_program())
            program, tables = steps[-1], self._shared_tables(batch.id)
            assert isinstance(program, _native.Program)
            # A task that comes again has the same rows of a batch for each executor. The tables count all rows.
            program.follow(0 if batch.some else tables.counts_address)
            self.record(program, call, tables)
        return _Bound(tuple(steps), batches)

    def _shared_tables(self, batch: int) -> BatchTables:
        """The tables of all programs with this batch, with room for any of its passes."""
        if batch not in self._shared:
            plan, pages = self._plan, self.layout.kv.pages_per_seq
            rows = max(plan.chunk_rows, plan.batch_seqs)
            self._shared[batch] = BatchTables(rows, plan.logits_rows, plan.batch_seqs, pages, self._frequencies)
        return self._shared[batch]
