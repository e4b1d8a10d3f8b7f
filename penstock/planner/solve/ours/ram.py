"""As much as fits stays in RAM, the rest streams from the disk: placements CC and DC.

The bytes read per token do not depend on which granules stay, so they stay spread evenly: of every
part the same share. Then the disk's work lies evenly under the computing, and a small ring is enough. A tied
embedding stays first of all: it is the head, and a row of it would otherwise be read on its own each step.
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
from penstock.planner.solve.problem import Problem, spare_bytes, too_little
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import ModelSpec
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import CPU, DISK, HOST
from penstock.spec.plan import Cache, Plan
from penstock.units import MIB, format_bytes, format_mib_up

MAX_RING_BYTES = 256 * MIB
POLICY = "lru"  # of caches for experts


@dataclass(frozen=True)
class Skeleton:
    """Everything of a plan but which granules stay. `kv_layers`: the first so many layers keep their KV in memory, the
    others on the disk: so the first load of a pass has their time to come in. `order`: of `spec.plan.ORDERS`."""

    problem: Problem
    chunk_rows: int
    kv_layers: int
    order: str = "overlapped"

    def plan(self, ring_bytes: int, resident: fill.Resident | None, slots: Sequence[int] | None = None) -> Plan:
        """Complete. `resident`: granules that stay, part by part; None: everything does, and nothing streams. `slots`:
        of a cache for each layer with experts, in their order."""

        def runs(part: Part) -> tuple[fill.Run, fill.Run]:
            stay = part.granules if resident is None or part.kind in PINNED else resident.get(part.key, 0)
            return (
                (0, stay, HOST, HOST, HOST, part.nbytes),
                (stay, part.granules, DISK.tier, HOST, HOST, min(fill.UNIT_BYTES, ring_bytes // 4)),
            )

        layers, kv_layers = self.problem.layers, self.kv_layers
        return fill.filled(
            self.problem, fill.units(self.problem.parts.values(), runs),
            (fill.Kv(0, kv_layers, HOST, HOST), fill.Kv(kv_layers, layers, DISK.tier, HOST)),
            chunk_rows=self.chunk_rows, rings={HOST: ring_bytes}, order=self.order,
            caches=tuple(Cache(part.layer, HOST, n, POLICY) for part, n in zip(self.experts, slots or ())),  # noqa: B905
        )  # fmt: skip

    @cached_property
    def experts(self) -> list[Part]:
        return self.problem.of_kind("experts")

    @cached_property
    def streamed(self) -> list[Part]:
        """What may stream."""
        return [part for part in self.problem.parts.values() if part.kind not in PINNED]

    def spread(self, budget: int, cached: bool = False) -> fill.Resident:
        """Granules that stay, of every part the same share, within `budget` bytes. A gathered embedding reads one
        granule a token: it stays only if everything does. `cached`: of experts none do, they have caches."""
        resident: fill.Resident = {}
        embed = next(part for part in self.streamed if part.kind == "embed")
        tied = self.problem.spec.tied
        first = tied and embed.nbytes <= budget
        if first:
            resident["embed"] = embed.granules
            budget -= embed.nbytes
        rest = [part for part in self.streamed if part is not embed or (tied and not first)]
        rest = [part for part in rest if part.kind != "experts"] if cached else rest
        fill.share_out(rest, {part.key: part.granules for part in rest}, budget, resident)
        return resident

    @property
    def may_stay(self) -> int | None:
        """Bytes of weights that the user lets stay; None: all of them."""
        asked = self.problem.ask.resident_bytes
        return None if asked is None or asked >= self.problem.total_bytes else asked

    def ring_options(self) -> list[int]:
        """Rings to try, the smallest first. It holds the largest granule once; twice where possible, so that
        the disk reads while the processor computes."""
        least = max(part.least_bytes for part in self.streamed)
        total = sum(part.nbytes for part in self.streamed)
        wanted = {2 * least, total // 16, total // 8, 64 * MIB, 128 * MIB, MAX_RING_BYTES}
        # An arena is charged in whole huge pages anyway.
        whole = {max(n // ARENA_ALIGN, 1) * ARENA_ALIGN for n in wanted}
        most = min(MAX_RING_BYTES, total // 2)
        return [least, *sorted(n for n in whole if 2 * least <= n <= most)]

    def streaming(self, ring_bytes: int, limit: int) -> Plan | None:
        """Fills what the rest of the plan leaves with granules that stay; None where the rest alone is too big."""
        budget = spare_bytes(self.plan(ring_bytes, {}), HOST, limit)
        if budget is None:
            return None
        if self.may_stay is not None:
            pinned = self.problem.total_bytes - sum(part.nbytes for part in self.streamed)
            budget = min(budget, max(0, self.may_stay - pinned))
        plan = self.plan(ring_bytes, self.spread(budget))
        return plan if plan.tier_bytes()[HOST] <= limit else None

    def caching(self, ring_bytes: int, limit: int) -> Plan | None:
        """Slots for experts in what is left once all else stays, which every token reads; at least one a layer. None
        where the rest alone is too big, or where there are no experts."""
        least = self.plan(ring_bytes, {}, [1] * len(self.experts))
        budget = spare_bytes(least, HOST, limit)
        if budget is None or not self.experts or self.may_stay is not None:
            return None
        resident = self.spread(budget, cached=True)
        left = budget - fill.bytes_of(self.problem.parts, resident) - ARENA_ALIGN
        plan = self.plan(ring_bytes, resident, fill.share_slots(self.experts, left))
        return plan if plan.tier_bytes()[HOST] <= limit else None


def candidates(problem: Problem, near_ring_bytes: int | None = None) -> Iterator[Candidate]:
    """Plans that fit, small rings first. Raises DoesNotFit where none does. `near_ring_bytes`: only with the ring that
    is nearest to it, for each way to keep KV and read prompts.

    KV stays in memory where it can: at the end of the context a byte of it saves as much reading as a byte of weights,
    before that less, and the disk is spared. Where there is no room for it, part of it, or all, goes to the disk.
    """
    limit, any_found = problem.host_bytes, False
    for in_memory in _kv_options(problem):
        for chunk_rows in fill.chunk_options(problem.ask):
            skeleton = Skeleton(problem, chunk_rows, in_memory)
            least_ring, *rings = skeleton.ring_options()
            tried = max(1, len(rings))
            if near_ring_bytes is not None:
                rings, tried = sorted(rings, key=lambda ring: abs(ring - near_ring_bytes)), 1
            # The smallest ring holds one granule, so nothing overlaps: only where no other fits.
            found = list(islice(_fitting(skeleton, rings, limit), tried))
            found = found or list(_fitting(skeleton, [least_ring], limit))
            yield from chain.from_iterable(found)
            any_found |= bool(found)
            if found and chunk_rows <= fill.CHUNK_ROWS:
                break
        if in_memory == problem.layers and any_found and chunk_rows > fill.MIN_CHUNK_ROWS:
            return
    if any_found:
        return
    for skeleton in _least(problem):
        least = list(_fitting(skeleton, skeleton.ring_options()[:1], limit))
        if least:
            yield from chain.from_iterable(least)
            return
    _require_minimum(problem, limit)
    raise AssertionError("the least plan is among the candidates")


def require_minimum(ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int, limit: int) -> None:
    """Raises DoesNotFit where not even the least plan fits. Needs no machine, so it can be asked before a probe."""
    _require_minimum(Problem(ask, spec, weights, replace(_NOT_PROBED, process_bytes=process_bytes)), limit)


_NOT_PROBED = MachineSpec(
    "not probed",
    (Capacity(HOST, 1), Capacity(DISK.tier, 1)),
    tuple(Rate(at, "*", "*", 1.0, 0.0) for at in (CPU, DISK.reads)),
    1,
)


def _require_minimum(problem: Problem, limit: int) -> None:
    minimum, ask = minimum_bytes(problem), problem.ask
    if minimum <= limit:
        return
    half = problem.asking(context=max(ask.prompt_tokens + ask.output_tokens, (ask.context or 1) // 4))
    shorter = minimum_bytes(half)
    hint = f"; with --context {half.ask.context} too, {format_mib_up(shorter)}" if shorter < minimum - 8 * MIB else ""
    raise too_little("host memory", "", HOST, minimum, limit, f"--host-memory {format_mib_up(minimum)}{hint}")


def minimum_bytes(problem: Problem) -> int:
    """The least host memory with which the ask runs: every matrix streams through the smallest ring, or for
    tiny models everything stays."""
    least = _least(problem)
    plans = [skeleton.plan(skeleton.ring_options()[0], {}) for skeleton in least]
    if problem.ask.resident_bytes is None:
        plans += [skeleton.plan(0, None) for skeleton in least]
    return min(plan.tier_bytes()[HOST] for plan in plans)


def _kv_options(problem: Problem) -> Iterator[int]:
    """Layers whose KV stays in memory, by what is preferred."""
    layers, home = problem.layers, problem.ask.kv_home
    if home != "disk":
        yield layers
    if home is None and layers >= 4:
        yield from (layers * part // 4 for part in (3, 2, 1))
    if home != "memory":
        yield 0


def _least(problem: Problem) -> list[Skeleton]:
    """The smallest skeletons: with KV in memory, and with all of it on the disk, a layer at a time."""
    kinds = [(problem.layers, "overlapped")] if problem.ask.kv_home != "disk" else []
    kinds += [(0, "saving")] if problem.ask.kv_home != "memory" else []
    return [Skeleton(problem, fill.MIN_CHUNK_ROWS, *kind) for kind in kinds]


def _fitting(skeleton: Skeleton, rings: list[int], limit: int) -> Iterator[list[Candidate]]:
    """Everything in memory where that fits, else the plans for each ring that fits."""
    if skeleton.may_stay is None:
        whole = skeleton.plan(0, None)
        if whole.tier_bytes()[HOST] <= limit:
            if skeleton.chunk_rows <= fill.CHUNK_ROWS:  # longer ones save reading, of which there is none
                yield [Candidate("RAM", whole, _reasons(whole, skeleton.problem.ask))]
            return
    for ring in rings:
        named = {"RAM and disk": skeleton.streaming(ring, limit), "experts in caches": skeleton.caching(ring, limit)}
        found = [Candidate(name, p, _reasons(p, skeleton.problem.ask)) for name, p in named.items() if p is not None]
        if found:
            yield found


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
        return (
            caches_reason(plan),
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
    slots = [cache.slots for cache in plan.caches]
    part = plan.parts[f"{plan.caches[0].layer}.experts"]
    some = f"{min(slots)} to {max(slots)}" if min(slots) < max(slots) else str(slots[0])
    return (
        f"caches for {some} of {part.experts} experts a layer ({format_bytes(sum(slots) * part.least_bytes)}):"
        f" a token loads those that it wants and that are not there, {format_bytes(part.least_bytes)} each"
    )
