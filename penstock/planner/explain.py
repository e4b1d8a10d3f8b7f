"""Explains a plan in a table: where its bytes lie, how fast it will be, what would make it faster, and why it was
chosen. In short it is a prediction, what binds, and a line of advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.planner.predict import COLD_PASSES, Prediction
from penstock.planner.solve import Solved
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import CPU, DISK, GPU, HOST, Lane, Tier, disk, is_device, is_disk
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.planner.what_if import WhatIf

PART_KINDS = {
    "attn": "attention",
    "ffn": "FFN",
    "shared": "shared experts",
    "experts": "experts",
    "router": "routers",
    "embed": "embedding",
    "head": "head",
    "norms": "norms",
    "edges": "norms",
}
ARENAS = {
    "weights": "weights that stay",
    "ring": "ring that weights stream through",
    "cache": "caches for experts",
    "asked": "records of active neurons",
    "recent": "records that were active often and lately",
    "kv": "KV cache",
    "window": "KV on its way",
    "act": "activations, logits",
    "scratch": "scratch",
    "staging": "embedding rows in flight",
    "stage": "between disk and device",
}
_TIERS: dict[Tier, str] = {HOST: "RAM", DISK.tier: "disk", disk(1).tier: "second disk", GPU.executor: "device"}
_LANES: dict[Lane, str] = {
    CPU: "the processor",
    DISK.reads: "the disk",
    disk(1).reads: "the second disk",
    DISK.writes: "writes to the disk",
    GPU.kernels: "the device",
    GPU.to_device: "the link to the device",
    GPU.to_host: "the link from the device",
}
_PAYS = 0.02  # a smaller gain is worth no command
_SAME = 0.005  # a smaller relative change of speed counts as none


@dataclass(frozen=True)
class Width:
    """How wide an error band is: from prediction ÷ factor to prediction × factor. `runs`: how many earlier runs like
    the predicted one there are. `known`: whether the factor comes from these runs. If there are too few, it is
    assumed. `crowded`: whether that is for a machine that others kept busy when it was measured."""

    factor: float = 1.25
    runs: int = 0
    known: bool = False
    crowded: bool = False


@dataclass(frozen=True)
class Band:
    """The error bands of a prediction: `decode` of tokens/s, `ttft` of the time to the first token."""

    decode: Width = Width()
    ttft: Width = Width()


@dataclass(frozen=True)
class Limit:
    """The bytes of a tier that a plan takes, and the bytes that it may take."""

    tier: Tier
    used_bytes: int
    limit_bytes: int


def limits(solved: Solved, ask: Ask, machine: MachineSpec) -> tuple[Limit, ...]:
    """For each tier of the machine, the bytes that the plan takes and their limit. Of the disk it takes the packed
    model and KV that is at home there."""
    used = solved.plan.tier_bytes()
    asked: dict[Tier, int | None] = {HOST: ask.host_memory_bytes, GPU.executor: ask.device_memory_bytes}
    every = []
    for tier in machine.tiers:
        packed = packed_bytes(solved.plan) if tier.name == DISK.tier else 0
        limit = asked.get(tier.name)
        every.append(Limit(tier.name, packed + used.get(tier.name, 0), tier.bytes if limit is None else limit))
    return tuple(every)


def packed_bytes(plan: Plan) -> int:
    """Bytes of all weights as they lie on the disk. Weights that are read once and stay in memory count too."""
    return sum(part.nbytes for part in plan.parts.values())


def table(
    solved: Solved, ask: Ask | None = None, machine: MachineSpec | None = None, band: Band | None = None,
    what_if: WhatIf | None = None, *, why: bool = True,
) -> str:  # fmt: skip
    """The table, without a newline at its end. Limits, the error band and what would make the plan faster are left out
    if their arguments are not given. Without `why` it has no more than where weights lie, the sums of memory, the
    prediction, what binds, and one line of advice."""
    tier_limits = limits(solved, ask, machine) if ask is not None and machine is not None else ()
    p, cannot_run = solved.prediction, _cannot_run(solved)
    blocks = [_weights(solved.plan), _memory(solved.plan, tier_limits, arenas=why)]
    if why:
        changes = [] if what_if is None else others(solved, what_if, ask)
        blocks += [_speed(p, band), changes, [*cannot_run, *_not_yet(solved)], [f"· {r}" for r in solved.reasons]]
    else:
        advised = [] if what_if is None else [advice(solved, what_if), *commands(solved, what_if)]
        blocks.append([*_promise(p, band), *advised, *cannot_run])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _weights(plan: Plan) -> list[str]:
    """Lines with the bytes of each kind of part in each home."""
    homes = sorted({unit.home for unit in plan.units}, key=lambda home: (is_disk(home), home))
    rows: dict[str, dict[Tier, int]] = {}
    parts = plan.parts
    for unit in plan.units:
        part = parts[unit.part]
        row = rows.setdefault(PART_KINDS[part.kind], dict.fromkeys(homes, 0))
        row[unit.home] += (unit.hi - unit.lo) * part.granule_bytes
    name = plan.target.weights.name
    lines = [f"{'weights (' + name + ')':38}" + "".join(f"{tier_name(home):>14}" for home in homes)]
    for kind, row in rows.items():
        lines.append(f"  {kind:36}" + "".join(f"{format_bytes(row[home]) if row[home] else '–':>14}" for home in homes))
    totals = {home: sum(row[home] for row in rows.values()) for home in homes}
    lines.append(f"  {'together':36}" + "".join(f"{format_bytes(totals[home]):>14}" for home in homes))
    return lines


def beside_arenas(plan: Plan, tier: Tier) -> list[tuple[str, int]]:
    """(label, bytes) of what a tier holds beside its arenas."""
    if tier == HOST:
        return [("the process itself", plan.process_bytes)]
    return [("its driver and libraries", plan.context_bytes)] if plan.context_bytes else []


def _memory(plan: Plan, tier_limits: tuple[Limit, ...], arenas: bool) -> list[str]:
    """Lines with the bytes that the plan takes of each tier, the tier's limit, and with `arenas` the bytes of each."""
    of = {limit.tier: limit.limit_bytes for limit in tier_limits}
    lines = []
    for tier, total in plan.tier_bytes().items():
        if is_disk(tier):
            continue
        limit = f" of {format_bytes(of[tier])}" if tier in of else ""
        lines.append(f"{'memory of ' + tier_name(tier):38}{format_bytes(total):>14}{limit}")
        entries = [(ARENAS[a.name.split(".")[1]], a.bytes) for a in plan.arenas if a.tier == tier]
        entries += beside_arenas(plan, tier)
        if arenas:
            lines += [f"  {what:36}{format_bytes(nbytes):>14}" for what, nbytes in entries]
    for each in tier_limits:
        bound = format_bytes(each.limit_bytes)
        if each.tier == DISK.tier:
            short = "" if each.used_bytes <= each.limit_bytes else ": too little"
            kv = " and KV" if each.tier in plan.tier_bytes() else ""
            name = f"{tier_name(each.tier)}, all weights{kv}"
            lines.append(f"{name:38}{format_bytes(each.used_bytes):>14} of {bound}{short}")
        elif is_device(each.tier) and not each.used_bytes:
            why = "not used, the CPU alone is as fast"
            lines.append(f"{tier_name(each.tier):38}{'–':>14} of {bound}: {why}")
    on_disk = plan.tier_bytes().get(DISK.tier, 0)
    shared = f" with room for {plan.kv_pages * plan.page_tokens} together" if plan.kv_pages else ""
    lines.append(
        f"context {plan.context} tokens × {plan.batch_seqs} sequences{shared}, KV in {plan.kv[0].format.name}"
        + (f", {format_bytes(on_disk)} of it on the disk" if on_disk else "")
    )
    return lines


