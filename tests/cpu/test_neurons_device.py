"""Neurons that do not fire on a device and beside it: any placement of either layout says what the same plan says with
nothing left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.arenas import neurons_of, with_arenas
from penstock.graph.check_plan import check_plan
from penstock.planner.firing import expected, foretold
from penstock.planner.solve import powerinfer, solve
from penstock.runtime.device.choose import choose
from penstock.runtime.device.cuda.device import TorchDevice
from penstock.spec.ask import Ask
from penstock.spec.parts import predictor_part
from penstock.spec.plan import Plan, Predictor
from penstock.spec.predictors import FORMAT
from penstock.store.packed import Packed, open_packed
from penstock.store.predictors import kept, with_predictors
from penstock.units import MIB
from tests.cpu.engines import MACHINE
from tests.cpu.placements import NEAR, run
from tests.cpu.test_emulated import ROOMY, on_device
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_predict import give_predictors
from tests.plans import device_plans, page_orders, resident_plan

KINDS = [
    (name, weights) for name in ("opt", "llama", "falcon") for weights in ("float32-neurons", "int4-neurons", "int4")
]


@pytest.fixture(scope="module")
def relu_models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Packed]:
    folder = tmp_path_factory.mktemp("relu")
    return {kind: open_packed(relu_model(folder, *kind)) for kind in KINDS}


@pytest.mark.fuzz
@given(st.data())
def test_any_placement(relu_models: dict[tuple[str, str], Packed], data: st.DataObject) -> None:
    """On an emulated device, with ring slots poisoned: what is left out changes no bit, nor does what ran first.

    Activations are float32. Where they are rounded to int8, the order of a sum over two executors may round one of them
    the other way: here 1e-2 of a logit of 4."""
    packed = relu_models[data.draw(st.sampled_from(KINDS))]
    plan = data.draw(device_plans(packed.spec, packed.weights, batch_seqs=2, kv="float32"))
    plan, order = data.draw(page_orders(plan))
    exact = replace(plan, sparsity="exact")
    for each in (plan, exact):
        check_plan(each, packed.spec, packed.weights)
    found = on_device(packed, exact, data.draw(st.integers(0, 1000)), order=order, exact=True)
    np.testing.assert_array_equal(found, on_device(packed, exact, order=order, serial=True, exact=True))
    np.testing.assert_array_equal(found, on_device(packed, plan, order=order, exact=True))
    resident = run(packed, resident_plan(packed.spec, packed.weights, batch_seqs=2, kv="float32"), exact=True)
    assert np.abs(found - resident).max() <= NEAR["float32"]


@pytest.mark.fuzz
@given(st.data())
def test_any_placement_by_torch(relu_models: dict[tuple[str, str], Packed], data: st.DataObject) -> None:
    packed = relu_models[data.draw(st.sampled_from(KINDS))]
    plan = replace(data.draw(device_plans(packed.spec, packed.weights, batch_seqs=2, kv="float32")), sparsity="exact")
    found = run(packed, plan, device=TorchDevice(torch.device("cpu"), ROOMY, 0), exact=True, poisoned=True)
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=2, kv="float32")
    assert np.abs(found - run(packed, resident, exact=True)).max() <= NEAR["float32"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_planner_proposes_runs(relu_models: dict[tuple[str, str], Packed], kind: tuple[str, str]) -> None:
    """Every plan beside a device that holds a part of the model."""
    packed, limit = relu_models[kind], 9 * MIB
    chosen = choose("emulated", MACHINE, limit)
    ask = Ask(context=64, batch=2, kv="float32", score=True, device_memory_bytes=limit, use_device=True)
    solved = solve(ask, packed.spec, packed.weights, chosen.machine)
    resident = run(packed, resident_plan(packed.spec, packed.weights, batch_seqs=2, kv="float32"), exact=True)
    runs = [each.candidate.plan for each in solved.compared if not each.candidate.cannot_run]
    assert solved.plan in runs and any(unit.decode == "gpu0" for unit in solved.plan.units)
    for plan in runs[:4]:
        assert plan.sparsity == "exact"
        check_plan(plan, packed.spec, packed.weights)
        assert np.abs(on_device(packed, plan, exact=True) - resident).max() <= NEAR["float32"]


PREDICTED = [
    (name, weights)
    for name in ("opt", "llama")
    for weights in ("float32", "float32-neurons", "float32-records", "int4-records")
]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, float], Packed]:
    """Models with predictors that call some neurons active, and all."""
    found = {}
    for kind in PREDICTED:
        for shift in (-0.3, 1e6):
            folder = relu_model(tmp_path_factory.mktemp("predicted"), *kind)
            give_predictors(folder, shift)
            found[(*kind, shift)] = with_predictors(open_packed(folder))
    return found


def with_homes(plan: Plan, packed: Packed, homes: list[str]) -> Plan:
    """The plan with the model's predictors at these homes."""
    spec = packed.spec
    known = tuple(Predictor(i, 32, home, FORMAT, packed.ahead) for i, home in enumerate(homes))
    stage = max(predictor_part(i, spec.d_model, 32, neurons_of(x), FORMAT).nbytes for i, x in enumerate(spec.layers))
    if "gpu0" in homes:
        plan = replace(plan, stage_bytes=max(plan.stage_bytes, stage))
    return with_arenas(replace(plan, sparsity="predict", predictors=known))


