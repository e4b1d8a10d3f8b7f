"""The policies of `bench.throughput`: what the search compared, and what it would have been without a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.errors import DoesNotFit
from penstock.graph.arenas import Layout
from penstock.planner.reads import with_reads
from penstock.planner.solve import Solved, settle_context, solve
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan
from penstock.store.packed import Packed

ROWS = (12, 8, 6, 4, 3, 2, 1)  # sequences of a batch that is answered alone, of which each divides 24


@dataclass(frozen=True)
class Policy:
    """`ask`: the whole of it, of which the plan answers as many prompts at once as it holds."""

    name: str
    ask: Ask
    plan: Plan


class Policies:
    """Those of one ask on one machine."""

    def __init__(self, packed: Packed, ask: Ask, machine: MachineSpec) -> None:
        self._packed, self.ask, self._machine = packed, settle_context(ask, packed.spec), machine

    def chosen(self) -> Policy:
        return Policy("chosen", self.ask, self._solved(self.ask).plan)

    def compared(self) -> list[Policy]:
        """All others that the search compares, with their reads set as those of the chosen one are."""
        found = self._solved(self.ask, every=True).compared[1:]
        runnable = [each.candidate for each in found if not each.candidate.cannot_run and not each.candidate.lossy]
        names = [f"{c.strategy}, ring {sum(c.plan.ring_bytes.values()) >> 20} MiB" for c in runnable]
        return [self._policy(name, each.plan) for name, each in zip(names, runnable, strict=True)]

    def others(self) -> Iterator[Policy]:
        """Smaller blocks, KV in 16 bits, and FlexGen's Table 4 as far as this machine has it."""
        for batch in (12, 6):
            yield Policy(f"{batch} at once", self.ask, self._solved(replace(self.ask, batch=batch)).plan)
        yield Policy("KV in float16", self.ask, self._solved(replace(self.ask, kv="float16")).plan)
        yield from self.ablated()

    def ablated(self) -> Iterator[Policy]:
        """FlexGen's Table 4: without its search (everything streams, KV in 16 bits lies on the disk), and without
        overlap (loads are begun for the block at hand alone, and nothing stays in KV pages that nobody has, which takes
        the overlapped order)."""
        unsearched = replace(self.ask, kv="float16", kv_home="disk", resident_bytes=0)
        yield Policy("without search", self.ask, self._solved(unsearched).plan)
        yield self._policy("without overlap", replace(self.chosen().plan, order="saving", guests=False))

    def row_by_row(self, most: int) -> list[Policy]:
        """Batch after batch, each answered before the next begins, with KV of 16 bits in RAM: of all sizes that fit
        the `most` that are predicted to decode fastest."""
        found: list[tuple[float, Policy]] = []
        for batch in ROWS:
            ask = replace(self.ask, batch=batch, kv="float16", kv_home="memory")
            try:
                solved = self._solved(ask)
            except DoesNotFit:
                continue
            plan = solved.plan
            rate = solved.prediction.decode_tokens_per_s
            found.append((rate, Policy(f"row by row, {batch} at once, KV in float16 in RAM", self.ask, plan)))
        return [policy for _, policy in sorted(found, key=lambda each: -each[0])[:most]]

    def _solved(self, ask: Ask, every: bool = False) -> Solved:
        packed = self._packed
        return solve(ask, packed.spec, packed.weights, self._machine, packed.part_disks, every=every)

    def _policy(self, name: str, plan: Plan) -> Policy:
        plan = replace(plan, arenas=())
        plan = replace(plan, arenas=Layout(plan).arenas())
        return Policy(name, self.ask, with_reads(plan, self._machine)[0])


def distinct(policies: Sequence[Policy]) -> list[Policy]:
    """Each plan once, the first of those that are the same."""
    seen: list[Plan] = []
    kept = []
    for policy in policies:
        if policy.plan not in seen:
            seen.append(policy.plan)
            kept.append(policy)
    return kept
