"""What a policy costs, as lines over its shares: seconds of every lane in prefill and decode, bytes of every tier.

FlexGen's slides do not give these terms. They are learned from what penstock does with a plan: a layer is lowered with
everything at home, and then once with its weights, once with its KV, in each other tier; `Cost` says what the tasks
take on each lane. The differences are the lines, the weights' share of a tier times what it costs to have them there.
What a pass does once (loads, lifts, the tasks that wait for them) is told from what each of its batches does. Three
terms are no line's and stand beside them: units that are not full; the start of a pass, since KV is not loaded before
the pass that needs it; and the turns of two windows.

A block's prompts take several passes of b batches, a token one. Without a device, what is called the device here is
the CPU with its RAM, and nothing crosses a link. Two terms are not linear, and the program is solved again with them as
in the solution before (`program`): lanes that share RAM slow each other, and lanes wait for each other where layers
differ in where their KV is.

Bytes are those of `graph/arenas.Layout`: what does not depend on the shares is read off a plan with everything at home
(scratch, activations, norms, vocabulary) and one with its KV away (windows); rings hold so many layers' share of what
streams through them. Activations stay with the executor of norms and merges, as the lowering has it: h is fixed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.graph import passes
from penstock.graph.arenas import ARENA_ALIGN
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.ops import Copy
from penstock.graph.tasks import Pass
from penstock.planner.solve.flexgen import program as lp
from penstock.planner.solve.flexgen.shape import NEAR, Shape
from penstock.spec.format import Format
from penstock.spec.model import Layer, ModelSpec
from penstock.spec.parts import parts
from penstock.spec.places import CPU, DISK, GPU, HOST

Tiers = tuple[bool, bool, bool]
_ARENAS = 8  # a tier's arenas, each rounded up to whole huge pages
_ONLY_RAM, _ONLY_DISK = (False, True, False), (False, False, True)
_IN: tuple[lp.Shares, lp.Shares, lp.Shares] = (NEAR, (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_LANES = (lp.READ, lp.WRITE, lp.TO_DEVICE, lp.TO_HOST, lp.WINDOW, GPU.kernels, CPU)


class Mode(NamedTuple):
    """The tiers that weights and KV may be in: device, host, disk."""

    weights: Tiers
    kv: Tiers

    @property
    def streams(self) -> bool:
        """Whether weights may come from elsewhere."""
        return any(self.weights[1:])


def weight_bytes(spec: ModelSpec, weights: Format) -> int:
    """Bytes of all matrices of the layers: in FlexGen's shape and 16 bits, l · (8·h1² + 4·h1·h2)."""
    layers = (part for part in parts(spec, weights) if part.kind in ("attn", "ffn"))
    return sum(block.nbytes * part.granules for part in layers for block in part.blocks if block.tiled)


def kv_bytes(spec: ModelSpec, fmt: Format, seqs: int, tokens: int) -> int:
    """K and V of so many sequences: in FlexGen's shape and 16 bits, 4 · b · l · h1 · (s + n)."""
    a_token = sum(2 * a.kv_heads * fmt.kv_bytes(a.head_dim) for a in (layer.attention for layer in spec.layers))
    return seqs * tokens * a_token


def modes(shape: Shape) -> Iterator[Mode]:
    """How to place: what is not there costs nothing (no ring without streams, no window without KV that moves). A lane
    that brings weights brings KV of all layers or of none: a layer's KV is one large load, and waits behind weights
    that wait for room, so lanes would not be evenly busy; bytes of weights can make up for the rest."""
    near, ram, disk, ram_disk = (True, False, False), (True, True, False), (True, False, True), (True, True, True)
    if shape.main == HOST:
        found = [Mode(near, near), Mode(near, disk), Mode(disk, near), Mode(disk, _ONLY_DISK)]
    elif shape.attends == "device":
        found = [Mode(near, near), Mode(near, ram)]
        found += [Mode(weights, kv) for weights in (ram, ram_disk) for kv in (near, _ONLY_RAM)]
    else:
        # Where the CPU attends, KV in RAM comes nowhere.
        some, any_tier = ((False, True, False), (False, True, True)) if shape.attends == "cpu" else (ram, ram_disk)
        found = [Mode(near, any_tier), Mode(ram, any_tier), Mode(ram_disk, some), Mode(ram_disk, _ONLY_DISK)]
    for mode in found:
        memory, on_disk = shape.problem.ask.kv_home != "disk", shape.problem.ask.kv_home != "memory"
        kv = (mode.kv[0] and memory, mode.kv[1] and memory, mode.kv[2] and on_disk)
        if any(kv):
            yield mode._replace(kv=kv)


Lines = dict[str, lp.Line]  # by lane


