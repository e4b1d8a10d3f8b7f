"""No plan is predicted to be faster than its bound, and what the bound rules out could not have won."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DoesNotFit
from penstock.planner.bound import least_score_s, score_s
from penstock.planner.candidate import Candidate
from penstock.planner.cost import Cost
from penstock.planner.predict import predict
from penstock.planner.solve import candidates, flexgen, llama_cpp, settle_context, solve
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.places import GPU
from penstock.units import GIB, MIB
from tests.plans import device_plans, random_plans
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

SPEC = model(layers=3)


@given(st.data())
def test_no_prediction_is_better_than_its_bound(data: st.DataObject) -> None:
    weights = data.draw(st.sampled_from([Format("float32"), Format("bfloat16"), parse_format("int4")]))
    beside_device, size = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    plans = device_plans if beside_device else random_plans
    plan = data.draw(plans(SPEC, weights, batch_seqs=size, batches_per_pass=data.draw(st.integers(1, 2))))
    machine = WITH_DEVICE if beside_device else MACHINE
    factor = {rate.lane: data.draw(st.sampled_from([1, 5, 50]), label=rate.lane) for rate in machine.rates}
    rates = (replace(rate, s_per_byte=rate.s_per_byte * factor[rate.lane]) for rate in machine.rates)
    machine = replace(machine, rates=tuple(rates))
    ask = Ask(
        prompt_tokens=data.draw(st.integers(1, 60)), output_tokens=data.draw(st.integers(1, 40)),
        batch=data.draw(st.integers(1, 7)), objective=data.draw(st.sampled_from(["latency", "throughput"])),
    )  # fmt: skip
    found = score_s(predict(plan, ask, machine), plan, ask)
    assert least_score_s(plan, ask, Cost(machine)) <= found * 1.04


@pytest.mark.thinned(3)
@pytest.mark.parametrize("device_mib", [400, 700])
@pytest.mark.parametrize("host_mib", [500, 3000])
@pytest.mark.parametrize("link", [1, 10])
@pytest.mark.parametrize(("prompt", "batch", "objective"), [(64, 1, "latency"), (400, 4, "throughput")])
def test_what_is_not_simulated_could_not_have_won(
    device_mib: int, host_mib: int, link: float, prompt: int, batch: int, objective: str
) -> None:
    rates = (
        replace(rate, s_per_byte=rate.s_per_byte * link) if rate.lane in ("h2d0", "host") else rate
        for rate in WITH_DEVICE.rates
    )
    machine, weights = replace(WITH_DEVICE, rates=tuple(rates)), parse_format("int4")
    ask = settle_context(
        Ask(
            context=512, device_memory_bytes=device_mib * MIB, host_memory_bytes=host_mib * MIB,
            prompt_tokens=prompt, batch=batch, objective=objective,
        ), LLAMA_1B,
    )  # fmt: skip
    every = solve(ask, LLAMA_1B, weights, machine, every=True)
    chosen = solve(ask, LLAMA_1B, weights, machine)
    assert len(every.compared) >= len(chosen.compared)
    best_s = min(score_s(each.prediction, each.candidate.plan, ask) for each in every.compared)
    assert score_s(chosen.prediction, chosen.plan, ask) <= 1.06 * best_s
    # Nor would it be better by more than a few hundredths where reading counts too.
    may = [each for each in every.compared if not each.candidate.cannot_run and not each.candidate.lossy]
    seconds = [score_s(each.prediction, each.candidate.plan, ask) for each in may]
    weighed = [s * each.prediction.disk_bytes_per_token**0.2 for s, each in zip(seconds, may, strict=True)]
    equals = [w for s, w in zip(seconds, weighed, strict=True) if s <= 1.05 * best_s]
    found = score_s(chosen.prediction, chosen.plan, ask) * chosen.prediction.disk_bytes_per_token**0.2
    assert found <= 1.04 * min(equals, default=found)


def test_whole_layers_fill_the_device() -> None:
    """As many as fit, with their KV; one more would not."""
    ask = settle_context(Ask(context=512, device_memory_bytes=700 * MIB), LLAMA_1B)
    (found,) = llama_cpp.candidates(Problem(ask, LLAMA_1B, parse_format("int4"), WITH_DEVICE))
    (count,) = {home.layers[1] for home in found.plan.kv if home.attend == GPU.executor}
    assert 0 < count < len(LLAMA_1B.layers)
    for unit in found.plan.units:
        layer = found.plan.parts[unit.part].layer
        assert layer < 0 or unit.part.endswith("norms") or (unit.home == GPU.executor) == (layer < count)
    roomier = replace(ask, device_memory_bytes=GIB)
    (more,) = llama_cpp.candidates(Problem(roomier, LLAMA_1B, parse_format("int4"), WITH_DEVICE))
    assert max(home.layers[1] for home in more.plan.kv if home.attend == GPU.executor) > count
    assert not list(
        llama_cpp.candidates(
            Problem(replace(ask, device_memory_bytes=300 * MIB), LLAMA_1B, Format("bfloat16"), WITH_DEVICE)
        )
    )


def test_candidates_that_apply_are_all_compared() -> None:
    ask = settle_context(Ask(context=512, device_memory_bytes=700 * MIB), LLAMA_1B)
    asked = {
        each.strategy for each in candidates(Problem(ask, LLAMA_1B, parse_format("int4"), WITH_DEVICE), every=True)
    }
    found = solve(ask, LLAMA_1B, parse_format("int4"), WITH_DEVICE, every=True)
    assert {each.candidate.strategy for each in found.compared} == asked > {llama_cpp.NAME, "RAM"}


def test_what_cannot_run_is_no_reason_not_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little RAM for anything that runs, and a candidate that is only planned."""
    roomy = Ask(context=512, batch=4, objective="throughput")
    planned = Candidate("planned", solve(roomy, LLAMA_1B, Format("bfloat16"), MACHINE).plan, (), "not built yet")
    monkeypatch.setattr(flexgen, "candidates", lambda *_: iter([planned]))
    small = replace(roomy, host_memory_bytes=10 * MIB)
    with pytest.raises(DoesNotFit):
        solve(small, LLAMA_1B, Format("bfloat16"), MACHINE)
    with pytest.raises(DoesNotFit):
        solve(small, LLAMA_1B, Format("bfloat16"), MACHINE, may_plan=True)
