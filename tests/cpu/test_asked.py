"""Neurons whose records lie on a disk until they fire: whole models, plans, geometry, real files with direct reads."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, InternalError
from penstock.graph import ops, passes
from penstock.graph.arenas import with_arenas
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Pass, Task
from penstock.graph.verify import verify
from penstock.models import spec_from_config
from penstock.planner.predict import predict
from penstock.planner.routing import RouterTrace
from penstock.planner.shorten import streamed
from penstock.planner.solve import solve
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import firing_of, routers_of
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import Rate
from penstock.spec.parts import PAGE_BYTES, parts
from penstock.spec.plan import Plan, Predictor, Unit
from penstock.spec.predictors import FORMAT
from penstock.store.packed import Packed, open_packed
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_predict import give_predictors
from tests.plans import make_plan


def asking(
    packed: Packed,
    cuts: tuple[int, ...] = (),
    hole_bytes: int = 0,
    predictors: tuple[Predictor, ...] = (),
    recent_slots: int = 0,
    **fields: Any,
) -> Plan:
    """FFNs in units that begin at granules `cuts`: of each part the first stays, of the others the first streams if
    there are three, and the rest is asked for, each with so many slots for records, or as many as make sense. All else
    stays."""
    units = []
    for part in packed.parts.values():
        edges = (
            (0, *(cut for cut in cuts if cut < part.granules), part.granules)
            if part.kind == "ffn"
            else (0, part.granules)
        )
        for i, (lo, hi) in enumerate(pairwise(edges)):
            away = part.kind == "ffn" and (i > 0 or len(edges) == 2)
            asked = away and not (i == 1 and len(edges) > 3)
            slots = min(recent_slots, min(hi * 64, part.rows) - lo * 64) if asked else 0
            home = "disk0" if away else "host"
            units.append(Unit(part.key, lo, hi, home, "host", "host", asked=asked, recent_slots=slots))
    largest = max((u.hi - u.lo) * packed.parts[u.part].granule_bytes for u in units if u.home == "disk0")
    plan = make_plan(packed.spec, packed.weights, units, ring_bytes={"host": 2 * largest}, **fields)
    sparsity = "predict" if predictors else "exact"
    return with_arenas(replace(plan, sparsity=sparsity, hole_bytes=hole_bytes, predictors=predictors))


# -- geometry and kernels ------------------------------------------------------------------------------


# -- whole models --------------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["opt", "llama", "falcon"])
@pytest.mark.parametrize("weights", ["float32-neurons", "int4-neurons", "bfloat16-neurons"])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_what_fires_is_read_and_no_bit_differs(tmp_path: Path, name: str, weights: str, cuts: tuple[int, ...]) -> None:
    folder = relu_model(tmp_path, name, weights)
    packed = open_packed(folder)
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2]]
    with load(folder, batch=2, context=64, kv="float32", sparsity="off") as engine:
        want = [a.token_ids for a in engine.generate(prompts, GREEDY)]
    plan = asking(packed, cuts, batch_seqs=2, context=64)
    check_plan(plan, packed.spec, packed.weights)
    for how in ({}, {"serial": True}, {"poisoned": True}):
        loading = Loading(machine=MACHINE, plan=plan, **how)
        with closing(Engine.load(folder, Ask(context=64, batch=2), loading)) as engine:
            assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == want


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["opt", "llama", "falcon"])
@pytest.mark.parametrize("weights", ["float32-records", "int4-records", "bfloat16-records"])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_what_is_foretold_is_read_and_no_bit_differs(
    tmp_path: Path, name: str, weights: str, cuts: tuple[int, ...]
) -> None:
    """Predictors in RAM, the records on the disk: the bits of all in RAM with the same predictors, by each binding."""
    folder = relu_model(tmp_path, name, weights)
    packed = open_packed(folder)
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2]]
    for shift, ahead in ((-0.3, 0), (-0.3, 1), (-1e6, 1), (1e6, 0)):  # some, none, all of the neurons
        give_predictors(folder, shift, ahead=ahead)
        for kernels in (None, "reference"):
            ask = Ask(context=64, batch=2, kv="float32", sparsity="predict")
            with closing(Engine.load(folder, ask, Loading(machine=MACHINE, kernels=kernels))) as engine:
                want = [a.token_ids for a in engine.generate(prompts, GREEDY)]
                predictors = engine.plan.predictors
            plan = asking(packed, cuts, predictors=predictors, batch_seqs=2, context=64)
            check_plan(plan, packed.spec, packed.weights)
            for how in ({}, {"serial": True}, {"poisoned": True}):
                loading = Loading(machine=MACHINE, plan=plan, kernels=kernels, **how)
                with closing(Engine.load(folder, Ask(context=64, batch=2), loading)) as engine:
                    assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == want


@pytest.mark.thinned(3)
@pytest.mark.parametrize("slots", [1, 7, 50, 1000])
@pytest.mark.parametrize(("weights", "cuts"), [("float32", ()), ("int4", (1,)), ("bfloat16", (1, 2))])
def test_slots_for_records_change_no_bit_and_save_reads(
    tmp_path: Path, weights: str, cuts: tuple[int, ...], slots: int
) -> None:
    """Of any number of slots, by activations and by predictors, by both bindings: the bits of a plan without them."""
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2]]
    for layout in ("neurons", "records"):
        (tmp_path / layout).mkdir()
        folder = relu_model(tmp_path / layout, "opt", f"{weights}-{layout}")
        packed, predictors = open_packed(folder), tuple[Predictor, ...]()
        if layout == "records":
            give_predictors(folder, -0.3, ahead=slots % 2)
            ask = Ask(context=64, batch=2, kv="float32", sparsity="predict")
            with closing(Engine.load(folder, ask, Loading(machine=MACHINE))) as engine:
                predictors = engine.plan.predictors
        said, read = [], []
        for n in (0, slots):
            plan = asking(packed, cuts, predictors=predictors, recent_slots=n, batch_seqs=2, context=64)
            check_plan(plan, packed.spec, packed.weights)
            for how in ({}, {"serial": True}, {"poisoned": True}, {"poisoned": True, "kernels": "reference"}):
                loading = Loading(machine=MACHINE, plan=plan, **how)
                with closing(Engine.load(folder, Ask(context=64, batch=2), loading)) as engine:
                    loaded_bytes = engine.session.reader.bytes_read
                    said.append([a.token_ids for a in engine.generate(prompts, GREEDY)])
                    read.append(engine.session.reader.bytes_read - loaded_bytes)
        assert said[0] and all(each == said[0] for each in (*said[:3], *said[4:7]))
        assert said[3] == said[7]
        assert len(set(read[:3])) == len(set(read[4:7])) == 1
        assert read[4] <= read[0] and (slots < 1000 or read[4] < read[0])


@pytest.mark.parametrize("hole_bytes", [0, 1 << 20])
def test_bytes_are_those_of_who_fires_and_of_holes(tmp_path: Path, hole_bytes: int) -> None:
    """A decode pass reads the runs of its answers from the disk, and nothing else."""
    folder = relu_model(tmp_path, "opt", "float32-neurons")
    packed = open_packed(folder)
    plan = asking(packed, (1,), hole_bytes, context=64)
    with closing(Engine.load(folder, Ask(context=64), Loading(machine=MACHINE, plan=plan))) as engine:
        session, picked, asked_bytes = engine.session, list[int](), 0
        step = session.lowering.step

        def noting(p: Pass, answer: Any, by_batches: bool) -> Iterator[Task]:
            for task in step(p, answer, by_batches):
                picked.extend(call.bytes for call in task.calls if isinstance(call.operands, ops.Pick))
                yield task

        session.lowering.step = noting  # type: ignore[method-assign]
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        before, picked[:] = session.reader.bytes_read, []
        seq = passes.decode(plan, (0,), (4,), None)
        for i in range(4):
            session.step(seq, [np.array([i], np.int32)])
            assert session.consumed_bytes == sum(picked[-len(packed.spec.layers) :])
        asked_bytes = session.reader.bytes_read - before
    assert asked_bytes == sum(picked) > 0
    each = packed.parts["0.ffn"].nbytes
    assert sum(picked) < 4 * len(packed.spec.layers) * each


@given(st.data())
def test_tasks_follow_answers_in_order(data: st.DataObject) -> None:
    """Any live sets: all edges are there, and the same answers give the same tasks again. A read that does not wait for
    who asks for it is found out."""
    sparsity = data.draw(st.sampled_from(["exact", "predict"]))
    weights = parse_format("int4-records" if sparsity == "predict" else "int4-neurons")
    spec = spec_from_config(json.loads(TINY_CONFIGS["opt"]), "here")
    units = []
    for part in parts(spec, weights):
        edges = [0, part.granules]
        if part.kind == "ffn":
            edges = sorted(
                {0, part.granules, *data.draw(st.sets(st.integers(1, max(1, part.granules - 1)), max_size=2))}
            )
        for lo, hi in pairwise(edges):
            kind = data.draw(st.sampled_from(["stays", "streams", "asked"])) if part.kind == "ffn" else "stays"
            home = "host" if kind == "stays" else "disk0"
            most = min(hi * 64, part.rows) - lo * 64
            slots = data.draw(st.integers(0, most)) if kind == "asked" else 0
            units.append(Unit(part.key, lo, hi, home, "host", "host", asked=kind == "asked", recent_slots=slots))
    largest = max(part.nbytes for part in parts(spec, weights))
    seqs = data.draw(st.integers(1, 3))
    plan = make_plan(
        spec, weights, units, ring_bytes={"host": 2 * largest}, batch_seqs=seqs, batches_per_pass=2, context=64
    )
    ahead = data.draw(st.sampled_from([0, 1]))
    predictors = tuple(Predictor(i, 32, "host", FORMAT, ahead) for i in range(len(spec.layers)))
    plan = replace(plan, sparsity=sparsity, predictors=predictors if sparsity == "predict" else ())
    plan = with_arenas(replace(plan, hole_bytes=data.draw(st.sampled_from([0, 4096]))))
    check_plan(plan, spec, weights)
    ids = tuple(range(2 * seqs))
    wanted = [*passes.prompts(plan, ids, (5,) * len(ids), passes.DECODE)]
    wanted += [passes.decode(plan, ids, (5 + i,) * len(ids), passes.DECODE) for i in range(3)]
    seed = data.draw(st.integers(0, 2**32 - 1))
    kinds = data.draw(st.lists(st.sampled_from(["none", "all", "one", "alternating", "any"]), min_size=1, max_size=8))

    def lowered() -> list[Task]:
        draw, count = random.Random(seed), 0
        lowering, tasks = Lowering(plan), []

        def answer(call: Call) -> list[list[int]]:
            nonlocal count
            kind, count = kinds[count % len(kinds)], count + 1
            lo, hi = (0, spec.layers[0].ffns[0].neurons) if call.unit < 0 else plan.unit_rows(plan.units[call.unit])
            every = range(lo, hi)
            some = {"none": [], "all": every, "one": [lo], "alternating": every[::2]}
            assert call.batch is not None
            drawn = [sorted(draw.sample(every, draw.randint(0, len(every)))) for _ in range(call.batch.total_rows)]
            return [list(some.get(kind, drawn[i])) for i in range(call.batch.total_rows)]

        for p in wanted:
            tasks += lowering.step(p, answer)
        return tasks

    tasks = lowered()
    verify(tasks, plan.arenas, plan.units)
    assert tasks == lowered()
    picks = [i for i, task in enumerate(tasks) if isinstance(task.calls[0].operands, ops.Pick) and task.after]
    if picks:
        early = data.draw(st.sampled_from(picks))
        with pytest.raises(InternalError):
            verify([replace_after(task) if i == early else task for i, task in enumerate(tasks)], plan.arenas)


def replace_after(task: Task) -> Task:
    return task._replace(after=())


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    packed = open_packed(relu_model(tmp_path, "opt", "int4-neurons"))
    plan = asking(packed, context=64)
    spec, weights = packed.spec, packed.weights
    asked = next(i for i, unit in enumerate(plan.units) if unit.asked)
    of_five: dict[str, Any] = {"kv": (replace(plan.kv[0], seqs=(0, 5)),), "acts": (replace(plan.acts[0], seqs=(0, 5)),)}

    def changed(**fields: Any) -> Plan:
        units = list(plan.units)
        units[asked] = replace(units[asked], **fields)
        return replace(plan, units=tuple(units))

    for bad, says in [
        (changed(home="host"), "only FFNs on a disk"),
        (changed(recent_slots=-1), "slots for records"),
        (changed(recent_slots=10**6), "slots for records"),
        (replace(plan, units=tuple(replace(u, recent_slots=0 if u.asked else 1) for u in plan.units)), "slots"),
        (replace(plan, sparsity="off"), "needs sparsity exact or predict"),
        (replace(plan, order="saving"), "order overlapped"),
        (with_arenas(replace(plan, batch_seqs=5, **of_five)), "at most 4"),
        (replace(plan, hole_bytes=-1), "hole_bytes"),
        (replace(plan, units=tuple(replace(u, asked=u.part == "0.attn") for u in plan.units)), "only FFNs on a disk"),
    ]:
        with pytest.raises(BadRequest, match=says):
            check_plan(bad, spec, weights)
    predictors = tuple(Predictor(i, 32, "host", FORMAT) for i in range(len(spec.layers)))
    with pytest.raises(BadRequest, match="with whole records"):
        check_plan(with_arenas(replace(plan, sparsity="predict", predictors=predictors)), spec, weights)
    other = open_packed(relu_model(tmp_path, "opt", "int4-records"))
    foretold = asking(other, predictors=predictors, context=64)
    check_plan(foretold, other.spec, other.weights)
    with pytest.raises(BadRequest, match="lie neuron by neuron"):
        check_plan(with_arenas(replace(foretold, sparsity="exact", predictors=())), other.spec, other.weights)


def test_a_plan_asks_where_that_is_faster(tmp_path: Path) -> None:
    """With a profile, and by the disk's figures: one with quick small reads, one where each takes 10 ms."""
    folder = relu_model(tmp_path, "opt", "float32-neurons")
    config = json.loads(TINY_CONFIGS["opt"]) | {"ffn_dim": 4096, "hidden_size": 240, "word_embed_proj_dim": 240}
    (tmp_path / "wide.json").write_text(json.dumps(config))
    folder = synth(tmp_path / "wide.json", tmp_path / "wide", parse_format("float32-neurons"))
    spec = open_packed(folder).spec
    rates = tuple(array("f", [1.0] * 64 + [0.001] * (4096 - 64)).tobytes() for _ in spec.layers)
    known = RouterTrace(((),) * len(rates), "made up", fires=rates)
    quick = [Rate("host", "*", "*", 1e-5, 1e-11, 1e-12), Rate("disk0", "*", "*", 1e-4, 1e-9)]
    ask = Ask(context=64, host_memory_bytes=MACHINE.process_bytes + (26 << 20))
    for alpha_s, asks in ((1e-5, True), (1e-2, False)):
        rates_of = (*quick, Rate("disk0", "kv_load", "*", 8 * alpha_s, 1e-9))
        machine = replace(MACHINE, rates=rates_of)
        solved = solve(ask, spec, parse_format("float32-neurons"), machine, trace=known)
        assert any(unit.asked for unit in solved.plan.units) == asks, solved.reasons
        check_plan(solved.plan, spec, parse_format("float32-neurons"))
    without = solve(
        ask,
        spec,
        parse_format("float32-neurons"),
        replace(MACHINE, rates=(*quick, Rate("disk0", "kv_load", "*", 8e-5, 1e-9))),
    )
    assert not any(unit.asked for unit in without.plan.units)


