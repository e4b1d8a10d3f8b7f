"""Passes that are not lowered or not simulated, since others tell what they would take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner import predict as predicting
from penstock.planner.predict import predict
from penstock.planner.solve import settle_context, solve
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import Rate
from penstock.units import MIB
from tests.plans import device_plans, random_plans
from tests.pure.expert_caches import cached_plan
from tests.pure.machine import LLAMA_1B, MACHINE, model


@pytest.mark.parametrize("limit_mib", [350, 700, 3000])
@pytest.mark.parametrize(("prompt", "batch"), [(700, 1), (330, 4)])
def test_sampled_chunks_tell_the_sum(limit_mib: int, prompt: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(prompt_tokens=prompt, batch=batch, context=1024, host_memory_bytes=limit_mib * MIB, kv="int4")
    ask = settle_context(ask, LLAMA_1B)
    plan = replace(solve(ask, LLAMA_1B, parse_format("int4"), MACHINE).plan, chunk_rows=16)
    found = predict(plan, ask, MACHINE, spread=False)
    monkeypatch.setattr(predicting, "_SAMPLED_PASSES", 10**6)
    assert found.ttft_s == pytest.approx(predict(plan, ask, MACHINE, spread=False).ttft_s, rel=0.02)


@pytest.mark.parametrize(("alike", "most"), [(False, 10), (True, 6)])
def test_every_pass_is_counted_once(alike: bool, most: int) -> None:
    for count in range(1, 80):
        starts = [0 if alike else i for i in range(count)]
        wanted = [Pass("prefill", (Batch(i, (0,), (start,), (1,), ()),), None) for i, start in enumerate(starts)]
        sampled = list(predicting._sampled(wanted))
        assert sum(times for _, times in sampled) == count and len(sampled) <= most
        numbers = [p.batches[0].id for p, _ in sampled]
        assert numbers == sorted(set(numbers))


@given(st.data())
def test_passes_that_come_round_are_those_of_the_lowering(data: st.DataObject) -> None:
    """What streams comes round, and the tasks with it, edges and all."""
    plans = data.draw(st.sampled_from([random_plans, device_plans]))
    plan = data.draw(plans(model(layers=2), data.draw(st.sampled_from([Format("float32"), parse_format("int4")]))))
    prompt = data.draw(st.integers(1, 40))
    step = passes.decode(plan, (0,), (prompt,), passes.DECODE)

    lowering, other = Lowering(plan), Lowering(plan, recurs=False)
    for p in passes.prompts(plan, (0,), (prompt,), passes.DECODE):
        _, before = list(other.step(p)), len(list(lowering.step(p)))
    for _ in range(8):
        tasks, wanted = list(lowering.step(step)), list(other.step(step))
        start = tasks[0].id - before
        for a, b in zip(tasks, wanted, strict=True):
            # What they wait for of the pass before; older ones are done.
            seen = [(t.id, t.lanes, tuple(t.calls), t.reads, [i for i in t.after if i >= start]) for t in (a, b)]
            assert seen[0] == seen[1]
        before = len(tasks)


def test_passes_that_cost_next_to_nothing_take_some_time() -> None:
    """Beside figures of hours a clock in float64 does not see them: the fuzzer found a division by zero."""
    rates = (
        Rate("host", "*", "*", 0, 0, 1e-18),
        Rate("host", "qkv", "*", 0, 0, 1e-18),
        Rate("disk0", "*", "*", 1e6, 1e6),
    )
    machine = replace(MACHINE, rates=rates)
    ask = settle_context(Ask(prompt_tokens=8, context=64), LLAMA_1B)
    found = predict(solve(ask, LLAMA_1B, parse_format("int4"), MACHINE).plan, ask, machine)
    assert 0 < found.decode_tokens_per_s <= 1e12 and found.ttft_s > 0


def test_caches_hold_the_same_with_the_spread_and_without() -> None:
    """The passes that count have the same answers of routers. Of others the speed was up to 9 % off."""
    ask = Ask(prompt_tokens=4, output_tokens=4, context=64)
    whole, quickly = (predict(cached_plan(4), ask, MACHINE, spread) for spread in (True, False))
    assert whole.experts is not None and quickly.experts is not None
    assert quickly.experts.missed == whole.experts.missed
    assert quickly.decode_tokens_per_s == pytest.approx(whole.decode_tokens_per_s, rel=1e-3)
