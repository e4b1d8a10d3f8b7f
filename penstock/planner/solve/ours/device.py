"""Plans beside a device: `filling` says what stays in device memory and in RAM, and the rest is on the disk.

The FFN granules outside device memory are all computed by the CPU, or all lifted over the link, or the CPU and the link
share them so that the layer is done first (`programs/slicing`). Such a choice is a split. `layer_work` estimates the
seconds of all splits, within some hundredths if no disk is read. `solve` simulates the best few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

from penstock.planner.candidate import WHOLE, Candidate
from penstock.planner.delegation import sentences
from penstock.planner.homes import all_there
from penstock.planner.reasons import beside_device
from penstock.planner.shares import all_of
from penstock.planner.sizes import usual_chunks
from penstock.planner.solve.ours.filling import fill_device, filled
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer.layer_work import Estimate, LayerWork, Shares
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, lift_reason, smallest
from penstock.spec.parts import Part
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan

_LINK = "link"
# At most 4 splits are simulated, or 7 if a disk is read, for which estimates are less exact. A split is not simulated
# if its estimate is more than twice the best one's.
_MOST_SPLITS, _MOST_READING, _HOPELESS = 4, 7, 2.0
# So many of the best splits are also tried with twice the CPU's ring. Rejected: to try all splits so. Up to 1.6 % more
# was gained, in three of eight cases, and planning took up to twice as long (docs/LOG.md).
_MOST_LARGER = 2


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Plans that fit into both memories; none if the smallest does not fit. If a plan has all weights and all KV on the
    device, no other plan follows, since other splits would give the same plan. If it has all weights there and KV
    elsewhere, others follow: a plan that lifts a few weights and has KV on the device may be faster."""
    sizes = [device_skeleton(problem, rows, problem.layers, lifted=1.0) for rows in usual_chunks(problem.ask)]
    for size in [*sizes, smallest(problem)]:
        any_fits, larger = False, list[tuple[str, Skeleton]]()
        for who, skeleton in chain(_splits(size), larger):
            plan = filled(skeleton)
            if plan is None:
                continue
            any_fits = True
            yield (made := candidate(plan, f", {who}", skeleton))
            if made.strategy == WHOLE:
                return
            # The disk fills the CPU's ring and the stage in turns, and waits if either has no room. With twice the ring
            # it waits less. That is worth the weights that no longer stay only if the disk is not busy all the time.
            # Then a plan takes longer than its bound, and `solve` simulates these too.
            is_usual = skeleton.host_ring_bytes == size.host_ring_bytes
            if is_usual and HOST in plan.ring_bytes and len(larger) < _MOST_LARGER:
                larger.append((who, replace(skeleton, host_ring_bytes=2 * size.host_ring_bytes)))
        if any_fits:
            return


def candidate(plan: Plan, cpu: str, skeleton: Skeleton) -> Candidate:
    """The candidate of a filled skeleton. `cpu`: who computes what is outside device memory, as words of its name."""
    problem = skeleton.problem
    if all_there(plan):
        cpu = ""
    elif skeleton.attention_layers < problem.layers:
        cpu += ", attention of some layers on the CPU"
    # Experts stay with the CPU where prompts are read too, which goes without saying.
    prompts = ", prompts too" if cpu and not skeleton.prompts and not problem.spec.is_routed else ""
    told = beside_device(plan, lift_reason(problem, skeleton.ring_bytes), skeleton.prompts)
    told += sentences(plan, problem.cost, problem.half_way)
    return Candidate(f"{WHOLE}{cpu}{skeleton.kv_words}{prompts}", plan, told)


def minimum_bytes(problem: Problem) -> int:
    """The bytes of device memory that the smallest plan takes. In this plan all weights cross the link."""
    whole = smallest(problem)
    if problem.ask.kv_home == "disk":
        return min(mode.plan({}, {}).tier_bytes()[GPU.executor] for mode in modes(whole))
    crossing = [] if problem.ask.value_share < 1 else [replace(whole, kv_home=HOST)]
    splits = [whole, *crossing, replace(whole, attention_layers=0)]
    return min(split.plan({}, {}).tier_bytes()[GPU.executor] for split in splits)