def _promise(p: Prediction, band: Band | None) -> list[str]:
    """Lines with the predicted speed, the busiest lane, and what a token reads from a disk."""
    read = f", {format_bytes(p.disk_bytes_per_token)} read a token" if p.disk_bytes_per_token else ""
    return [_predicted(p, band), f"bound by {lane_name(p.bound_by)}, {p.lane_share[p.bound_by]:.0%} busy{read}"]


def _predicted(p: Prediction, band: Band | None) -> str:
    first, speed = format_seconds(p.ttft_s), f"{rate(p.decode_tokens_per_s)} tokens/s"
    if band is not None:
        lo, hi = spread(p.ttft_s, band.ttft.factor)
        first += f" ({format_seconds(lo)} to {format_seconds(hi)})"
        speed += f" ({rates(p.decode_tokens_per_s, band.decode.factor)})"
    return f"predicted: first token after {first}, then {speed}"


def _speed(p: Prediction, band: Band | None) -> list[str]:
    """Lines with the predicted speed, the error bands, the busy lanes and the use of caches."""
    shares = ", ".join(f"{lane_name(lane)} {share:.0%}" for lane, share in sorted(p.lane_share.items()))
    lines = [_predicted(p, band)]
    if band is not None:
        lines += _band(band)
    lines.append(f"bound by {lane_name(p.bound_by)} (busy while decoding: {shares})")
    if p.disk_bytes_per_token:
        lines.append(f"read from disk per token: {format_bytes(p.disk_bytes_per_token)}")
    if p.experts is not None:
        use = p.experts
        of = f"{use.missed:.1f} of {use.wanted:.0f} that a token wants"
        if use.absent is None:
            lines.append(f"experts: {of} are missing, {use.hit_rate:.0%} are there")
        else:
            lines.append(f"experts: {of} are not on the device, {use.hit_rate:.0%} are there")
            lines.append(f"  {use.absent:.1f} of these are not in RAM either, {use.hit_rate_beneath:.0%} are there")
        if use.guessed or use.wrong:
            lines.append(f"  {use.guessed:.1f} of the missing ones are guessed a layer ahead, {use.wrong:.1f} wrongly")
        lines.append(f"  {use.source}")
        if use.cold_s:
            lines.append(f"  the first {COLD_PASSES} tokens, before caches are warm: {format_seconds(use.cold_s)}")
    return lines


