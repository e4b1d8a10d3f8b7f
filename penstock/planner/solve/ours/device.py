"""Plans beside a device: its memory is filled first, then RAM, and the rest is on the disk.

What a byte saves by being at home on the device does not depend on where in the layers it is, so FFNs keep even shares
there, and the CPU's and the link's work lies evenly under the device's. The head goes first (the CPU cannot take it),
then attention (whole layers, and their KV with them), then FFNs. Of the FFN granules outside, the CPU computes all, the
link lifts all, or each takes the share at which their layer is done first (`slicing`, with the RAM that both read).
What each of these takes is estimated layer by layer (`layer_work`, within some hundredths where no disk is read), and
`planner/solve` simulates the best few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import NoReturn

from penstock.planner.homes import kv_layers, weights_bytes
from penstock.planner.solve import beside
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import Resident, bytes_of, share_out, usual_chunks
from penstock.planner.solve.layer_work import Estimate, LayerWork, Shares
from penstock.planner.solve.problem import Problem, most, spare_bytes, too_little
from penstock.spec.parts import PINNED
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_mib_up

WHOLE = "device memory"  # the strategy that leaves nothing elsewhere
_LINK = "link"
_ATTEMPTS = 5
# A skeleton and the granules that stay on the device → a plan; None where what is left is too much for RAM.
Rest = Callable[[beside.DeviceSkeleton, Resident], Plan | None]
# Splits that are simulated: so many, more where a disk is read, whose part in it the closed forms know least; of those
# whose closed form is at most so many times the best one's.
_MOST_SPLITS, _MOST_READING, _HOPELESS = 4, 7, 2.0


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Plans that fit into both memories; none where the least does not. What stays where does not depend on who
    computes the rest, so of the splits that leave nothing to compute elsewhere only the first comes."""
    whole = _whole(problem)
    skeletons = [beside.device_skeleton(problem, whole, chunk_rows) for chunk_rows in usual_chunks(problem.ask)]
    for skeleton in [*skeletons, beside.smallest(problem, whole)]:
        found = False
        for split in _splits(skeleton):
            plan = filled(replace(skeleton, split=split))
            if plan is None:
                continue
            found = True
            yield Candidate(_name(plan, split), plan, _reasons(plan, skeleton, split))
            if beside.all_there(plan):
                return
        if found:
            return


def _whole(problem: Problem) -> beside.Split:
    """All is the device's."""
    return beside.Split(_LINK, 1.0, problem.layers, GPU.executor, True)


def minimum_bytes(problem: Problem) -> int:
    """The least device memory with which the ask runs on the device at all: everything crosses the link."""
    layers = problem.layers
    splits = (
        replace(_whole(problem), attention_layers=attention, kv_home=home)
        for attention, home in ((layers, GPU.executor), (layers, HOST), (0, GPU.executor))
    )
    return min(beside.smallest(problem, split).plan({}, {}).tier_bytes()[GPU.executor] for split in splits)


def require_minimum(problem: Problem) -> None:
    """Raises DoesNotFit where the device's memory that the user named is too little for that."""
    asked = problem.ask.device_memory_bytes
    if problem.has_device and asked is not None and minimum_bytes(problem) > asked:
        refuse(problem)


def refuse(problem: Problem) -> NoReturn:
    """Raises DoesNotFit: no plan on the device fits, by its memory or, where that would do, by the host's."""
    have, host = problem.device_bytes, problem.host_bytes
    need = minimum_bytes(problem)
    if need > have:
        hint = f"--device-memory {format_mib_up(need)}, or --device none"
        raise too_little("device memory", "", GPU.executor, need, have, hint)
    need = beside.smallest(problem, _whole(problem)).plan({}, {}).tier_bytes()[HOST]
    hint = f"--host-memory {format_mib_up(need)}, or --device none"
    raise too_little("host memory", " beside a device", HOST, need, host, hint)


def _splits(skeleton: beside.DeviceSkeleton) -> list[beside.Split]:
    """Who may compute what: by their estimates the best few, the best first. The skeleton's split leaves all to the
    device; where that leaves nothing elsewhere, it is the only one."""
    found: list[tuple[float, int, beside.Split]] = []
    layers, count = skeleton.problem.layers, _MOST_SPLITS
    for attention_layers, kv_home in modes(skeleton):
        whole = skeleton.with_split(attention_layers=attention_layers, kv_home=kv_home)
        estimate = _estimate(whole)
        if estimate is None:
            continue
        shares = {"link and CPU": estimate.lifted(), "CPU": (0.0,) * layers, _LINK: (1.0,) * layers}
        if kv_home == HOST:  # KV over the link is for those who have nothing else to do with it
            shares = {_LINK: shares[_LINK]}
        elif shares["link and CPU"] in (shares["CPU"], shares[_LINK]):
            del shares["link and CPU"]
        elif estimate.reads:
            shares["less link, more CPU"], count = tuple(share / 2 for share in shares["link and CPU"]), _MOST_READING
        for name, lifted in shares.items():
            alike = len(set(lifted)) == 1
            split = replace(whole.split, name=name, lifted=lifted[0], lifted_by_layer=() if alike else lifted)
            found.append((estimate.seconds(lifted, True), len(found), split))
            if name != _LINK:
                found.append((estimate.seconds(lifted, False), len(found), replace(split, prompts=False)))
    best_s = min((seconds for seconds, _, _ in found), default=0.0)
    return [split for seconds, _, split in sorted(found)[:count] if seconds <= _HOPELESS * best_s]