@pytest.mark.fuzz
@given(st.data())
def test_any_placement_with_predictors(predicted: dict[tuple[str, str, float], Packed], data: st.DataObject) -> None:
    """On an emulated device, predictors in either memory: whatever ran first, the bits of one task after the other.
    Predictors that call all neurons active change no bit of what is computed without."""
    key = data.draw(st.sampled_from(sorted(predicted)))
    packed = replace(predicted[key], ahead=data.draw(st.sampled_from([0, 1])))
    plan = data.draw(device_plans(packed.spec, packed.weights, shares=False, batch_seqs=2, kv="float32"))
    homes = [data.draw(st.sampled_from(["host", plan.main])) for _ in packed.spec.layers]
    predicts = with_homes(plan, packed, homes)
    check_plan(predicts, packed.spec, packed.weights)
    found = on_device(packed, predicts, data.draw(st.integers(0, 1000)), exact=True)
    np.testing.assert_array_equal(found, on_device(packed, predicts, serial=True, exact=True))
    if key[-1] > 1:
        np.testing.assert_array_equal(found, on_device(packed, plan, exact=True))


@pytest.mark.fuzz
@given(st.data())
def test_any_placement_with_predictors_by_torch(
    predicted: dict[tuple[str, str, float], Packed], data: st.DataObject
) -> None:
    packed = replace(predicted[(*data.draw(st.sampled_from(PREDICTED)), 1e6)], ahead=data.draw(st.sampled_from([0, 1])))
    plan = data.draw(device_plans(packed.spec, packed.weights, shares=False, batch_seqs=2, kv="float32"))
    plan = with_homes(plan, packed, [plan.main] * len(packed.spec.layers))
    found = run(packed, plan, device=TorchDevice(torch.device("cpu"), ROOMY, 0), exact=True, poisoned=True)
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=2, kv="float32")
    assert np.abs(found - run(packed, resident, exact=True)).max() <= NEAR["float32"]


@pytest.mark.parametrize("weights", ["float32-neurons", "float32-records"])
def test_predictors_are_planned_beside_a_device(predicted: dict[tuple[str, str, float], Packed], weights: str) -> None:
    """Hot and cold neurons run, and say what the same plan says one task after the other."""
    packed, limit = predicted["opt", weights, -0.3], 9 * MIB
    known = kept(packed.folder, packed.spec)
    assert known is not None
    chosen = choose("emulated", MACHINE, limit)
    ask = Ask(
        context=64, batch=2, kv="float32", score=True, device_memory_bytes=limit, use_device=True, sparsity="predict"
    )
    firing = replace(expected(packed.spec), foretold=foretold(known, packed.spec))
    solved = solve(ask, packed.spec, packed.weights, chosen.machine, firing=firing, every=True)
    candidates = [each.candidate for each in solved.compared if not each.candidate.cannot_run]
    runs = {name: each.plan for each in candidates for name in each.names}
    assert {powerinfer.NAME, powerinfer.MEASURED, powerinfer.HOTTEST} <= set(runs)
    for name in (powerinfer.NAME, powerinfer.MEASURED, solved.strategy):
        plan = runs[name]
        assert plan.sparsity == "predict" and {each.home for each in plan.predictors} <= {"gpu0", "host"}
        check_plan(plan, packed.spec, packed.weights)
        np.testing.assert_array_equal(
            on_device(packed, plan, exact=True), on_device(packed, plan, serial=True, exact=True)
        )
