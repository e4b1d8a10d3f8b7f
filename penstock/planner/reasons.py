"""Tells why a plan is as it is: a sentence for each choice, from the plan alone. `paper_reasons` has the sentences
about what the papers' formulas say."""

from __future__ import annotations

from penstock.graph.arenas import Layout
from penstock.planner.homes import kv_layers, weights_bytes
from penstock.spec.ask import Ask
from penstock.spec.part_keys import gathered_key
from penstock.spec.places import DISK, GPU, HOST, is_disk
from penstock.spec.plan import UNIT_BYTES, Plan
from penstock.units import format_bytes


def without_device(plan: Plan, ask: Ask) -> tuple[str, ...]:
    """Sentences about where the weights lie, about chunks of prompts, and about KV."""
    homes, in_memory = weights_bytes(plan), kv_layers(plan, HOST)
    total_bytes = sum(homes.values())
    layers = len(plan.target.spec.layers)
    kv = f"KV in {plan.kv[0].format.name}: {'asked for' if ask.kv else 'the width of the checkpoint'}"
    if in_memory < layers:
        which = "all layers" if not in_memory else f"{layers - in_memory} of {layers} layers"
        why = "asked for" if ask.kv_home else "it would not fit"
        kv += f"; that of {which} lives on the disk ({why}), and comes into memory a layer ahead"
    if DISK.tier not in homes:
        return (f"all {format_bytes(total_bytes)} of weights stay in memory", kv)
    if plan.caches:
        told, read = [caches(plan)], "all experts"
        if guesses := max(cache.guesses for cache in plan.caches):
            told.append(
                f"up to {guesses} missing experts that a token will want are guessed a layer ahead, and loaded:"
                " that gains time by what routers said"
            )
    elif any(unit.asked for unit in plan.units):
        told, read = [asked(plan)], "all neurons"
    else:
        ring, read = plan.ring_bytes.get(HOST, 0), "what streams"
        told = [
            f"{format_bytes(homes.get(HOST, 0))} of {format_bytes(total_bytes)} of weights stay in memory, spread"
            " evenly over the layers; the rest streams from disk",
            f"a ring of {format_bytes(ring)} in units of at most {format_bytes(min(UNIT_BYTES, ring // 4))}",
        ]
        if plan.guests:
            told.append(guests(plan, ask))
    return *told, f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads {read} once", kv


def guests(plan: Plan, ask: Ask) -> str:
    """A sentence about units that stay in KV pages."""
    nbytes = sum(guest.slot.nbytes for guest in Layout(plan).guests.values())
    stays = f"up to {format_bytes(nbytes)} of what streams stays in KV pages as long as no sequence has them"
    if plan.sequences > 1:
        return f"{stays}; what is predicted is of full pages"
    tokens = ask.sequence_tokens
    return f"{stays}: what is predicted is of {tokens} tokens, and more of them slow it down bit by bit"


def caches(plan: Plan) -> str:
    """A sentence about a plan's caches in RAM."""
    slots = [cache.slots for cache in plan.caches if cache.executor == HOST]
    part = plan.parts[f"{plan.caches[0].layer}.experts"]
    some = f"{min(slots)} to {max(slots)}" if min(slots) < max(slots) else str(slots[0])
    return (
        f"caches for {some} of {part.experts} experts a layer ({format_bytes(sum(slots) * part.least_bytes)}):"
        f" a token loads those that it wants and that are not there, {format_bytes(part.least_bytes)} each"
    )


def asked(plan: Plan) -> str:
    """A sentence about the part of FFNs that stays in memory."""
    parts, units = plan.parts, [unit for unit in plan.units if unit.asked]
    granules = sum(part.granules for part in parts.values() if part.kind == "ffn")
    share = 1 - sum(unit.hi - unit.lo for unit in units) / granules
    hot = f"{share:.0%} of the FFNs' neurons stay whole in memory, the first ones"
    slots = sum(unit.recent_slots for unit in units)
    if slots:
        of = sum(hi - lo for lo, hi in map(plan.unit_rows, units))
        hot += f"; slots for {slots / of:.0%} of the others' records keep those that were asked for most and lately"
    if plan.sparsity == "predict":
        return f"{hot}; while decoding the disk is asked for the records of the others that predictors call active"
    return (
        f"{hot}; of the others what is activated stays, and while decoding the disk is asked for the records of those"
        " that fire"
    )


def shared_pages(plan: Plan) -> tuple[str, ...]:
    """A sentence about pages that sequences share, if they do."""
    if not plan.kv_pages:
        return ()
    seqs, layout = plan.sequences, Layout(plan)
    tokens = plan.kv_pages * plan.page_tokens
    pool_bytes = sum(arena.bytes for arena in plan.arenas if arena.name.endswith(".kv"))
    whole_bytes = pool_bytes // plan.kv_pages * seqs * layout.kv.pages_per_seq
    return (
        f"KV room for {tokens} tokens of {seqs} sequences together, in pages of {plan.page_tokens} that are handed out"
        f" as they grow: {format_bytes(pool_bytes)}, where whole contexts would take {format_bytes(whole_bytes)}",
    )


