"""A plan beside a device, but which bytes stay where: what the solvers with a device vary.

Granules of a part lie in the order GG | CG | CC | DC | DG, so what an executor computes is one or two runs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.solve.fill import MIN_CHUNK_ROWS, UNIT_BYTES, Kv, Resident, Run, filled, units
from penstock.planner.solve.problem import Problem, spare_bytes
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import DISK, GPU, HOST, Executor, Tier, is_disk
from penstock.spec.plan import Cache, Plan, Predictor, Unit
from penstock.units import MIB, format_bytes, round_up

RING_BYTES = 128 * MIB  # of a device, where its memory has room for it
_HOST_RING_BYTES, _STAGE_BYTES = 64 * MIB, 64 * MIB
_SMALLEST_RING_SHARE = 8  # of the device's memory, at most so small a part
# Of a lift's copying time, what its fixed cost may be. Half of it would ask for units of 60 MiB where a lift costs
# 60 µs and the link does 25 GB/s: four of them in the ring are what a 6 GB card would rather keep.
FIXED_SHARE = 0.05


@dataclass(frozen=True)
class Split:
    """Who computes what is not at home on the device: `name`. `lifted`: of the FFN granules outside its memory, the
    share that it computes all the same, each token over the link; the CPU computes the others. `attention_layers`: the
    first so many are the device's, with their KV at home in `kv_home`; the others' attention and KV are the CPU's.
    `prompts`: whether the device also computes the CPU's granules where a prompt is read (CG', ScheInfer §IV-B).
    `lifted_by_layer`: instead of `lifted`, where layers differ."""

    name: str
    lifted: float
    attention_layers: int
    kv_home: Tier
    prompts: bool
    lifted_by_layer: tuple[float, ...] = ()


@dataclass(frozen=True)
class DeviceSkeleton:
    """`ring_bytes`: of the device, and of the host; `stage_bytes`: between disk and device. `order`: of `plan.ORDERS`.
    `unit_bytes`: of a block that crosses the link in one unit, at most; 0: by what lifts cost, and the ring.
    `predictors`: a Plan's."""

    problem: Problem
    split: Split
    chunk_rows: int
    ring_bytes: int
    host_ring_bytes: int
    stage_bytes: int
    order: str = "overlapped"
    unit_bytes: int = 0
    predictors: tuple[Predictor, ...] = ()

    def with_split(self, **changes: object) -> DeviceSkeleton:
        """The same with other fields of its split."""
        return replace(self, split=replace(self.split, **changes))  # type: ignore[arg-type]

    def plan(
        self, on_device: Resident, in_memory: Resident | None = None, caches: tuple[Cache, ...] = ()
    ) -> Plan:  # fmt: skip
        """Complete. `on_device`, `in_memory`: granules that stay there, part by part, None: all that are not on the
        device; what is in neither is on the disk. Rings that nothing streams through are left out. `caches`: a
        Plan's."""
        problem, split = self.problem, self.split
        if in_memory is None:
            in_memory = {key: part.granules - on_device.get(key, 0) for key, part in problem.parts.items()}
        known: dict[tuple[object, ...], tuple[Run, ...]] = {}  # layers are alike, and most keep as much

        def runs(part: Part) -> tuple[Run, ...]:
            there = on_device.get(part.key, 0)
            memory = min(part.granules, there + in_memory.get(part.key, 0))
            alike = (part.kind, part.rows, part.granule_bytes, self._lifted(part), there, memory)
            if alike not in known:
                known[alike] = self._runs(part, there, memory)
            return known[alike]

        cut = units(problem.parts.values(), runs)
        rings, stage_bytes = self._rings(cut)
        attention = split.attention_layers
        return filled(
            problem, cut,
            (Kv(0, attention, split.kv_home, GPU.executor), Kv(attention, problem.layers, HOST, HOST)),
            chunk_rows=self.chunk_rows, rings=rings, stage_bytes=stage_bytes, order=self.order, main=GPU.executor,
            predictors=self.predictors, caches=caches,
        )  # fmt: skip

    def _runs(self, part: Part, there: int, memory: int) -> tuple[Run, ...]:
        """The runs of a part whose granules up to `there` are at home on the device, and from there up to `memory` in
        RAM."""
        if part.kind == "router":  # where the experts are computed
            at = GPU.executor if there else HOST
            return ((0, part.granules, at, at, at, part.nbytes),)
        if part.kind in PINNED:
            return ((0, part.granules, GPU.executor, GPU.executor, GPU.executor, part.nbytes),)
        if part.kind == "embed" and not self.problem.spec.tied:  # gathered, row by row
            home = HOST if memory == part.granules else DISK.tier
            return ((0, part.granules, home, GPU.executor, GPU.executor, part.nbytes),)
        lifted, lift_bytes = self._lifted(part), self._lift_bytes(part)
        here, far = (int(n * lifted + 0.5) for n in (memory - there, part.granules - memory))
        prompts = GPU.executor if self.split.prompts and part.kind == "ffn" else HOST
        return (
            (0, there, GPU.executor, GPU.executor, GPU.executor, part.nbytes),
            (there, there + here, HOST, GPU.executor, GPU.executor, lift_bytes),
            (there + here, memory, HOST, HOST, prompts, lift_bytes if prompts == GPU.executor else part.nbytes),
            (memory, part.granules - far, DISK.tier, HOST, prompts, self._load_bytes(part, prompts)),
            (part.granules - far, part.granules, DISK.tier, GPU.executor, GPU.executor, self._stage_unit_bytes(part)),
        )

    def _lifted(self, part: Part) -> float:
        """The share of granules outside its memory that the device computes. Experts there are the CPU's."""
        if part.kind == "experts":
            return 0.0
        if part.kind in ("ffn", "shared"):
            return self.split.lifted_by_layer[part.layer] if self.split.lifted_by_layer else self.split.lifted
        return 1.0 if part.kind != "attn" or part.layer < self.split.attention_layers else 0.0

    def _lift_bytes(self, part: Part) -> int:
        """A vocabulary is larger than the ring of two blocks that it comes through, where these are whole units."""
        if self.unit_bytes:
            return self.unit_bytes if part.kind in ("attn", "ffn") else min(self.unit_bytes, self.ring_bytes // 2)
        return self._usual_lift_bytes

    @cached_property
    def _usual_lift_bytes(self) -> int:
        return lift_bytes(self.problem, self.ring_bytes)

    def _stage_unit_bytes(self, part: Part) -> int:
        return min(self._lift_bytes(part), self.stage_bytes // 2)

    def _load_bytes(self, part: Part, prompts: Executor) -> int:
        loads = min(UNIT_BYTES, self.host_ring_bytes // 4)
        return min(loads, self._stage_unit_bytes(part)) if prompts == GPU.executor else loads

    def _rings(self, units: list[Unit]) -> tuple[dict[Executor, int], int]:
        """(rings that something streams through, the stage), none smaller than its largest unit."""
        gathered = "" if self.problem.spec.tied else "embed"
        granule_bytes = {key: part.granule_bytes for key, part in self.problem.parts.items()}
        # Thousands of units are alike but for the layer.
        kinds = {(granule_bytes[u.part], u.hi - u.lo, u.home, u.decode, u.prefill) for u in units if u.part != gathered}
        need = {GPU.executor: 0, HOST: 0}
        stage_bytes = 0
        for each_bytes, granules, home, *executors in kinds:
            nbytes = granules * each_bytes
            if home == GPU.executor:
                stage_bytes = max(stage_bytes, 2 * each_bytes, self.stage_bytes)
            for executor in {*executors} - {home}:
                need[executor] = max(need[executor], nbytes)
                if executor == GPU.executor and is_disk(home):
                    stage_bytes = max(stage_bytes, 2 * nbytes, self.stage_bytes)
        wanted = {GPU.executor: self.ring_bytes, HOST: self.host_ring_bytes}
        return {tier: max(wanted[tier], nbytes) for tier, nbytes in need.items() if nbytes}, stage_bytes

    def device_budget(self) -> int | None:
        """Bytes of weights that the device's memory has room for; None where the least does not fit."""
        return spare_bytes(self.plan({}, {}), GPU.executor, self.problem.device_bytes)


def device_skeleton(problem: Problem, split: Split, chunk_rows: int) -> DeviceSkeleton:
    """With rings of the usual sizes, smaller on a small device, and none too small for the largest granule twice.
    Experts come through the host's ring alone."""
    streaming = [part for part in problem.parts.values() if part.kind not in PINNED]
    largest = max(part.least_bytes for part in streaming if part.kind != "experts")
    expert = max((part.least_bytes for part in streaming if part.kind == "experts"), default=0)

    def whole(nbytes: int, largest: int = largest) -> int:
        return max(nbytes, 2 * largest) // ARENA_ALIGN * ARENA_ALIGN + (ARENA_ALIGN if largest % ARENA_ALIGN else 0)

    ring, host_ring = whole(min(RING_BYTES, problem.device_bytes // _SMALLEST_RING_SHARE)), whole(_HOST_RING_BYTES)
    host_ring = max(host_ring, whole(0, expert))
    return DeviceSkeleton(problem, split, chunk_rows, ring, host_ring, whole(_STAGE_BYTES))


def smallest(problem: Problem, split: Split) -> DeviceSkeleton:
    """With the smallest rings and chunks."""
    tiny = device_skeleton(problem.asking(device_memory_bytes=0), split, MIN_CHUNK_ROWS)
    expert = max((part.least_bytes for part in problem.of_kind("experts")), default=0)
    host_ring = max(tiny.ring_bytes, expert)
    return replace(tiny, problem=problem, host_ring_bytes=host_ring, stage_bytes=tiny.ring_bytes)


def within_device(
    problem: Problem, budget: int | None, attempts: int, plan_of: Callable[[int], Plan | None]
) -> Plan | None:
    """The plan of as large a budget of weights on the device as fits. Some attempts: kernels need more scratch for
    large units that stay than for those that come, and KV is in whole arenas. None where RAM is what is too small."""
    for _ in range(attempts if budget is not None else 0):
        assert budget is not None
        plan = plan_of(budget)
        if plan is None or problem.fits(plan):
            return plan
        over = plan.tier_bytes()[GPU.executor] - problem.device_bytes
        if over <= 0:
            return None
        budget -= round_up(over, ARENA_ALIGN)
    return None


def all_there(plan: Plan) -> bool:
    """Whether the device holds everything but embedding rows that are looked up."""
    return all(unit.home == GPU.executor or unit.part == "embed" for unit in plan.units)


def lift_bytes(problem: Problem, ring_bytes: int) -> int:
    """The least unit whose copying takes 1 / FIXED_SHARE times its fixed cost, in whole MiB: the link's line (ScheInfer
    Eq. 3) says what PIPO's appendix A finds by trying. Small enough that four fit into the ring."""
    wanted = _fixed_s(problem) / FIXED_SHARE * problem.cost.bytes_per_s(GPU.to_device, "lift", "*")
    return min(round_up(max(1, int(wanted)), MIB), ring_bytes // 4)


def lift_reason(problem: Problem, ring_bytes: int) -> str:
    nbytes = lift_bytes(problem, ring_bytes)
    why = f"at most {FIXED_SHARE:.0%} of its copy"
    if nbytes == ring_bytes // 4:
        why = f"and a ring of {format_bytes(ring_bytes)} should hold four"
    fixed = f"each costs {_fixed_s(problem) * 1e6:.0f} µs beside its bytes"
    return f"lifted in units of at most {format_bytes(nbytes)}: {fixed}, {why}"


def _fixed_s(problem: Problem) -> float:
    """What a unit costs beside its bytes: its copy is begun on the link, its product launched on the device."""
    cost = problem.cost
    calls_s = cost.call_s(GPU.to_device, "lift", "*") + cost.call_s(GPU.kernels, "ffn", problem.weights.kind)
    return calls_s + cost.task_s(GPU.to_device) + cost.task_s(GPU.kernels)
