"""Plans beside a device for models with experts: the device has what every token needs, the CPU most experts.

A token goes to few of a layer's experts, and lifting one over the link takes longer than reading it in RAM. So the CPU
computes routers and experts where they lie: in RAM, or streamed from the disk, or in caches for some of each layer's.
Device memory is filled as for other models (`ours/device`): the head, attention with its KV, then shared experts and
dense FFNs. Where these do not fit, the link lifts the rest for each token, or the CPU computes it: both are simulated.
What is left of device memory holds routers and all experts of the first so many layers, or caches for experts of every
layer that are at home in RAM. If RAM has no room for them all, they are at home on the disk, and RAM has caches of its
own beneath those of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.graph import ops
from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.homes import kv_layers, weights_bytes
from penstock.planner.solve import beside, fill
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.ours import device
from penstock.planner.solve.ours.ram import POLICY, caches_reason
from penstock.planner.solve.problem import Problem
from penstock.spec.parts import Part
from penstock.spec.places import CPU, GPU, HOST, is_disk
from penstock.spec.plan import Cache, Plan
from penstock.units import format_bytes

NAME = f"{device.WHOLE}, experts with the CPU"
_MOST_POWER = 12  # of 2: rows of a pass that asks are fewer
_LINK, _CPU = "", ", shared experts and dense FFNs too"  # who computes those that are not on the device


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Plans that fit into both memories; none where the least does not."""
    sizes = [
        beside.device_skeleton(problem, rows, problem.layers, lifted=1.0, prompts=False)
        for rows in fill.chunk_options(problem.ask)
    ]
    for skeleton in [*sizes, replace(beside.smallest(problem), prompts=False)]:
        found = False
        for attention_layers, kv_home in device.modes(skeleton):
            mode = replace(skeleton, attention_layers=attention_layers, kv_home=kv_home)
            for candidate in (*_of_mode(mode, experts_there=False), *_of_mode(mode, experts_there=True)):
                # Longer chunks save reading from the disk.
                if skeleton.chunk_rows <= fill.CHUNK_ROWS or _reads(candidate.plan):
                    yield candidate
                    found = True
        if found and skeleton.chunk_rows <= fill.CHUNK_ROWS:
            return


def _of_mode(skeleton: beside.DeviceSkeleton, experts_there: bool) -> Iterator[Candidate]:
    """All that may be in RAM is there, or the rest streams, or experts have caches. `experts_there`: plans with experts
    of some layers on the device."""
    problem = skeleton.problem
    for who, lifted in {_LINK: skeleton.lifted, _CPU: (0.0,) * problem.layers}.items():
        whole = replace(skeleton, lifted=lifted)
        plans = {"": device.filled(whole, device.in_ram, experts_there)}
        if plans[""] is None or _reads(plans[""]):
            plans = {", streamed": plans[""], ", in caches": device.filled(whole, _caching, experts_there)}
        found = {where: plan for where, plan in plans.items() if plan is not None}
        for where, plan in found.items():
            if bool(_layers_there(plan)) == experts_there:
                yield Candidate(_name(plan, whole, where, who), plan, _reasons(plan, whole))
        if not any(map(_ffn_elsewhere, found.values())):
            break
    cached = _cached_there(skeleton) if experts_there else None
    if cached is not None:
        where = " and in RAM" if _reads(cached) else ""
        name = _name(cached, skeleton, f", in caches on the device{where}", _LINK)
        yield Candidate(name, cached, _reasons(cached, skeleton))


def _caching(
    skeleton: beside.DeviceSkeleton, on_device: fill.Resident, above: tuple[Cache, ...] = ()
) -> Plan | None:  # fmt: skip
    """The plan with slots for experts in what RAM has left once all else stays, which every token reads; at least one
    a layer. None if the rest alone is too much, if no experts are left, or if the user limits the weights that stay.
    `above`: caches on the device, over those in RAM."""
    problem = skeleton.problem
    experts = [part for part in problem.of_kind("experts") if part.key not in on_device]
    if problem.ask.resident_bytes is not None or not experts:
        return None

    def caches(slots: Sequence[int]) -> tuple[Cache, ...]:
        return tuple(sorted((*_caches_in_ram(experts, slots), *above), key=lambda cache: cache.layer))

    budget = problem.spare_bytes(skeleton.plan(on_device, {}, caches([1] * len(experts))), HOST)
    if budget is None:
        return None
    memory = device.fill_memory(problem, on_device, budget, cached=True)
    left = budget - problem.bytes_of(memory) - ARENA_ALIGN
    plan = skeleton.plan(on_device, memory, caches(fill.share_slots(experts, left)))
    return plan if problem.fits(plan, HOST) and (not above or problem.fits(plan)) else None


def _caches_in_ram(experts: Sequence[Part], slots: Sequence[int]) -> tuple[Cache, ...]:
    return tuple(Cache(part.layer, HOST, n, POLICY) for part, n in zip(experts, slots, strict=True))


def _cached_there(skeleton: beside.DeviceSkeleton) -> Plan | None:
    """All that is not an expert on the device, slots for experts in what its memory has left, and every expert in RAM,
    or in caches there over the disk. None where that does not fit, or where all experts would have slots on the
    device."""
    problem = skeleton.problem
    experts = problem.of_kind("experts")
    if problem.ask.resident_bytes is not None:
        return None
    rows = [_lifted_rows(problem, part) for part in experts]
    on_device = device.computed_there(skeleton, experts=False)

    def caches(slots: Sequence[int]) -> tuple[Cache, ...]:
        return tuple(
            Cache(p.layer, GPU.executor, n, POLICY, r) for p, n, r in zip(experts, slots, rows, strict=True)
        )  # fmt: skip

    def plan(slots: Sequence[int]) -> Plan:
        return skeleton.plan(on_device, None, caches(slots))

    budget = problem.spare_bytes(plan([1] * len(experts)), GPU.executor)
    if budget is None:
        return None
    slots = fill.share_slots(experts, budget - 2 * ARENA_ALIGN)
    if min(slots) == max(part.experts for part in experts):
        return None
    found = plan(slots)
    if problem.fits(found, HOST):
        return found if problem.fits(found) else None
    return _caching(skeleton, on_device, caches(slots))


