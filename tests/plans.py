"""Random plans: cuts, homes, rings and block sizes that no solver would choose, but that must all be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.cache import POLICIES
from penstock.graph.tasks import Pass
from penstock.planner.sizes import page_tokens
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import FFNS, PINNED, Part, parts
from penstock.spec.plan import ORDERS, ActHome, Cache, DeviceRows, KvHome, Plan, PlanModel, Unit


def make_plan(
    spec: ModelSpec,
    weights: Format,
    units: list[Unit],
    *,
    ring_bytes: dict[str, int],
    stage_bytes: int = 0,
    main: str = "host",
    batch_seqs: int = 1,
    batches_per_pass: int = 1,
    chunk_rows: int = 32,
    logits_rows: int = 32,
    context: int = 128,
    io_block_bytes: int = 1 << 20,
    io_depth: int = 1,
    io_engine: str = "threads",
    order: str = "overlapped",
    kv: str = "float32",
    kv_spilled: frozenset[int] = frozenset(),
    kv_homes: Sequence[tuple[str, str]] | None = None,
    caches: tuple[Cache, ...] = (),
    device_rows: tuple[DeviceRows, ...] = (),
) -> Plan:
    """`kv_spilled`: layers whose KV lives on the disk. `kv_homes`: instead, (home, executor of attention) per layer.
    `main`: the executor that holds the activations."""
    layers, seqs = (0, len(spec.layers)), (0, batch_seqs * batches_per_pass)
    homes = kv_homes or [("disk0" if i in kv_spilled else "host", "host") for i in range(*layers)]
    edges = [0, *(i for i in range(1, layers[1]) if homes[i] != homes[i - 1]), layers[1]]
    fmt = parse_format(kv)
    plan = Plan(
        models=(PlanModel(spec, weights),),
        units=tuple(units),
        kv=tuple(KvHome(span, seqs, homes[span[0]][0], fmt, homes[span[0]][1]) for span in pairwise(edges)),
        acts=(ActHome(layers, seqs, main),),
        arenas=(),
        batches_per_pass=batches_per_pass,
        batch_seqs=batch_seqs,
        chunk_rows=chunk_rows,
        logits_rows=logits_rows,
        context=context,
        page_tokens=page_tokens(context),
        ring_bytes=ring_bytes,
        stage_bytes=stage_bytes,
        order=order,
        io_block_bytes=io_block_bytes,
        io_depth=io_depth,
        io_engine=io_engine,
        process_bytes=64 << 20,
        context_bytes=0,
        caches=caches,
        device_rows=device_rows,
    )
    return replace(plan, arenas=Layout(plan).arenas())


def resident_plan(spec: ModelSpec, weights: Format, **fields: int | str) -> Plan:
    """Every part whole and in memory."""
    units = [Unit(p.key, 0, p.granules, "host", "host", "host") for p in parts(spec, weights)]
    return make_plan(spec, weights, units, ring_bytes={}, **fields)  # type: ignore[arg-type]


@st.composite
def random_plans(draw: st.DrawFn, spec: ModelSpec, weights: Format, cached: bool = False, **fields: int | str) -> Plan:
    """Any cut of any part into units, each at home in memory or on disk; any ring that holds the largest; KV of any
    layers on disk; any order. `cached`: any cache of any layer's experts, where all of them are on disk."""
    units: list[Unit] = []
    caches = _caches(draw, spec, weights, ["host"], guesses=True) if cached else ()
    has_cache = {cache.layer for cache in caches}
    largest = 0
    for part in parts(spec, weights):
        cuts = _cuts(draw, part)
        for lo, hi in pairwise(cuts):
            home = "host" if part.kind in PINNED else draw(st.sampled_from(["host", "disk0"]))
            home = "disk0" if part.kind == "experts" and part.layer in has_cache else home
            units.append(Unit(part.key, lo, hi, home, "host", "host"))
            if home == "disk0":
                largest = max(largest, (hi - lo) * part.granule_bytes)
    ring = largest + 4096 * draw(st.integers(0, 3 * largest // 4096 + 1)) if largest else 0
    block = 4096 * draw(st.sampled_from([1, 2, 3, 16, 256]))
    spilled = draw(st.just(frozenset[int]()) | st.frozensets(st.integers(0, len(spec.layers) - 1)))
    return make_plan(
        spec, weights, units, ring_bytes={"host": ring} if ring else {}, io_block_bytes=block, kv_spilled=spilled,
        caches=caches,
        order=draw(st.sampled_from(ORDERS)), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


@st.composite
def page_orders(draw: st.DrawFn, plan: Plan) -> tuple[Plan, list[int]]:
    """The plan, or one whose sequences share pages, and an order of its pages (see `with_pages`). No order: every
    sequence has its consecutive pages."""
    layout = Layout(plan)
    if draw(st.booleans()):
        return plan, []
    if draw(st.booleans()):
        pages = layout.kv.pages + layout.kv.page_group * draw(st.integers(0, 3))
        plan = with_arenas(replace(plan, kv_pages=pages))
    return plan, draw(st.permutations(range(Layout(plan).kv.pages // layout.kv.page_group)))


def with_pages(plan: Plan, order: Sequence[int], p: Pass) -> Pass:
    """The pass with the pages of each sequence taken from an order of groups of pages; as it is where there is none."""
    if not order:
        return p
    layout, page = Layout(plan), plan.page_tokens
    group, groups = layout.kv.page_group, layout.kv.pages_per_seq // layout.kv.page_group
    batches = []
    for batch in p.batches:
        tables = []
        for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
            pages = [g * group + i for g in order[seq * groups : (seq + 1) * groups] for i in range(group)]
            tables.append(tuple(pages[: -(-(start + rows) // page)]))
        batches.append(batch._replace(pages=tuple(tables)))
    return p._replace(batches=tuple(batches))


@st.composite
def device_plans(
    draw: st.DrawFn, spec: ModelSpec, weights: Format, cached: bool = False, shares: bool = True, **fields: int | str
) -> Plan:
    """The same beside a device: each layer's attention on either executor, each FFN unit's prefill and decode too, from
    any home that the executor can be fed from; KV on the device or in memory; either one holds the activations, and
    either one a router. `cached`: caches on the host, of layers whose experts are on the disk, or on a device that has
    the activations, of layers whose experts are in memory, or both, one above the other. `shares`: whether the CPU may
    take rows of prompts; not where the plan is given predictors."""
    executors, feeds = ["host", "gpu0"], {"host": ["host", "disk0"], "gpu0": ["gpu0", "host", "disk0"]}
    main = draw(st.sampled_from(executors))
    attends = [draw(st.sampled_from(executors)) for _ in spec.layers]
    delegated = [main == at == "gpu0" and draw(st.booleans()) for at in attends]
    units: list[Unit] = []
    caches = _caches(draw, spec, weights, ["host", main]) if cached else ()
    below = {c.layer: c for c in _caches(draw, spec, weights, ["host"])} if main == "gpu0" and cached else {}
    caches = tuple(c for above in caches for c in _both(above, below.get(above.layer)))
    cached_by = {cache.layer: cache.executor for cache in reversed(caches)}  # of two, that over the disk
    for part in parts(spec, weights):
        for lo, hi in pairwise(_cuts(draw, part)):
            decode = prefill = attends[part.layer] if part.kind == "attn" else main
            if part.kind in FFNS:
                decode, prefill = draw(st.sampled_from(executors)), draw(st.sampled_from(executors))
            if part.kind == "router":
                decode = prefill = "host" if part.layer in cached_by else draw(st.sampled_from(executors))
            of_cache = part.kind == "experts" and part.layer in cached_by
            decode = "host" if of_cache else decode
            under = {"host": ["disk0"], "gpu0": ["host"]}
            homes = (
                under[cached_by[part.layer]] if of_cache else feeds["gpu0" if decode == prefill == "gpu0" else "host"]
            )
            home = main if part.kind in PINNED else draw(st.sampled_from(homes))
            units.append(Unit(part.key, lo, hi, decode if part.kind == "router" else home, decode, prefill))
    tables = _device_rows(draw, spec, units, cached) if main == "gpu0" and shares else ()
    units = [_shared_rows(unit, tables) for unit in units]
    shared = {unit.part for unit in units if unit.decode == "host"}
    tables = tuple(table for table in tables if f"{table.layer}.ffn" in shared)
    sizes = {part.key: part.granule_bytes for part in parts(spec, weights)}
    rings: dict[str, int] = {}
    stage = max(part.granule_bytes for part in parts(spec, weights) if part.kind == "norms")  # copies for attention
    for unit in units:
        nbytes = (unit.hi - unit.lo) * sizes[unit.part]
        if unit.home == "gpu0":
            stage = max(stage, sizes[unit.part])
        for executor in {unit.decode, unit.prefill} - {unit.home}:
            rings[executor] = max(rings.get(executor, 0), nbytes)
            if executor == "gpu0" and unit.home == "disk0":
                stage = max(stage, nbytes)
    rings = {tier: n + 4096 * draw(st.integers(0, 3 * n // 4096 + 1)) for tier, n in rings.items()}
    stage += 4096 * draw(st.integers(0, 3 * stage // 4096 + 1)) if stage else 0
    for layer in (layer for layer, is_delegated in enumerate(delegated) if is_delegated):  # its units come at once
        streaming = [u for u in units if u.part == f"{layer}.attn" and u.home != "gpu0"]
        nbytes = [(u.hi - u.lo) * sizes[u.part] for u in streaming]
        if nbytes:
            rings["gpu0"] = max(rings.get("gpu0", 0), sum(nbytes) + max(nbytes))
    scores = ["host" if is_delegated else at for at, is_delegated in zip(attends, delegated, strict=True)]
    kv_homes = [
        (draw(st.sampled_from(["gpu0", "host", "disk0"] if at == "gpu0" else ["host", "disk0"])), at) for at in scores
    ]
    return make_plan(
        spec, weights, units, ring_bytes=rings, stage_bytes=stage, main=main, kv_homes=kv_homes, caches=caches,
        device_rows=tables, order=draw(st.sampled_from(ORDERS)), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def _device_rows(
    draw: st.DrawFn, spec: ModelSpec, units: Sequence[Unit], cached: bool
) -> tuple[DeviceRows, ...]:  # fmt: skip
    """Tables of rows that the CPU takes of prompts, for some layers with a dense FFN. None with caches."""
    dense = sorted({int(unit.part.partition(".")[0]) for unit in units if unit.part.endswith(".ffn")})
    if cached and any(unit.part.endswith(".experts") for unit in units):
        return ()
    tables = []
    for layer in dense if draw(st.booleans()) else ():
        rows = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=3)))
        tables.append(DeviceRows(layer, tuple(rows), tuple(draw(st.integers(0, t - 1)) for t in rows)))
    return tuple(tables)


def _shared_rows(unit: Unit, tables: Sequence[DeviceRows]) -> Unit:
    """The unit as a layer has it that shares rows: the device computes prompts, the CPU decodes what lies in RAM."""
    if unit.part not in {f"{table.layer}.ffn" for table in tables}:
        return unit
    return replace(unit, decode="host" if unit.home == "host" else "gpu0", prefill="gpu0")


def _caches(
    draw: st.DrawFn, spec: ModelSpec, weights: Format, executors: Sequence[str], guesses: bool = False
) -> tuple[Cache, ...]:
    """A cache on one of these executors, of any size and policy, for some of the layers with experts. `guesses`: with
    any number of them."""
    return tuple(
        Cache(
            part.layer,
            draw(st.sampled_from(executors)),
            draw(st.integers(1, part.experts)),
            draw(st.sampled_from(POLICIES)),
            draw(st.integers(1, 4)),
            draw(st.integers(0, most)) if guesses and (most := spec.layers[part.layer].active) else 0,
        )
        for part in parts(spec, weights)
        if part.kind == "experts" and draw(st.booleans())
    )


def _both(cache: Cache, below: Cache | None) -> tuple[Cache, ...]:
    """A device's cache with one in RAM beneath it, if there is one."""
    return (below, cache) if below is not None and cache.executor == "gpu0" else (cache,)


def _cuts(draw: st.DrawFn, part: Part) -> list[int]:
    if part.kind in PINNED or part.granules == 1:
        return [0, part.granules]
    least = part.least_granules
    inner = draw(st.sets(st.integers(1, max(1, part.granules // least - 1)), max_size=4))
    return [0, *sorted(least * i for i in inner if least * i < part.granules), part.granules]