def modes(skeleton: beside.DeviceSkeleton) -> list[tuple[int, Tier]]:
    """(layers whose attention is the device's, home of its KV), as they fit."""
    problem, layers = skeleton.problem, skeleton.problem.layers

    @cache
    def used(attention_layers: int, stays: bool = True) -> int:
        there = {f"{i}.attn": problem.parts[f"{i}.attn"].granules for i in range(attention_layers if stays else 0)}
        return skeleton.with_split(attention_layers=attention_layers).plan(there, {}).tier_bytes()[GPU.executor]

    fits = used(layers, False) <= problem.device_bytes
    found: list[tuple[int, Tier]] = [(layers, GPU.executor)] if fits else []
    stay = most(layers, used, problem.device_bytes)
    if stay < layers:  # of attention, what fits beside its KV; the CPU takes the other layers
        found += [(stay, GPU.executor), (layers, HOST)]
    return found


def _estimate(skeleton: beside.DeviceSkeleton) -> Estimate | None:
    """What its splits would take, by where the bytes would be; None where the least does not fit."""
    problem, sizes = skeleton.problem, skeleton.problem.parts
    bare = skeleton.plan({}, {})
    spare = spare_bytes(bare, GPU.executor, problem.device_bytes)
    memory = spare_bytes(bare, HOST, problem.host_bytes)
    if spare is None or memory is None:
        return None
    may_stay = problem.ask.resident_bytes
    stays = fill_device(skeleton, spare if may_stay is None else min(spare, may_stay))

    def share(kind: str, layers: range) -> float:
        keys = [f"{i}.{kind}" for i in layers]
        return sum(stays.get(key, 0) for key in keys) / max(1, sum(sizes[key].granules for key in keys))

    left = sum(part.nbytes for part in sizes.values()) - bytes_of(sizes, stays)
    left -= 0 if problem.spec.tied else sizes["embed"].nbytes
    if may_stay is not None:
        memory = min(memory, max(0, may_stay - bytes_of(sizes, stays)))
    disk = max(0.0, 1 - memory / left) if left > 0 else 0.0
    attends, every = range(skeleton.split.attention_layers), range(problem.layers)
    there = Shares(share("ffn", every), share("attn", attends), disk, True, skeleton.split.kv_home == HOST)
    work = LayerWork(problem, skeleton.ring_bytes)
    return Estimate(work, skeleton.chunk_rows, there, len(attends), problem.head.key in stays)


def filled(skeleton: beside.DeviceSkeleton, rest: Rest | None = None, experts: bool = False) -> Plan | None:
    """As much as fits stays on the device, then in RAM. None where the rest alone is too much for either. `rest`: makes
    a plan of what stays on the device, instead of `in_ram`. `experts`: those of whole layers may be on the device."""
    problem, may_stay = skeleton.problem, skeleton.problem.ask.resident_bytes
    every = {part.key: part.granules for part in problem.parts.values()}
    there_all = computed_there(skeleton, every, experts)
    if may_stay is None and bytes_of(problem.parts, there_all) <= problem.device_bytes:
        options = (rest(skeleton, there_all),) if rest else (skeleton.plan(there_all, memory) for memory in (every, {}))
        for whole in options:
            if whole is not None and problem.fits(whole):
                return whole
    budget = skeleton.device_budget()
    if budget is not None and may_stay is not None:
        budget = min(budget, may_stay)
    return beside.within_device(
        problem, budget, _ATTEMPTS, lambda nbytes: (rest or in_ram)(skeleton, fill_device(skeleton, nbytes, experts))
    )  # fmt: skip


def in_ram(skeleton: beside.DeviceSkeleton, on_device: Resident) -> Plan | None:
    """Of what is not on the device, as much as fits in RAM, the rest on the disk. None where RAM is too small for what
    must be there; how much of the device it takes is not looked at."""
    problem, limit, may_stay = skeleton.problem, skeleton.problem.host_bytes, skeleton.problem.ask.resident_bytes
    if may_stay is None:
        plan = skeleton.plan(on_device)
        if plan.tier_bytes()[HOST] <= limit:
            return plan
    spare = spare_bytes(skeleton.plan(on_device, {}), HOST, limit)
    if spare is None:
        return None
    if may_stay is not None:
        spare = min(spare, max(0, may_stay - bytes_of(problem.parts, on_device)))
    plan = skeleton.plan(on_device, fill_memory(problem, on_device, spare))
    return plan if plan.tier_bytes()[HOST] <= limit else None