def test_predictors_let_a_plan_ask(tmp_path: Path) -> None:
    """Whom they call active is known without a profile, and the simulated bytes are of so many records."""
    config = json.loads(TINY_CONFIGS["opt"]) | {"ffn_dim": 4096, "hidden_size": 240, "word_embed_proj_dim": 240}
    (tmp_path / "wide.json").write_text(json.dumps(config))
    weights = parse_format("float32-records")
    folder = synth(tmp_path / "wide.json", tmp_path / "wide", weights)
    give_predictors(folder, -0.3)
    spec = open_packed(folder).spec
    trace, firing = (of(folder, spec, "predict") for of in (routers_of, firing_of))
    assert trace is not None
    for rates in trace.fires:
        assert np.frombuffer(rates, np.float32).mean() == pytest.approx(0.2, rel=1e-3)  # as `give_predictors` says
    rates_of = (
        Rate("host", "*", "*", 1e-5, 1e-11, 1e-12), Rate("disk0", "*", "*", 1e-4, 1e-9),
        Rate("disk0", "pick", "*", 1e-5, 1e-9),
    )  # fmt: skip
    ask = Ask(context=64, host_memory_bytes=MACHINE.process_bytes + (26 << 20), sparsity="predict")
    solved = solve(ask, spec, weights, replace(MACHINE, rates=rates_of), trace=trace, firing=firing)
    assert any(unit.asked for unit in solved.plan.units), solved.reasons
    assert any("predictors call active" in reason for reason in solved.reasons)
    check_plan(solved.plan, spec, weights)
    part, asked = solved.plan.parts["0.ffn"], [unit for unit in solved.plan.units if unit.asked]
    stride = Records.of(part).stride
    records = sum(0.2 * (unit.hi - unit.lo) * 64 for unit in asked)
    read = solved.prediction.disk_bytes_per_token
    assert records * stride < read < records * (stride + 2 * PAGE_BYTES) + sum(streamed(solved.plan, True).values())


