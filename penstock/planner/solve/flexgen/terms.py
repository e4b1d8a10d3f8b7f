"""Writes the lines of FlexGen's linear program: the seconds of every lane in prefill and decode, the bytes of every
tier, as functions of a policy's shares.

FlexGen's slides do not give these terms, so they are learned from the lowering. A layer is lowered with everything at
home. Then it is lowered with its weights in each other tier, and with its KV in each other tier. `Cost` says how long
the tasks take on each lane. The differences are the coefficients: the seconds that it costs to have all weights, or all
KV, in that tier. What a pass does once (ONCE: loads, lifts, and the tasks that wait for them) is kept apart from what
each of its batches does (BATCH).

The prompts of a block take several passes. A token of all its sequences takes one pass. Without a device, the tier that
is called the device here is RAM, with the CPU, and nothing crosses a link.

Bytes are those of `graph/arenas.Layout`. Bytes that do not depend on the shares are read off two plans: scratch,
activations, norms and vocabulary off a plan with everything at home, windows off one with its KV away. Rings hold what
streams of `ring_layers` layers. Activations stay with the main executor, as the lowering has it, so their shares are
fixed.

Three things are no lines over the shares, and left to `simulate`: units that are not full, lanes that slow each other
or wait for each other, and the turns of the two windows that KV moves through.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

from penstock.graph.arenas import ARENA_ALIGN
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.predict import answer_passes
from penstock.planner.programs import policy as lp
from penstock.planner.solve.flexgen.shape import IN, NEAR, BlockShape
from penstock.spec.model import Layer
from penstock.spec.places import CPU, DISK, GPU, HOST

Tiers = tuple[bool, bool, bool]
_ARENAS = 8  # a tier has so many arenas at most, and each is rounded up to whole huge pages
_ONLY_RAM, _ONLY_DISK = (False, True, False), (False, False, True)


class Mode(NamedTuple):
    """For device memory, RAM and the disk, whether weights may be there, and whether KV may."""

    weights: Tiers
    kv: Tiers

    @property
    def streams(self) -> bool:
        """Whether weights may be outside the main executor's memory."""
        return any(self.weights[1:])


def modes(shape: BlockShape) -> Iterator[Mode]:
    """The modes to try, of which each is a program of its own. In a mode in which nothing streams there is no ring, and
    in one in which no KV moves there are no windows: so these cost no memory there.

    Where a lane brings weights, it brings KV of all layers or of none. A layer's KV is one large load. It would wait
    behind weights that wait for room, and lanes would not be evenly busy. The shares of weights can make up for it."""
    near, ram, disk, ram_disk = (True, False, False), (True, True, False), (True, False, True), (True, True, True)
    if shape.main == HOST:
        every = [Mode(near, near), Mode(near, disk), Mode(disk, near), Mode(disk, _ONLY_DISK)]
    elif shape.attends == "device":
        every = [Mode(near, near), Mode(near, ram), Mode(near, _ONLY_DISK)]
        every += [Mode(weights, kv) for weights in (ram, ram_disk) for kv in (near, _ONLY_RAM, _ONLY_DISK)]
    else:
        # If the CPU attends, KV in RAM does not move.
        some, any_tier = ((False, True, False), (False, True, True)) if shape.attends == "cpu" else (ram, ram_disk)
        every = [Mode(near, any_tier), Mode(ram, any_tier), Mode(ram_disk, some), Mode(ram_disk, _ONLY_DISK)]
    for mode in every:
        memory, on_disk = shape.problem.ask.kv_home != "disk", shape.problem.ask.kv_home != "memory"
        kv = (mode.kv[0] and memory, mode.kv[1] and memory, mode.kv[2] and on_disk)
        if any(kv):
            yield mode._replace(kv=kv)