class Learned(NamedTuple):
    """Seconds of one batch and of a pass whatever its batches, as lines over a layer's shares: of the layer, and of
    what is in no layer. `units`: by tier, of a unit more that comes from there."""

    batch: Lines
    once: Lines
    ends_batch: Lines
    ends_once: Lines
    units: dict[int, tuple[Lines, Lines]]


class Terms:
    """The programs of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layers = shape, shape.problem.layers
        ask, home = shape.problem.ask, shape.home
        prompt = max(1, min(ask.prompt_tokens, home.context - 1))
        position = min(prompt + ask.output_tokens // 2, home.context - 1)
        seqs = range(shape.block)
        prompts = passes.prompts(home, seqs, (prompt,) * shape.block, passes.DECODE)
        self._prompts = Counter(map(_alike, prompts))
        self._tokens = Counter([_alike(passes.decode(home, seqs, (position,) * shape.block, passes.DECODE))])
        self._kinds = Counter(shape.problem.spec.layers)

    def program(self, mode: Mode, near: lp.Shares | None = None) -> lp.Program:
        """Its lines, and what bounds them. `near`: shares of weights where the units that are not full are counted;
        they are no lines."""
        shape = self.shape
        begun = shape.begun_units(near) if near else {tier: 0.5 * mode.weights[tier] for tier in (1, 2)}
        memory, capacity = self._memory(mode)
        stages = [self._stage(counts, mode, begun) for counts in (self._prompts, self._tokens)]
        (prefill, prefill_ends_s), (decode, decode_ends_s) = stages
        return lp.Program(
            layers=self.layers,
            steps=max(0, shape.problem.ask.output_tokens - 1),
            block=shape.block,
            prefill=prefill,
            decode=decode,
            memory=memory,
            capacity=capacity,
            # The lowering keeps activations with the executor of norms and merges.
            allowed={"weights": mode.weights, "kv": mode.kv, "acts": (True, False, False)},
            sharing=shape.problem.machine.sharing,
            ring_layers=shape.ring_layers,
            moved_tier=shape.moved_tier,
            batches=shape.batches,
            ends_s=(prefill_ends_s, decode_ends_s),
        )

    def _stage(self, counts: Counter[Pass], mode: Mode, begun: Mapping[int, float]) -> tuple[Lines, float]:
        """A line for each lane: the seconds of an average layer, over all passes of a stage. And the seconds, shared
        among the layers, that the executor of norms computes in no layer."""
        shape, layers = self.shape, self.layers
        prepared = not mode.streams and not mode.kv[shape.moved_tier]
        total: Lines = dict.fromkeys(_LANES, lp.Line())
        ends: Lines = {shape.main: lp.Line()}
        for p, count in counts.items():
            _add(total, {shape.main: lp.Line(shape.problem.cost.between_passes_s)}, count)
            for batch, batches in Counter(batch._replace(id=0) for batch in p.batches).items():
                first = batch == p.batches[0]._replace(id=0)
                for layer, alike in self._kinds.items():
                    found = self._learned(layer, batch, p.purpose, prepared)
                    _add(total, found.batch, count * batches * alike)
                    _add(ends, found.ends_batch, count * batches * alike / layers)
                    for tier, (of_batch, of_pass) in found.units.items():
                        _add(total, of_batch, count * batches * alike * begun[tier])
                        _add(total, of_pass, count * alike * begun[tier] if first else 0.0)
                    if first:
                        _add(total, found.once, count * alike)
                        _add(ends, found.ends_once, count * alike / layers)
        _add(total, ends, 1.0)
        stage = {lane: line.times(1 / layers) for lane, line in total.items()}
        self._apart(stage, max(len(p.batches) for p in counts))
        return stage, ends[shape.main].constant / layers

    def _apart(self, stage: Lines, batches: int) -> None:
        """Where KV comes from elsewhere, a pass does not begin with the one before: weights may be loaded ahead, the
        cache not. So the executor waits for the first batch's, in one layer; and the lane that brings it has nothing to
        do in the last layer and in what comes after."""
        main, layers = self.shape.main, self.layers
        ends_s = stage[main].constant / layers
        for lane, tier in ((lp.TO_DEVICE, 1), (lp.READ, 2)):
            loads_s = stage[lane].kv[tier]
            if loads_s > 0:
                _add(stage, {main: _of_kv(tier, loads_s / layers / batches), lane: _of_kv(tier, ends_s)}, 1.0)

    def _learned(self, layer: Layer, batch: Batch, purpose: str, prepared: bool) -> Learned:
        shape, known = self.shape, self.shape.problem.learned
        key = (shape.main, shape.attends, shape.order, layer, batch, purpose, prepared)
        if key not in known:
            known[key] = _learn(shape, layer, batch, purpose, prepared)
        found: Learned = known[key]
        alone, mine = 1 / shape.batches, dict(found.batch)
        turn = {name: line.kv[shape.moved_tier] for name, line in mine.items() if name in _TURN}
        if turn:
            # Two windows take turns, batch by batch: each is loaded, read and saved before it is loaded again.
            turn_s = (sum(turn.values()) * alone + (1 - alone) * max(turn.values())) / 2
            mine[lp.WINDOW] = _of_kv(shape.moved_tier, turn_s)
        if late := mine.pop(_LATE, None):
            _add(mine, {CPU: late}, alone)  # other batches are computed meanwhile
        return found._replace(batch=mine)

    def _memory(self, mode: Mode) -> tuple[Lines, dict[str, float]]:
        """Peak bytes of the tiers, and what they have."""
        shape, layers = self.shape, self.layers
        device, total = shape.main == GPU.executor, float(shape.placed_bytes)
        at_home = shape.home.tier_bytes()
        kv_total = float(shape.kv_bytes)
        ring = shape.ring_layers * total / layers
        slack = float(shape.unit_slack_bytes + ARENA_ALIGN) if mode.streams else 0.0
        fixed = {tier: nbytes + float(_ARENAS * ARENA_ALIGN) for tier, nbytes in at_home.items()}
        near_kv = 1.0 if shape.attends == "device" else 0.0
        granule = float(max(part.granule_bytes for part in shape.placed))
        window = float(shape.window_bytes) if mode.kv[shape.moved_tier] else 0.0
        problem = shape.problem
        capacity = {"ram": float(problem.host_bytes), "disk": float(problem.machine.tier(DISK.tier).bytes)}
        memory = {"disk": lp.Line(0.0, (0.0, 0.0, total), (0.0, 0.0, kv_total))}
        if not device:
            constant = fixed[HOST] - total - kv_total + slack + window
            memory["ram"] = lp.Line(constant, (total, 0.0, ring), (kv_total, 0.0, 0.0))
            return memory, capacity
        on_device = fixed[GPU.executor] - total - near_kv * kv_total + slack
        in_ram = fixed[HOST] - (1 - near_kv) * kv_total + slack + granule
        attends_there = shape.attends == "device"
        on_device, in_ram = on_device + window * attends_there, in_ram + window * (not attends_there)
        memory["device"] = lp.Line(on_device, (total, ring, ring), (kv_total, 0.0, 0.0))
        memory["ram"] = lp.Line(in_ram, (0.0, total, ring), (0.0, kv_total, 0.0))
        capacity["device"] = float(problem.device_bytes)
        return memory, capacity


_TURN = (lp.LOADED, lp.HELD, lp.SAVED)
_LATE = "late"  # not a lane: what the CPU's scores wait for new K and V longer than for q
Seconds = defaultdict[str, float]  # by lane


class _Sums(NamedTuple):
    """What a lowered pass of one batch takes. `once_s`: moves that come once a pass. `batch_s`: the batch's calls.
    `tasks_s`: tasks beside their calls. `fixed_s`: the moves beside their bytes. `held_s`: attention, while it needs a
    window. `q_s`: copies of q. `units`: how many units stream."""

    once_s: Seconds
    batch_s: Seconds
    tasks_s: Seconds
    fixed_s: Seconds
    held_s: float
    q_s: float
    units: int


def _learn(shape: Shape, layer: Layer, batch: Batch, purpose: str, prepared: bool) -> Learned:
    """By lowering one layer and two with everything at home, and one with its weights, or its KV, elsewhere."""
    home = 1 if shape.attends == "cpu" else 0  # the tier of KV that is attended to where it is
    near, two = (_sums(shape, (layer,) * n, batch, purpose, prepared, NEAR, _IN[home]) for n in (1, 2))
    learned = Learned({}, {}, {}, {}, {})
    for lane in {*two.batch_s, *two.tasks_s}:
        layer_s, tasks_s = two.batch_s[lane] - near.batch_s[lane], two.tasks_s[lane] - near.tasks_s[lane]
        learned.batch[lane], learned.once[lane] = lp.Line(layer_s), lp.Line(tasks_s)
        learned.ends_batch[lane] = lp.Line(near.batch_s[lane] - layer_s)
        learned.ends_once[lane] = lp.Line(near.tasks_s[lane] - tasks_s)
    for tier in (2,) if shape.main == HOST else (1, 2):
        away = _sums(shape, (layer,), batch, purpose, prepared, _IN[tier], _IN[home])
        unit_batch, unit_once = learned.units[tier] = ({}, {})
        for lane in {*away.batch_s, *away.tasks_s, *away.once_s}:
            calls_s, tasks_s = away.batch_s[lane] - near.batch_s[lane], away.tasks_s[lane] - near.tasks_s[lane]
            _add(learned.batch, {lane: lp.Line(weights=_in(tier, calls_s))}, 1.0)
            _add(learned.once, {lane: lp.Line(weights=_in(tier, away.once_s[lane] + tasks_s))}, 1.0)
            unit_batch[lane] = lp.Line(calls_s / away.units)
            unit_once[lane] = lp.Line((away.fixed_s[lane] + tasks_s) / away.units)
    for tier in {1, 2} - {home} if shape.main == GPU.executor and shape.attends != "device" else {shape.moved_tier}:
        away = _sums(shape, (layer,), batch, purpose, prepared, NEAR, _IN[tier])
        more = {
            lane: away.batch_s[lane] - near.batch_s[lane] + away.tasks_s[lane] - near.tasks_s[lane]
            for lane in {*away.batch_s, *away.tasks_s}
        }
        _add(learned.batch, {lane: _of_kv(tier, seconds) for lane, seconds in more.items()}, 1.0)
        if shape.attends == "cpu scores" and batch.continues:
            late_s = max(0.0, more.get(lp.TO_HOST, 0.0) - away.q_s)
            _add(learned.batch, {_LATE: _of_kv(tier, late_s)}, 1.0)
        if tier == shape.moved_tier:
            loads, saves = (lp.TO_DEVICE, lp.TO_HOST) if tier == 1 else (lp.READ, lp.WRITE)
            turn = zip(_TURN, (more.get(loads, 0.0), away.held_s, more.get(saves, 0.0)), strict=True)
            _add(learned.batch, {name: _of_kv(tier, seconds) for name, seconds in turn}, 1.0)
    return learned


def _sums(
    shape: Shape,
    layers: tuple[Layer, ...],
    batch: Batch,
    purpose: str,
    prepared: bool,
    weights: lp.Shares,
    kv: lp.Shares,
) -> _Sums:
    """What a pass of this batch through these layers takes, by lowering it."""
    problem, cost = shape.problem, shape.problem.cost
    few = replace(
        shape, problem=replace(problem, spec=replace(problem.spec, layers=layers)), gpu_batch=len(batch.seqs),
        batches=1, chunk_rows=batch.total_rows,
    )  # fmt: skip
    found = _Sums(Seconds(float), Seconds(float), Seconds(float), Seconds(float), 0.0, 0.0, 0)
    scores = (("attend", CPU), ("kv_save", lp.TO_HOST)) if shape.attends == "cpu scores" else ()
    held_s = merge_s = q_s = 0.0
    plan = few.plan(weights, kv)
    for task in Lowering(plan).step(Pass(purpose, (batch,), None)):
        lane = task.lanes[0]
        task_s, seconds = cost.task_s(lane), cost.seconds(task._replace(like=0 if prepared else -1))
        if task.calls[0].batch is None:
            found.once_s[lane] += seconds
            found.fixed_s[lane] += task_s + cost.call_parts_s(lane, task.calls[0])[0]
            continue
        found.tasks_s[lane] += task_s
        found.batch_s[lane] += seconds - task_s
        for call in task.calls:
            if (call.op, lane) in scores or (shape.attends != "cpu scores" and call.op in _PROJECTED):
                held_s += sum(cost.call_parts_s(lane, call))
            elif call.op == "merge" and shape.attends == "device":
                merge_s = sum(cost.call_parts_s(lane, call))  # of attention, which ends in the save's task
            elif isinstance(call.operands, Copy) and call.operands.what == "q":
                q_s += sum(cost.call_parts_s(lane, call))
    streams = sum(unit.home != unit.decode and unit.part != "embed" for unit in plan.units)
    return found._replace(held_s=held_s + merge_s, q_s=q_s, units=streams)


_PROJECTED = ("qkv", "attend", "out")


def _in(tier: int, seconds: float) -> lp.Shares:
    first, second, third = (seconds * share for share in _IN[tier])
    return first, second, third


def _of_kv(tier: int, seconds: float) -> lp.Line:
    return lp.Line(kv=_in(tier, seconds))


def _add(lines: Lines, more: Mapping[str, lp.Line], times: float) -> None:
    for lane, line in more.items():
        lines[lane] = lines.get(lane, lp.Line()) + line.times(times)


def _alike(p: Pass) -> Pass:
    """A pass that costs the same: sequences do not matter, nor what follows."""
    batches = (batch._replace(id=0, seqs=tuple(range(len(batch.seqs)))) for batch in p.batches)
    return p._replace(batches=tuple(batches), then=None)
