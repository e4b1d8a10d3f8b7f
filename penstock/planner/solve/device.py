"""Plans beside a device: its memory is filled first, then RAM, and the rest is on the disk.

What a byte saves by being at home on the device does not depend on where in the layers it is, so FFNs keep even shares
there, and the CPU's and the link's work lies evenly under the device's. The head goes first (the CPU cannot take it),
then attention (whole layers, and their KV with them), then FFNs. Of the FFN granules outside, the CPU computes all, the
link lifts all, or each takes the share at which their layer is done first (`slicing`, with the RAM that both read).
What each of these takes is estimated in closed form (`layer_costs`, within some hundredths where no disk is read), and
`planner/solve` simulates the best few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

from penstock.errors import DoesNotFit
from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.device_plan import DeviceSkeleton, Split, lift_reason, vocabulary
from penstock.planner.solve.layer_costs import RING_BYTES, Estimate, LayerCosts, Shares
from penstock.planner.solve.limits import device_limit_bytes, fits, host_limit_bytes
from penstock.planner.solve.skeleton import CHUNK_ROWS, MIN_CHUNK_ROWS, PINNED, Resident, chunk_options
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts
from penstock.spec.plan import DEVICE, Plan
from penstock.units import MIB, format_bytes, format_mib_up, round_up

_HOST_RING_BYTES, _STAGE_BYTES = 64 * MIB, 64 * MIB
_SMALLEST_RING_SHARE = 8  # of the device's memory, at most so small a part
WHOLE = "device memory"  # the strategy that leaves nothing elsewhere
_LINK = "link"
_ATTEMPTS = 5
# Splits that are simulated: so many, more where a disk is read, whose part in it the closed forms know least; of those
# whose closed form is at most so many times the best one's.
_MOST_SPLITS, _MOST_READING, _HOPELESS = 4, 7, 2.0


def has_device(machine: MachineSpec, ask: Ask) -> bool:
    """Whether there is one, and the ask allows it any memory."""
    return any(tier.name == DEVICE for tier in machine.tiers) and ask.device_memory_bytes != 0


def candidates(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> Iterator[Candidate]:
    """Plans that fit into both memories; none where the least does not. What stays where does not depend on who
    computes the rest, so of the splits that leave nothing to compute elsewhere only the first comes."""
    chunks = [rows for rows in chunk_options(ask) if rows <= CHUNK_ROWS]
    whole = Split(_LINK, 1.0, len(spec.layers), DEVICE, True)
    for skeleton in [
        *(device_skeleton(ask, spec, weights, machine, whole, chunk_rows) for chunk_rows in chunks),
        _smallest(ask, spec, weights, machine, whole),
    ]:
        found = False
        for split in _splits(skeleton):
            filled = _filled(replace(skeleton, split=split))
            if filled is None:
                continue
            found = True
            yield Candidate(_name(filled, split), filled, _reasons(filled, skeleton, split))
            if all(unit.home == DEVICE or unit.part == "embed" for unit in filled.units):
                return
        if found:
            return


def minimum_bytes(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> int:
    """The least device memory with which the ask runs on the device at all: everything crosses the link."""
    layers = len(spec.layers)
    homes = ((layers, DEVICE), (layers, "host"), (0, DEVICE))
    splits = (Split(_LINK, 1.0, attention_layers, home, True) for attention_layers, home in homes)
    least = (_smallest(ask, spec, weights, machine, split) for split in splits)
    return min(skeleton.plan({}, {}).tier_bytes()[DEVICE] for skeleton in least)


def require_minimum(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> None:
    """Raises DoesNotFit where the device's memory that the user named is too little for that."""
    if has_device(machine, ask) and ask.device_memory_bytes is not None:
        if minimum_bytes(ask, spec, weights, machine) > ask.device_memory_bytes:
            refuse(ask, spec, weights, machine)