def _lifted_rows(problem: Problem, part: Part) -> int:
    """The fewest rows for which lifting an expert and computing it on the device takes no longer than the CPU takes."""
    cost, fmt = problem.cost, part.kinds(ops.FFN_BLOCKS)
    lift_s = cost.call_s(GPU.to_device, "lift", fmt, nbytes=part.least_bytes)
    for rows in (1 << power for power in range(_MOST_POWER)):
        nbytes, flops = ops.matrix_cost(part, 0, part.expert_granules, ops.FFN_BLOCKS, rows)
        there_s, cpu_s = (cost.call_s(lane, "experts", fmt, rows, nbytes, flops) for lane in (GPU.kernels, CPU))
        if lift_s + there_s <= cpu_s:
            return rows
    return 1 << _MOST_POWER


def _layers_there(plan: Plan) -> int:
    """Layers whose experts are at home on the device."""
    parts = plan.parts
    return len({u.part for u in plan.units if u.home == GPU.executor and parts[u.part].kind == "experts"})


def _reads(plan: Plan) -> bool:
    """Whether some weights but embedding rows are at home on a disk."""
    return any(is_disk(unit.home) and unit.part != "embed" for unit in plan.units)


def _ffn_elsewhere(plan: Plan) -> bool:
    """Whether some shared expert or dense FFN is not at home on the device."""
    parts = plan.parts
    return any(unit.home != GPU.executor and parts[unit.part].kind in ("ffn", "shared") for unit in plan.units)


def _name(plan: Plan, skeleton: beside.DeviceSkeleton, where: str, who: str) -> str:
    """The name of the candidate in `penstock plan --compare`. `where`: words about where the CPU's experts are. `who`:
    words about who computes shared experts and dense FFNs outside device memory."""
    if beside.all_there(plan):
        return device.WHOLE
    layers = ", those of some layers on the device" if _layers_there(plan) else ""
    cpu = "" if skeleton.attention_layers == skeleton.problem.layers else ", attention of some layers too"
    kv = ", KV in RAM" if skeleton.kv_home == HOST else ""
    return f"{NAME}{where}{layers}{who}{cpu}{kv}"


def _reasons(plan: Plan, skeleton: beside.DeviceSkeleton) -> tuple[str, ...]:
    homes, parts = weights_bytes(plan), plan.parts
    total = format_bytes(sum(homes.values()))
    where = [f"{format_bytes(homes.get(GPU.executor, 0))} of {total} of weights stay in device memory"]
    where += [f"{format_bytes(homes[home])} {place}" for home, place in device.ELSEWHERE.items() if homes.get(home)]
    found = [", ".join(where)]
    every = sum(part.kind == "experts" for part in parts.values())
    if layers := _layers_there(plan):
        found.append(f"experts of {layers} of {every} layers are among them, with their routers")
    if layers < every:
        which = "the other" if layers or any(cache.executor != HOST for cache in plan.caches) else "the"
        found.append(f"the CPU computes {which} experts: {_experts_reason(plan)}")
    lifted = sum(
        plan.unit_bytes(unit)
        for unit in plan.units
        if unit.home != GPU.executor == unit.decode and (unit.part != "embed" or plan.target.spec.tied)
    )
    if lifted:
        found.append(f"the link lifts {format_bytes(lifted)} for each token, which device memory has no room for")
        found.append(beside.lift_reason(skeleton.problem, skeleton.ring_bytes))
    there = [cache for cache in plan.caches if cache.executor != HOST]
    if there:
        slots, rows = [cache.slots for cache in there], there[0].lifted_rows
        found.append(
            f"caches in device memory for {min(slots)} of {parts[f'{there[0].layer}.experts'].experts} experts a"
            f" layer: the CPU computes what is missing for fewer than {rows} rows, and it is lifted for later tokens"
        )
    if len(there) < len(plan.caches):
        found.append(f"beneath these in RAM {caches_reason(plan)}" if there else caches_reason(plan))
    if any(parts[unit.part].kind == "experts" and is_disk(unit.home) for unit in plan.units):
        found.append(f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads once what is not in RAM")
    kv, layers = plan.kv[0].format.name, len(plan.target.spec.layers)
    found.append(f"KV in {kv}, of {kv_layers(plan, GPU.executor)} of {layers} layers in device memory")
    return tuple(found)


def _experts_reason(plan: Plan) -> str:
    """Where the experts lie, and why the CPU takes them."""
    parts, nbytes = plan.parts, {True: 0, False: 0}
    for unit in plan.units:
        if parts[unit.part].kind == "experts" and unit.home != GPU.executor:
            nbytes[is_disk(unit.home)] += plan.unit_bytes(unit)
    if not nbytes[True]:
        return f"all {format_bytes(nbytes[False])} of them are in RAM, which it reads faster than the link"
    some = f"{format_bytes(nbytes[False])} of them stay in RAM, " if nbytes[False] else ""
    return f"{some}{format_bytes(nbytes[True])} are at home on the disk"
