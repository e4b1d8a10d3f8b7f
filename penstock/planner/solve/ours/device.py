"""Plans beside a device: device memory is filled first, then RAM, and the rest is on the disk.

Device memory is filled in this order:
1. the head, which no plan beside a device leaves to the CPU
2. attention of whole layers, with their KV
3. shared experts, then FFNs, of each the same share. A byte of an FFN saves as much in one layer as in another, and
   with even shares the CPU and the link work evenly while the device does.

The FFN granules outside device memory are all computed by the CPU, or all lifted by the link, or each takes the share
at which their layer is done first (`slicing`). Such a choice is a split. `layer_work` estimates the seconds of all
splits, within some hundredths if no disk is read. `solve` simulates the best few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NoReturn

from penstock.planner.homes import kv_layers, weights_bytes
from penstock.planner.solve import beside
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import Resident, all_of, share_out, usual_chunks
from penstock.planner.solve.layer_work import Estimate, LayerWork, Shares
from penstock.planner.solve.problem import Problem, too_little
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_mib_up

WHOLE = "device memory"  # the name of the strategy that has all weights in device memory
_LINK = "link"
_ATTEMPTS = 5
# A skeleton and the granules that stay in device memory → a plan. None if RAM is too small for the rest.
Rest = Callable[[beside.DeviceSkeleton, Resident], Plan | None]
# At most 4 splits are simulated, or 7 if a disk is read, for which estimates are less exact. A split is not simulated
# if its estimate is more than twice the best one's.
_MOST_SPLITS, _MOST_READING, _HOPELESS = 4, 7, 2.0


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Plans that fit into both memories; none if the smallest does not fit. As soon as a plan has all weights on the
    device, it is the last: other splits would give the same plan."""
    sizes = [beside.device_skeleton(problem, rows, problem.layers, lifted=1.0) for rows in usual_chunks(problem.ask)]
    for size in [*sizes, beside.smallest(problem)]:
        any_fits = False
        for who, skeleton in _splits(size):
            plan = filled(skeleton)
            if plan is None:
                continue
            any_fits = True
            yield Candidate(_name(plan, who, skeleton), plan, _reasons(plan, skeleton))
            if beside.all_there(plan):
                return
        if any_fits:
            return


def minimum_bytes(problem: Problem) -> int:
    """The bytes of device memory that the smallest plan takes. In it everything crosses the link."""
    whole = beside.smallest(problem)
    splits = (whole, replace(whole, kv_home=HOST), replace(whole, attention_layers=0))
    return min(split.plan({}, {}).tier_bytes()[GPU.executor] for split in splits)


def require_minimum(problem: Problem) -> None:
    """Raises DoesNotFit if the user's limit of device memory is less than `minimum_bytes`."""
    asked = problem.ask.device_memory_bytes
    if problem.has_device and asked is not None and minimum_bytes(problem) > asked:
        refuse(problem)


def refuse(problem: Problem) -> NoReturn:
    """Raises DoesNotFit, for an ask of which no plan with the device fits. The error names device memory if that is too
    little, otherwise RAM."""
    have, host = problem.device_bytes, problem.host_bytes
    need = minimum_bytes(problem)
    if need > have:
        hint = f"--device-memory {format_mib_up(need)}, or --device none"
        raise too_little("device memory", "", GPU.executor, need, have, hint)
    need = beside.smallest(problem).plan({}, {}).tier_bytes()[HOST]
    hint = f"--host-memory {format_mib_up(need)}, or --device none"
    raise too_little("host memory", " beside a device", HOST, need, host, hint)


def _splits(skeleton: beside.DeviceSkeleton) -> list[tuple[str, beside.DeviceSkeleton]]:
    """(who computes the FFNs outside device memory, in words; the skeleton) of the best few splits by their estimates,
    the best first. In the given skeleton the device computes everything."""
    options: list[tuple[float, int, str, beside.DeviceSkeleton]] = []
    layers, count = skeleton.problem.layers, _MOST_SPLITS
    for attention_layers, kv_home in modes(skeleton):
        whole = replace(skeleton, attention_layers=attention_layers, kv_home=kv_home)
        estimate = _estimate(whole)
        if estimate is None:
            continue
        shares = {"link and CPU": estimate.lifted(), "CPU": (0.0,) * layers, _LINK: (1.0,) * layers}
        if kv_home == HOST:  # only the split in which the device computes everything is tried with KV in RAM
            shares = {_LINK: shares[_LINK]}
        elif shares["link and CPU"] in (shares["CPU"], shares[_LINK]):
            del shares["link and CPU"]
        elif estimate.reads:
            shares["less link, more CPU"], count = tuple(share / 2 for share in shares["link and CPU"]), _MOST_READING
        for who, lifted in shares.items():
            for prompts in (True,) if who == _LINK else (True, False):
                split = replace(whole, lifted=lifted, prompts=prompts)
                options.append((estimate.seconds(lifted, prompts), len(options), who, split))
    best_s = min((seconds for seconds, *_ in options), default=0.0)
    return [(who, split) for seconds, _, who, split in sorted(options)[:count] if seconds <= _HOPELESS * best_s]


