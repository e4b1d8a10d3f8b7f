"""Makes plans with a whole model in RAM, without a machine to solve for: for probes, benches and tests of single
ops."""

from __future__ import annotations

from penstock.graph.arenas import with_arenas
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.places import HOST
from penstock.spec.plan import ActHome, KvHome, Plan, PlanModel, Unit
from penstock.units import MIB


def resident_plan(
    spec: ModelSpec, weights: Format, *, kv: Format, context: int, rows: int = 1, seqs: int = 1, logits_rows: int = 1,
    page_tokens: int = 64,
) -> Plan:  # fmt: skip
    """A plan with all of a model in RAM. `rows`: the most rows of a prefill chunk. `seqs`: sequences of the one batch
    of a pass."""
    plan = Plan(
        models=(PlanModel(spec, weights),),
        units=tuple(Unit(p.key, 0, p.granules, HOST, HOST, HOST) for p in parts(spec, weights)),
        kv=(KvHome((0, len(spec.layers)), (0, seqs), HOST, kv, HOST),),
        acts=(ActHome((0, len(spec.layers)), (0, seqs), HOST),),
        arenas=(), batches_per_pass=1, batch_seqs=seqs, chunk_rows=rows, logits_rows=logits_rows, context=context,
        page_tokens=page_tokens, ring_bytes={}, stage_bytes=0, order="overlapped", io_block_bytes=8 * MIB,
        io_depth=1, io_engine="threads", process_bytes=1, context_bytes=0,
    )  # fmt: skip
    return with_arenas(plan)