def computed_there(skeleton: beside.DeviceSkeleton, every: Resident, experts: bool) -> Resident:
    """All but the CPU's experts (unless `experts` may be there) and attention, and embedding rows that are only looked
    up: the CPU does that in no time."""
    cpu = () if experts else ("experts", "router")
    kept = {key: n for key, n in every.items() if skeleton.problem.parts[key].kind not in cpu}
    if not skeleton.problem.spec.tied:
        del kept["embed"]
    for layer in range(skeleton.split.attention_layers, skeleton.problem.layers):
        del kept[f"{layer}.attn"]
    return kept


def fill_device(skeleton: beside.DeviceSkeleton, budget: int, experts: bool = False) -> Resident:
    """The head, whole; attention of the device's layers; of shared experts and of FFNs even shares. `experts`: then
    routers and experts of the first layers that fit as a whole."""
    found: Resident = {}
    problem, head = skeleton.problem, skeleton.problem.head
    if head.nbytes <= budget:
        found[head.key] = head.granules
        budget -= head.nbytes
    attention = problem.of_kind("attn")[: skeleton.split.attention_layers]
    for wanted in (attention, problem.of_kind("shared"), problem.of_kind("ffn")):
        budget -= share_out(wanted, {part.key: part.granules for part in wanted}, budget, found)
    for part in problem.of_kind("experts") if experts else ():
        router = problem.parts[f"{part.layer}.router"]
        budget -= part.nbytes + router.nbytes
        if budget < 0:
            break
        found |= {part.key: part.granules, router.key: router.granules}
    return found


def fill_memory(problem: Problem, on_device: Resident, budget: int, cached: bool = False) -> Resident:
    """Even shares of everything that is not on the device; embedding rows that are only looked up come last. `cached`:
    without experts, which have caches."""
    found: Resident = {}
    rest = {key: part.granules - on_device.get(key, 0) for key, part in problem.parts.items()}
    every = [part for part in problem.parts.values() if part.kind not in PINNED and rest[part.key]]
    every = [part for part in every if part.kind != "experts"] if cached else every
    gathered = next((p for p in every if p.key == "embed" and not problem.spec.tied), None)
    budget -= share_out([part for part in every if part is not gathered], rest, budget, found)
    if gathered is not None and gathered.nbytes <= budget:
        found[gathered.key] = gathered.granules
    return found


def _name(plan: Plan, split: beside.Split) -> str:
    """What `plan --compare` will call it."""
    if beside.all_there(plan):
        return WHOLE
    cpu = "" if split.attention_layers == len(plan.target.spec.layers) else ", attention of some layers on the CPU"
    where = ", KV in RAM" if split.kv_home == HOST else ""
    return f"device memory, {split.name}{cpu}{where}" + ("" if split.prompts else ", prompts too")


ELSEWHERE = {HOST: "in RAM", DISK.tier: "on the disk"}


def _reasons(plan: Plan, skeleton: beside.DeviceSkeleton, split: beside.Split) -> tuple[str, ...]:
    homes = weights_bytes(plan)
    computed = dict.fromkeys(("lifted", "by the CPU"), 0)
    for unit in plan.units:
        if unit.home != GPU.executor and (unit.part != "embed" or plan.target.spec.tied):
            computed["lifted" if unit.decode == GPU.executor else "by the CPU"] += plan.unit_bytes(unit)
    total = format_bytes(sum(homes.values()))
    where = [f"{format_bytes(homes.get(GPU.executor, 0))} of {total} of weights stay in device memory"]
    where += [f"{format_bytes(homes[home])} {place}" for home, place in ELSEWHERE.items() if homes.get(home)]
    found = [", ".join(where)]
    if any(computed.values()):
        shares = [f"{format_bytes(nbytes)} {how}" for how, nbytes in computed.items() if nbytes]
        found.append(f"of what is not there, each token: {' and '.join(shares)}")
        if computed["lifted"]:
            found.append(beside.lift_reason(skeleton.problem, skeleton.ring_bytes))
        if split.prompts and computed["by the CPU"]:
            found.append("where a prompt is read, the device computes the CPU's share of FFNs too")
    kv = plan.kv[0].format.name
    found.append(
        f"KV in {kv}, of {kv_layers(plan, GPU.executor)} of {len(plan.target.spec.layers)} layers in device memory"
    )
    return tuple(found)
