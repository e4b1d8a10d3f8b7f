"""Measures scheduling for the probe: the seconds that a pass, a task and a call take beside their kernels.

A tiny model is lowered and run as real ones are. Its weights stream, but its loads read nothing. The time of its
kernels is subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from penstock import _native
from penstock.graph import ops, passes
from penstock.graph.arenas import with_arenas
from penstock.graph.lower import Lowering
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Call, Slot, Task
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import Native, NativeBinding
from penstock.runtime.dispatch import Dispatch
from penstock.runtime.execute import Executor
from penstock.runtime.movers import DiskLoad, FileRange
from penstock.spec.format import Format
from penstock.spec.machine import Rate
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope
from penstock.spec.places import CPU, DISK, HOST
from penstock.spec.plan import Plan, Unit
from penstock.units import MIB

_LAYERS, _HEADS, _GRANULES = 8, 4, 12
_PASSES, _WARM = 40, 3
_LOADS = 200
_SAMPLING_S = 2.5e-4  # of choosing a token and making text of it, which the runtime does not do (docs/LOG.md)


def task_rates(kernels: Native) -> list[Rate]:
    """Rates of `pass`, `task` and `call` on the lane `host`, and of `task` on `disk0`."""
    spec = _spec()
    whole = resident_plan(spec, Format("float32"), kv=Format("float32"), context=256)
    pass_s, _, _ = _pass_s(whole, kernels)
    # Passes of eight calls a task, and of two: if both had about as many, the cost of a task could not be told from
    # that of its calls.
    few = _pass_s(_streaming(whole, 1, ("ffn",)), kernels)
    many = _pass_s(_streaming(whole, _HEADS, ("attn", "ffn")), kernels)
    task_s, call_s = _solve(few, many, pass_s)
    return [
        Rate(CPU, "pass", "*", pass_s + _SAMPLING_S, 0.0),
        Rate(CPU, "task", "*", max(task_s, 1e-6), 0.0),
        Rate(CPU, "call", "*", max(call_s, 1e-6), 0.0),
        Rate(DISK.reads, "task", "*", max(_hand_over_s(whole, kernels), 1e-6), 0.0),
    ]


class _WithoutReads(NativeBinding):
    """A binding whose loads read nothing, by the threads that would read."""

    def __init__(self, plan: Plan, arenas: Arenas, kernels: Native) -> None:
        super().__init__(plan, arenas, None, kernels)
        self._reads = _native.Reader("threads", 1, MIB)

    def _begin_load(self, call: Call, op: ops.Load) -> DiskLoad:
        return DiskLoad(self._reads.start(0, 0, 0, 0), FileRange(Path(), 0, True, "", 0, 0))


Passed = tuple[float, int, int]  # seconds of a decode pass beside its kernels, its tasks, its calls


def _pass_s(plan: Plan, kernels: Native) -> Passed:
    arenas = Arenas(plan)
    binding = _WithoutReads(plan, arenas, kernels)
    executor, lowering = Executor(Dispatch(binding)), Lowering(plan, recurs=False)
    executor.recording = False  # as in runs without --trace
    p = passes.decode(plan, (0,), (64,), passes.DECODE)
    try:
        taken: list[float] = []
        tasks: list[Task] = []
        for _ in range(_PASSES):
            tasks.clear()
            start_s = time.perf_counter()
            executor.run(_noting(lowering.step(p), tasks))
            taken.append(time.perf_counter() - start_s)
        computing = [task for task in tasks if CPU in task.lanes]
        native_s = sum(_native_s(binding, task) for task in computing)
        calls = sum(len(task.calls) for task in computing)
        return max(0.0, statistics.median(taken[_WARM:]) - native_s), len(computing), calls
    finally:
        executor.close()
        arenas.close()


def _noting(tasks: Iterator[Task], into: list[Task]) -> Iterator[Task]:
    for task in tasks:
        into.append(task)
        yield task


def _native_s(binding: NativeBinding, task: Task) -> float:
    """Seconds of a task's calls, which are prepared beforehand."""
    binding.begin()
    runs = [binding.alone(call) for call in task.calls]
    for run in runs:
        run()
    start_s = time.perf_counter()
    for _ in range(5):
        for run in runs:
            run()
    return (time.perf_counter() - start_s) / 5


def _solve(few: Passed, many: Passed, pass_s: float) -> tuple[float, float]:
    """Seconds of a task and of a call, from two passes of different shape: solves

    t - pass_s = tasks · task_s + calls · call_s

    for both, where t, tasks and calls are those of `few` and of `many`. Neither is below 0."""
    (t1, n1, c1), (t2, n2, c2) = few, many
    a, b = max(0.0, t1 - pass_s), max(0.0, t2 - pass_s)
    task_s = (a * c2 - b * c1) / (n1 * c2 - n2 * c1)
    if task_s < 0:
        return 0.0, b / c2
    call_s = (b - task_s * n2) / c2
    return (task_s, call_s) if call_s >= 0 else (b / n2, 0.0)


def _hand_over_s(plan: Plan, kernels: Native) -> float:
    """Seconds between two loads of a lane whose next load waits already: the time per load that reads nothing."""
    arenas = Arenas(plan)
    executor = Executor(Dispatch(_WithoutReads(plan, arenas, kernels)))
    executor.recording = False
    load = Call(ops.Load(Slot(f"{HOST}.ring", 0, 0), 0, 0), 0, None, "*", 0, 0)
    try:
        start_s = time.perf_counter()
        executor.run(Task(i, (DISK.reads,), (load,), (), (), 0, 0, ()) for i in range(_LOADS))
        executor.drain()
        return (time.perf_counter() - start_s) / _LOADS
    finally:
        executor.close()
        arenas.close()


def _spec() -> ModelSpec:
    layer = Layer(Attention(8, _HEADS, 32, 32**-0.5, rope=Rope(1e4, 32)), FfnSpec(64 * _GRANULES, "silu", gated=True))
    norm = NormSpec("rms", 1e-5)
    return ModelSpec("llama", "float32", 1024, 256, 256, 512, (layer,) * _LAYERS, norm, True, True)


def _streaming(whole: Plan, pieces: int, kinds: tuple[str, ...]) -> Plan:
    """The same plan with every layer's parts of these kinds on disk, each cut into `pieces` units."""
    units: list[Unit] = []
    for unit in whole.units:
        if whole.parts[unit.part].kind not in kinds:
            units.append(unit)
            continue
        edges = [unit.hi * i // pieces for i in range(pieces + 1)]
        units += [Unit(unit.part, lo, hi, DISK.tier, HOST, HOST) for lo, hi in pairwise(edges)]
    return with_arenas(replace(whole, units=tuple(units), ring_bytes={HOST: 8 * MIB}))
