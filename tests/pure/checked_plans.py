"""Plans that `check_plan` lets pass, and what is done with plans that pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.graph import passes
from penstock.graph.arenas import Layout
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call
from penstock.graph.verify import verify
from penstock.models import spec_from_config
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import Plan, Predictor, Unit
from penstock.spec.predictors import FORMAT, part_of, predicted_layers
from tests.plans import make_plan
from tests.pure.machine import model
from tests.pure.real_models import TINY

F32 = Format("float32")
# Tied and untied, with tails; three layers, so that KV can have several homes.
TIED = model(layers=3, d=64, heads=4, kv_heads=2, neurons=200, vocab=300, max_positions=256)
UNTIED = replace(TIED, tied=False)
FIRING = spec_from_config(TINY["opt"], "tiny")  # its neurons have zeros
NEURONS = parse_format("int4-neurons")


def streaming(spec: ModelSpec, **fields: Any) -> Plan:
    """Blocks and head on disk in units of one granule, the rest in memory."""
    units = [
        Unit(part.key, lo, lo + 1, "host" if part.kind in ("norms", "edges", "embed") else "disk0", "host", "host")
        for part in parts(spec, F32)
        for lo in range(part.granules)
    ]
    ring = 2 * max(part.granule_bytes for part in parts(spec, F32))
    return make_plan(spec, F32, units, ring_bytes={"host": ring}, batch_seqs=2, batches_per_pass=2, **fields)


def first(call: Call) -> list[list[int]]:
    """Answers who fires, or which experts are wanted: of each row the first."""
    assert call.batch is not None
    return [[0]] * call.batch.total_rows


def runs(plan: Plan) -> None:
    """Lowers what an engine would do with it, and verifies the tasks."""
    lowering, tokens = Lowering(plan), min(plan.context, 40)
    seqs = tuple(range(min(plan.batches_per_pass * plan.batch_seqs, 4)))
    tasks = [
        task
        for seq in seqs
        for p in passes.prefill(plan, seq, tokens, passes.DECODE if seq == seqs[-1] else None)
        for task in lowering.step(p, first)
    ]
    for alive in (seqs, seqs[1:] or seqs, seqs[:1]):
        tasks += lowering.step(passes.decode(plan, alive, (plan.context - 1,) * len(alive), passes.DECODE), first)
    for p in passes.prefill(plan, 0, tokens, None, score=True):
        tasks += lowering.step(p, first)
    verify(tasks, plan.arenas)


def rebuilt(plan: Plan, **fields: Any) -> Plan:
    """The plan changed, with the arenas that the change leads to."""
    changed = replace(plan, **fields)
    return replace(changed, arenas=Layout(changed).arenas())


def predicting() -> Plan:
    """All on a device, its predictors too."""
    by_key = {part.key: part for part in parts(FIRING, F32)}
    known = tuple(Predictor(layer, 32, "gpu0", FORMAT) for layer in predicted_layers(FIRING))
    sizes = [part.granule_bytes for part in by_key.values()] + [part_of(FIRING, p.layer, p.rank).nbytes for p in known]
    plan = make_plan(
        FIRING, F32, [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in by_key.values()],
        ring_bytes={}, stage_bytes=max(sizes), main="gpu0", kv_homes=[("gpu0", "gpu0")] * len(FIRING.layers),
    )  # fmt: skip
    return rebuilt(plan, sparsity="predict", predictors=known)


def asking() -> Plan:
    """FFNs lie on a disk, and of them only the neurons that fire are read."""
    by_key = {part.key: part for part in parts(FIRING, NEURONS)}
    units = [
        Unit(part.key, 0, part.granules, "disk0" if part.kind == "ffn" else "host", "host", "host")
        for part in by_key.values()
    ]
    units = [replace(unit, asked=unit.home == "disk0") for unit in units]
    ring = 2 * max(part.nbytes for part in by_key.values())
    return rebuilt(make_plan(FIRING, NEURONS, units, ring_bytes={"host": ring}), sparsity="exact")
