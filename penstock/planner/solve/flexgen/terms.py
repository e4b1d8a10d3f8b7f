"""Writes the lines of FlexGen's linear program: the seconds of every lane in prefill and decode, the bytes of every
tier, as functions of a policy's shares.

FlexGen's slides do not give these terms, so they are learned from the lowering. A layer is lowered with everything at
home. Then it is lowered with its weights in each other tier, and with its KV in each other tier. `Cost` says how long
the tasks take on each lane. The differences are the coefficients: the seconds that it costs to have all weights, or all
KV, in that tier. What a pass does once (ONCE: loads, lifts, and the tasks that wait for them) is kept apart from what
each of its batches does (BATCH).

Three terms are no lines over the shares, and are added to them:
- units that are not full
- the start of a pass, because KV is not loaded before the pass that needs it
- the turns of two windows

The prompts of a block take several passes. A token of all its sequences takes one pass. Without a device, the tier that
is called the device here is RAM, with the CPU, and nothing crosses a link.

Bytes are those of `graph/arenas.Layout`. Bytes that do not depend on the shares are read off two plans: scratch,
activations, norms and vocabulary off a plan with everything at home, windows off one with its KV away. Rings hold what
streams of `ring_layers` layers. Activations stay with the main executor, as the lowering has it, so their shares are
fixed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from penstock.graph import passes
from penstock.graph.arenas import ARENA_ALIGN
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.ops import Copy
from penstock.graph.tasks import Pass
from penstock.planner.solve.flexgen import program as lp
from penstock.planner.solve.flexgen.shape import ATTENDS, NEAR, Shape
from penstock.spec.model import Layer
from penstock.spec.places import CPU, DISK, GPU, HOST

Key = TypeVar("Key")
Tiers = tuple[bool, bool, bool]
_ARENAS = 8  # a tier has so many arenas at most, and each is rounded up to whole huge pages
_ONLY_RAM, _ONLY_DISK = (False, True, False), (False, False, True)
_IN: tuple[lp.Shares, lp.Shares, lp.Shares] = (NEAR, (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_LANES = (lp.READ, lp.WRITE, lp.TO_DEVICE, lp.TO_HOST, lp.WINDOW, GPU.kernels, CPU)


class Mode(NamedTuple):
    """For device memory, RAM and the disk, whether weights may be there, and whether KV may."""

    weights: Tiers
    kv: Tiers

    @property
    def streams(self) -> bool:
        """Whether weights may be outside the main executor's memory."""
        return any(self.weights[1:])


def modes(shape: Shape) -> Iterator[Mode]:
    """The modes to try, of which each is a program of its own. In a mode in which nothing streams there is no ring, and
    in one in which no KV moves there are no windows: so these cost no memory there.

    Where a lane brings weights, it brings KV of all layers or of none. A layer's KV is one large load. It would wait
    behind weights that wait for room, and lanes would not be evenly busy. The shares of weights can make up for it."""
    near, ram, disk, ram_disk = (True, False, False), (True, True, False), (True, False, True), (True, True, True)
    if shape.main == HOST:
        every = [Mode(near, near), Mode(near, disk), Mode(disk, near), Mode(disk, _ONLY_DISK)]
    elif shape.attends == "device":
        every = [Mode(near, near), Mode(near, ram)]
        every += [Mode(weights, kv) for weights in (ram, ram_disk) for kv in (near, _ONLY_RAM)]
    else:
        # If the CPU attends, KV in RAM does not move.
        some, any_tier = ((False, True, False), (False, True, True)) if shape.attends == "cpu" else (ram, ram_disk)
        every = [Mode(near, any_tier), Mode(ram, any_tier), Mode(ram_disk, some), Mode(ram_disk, _ONLY_DISK)]
    for mode in every:
        memory, on_disk = shape.problem.ask.kv_home != "disk", shape.problem.ask.kv_home != "memory"
        kv = (mode.kv[0] and memory, mode.kv[1] and memory, mode.kv[2] and on_disk)
        if any(kv):
            yield mode._replace(kv=kv)


Lines = dict[str, lp.Line]  # lane → seconds
BATCH, ONCE = "batch", "once"  # how often it comes in a pass: for each batch, or once
Often = tuple[str, str]  # (BATCH or ONCE, lane)
Seconds = defaultdict[Often, float]
OftenLines = dict[Often, lp.Line]  # seconds


class Learned(NamedTuple):
    """What is learned of one layer, as lines over its shares. `layer`: its seconds; `ends`: those outside all layers;
    `units`: tier → those of one more unit that comes from there."""

    layer: OftenLines
    ends: OftenLines
    units: dict[int, OftenLines]


