"""As much as fits stays in RAM, the rest streams from the disk: placements CC and DC.

The bytes read per token do not depend on which granules stay, so they stay spread evenly: of every
part the same share. Then the disk's work lies evenly under the computing, and a small ring is enough. A tied
embedding stays first of all: it is the head, and a row of it would otherwise be read on its own each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from penstock.errors import DoesNotFit
from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.limits import host_limit_bytes
from penstock.planner.solve.skeleton import (
    CHUNK_ROWS,
    MIN_CHUNK_ROWS,
    PINNED,
    UNIT_BYTES,
    Resident,
    Skeleton,
    chunk_options,
    kv_options,
    ring_options,
)
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import head_key, parts
from penstock.spec.plan import Plan
from penstock.units import MIB, format_bytes, format_mib_up


def candidates(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, near_ring_bytes: int | None = None
) -> Iterator[Candidate]:
    """Plans that fit, small rings first. Raises DoesNotFit where none does. `near_ring_bytes`: only with the ring that
    is nearest to it, for each way to keep KV and read prompts.

    KV stays in memory where it can: at the end of the context a byte of it saves as much reading as a byte of weights,
    before that less, and the disk is spared. Where there is no room for it, part of it, or all, goes to the disk.
    """
    limit = host_limit_bytes(ask, machine)
    least_ring, *rings = ring_options(spec, weights)
    most = max(1, len(rings))
    if near_ring_bytes is not None:
        rings, most = sorted(rings, key=lambda ring: abs(ring - near_ring_bytes)), 1
    chunks, any_found = chunk_options(ask), False
    for kv_layers in kv_options(ask, spec):
        for chunk_rows in chunks:
            skeleton = Skeleton(ask, spec, weights, machine.process_bytes, chunk_rows, kv_layers)
            # The smallest ring holds one granule, so nothing overlaps: only where no other fits.
            found = list(islice(_fitting(skeleton, rings, limit), most))
            found = found or list(_fitting(skeleton, [least_ring], limit))
            yield from found
            any_found |= bool(found)
            if found and chunk_rows <= CHUNK_ROWS:
                break
        if kv_layers == len(spec.layers) and any_found and chunk_rows > MIN_CHUNK_ROWS:
            return
    if any_found:
        return
    for skeleton in _least(ask, spec, weights, machine.process_bytes):
        least = list(_fitting(skeleton, [least_ring], limit))
        if least:
            yield from least
            return
    require_minimum(ask, spec, weights, machine.process_bytes, limit)
    raise AssertionError("the least plan is among the candidates")


def require_minimum(ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int, limit: int) -> None:
    """Raises DoesNotFit where not even the least plan fits. Needs no machine, so it can be asked before a probe."""
    minimum = minimum_bytes(ask, spec, weights, process_bytes)
    if minimum <= limit:
        return
    half = replace(ask, context=max(ask.prompt_tokens + ask.output_tokens, (ask.context or 1) // 4))
    shorter = minimum_bytes(half, spec, weights, process_bytes)
    hint = f"; with --context {half.context} too, {format_mib_up(shorter)}" if shorter < minimum - 8 * MIB else ""
    raise DoesNotFit(
        f"host memory of {format_bytes(limit)} is too little: this model needs at least {format_bytes(minimum)}"
        f" (--host-memory {format_mib_up(minimum)}{hint})",
        tier="host",
        need_bytes=minimum,
        have_bytes=limit,
        minimum_bytes=minimum,
    )


def minimum_bytes(ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int) -> int:
    """The least host memory with which the ask runs: every matrix streams through the smallest ring, or for
    tiny models everything stays."""
    ring_bytes = ring_options(spec, weights)[0]
    least = _least(ask, spec, weights, process_bytes)
    plans = [skeleton.plan(ring_bytes, {}) for skeleton in least]
    if ask.resident_bytes is None:
        plans += [skeleton.plan(0, None) for skeleton in least]
    return min(plan.tier_bytes()["host"] for plan in plans)


def _least(ask: Ask, spec: ModelSpec, weights: Format, process_bytes: int) -> list[Skeleton]:
    """The smallest skeletons: with KV in memory, and with all of it on the disk, a layer at a time."""
    kinds = [(len(spec.layers), "overlapped")] if ask.kv_home != "disk" else []
    kinds += [(0, "saving")] if ask.kv_home != "memory" else []
    return [Skeleton(ask, spec, weights, process_bytes, MIN_CHUNK_ROWS, *kind) for kind in kinds]


def _fitting(skeleton: Skeleton, rings: list[int], limit: int) -> Iterator[Candidate]:
    """Everything in memory where that fits, else a plan for each ring that does."""
    ask = skeleton.ask
    if _may_stay(skeleton) is None:
        whole = skeleton.plan(0, None)
        if whole.tier_bytes()["host"] <= limit:
            if skeleton.chunk_rows <= CHUNK_ROWS:  # longer ones save reading, of which there is none
                yield Candidate("RAM", whole, _reasons(whole, ask))
            return
    for ring in rings:
        plan = _streaming(skeleton, ring, limit)
        if plan is not None:
            yield Candidate("RAM and disk", plan, _reasons(plan, ask))


def _may_stay(skeleton: Skeleton) -> int | None:
    """Bytes of weights that the user lets stay; None: all of them."""
    total_bytes = sum(part.nbytes for part in parts(skeleton.spec, skeleton.weights))
    asked = skeleton.ask.resident_bytes
    return None if asked is None or asked >= total_bytes else asked


def _streaming(skeleton: Skeleton, ring_bytes: int, limit: int) -> Plan | None:
    """Fills what the rest of the plan leaves with resident granules; None where the rest alone is too big."""
    spec, weights = skeleton.spec, skeleton.weights
    bare = skeleton.plan(ring_bytes, {})
    spare = limit - bare.tier_bytes()["host"]
    if spare < 0:
        return None
    pinned = sum(part.nbytes for part in parts(spec, weights) if part.kind in PINNED)
    # The weights' arena is rounded up to huge pages; what its last page has left is usable too.
    rounding = next(a.bytes for a in bare.arenas if a.name == "host.weights") - pinned
    budget = rounding + spare // ARENA_ALIGN * ARENA_ALIGN
    may_stay = _may_stay(skeleton)
    if may_stay is not None:
        budget = min(budget, max(0, may_stay - pinned))
    plan = skeleton.plan(ring_bytes, _spread(spec, weights, budget))
    return plan if plan.tier_bytes()["host"] <= limit else None


def _spread(spec: ModelSpec, weights: Format, budget: int) -> Resident:
    """Granules that stay, of every part the same share, within `budget` bytes."""
    streamed = [part for part in parts(spec, weights) if part.kind not in PINNED]
    resident: Resident = {}
    embed = next(part for part in streamed if part.kind == "embed")
    if spec.tied and embed.nbytes <= budget:
        resident["embed"] = embed.granules
        budget -= embed.nbytes
    # A gathered embedding reads one granule a token: it stays only if everything does.
    spread = [part for part in streamed if part.kind != "embed" or (spec.tied and part.key not in resident)]
    spread = [part for part in spread if part.key != "embed" or head_key(spec) == "embed"]
    total = sum(part.nbytes for part in spread)
    share = min(1.0, budget / total) if total else 0.0
    for part in spread:
        resident[part.key] = int(part.granules * share)
        budget -= resident[part.key] * part.granule_bytes
    for part in spread:  # the rest, a granule at a time
        if budget >= part.granule_bytes and resident[part.key] < part.granules:
            resident[part.key] += 1
            budget -= part.granule_bytes
    return resident


def _reasons(plan: Plan, ask: Ask) -> tuple[str, ...]:
    found = plan.parts
    total_bytes = sum(part.nbytes for part in found.values())
    in_memory = next((home.layers[1] for home in plan.kv if home.home == "host"), 0)
    layers = len(plan.target.spec.layers)
    kv = f"KV in {plan.kv[0].format.name}: {'asked for' if ask.kv else 'the width of the checkpoint'}"
    if in_memory < layers:
        which = "all layers" if not in_memory else f"{layers - in_memory} of {layers} layers"
        why = "asked for" if ask.kv_home else "it would not fit"
        kv += f"; that of {which} lives on the disk ({why}), and comes into memory a layer ahead"
    if not plan.ring_bytes:
        return (f"all {format_bytes(total_bytes)} of weights stay in memory", kv)
    stays = sum((u.hi - u.lo) * found[u.part].granule_bytes for u in plan.units if u.home == "host")
    ring = plan.ring_bytes["host"]
    return (
        f"{format_bytes(stays)} of {format_bytes(total_bytes)} of weights stay in memory, spread evenly over the "
        f"layers; the rest streams from disk",
        f"a ring of {format_bytes(ring)} in units of at most {format_bytes(min(UNIT_BYTES, ring // 4))}",
        f"prompts in chunks of {plan.chunk_rows} tokens: each chunk reads what streams once",
        kv,
    )