def chosen_values(plan: Plan) -> tuple[str, ...]:
    """Sentences about attention to the best positions alone, if the plan has it."""
    if plan.value_share == 1:
        return ()
    return (
        f"a query reads all keys, and the values of its best {plan.value_share:.3g} of the positions alone",
        "this is lossy (top-k): `penstock eval` prices it",
    )


_ELSEWHERE = {HOST: "in RAM", DISK.tier: "on the disk"}


def beside_device(plan: Plan, lifts: str, prompts: bool) -> tuple[str, ...]:
    """Sentences about where the weights lie, about experts, about other weights outside device memory, and about KV.
    `lifts`: why units that are lifted have their size. `prompts`: while a prompt is read, the device computes the CPU's
    granules too."""
    homes, parts, gathered = weights_bytes(plan), plan.parts, gathered_key(plan.target.spec)
    computed = dict.fromkeys(("lifted", "by the CPU"), 0)
    for unit in plan.units:
        counts = unit.part != gathered and parts[unit.part].kind not in ("experts", "router")
        if unit.home != GPU.executor and counts:
            computed["lifted" if unit.decode == GPU.executor else "by the CPU"] += plan.unit_bytes(unit)
    total = format_bytes(sum(homes.values()))
    where = [f"{format_bytes(homes.get(GPU.executor, 0))} of {total} of weights stay in device memory"]
    where += [f"{format_bytes(homes[home])} {place}" for home, place in _ELSEWHERE.items() if homes.get(home)]
    told = [", ".join(where), *_experts(plan)]
    if any(computed.values()):
        shares = [f"{format_bytes(nbytes)} {how}" for how, nbytes in computed.items() if nbytes]
        told.append(f"of what is not there, each token: {' and '.join(shares)}")
        if computed["lifted"]:
            told.append(lifts)
        if prompts and computed["by the CPU"]:
            told.append("where prompts of many tokens are read, the device computes the CPU's share of FFNs too")
    kv, layers = plan.kv[0].format.name, len(plan.target.spec.layers)
    told.append(f"KV in {kv}, of {kv_layers(plan, GPU.executor)} of {layers} layers in device memory")
    return tuple(told)


def lifted_units(nbytes: int, ring_bytes: int, fixed_s: float, fixed_share: float) -> str:
    """Why units that are lifted have at most `nbytes`. `fixed_s`: seconds that each lift takes beside its bytes;
    `fixed_share`: the largest share of the copy's time that these may be."""
    why = f"at most {fixed_share:.0%} of its copy"
    if nbytes == ring_bytes // 4:
        why = f"and a ring of {format_bytes(ring_bytes)} should hold four"
    fixed = f"each costs {fixed_s * 1e6:.0f} µs beside its bytes"
    return f"lifted in units of at most {format_bytes(nbytes)}: {fixed}, {why}"


def _experts(plan: Plan) -> list[str]:
    """Sentences about where experts are and who computes them; none of a model without experts."""
    parts, told = plan.parts, list[str]()
    every = sum(part.kind == "experts" for part in parts.values())
    if layers := layers_there(plan):
        told.append(f"experts of {layers} of {every} layers are among them, with their routers")
    there = [cache for cache in plan.caches if cache.executor != HOST]
    if layers < every:
        which = "the other" if layers or there else "the"
        told.append(f"the CPU computes {which} experts: {_where_experts(plan)}")
    if there:
        slots, rows = [cache.slots for cache in there], there[0].lifted_rows
        told.append(
            f"caches in device memory for {min(slots)} of {parts[f'{there[0].layer}.experts'].experts} experts a"
            f" layer: the CPU computes what is missing for fewer than {rows} rows, and it is lifted for later tokens"
        )
    if len(there) < len(plan.caches):
        told.append(f"beneath these in RAM {caches(plan)}" if there else caches(plan))
    if any(parts[unit.part].kind == "experts" and is_disk(unit.home) for unit in plan.units):
        told.append(f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads once what is not in RAM")
    return told


def _where_experts(plan: Plan) -> str:
    """Where the experts lie, and why the CPU takes them."""
    parts, nbytes = plan.parts, {True: 0, False: 0}
    for unit in plan.units:
        if parts[unit.part].kind == "experts" and unit.home != GPU.executor:
            nbytes[is_disk(unit.home)] += plan.unit_bytes(unit)
    if not nbytes[True]:
        return f"all {format_bytes(nbytes[False])} of them are in RAM, which it reads faster than the link"
    some = f"{format_bytes(nbytes[False])} of them stay in RAM, " if nbytes[False] else ""
    return f"{some}{format_bytes(nbytes[True])} are at home on the disk"


def layers_there(plan: Plan) -> int:
    """How many layers have their experts at home on the device."""
    parts = plan.parts
    return len({u.part for u in plan.units if u.home == GPU.executor and parts[u.part].kind == "experts"})