class _Stage(NamedTuple):
    """What is learned of all passes of a stage, an average layer.

    lines           lane → seconds, if all units are full
    units           tier → lane → seconds of one more unit a layer that comes from there
    ends_s          seconds that the main executor computes outside all layers, divided by the layers
    """

    lines: Lines
    units: dict[int, Lines]
    ends_s: float


class Terms:
    """Writes the programs of a shape, one for each mode."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layers = shape, shape.problem.layers
        ask, home = shape.problem.ask, shape.home
        prompt = max(1, min(ask.prompt_tokens, home.context - 1))
        position = min(prompt + ask.output_tokens // 2, home.context - 1)
        seqs = range(shape.block)
        prompts = passes.prompts(home, seqs, (prompt,) * shape.block, passes.DECODE)
        token = passes.decode(home, seqs, (position,) * shape.block, passes.DECODE)
        # Purpose → the passes of that stage, and how often each comes.
        self._passes = {"prefill": Counter(map(_alike, prompts)), "decode": Counter([_alike(token)])}
        self._stages: dict[tuple[str, bool], _Stage] = {}
        self._home_bytes = home.tier_bytes()
        self._kinds = Counter(shape.problem.spec.layers)

    def program(self, mode: Mode, near: lp.Shares | None = None) -> lp.PolicyProgram:
        """The program of a mode. `near`: shares of weights near to the solution, for which units that are not full are
        counted. None: half a unit a layer is taken."""
        shape = self.shape
        begun = shape.begun_units(near) if near else {tier: 0.5 * mode.weights[tier] for tier in (1, 2)}
        stages = [self._stage(purpose, mode, begun) for purpose in self._passes]
        (prefill, prefill_ends_s), (decode, decode_ends_s) = stages
        return lp.PolicyProgram(
            layers=self.layers,
            steps=max(0, shape.problem.ask.output_tokens - 1),
            prefill=prefill,
            decode=decode,
            memory=self._memory(mode),
            # The lowering keeps activations with the main executor.
            allowed={"weights": mode.weights, "kv": mode.kv, "acts": (True, False, False)},
            sharing=shape.problem.machine.sharing,
            ring_layers=shape.ring_layers,
            moved_tier=shape.moved_tier,
            batches=shape.batches,
            ends_s=(prefill_ends_s, decode_ends_s),
        )

    def _stage(self, purpose: str, mode: Mode, begun: Mapping[int, float]) -> tuple[Lines, float]:
        """(lane → the seconds of an average layer in all passes of a stage; the seconds that the main executor computes
        outside all layers, divided by the layers). `begun`: tier → units that are not full, a layer."""
        prepared = not mode.streams and not mode.kv[self.shape.moved_tier]
        learned = self._stages.get((purpose, prepared))
        if learned is None:  # a search asks for a stage again in every mode, and twice in each
            learned = self._stages[purpose, prepared] = self._learned_stage(self._passes[purpose], prepared)
        stage = dict(learned.lines)
        for tier, lines in learned.units.items():
            _add(stage, lines, begun[tier])
        self._apart(stage, max(len(p.batches) for p in self._passes[purpose]))
        return stage, learned.ends_s

    def _learned_stage(self, counts: Counter[Pass], prepared: bool) -> _Stage:
        """What is learned of the passes of a stage. `counts`: the passes, and how often each comes."""
        shape, layers = self.shape, self.layers
        main: str = shape.main
        total: Lines = dict.fromkeys(_LANES, lp.Line())
        ends: Lines = {main: lp.Line()}
        units: dict[int, Lines] = defaultdict(dict)
        for p, count in counts.items():
            _add(total, {main: lp.Line(shape.problem.cost.between_passes_s)}, count)
            for batch, batches in Counter(batch._replace(id=0) for batch in p.batches).items():
                often = {BATCH: count * batches, ONCE: count if batch == p.batches[0]._replace(id=0) else 0}
                for layer, alike in self._kinds.items():
                    learned = self._learned(layer, batch, p.purpose, prepared)
                    _add_often(total, learned.layer, often, alike)
                    _add_often(ends, learned.ends, often, alike / layers)
                    for tier, more in learned.units.items():
                        _add_often(units[tier], more, often, alike / layers)
        _add(total, ends)
        lines = {lane: line.times(1 / layers) for lane, line in total.items()}
        return _Stage(lines, dict(units), ends[main].constant / layers)

    def _apart(self, stage: Lines, batches: int) -> None:
        """Adds the start of a pass to a stage whose KV moves. Weights are loaded ahead of the pass that needs them, but
        KV is not. So the main executor waits for the KV of the first batch, in one layer. And the lane that brings KV
        has none to bring in the last layer, nor outside all layers."""
        main, layers = self.shape.main, self.layers
        ends_s = stage[main].constant / layers
        for lane, tier in ((lp.TO_DEVICE, 1), (lp.READ, 2)):
            loads_s = stage[lane].kv[tier]
            if loads_s > 0:
                _add(stage, {main: _of_kv(tier, loads_s / layers / batches), lane: _of_kv(tier, ends_s)})

    def _learned(self, layer: Layer, batch: Batch, purpose: str, prepared: bool) -> Learned:
        """What is learned of a layer, with the turns of the windows added. `prepared`: calls come again, and are
        prepared by then."""
        shape = self.shape
        key = (shape.main, shape.attends, shape.order, layer, batch, purpose, prepared)
        learned = shape.problem.learned(key, lambda: _learn(shape, layer, batch, purpose, prepared))
        alone, mine = 1 / shape.batches, dict(learned.layer)
        turn = {name: line.kv[shape.moved_tier] for (_, name), line in mine.items() if name in _TURN}
        if turn:
            # Two windows take turns, batch by batch. Each is loaded, read and saved before it is loaded again.
            turn_s = (sum(turn.values()) * alone + (1 - alone) * max(turn.values())) / 2
            mine[BATCH, lp.WINDOW] = _of_kv(shape.moved_tier, turn_s)
        if late := mine.pop((BATCH, _LATE), None):
            cpu: Often = (BATCH, CPU)
            _add(mine, {cpu: late}, alone)  # meanwhile other batches are computed
        return learned._replace(layer=mine)

    def _memory(self, mode: Mode) -> dict[str, tuple[lp.Line, float]]:
        """Tier → (peak bytes as a line, bytes that there are)."""
        shape, problem = self.shape, self.shape.problem
        total, kv_total = float(shape.placed_bytes), float(shape.kv_bytes)
        ring = shape.ring_layers * total / self.layers
        slack = float(shape.unit_slack_bytes + ARENA_ALIGN) if mode.streams else 0.0
        window = float(shape.window_bytes) if mode.kv[shape.moved_tier] else 0.0
        fixed = {tier: nbytes + float(_ARENAS * ARENA_ALIGN) for tier, nbytes in self._home_bytes.items()}
        disk = lp.Line(0.0, (0.0, 0.0, total), (0.0, 0.0, kv_total)), float(problem.machine.tier(DISK.tier).bytes)
        if shape.main == HOST:
            constant = fixed[HOST] - total - kv_total + slack + window
            ram = lp.Line(constant, (total, 0.0, ring), (kv_total, 0.0, 0.0)), float(problem.host_bytes)
            return {"disk": disk, "ram": ram}
        there = shape.attends == "device"  # the device attends to all KV, whatever its home
        granule = float(max(part.granule_bytes for part in shape.placed))
        constant = fixed[GPU.executor] - total - there * kv_total + slack + there * window
        device = lp.Line(constant, (total, ring, ring), (kv_total, 0.0, 0.0)), float(problem.device_bytes)
        constant = fixed[HOST] - (not there) * kv_total + slack + granule + (not there) * window
        ram = lp.Line(constant, (0.0, total, ring), (0.0, kv_total, 0.0)), float(problem.host_bytes)
        return {"disk": disk, "device": device, "ram": ram}


_SCORES = ATTENDS[2]
_TURN = (lp.LOADED, lp.HELD, lp.SAVED)
_LATE = "late"  # not a lane: the seconds that the CPU's scores wait for new K and V after q has come


class _Sums(NamedTuple):
    """Sums over a lowered pass of one batch.

    seconds         of all tasks. Calls of the batch are BATCH, moves of weights and tasks beside their calls are ONCE
    moving_s        of these the seconds that moves of weights take for their bytes
    held_s          seconds in which attention needs a window
    q_s             seconds of copies of q
    units           how many units stream
    """

    seconds: Seconds
    moving_s: Seconds
    held_s: float
    q_s: float
    units: int


def _learn(shape: Shape, layer: Layer, batch: Batch, purpose: str, prepared: bool) -> Learned:
    """Learns the lines of a layer. It lowers one layer and two with everything at home, and then one layer with its
    weights, or its KV, in each other tier."""
    home = 1 if shape.attends == "cpu" else 0  # the tier whose KV does not move
    sums = partial(_sums, shape, batch, purpose, prepared)
    near, two = (sums((layer,) * n, NEAR, _IN[home]) for n in (1, 2))
    layer_s = _less(two.seconds, near.seconds)
    learned = Learned(_constants(layer_s), _constants(_less(near.seconds, layer_s)), {})
    for tier in (2,) if shape.main == HOST else (1, 2):
        away = sums((layer,), _IN[tier], _IN[home])
        more_s = _less(away.seconds, near.seconds)
        _add(learned.layer, {key: lp.Line(weights=_in(tier, seconds)) for key, seconds in more_s.items()})
        learned.units[tier] = {
            key: lp.Line((seconds - away.moving_s[key]) / away.units) for key, seconds in more_s.items()
        }
    for tier in {1, 2} - {home} if shape.main == GPU.executor and shape.attends != "device" else {shape.moved_tier}:
        away = sums((layer,), NEAR, _IN[tier])
        kv_s = defaultdict[str, float](float)
        for (_, lane), seconds in _less(away.seconds, near.seconds).items():
            kv_s[lane] += seconds
        loads, saves = (lp.TO_DEVICE, lp.TO_HOST) if tier == 1 else (lp.READ, lp.WRITE)
        apart = {_LATE: max(0.0, kv_s[lp.TO_HOST] - away.q_s)} if shape.attends == _SCORES and batch.continues else {}
        if tier == shape.moved_tier:
            apart |= zip(_TURN, (kv_s[loads], away.held_s, kv_s[saves]), strict=True)
        _add(learned.layer, {(BATCH, name): _of_kv(tier, seconds) for name, seconds in (kv_s | apart).items()})
    return learned


def _sums(
    shape: Shape, batch: Batch, purpose: str, prepared: bool,
    layers: tuple[Layer, ...], weights: lp.Shares, kv: lp.Shares,
) -> _Sums:  # fmt: skip
    """The sums of a pass of this batch through these layers. `weights`, `kv`: the shares of the plan."""
    problem, cost = shape.problem, shape.problem.cost
    few = replace(
        shape, problem=replace(problem, spec=replace(problem.spec, layers=layers)), gpu_batch=len(batch.seqs),
        batches=1, chunk_rows=batch.total_rows,
    )  # fmt: skip
    all_s, moving_s = Seconds(float), Seconds(float)
    scores = (("attend", CPU), ("kv_save", lp.TO_HOST)) if shape.attends == _SCORES else ()
    held_s = merge_s = q_s = 0.0
    plan = few.plan(weights, kv)
    for task in Lowering(plan).step(Pass(purpose, (batch,), None)):
        lane = task.lanes[0]
        task_s, seconds = cost.task_s(lane), cost.seconds(task._replace(like=0 if prepared else -1))
        if task.calls[0].batch is None:
            all_s[ONCE, lane] += seconds
            moving_s[ONCE, lane] += seconds - task_s - cost.call_parts_s(lane, task.calls[0])[0]
            continue
        all_s[ONCE, lane] += task_s
        all_s[BATCH, lane] += seconds - task_s
        for call in task.calls:
            if (call.op, lane) in scores or (shape.attends != _SCORES and call.op in _PROJECTED):
                held_s += sum(cost.call_parts_s(lane, call))
            elif call.op == "merge" and shape.attends == "device":
                merge_s = sum(cost.call_parts_s(lane, call))  # of attention, which ends with the save's task
            elif isinstance(call.operands, Copy) and call.operands.what == "q":
                q_s += sum(cost.call_parts_s(lane, call))
    streams = sum(unit.home != unit.decode and unit.part != "embed" for unit in plan.units)
    return _Sums(all_s, moving_s, held_s + merge_s, q_s, streams)


def _less(seconds: Seconds, others: Seconds) -> Seconds:
    """The differences, of all that is in either."""
    return Seconds(float, {key: seconds[key] - others[key] for key in {*seconds, *others}})


def _constants(seconds: Seconds) -> OftenLines:
    return {key: lp.Line(each) for key, each in seconds.items()}


_PROJECTED = ("qkv", "attend", "out")


def _in(tier: int, seconds: float) -> lp.Shares:
    """Coefficients of three tiers: `seconds` for one, 0 for the others."""
    first, second, third = (seconds * share for share in _IN[tier])
    return first, second, third


def _of_kv(tier: int, seconds: float) -> lp.Line:
    """The line of KV that costs `seconds` if all of it is in one tier."""
    return lp.Line(kv=_in(tier, seconds))


def _add(lines: dict[Key, lp.Line], more: Mapping[Key, lp.Line], times: float = 1.0) -> None:
    """Adds to `lines` the lines `more`, `times` times."""
    for key, line in more.items():
        lines[key] = lines.get(key, lp.Line()).plus(line, times)


def _add_often(lines: Lines, more: OftenLines, often: Mapping[str, int], times: float) -> None:
    """Adds to `lines` the lines `more`, `times` times as often as BATCH and ONCE come."""
    for (when, lane), line in more.items():
        _add(lines, {lane: line}, often[when] * times)


def _alike(p: Pass) -> Pass:
    """A pass that costs as much as `p`, and is equal for all such passes: it does not matter which sequences take part,
    nor which pass follows."""
    batches = (batch._replace(id=0, seqs=tuple(range(len(batch.seqs)))) for batch in p.batches)
    return p._replace(batches=tuple(batches), then=None)