def _band(band: Band) -> list[str]:
    """One line about both error bands, or two lines if they differ."""
    if _width(band.decode) == _width(band.ttft):
        return [f"error band {_width(band.decode)}"]
    return [f"error band of tokens/s {_width(band.decode)}", f"error band of the first token {_width(band.ttft)}"]


def _width(width: Width) -> str:
    between = f"× or ÷ {width.factor:.2f}"
    if width.known:
        return f"{between}, from the last {width.runs} runs like this one on this machine"
    known = f"{'too few' if width.runs else 'no'} runs like this one on this machine are known"
    busy = ", and others kept it busy when it was measured: all is foretold for free cores" if width.crowded else ""
    return f"{between}, assumed: {known}{busy}"


def _cannot_run(solved: Solved) -> list[str]:
    """A line that says why this version cannot run the model, if so."""
    spec = solved.plan.target.spec
    why = f"not run by this version: models of type {spec.model_type} can only be planned ({spec.cannot_run})"
    return [why] if spec.cannot_run else []


def _not_yet(solved: Solved) -> list[str]:
    """Lines that say which plans would be better, and why this version cannot run them."""
    lines = []
    for candidate, p in solved.not_yet:
        why = "; ".join(filter(None, (candidate.cannot_run, candidate.lossy)))
        speed = f"{rate(p.decode_tokens_per_s)} tokens/s, first token after {format_seconds(p.ttft_s)}"
        lines.append(f"not yet run by this version: {candidate.strategy} would give {speed} ({why})")
    return lines


def advice(solved: Solved, what_if: WhatIf) -> str:
    """What would make the plan faster by most, in one line."""
    ways = [
        ("one more GiB of RAM", what_if.one_more_gib),
        ("one more GiB of device memory", what_if.one_more_device_gib),
        ("a disk twice as fast", what_if.faster_disk),
        ("a link twice as fast", what_if.faster_link),
        *((f"--weights {fmt.name}, at some cost in quality,", p) for fmt, p in what_if.other_formats),
    ]
    now = solved.prediction.decode_tokens_per_s
    there = [(p.decode_tokens_per_s, what) for what, p in ways if p is not None]
    speed, what = max(there, key=lambda each: each[0], default=(0.0, ""))
    if gain(speed, now) < _SAME:
        return "faster: nothing that is known here" if there else "faster: all weights are in memory already"
    return f"faster: {what} would give {rate(speed)} tokens/s ({gain(speed, now):+.0%})"