def least_host_bytes(problem: Problem) -> int:
    """The bytes of RAM that the smallest plan beside a device takes. KV that has no room on the device takes RAM, in
    the best of all ways that fit into the device's memory. With weights there a plan took 2 % less."""
    plans = [mode.plan({}, {}) for mode in modes(replace(smallest(problem), prompts=not problem.spec.is_routed))]
    there = [plan for plan in plans if problem.fits(plan, GPU.executor)]
    return min(plan.tier_bytes()[HOST] for plan in there or plans)


def _splits(skeleton: Skeleton) -> list[tuple[str, Skeleton]]:
    """(who computes the FFNs outside device memory, in words; the skeleton) of the best few splits by their estimates,
    the best first. In the given skeleton the device computes everything."""
    options: list[tuple[float, int, str, Skeleton]] = []
    layers, count = skeleton.problem.layers, _MOST_SPLITS
    for whole in modes(skeleton):
        estimate = _estimate(whole)
        if estimate is None:
            continue
        shares = {"link and CPU": estimate.lifted(), "CPU": (0.0,) * layers, _LINK: (1.0,) * layers}
        if whole.kv_home != GPU.executor:  # with KV away, only the split is tried in which the device computes all
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


def modes(skeleton: Skeleton) -> list[Skeleton]:
    """The skeleton in all ways that fit: with other numbers of layers whose attention the device computes, other homes
    of their KV, and scores on the device or on the CPU. If the user wants KV on the disk, all of it is there."""
    problem, layers = skeleton.problem, skeleton.problem.layers
    if problem.ask.kv_home == "disk":
        return [replace(skeleton, attention_layers=layers, kv_home=DISK.tier, delegates=on) for on in (False, True)]

    @cache
    def plan_of(attention_layers: int) -> Plan:
        there = all_of(problem.of_kind("attn")[:attention_layers])
        return replace(skeleton, attention_layers=attention_layers).plan(there, {})

    streams = problem.fits(skeleton.plan({}, {}), GPU.executor)
    fitting: list[tuple[int, Tier, bool]] = [(layers, GPU.executor, False)] if streams else []
    stay = problem.most_on_device(layers, plan_of)
    if stay < layers:  # so many layers fit with their KV, and the CPU computes attention of the others
        fitting += [(stay, GPU.executor, False), (layers, HOST, False)]
        if not problem.ask.kv_home and not problem.fits(replace(skeleton, kv_home=HOST).plan({}, {}), HOST):
            fitting += [(layers, DISK.tier, False), (layers, DISK.tier, True)]
    fitting.append((layers, HOST, True))  # also where KV would fit: weights are a better use of device memory then
    if problem.ask.value_share < 1:  # whole pages would cross, of which few values are wanted
        fitting = [mode for mode in fitting if mode[1] == GPU.executor or (mode[1] == HOST and mode[2])]
    return [replace(skeleton, attention_layers=n, kv_home=home, delegates=scores) for n, home, scores in fitting]


def _estimate(skeleton: Skeleton) -> Estimate | None:
    """The estimates of all splits of a skeleton, from where its bytes would be. None if it does not fit even with no
    weights in either memory."""
    problem = skeleton.problem
    bare = skeleton.plan({}, {})
    spare = problem.spare_bytes(bare, GPU.executor)
    stays = {} if spare is None else fill_device(skeleton, spare)
    memory = problem.spare_bytes(bare, HOST, problem.bytes_of(stays))
    if spare is None or memory is None:
        return None

    def share(parts: list[Part]) -> float:
        return sum(stays.get(part.key, 0) for part in parts) / max(1, sum(part.granules for part in parts))

    wanted = sum(part.nbytes for part in problem.parts.values() if part.key != problem.gathered)
    left = wanted - problem.bytes_of(stays)
    disk = max(0.0, 1 - memory / left) if left > 0 else 0.0
    attends = skeleton.attention_layers
    ffns, attention = share(problem.of_kind("ffn")), share(problem.of_kind("attn")[:attends])
    there = Shares(ffns, attention, disk, True, skeleton.kv_home != GPU.executor, skeleton.delegates)
    work = LayerWork(problem, skeleton.ring_bytes)
    return Estimate(work, skeleton.chunk_rows, there, attends, problem.head.key in stays)
