"""Measures the CPU kernels for the probe: every op, over rows and sizes, as a pass runs it.

The layers have real widths and are cut into units of several sizes. There are more of them than a cache holds, so that
weights and KV come out of memory. Ops on few rows wait for bytes, ops on many rows for arithmetic: the two are fitted
apart. Kernels for 1, 2, 4 and 8 rows have speeds of their own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock import _native
from penstock.graph.arenas import with_arenas
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.ops import PRODUCTS, LayerOp
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Call, Pass
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import Native, NativeBinding
from penstock.runtime.fit import GOOD_R2, Fit, Points, Tell, fit, fit_well, middle, steady, straight
from penstock.runtime.own_time import Taken, ThreadClocks, is_free, undisturbed
from penstock.spec.format import DEFAULT_GROUP, Format, parse_format
from penstock.spec.machine import Rate
from penstock.spec.model import Attention, FfnSpec, Layer, ModelSpec, NormSpec, Rope
from penstock.spec.places import CPU, HOST, Lane
from penstock.spec.plan import Plan, Unit
from penstock.units import MIB

FORMATS = ("int4", "int8", "float16", "bfloat16", "float32")
KV_FORMATS = ("float16", "bfloat16", "float32", "int8", "int4")
FEW_ROWS = (1, 2, 4, 8)
_SOME_ROWS, _MANY_ROWS = (16, 64), (256, 512)
_FEW = tuple((rows,) for rows in FEW_ROWS)
# Many rows are timed twice, some time apart: a figure from a moment in which another process had a core then stands
# out. Few rows are timed in between, five times. Their speed is that of the RAM, which on a shared machine swings by
# half within seconds: two turns gave 43 tokens/s where runs, and the RAM alone, gave 58 (docs/LOG.md). So the RAM is
# read right before and after each turn of few rows.
# Each comes once before any comes again but the few rows: a format whose time is short has all its figures then.
_TURNS = (*_FEW, _SOME_ROWS, _MANY_ROWS, *_FEW, *_FEW, _SOME_ROWS, *_FEW, _MANY_ROWS, *_FEW)
_AGAIN = 2  # times that an op whose times lie on no line is timed again
CONTEXT = 2048
# (rows, position of the first) of the calls of attention that are timed
ONE_ROW_TIMED = tuple((1, start) for start in (255, 1023, CONTEXT - 1))
MANY_ROWS_TIMED = tuple((_MANY_ROWS[-1], start) for start in (0, CONTEXT - _MANY_ROWS[-1]))
_WIDTH, _INTEGER_WIDTH, _NEURONS, _VOCAB, _MOST_LAYERS = 2048, 4096, 4096, 8192, 16
_KV_WIDTH, _MOST_KV_LAYERS, HEAD_DIM = 256, 32, 128
_LOGITS_ROWS = 64
_OUTLIER = 3  # calls that took so many times the median were not computing
_WAITS_FOR_RAM = 0.75  # a product that reads its weights at so much of the RAM's speed waits for the RAM alone
_MANY_LAYERS = 2  # that many rows are timed on
ROW_OPS = ("gather", "embed", "norm", "merge")


@dataclass(frozen=True)
class TimedOp:
    """One size of an op. `bytes`, `flops` and `seconds` are those of one call."""

    op: str
    bytes: int
    flops: int
    seconds: float


def product_rates(
    kind: str, kernels: Native, memory_bytes: int, tell: Tell, between: Callable[[], None], until_s: float,
    every_op: bool,
) -> tuple[list[Rate], list[float]]:  # fmt: skip
    """The rates of products of weights in a format, in about `memory_bytes` of memory, and the speeds of the RAM in
    bytes/s meanwhile. The rest as for `Layers.rates`. Raises StorageFailed where the system refuses memory."""
    layers = Layers(parse_format(kind), Format("float16"), kernels, memory_bytes)
    try:
        return layers.rates(tell, between, until_s, every_op), layers.ram_bytes_per_s
    finally:
        layers.close()


def kv_rates(kv: str, kernels: Native, memory_bytes: int, tell: Tell, until_s: float) -> list[Rate]:
    """The rates of attention over KV in a format, in about `memory_bytes` of memory. `until_s`: as for `fit_well`.
    Raises StorageFailed where the system refuses memory."""
    layers = Layers(Format("int4", DEFAULT_GROUP), parse_format(kv), kernels, memory_bytes, mostly_kv=True)
    try:
        return layers.attention_rates(kv, tell, until_s)
    finally:
        layers.close()


class Layers:
    """Layers of one format in memory, whose calls can be timed one by one. `timed`: how many were. `disturbed`: during
    how many of them another process had a core. `ram_bytes_per_s`: of the RAM, around each turn of few rows."""

    def __init__(
        self, weights: Format, kv: Format, kernels: Native, memory_bytes: int, mostly_kv: bool = False
    ) -> None:
        self.weights, self._threads = weights, kernels.compute.threads
        self.timed = self.disturbed = 0
        self.ram_bytes_per_s: list[float] = []
        self.plan = probe_plan(weights, kv, memory_bytes, mostly_kv)
        self._layers = len(self.plan.target.spec.layers)
        self._arenas = Arenas(self.plan)
        _fill(self.plan, self._arenas)
        self.binding = NativeBinding(self.plan, self._arenas, None, kernels)

    def close(self) -> None:
        self._arenas.close()

    def rates(self, tell: Tell, between: Callable[[], None], until_s: float, every_op: bool) -> list[Rate]:
        """The rates of products; with `every_op` also those of all other ops, which do not depend on the format.
        `between` is called between two turns. `until_s`: a time of `time.perf_counter`, after which no turn begins but
        those of few rows. What has had no turn by then is missing from the rates."""
        rates: list[Rate] = []
        if every_op:
            for op, points in self._points(ROW_OPS, (1, 64, 512), "bytes").items():
                line = self._again(op, (1, 64, 512), "bytes", [fit(points)], tell, until_s)
                rates.append(Rate(CPU, op, "*", line.alpha_s, line.slope_s, 0.0, line.r2))
        timed = self._turns(between, until_s)
        s_per_byte: dict[str, float] = {}
        for rows, turns in timed.items():
            over, choose = ("bytes", middle) if rows in _FEW else ("flops", _steady)
            for op in PRODUCTS:
                line = self._again(op, rows, over, [fit(turn[op]) for turn in turns], tell, until_s, choose)
                if rows in _FEW:
                    s_per_byte.setdefault(op, line.slope_s)
                    rates.append(Rate(CPU, op, self.weights.kind, line.alpha_s, line.slope_s, 0.0, line.r2, rows[0]))
                    continue
                most = 0 if rows is _MANY_ROWS else rows[-1]
                rates.append(
                    Rate(CPU, op, self.weights.kind, line.alpha_s, s_per_byte[op], line.slope_s, line.r2, most)
                )
        return rates

    def _turns(self, between: Callable[[], None], until_s: float) -> dict[tuple[int, ...], list[dict[str, Points]]]:
        """Rows of a turn → for each time that it came, each product's points. A turn that would end after `until_s`,
        by the time that the like took before, does not begin. Where that is so of many rows, the fewest alone are
        timed."""
        timed: dict[tuple[int, ...], list[dict[str, Points]]] = {}
        taken_s: dict[tuple[int, ...], float] = {}
        ram: dict[tuple[int, ...], list[float]] = {}  # bytes/s around each turn of few rows
        for rows in _TURNS:
            start_s, of_turn = time.perf_counter(), rows
            foretold_s = taken_s.get(rows, 0.0)
            if rows is _MANY_ROWS and not foretold_s:  # by the arithmetic
                share = min(_MANY_LAYERS, self._layers) / self._layers
                foretold_s = taken_s.get(_SOME_ROWS, 0.0) * sum(_MANY_ROWS) / sum(_SOME_ROWS) * share
                if start_s + foretold_s > until_s:  # int8 takes three times as long as int4
                    of_turn, foretold_s = rows[:1], foretold_s * rows[0] / sum(rows)
            if (rows not in _FEW or rows in timed) and start_s + foretold_s > until_s:
                continue
            if rows in _FEW:
                before = self._ram_bytes_per_s()
                timed.setdefault(rows, []).append(self._points(PRODUCTS, of_turn, "bytes"))
                ram.setdefault(rows, []).append((before + self._ram_bytes_per_s()) / 2)
            else:
                timed.setdefault(rows, []).append(self._points(PRODUCTS, of_turn, "flops"))
            taken_s[rows] = (time.perf_counter() - start_s) * sum(rows) / sum(of_turn)
            between()
        self.ram_bytes_per_s = [speed for speeds in ram.values() for speed in speeds]
        usual = statistics.median(self.ram_bytes_per_s)
        for rows, speeds in ram.items():
            timed[rows] = [
                {op: by_usual_ram(points, speed, usual) for op, points in turn.items()}
                for turn, speed in zip(timed[rows], speeds, strict=True)
            ]
        return timed

    def _ram_bytes_per_s(self) -> float:
        """The speed at which all threads read these weights now: once, in some 20 ms."""
        weights = self._arenas.whole(f"{HOST}.weights")
        return len(weights) / _native.ram_read_s(weights.ctypes.data, len(weights), self._threads, 1)

    def attention_rates(self, kv: str, tell: Tell, until_s: float) -> list[Rate]:
        """The rates of attention over KV in this format, which these layers have."""
        return attention_rates(CPU, kv, lambda rows, start: self.time(rows, start, ("attend",)), tell, until_s)

    def _points(self, ops: Collection[str], rows: Sequence[int], over: str) -> dict[str, Points]:
        """For each op its seconds over `over`, "bytes" or "flops". All ops are timed together."""
        timed = [t for n in rows for t in self.time(n, 0 if n > 1 else CONTEXT // 2, ops)]
        return {op: [(float(getattr(t, over)), t.seconds) for t in timed if t.op == op] for op in ops}

    def _again(
        self, op: str, rows: Sequence[int], over: str, fits: list[Fit], tell: Tell, until_s: float,
        choose: Callable[[Sequence[Fit]], Fit] = middle,
    ) -> Fit:  # fmt: skip
        """One of the fits of an op. Where none of them is straight, the op is timed again by itself, twice at most."""
        for _ in range(_AGAIN):
            before = max(line.r2 for line in fits)
            if before >= GOOD_R2 or time.perf_counter() > until_s:
                break
            again = fit(self._points((op,), rows, over)[op])
            tell(f"{op}, {self.weights.name}, {rows[-1]} rows: measured again, r² {before:.2f}, then {again.r2:.2f}")
            fits = [*fits, again]
        return choose(straight(fits))

    def time(
        self, rows: int, start: int, ops: Collection[str], repeats: int = 3, by_clock: bool = False
    ) -> list[TimedOp]:
        """Mean times per op and size, over layers and repeats, after a round to warm up. They are what free cores take
        (`own_time`), or with `by_clock` what was taken. Many rows are timed on two layers only: these are more than a
        cache holds, and take long."""
        batch = Batch(0, (0,), (start,), (rows,), tuple(range(rows))[-_LOGITS_ROWS:])
        most = _MANY_LAYERS if rows > _SOME_ROWS[-1] else self._layers
        calls = self._calls(Pass("prefill" if rows > 1 else "decode", (batch,), None), ops, most)
        clocks, times = ThreadClocks(), dict[tuple[str, int, int], list[Taken]]()
        for repeat in range(repeats + 1 if rows <= FEW_ROWS[-1] else 3):
            for call, run in calls:
                own_s, start_s = clocks.now_s(), time.perf_counter()
                run()
                taken = time.perf_counter() - start_s, clocks.busiest_s(own_s)
                self.timed, self.disturbed = self.timed + 1, self.disturbed + (not is_free(taken))
                if repeat:
                    times.setdefault((call.op, call.bytes, call.flops), []).append(taken)
        mean = _mean_of_swings if rows <= FEW_ROWS[-1] else _typical
        if by_clock:
            return [TimedOp(*key, mean([taken_s for taken_s, _ in calls])) for key, calls in times.items()]
        return [TimedOp(*key, mean(undisturbed(calls))) for key, calls in times.items()]

    def _calls(self, p: Pass, ops: Collection[str], most_layers: int) -> list[tuple[Call, Callable[[], None]]]:
        """The pass's calls of these ops, each with a function that runs it natively, with little Python around."""
        calls: list[tuple[Call, Callable[[], None]]] = []
        self.binding.begin()
        (task,) = Lowering(self.plan).step(p)
        for call in task.calls:
            if call.op not in ops:
                continue
            if isinstance(call.operands, LayerOp) and call.operands.layer >= most_layers:
                continue
            calls.append((call, self.binding.alone(call)))
        return calls


