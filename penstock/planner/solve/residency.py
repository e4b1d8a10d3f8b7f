"""As much as fits stays in RAM, the rest streams from the disk: placements CC and DC.

The bytes read per token do not depend on which granules stay, so they stay spread evenly: of every
part the same share. Then the disk's work lies evenly under the computing, and a small ring is enough. A tied
embedding stays first of all: it is the head, and a row of it would otherwise be read on its own each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from penstock.errors import DoesNotFit
from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import USUAL_READS, MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, head_key, parts
from penstock.spec.plan import ActHome, KvHome, Plan, PlanModel, Unit
from penstock.units import MIB, format_bytes, format_mib_up, round_up

MAX_RING_BYTES = 256 * MIB
# A direct read of 4 MiB and more runs at the disk's full rate; below, each halving costs (docs/LOG.md).
UNIT_BYTES = 16 * MIB
CHUNK_ROWS = 512  # weights are read once a chunk; beyond, arithmetic hides the reading anyway
MIN_CHUNK_ROWS = 16
PINNED = ("norms", "edges")  # under 1 % of a model, and read at every step


def candidates(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec
) -> Iterator[tuple[Plan, tuple[str, ...]]]:
    """Plans that fit, each with its reasons, small rings first. Raises DoesNotFit where none does."""
    # An explicit limit is the user's word; without one the machine's figure is what is free, with a margin.
    limit = machine.tier("host").bytes if ask.host_memory_bytes is None else ask.host_memory_bytes
    total_bytes = sum(part.nbytes for part in parts(spec, weights))
    may_stay = total_bytes if ask.resident_bytes is None else ask.resident_bytes
    kv_reason = f"KV in {kv_format(ask, spec).name}: {'asked for' if ask.kv else 'the width of the checkpoint'}"
    least, *rings = _ring_options(spec, weights)
    for chunk_rows in _chunk_options(ask):
        if may_stay >= total_bytes:
            whole = _skeleton(ask, spec, weights, machine.process_bytes, chunk_rows, None)
            if whole.tier_bytes()["host"] <= limit:
                yield whole, (f"all {format_bytes(total_bytes)} of weights stay in memory", kv_reason)
                return
        found = False
        # The smallest ring holds one granule, so nothing overlaps: only where nothing else fits.
        for ring in (*rings, least):
            if found and ring == least:
                return
            plan = _streaming(ask, spec, weights, machine, chunk_rows, ring, limit, may_stay)
            if plan is not None:
                found = True
                yield plan, (*_streaming_reasons(plan, total_bytes), kv_reason)
        if found:
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
    ring_bytes = _ring_options(spec, weights)[0]
    options: list[tuple[int, Resident] | None] = [(ring_bytes, {})]
    if ask.resident_bytes is None:
        options.append(None)
    plans = [_skeleton(ask, spec, weights, process_bytes, MIN_CHUNK_ROWS, option) for option in options]
    return min(plan.tier_bytes()["host"] for plan in plans)


def kv_format(ask: Ask, spec: ModelSpec) -> Format:
    """float32 for a float32 model; otherwise float16, which keeps 8 times finer values than bfloat16 in
    the same bytes."""
    if ask.kv is not None:
        return parse_format(ask.kv)
    return Format("float32" if spec.dtype == "float32" else "float16")


def page_tokens(context: int) -> int:
    """Long contexts take long pages (less book-keeping), short ones short pages (less rounding)."""
    return 256 if context >= 1024 else 64


def _chunk_rows(ask: Ask) -> int:
    return max(MIN_CHUNK_ROWS, min(CHUNK_ROWS, ask.context or CHUNK_ROWS))


def _chunk_options(ask: Ask) -> list[int]:
    most = _chunk_rows(ask)
    return [most] + [rows for rows in (128, 32, MIN_CHUNK_ROWS) if rows < most]


def _ring_options(spec: ModelSpec, weights: Format) -> list[int]:
    """Rings to try, the smallest first. It holds the largest granule once; twice where possible, so that
    the disk reads while the processor computes."""
    streamed = [part for part in parts(spec, weights) if part.kind not in PINNED]
    least = max(part.granule_bytes for part in streamed)
    total = sum(part.nbytes for part in streamed)
    wanted = {2 * least, total // 16, total // 8, 64 * MIB, 128 * MIB, MAX_RING_BYTES}
    whole = {max(n // ARENA_ALIGN, 1) * ARENA_ALIGN for n in wanted}  # an arena is charged in whole huge pages anyway
    most = min(MAX_RING_BYTES, total // 2)
    return [least, *sorted(n for n in whole if 2 * least <= n <= most)]


Resident = dict[str, int]  # part key → granules that stay


def _skeleton(
    ask: Ask,
    spec: ModelSpec,
    weights: Format,
    process_bytes: int,
    chunk_rows: int,
    streaming: tuple[int, Resident] | None,
) -> Plan:
    """A complete plan. `streaming`: (ring bytes, granules that stay in memory); None = everything stays."""
    assert ask.context is not None, "settle_context came first"
    layers, seqs = (0, len(spec.layers)), (0, ask.batch)
    ring_bytes, resident = streaming or (0, {})
    units: list[Unit] = []
    for part in parts(spec, weights):
        stay = part.granules if streaming is None or part.kind in PINNED else resident.get(part.key, 0)
        units += _cut(part, stay, min(UNIT_BYTES, ring_bytes // 4))
    plan = Plan(
        models=(PlanModel(spec, weights),),
        units=tuple(units),
        kv=(KvHome(layers, seqs, "host", kv_format(ask, spec), "host"),),
        acts=(ActHome(layers, seqs, "host"),),
        arenas=(),
        batches_per_pass=1,
        batch_seqs=ask.batch,
        chunk_rows=chunk_rows,
        logits_rows=chunk_rows if ask.score else ask.batch,
        context=ask.context,
        page_tokens=page_tokens(ask.context),
        ring_bytes={"host": ring_bytes} if ring_bytes else {},
        order="overlapped",
        io_block_bytes=USUAL_READS.block_bytes,
        io_depth=USUAL_READS.depth,
        io_engine=USUAL_READS.engine,
        process_bytes=round_up(process_bytes + spec.tokenizer_bytes, MIB),
    )
    return replace(plan, arenas=Layout(plan).arenas())


def _cut(part: Part, stay: int, unit_bytes: int) -> list[Unit]:
    """The first `stay` granules in memory, the rest in even units of about `unit_bytes` on disk."""
    units = [Unit(part.key, 0, stay, "host", "host", "host")] if stay else []
    streamed = part.granules - stay
    if streamed:
        per_unit = max(1, unit_bytes // part.granule_bytes)
        count = -(-streamed // per_unit)
        edges = [stay + streamed * i // count for i in range(count + 1)]
        units += [Unit(part.key, lo, hi, "disk0", "host", "host") for lo, hi in pairwise(edges)]
    return units


def _streaming(
    ask: Ask,
    spec: ModelSpec,
    weights: Format,
    machine: MachineSpec,
    chunk_rows: int,
    ring_bytes: int,
    limit: int,
    may_stay: int,
) -> Plan | None:
    """Fills what the rest of the plan leaves with resident granules; None where the rest alone is too big."""
    bare = _skeleton(ask, spec, weights, machine.process_bytes, chunk_rows, (ring_bytes, {}))
    spare = limit - bare.tier_bytes()["host"]
    if spare < 0:
        return None
    pinned = sum(part.nbytes for part in parts(spec, weights) if part.kind in PINNED)
    # The weights' arena is rounded up to huge pages; what its last page has left is usable too.
    rounding = next(a.bytes for a in bare.arenas if a.name == "host.weights") - pinned
    budget = rounding + spare // ARENA_ALIGN * ARENA_ALIGN
    budget = min(budget, max(0, may_stay - pinned))
    resident = _spread(spec, weights, budget)
    plan = _skeleton(ask, spec, weights, machine.process_bytes, chunk_rows, (ring_bytes, resident))
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


def _streaming_reasons(plan: Plan, total_bytes: int) -> tuple[str, ...]:
    found = plan.parts
    stays = sum((u.hi - u.lo) * found[u.part].granule_bytes for u in plan.units if u.home == "host")
    ring = plan.ring_bytes["host"]
    return (
        f"{format_bytes(stays)} of {format_bytes(total_bytes)} of weights stay in memory, spread evenly over the "
        f"layers; the rest streams from disk",
        f"a ring of {format_bytes(ring)} in units of at most {format_bytes(min(UNIT_BYTES, ring // 4))}",
    )
