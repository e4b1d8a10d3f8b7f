"""Fills a skeleton: device memory first, then RAM, and the rest is on the disk.

Device memory is filled in this order:
1. the head, which no plan beside a device leaves to the CPU
2. attention of whole layers, with their KV
3. shared experts, then FFNs, of each the same share. A byte of an FFN saves as much in one layer as in another, and
   with even shares the CPU and the link work evenly while the device does.

RAM has the same share of everything else. Or it has caches for experts, and of all else as much as fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.shares import Resident, all_of, share_out, share_slots
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton, within_device
from penstock.spec.parts import PINNED
from penstock.spec.places import GPU, HOST
from penstock.spec.plan import Cache, Plan

# Of caches for experts. It holds 3 to 6 % more of what a trained model asks for than "lru" (docs/EXPERTS.md).
POLICY = "lfu"
# A skeleton and the granules that stay in device memory → a plan. None if RAM is too small for the rest.
Rest = Callable[[Skeleton, Resident], Plan | None]


def in_ram(skeleton: Skeleton, on_device: Resident) -> Plan | None:
    """The plan with `on_device` in device memory and all else in RAM; if that does not fit, `partly_in_ram`."""
    if skeleton.problem.may_stay is None:
        plan = skeleton.plan(on_device)
        if skeleton.problem.fits(plan, HOST):
            return plan
    return partly_in_ram(skeleton, on_device)


def filled(skeleton: Skeleton, rest: Rest = in_ram, experts: bool = False) -> Plan | None:
    """The plan that fills device memory, then RAM. None if it does not fit even with no weights in either memory.
    `rest`: makes the plan of what stays in device memory. `experts`: those of whole layers may stay in device
    memory."""
    problem = skeleton.problem
    computed = computed_there(skeleton, experts)
    if problem.may_stay is None and problem.bytes_of(computed) <= problem.device_bytes:
        whole = rest(skeleton, computed)
        if whole is not None and problem.fits(whole):
            return whole
    budget = problem.spare_bytes(skeleton.plan({}, {}), GPU.executor)
    choose = partial(fill_device, skeleton, experts=experts)
    fitting = within_device(problem, budget, choose, partial(rest, skeleton))
    return None if fitting is None else fitting[0]


def partly_in_ram(skeleton: Skeleton, on_device: Resident, last: Sequence[str] = ()) -> Plan | None:
    """The plan with `on_device` in device memory, as much of the rest in RAM as fits, and the remainder on the disk.
    None if RAM is too small. Whether device memory has room is left to the caller. `last`: kinds of parts that get what
    room all others leave."""
    problem = skeleton.problem
    spare = problem.spare_bytes(skeleton.plan(on_device, {}), HOST, problem.bytes_of(on_device))
    if spare is None:
        return None
    plan = skeleton.plan(on_device, fill_memory(problem, on_device, spare, last=last))
    return plan if problem.fits(plan, HOST) else None


def caching(skeleton: Skeleton, on_device: Resident, above: tuple[Cache, ...] = (), guesses: int = 0) -> Plan | None:
    """The plan with slots for experts in what RAM has left once all else stays, which every token reads; at least one
    a layer. What slots hold stays, and counts towards the user's limit of that. None if the rest alone is too much, if
    no experts are left, or if the limit is less than a slot a layer.

    above           caches on the device, over those in RAM
    guesses         of each cache whose layer comes after another one with a cache
    """
    problem = skeleton.problem
    experts = [part for part in problem.of_kind("experts") if part.key not in on_device]
    if not experts:
        return None
    cached = {part.layer for part in experts}

    def caches(slots: Sequence[int]) -> tuple[Cache, ...]:
        mine = (
            Cache(part.layer, HOST, count, POLICY, guesses=guesses if part.layer - 1 in cached else 0)
            for part, count in zip(experts, slots, strict=True)
        )
        return tuple(sorted((*mine, *above), key=lambda cache: cache.layer))

    room = problem.room_bytes(skeleton.plan(on_device, {}, caches([1] * len(experts))), HOST)
    if room is None:
        return None
    may_stay = room
    if problem.may_stay is not None:
        may_stay = problem.may_stay - problem.bytes_of(on_device) - sum(part.least_bytes for part in experts)
    if may_stay < 0:
        return None
    memory = fill_memory(problem, on_device, min(room, may_stay), without=("experts",), looked_up=False)
    left = min(room - ARENA_ALIGN, may_stay) - problem.bytes_of(memory)
    plan = skeleton.plan(on_device, memory, caches(share_slots(experts, left)))
    return plan if problem.fits(plan, HOST) and (not above or problem.fits(plan)) else None


def computed_there(skeleton: Skeleton, experts: bool) -> Resident:
    """The parts that the device computes if its memory has room for all of them.

    Not among them are: attention of the layers that is left to the CPU; an embedding of which single rows are looked
    up, since that takes no time on the CPU; without `experts`, experts and their routers."""
    problem, layers = skeleton.problem, skeleton.attention_layers
    parts = (part for part in problem.parts.values() if part.kind != "attn" or part.layer < layers)
    cpu = () if experts else ("experts", "router")
    return all_of(part for part in parts if part.key != problem.gathered and part.kind not in cpu)


def fill_device(skeleton: Skeleton, budget: int, experts: bool = False) -> Resident:
    """The granules that `budget` bytes of device memory hold, in the order of the module's docstring. `experts`: after
    these, routers and experts of the first layers that fit as a whole."""
    problem = skeleton.problem
    stays = all_of([problem.head] if problem.head.nbytes <= budget else [])
    attention = problem.of_kind("attn")[: skeleton.attention_layers]
    for parts in (attention, problem.of_kind("shared"), problem.of_kind("ffn")):
        stays |= share_out(parts, budget - problem.bytes_of(stays))
    for part in problem.of_kind("experts") if experts else ():
        layer = all_of([part, problem.parts[f"{part.layer}.router"]])
        if problem.bytes_of(stays) + problem.bytes_of(layer) > budget:
            break
        stays |= layer
    return stays


def fill_memory(
    problem: Problem, on_device: Resident, budget: int, without: Sequence[str] = (), looked_up: bool = True,
    last: Sequence[str] = (),
) -> Resident:  # fmt: skip
    """The granules that `budget` bytes of RAM hold: even shares of everything that is not on the device. A tied
    embedding stays before all else: it is the head too, and if it streamed, the row of each token would have to be read
    on its own as well. `without`: kinds of parts that do not stay. `looked_up`: an embedding of which single rows are
    looked up stays if there is room left. (Slots for experts are a better use of it.) `last`: as for
    `partly_in_ram`."""
    rest = {key: part.granules - on_device.get(key, 0) for key, part in problem.parts.items()}
    kinds = (*PINNED, *without)
    every = [part for part in problem.parts.values() if part.kind not in kinds and rest[part.key]]
    embed = problem.parts["embed"]
    stays: Resident = {}
    if problem.spec.tied and rest["embed"] and rest["embed"] * embed.granule_bytes <= budget:
        stays["embed"] = rest["embed"]
    shared = [part for part in every if part.key not in (problem.gathered, *stays)]
    for parts in ([each for each in shared if (each.kind in last) == is_last] for is_last in (False, True)):
        stays |= share_out(parts, budget - problem.bytes_of(stays), rest)
    if looked_up and problem.gathered and rest["embed"] and embed.nbytes <= budget - problem.bytes_of(stays):
        stays |= all_of([embed])
    return stays
