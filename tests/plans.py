"""Random plans: cuts, homes, rings and block sizes that no solver would choose, but that must all be right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from penstock.graph.arenas import Layout
from penstock.planner.solve.skeleton import PINNED, page_tokens
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts
from penstock.spec.plan import ORDERS, ActHome, KvHome, Plan, PlanModel, Unit


def make_plan(
    spec: ModelSpec,
    weights: Format,
    units: list[Unit],
    *,
    ring_bytes: dict[str, int],
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
) -> Plan:
    """`kv_spilled`: layers whose KV lives on the disk."""
    layers, seqs = (0, len(spec.layers)), (0, batch_seqs * batches_per_pass)
    homes = ["disk0" if i in kv_spilled else "host" for i in range(*layers)]
    edges = [0, *(i for i in range(1, layers[1]) if homes[i] != homes[i - 1]), layers[1]]
    plan = Plan(
        models=(PlanModel(spec, weights),),
        units=tuple(units),
        kv=tuple(KvHome(span, seqs, homes[span[0]], parse_format(kv), "host") for span in pairwise(edges)),
        acts=(ActHome(layers, seqs, "host"),),
        arenas=(),
        batches_per_pass=batches_per_pass,
        batch_seqs=batch_seqs,
        chunk_rows=chunk_rows,
        logits_rows=logits_rows,
        context=context,
        page_tokens=page_tokens(context),
        ring_bytes=ring_bytes,
        order=order,
        io_block_bytes=io_block_bytes,
        io_depth=io_depth,
        io_engine=io_engine,
        process_bytes=64 << 20,
    )
    return replace(plan, arenas=Layout(plan).arenas())


def resident_plan(spec: ModelSpec, weights: Format, **fields: int | str) -> Plan:
    """Every part whole and in memory."""
    units = [Unit(p.key, 0, p.granules, "host", "host", "host") for p in parts(spec, weights)]
    return make_plan(spec, weights, units, ring_bytes={}, **fields)  # type: ignore[arg-type]


@st.composite
def random_plans(draw: st.DrawFn, spec: ModelSpec, weights: Format, **fields: int | str) -> Plan:
    """Any cut of any part into units, each at home in memory or on disk; any ring that holds the largest; KV of any
    layers on disk; any order."""
    units: list[Unit] = []
    largest = 0
    for part in parts(spec, weights):
        cuts = _cuts(draw, part)
        for lo, hi in pairwise(cuts):
            home = "host" if part.kind in PINNED else draw(st.sampled_from(["host", "disk0"]))
            units.append(Unit(part.key, lo, hi, home, "host", "host"))
            if home == "disk0":
                largest = max(largest, (hi - lo) * part.granule_bytes)
    ring = largest + 4096 * draw(st.integers(0, 3 * largest // 4096 + 1)) if largest else 0
    block = 4096 * draw(st.sampled_from([1, 2, 3, 16, 256]))
    spilled = draw(st.just(frozenset[int]()) | st.frozensets(st.integers(0, len(spec.layers) - 1)))
    return make_plan(
        spec, weights, units, ring_bytes={"host": ring} if ring else {}, io_block_bytes=block, kv_spilled=spilled,
        order=draw(st.sampled_from(ORDERS)), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def _cuts(draw: st.DrawFn, part: Part) -> list[int]:
    if part.kind in PINNED or part.granules == 1:
        return [0, part.granules]
    inner = draw(st.sets(st.integers(1, part.granules - 1), max_size=4))
    return [0, *sorted(inner), part.granules]
