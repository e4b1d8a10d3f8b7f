"""Measures a GPU: the link each way, kernels per op and format, launching, and how much copies slow the CPU down.

Plan, sizes and fits are those of the CPU's probe (`runtime.probe_ops`). Seconds are the device's own, between events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.graph.arenas import with_arenas
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.ops import PRODUCTS
from penstock.graph.tasks import Call, Pass
from penstock.kernels.gpu.choose import choose
from penstock.runtime.device.cuda.bind import TorchBinding
from penstock.runtime.fit import Fit, Tell, fit, fit_well
from penstock.runtime.probe_ops import CONTEXT, FORMATS, ROW_OPS, TimedOp, attention_rates, probe_plan, some_numbers
from penstock.spec.format import DEFAULT_GROUP, Format, parse_format
from penstock.spec.machine import Rate
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.units import KIB, MIB

KV_FORMATS = ("float16", "int8", "int4")
_COPIES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_ROWS = ((1,), (8,), (32,), (64, 128), (256, 512))
_MOST_BYTES = 2 << 30  # of weights at a time: several times what the cache of a large card holds
_SYNC_BYTES = 16 * KIB  # PIPO's T_sync


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of a GPU. `rates`: of gpu0, h2d0, d2h0. `beside_copies`: the seconds in which the CPU reads RAM while
    the link copies, divided by those without."""

    rates: tuple[Rate, ...]
    beside_copies: float