def refuse(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> NoReturn:
    """Raises DoesNotFit: no plan on the device fits, by its memory or, where that would do, by the host's."""
    have, host = device_limit_bytes(ask, machine), host_limit_bytes(ask, machine)
    need = minimum_bytes(ask, spec, weights, machine)
    if need > have:
        raise DoesNotFit(
            f"device memory of {format_bytes(have)} is too little: this model needs at least {format_bytes(need)}"
            f" (--device-memory {format_mib_up(need)}, or --device none)",
            tier=DEVICE, need_bytes=need, have_bytes=have, minimum_bytes=need,
        )  # fmt: skip
    smallest = _smallest(ask, spec, weights, machine, Split(_LINK, 1.0, len(spec.layers), DEVICE, True))
    need = smallest.plan({}, {}).tier_bytes()["host"]
    raise DoesNotFit(
        f"host memory of {format_bytes(host)} is too little beside a device: this model needs at least"
        f" {format_bytes(need)} (--host-memory {format_mib_up(need)}, or --device none)",
        tier="host", need_bytes=need, have_bytes=host, minimum_bytes=need,
    )  # fmt: skip


def _splits(skeleton: DeviceSkeleton) -> list[Split]:
    """Who may compute what: by their closed forms the best few, the best first. The skeleton's split leaves all to the
    device; where that leaves nothing elsewhere, it is the only one."""
    found: list[tuple[float, int, Split]] = []
    layers, most = len(skeleton.spec.layers), _MOST_SPLITS
    for attention_layers, kv_home in _modes(skeleton):
        whole = replace(skeleton.split, attention_layers=attention_layers, kv_home=kv_home)
        estimate = _estimate(replace(skeleton, split=whole))
        if estimate is None:
            continue
        shares = {"link and CPU": estimate.lifted(), "CPU": (0.0,) * layers, _LINK: (1.0,) * layers}
        if kv_home == "host":  # KV over the link is for those who have nothing else to do with it
            shares = {_LINK: shares[_LINK]}
        elif shares["link and CPU"] in (shares["CPU"], shares[_LINK]):
            del shares["link and CPU"]
        elif estimate.reads:
            shares["less link, more CPU"], most = tuple(share / 2 for share in shares["link and CPU"]), _MOST_READING
        for name, lifted in shares.items():
            alike = len(set(lifted)) == 1
            split = replace(whole, name=name, lifted=lifted[0], lifted_by_layer=() if alike else lifted)
            found.append((estimate.seconds(lifted, True), len(found), split))
            if name != _LINK:
                found.append((estimate.seconds(lifted, False), len(found), replace(split, prompts=False)))
    best_s = min((seconds for seconds, _, _ in found), default=0.0)
    return [split for seconds, _, split in sorted(found)[:most] if seconds <= _HOPELESS * best_s]


def _modes(skeleton: DeviceSkeleton) -> list[tuple[int, str]]:
    """(layers whose attention is the device's, home of its KV), as they fit."""
    spec, whole = skeleton.spec, skeleton.split
    layers = len(spec.layers)
    limit = device_limit_bytes(skeleton.ask, skeleton.machine)

    def device_bytes(split: Split, attention_stays: bool) -> int:
        stays = {f"{i}.attn": spec.layers[i].attention.kv_heads for i in range(split.attention_layers)}
        plan = replace(skeleton, split=split).plan(stays if attention_stays else {}, {})
        return plan.tier_bytes()[DEVICE]

    modes = [(layers, DEVICE)] if device_bytes(whole, False) <= limit else []
    if device_bytes(whole, True) > limit:  # of attention, what fits beside its KV; the CPU takes the other layers
        lo, hi = 0, layers
        while lo < hi:
            middle = (lo + hi + 1) // 2
            fits = device_bytes(replace(whole, attention_layers=middle), True) <= limit
            lo, hi = (middle, hi) if fits else (lo, middle - 1)
        modes += [(lo, DEVICE), (layers, "host")]
    return modes


def _estimate(skeleton: DeviceSkeleton) -> Estimate | None:
    """What its splits would take, by where the bytes would be; None where the least does not fit."""
    spec, weights = skeleton.spec, skeleton.weights
    bare = skeleton.plan({}, {})
    spare = spare_bytes(bare, DEVICE, device_limit_bytes(skeleton.ask, skeleton.machine))
    memory = spare_bytes(bare, "host", host_limit_bytes(skeleton.ask, skeleton.machine))
    if spare is None or memory is None:
        return None
    most = skeleton.ask.resident_bytes
    stays = _fill_device(skeleton, spare if most is None else min(spare, most))
    sizes = {part.key: part for part in parts(spec, weights)}

    def share(kind: str, layers: range) -> float:
        keys = [f"{i}.{kind}" for i in layers]
        return sum(stays.get(key, 0) for key in keys) / max(1, sum(sizes[key].granules for key in keys))

    left = sum((part.granules - stays.get(part.key, 0)) * part.granule_bytes for part in sizes.values())
    left -= 0 if spec.tied else sizes["embed"].nbytes
    if most is not None:
        memory = min(memory, max(0, most - _bytes_of(skeleton, stays)))
    disk = max(0.0, 1 - memory / left) if left > 0 else 0.0
    attends, every = range(skeleton.split.attention_layers), range(len(spec.layers))
    there = Shares(share("ffn", every), share("attn", attends), disk, True, skeleton.split.kv_home == "host")
    costs = LayerCosts(skeleton.ask, spec, weights, skeleton.machine, skeleton.ring_bytes)
    return Estimate(costs, skeleton.chunk_rows, there, len(attends), vocabulary(spec, weights).key in stays)


def device_skeleton(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, split: Split, chunk_rows: int
) -> DeviceSkeleton:
    """With rings of the usual sizes, smaller on a small device, and none too small for the largest granule twice."""
    largest = max(part.granule_bytes for part in parts(spec, weights) if part.kind not in PINNED)
    limit = device_limit_bytes(ask, machine)

    def whole(nbytes: int) -> int:
        return max(nbytes, 2 * largest) // ARENA_ALIGN * ARENA_ALIGN + (ARENA_ALIGN if largest % ARENA_ALIGN else 0)

    ring = whole(min(RING_BYTES, limit // _SMALLEST_RING_SHARE))
    return DeviceSkeleton(
        ask, spec, weights, machine, split, chunk_rows, ring, whole(_HOST_RING_BYTES), whole(_STAGE_BYTES)
    )


def _smallest(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, split: Split) -> DeviceSkeleton:
    """The smallest rings and chunks."""
    tiny = device_skeleton(replace(ask, device_memory_bytes=0), spec, weights, machine, split, MIN_CHUNK_ROWS)
    return replace(tiny, ask=ask, host_ring_bytes=tiny.ring_bytes, stage_bytes=tiny.ring_bytes)


def _filled(skeleton: DeviceSkeleton) -> Plan | None:
    """As much as fits stays on the device, then in RAM. None where the rest alone is too much for either."""
    ask, machine = skeleton.ask, skeleton.machine
    limit = device_limit_bytes(ask, machine)
    every = {part.key: part.granules for part in parts(skeleton.spec, skeleton.weights)}
    may_stay = skeleton.ask.resident_bytes
    there_all = _computed_there(skeleton, every)
    if may_stay is None and _bytes_of(skeleton, there_all) <= limit:
        for memory in (every, {}):
            whole = skeleton.plan(there_all, memory)
            if fits(whole, ask, machine):
                return whole
    bare = skeleton.plan({}, {})
    spare = spare_bytes(bare, DEVICE, limit)
    if spare is None:
        return None
    budget = spare if may_stay is None else min(spare, may_stay)
    for _ in range(_ATTEMPTS):  # kernels need more scratch for a large unit that stays than for those that come
        plan = _beside(skeleton, _fill_device(skeleton, budget))
        if plan is None or fits(plan, ask, machine):
            return plan
        budget -= round_up(plan.tier_bytes()[DEVICE] - limit, ARENA_ALIGN)
    return None


def _beside(skeleton: DeviceSkeleton, on_device: Resident) -> Plan | None:
    """Of what is not on the device, as much as fits in RAM, the rest on the disk. None where RAM is too small for what
    must be there; how much of the device it takes is not looked at."""
    every = {part.key: part.granules for part in parts(skeleton.spec, skeleton.weights)}
    rest = {part: count - on_device.get(part, 0) for part, count in every.items()}
    limit, may_stay = host_limit_bytes(skeleton.ask, skeleton.machine), skeleton.ask.resident_bytes
    if may_stay is None:
        plan = skeleton.plan(on_device, rest)
        if plan.tier_bytes()["host"] <= limit:
            return plan
    spare = spare_bytes(skeleton.plan(on_device, {}), "host", limit)
    if spare is None:
        return None
    if may_stay is not None:
        spare = min(spare, max(0, may_stay - _bytes_of(skeleton, on_device)))
    plan = skeleton.plan(on_device, fill_memory(skeleton, rest, spare))
    return plan if plan.tier_bytes()["host"] <= limit else None


def _computed_there(skeleton: DeviceSkeleton, every: Resident) -> Resident:
    """All but the CPU's attention, and embedding rows that are only looked up: the CPU does that in no time."""
    kept = dict(every)
    if not skeleton.spec.tied:
        del kept["embed"]
    for layer in range(skeleton.split.attention_layers, len(skeleton.spec.layers)):
        del kept[f"{layer}.attn"]
    return kept


def spare_bytes(plan: Plan, tier: str, limit: int) -> int | None:
    """What is left for weights that stay, with what the last huge page of their arena has left."""
    spare = limit - plan.tier_bytes().get(tier, 0)
    if spare < 0:
        return None
    arena = next((a for a in plan.arenas if a.name == f"{tier}.weights"), None)
    rounding = arena.bytes - Layout(plan).filled_bytes(arena.name) if arena else 0
    return rounding + spare // ARENA_ALIGN * ARENA_ALIGN


def _fill_device(skeleton: DeviceSkeleton, budget: int) -> Resident:
    """The head, whole; attention of the device's layers; of FFNs even shares."""
    found: Resident = {}
    vocab = vocabulary(skeleton.spec, skeleton.weights)
    if vocab.nbytes <= budget:
        found[vocab.key] = vocab.granules
        budget -= vocab.nbytes
    every = parts(skeleton.spec, skeleton.weights)
    attention = [p for p in every if p.kind == "attn" and p.layer < skeleton.split.attention_layers]
    for wanted in (attention, [part for part in every if part.kind == "ffn"]):
        budget -= share_out(wanted, {part.key: part.granules for part in wanted}, budget, found)
    return found


def fill_memory(skeleton: DeviceSkeleton, rest: Resident, budget: int) -> Resident:
    """Even shares of everything that is not on the device; embedding rows that are only looked up come last."""
    found: Resident = {}
    gathered = "" if skeleton.spec.tied else "embed"
    every = [p for p in parts(skeleton.spec, skeleton.weights) if p.kind not in PINNED and rest.get(p.key, 0)]
    budget -= share_out([part for part in every if part.key != gathered], rest, budget, found)
    embed = next((part for part in every if part.key == gathered), None)
    if embed is not None and embed.nbytes <= budget:
        found[gathered] = embed.granules
    return found


def share_out(wanted: list[Part], rest: Resident, budget: int, found: Resident) -> int:
    """Adds even shares of `rest` (granules, part by part) to `found`; returns the bytes that they take."""
    total = sum(rest[part.key] * part.granule_bytes for part in wanted)
    share, taken = min(1.0, max(0, budget) / total) if total else 0.0, 0
    for part in wanted:
        found[part.key] = int(rest[part.key] * share)
        taken += found[part.key] * part.granule_bytes
    for part in wanted:  # the rest, a granule at a time
        if taken + part.granule_bytes <= budget and found[part.key] < rest[part.key]:
            found[part.key] += 1
            taken += part.granule_bytes
    return taken


def _bytes_of(skeleton: DeviceSkeleton, stays: Resident) -> int:
    return sum(stays.get(part.key, 0) * part.granule_bytes for part in parts(skeleton.spec, skeleton.weights))


def _name(plan: Plan, split: Split) -> str:
    """What `plan --compare` will call it."""
    if all(unit.home == DEVICE or unit.part == "embed" for unit in plan.units):
        return WHOLE
    cpu = "" if split.attention_layers == len(plan.target.spec.layers) else ", attention of some layers on the CPU"
    where = ", KV in RAM" if split.kv_home == "host" else ""
    return f"device memory, {split.name}{cpu}{where}" + ("" if split.prompts else ", prompts too")


def _reasons(plan: Plan, skeleton: DeviceSkeleton, split: Split) -> tuple[str, ...]:
    sizes, homes = plan.parts, {DEVICE: 0, "host": 0, "disk0": 0}
    computed = dict.fromkeys(("lifted", "by the CPU"), 0)
    for unit in plan.units:
        nbytes = (unit.hi - unit.lo) * sizes[unit.part].granule_bytes
        homes[unit.home] += nbytes
        if unit.home != DEVICE and (unit.part != "embed" or plan.target.spec.tied):
            computed["lifted" if unit.decode == DEVICE else "by the CPU"] += nbytes
    total = format_bytes(sum(homes.values()))
    where = f"{format_bytes(homes[DEVICE])} of {total} of weights stay in device memory"
    if homes["host"]:
        where += f", {format_bytes(homes['host'])} in RAM"
    if homes["disk0"]:
        where += f", {format_bytes(homes['disk0'])} on the disk"
    found = [where]
    if any(computed.values()):
        shares = [f"{format_bytes(nbytes)} {how}" for how, nbytes in computed.items() if nbytes]
        found.append(f"of what is not there, each token: {' and '.join(shares)}")
        if computed["lifted"]:
            found.append(lift_reason(skeleton.machine, skeleton.weights, skeleton.ring_bytes))
        if split.prompts and computed["by the CPU"]:
            found.append("where a prompt is read, the device computes the CPU's share of FFNs too")
    kv = plan.kv[0].format.name
    at_home = [home for home in plan.kv if home.home == DEVICE]
    layers = sum(home.layers[1] - home.layers[0] for home in at_home)
    found.append(f"KV in {kv}, of {layers} of {len(plan.target.spec.layers)} layers in device memory")
    return tuple(found)
