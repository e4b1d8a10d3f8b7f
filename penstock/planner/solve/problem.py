"""What a solver is asked: the ask, the model in one format, and the machine, with what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.errors import DoesNotFit
from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.cost import Cost
from penstock.planner.routing import Trace
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, head_key, parts_by_key
from penstock.spec.places import GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes


@dataclass(frozen=True)
class Problem:
    """`ask` has its context settled. `trace`: what routers are known to say."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec
    trace: Trace | None = None

    @property
    def parts(self) -> Mapping[str, Part]:
        return parts_by_key(self.spec, self.weights)

    @property
    def layers(self) -> int:
        return len(self.spec.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def head(self) -> Part:
        """The part of the head: of a tied model the embedding."""
        return self.parts[head_key(self.spec)]

    def of_kind(self, kind: str) -> list[Part]:
        return [part for part in self.parts.values() if part.kind == kind]

    @property
    def kv(self) -> Format:
        return kv_format(self.ask, self.spec)

    @cached_property
    def cost(self) -> Cost:
        return Cost(self.machine)

    @cached_property
    def learned(self) -> dict[Any, Any]:
        """What solvers have learned from lowered plans of a few layers, by whatever it depends on."""
        return {}

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that may be taken: what is there, or less where the user says so; 0 without one."""
        there = next((tier.bytes for tier in self.machine.tiers if tier.name == GPU.executor), 0)
        asked = self.ask.device_memory_bytes
        return there if asked is None else min(there, asked)

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM that may be taken: what the user says, else the machine's figure, which is what is free, with a
        margin."""
        asked = self.ask.host_memory_bytes
        return self.machine.tier(HOST).bytes if asked is None else asked

    @property
    def has_device(self) -> bool:
        """Whether there is one, and the ask allows it any memory."""
        return any(tier.name == GPU.executor for tier in self.machine.tiers) and self.ask.device_memory_bytes != 0

    @property
    def device_experts(self) -> bool:
        """Whether the device has kernels for routers and experts: those of experts have a rate of their own."""
        return any(rate.lane == GPU.kernels and rate.op == "experts" for rate in self.machine.rates)

    def fits(self, plan: Plan) -> bool:
        """Whether the plan stays within both memories."""
        used = plan.tier_bytes()
        return used.get(GPU.executor, 0) <= self.device_bytes and used[HOST] <= self.host_bytes

    def asking(self, **changes: Any) -> Problem:
        """The same with other fields of the ask."""
        return replace(self, ask=replace(self.ask, **changes))


def too_little(what: str, where: str, tier: Tier, need: int, have: int, hint: str) -> DoesNotFit:
    """The refusal of a limit. `where`: beside what it is too little; `hint`: the options that would do."""
    return DoesNotFit(
        f"{what} of {format_bytes(have)} is too little{where}: this model needs at least {format_bytes(need)} ({hint})",
        tier=tier, need_bytes=need, have_bytes=have, minimum_bytes=need,
    )  # fmt: skip


def kv_format(ask: Ask, spec: ModelSpec) -> Format:
    """float32 for a float32 model; otherwise float16, which keeps 8 times finer values than bfloat16 in
    the same bytes."""
    if ask.kv is not None:
        return parse_format(ask.kv)
    return Format("float32" if spec.dtype == "float32" else "float16")


def spare_bytes(plan: Plan, tier: Tier, limit: int) -> int | None:
    """What a tier's limit leaves for more weights that stay, with what the last huge page of their arena has left.
    None where the plan is too large already."""
    spare = limit - plan.tier_bytes().get(tier, 0)
    if spare < 0:
        return None
    arena = next((a for a in plan.arenas if a.name == f"{tier}.weights"), None)
    rounding = arena.bytes - Layout(plan).filled_bytes(arena.name) if arena else 0
    return rounding + spare // ARENA_ALIGN * ARENA_ALIGN


def most(count: int, used: Callable[[int], int], limit: int) -> int:
    """The largest number up to `count` whose bytes are within `limit`, by as few questions as may be; 0 where none is.
    `used`: rises, nearly evenly: what huge pages and scratch add is little."""
    if used(count) <= limit:
        return count
    lo, hi, at_lo, at_hi = 0, count, used(0), used(count)
    while hi - lo > 1:
        share = (limit - at_lo) / max(1, at_hi - at_lo)
        guess = min(hi - 1, max(lo + 1, lo + int(share * (hi - lo))))
        nbytes = used(guess)
        if nbytes <= limit:
            lo, at_lo = guess, nbytes
        else:
            hi, at_hi = guess, nbytes
    return lo