def attention_rates(
    lane: Lane, kv: str, time: Callable[[int, int], list[TimedOp]], tell: Tell, until_s: float = math.inf
) -> list[Rate]:
    """The rates of attention over KV in one format, for ONE_ROW_TIMED and for MANY_ROWS_TIMED. `time(rows, start)`:
    times attention's calls of so many rows, the first at position `start`.

    A call of many rows has begun before the shortest one of one row would have ended. All those that are timed take
    milliseconds, and their line alone gave 0 to 4.4 ms for the begin (docs/LOG.md)."""
    shortest_s = math.inf

    def decode() -> Points:
        nonlocal shortest_s
        timed = [t for each in ONE_ROW_TIMED for t in time(*each)]
        shortest_s = min([shortest_s, *(t.seconds for t in timed)])
        return [(t.bytes, t.seconds) for t in timed]

    def prefill() -> Points:
        return [(t.flops, t.seconds) for each in MANY_ROWS_TIMED for t in time(*each)]

    device_note = "" if lane == CPU else ", device"
    few = fit_well(decode, f"attend, {kv}, 1 row{device_note}", tell, until_s)
    many = fit_well(prefill, f"attend, {kv}, many rows{device_note}", tell, until_s, shortest_s)
    return [
        Rate(lane, "attend", kv, few.alpha_s, few.slope_s, 0.0, few.r2, 1),
        Rate(lane, "attend", kv, many.alpha_s, few.slope_s, many.slope_s, many.r2),
    ]