def commands(solved: Solved, what_if: WhatIf) -> list[str]:
    """Lines about commands of ours that would make the plan faster."""
    now = solved.prediction.decode_tokens_per_s
    lines = []
    for what, condition, prediction in what_if.commands:
        then, given = prediction.decode_tokens_per_s, f", {condition}," if condition else ""
        if gain(then, now) >= _PAYS:
            lines.append(f"faster: `{what}`{given} would give {rate(then)} tokens/s ({gain(then, now):+.0%})")
    return lines


def others(solved: Solved, what_if: WhatIf, ask: Ask | None) -> list[str]:
    """Lines about the speed with one more GiB of RAM or of device memory, with a faster disk or link, and in other
    formats."""
    now = solved.prediction.decode_tokens_per_s
    lines = []
    if what_if.one_more_gib is not None:
        then = what_if.one_more_gib.decode_tokens_per_s
        change = gain(then, now)
        if abs(change) >= _SAME:
            lines.append(f"one more GiB of RAM: {rate(then)} tokens/s ({change:+.0%})")
        else:
            capped = ask is not None and ask.resident_bytes is not None
            lines.append("one more GiB of RAM: no faster" + (", --resident keeps the rest on disk" if capped else ""))
    elif not solved.plan.ring_bytes:
        lines.append("one more GiB of RAM: no faster, all weights are in memory")
    if what_if.one_more_device_gib is not None:
        then = what_if.one_more_device_gib.decode_tokens_per_s
        lines.append(f"one more GiB of device memory: {rate(then)} tokens/s ({gain(then, now):+.0%})")
    for what, prediction in (("disk", what_if.faster_disk), ("link", what_if.faster_link)):
        if prediction is not None:
            then = prediction.decode_tokens_per_s
            change = gain(then, now)
            much = f"{rate(then)} tokens/s ({change:+.0%})" if abs(change) >= _SAME else "no faster"
            lines.append(f"a {what} twice as fast: {much}")
    if what_if.other_formats:
        speeds = "; ".join(f"{f.name} {rate(p.decode_tokens_per_s)}" for f, p in what_if.other_formats)
        best, fastest = max(what_if.other_formats, key=lambda entry: entry[1].decode_tokens_per_s)
        name, faster = solved.plan.target.weights.name, fastest.decode_tokens_per_s > now * (1 + _SAME)
        verdict = f"{best.name} would be faster" if faster else f"none is faster than {name}"
        lines.append(f"in other formats, tokens/s: {speeds} ({verdict})")
    return lines + commands(solved, what_if)


def gain(then: float, now: float) -> float:
    """The relative change of a speed: 0.1 for a tenth faster."""
    return then / now - 1


def spread(value: float, factor: float) -> tuple[float, float]:
    """The ends of an error band. Errors multiply: half of a prediction is as far from it as twice."""
    return value / factor, value * factor


def rate(per_s: float) -> str:
    """Tokens/s with three significant digits or so: 0, 0.119, 7.21, 38.4, 412, 2139, 1.23e+06."""
    if per_s == 0:
        return "0"
    return f"{per_s:.2e}" if per_s >= 1e6 else f"{per_s:.{_digits(per_s)}f}"


def rates(per_s: float, factor: float) -> str:
    """The ends of the error band of a rate, such as '6.55 to 7.92', with as many digits as `rate` gives the rate."""
    lo, hi = spread(per_s, factor)
    return f"{lo:.{_digits(per_s)}f} to {hi:.{_digits(per_s)}f}"


def _digits(value: float) -> int:
    for digits, least in enumerate((100, 10, 1, 0.1, 0.01)):
        if value >= least:
            return digits
    return 5


def tier_name(tier: Tier) -> str:
    """The name of a tier for people: "RAM" for `host`."""
    return _TIERS.get(tier, tier)


def lane_name(lane: Lane) -> str:
    """The name of a lane for people: "the disk" for `disk0`."""
    return _LANES.get(lane, lane)
