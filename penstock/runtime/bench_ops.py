"""Times every op of a model on the CPU beside its physical bound, for `penstock bench ops`.

Each op runs as in a pass, on the model's shapes. The layers are together larger than a processor's cache, so that
weights and KV come out of memory as they do in a run. An op's bound in seconds is

    max(bytes / RAM's read speed, operations / processor's peak in registers)

with both speeds measured in the same run, the peak by the instructions of the very kernels. A share of the bound near
1 means that nothing is left to win.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.ops import PRODUCTS
from penstock.graph.resident import resident_plan
from penstock.graph.tasks import Pass, Task
from penstock.kernels import cpu
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import NativeBinding, native
from penstock.runtime.ceilings import ceilings
from penstock.runtime.host import Progress
from penstock.spec.format import Format, kinds_name
from penstock.spec.model import ModelSpec
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.store.synth import RandomWeights
from penstock.units import GIB

_LAYERS_BYTES = GIB  # of weights and KV that a pass reads before it reads any of them again
_MOST_LAYERS = 64
_REPEATS = 5


@dataclass(frozen=True)
class OpTime:
    """One op in passes of `rows` rows, of which the last sees `context` positions."""

    op: str
    format: str
    rows: int
    context: int
    seconds: float  # of one call: the median over its calls
    bytes: int  # that one call reads and writes
    flops: int  # of one call
    bound_s: float  # the least that one call can take

    @property
    def share_of_bound(self) -> float:
        return self.bound_s / self.seconds

    def to_json(self) -> dict[str, object]:
        return {
            "op": self.op, "format": self.format, "rows": self.rows, "context": self.context, "seconds": self.seconds,
            "bytes_per_s": self.bytes / self.seconds, "flops_per_s": self.flops / self.seconds,
            "share_of_bound": self.share_of_bound,
        }  # fmt: skip


def bench_ops(
    spec: ModelSpec,
    weights: Format,
    kv: Format,
    rows: Sequence[int],
    context: int,
    threads: int,
    isa: str | None,
    exact: bool,
    on_progress: Progress | None = None,
) -> Iterator[OpTime]:
    """Times every op in passes of each number of `rows`, whose last row sees `context` positions. All layers are like
    the first one of `spec`. `exact`: activations are not rounded to int8. Raises ValueError for an `isa` that this
    processor has not, and StorageFailed where the system refuses memory."""
    plan = _plan(spec, weights, kv, max(rows), context)
    arenas = Arenas(plan)
    try:
        lowering, kernels = Lowering(plan), native(isa, threads, exact)
        _fill(plan, lowering, arenas)
        binding = NativeBinding(plan, arenas, None, kernels)
        integer = cpu.rounds_activations(weights) and not exact
        for number, t in enumerate(rows):
            if on_progress:
                on_progress(f"{t} rows", number, len(rows))
            yield from _measure(binding, lowering, t, context, threads, isa, integer)
    finally:
        arenas.close()


def _plan(spec: ModelSpec, weights: Format, kv: Format, rows: int, context: int) -> Plan:
    layer = spec.layers[0]
    one_layer = resident_plan(replace(spec, layers=(layer,)), weights, kv=kv, rows=rows, context=context)
    layer_bytes = sum(one_layer.unit_bytes(unit) for unit in one_layer.units if unit.part.startswith("0."))
    layer_bytes += 2 * layer.attention.kv_heads * context * kv.kv_bytes(layer.attention.head_dim)
    layers = max(2, min(_MOST_LAYERS, -(-_LAYERS_BYTES // layer_bytes)))
    return resident_plan(replace(spec, layers=(layer,) * layers), weights, kv=kv, rows=rows, context=context)


def _fill(plan: Plan, lowering: Lowering, arenas: Arenas) -> None:
    """Fills the arenas with random weights, keys and values. Zeros would flatter a processor that skips work on
    them."""
    maker = RandomWeights(plan.target.spec, 0)
    for i, slot in lowering.layout.weights.items():
        unit = plan.units[i]
        maker.fill(plan.parts[unit.part], unit.lo, unit.hi, arenas.view(slot))
    rng = np.random.default_rng(0)
    for arena in plan.arenas:
        if arena.name == f"{HOST}.kv":
            # Numbers 0x3c00 … 0x3cff: about 1 in 16-bit formats, and as scales of integers. Small in float32.
            view = arenas.whole(arena.name)
            view[0::2] = rng.integers(0, 256, len(view[0::2]), np.uint8)
            view[1::2] = 0x3C


def _measure(
    binding: NativeBinding,
    lowering: Lowering,
    t: int,
    context: int,
    threads: int,
    isa: str | None,
    integer: bool,
) -> Iterator[OpTime]:
    batch = Batch(0, (0,), (context - t,), (t,), (t - 1,))
    p = Pass("decode" if t == 1 else "prefill", (batch,), None)
    assert t > 1 or p == passes.decode(lowering.plan, (0,), (context - 1,), None)
    binding.begin()
    seconds_by_op: dict[str, list[float]] = {}
    task: Task | None = None
    limits = []
    for repeat in range(1 + _REPEATS):
        limits.append(ceilings(threads, isa=isa))
        (task,) = lowering.step(p)
        for call in task.calls:
            start_s = time.perf_counter()
            binding.call(call)
            if repeat:  # the first pass warms up
                seconds_by_op.setdefault(call.op, []).append(time.perf_counter() - start_s)
    assert task is not None
    ram = statistics.median(c.ram_read_bytes_per_s for c in limits)
    peak = {
        True: statistics.median(c.int8_ops_per_s for c in limits),
        False: statistics.median(c.float32_flops_per_s for c in limits),
    }
    calls = {call.op: call for call in task.calls}
    for op, times in seconds_by_op.items():
        call = calls[op]
        peak_per_s = peak[integer and op in PRODUCTS]
        bound_s = max(call.bytes / ram, call.flops / peak_per_s)
        yield OpTime(op, kinds_name(call.format), t, context, statistics.median(times), call.bytes, call.flops, bound_s)