def attention_sizes(kv: str, timed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(bytes, flops) of the probe's calls of attention over KV in one format. `timed`: as ONE_ROW_TIMED."""
    plan = _plan(_KV_WIDTH, 1, Format("int4", DEFAULT_GROUP), parse_format(kv))
    sizes: list[tuple[int, int]] = []
    for rows, start in timed:
        batch = Batch(0, (0,), (start,), (rows,), (0,))
        (task,) = Lowering(plan).step(Pass("prefill" if rows > 1 else "decode", (batch,), None))
        sizes += [(call.bytes, call.flops) for call in task.calls if call.op == "attend"]
    return sizes


def by_usual_ram(points: Points, ram_bytes_per_s: float, usual_bytes_per_s: float) -> Points:
    """(bytes, seconds) of products as they are where the RAM has its usual speed. `ram_bytes_per_s`: its speed while
    they were timed. Those that do not wait for it stay.

    Whole probes took one row in a spell in which a shared RAM gave 46 GB/s, and 34 a second later: runs of the same
    minute were promised 1.28 times their speed (docs/LOG.md). Whether they wait is not sure in such a spell, so none
    is taken to read faster than the RAM usually is."""
    most, seconds = max(points)
    waits = most / seconds >= _WAITS_FOR_RAM * ram_bytes_per_s
    longer = ram_bytes_per_s / usual_bytes_per_s if waits else 1.0
    return [(nbytes, max(taken_s * longer, nbytes / usual_bytes_per_s)) for nbytes, taken_s in points]


def _steady(fits: Sequence[Fit]) -> Fit:
    return steady(fits[0], fits[-1])


def _mean_of_swings(taken: list[float]) -> float:
    """The mean, but for what took more than three times the median. Few rows wait for the RAM, and a pass waits for it
    where it is slow too: without the slowest fifth, calls of one row came out 1.08 times as fast as the same calls one
    after the other in a pass (docs/LOG.md)."""
    most = _OUTLIER * statistics.median(taken)
    return statistics.fmean(taken_s for taken_s in taken if taken_s <= most)


def _typical(taken: list[float]) -> float:
    """The mean without the slowest fifth, or the slowest one of a few: when another process holds a core for a while,
    all threads wait for it."""
    slow = max(len(taken) // 5, int(len(taken) > 2))
    kept = sorted(taken)[: len(taken) - slow]
    return sum(kept) / len(kept)


def probe_plan(weights: Format, kv: Format, memory_bytes: int, mostly_kv: bool) -> Plan:
    """A plan of as many layers as `memory_bytes` hold, all at home in RAM. They have the widths to time products of
    weights, or with `mostly_kv` attention."""
    width = _KV_WIDTH if mostly_kv else _INTEGER_WIDTH if weights.is_quantised else _WIDTH
    one_layer = _plan(width, 1, weights, kv)
    layer_bytes = sum(one_layer.unit_bytes(unit) for unit in one_layer.units if unit.part.startswith("0."))
    layer_bytes = layer_bytes + _kv_bytes(one_layer) if mostly_kv else layer_bytes
    layers = max(1, min(_MOST_KV_LAYERS if mostly_kv else _MOST_LAYERS, memory_bytes // layer_bytes))
    return _plan(width, layers, weights, kv)


def _plan(width: int, layers: int, weights: Format, kv: Format) -> Plan:
    kv_heads, head_dim = 8, HEAD_DIM
    heads = 4 * kv_heads if width == _KV_WIDTH else width // head_dim
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=Rope(1e4, head_dim))
    layer = Layer(attention, FfnSpec(width if width == _KV_WIDTH else _NEURONS, "silu", True))
    spec = ModelSpec(
        "llama", "float32", _VOCAB, width, width, CONTEXT, (layer,) * layers, NormSpec("rms", 1e-5), True, True
    )
    whole = resident_plan(
        spec, weights, kv=kv, context=CONTEXT, rows=_MANY_ROWS[-1], logits_rows=_LOGITS_ROWS, page_tokens=256
    )
    units: list[Unit] = []
    for unit in whole.units:  # each is cut into an eighth, a quarter and the rest
        n = unit.hi
        edges = [0, n // 8, n // 8 + n // 4, n] if n >= 8 else [0, n]
        units += [replace(unit, lo=lo, hi=hi) for lo, hi in pairwise(edges)]
    return with_arenas(replace(whole, units=tuple(units)))


def _kv_bytes(plan: Plan) -> int:
    return sum(arena.bytes for arena in plan.arenas if arena.name == f"{HOST}.kv")


def some_numbers() -> NDArray[np.uint8]:
    """A MiB of numbers, uint8 [2**20]: around 1 in 16-bit formats (and as scales of integers), around 0.01 in float32.
    Zeros would flatter a processor that skips work on them."""
    some = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
    some[1::2] = 0x3C
    return some


def _fill(plan: Plan, arenas: Arenas) -> None:
    numbers = some_numbers()
    for arena in plan.arenas:
        if arena.name in (f"{HOST}.kv", f"{HOST}.weights"):
            view = arenas.whole(arena.name)
            for lo in range(0, len(view), MIB):
                piece = view[lo : lo + MIB]
                piece[:] = numbers[: len(piece)]