def modes(skeleton: beside.DeviceSkeleton) -> list[tuple[int, Tier]]:
    """(the number of layers whose attention the device computes, the home of their KV) of all ways that fit."""
    problem, layers = skeleton.problem, skeleton.problem.layers

    @cache
    def plan_of(attention_layers: int) -> Plan:
        there = all_of(problem.of_kind("attn")[:attention_layers])
        return replace(skeleton, attention_layers=attention_layers).plan(there, {})

    streams = problem.fits(skeleton.plan({}, {}), GPU.executor)
    fitting: list[tuple[int, Tier]] = [(layers, GPU.executor)] if streams else []
    stay = problem.most_on_device(layers, plan_of)
    if stay < layers:  # so many layers fit with their KV, and the CPU computes attention of the others
        fitting += [(stay, GPU.executor), (layers, HOST)]
    return fitting


def _estimate(skeleton: beside.DeviceSkeleton) -> Estimate | None:
    """The estimates of all splits of a skeleton, from where its bytes would be. None if it does not fit even with no
    weights in either memory."""
    problem, sizes = skeleton.problem, skeleton.problem.parts
    bare = skeleton.plan({}, {})
    spare, memory = problem.spare_bytes(bare, GPU.executor), problem.spare_bytes(bare, HOST)
    if spare is None or memory is None:
        return None
    may_stay = problem.ask.resident_bytes
    stays = fill_device(skeleton, spare if may_stay is None else min(spare, may_stay))

    def share(parts: list[Part]) -> float:
        return sum(stays.get(part.key, 0) for part in parts) / max(1, sum(part.granules for part in parts))

    left = problem.total_bytes - problem.bytes_of(stays)
    left -= sizes[problem.gathered].nbytes if problem.gathered else 0
    if may_stay is not None:
        memory = min(memory, max(0, may_stay - problem.bytes_of(stays)))
    disk = max(0.0, 1 - memory / left) if left > 0 else 0.0
    attends = skeleton.attention_layers
    ffns, attention = share(problem.of_kind("ffn")), share(problem.of_kind("attn")[:attends])
    there = Shares(ffns, attention, disk, True, skeleton.kv_home == HOST)
    work = LayerWork(problem, skeleton.ring_bytes)
    return Estimate(work, skeleton.chunk_rows, there, attends, problem.head.key in stays)


def filled(skeleton: beside.DeviceSkeleton, rest: Rest | None = None, experts: bool = False) -> Plan | None:
    """The plan that fills device memory, then RAM. None if it does not fit even with no weights in either memory.
    `rest`: makes the plan of what stays in device memory; None: `in_ram`. `experts`: those of whole layers may stay in
    device memory."""
    problem, may_stay = skeleton.problem, skeleton.problem.ask.resident_bytes
    there_all = computed_there(skeleton, experts)
    if may_stay is None and problem.bytes_of(there_all) <= problem.device_bytes:
        options: tuple[Resident | None, ...] = (None, {})
        wholes = [rest(skeleton, there_all)] if rest else (skeleton.plan(there_all, memory) for memory in options)
        for whole in wholes:
            if whole is not None and problem.fits(whole):
                return whole
    budget = skeleton.device_budget()
    if budget is not None and may_stay is not None:
        budget = min(budget, may_stay)
    return beside.within_device(
        problem, budget, _ATTEMPTS, lambda nbytes: (rest or in_ram)(skeleton, fill_device(skeleton, nbytes, experts))
    )  # fmt: skip


