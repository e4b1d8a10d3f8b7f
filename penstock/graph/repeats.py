"""Reuses the tasks of a pass for later passes of the same shape. In a model that lies in memory whole, these are the
passes of all tokens.

The shape of a pass is its purpose, and for each batch the numbers of sequences, of rows, and of rows that want logits.
If sequences have consecutive pages, the ids of the sequences and which rows are whose belong to the shape too. If
nothing streams, two passes of one shape differ only in positions, in pages, and in the cost of attention there. So only
the first one is lowered. The tasks of the others are views of its tasks, which takes microseconds instead of 1.7 ms (16
layers, where a step takes 18 ms). A pass begins when the pass before has ended, so edges from one pass to the next
would say nothing new.

The form of a pass is less than its shape: its purpose, its batches, and whether these want logits or hidden states. If
pages are consecutive, the ids of the sequences belong to it too. Native programs take numbers of rows and sequences as
data, and never look at calls. So they run the tasks of any pass of the same form. A server's passes have a handful of
forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from penstock.graph import ops
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.tasks import Call, Pass, Task
from penstock.spec.places import CPU, Lane, is_device, kernels_of
from penstock.spec.plan import Plan

# So many shapes and forms are remembered, those seen last. A single sequence has four shapes. A server's passes have a
# shape for each number of answers, the same again beside full rows of prompts, and one for the odd rest of a prompt.
_KEPT = 16

Shape = tuple[object, ...]
Adopt = Callable[[Sequence[Task]], list[tuple[int, tuple[int, ...]]]]  # as `Emitter.adopt`: tasks → (new id, after)
# A kind of calls of attention, which all cost the same: the first layer with such attention, its KV heads, the bytes of
# a token's K (or V) in one head, and the batch.
Kind = tuple[int, int, int, int]


class KnownTask:
    """A lowered task, and how many calls of attention of each kind it has."""

    def __init__(self, plan: Plan, layout: Layout, task: Task) -> None:
        self.task, self.plan = task, plan
        attentions = [layer.attention for layer in plan.target.spec.layers]
        first = {attention: i for i, attention in reversed(list(enumerate(attentions)))}
        self.kinds: dict[int, Kind] = {}  # number of the call in the task → its kind
        self.fixed_bytes = self.fixed_flops = 0  # sums over all other calls: they do not depend on positions
        for number, call in enumerate(task.calls):
            if not isinstance(call.operands, ops.Attend):
                self.fixed_bytes, self.fixed_flops = self.fixed_bytes + call.bytes, self.fixed_flops + call.flops
                continue
            assert call.batch is not None
            layer, unit = call.operands.layer, plan.units[call.unit]
            kv_bytes_each = layout.kv.home(layer, call.batch).format.kv_bytes(attentions[layer].head_dim)
            lo, hi = plan.unit_rows(unit)
            self.kinds[number] = (first[attentions[layer]], hi - lo, kv_bytes_each, call.batch.id)
        self.counts = Counter(self.kinds.values())

    def moved(self, batches: dict[int, Batch]) -> tuple[Sequence[Call], int, int]:
        """The task's calls, bytes and flops with batches at other positions. `batches`: by id."""
        nbytes, flops = self.fixed_bytes, self.fixed_flops
        for kind, count in self.counts.items():
            attend_bytes, attend_flops = self.attend_cost(kind, batches)
            nbytes, flops = nbytes + count * attend_bytes, flops + count * attend_flops
        return _MovedCalls(self, batches), nbytes, flops

    def attend_cost(self, kind: Kind, batches: dict[int, Batch]) -> tuple[int, int]:
        layer, heads, kv_bytes_each, batch = kind
        a, share = self.plan.target.spec.layers[layer].attention, self.plan.value_share
        return ops.attend_cost(a, heads, batches[batch], kv_bytes_each, share)