class Terms:
    """Writes the programs of a shape, one for each mode."""

    def __init__(self, shape: BlockShape) -> None:
        self.shape, self.layers = shape, shape.problem.layers

    def program(self, mode: Mode) -> lp.PolicyProgram:
        """The program of a mode."""
        prefill, decode = self._stages
        return lp.PolicyProgram(
            layers=self.layers,
            steps=max(0, self.shape.problem.ask.output_tokens - 1),
            prefill=prefill,
            decode=decode,
            memory=self._memory(mode),
            # The lowering keeps activations with the main executor.
            allowed={"weights": mode.weights, "kv": mode.kv, "acts": (True, False, False)},
        )

    @cached_property
    def _stages(self) -> tuple[lp.Stage, lp.Stage]:
        """(prefill, decode): the seconds of an average layer in all passes that read prompts, and in a pass half-way
        through the output."""
        prompts, token = answer_passes(self.shape.home, self.shape.problem.ask, range(self.shape.block))
        return self._stage(Counter(map(_alike, prompts))), self._stage(Counter([_alike(token)]))

    def _stage(self, counts: Counter[Pass]) -> lp.Stage:
        """Lane → the seconds of an average layer in some passes. `counts`: the passes, and how often each comes."""
        shape, total = self.shape, defaultdict[str, lp.Line](lp.Line)
        kinds = Counter(shape.problem.spec.layers)
        for p, count in counts.items():
            pause_s = shape.problem.cost.between_passes_s
            total[lp.COMPUTE] = total[lp.COMPUTE].plus(lp.Line(pause_s), count)
            for batch, batches in Counter(batch._replace(id=0) for batch in p.batches).items():
                often = {BATCH: count * batches, ONCE: count if batch == p.batches[0]._replace(id=0) else 0}
                for layer, alike in kinds.items():
                    key = (shape.main, shape.attends, shape.order, layer, batch, p.purpose)
                    learned = shape.problem.learned(key, partial(_learn, shape, *key[3:]))
                    for (when, lane), line in learned.items():
                        total[lane] = total[lane].plus(line, often[when] * alike)
        return {lane: line.times(1 / self.layers) for lane, line in total.items()}

    def _memory(self, mode: Mode) -> dict[str, tuple[lp.Line, float]]:
        """Tier → (peak bytes as a line, bytes that there are)."""
        shape, problem = self.shape, self.shape.problem
        total, kv_total = float(shape.placed_bytes), float(shape.kv_bytes)
        ring = shape.ring_layers * total / self.layers
        granule = float(max(part.granule_bytes for part in shape.placed))
        # A ring has that much beyond its layers: up to one unit is lost at its end, and one is being computed.
        slack = 2 * max(shape.unit_bytes, granule) + ARENA_ALIGN if mode.streams else 0.0
        of_modes = [nbytes for nbytes, may in zip(shape.window_bytes, mode.kv, strict=True) if may]
        windows = {tier: max(nbytes[tier] for nbytes in of_modes) for tier in (GPU.executor, HOST)}
        fixed = {tier: nbytes + float(_ARENAS * ARENA_ALIGN) for tier, nbytes in shape.home.tier_bytes().items()}
        disk = lp.Line(0.0, (0.0, 0.0, total), (0.0, 0.0, kv_total)), float(problem.machine.tier(DISK.tier).bytes)
        if shape.main == HOST:
            constant = fixed[HOST] - total - kv_total + slack + windows[HOST]
            ram = lp.Line(constant, (total, 0.0, ring), (kv_total, 0.0, 0.0)), float(problem.host_bytes)
            return {"disk": disk, "ram": ram}
        there = shape.attends == "device"  # the device attends to all KV, whatever its home
        constant = fixed[GPU.executor] - total - there * kv_total + slack + windows[GPU.executor]
        device = lp.Line(constant, (total, ring, ring), (kv_total, 0.0, 0.0)), float(problem.device_bytes)
        constant = fixed[HOST] - (not there) * kv_total + slack + granule + windows[HOST]
        ram = lp.Line(constant, (0.0, total, ring), (0.0, kv_total, 0.0)), float(problem.host_bytes)
        return {"disk": disk, "device": device, "ram": ram}


BATCH, ONCE = "batch", "once"  # how often it comes in a pass: for each batch, or once
Often = tuple[str, str]  # (BATCH or ONCE, lane)
Seconds = Mapping[Often, float]


def _learn(shape: BlockShape, layer: Layer, batch: Batch, purpose: str) -> dict[Often, lp.Line]:
    """The lines of a layer with its share of what a pass computes outside all layers. One layer and two are lowered
    with everything at home, and then one layer with its weights, or its KV, in each other tier."""
    home = 1 if shape.attends == "cpu" else 0  # the tier whose KV does not move
    device, layers = shape.main == GPU.executor, shape.problem.layers

    def seconds(count: int, weights: lp.Shares = NEAR, kv: lp.Shares = IN[home]) -> Seconds:
        return _seconds(shape, batch, purpose, (layer,) * count, weights, kv)

    near, two = seconds(1), seconds(2)
    lines = defaultdict[Often, lp.Line](lp.Line)
    for key, layer_s in _less(two, near).items():
        lines[key] = lp.Line(layer_s + (near[key] - layer_s) / layers)
    for tier in (1, 2) if device else (2,):
        for key, more_s in _less(seconds(1, weights=IN[tier]), near).items():
            lines[key] = lines[key].plus(lp.Line(weights=IN[tier]).times(more_s))
    for tier in {1, 2} - {home} if device else {2}:
        moved_s = _less(seconds(1, kv=IN[tier]), near)
        for lane in dict.fromkeys(lane for _, lane in moved_s):
            # KV comes for each batch, with the tasks that bring it.
            kv_s = moved_s[BATCH, lane] + moved_s[ONCE, lane]
            lines[BATCH, lane] = lines[BATCH, lane].plus(lp.Line(kv=IN[tier]).times(kv_s))
    return lines


def _seconds(
    shape: BlockShape, batch: Batch, purpose: str, layers: tuple[Layer, ...], weights: lp.Shares, kv: lp.Shares
) -> Seconds:
    """The seconds of a pass of this batch through these layers. Calls of the batch are BATCH, moves of weights, and
    tasks beside their calls, are ONCE. `weights`, `kv`: the shares of the plan."""
    problem, cost = shape.problem, shape.problem.cost
    few = replace(
        shape, problem=replace(problem, spec=replace(problem.spec, layers=layers)), gpu_batch=len(batch.seqs),
        batches=1, chunk_rows=batch.total_rows,
    )  # fmt: skip
    total_s = defaultdict[Often, float](float)
    for task in Lowering(few.plan(weights, kv)).step(Pass(purpose, (batch,), None)):
        seconds = cost.seconds(task)
        of_batch_s = 0.0 if task.calls[0].batch is None else seconds - cost.task_s(task.lanes[0])
        lane = lp.COMPUTE if task.lanes[0] in (GPU.kernels, CPU) else task.lanes[0]
        total_s[BATCH, lane] += of_batch_s
        total_s[ONCE, lane] += seconds - of_batch_s
    return total_s


def _less(seconds: Seconds, others: Seconds) -> defaultdict[Often, float]:
    """The differences, of all that is in either."""
    keys = dict.fromkeys((*seconds, *others))
    return defaultdict(float, {key: seconds.get(key, 0.0) - others.get(key, 0.0) for key in keys})


def _alike(p: Pass) -> Pass:
    """A pass that costs as much as `p`, and is equal for all such passes: it does not matter which sequences take part,
    nor which pass follows."""
    batches = (batch._replace(id=0, seqs=tuple(range(len(batch.seqs)))) for batch in p.batches)
    return p._replace(batches=tuple(batches), then=None)