def in_ram(skeleton: beside.DeviceSkeleton, on_device: Resident) -> Plan | None:
    """The plan with `on_device` in device memory, as much of the rest in RAM as fits, and the remainder on the disk.
    None if RAM is too small. Whether device memory has room is left to the caller."""
    problem, may_stay = skeleton.problem, skeleton.problem.ask.resident_bytes
    if may_stay is None:
        plan = skeleton.plan(on_device)
        if problem.fits(plan, HOST):
            return plan
    spare = problem.spare_bytes(skeleton.plan(on_device, {}), HOST)
    if spare is None:
        return None
    if may_stay is not None:
        spare = min(spare, max(0, may_stay - problem.bytes_of(on_device)))
    plan = skeleton.plan(on_device, fill_memory(problem, on_device, spare))
    return plan if problem.fits(plan, HOST) else None


def computed_there(skeleton: beside.DeviceSkeleton, experts: bool) -> Resident:
    """The parts that the device computes if its memory has room for all of them: all but the attention that is left to
    the CPU, an embedding of which single rows are looked up, which takes no time on the CPU, and, without `experts`,
    experts and their routers."""
    problem, layers = skeleton.problem, skeleton.attention_layers
    parts = (part for part in problem.parts.values() if part.kind != "attn" or part.layer < layers)
    cpu = () if experts else ("experts", "router")
    return all_of(part for part in parts if part.key != problem.gathered and part.kind not in cpu)


def fill_device(skeleton: beside.DeviceSkeleton, budget: int, experts: bool = False) -> Resident:
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


def fill_memory(problem: Problem, on_device: Resident, budget: int, cached: bool = False) -> Resident:
    """The granules that `budget` bytes of RAM hold: even shares of everything that is not on the device. An embedding
    of which single rows are looked up stays only if there is room left. `cached`: no experts stay, because they have
    caches."""
    rest = {key: part.granules - on_device.get(key, 0) for key, part in problem.parts.items()}
    every = [part for part in problem.parts.values() if part.kind not in PINNED and rest[part.key]]
    every = [part for part in every if part.kind != "experts"] if cached else every
    stays = share_out([part for part in every if part.key != problem.gathered], budget, rest)
    gathered = [part for part in every if part.key == problem.gathered]
    if sum(part.nbytes for part in gathered) <= budget - problem.bytes_of(stays):
        stays |= all_of(gathered)
    return stays


def _name(plan: Plan, who: str, skeleton: beside.DeviceSkeleton) -> str:
    """The name of the candidate in `penstock plan --compare`."""
    if beside.all_there(plan):
        return WHOLE
    cpu = "" if skeleton.attention_layers == skeleton.problem.layers else ", attention of some layers on the CPU"
    where = ", KV in RAM" if skeleton.kv_home == HOST else ""
    return f"device memory, {who}{cpu}{where}" + ("" if skeleton.prompts else ", prompts too")


ELSEWHERE = {HOST: "in RAM", DISK.tier: "on the disk"}


def _reasons(plan: Plan, skeleton: beside.DeviceSkeleton) -> tuple[str, ...]:
    homes = weights_bytes(plan)
    computed = dict.fromkeys(("lifted", "by the CPU"), 0)
    for unit in plan.units:
        if unit.home != GPU.executor and (unit.part != "embed" or plan.target.spec.tied):
            computed["lifted" if unit.decode == GPU.executor else "by the CPU"] += plan.unit_bytes(unit)
    total = format_bytes(sum(homes.values()))
    where = [f"{format_bytes(homes.get(GPU.executor, 0))} of {total} of weights stay in device memory"]
    where += [f"{format_bytes(homes[home])} {place}" for home, place in ELSEWHERE.items() if homes.get(home)]
    reasons = [", ".join(where)]
    if any(computed.values()):
        shares = [f"{format_bytes(nbytes)} {how}" for how, nbytes in computed.items() if nbytes]
        reasons.append(f"of what is not there, each token: {' and '.join(shares)}")
        if computed["lifted"]:
            reasons.append(beside.lift_reason(skeleton.problem, skeleton.ring_bytes))
        if skeleton.prompts and computed["by the CPU"]:
            reasons.append("where a prompt is read, the device computes the CPU's share of FFNs too")
    kv = plan.kv[0].format.name
    reasons.append(
        f"KV in {kv}, of {kv_layers(plan, GPU.executor)} of {len(plan.target.spec.layers)} layers in device memory"
    )
    return tuple(reasons)