class _MovedCalls(Sequence[Call]):
    """The calls of a known task at other positions. Each is made when somebody looks at it."""

    def __init__(self, known: KnownTask, batches: dict[int, Batch]) -> None:
        self._known, self._batches = known, batches

    def __len__(self) -> int:
        return len(self._known.task.calls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @overload
    def __getitem__(self, number: int) -> Call: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Call]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        call = self._known.task.calls[number]
        if call.batch is None or call.batch.some:  # it has no positions
            return call
        nbytes, flops = call.bytes, call.flops
        if isinstance(call.operands, ops.Attend):
            nbytes, flops = self._known.attend_cost(self._known.kinds[number % len(self)], self._batches)
        return Call(call.operands, call.unit, self._batches[call.batch.id], call.format, nbytes, flops)


class Repeats:
    """Remembers the tasks of the latest few shapes of passes, for plans that stream nothing. `adopt`:
    `Emitter.adopt`."""

    def __init__(self, plan: Plan, layout: Layout, adopt: Adopt) -> None:
        self._plan, self._layout, self._adopt = plan, layout, adopt
        self.nothing_streams = (
            not any(plan.ring_bytes.values())
            and not plan.caches
            and layout.staging is None
            and all(home.home == home.attend for home in plan.kv)
            and not layout.delegated  # whether its rows begin prompts decides how a batch is computed
        )
        self._known: dict[Shape, tuple[KnownTask, ...]] = {}
        self._of_form: dict[Shape, tuple[Task, ...]] = {}

    def find(self, p: Pass, by_batches: bool) -> list[Task] | None:
        """The tasks of a pass whose shape is known, or with `by_batches` its form; else None."""
        if not self.nothing_streams:
            return None
        return self._find_form(p) if by_batches else self._find_shape(p)

    def _find_form(self, p: Pass) -> list[Task] | None:
        known = self._of_form.pop(form_of(p), None)
        if known is None:
            return None
        self._of_form[form_of(p)] = known  # the latest now
        return [
            task._replace(id=number, after=after, like=task.id, batches=p.batches)
            for task, (number, after) in zip(known, self._adopt(known), strict=True)
        ]

    def _find_shape(self, p: Pass) -> list[Task] | None:
        known_tasks = self._known.pop(shape_of(p), None)
        if known_tasks is None:
            return None
        self._known[shape_of(p)] = known_tasks  # the latest now
        batches, tasks = {batch.id: batch for batch in p.batches}, []
        numbers = self._adopt([known.task for known in known_tasks])
        for known, (number, after) in zip(known_tasks, numbers, strict=True):
            task, (calls, nbytes, flops) = known.task, known.moved(batches)
            tasks.append(Task(number, task.lanes, calls, task.reads, task.writes, nbytes, flops, after, task.id))
        return tasks

    def keep(self, p: Pass, tasks: Iterator[Task], by_batches: bool) -> Iterator[Task]:
        """Hands the tasks on. Where nothing streams it also remembers them, for `find`."""
        seen: list[Task] = []
        for task in tasks:
            seen += [task] if self.nothing_streams else []
            yield task
        if not seen:
            return
        if by_batches:
            self._of_form[form_of(p)] = tuple(seen)
        else:
            self._known[shape_of(p)] = tuple(KnownTask(self._plan, self._layout, task) for task in seen)
        for kept in (self._known, self._of_form):
            if len(kept) > _KEPT:
                del kept[next(iter(kept))]


def shape_of(p: Pass) -> Shape:
    """All that decides a pass's tasks, except positions and what follows from these."""
    return (p.purpose, tuple(batch.shape for batch in p.batches))


def form_of(p: Pass) -> Shape:
    """All that decides a pass's tasks, except positions, the numbers of rows, of sequences and of rows with logits, and
    what follows from these."""
    return (p.purpose, tuple(batch.form for batch in p.batches))


def likened_lanes(plan: Plan, layout: Layout) -> tuple[Lane, ...]:
    """The lanes on which a task may be like an earlier task, though the passes differ. (If passes do not differ,
    `Repeats` finds whole passes.) The CPU's lane is one of them if the plan asks. A device's lane is one of them if
    weights stream to the device, since each pass has them where the pass before had them, unless a cache or the numbers
    of rows decide what its tasks are."""
    lanes = (CPU,) if plan.asks else ()
    recorded = is_device(plan.main) and not plan.caches and not layout.delegated
    return (*lanes, kernels_of(plan.main)) if recorded else lanes
