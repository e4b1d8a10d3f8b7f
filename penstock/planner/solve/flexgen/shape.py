"""From a policy's shares to a complete plan: whole granules, whole layers of KV.

Granules go to the tiers in even shares, layer by layer: each layer streams as much as the next, so that its lanes'
seconds are those of the average layer, which the program counts. KV goes by layers, each tier's spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, floor

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.solve.fill import Kv, Run, even_units, filled, units
from penstock.planner.solve.flexgen.program import Policy, Shares
from penstock.planner.solve.problem import Problem
from penstock.spec.parts import Part
from penstock.spec.places import DISK, GPU, HOST, Executor, Tier
from penstock.spec.plan import Plan, Unit
from penstock.units import MIB, round_up

# Who attends where KV is not at home on the device: the device, to which KV crosses; the CPU, which computes the whole
# block (what the runtime can do); the CPU the scores alone, the projections staying with the device (FlexGen's).
ATTENDS = ("device", "cpu", "cpu scores")
PAGE_TOKENS = 64
NEAR: Shares = (1.0, 0.0, 0.0)
# A layer streams in so many units, at least of _LEAST_UNIT_BYTES: smaller ones pay more fixed costs, larger ones leave
# more of the ring unused and make the first of a pass come later.
_UNITS_A_LAYER, _LEAST_UNIT_BYTES, _FEWEST_UNITS = 16, 4 * MIB, 4


@dataclass(frozen=True)
class Shape:
    """All of a plan that the shares do not decide. `gpu_batch` sequences a batch, `batches` a block; `chunk_rows`: of a
    prompt's batch; `attends`: of ATTENDS, "device" also where there is none (the one executor attends). `ring_layers`:
    how many layers' weights the rings hold."""

    problem: Problem
    main: Executor
    gpu_batch: int
    batches: int
    chunk_rows: int
    attends: str
    ring_layers: float = 2.0
    order: str = "overlapped"

    @property
    def block(self) -> int:
        return self.gpu_batch * self.batches

    @cached_property
    def placed(self) -> tuple[Part, ...]:
        """The parts whose granules the shares place: attention and FFNs. Norms and the vocabulary stay with the main
        executor, who reads them at every step; where the CPU computes attention, its weights stay in RAM."""
        kinds = ("ffn",) if self.attends == "cpu" else ("attn", "ffn")
        return tuple(part for part in self.problem.parts.values() if part.kind in kinds)

    @cached_property
    def placed_bytes(self) -> int:
        return sum(part.nbytes for part in self.placed)

    @cached_property
    def unit_bytes(self) -> int:
        """The largest unit that streams."""
        a_layer = self.placed_bytes // self.problem.layers
        return max(min(_LEAST_UNIT_BYTES, a_layer // _FEWEST_UNITS), a_layer // _UNITS_A_LAYER)

    @cached_property
    def unit_slack_bytes(self) -> int:
        """At most what a ring has beyond its layers: it loses a unit's bytes at its end, and one is being computed."""
        return 2 * max(self.unit_bytes, *(part.granule_bytes for part in self.placed))

    def begun_units(self, weights: Shares) -> dict[int, float]:
        """For each tier but the executor's: how many units a layer has there beyond its share of the units that it
        would have if all of it were there. The last unit of each part is not full."""
        first = {part.key: part for part in self.placed if part.layer == 0}

        def count(part: Part, lo: int, hi: int) -> int:
            return len(even_units(part, lo, hi, self.unit_bytes))

        whole = sum(count(part, 0, part.granules) for part in first.values())
        found = {tier: -weights[tier] * whole for tier in (1, 2)}
        for key, (here, there) in split_granules(tuple(first.values()), weights).items():
            found[1] += count(first[key], here, there)
            found[2] += count(first[key], there, first[key].granules)
        return found

    @property
    def least_stage_bytes(self) -> int:
        """What is at home on a device is loaded through the stage, two granules at least."""
        sizes = [p.granule_bytes for p in self.problem.parts.values() if p.kind not in ("attn", "ffn")]
        return 2 * max(*sizes, *(part.granule_bytes for part in self.placed)) if self.main == GPU.executor else 0

    def plan(self, weights: Shares, kv: Shares) -> Plan:
        """Complete. Without a device the first share is the CPU's own memory: that of the tier `host`."""
        problem, device = self.problem, self.main == GPU.executor
        homes = kv_layers(problem.layers, kv)
        tiers = [(GPU.executor, HOST, DISK.tier)[i] if device else (HOST, HOST, DISK.tier)[i] for i in homes]
        edges = [0, *(i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]), len(tiers)]
        cut = self._units(weights)
        rings, stage_bytes = self._rings(cut)
        return filled(
            problem, cut,
            [Kv(lo, hi, tiers[lo], self._attends(tiers[lo])) for lo, hi in pairwise(edges)],
            chunk_rows=self.chunk_rows, rings=rings, stage_bytes=stage_bytes, order=self.order, main=self.main,
            batch_seqs=self.gpu_batch, batches=self.batches, page=PAGE_TOKENS,
        )  # fmt: skip

    @cached_property
    def home(self) -> Plan:
        """Everything at home, but KV where the CPU attends, if it does at all: then that is an executor too."""
        return self.plan(NEAR, NEAR if self.attends == "device" else (0.0, 1.0, 0.0))

    @cached_property
    def kv_bytes(self) -> int:
        """K and V of a block."""
        return _kv_arenas(self.home)

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of the windows, of a plan whose KV all comes from elsewhere."""
        away: Shares = (0.0, 1.0, 0.0) if self.moved_tier == 1 else (0.0, 0.0, 1.0)
        return sum(slot.nbytes for slot in Layout(self.plan(NEAR, away)).windows)

    @property
    def moved_tier(self) -> int:
        """The tier whose KV comes through windows to be attended to."""
        return 1 if self.main == GPU.executor and self.attends == "device" else 2

    def rounded(self, policy: Policy) -> Plan:
        return self.plan(policy.weights, policy.kv)

    def shares_of(self, plan: Plan) -> Policy:
        """What a plan made of: by its units' bytes and its layers' KV."""
        weights, kv = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        tiers = {self.main: 0, DISK.tier: 2} if self.main == HOST else {self.main: 0, HOST: 1, DISK.tier: 2}
        sizes = {part.key: part.granule_bytes for part in self.placed}
        for unit in plan.units:
            weights[tiers[unit.home]] += (unit.hi - unit.lo) * sizes.get(unit.part, 0) / self.placed_bytes
        for home in plan.kv:
            kv[tiers[home.home]] += (home.layers[1] - home.layers[0]) / self.problem.layers
        return Policy((weights[0], weights[1], weights[2]), (kv[0], kv[1], kv[2]), (1.0, 0.0, 0.0))

    def _attends(self, home: Tier) -> Executor:
        return self.main if home == self.main or self.attends == "device" else HOST

    def _units(self, weights: Shares) -> list[Unit]:
        problem, main = self.problem, self.main
        placed = split_granules(self.placed, weights)

        def runs(part: Part) -> list[Run]:
            if part.key not in placed:
                at = HOST if part.kind == "attn" else main  # with its KV; no other part is the CPU's
                home = HOST if part.key == "embed" and not problem.spec.tied else at
                return [(0, part.granules, home, at, at, part.nbytes)]
            here, there = placed[part.key]
            here = there if main == HOST else here
            cuts = ((0, here, main, part.nbytes), (here, there, HOST, self.unit_bytes))
            far = (there, part.granules, DISK.tier, self.unit_bytes)
            return [(lo, hi, home, main, main, unit_bytes) for lo, hi, home, unit_bytes in (*cuts, far)]

        return units(problem.parts.values(), runs)

    def _rings(self, units: Sequence[Unit]) -> tuple[dict[Executor, int], int]:
        """The main executor's ring, and the stage before a device's: so many layers' share of what passes through, and
        two units more."""
        sizes = {part.key: part.granule_bytes for part in self.placed}

        def ring(homes: set[Tier]) -> int:
            passing = [(u.hi - u.lo) * sizes[u.part] for u in units if u.part in sizes and u.home in homes]
            share = int(self.ring_layers * sum(passing) / self.problem.layers)
            return round_up(share + 2 * max(passing), ARENA_ALIGN) if passing else 0

        whole = ring({HOST, DISK.tier} - {self.main})
        stage = max(ring({DISK.tier}), self.least_stage_bytes) if self.main == GPU.executor else 0
        return ({self.main: whole} if whole else {}), stage


def _kv_arenas(plan: Plan) -> int:
    layout = Layout(plan)
    return sum(layout.filled_bytes(arena.name) for arena in plan.arenas if arena.name.endswith(".kv"))


def split_granules(placed: Sequence[Part], shares: Shares) -> dict[str, tuple[int, int]]:
    """Part → (end of its granules at home with the executor, end of those in RAM); the others are on the disk. Of all
    layers up to any one, the faster tiers never hold more than their share, nor less by more than a granule or two. Of
    a layer the FFN's granules, which are finer, leave first."""
    found: dict[str, tuple[int, int]] = {}
    total = away = disk = 0
    for layer in sorted({part.layer for part in placed}):
        those = sorted((part for part in placed if part.layer == layer), key=lambda part: part.kind != "ffn")
        total += sum(part.nbytes for part in those)
        for part in those:
            owed, far = ((share * total - given) / part.granule_bytes - 1e-6
                         for share, given in ((1 - shares[0], away), (shares[2], disk)))  # fmt: skip
            leaves = max(0, min(part.granules, ceil(owed)))
            far = max(0, min(leaves, ceil(far))) if shares[1] > 0 else leaves
            away, disk = away + leaves * part.granule_bytes, disk + far * part.granule_bytes
            found[part.key] = (part.granules - leaves, part.granules - far)
    return found


def whole_layers(layers: int, shares: Shares, moved: int) -> list[Shares]:
    """KV shares of whole layers around `shares`. `moved`: the tier whose KV comes through windows. Even numbers of such
    layers, or all: there are two windows, and of an odd number the last layer and the first would share one, so that
    the first load of a pass waits for the last save of the one before."""

    def around(share: float, step: int) -> set[int]:
        return {floor(share * layers / step + 1e-6) * step, ceil(share * layers / step - 1e-6) * step}

    found = set()
    for those in around(shares[moved], 2) | ({layers} if shares[moved] > 1 - 1e-9 else set()):
        other = 1 if moved == 2 else 2
        for beside in around(shares[other], 1) if shares[other] > 0 else {0}:
            counts = [0, 0, 0]
            counts[moved], counts[other], counts[0] = those, beside, layers - those - beside
            if shares[0] == 0 and counts[0] and shares[other] > 0:
                counts[0], counts[other] = 0, layers - those
            if min(counts) >= 0:
                found.add((counts[0] / layers, counts[1] / layers, counts[2] / layers))
    return sorted(found)


def kv_layers(layers: int, shares: Shares) -> list[int]:
    """The tier of each layer's KV, an index of `shares`, so that tiers are spread evenly: from the last layer on, the
    tier that is furthest behind its share. So the first layers have theirs at home, and a pass begins before the first
    load is done."""
    counts, found = [0, 0, 0], []
    whole = [int(share * layers + 1e-6) for share in shares]
    slowest = max(tier for tier in range(3) if shares[tier] > 0)  # takes what rounding left
    whole[slowest] += layers - sum(whole)
    for i in range(layers):
        behind = [whole[t] * (i + 1) / layers - counts[t] if counts[t] < whole[t] else -1.0 for t in range(3)]
        tier = max(range(3), key=lambda t: (behind[t], t))
        counts[tier] += 1
        found.append(tier)
    return found[::-1]
