"""Makes a complete plan of a policy's shares, by rounding them to whole granules of weights and whole layers of KV.

Every layer has the same share of its granules in each tier. So each layer takes the seconds of the average layer, which
is what the program counts. KV goes by whole layers. The layers of each tier are spread evenly over the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.cutting import Run, most_together, units
from penstock.planner.programs.policy import Shares
from penstock.planner.programs.whole_layers import spread_layers
from penstock.planner.shares import split_granules
from penstock.planner.sizes import MIN_CHUNK_ROWS, prompt_and_half_way
from penstock.planner.solve.fill import filled
from penstock.planner.solve.problem import Problem
from penstock.spec.format import PAGE_TOKENS
from penstock.spec.parts import Part
from penstock.spec.places import DISK, GPU, HOST, Executor, Tier, tier_of
from penstock.spec.plan import Plan, Unit
from penstock.units import MIB, round_up

# Who attends to KV that is not at home on the device:
# - "device": the device, to which KV crosses
# - "cpu": the CPU computes attention with its projections
# - "cpu scores": the CPU computes the scores, the device the projections, as in FlexGen
ATTENDS = ("device", "cpu", "cpu scores")
NEAR: Shares = (1.0, 0.0, 0.0)
IN: tuple[Shares, Shares, Shares] = (NEAR, (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))  # all in one tier
_MOST_CHUNK_ROWS, _FEWER_ROWS = 2048, 512
# A layer streams in 16 units, or in fewer units of at least 4 MiB, but in no fewer than 4. Smaller units pay more fixed
# costs. Larger units leave more of the ring unused, and the first one of a pass comes later.
_UNITS_A_LAYER, _LEAST_UNIT_BYTES, _FEWEST_UNITS = 16, 4 * MIB, 4


@dataclass(frozen=True)
class BlockShape:
    """Everything of a plan that the shares do not decide.

    main            the executor that holds activations: the device, or the CPU if there is none
    gpu_batch       sequences of a batch
    batches         batches of a block
    chunk_rows      rows of a batch of prompts
    attends         one of ATTENDS. Without a device it is "device", which then means the main executor
    ring_layers     the ring holds the streaming weights of so many layers
    order           one of `spec.plan.ORDERS`
    """

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
        """Sequences of a block."""
        return self.gpu_batch * self.batches

    @cached_property
    def placed(self) -> tuple[Part, ...]:
        """The parts whose granules the shares place: attention and FFNs. If the CPU computes attention, attention's
        weights stay in RAM. Norms and the vocabulary always stay with the main executor, which reads them in each pass.
        """
        kinds = ("ffn",) if self.attends == "cpu" else ("attn", "ffn")
        return tuple(part for part in self.problem.parts.values() if part.kind in kinds)

    @cached_property
    def placed_bytes(self) -> int:
        """Bytes of the placed parts."""
        return sum(part.nbytes for part in self.placed)

    @cached_property
    def unit_bytes(self) -> int:
        """The most bytes of a unit that streams."""
        a_layer = self.placed_bytes // self.problem.layers
        return max(min(_LEAST_UNIT_BYTES, a_layer // _FEWEST_UNITS), a_layer // _UNITS_A_LAYER)

    def plan(self, weights: Shares, kv: Shares) -> Plan:
        """The complete plan of some shares. Without a device, the first share is in RAM and the second is 0."""
        problem = self.problem
        tiers = [(self.main, HOST, DISK.tier)[i] for i in spread_layers(problem.layers, kv)]
        edges = [0, *(i for i in range(1, len(tiers)) if tiers[i] != tiers[i - 1]), len(tiers)]
        cut = self._units(weights)
        rings, stage_bytes = self._rings(cut)
        return filled(
            problem, cut,
            [(lo, hi, tiers[lo], self._attends(tiers[lo])) for lo, hi in pairwise(edges)],
            chunk_rows=self.chunk_rows, rings=rings, stage_bytes=stage_bytes, order=self.order, main=self.main,
            batch_seqs=self.gpu_batch, batches=self.batches, page=PAGE_TOKENS,
        )  # fmt: skip

    @cached_property
    def home(self) -> Plan:
        """The plan with all weights at home with the main executor. KV is too, unless the CPU attends: then it is in
        RAM, so that the plan has both executors."""
        return self.plan(NEAR, NEAR if self.attends == "device" else IN[1])

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of K and V of a block."""
        layout = Layout(self.home)
        return sum(layout.filled_bytes(arena.name) for arena in self.home.arenas if arena.name.endswith(".kv"))

    @cached_property
    def window_bytes(self) -> tuple[Mapping[Tier, float], ...]:
        """Of plans in which all KV is at home with the executor, in RAM and on the disk: memory → bytes of its
        windows."""
        return {GPU.executor: 0.0, HOST: 0.0}, self._windows(IN[1]), self._windows(IN[2])

    def _windows(self, away: Shares) -> Mapping[Tier, float]:
        # There are two windows at most, as large as the largest layer wants them. Two layers of each kind tell that.
        spec = self.problem.spec
        few = replace(self.problem, spec=replace(spec, layers=2 * tuple(dict.fromkeys(spec.layers))))
        window_bytes: dict[Tier, float] = {GPU.executor: 0.0, HOST: 0.0}
        for slot in Layout(replace(self, problem=few).plan(NEAR, away)).kv.windows:
            window_bytes[tier_of(slot.arena)] += slot.nbytes
        return window_bytes

    @property
    def moved_tier(self) -> int:
        """The nearest tier whose KV comes through windows: RAM (1) if the device attends to all KV, else the disk
        (2)."""
        return 1 if self.main == GPU.executor and self.attends == "device" else 2

    def _attends(self, home: Tier) -> Executor:
        """The executor of attention to KV with this home."""
        return self.main if home == self.main or self.attends == "device" else HOST

    def _units(self, weights: Shares) -> list[Unit]:
        """The units of all parts. `weights`: the shares of the placed parts."""
        problem, main = self.problem, self.main
        placed = split_granules(self.placed, weights)

        def runs(part: Part) -> list[Run]:
            if part.key not in placed:
                executor = HOST if part.kind == "attn" else main  # attention goes with its KV
                home = HOST if part.key == problem.gathered else executor
                return [(0, part.granules, home, executor, executor, part.nbytes)]
            here, there = placed[part.key]
            here = there if main == HOST else here
            return [
                (0, here, main, main, main, part.nbytes),
                (here, there, HOST, main, main, self.unit_bytes),
                (there, part.granules, DISK.tier, main, main, self.unit_bytes),
            ]

        return units(problem.parts.values(), runs, problem.fired_share(self.gpu_batch))

    def _rings(self, units: Sequence[Unit]) -> tuple[dict[Executor, int], int]:
        """({main executor: bytes of its ring}, bytes of the stage before a device's ring). Either holds what passes
        through it of `ring_layers` layers, and two units more."""
        sizes = {part.key: part.granule_bytes for part in self.placed}

        def ring(homes: set[Tier]) -> int:
            passing = [(u.hi - u.lo) * sizes[u.part] for u in units if u.part in sizes and u.home in homes]
            share = int(self.ring_layers * sum(passing) / self.problem.layers)
            return round_up(share + 2 * max(passing), ARENA_ALIGN) if passing else 0

        whole = ring({HOST, DISK.tier} - {self.main})
        if self.attends == "cpu scores" and whole:
            whole = max(whole, round_up(most_together(units, self.problem.parts), ARENA_ALIGN))
        # Weights at home on a device are loaded through the stage: it has room for two of the largest granules.
        others = (part.granule_bytes for part in self.problem.parts.values() if part.kind not in ("attn", "ffn"))
        stage = max(ring({DISK.tier}), 2 * max(*others, *sizes.values())) if self.main == GPU.executor else 0
        return ({self.main: whole} if whole else {}), stage


def chunk_options(problem: Problem, gpu_batch: int) -> list[int]:
    """Rows of a batch of prompts to try, ascending. They are those of whole prompts, unless one prompt has more rows
    than _MOST_CHUNK_ROWS."""
    prompt, _ = prompt_and_half_way(problem.ask, problem.context)
    whole = {min(gpu_batch, max(1, rows // prompt)) * prompt for rows in (_MOST_CHUNK_ROWS, _FEWER_ROWS)}
    return sorted({max(MIN_CHUNK_ROWS, min(rows, _MOST_CHUNK_ROWS)) for rows in whole})