def test_slots_hold_what_is_hot_wherever_it_lies() -> None:
    """Of neurons in no order, by a profile: slots for the hottest, of which nothing is read; hot to cold granules stay.
    Either way the prediction counts what is left to read."""
    config = json.loads(TINY_CONFIGS["opt"]) | {"ffn_dim": 16384, "hidden_size": 240, "word_embed_proj_dim": 240}
    spec, weights = spec_from_config(config, "here"), parse_format("float32-neurons")
    rates_of = (
        Rate("host", "*", "*", 1e-6, 1e-11, 1e-12), Rate("disk0", "*", "*", 1e-4, 1e-9),
        Rate("disk0", "pick", "*", 1e-5, 1e-9),
    )  # fmt: skip
    ask = Ask(context=64, host_memory_bytes=MACHINE.process_bytes + (66 << 20))
    hot = [0.9] * 1024 + [0.002] * (16384 - 1024)
    for rates in (hot, random.Random(0).sample(hot, len(hot))):
        known = RouterTrace(
            ((),) * len(spec.layers), "made up", fires=(array("f", rates).tobytes(),) * len(spec.layers)
        )
        solved = solve(ask, spec, weights, replace(MACHINE, rates=rates_of), trace=known)
        check_plan(solved.plan, spec, weights)
        asked = [unit for unit in solved.plan.units if unit.asked]
        assert asked, solved.reasons
    assert all(unit.recent_slots >= 0.05 * (unit.hi - unit.lo) * 64 - 1 for unit in asked), solved.reasons
    assert any("slots for" in reason for reason in solved.reasons)
    without = replace(solved.plan, units=tuple(replace(unit, recent_slots=0) for unit in solved.plan.units))
    plain = predict(with_arenas(without), ask, replace(MACHINE, rates=rates_of), trace=known)
    assert solved.prediction.disk_bytes_per_token < 0.5 * plain.disk_bytes_per_token
