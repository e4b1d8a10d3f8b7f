"""Plans without a device: as much as fits stays in RAM, and the rest streams from the disk (placements CC and DC).

How many bytes a token reads does not depend on which granules stay. So the same share of every part stays: the disk
then reads evenly while the CPU computes, and a small ring is enough. A tied embedding stays before all other parts. It
is the head too, and if it streamed, the row of each token would have to be read on its own as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.homes import kv_layers, weights_bytes
from penstock.planner.solve import fill
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.problem import Problem, too_little
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import ModelSpec, Routed
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import CPU, DISK, HOST
from penstock.spec.plan import Cache, Plan
from penstock.units import MIB, format_bytes, format_mib_up

MAX_RING_BYTES = 256 * MIB
# Of caches for experts. It holds 3 to 6 % more of what a trained model asks for than "lru" (docs/EXPERTS.md).
POLICY = "lfu"


@dataclass(frozen=True)
class Skeleton:
    """Everything of a plan but which granules stay. `kv_layers`: so many layers keep their KV in memory, the others on
    the disk. `order`: one of `spec.plan.ORDERS`.

    The layers with their KV in memory are the first ones: while they are computed, the first KV of a pass is loaded."""

    problem: Problem
    chunk_rows: int
    kv_layers: int
    order: str = "overlapped"

    def plan(
        self, ring_bytes: int, resident: fill.Resident | None, slots: Sequence[int] | None = None, guesses: int = 0
    ) -> Plan:  # fmt: skip
        """The complete plan. `resident`: the granules of each part that stay; None: all of them, so that nothing
        streams. `slots`: for each layer with experts, the slots of its cache; None: no caches. `guesses`: of each cache
        whose layer comes after another one with a cache."""

        def runs(part: Part) -> tuple[fill.Run, fill.Run]:
            stay = part.granules if resident is None or part.kind in PINNED else resident.get(part.key, 0)
            return (
                (0, stay, HOST, HOST, HOST, part.nbytes),
                (stay, part.granules, DISK.tier, HOST, HOST, min(fill.UNIT_BYTES, ring_bytes // 4)),
            )

        layers, kv_layers = self.problem.layers, self.kv_layers
        routed = {part.layer for part in self.experts}
        return fill.filled(
            self.problem, fill.units(self.problem.parts.values(), runs),
            (fill.Kv(0, kv_layers, HOST, HOST), fill.Kv(kv_layers, layers, DISK.tier, HOST)),
            chunk_rows=self.chunk_rows, rings={HOST: ring_bytes}, order=self.order,
            caches=tuple(
                Cache(part.layer, HOST, n, POLICY, guesses=guesses if part.layer - 1 in routed else 0)
                for part, n in zip(self.experts, slots or (), strict=slots is not None)
            ),
        )  # fmt: skip

    @cached_property
    def experts(self) -> list[Part]:
        """The experts' parts, one for each layer that has experts."""
        return self.problem.of_kind("experts")

    @cached_property
    def streamed(self) -> list[Part]:
        """The parts that may stream."""
        return [part for part in self.problem.parts.values() if part.kind not in PINNED]

    def spread(self, budget: int, cached: bool = False) -> fill.Resident:
        """The granules that stay within `budget` bytes, of every part the same share. `cached`: no experts stay,
        because they have caches. Of an untied embedding none stay: a token reads only one of its granules."""
        resident: fill.Resident = {}
        embed = next(part for part in self.streamed if part.kind == "embed")
        tied = self.problem.spec.tied
        first = tied and embed.nbytes <= budget
        if first:
            resident["embed"] = embed.granules
            budget -= embed.nbytes
        rest = [part for part in self.streamed if part is not embed or (tied and not first)]
        rest = [part for part in rest if part.kind != "experts"] if cached else rest
        return resident | fill.share_out(rest, budget)

    @property
    def may_stay(self) -> int | None:
        """The most bytes of weights that may stay, by the user's limit. None if that is no less than all weights."""
        asked = self.problem.ask.resident_bytes
        return None if asked is None or asked >= self.problem.total_bytes else asked

    def ring_options(self) -> list[int]:
        """Bytes of rings to try, ascending. The first ring holds the largest granule once. The others hold it at least
        twice, so that the disk reads while the CPU computes."""
        least = max(part.least_bytes for part in self.streamed)
        total = sum(part.nbytes for part in self.streamed)
        wanted = {2 * least, total // 16, total // 8, 64 * MIB, 128 * MIB, MAX_RING_BYTES}
        # An arena takes whole huge pages, so a ring that does not fill them wastes memory.
        whole = {max(n // ARENA_ALIGN, 1) * ARENA_ALIGN for n in wanted}
        most = min(MAX_RING_BYTES, total // 2)
        return [least, *sorted(n for n in whole if 2 * least <= n <= most)]

    def streaming(self, ring_bytes: int) -> Plan | None:
        """The plan in which as many granules stay as RAM has room for. None if it does not even fit without any.
        The caller checks that the plan fits."""
        budget = self.problem.spare_bytes(self.plan(ring_bytes, {}), HOST)
        if budget is None:
            return None
        if self.may_stay is not None:
            pinned = self.problem.total_bytes - sum(part.nbytes for part in self.streamed)
            budget = min(budget, max(0, self.may_stay - pinned))
        return self.plan(ring_bytes, self.spread(budget))

    def caching(self, ring_bytes: int, guesses: int = 0) -> Plan | None:
        """The plan with caches for experts. All other weights stay first, because every token reads them. The slots of
        the caches take the memory that is left, and every layer has at least one. None if that does not fit, if there
        are no experts, or if the user limits the weights that stay."""
        budget = self.problem.spare_bytes(self.plan(ring_bytes, {}, [1] * len(self.experts), guesses), HOST)
        if budget is None or not self.experts or self.may_stay is not None:
            return None
        resident = self.spread(budget, cached=True)
        left = budget - self.problem.bytes_of(resident) - ARENA_ALIGN
        return self.plan(ring_bytes, resident, fill.share_slots(self.experts, left), guesses)

    @property
    def guess_options(self) -> list[int]:
        """How many experts a token may be guessed: all that it goes to, or half of them. None where no trace says how
        good guesses are: only simulation can tell whether they gain."""
        trace, active = self.problem.trace, max((each.active for each in self._routed), default=0)
        return sorted({active, max(1, active // 2)}) if trace is not None and any(trace.guesses) else []

    @property
    def _routed(self) -> list[Routed]:
        return [layer.routed for layer in self.problem.spec.layers if layer.routed is not None]


def candidates(problem: Problem, near_ring_bytes: int | None = None) -> Iterator[Candidate]:
    """Plans that fit, small rings first. `near_ring_bytes`: for each way to keep KV and to read prompts, only the plan
    whose ring is nearest to so many bytes.

    KV stays in memory if it fits. At the end of the context a byte of KV saves as much reading as a byte of weights,
    and before that less. But KV on the disk would be written too. If there is no room, a part of it, or all, goes to
    the disk.

    Raises DoesNotFit if no plan fits.
    """
    any_found = False
    for in_memory in _kv_options(problem):
        for chunk_rows in fill.chunk_options(problem.ask):
            skeleton = Skeleton(problem, chunk_rows, in_memory)
            least_ring, *rings = skeleton.ring_options()
            tried = max(1, len(rings))
            if near_ring_bytes is not None:
                rings, tried = sorted(rings, key=lambda ring: abs(ring - near_ring_bytes)), 1
            # In the smallest ring, which holds one granule, nothing overlaps. It is tried only if no other fits.
            fitting = list(islice(_fitting(skeleton, rings), tried)) or list(_fitting(skeleton, [least_ring]))
            yield from chain.from_iterable(fitting)
            any_found |= bool(fitting)
            if fitting and chunk_rows <= fill.CHUNK_ROWS:
                break
        if in_memory == problem.layers and any_found and chunk_rows > fill.MIN_CHUNK_ROWS:
            return
    if any_found:
        return
    for skeleton in _least(problem):
        least = next(_fitting(skeleton, skeleton.ring_options()[:1]), None)
        if least is not None:
            yield from least
            return
    _require_minimum(problem, problem.host_bytes)
    raise AssertionError("the least plan is among the candidates")


def require_minimum(ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int, limit: int) -> None:
    """Raises DoesNotFit if not even the smallest plan fits into `limit_bytes`. It needs no machine's figures, so it can
    be asked before a probe. `process_bytes`: RAM that the process takes beside its arenas."""
    _require_minimum(Problem(ask, spec, weights, replace(_NOT_PROBED, process_bytes=process_bytes)), limit)


_NOT_PROBED = MachineSpec(
    "not probed",
    (Capacity(HOST, 1), Capacity(DISK.tier, 1)),
    tuple(Rate(lane, "*", "*", 1.0, 0.0) for lane in (CPU, DISK.reads)),
    1,
)


def _require_minimum(problem: Problem, limit: int) -> None:
    """Raises DoesNotFit if the smallest plan takes more than `limit` bytes, and says what a shorter context would
    save."""
    minimum, ask = minimum_bytes(problem), problem.ask
    if minimum <= limit:
        return
    half = problem.asking(context=max(ask.prompt_tokens + ask.output_tokens, (ask.context or 1) // 4))
    shorter = minimum_bytes(half)
    hint = f"; with --context {half.ask.context} too, {format_mib_up(shorter)}" if shorter < minimum - 8 * MIB else ""
    raise too_little("host memory", "", HOST, minimum, limit, f"--host-memory {format_mib_up(minimum)}{hint}")


def minimum_bytes(problem: Problem) -> int:
    """The bytes of RAM that the smallest plan takes. In it every matrix streams through the smallest ring. Of a tiny
    model everything stays, which takes less than a ring."""
    least = _least(problem)
    plans = [skeleton.plan(skeleton.ring_options()[0], {}) for skeleton in least]
    if problem.ask.resident_bytes is None:
        plans += [skeleton.plan(0, None) for skeleton in least]
    return min(plan.tier_bytes()[HOST] for plan in plans)


def _kv_options(problem: Problem) -> Iterator[int]:
    """How many layers may keep their KV in memory, the preferred number first."""
    layers, home = problem.layers, problem.ask.kv_home
    if home != "disk":
        yield layers
    if home is None and layers >= 4:
        yield from (layers * part // 4 for part in (3, 2, 1))
    if home != "memory":
        yield 0


def _least(problem: Problem) -> list[Skeleton]:
    """The smallest skeletons: with KV in memory, and with all KV on the disk in a window of one layer."""
    kinds = [(problem.layers, "overlapped")] if problem.ask.kv_home != "disk" else []
    kinds += [(0, "saving")] if problem.ask.kv_home != "memory" else []
    return [Skeleton(problem, fill.MIN_CHUNK_ROWS, *kind) for kind in kinds]


def _fitting(skeleton: Skeleton, rings: list[int]) -> Iterator[list[Candidate]]:
    """Lists of candidates that fit: one with all weights in memory, or, if that does not fit, a list for each ring."""
    problem = skeleton.problem
    if skeleton.may_stay is None:
        whole = skeleton.plan(0, None)
        if problem.fits(whole):
            if skeleton.chunk_rows <= fill.CHUNK_ROWS:  # longer chunks only save reading, and this plan reads nothing
                yield [Candidate("RAM", whole, _reasons(whole, problem.ask))]
            return
    for ring in rings:
        plans = {"RAM and disk": skeleton.streaming(ring), "experts in caches": skeleton.caching(ring)}
        for guesses in skeleton.guess_options:
            plans[f"experts in caches, {guesses} guessed ahead"] = skeleton.caching(ring, guesses)
        fitting = {name: plan for name, plan in plans.items() if plan is not None and problem.fits(plan)}
        if fitting:
            yield [Candidate(name, plan, _reasons(plan, problem.ask)) for name, plan in fitting.items()]


def _reasons(plan: Plan, ask: Ask) -> tuple[str, ...]:
    homes, in_memory = weights_bytes(plan), kv_layers(plan, HOST)
    total_bytes = sum(homes.values())
    layers = len(plan.target.spec.layers)
    kv = f"KV in {plan.kv[0].format.name}: {'asked for' if ask.kv else 'the width of the checkpoint'}"
    if in_memory < layers:
        which = "all layers" if not in_memory else f"{layers - in_memory} of {layers} layers"
        why = "asked for" if ask.kv_home else "it would not fit"
        kv += f"; that of {which} lives on the disk ({why}), and comes into memory a layer ahead"
    if not plan.ring_bytes:
        return (f"all {format_bytes(total_bytes)} of weights stay in memory", kv)
    ring = plan.ring_bytes[HOST]
    if plan.caches:
        guesses = max(cache.guesses for cache in plan.caches)
        ahead = (
            f"{guesses} experts that a token will want are guessed a layer ahead, and loaded if they are missing: that"
            " gains time by what routers said",
        )
        return (
            caches_reason(plan),
            *(ahead if guesses else ()),
            f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads all experts once",
            kv,
        )
    return (
        f"{format_bytes(homes.get(HOST, 0))} of {format_bytes(total_bytes)} of weights stay in memory, spread evenly"
        " over the layers; the rest streams from disk",
        f"a ring of {format_bytes(ring)} in units of at most {format_bytes(min(fill.UNIT_BYTES, ring // 4))}",
        f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads what streams once",
        kv,
    )


def caches_reason(plan: Plan) -> str:
    """A sentence about a plan's caches in RAM."""
    slots = [cache.slots for cache in plan.caches if cache.executor == HOST]
    part = plan.parts[f"{plan.caches[0].layer}.experts"]
    some = f"{min(slots)} to {max(slots)}" if min(slots) < max(slots) else str(slots[0])
    return (
        f"caches for {some} of {part.experts} experts a layer ({format_bytes(sum(slots) * part.least_bytes)}):"
        f" a token loads those that it wants and that are not there, {format_bytes(part.least_bytes)} each"
    )