class Clock:
    """Times work on the device, from event to event; on the processor by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch: Any = torch.get_device_module(device)

    def seconds(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds that `work` takes once: the median of three turns of `repeats`, after one run to warm up."""
        work()
        return statistics.median(self._turn_s(work, repeats) for _ in range(3))

    def wait(self) -> None:
        if self._device.type != "cpu":
            self._torch.current_stream(self._device).synchronize()

    def _turn_s(self, work: Callable[[], object], repeats: int) -> float:
        if self._device.type == "cpu":
            start_s = time.perf_counter()
            for _ in range(repeats):
                work()
            return (time.perf_counter() - start_s) / repeats
        begun, ended = (self._torch.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(repeats):
            work()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / repeats


def probe_device(
    device: torch.device, ram_read_s: Callable[[], float], tell: Tell, *, formats: Sequence[str] = FORMATS,
    kv_formats: Sequence[str] = KV_FORMATS, copies: Sequence[int] = _COPIES,
) -> DeviceFigures:  # fmt: skip
    """Measures a device. `ram_read_s`: reads a fixed amount of RAM with all threads and returns the seconds; it is
    called with and without copies. `copies`: sizes of copies in bytes."""
    clock = Clock(device)
    rates = list(_link(device, clock, copies, tell))
    rates.append(_round_trip(device, clock))
    for number, kind in enumerate(formats):
        layers = _Layers(device, clock, parse_format(kind), Format("float16"))
        rates += layers.rates(tell, every_op=not number)
        if not number:
            rates.append(Rate(GPU.kernels, "call", "*", layers.launch_s(), 0.0))
    for kv in kv_formats:
        layers = _Layers(device, clock, Format("int4", DEFAULT_GROUP), parse_format(kv), mostly_kv=True)
        rates += layers.attention_rates(kv, tell)
    return DeviceFigures(tuple(rates), _beside(device, clock, ram_read_s, max(copies)))


def _link(device: torch.device, clock: Clock, copies: Sequence[int], tell: Tell) -> list[Rate]:
    """The rates of copies each way, of pinned memory and of pageable."""
    there = torch.empty(max(copies), dtype=torch.uint8, device=device)
    rates = []
    for kind, pinned in (("*", True), ("pageable", False)):
        here = torch.empty(max(copies), dtype=torch.uint8, pin_memory=pinned and device.type != "cpu")
        for lane in (GPU.to_device, GPU.to_host):

            def points(lane: str = lane, here: Tensor = here) -> list[tuple[float, float]]:
                timed = []
                for nbytes in copies:
                    target, source = (there, here) if lane == GPU.to_device else (here, there)
                    copy = _copy(target[:nbytes], source[:nbytes])
                    timed.append((float(nbytes), clock.seconds(copy, max(1, 64 * MIB // nbytes))))
                return timed

            line = fit_well(points, f"{lane}, {'pinned' if pinned else 'pageable'} copies", tell)
            rates.append(Rate(lane, kind, "*", line.alpha_s, line.slope_s, 0.0, line.r2))
    return rates


def _round_trip(device: torch.device, clock: Clock) -> Rate:
    """The rate of `task`: half of a round trip of 16 KiB with both sides waiting (PIPO's T_sync)."""
    here = torch.zeros(_SYNC_BYTES, dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.zeros(_SYNC_BYTES, dtype=torch.uint8, device=device)

    def round_trip() -> None:
        there.copy_(here, non_blocking=True)
        clock.wait()
        here.copy_(there, non_blocking=True)
        clock.wait()

    def wall_s(work: Callable[[], object], repeats: int) -> float:
        work()
        start_s = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start_s) / repeats

    sync_s = statistics.median(wall_s(round_trip, 50) for _ in range(5))
    return Rate(GPU.kernels, "task", "*", sync_s / 2, 0.0)


def _beside(device: torch.device, clock: Clock, ram_read_s: Callable[[], float], nbytes: int) -> float:
    """Seconds of reading RAM while the link copies `nbytes` at a time from it, divided by the seconds without."""
    alone_s = statistics.median(ram_read_s() for _ in range(3))
    if device.type == "cpu":
        return 1.0
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    # 16 GiB of copies: they go on for a quarter of a second at 64 GB/s.
    beside_s = []
    for _ in range(3):
        for _ in range(max(1, (16 << 30) // nbytes)):
            there.copy_(here, non_blocking=True)
        beside_s.append(ram_read_s())
        clock.wait()
    return max(1.0, statistics.median(beside_s) / alone_s)


class _Layers:
    """Layers of one format in device memory, whose calls can be timed one by one."""

    def __init__(
        self, device: torch.device, clock: Clock, weights: Format, kv: Format, mostly_kv: bool = False
    ) -> None:
        self._clock, self._kind, self._device = clock, weights.kind, device
        self.plan = _on_device(probe_plan(weights, kv, _MOST_BYTES, mostly_kv))
        numbers = torch.from_numpy(some_numbers())
        memory = {}
        for arena in self.plan.arenas:
            place = device if arena.tier == GPU.executor else torch.device("cpu")
            if arena.name in (f"{GPU.executor}.weights", f"{GPU.executor}.kv"):
                memory[arena.name] = numbers.to(place).repeat(-(-arena.bytes // len(numbers)))[: arena.bytes]
            else:  # zeros: one of these arenas holds tokens, which must be in the vocabulary
                memory[arena.name] = torch.zeros(arena.bytes, dtype=torch.uint8, device=place)
        kernels, _ = choose(device)
        self._binding = TorchBinding(self.plan, memory, device, kernels, lambda arena, lo, hi: [(lo, hi)])

    def rates(self, tell: Tell, every_op: bool) -> list[Rate]:
        """The rates of products; with `every_op` also those of all other ops, which do not depend on the format."""
        rates: list[Rate] = []
        s_per_byte: dict[str, float] = {}
        for rows in _ROWS:
            over = "bytes" if rows[-1] <= 32 else "flops"
            for op, line in self._fits(PRODUCTS, rows, over, tell).items():
                most = 0 if rows is _ROWS[-1] else rows[-1]
                if over == "bytes":
                    s_per_byte.setdefault(op, line.slope_s)
                    rates.append(Rate(GPU.kernels, op, self._kind, line.alpha_s, line.slope_s, 0.0, line.r2, most))
                else:
                    rates.append(
                        Rate(GPU.kernels, op, self._kind, line.alpha_s, s_per_byte[op], line.slope_s, line.r2, most)
                    )
        if every_op:
            for op, line in self._fits(ROW_OPS, (1, 64, 512), "bytes", tell).items():
                rates.append(Rate(GPU.kernels, op, "*", line.alpha_s, line.slope_s, 0.0, line.r2))
            slowest = max(rate.s_per_byte for rate in rates)
            rates.append(Rate(GPU.kernels, "*", "*", min(rate.alpha_s for rate in rates), slowest))
        return rates

    def attention_rates(self, kv: str, tell: Tell) -> list[Rate]:
        """The rates of attention over KV in this format, which these layers have."""
        return attention_rates(GPU.kernels, kv, lambda rows, start: self._time(rows, start, ("attend",)), tell)

    def _fits(self, ops: Collection[str], rows: Sequence[int], over: str, tell: Tell) -> dict[str, Fit]:
        """For each op a line of seconds over `over`, "bytes" or "flops"."""
        timed = [t for n in rows for t in self._time(n, 0 if n > 1 else CONTEXT // 2, ops)]
        lines = {op: fit([(getattr(t, over), t.seconds) for t in timed if t.op == op]) for op in ops}
        for op, line in lines.items():
            if line.r2 < 0.9:
                tell(f"{op}, {self._kind}, {rows[-1]} rows, device: r² {line.r2:.2f}")
        return lines

    def _time(self, rows: int, start: int, ops: Collection[str]) -> list[TimedOp]:
        """Times per op and size. All calls of one size are timed as one run through the layers, which are more than a
        cache holds."""
        batch = Batch(0, (0,), (start,), (rows,), tuple(range(rows))[-64:])
        tasks = Lowering(self.plan).step(Pass("prefill" if rows > 1 else "decode", (batch,), None))
        self._binding.begin()
        alike: dict[tuple[str, int, int], list[Call]] = {}
        for task in tasks:
            if task.lanes[0] == GPU.kernels:
                self._binding.prepare(task)
                for call in task.calls:
                    if call.op in ops:
                        alike.setdefault((call.op, call.bytes, call.flops), []).append(call)
        return [
            TimedOp(*key, self._clock.seconds(self._recorded(calls), 2) / len(calls)) for key, calls in alike.items()
        ]

    def launch_s(self) -> float:
        """Seconds per call that the CPU takes to launch the calls of a step one by one."""
        batch = Batch(0, (0,), (CONTEXT // 2,), (1,), (0,))
        tasks = [t for t in Lowering(self.plan).step(Pass("decode", (batch,), None)) if t.lanes[0] == GPU.kernels]
        self._binding.begin()
        for task in tasks:
            self._binding.prepare(task)
            self._binding.run(task)
        self._clock.wait()
        start_s = time.perf_counter()
        for task in tasks:
            self._binding.run(task)
        seconds = time.perf_counter() - start_s
        self._clock.wait()
        return seconds / sum(len(task.calls) for task in tasks)

    def _recorded(self, calls: Sequence[Call]) -> Callable[[], object]:
        """A function that runs these calls, recorded as one graph: launched one by one, small kernels would take as
        long as Python does."""

        def launch() -> None:
            for call in calls:
                self._binding.call(call)

        if self._device.type != "cuda":
            return launch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch()  # compiles
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            launch()
        replay: Callable[[], object] = graph.replay
        return replay


def _on_device(plan: Plan) -> Plan:
    """The same plan with everything at home on the device."""
    moved = replace(
        plan,
        units=tuple(replace(u, home=GPU.executor, decode=GPU.executor, prefill=GPU.executor) for u in plan.units),
        kv=tuple(replace(home, home=GPU.executor, attend=GPU.executor) for home in plan.kv),
        acts=tuple(replace(home, home=GPU.executor) for home in plan.acts),
        stage_bytes=MIB,
    )
    return with_arenas(moved)


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)
