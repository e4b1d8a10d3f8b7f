"""Plans from outside: each wrong thing is one clear line, and what passes can be lowered and verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.graph.check_plan import check_plan
from penstock.planner.solve import solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import ORDERS, ActHome, DeviceRows, KvHome, Plan, PlanModel, Unit
from penstock.spec.predictors import part_of
from tests.plans import make_plan, random_plans
from tests.pure.checked_plans import F32, FIRING, NEURONS, TIED, UNTIED, asking, predicting, rebuilt, runs, streaming
from tests.pure.machine import MACHINE


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4", "int8-g32"])
@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=["tied", "untied"])
def test_what_the_solver_makes_passes(spec: ModelSpec, weights: str) -> None:
    fmt = parse_format(weights)
    for ask in (
        Ask(context=200),
        Ask(context=200, batch=3, resident_bytes=0),
        Ask(context=100, score=True, resident_bytes=200_000, kv="bfloat16"),
        Ask(context=200, batch=2, kv="int8"),
        Ask(context=200, resident_bytes=0, kv="int4-g32"),
    ):
        plan = solve(ask, spec, fmt, MACHINE).plan
        check_plan(plan, spec, fmt)
        check_plan(plan, replace(spec, tokenizer_bytes=12345), fmt)
        runs(plan)


@pytest.mark.fuzz
@given(st.data())
def test_any_placement_passes(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([TIED, UNTIED]))
    plan = data.draw(random_plans(spec, F32, batch_seqs=2, batches_per_pass=2))
    check_plan(plan, spec, F32)


@pytest.mark.parametrize("order", ORDERS)
def test_delegated_attention_needs_its_units_at_once(order: str) -> None:
    """They stay in the ring while the CPU attends. A ring with room for one of them is too little, and is said so."""
    by_key = {part.key: part for part in parts(TIED, F32)}
    granule = by_key["0.attn"].granule_bytes
    units = [
        Unit(part.key, lo, hi, "disk0" if part.kind == "attn" else "gpu0", "gpu0", "gpu0")
        for part in by_key.values()
        for lo, hi in pairwise(range(part.granules + 1) if part.kind == "attn" else (0, part.granules))
    ]
    stage = max(part.granule_bytes for part in by_key.values())

    def delegating(ring_bytes: int) -> Plan:
        return make_plan(
            TIED, F32, units, ring_bytes={"gpu0": ring_bytes}, stage_bytes=stage, main="gpu0", batch_seqs=2,
            batches_per_pass=2, order=order, kv_homes=[("host", "host"), ("disk0", "host"), ("disk0", "gpu0")],
        )  # fmt: skip

    count = by_key["0.attn"].granules
    check_plan(delegating((count + 1) * granule), TIED, F32)
    runs(delegating((count + 1) * granule))
    with pytest.raises(
        BadRequest, match=f"0.attn, whose attention is delegated, streams {(count + 1) * granule} bytes"
    ):
        check_plan(delegating(granule), TIED, F32)


def test_rows_of_prompts_are_shared_only_where_both_can() -> None:
    by_key = {part.key: part for part in parts(TIED, F32)}
    stage = max(part.granule_bytes for part in by_key.values())

    def sharing(table: DeviceRows, home: str = "host", prefill: str = "gpu0", **fields: Any) -> Plan:
        units = [
            Unit(part.key, 0, part.granules, home, "host", prefill)
            if part.key == "1.ffn"
            else Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0")
            for part in by_key.values()
        ]
        ring = by_key["1.ffn"].nbytes
        return make_plan(
            TIED, F32, units, ring_bytes={"gpu0": ring, "host": ring}, stage_bytes=max(stage, ring), main="gpu0",
            kv_homes=[("gpu0", "gpu0")] * 3, device_rows=(table,), batch_seqs=2, batches_per_pass=2, **fields,
        )  # fmt: skip

    check_plan(sharing(DeviceRows(1, (4, 9), (0, 3))), TIED, F32)
    runs(sharing(DeviceRows(1, (4, 9), (0, 3))))
    for table in (
        DeviceRows(1, (), ()), DeviceRows(1, (4, 4), (0, 3)), DeviceRows(1, (4,), (4,)), DeviceRows(1, (4,), (0, 1)),
        DeviceRows(1, (0,), (0,)), DeviceRows(1, (4,), (-1,)), DeviceRows(1, (1 << 40,), (0,)),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match="layer 1 shares rows"):
            check_plan(sharing(table), TIED, F32)
    for wrong in (
        sharing(DeviceRows(0, (4,), (1,))), sharing(DeviceRows(1, (4,), (1,)), home="disk0"),
        sharing(DeviceRows(1, (4,), (1,)), prefill="host"), sharing(DeviceRows(7, (4,), (1,))),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match="should compute all of its FFN"):
            check_plan(wrong, TIED, F32)
    with pytest.raises(BadRequest, match=r"shared in the layers \[2\]"):
        check_plan(rebuilt(streaming(TIED), device_rows=(DeviceRows(2, (4,), (1,)),)), TIED, F32)


def test_kv_may_have_a_format_per_layer() -> None:
    homes = (
        KvHome((0, 1), (0, 4), "host", Format("float32"), "host"),
        KvHome((1, 2), (0, 4), "host", Format("bfloat16"), "host"),
        KvHome((2, 3), (0, 4), "host", Format("int4", 64), "host"),
    )
    plan = rebuilt(streaming(TIED), kv=homes)
    check_plan(plan, TIED, F32)
    runs(plan)


def units(change: Callable[[list[Unit]], Any]) -> Callable[[Plan], Plan]:
    """The plan with its list of units changed in place."""

    def changed(plan: Plan) -> Plan:
        found = list(plan.units)
        change(found)
        return replace(plan, units=tuple(found))

    return changed


def moved(part: str, /, **fields: Any) -> Callable[[Plan], Plan]:
    """The first unit of a part with other fields."""

    def change(found: list[Unit]) -> None:
        i = next(i for i, unit in enumerate(found) if unit.part == part)
        found[i] = replace(found[i], **fields)

    return units(change)


def field(**values: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **values)


def kv(**values: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, kv=(replace(plan.kv[0], **values),))


OTHER = replace(TIED, layers=TIED.layers[:2])
WRONG = [
    (field(models=()), "for 0 models"),
    (lambda plan: replace(plan, models=plan.models * 2), "for 2 models"),
    (field(models=(PlanModel(OTHER, F32),)), "another model: layers differs"),
    (field(models=(PlanModel(replace(TIED, max_positions=9999), F32),)), "another model: max_positions differs"),
    (field(models=(PlanModel(TIED, Format("bfloat16")),)), "for bfloat16 weights, the model has float32"),
    (field(kv_pages=-1), "kv_pages is -1"),
    (field(kv_pages=1), "its pools have 1 pages; a context of"),
    (field(kv_pages=1 << 20), "is not what the rest of the plan leads to"),
    (units(lambda found: found.clear()), r"granules 0\.\.5 of embed have no home"),
    (units(lambda found: found.pop()), r"granules 0\.\.1 of edges have no home"),
    (units(lambda found: found.append(found[-1])), "a unit of edges has granules"),
    (units(lambda found: found.insert(0, found.pop(1))), r"a unit of embed has granules 1\.\.2, where 0\.\. of 5"),
    (units(lambda found: found.insert(9, found.pop(3))), r"embed has granules 4\.\.5, where 3\.\."),
    (units(lambda found: found.append(found.pop(4))), "units of embed do not stand side by side"),
    (moved("0.ffn", part="7.ffn"), r"no part '7\.ffn'"),
    (moved("0.ffn", part="0.ffn\n"), r"no part '0\.ffn\\n'"),
    (moved("0.ffn", lo=-1), r"-1\.\.1"),
    (moved("0.ffn", hi=-1), r"0\.\.-1"),
    (moved("0.ffn", hi=0), r"0\.\.0"),
    (moved("0.ffn", hi=2), r"1\.\.2, where 2\.\."),
    (moved("0.ffn", hi=99), r"0\.\.99"),
    (moved("0.ffn", home="disk7"), "at home in 'disk7'"),
    (moved("0.ffn", home="gpu0", decode="gpu0", prefill="gpu0"), "through a stage of 0 bytes, less than a granule"),
    (moved("0.ffn", home="gpu0", decode="gpu0"), "computed by gpu0 and host; what lies there is computed there"),
    (field(stage_bytes=-1), "stage_bytes is -1"),
    (field(context_bytes=-1), "context_bytes is -1"),
    (moved("0.ffn", decode="disk0"), "computed by 'disk0'"),
    (moved("0.ffn", prefill="gpu0"), "through a ring of 0 on gpu0"),
    (moved("0.ffn", prefill="gpu1"), "and 'gpu1'; this version has disk0, disk1, host, gpu0"),
    (moved("0.attn", decode="gpu0", prefill="gpu0"), "attention of layer 0 on host but its projections elsewhere"),
    (moved("0.norms", home="disk0"), r"0\.norms is at home in disk0"),
    (moved("edges", home="disk0"), "edges is at home in disk0"),
    (field(ring_bytes={}), r"through a ring of 0 on host"),
    (field(ring_bytes={"host": 4096}), "through a ring of 4096"),
    (field(ring_bytes={"host": -1}), "ring of -1 bytes"),
    (field(ring_bytes={"host": 10**30}), "ring of 10"),
    (field(ring_bytes={"gpu1": 1 << 20}), "on 'gpu1'"),
    (field(batches_per_pass=0), "batches_per_pass is 0"),
    (field(batches_per_pass=10**9), "batches_per_pass is 1000000000"),
    (field(batch_seqs=-3), "batch_seqs is -3"),
    (field(batch_seqs=3), r"sequences 0\.\.4; a pass has 6"),
    (field(chunk_rows=0), "chunk_rows is 0"),
    (field(chunk_rows=10**12), "chunk_rows is 10"),
    (field(logits_rows=0), "logits_rows is 0"),
    (field(logits_rows=1), "logits_rows 1 is less than batch_seqs 2"),
    (field(context=0), "context is 0"),
    (field(context=257), "more than the model's 256 positions"),
    (field(page_tokens=0), "page_tokens is 0"),
    (field(io_block_bytes=0), "io_block_bytes is 0"),
    (field(io_block_bytes=5000), "no multiple of 4096"),
    (field(io_depth=0), "io_depth is 0"),
    (field(io_engine="aio"), "io_engine is 'aio'; there are threads, io_uring"),
    (field(order="random"), "order is 'random'; there are overlapped, saving, flexgen"),
    (field(process_bytes=-1), "process_bytes is -1"),
    (field(kv=()), r"KV of layers 0\.\.3 has no home"),
    (kv(layers=(0, 2)), r"KV of layers 2\.\.3 has no home"),
    (kv(layers=(1, 3)), r"where 0\.\. of 3"),
    (kv(layers=(0, 4)), r"where 0\.\. of 3"),
    (kv(layers=(0, 0)), r"where 0\.\. of 3"),
    (lambda plan: replace(plan, kv=plan.kv * 2), r"where 3\.\. of 3"),
    (kv(seqs=(0, 3)), r"sequences 0\.\.3"),
    (kv(seqs=(0, 10**9)), "sequences"),
    (kv(format=Format("int8", 40)), "KV cache in int8-g40: its groups should be multiples of 32"),
    (kv(home="gpu0"), "KV at home in 'gpu0'"),
    (kv(attend="gpu0"), "attention of layer 0 on gpu0 but its projections elsewhere"),
    (kv(home="disk1"), "KV at home in 'disk1' with attention on 'host'"),
    (field(acts=()), r"activations of layers 0\.\.3 has no home"),
    (field(acts=(ActHome((0, 3), (0, 4), "disk0"),)), "activations are at home in"),
    (field(page_tokens=4096), "arena 'host.kv' is not what"),
    (field(chunk_rows=4000), "is not what the rest of the plan leads to"),
    (field(arenas=()), "is not what the rest of the plan leads to"),
    (lambda plan: replace(plan, arenas=plan.arenas[::-1]), None),
    (lambda plan: replace(plan, arenas=(replace(plan.arenas[0], bytes=-(2**21)), *plan.arenas[1:])), "arena"),
    (lambda plan: replace(plan, arenas=(replace(plan.arenas[0], tier="disk0"), *plan.arenas[1:])), "arena"),
    (lambda plan: replace(plan, arenas=(*plan.arenas, plan.arenas[0])), None),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_each_wrong_thing_is_one_line(change: Callable[[Plan], Plan], message: str | None) -> None:
    plan = streaming(TIED)
    check_plan(plan, TIED, F32)
    with pytest.raises(BadRequest, match=message) as caught:
        check_plan(change(plan), TIED, F32)
    assert caught.value.message.startswith("this plan cannot run: ")
    assert "\n" not in caught.value.message and len(caught.value.message) < 300


INCOMPLETE = [
    (field(acts=()), "activations"),
    (field(kv=()), "KV of layers"),
    (kv(layers=(0, 99)), "KV of layers"),
    (field(units=()), "have no home"),
    (lambda plan: replace(plan, units=tuple(u for u in plan.units if u.part != "0.attn")), "0.attn have no home"),
    (lambda plan: replace(plan, units=(replace(plan.units[0], part="zz"), *plan.units[1:])), "no part 'zz'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), INCOMPLETE, ids=[str(i) for i in range(len(INCOMPLETE))])
def test_predictors_and_asked_units_are_checked_after_what_they_need(
    change: Callable[[Plan], Plan], message: str
) -> None:
    for plan, weights in ((predicting(), F32), (asking(), NEURONS)):
        check_plan(plan, FIRING, weights)
        with pytest.raises(BadRequest, match=message):
            check_plan(change(plan), FIRING, weights)


def test_a_predictor_has_to_fit_into_the_stage() -> None:
    largest = max(part.granule_bytes for part in parts(FIRING, F32))
    known = tuple(replace(each, rank=4096) for each in predicting().predictors)
    assert part_of(FIRING, 0, 4096).nbytes > largest
    with pytest.raises(BadRequest, match="does not fit into the stage"):
        check_plan(rebuilt(predicting(), predictors=known, stage_bytes=largest), FIRING, F32)


def test_neurons_are_left_out_only_where_the_plan_says_so() -> None:
    plan = predicting()
    with pytest.raises(BadRequest, match="it has predictors, which nobody asks with sparsity off"):
        check_plan(rebuilt(plan, sparsity="off"), FIRING, F32)
    some = tuple(replace(u, active=0.5) if u.part.endswith(".ffn") else u for u in plan.units)
    with pytest.raises(BadRequest, match="it leaves out neurons of some units, yet its sparsity is off"):
        check_plan(rebuilt(plan, sparsity="off", predictors=(), units=some), FIRING, F32)


def test_why_rows_of_prompts_are_not_shared() -> None:
    """The message names what the plan has and may not have."""
    rows = (DeviceRows(0, (4,), (1,)),)
    with pytest.raises(
        BadRequest, match=r"layers \[0\]; that needs a device, no caches, no predictors and no units that"
    ):
        check_plan(rebuilt(predicting(), device_rows=rows), FIRING, F32)
    with pytest.raises(BadRequest, match=r"layers \[0, 0\]; each layer comes once, in their order"):
        check_plan(rebuilt(predicting(), device_rows=rows * 2), FIRING, F32)
