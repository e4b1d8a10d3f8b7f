"""The frame that solvers fill, with a device or without: everything of a plan but which granules stay in which memory.

The granules of a part lie in the order of placements GG, CG, CC, DC, DG (two letters, home and executor: `spec/plan`).
So the granules of one executor are one or two runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.cutting import Run, most_together, units
from penstock.planner.reasons import lifted_units
from penstock.planner.shares import Resident
from penstock.planner.sizes import MIN_CHUNK_ROWS
from penstock.planner.solve.fill import filled
from penstock.planner.solve.problem import Problem
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import DISK, GPU, HOST, Executor, Tier, is_disk
from penstock.spec.plan import UNIT_BYTES, Cache, Plan, Predictor, Unit
from penstock.units import MIB, round_up

T = TypeVar("T")
_ATTEMPTS = 5
RING_BYTES = 128 * MIB  # the device's ring, or less on a small device
_HOST_RING_BYTES, _STAGE_BYTES = 64 * MIB, 64 * MIB
_SMALLEST_RING_SHARE = 8  # the device's ring takes at most 1/8 of its memory
# The fixed cost of a lift, as a share of its copying time. 2.5 % was rejected: where a lift costs 60 µs and the link
# does 25 GB/s, units would have 60 MiB. Four of them fill a ring of 240 MiB, which a 6 GB card has better uses for.
FIXED_SHARE = 0.05


@dataclass(frozen=True)
class Skeleton:
    """Everything of a plan but which bytes stay where, in these fields:

    chunk_rows      the most rows of a batch in a prefill pass
    attention_layers  the main executor computes attention in so many first layers, the CPU in the others
    kv_home         the home of KV in these first layers. KV of the others is in RAM, or without a device on the disk
    delegates       in these first layers the device computes the projections, and the CPU attends to KV
    host_ring_bytes the ring of the CPU
    order           one of `spec.plan.ORDERS`
    main            the executor that holds activations: the device, or the CPU if there is none

    The others are of plans with a device:

    lifted          by layer, a share of the FFN granules that are not in device memory. In decode the device computes
                    this share, which crosses the link at each token, and the CPU computes the rest
    prompts         whether the device also computes the CPU's granules where a prompt is read (CG', ScheInfer §IV-B)
    ring_bytes      the ring of the device
    stage_bytes     pinned memory between a disk and the device
    unit_bytes      the most bytes of a block that crosses the link in one unit; 0: `lift_bytes` says
    predictors      as in a Plan
    """

    problem: Problem
    chunk_rows: int
    attention_layers: int
    kv_home: Tier
    host_ring_bytes: int
    order: str = "overlapped"
    main: Executor = GPU.executor
    lifted: tuple[float, ...] = ()
    prompts: bool = False
    ring_bytes: int = 0
    stage_bytes: int = 0
    unit_bytes: int = 0
    predictors: tuple[Predictor, ...] = ()
    delegates: bool = False

    @cached_property
    def has_device(self) -> bool:
        return self.main == GPU.executor

    @property
    def kv_words(self) -> str:
        """Where KV is that is not with the device, and who attends to it then, as words of a plan's name."""
        home = {HOST: ", KV in RAM", DISK.tier: ", KV on the disk"}.get(self.kv_home, "")
        return home + (", scores on the CPU" if self.delegates else "")

    def plan(self, on_device: Resident, in_memory: Resident | None = None, caches: tuple[Cache, ...] = ()) -> Plan:
        """The complete plan. `on_device`: the granules that stay in device memory. `in_memory`: those that stay in RAM;
        None: all others. The rest is at home on the disk. Rings that nothing streams through are left out. `caches`: as
        in a Plan."""
        problem, near, far = self.problem, self.attention_layers, HOST if self.has_device else DISK.tier
        if in_memory is None:
            in_memory = {key: part.granules - on_device.get(key, 0) for key, part in problem.parts.items()}
        # Most layers are alike: they have the same runs, and one of them tells the largest units.
        known: dict[tuple[object, ...], tuple[Run, ...]] = {}
        first: list[Part] = []

        def runs(part: Part) -> tuple[Run, ...]:
            there = on_device.get(part.key, 0)
            memory = min(part.granules, there + in_memory.get(part.key, 0))
            alike = (part.kind, part.rows, part.granule_bytes, self._lifted(part), there, memory)
            if alike not in known:
                known[alike] = self._runs(part, there, memory)
                first.append(part)
            return known[alike]

        cut = units(problem.parts.values(), runs, problem.fired_share(problem.ask.batch))
        rings, stage_bytes = self._rings(units(first, runs))
        return filled(
            problem, cut,
            ((0, near, self.kv_home, HOST if self.delegates else self.main), (near, problem.layers, far, HOST)),
            chunk_rows=self.chunk_rows, rings=rings, stage_bytes=stage_bytes, order=self.order, main=self.main,
            predictors=self.predictors, caches=caches,
        )  # fmt: skip

    def _runs(self, part: Part, there: int, memory: int) -> tuple[Run, ...]:
        """The runs of a part: granules 0..there are at home on the device, there..memory in RAM, the rest on the disk.
        The device computes the share `_lifted` of RAM's granules, the first of them, and of the disk's, the last."""
        loads = min(UNIT_BYTES, self.host_ring_bytes // 4)
        if not self.has_device:
            memory = part.granules if part.kind in PINNED else memory
            return (0, memory, HOST, HOST, HOST, part.nbytes), (memory, part.granules, DISK.tier, HOST, HOST, loads)
        if part.kind in PINNED:  # a router is where its experts are computed
            executor = HOST if part.kind == "router" and not there else GPU.executor
            return ((0, part.granules, executor, executor, executor, part.nbytes),)
        if part.key == self.problem.gathered:
            home = HOST if memory == part.granules else DISK.tier
            return ((0, part.granules, home, GPU.executor, GPU.executor, part.nbytes),)
        lifted, lift_bytes = self._lifted(part), self._lift_bytes(part)
        stages = min(lift_bytes, self.stage_bytes // 2)  # units that cross the stage on their way from the disk
        here, far = (int(n * lifted + 0.5) for n in (memory - there, part.granules - memory))
        prompts, stays = HOST, part.nbytes
        if self.prompts and part.kind == "ffn":
            prompts, stays, loads = GPU.executor, lift_bytes, min(loads, stages)
        return (
            (0, there, GPU.executor, GPU.executor, GPU.executor, part.nbytes),
            (there, there + here, HOST, GPU.executor, GPU.executor, lift_bytes),
            (there + here, memory, HOST, HOST, prompts, stays),
            (memory, part.granules - far, DISK.tier, HOST, prompts, loads),
            (part.granules - far, part.granules, DISK.tier, GPU.executor, GPU.executor, stages),
        )

    def _lifted(self, part: Part) -> float:
        """The share of a part's granules outside device memory that the device computes in decode. Experts there are
        the CPU's."""
        if part.kind == "experts" or not self.has_device:
            return 0.0
        if part.kind in ("ffn", "shared"):
            return self.lifted[part.layer]
        return 1.0 if part.kind != "attn" or part.layer < self.attention_layers else 0.0

    def _lift_bytes(self, part: Part) -> int:
        """The most bytes of a unit that crosses the link."""
        if self.unit_bytes:  # a vocabulary is larger than a block: at most half of the ring, so that two units fit
            return self.unit_bytes if part.kind in ("attn", "ffn") else min(self.unit_bytes, self.ring_bytes // 2)
        return lift_bytes(self.problem, self.ring_bytes)

    def _rings(self, units: list[Unit]) -> tuple[dict[Executor, int], int]:
        """(executor → bytes of its ring, bytes of the stage). Rings and stage that no unit passes are left out, and
        each has room for its largest unit, the stage for two of them. `units`: of each kind of part, those of one."""
        need, stage_bytes = {GPU.executor: 0, HOST: 0}, 0
        if self.delegates:  # the units of a layer's attention stay in the ring together, while the CPU attends
            need[GPU.executor] = most_together(units, self.problem.parts)
        for unit in units:
            granule_bytes = self.problem.parts[unit.part].granule_bytes
            nbytes = (unit.hi - unit.lo) * granule_bytes
            if unit.part == self.problem.gathered:
                continue
            if unit.home == GPU.executor:
                stage_bytes = max(stage_bytes, 2 * granule_bytes, self.stage_bytes)
            for executor in {unit.decode, unit.prefill} - {unit.home}:
                need[executor] = max(need[executor], nbytes)
                if executor == GPU.executor and is_disk(unit.home):
                    stage_bytes = max(stage_bytes, 2 * nbytes, self.stage_bytes)
        wanted = {GPU.executor: self.ring_bytes, HOST: self.host_ring_bytes}
        return {tier: max(wanted[tier], nbytes) for tier, nbytes in need.items() if nbytes}, stage_bytes


def device_skeleton(
    problem: Problem, chunk_rows: int, attention_layers: int, lifted: float,
    kv_home: Tier = GPU.executor, prompts: bool = True,
) -> Skeleton:  # fmt: skip
    """A skeleton with rings and a stage of the usual sizes. The ring is smaller on a small device. Each has room for
    two of the largest granules. Experts come through the host's ring alone. `lifted`: the share of every layer."""
    streaming = [part for part in problem.parts.values() if part.kind not in PINNED]
    largest = max(part.least_bytes for part in streaming if part.kind != "experts")
    expert = max((part.least_bytes for part in streaming if part.kind == "experts"), default=0)

    def whole(nbytes: int, largest: int = largest) -> int:
        return max(nbytes, 2 * largest) // ARENA_ALIGN * ARENA_ALIGN + (ARENA_ALIGN if largest % ARENA_ALIGN else 0)

    ring = whole(min(RING_BYTES, problem.device_bytes // _SMALLEST_RING_SHARE))
    host_ring = max(whole(_HOST_RING_BYTES), whole(0, expert))
    return Skeleton(
        problem, chunk_rows, attention_layers, kv_home, host_ring, lifted=(lifted,) * problem.layers, prompts=prompts,
        ring_bytes=ring, stage_bytes=whole(_STAGE_BYTES),
    )  # fmt: skip


def smallest(problem: Problem) -> Skeleton:
    """The skeleton with the smallest rings and chunks, in which the device computes everything that is not the
    CPU's."""
    tiny = device_skeleton(problem.asking(device_memory_bytes=0), MIN_CHUNK_ROWS, problem.layers, lifted=1.0)
    expert = max((part.least_bytes for part in problem.of_kind("experts")), default=0)
    host_ring = max(tiny.ring_bytes, expert)
    return replace(tiny, problem=problem, host_ring_bytes=host_ring, stage_bytes=tiny.ring_bytes)


def within_device(
    problem: Problem, budget: int | None, choose: Callable[[int], T | None], plan_of: Callable[[T], Plan | None]
) -> tuple[Plan, T] | None:
    """A plan that fits, and the choice that it follows from. The budget of weights in device memory is lowered until
    the plan fits.

    A plan may need more device memory than its budget says: kernels need more scratch for large units that stay than
    for units that stream, and the KV arena is rounded up. Then the excess is taken off the budget.

    choose          a budget in bytes → what stays, in the solver's terms
    plan_of         the plan of that

    None if there is no budget, if either has no answer, if RAM is too small, or if no attempt fits.
    """
    for _ in range(_ATTEMPTS if budget is not None else 0):
        assert budget is not None
        choice = choose(budget)
        plan = None if choice is None else plan_of(choice)
        if choice is None or plan is None:
            return None
        if problem.fits(plan):
            return plan, choice
        over = plan.tier_bytes()[GPU.executor] - problem.device_bytes
        if over <= 0:
            return None
        budget -= round_up(over, ARENA_ALIGN)
    return None


def lift_bytes(problem: Problem, ring_bytes: int) -> int:
    """The most bytes of a unit that is lifted, in whole MiB: its copying takes 1 / FIXED_SHARE times its fixed cost.

    This is computed from the link's line (ScheInfer Eq. 3). PIPO's appendix A finds it by trying. Four such units fit
    into the ring."""
    wanted = problem.cost.bytes_in(_fixed_s(problem) / FIXED_SHARE, GPU.to_device, "lift", "*")
    return min(round_up(max(1, int(wanted)), MIB), ring_bytes // 4)


def lift_reason(problem: Problem, ring_bytes: int) -> str:
    """A sentence that says why units have `lift_bytes`."""
    return lifted_units(lift_bytes(problem, ring_bytes), ring_bytes, _fixed_s(problem), FIXED_SHARE)


def _fixed_s(problem: Problem) -> float:
    """Seconds that a lifted unit costs beside its bytes: to begin its copy on the link, and to launch its product on
    the device."""
    cost = problem.cost
    calls_s = cost.call_s(GPU.to_device, "lift", "*") + cost.call_s(GPU.kernels, "ffn", problem.weights.kind)
    return calls_s + cost.task_s(GPU.to_device) + cost.task_s(GPU.kernels)
