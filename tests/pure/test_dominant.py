"""Which figure of a machine predicted seconds hang on: shares by hand, and for plans of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph.resident import resident_plan
from penstock.planner.cost import Cost
from penstock.planner.dominant import of_decoding, of_prompts
from penstock.planner.predict import predict
from penstock.planner.solve import settle_context, solve
from penstock.planner.timelines import timelines
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Figure, Rate, Sharing
from penstock.units import GIB, MIB
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

BF16 = Format("bfloat16")
# As a probe has them: rates of ops, and overheads.
RATES = (
    Rate("host", "ffn", "bfloat16", 1e-6, 1 / 40e9, 1e-12, rows=1),
    Rate("host", "ffn", "bfloat16", 1e-6, 1 / 40e9, 1e-11),
    Rate("host", "pass", "*", 2e-4, 0.0),
    Rate("host", "task", "*", 5e-5, 0.0),
    Rate("host", "call", "*", 1e-5, 0.0),
    Rate("disk0", "task", "*", 2e-5, 0.0),
)
PROBED = replace(MACHINE, rates=(*MACHINE.rates, *RATES), sharing=(Sharing("host", "disk0", 1.2),))


def test_a_large_model_in_memory_hangs_on_its_ffns_bytes() -> None:
    """1B: 805 of 1236 M weights are in FFNs, at the speed of all others. The prompt: on the FFN's flops."""
    ask = Ask(context=512, prompt_tokens=256)
    solved = solve(ask, LLAMA_1B, BF16, PROBED)
    p = solved.prediction
    found = of_decoding(solved.plan, p, PROBED, 300, 1)
    assert found.figure == Figure("host", "ffn", "bfloat16", 1, "s_per_byte")
    assert found.share == pytest.approx(805 * 2e6 / 40e9 * p.decode_tokens_per_s, rel=0.01)
    found = of_prompts(solved.plan, p, PROBED, 256, 1)
    assert found.figure == Figure("host", "ffn", "bfloat16", 0, "s_per_flop")
    assert found.share == pytest.approx(256 * 2 * 805e6 * 1e-11 / p.ttft_s, rel=0.02)


def test_a_tiny_model_hangs_on_what_a_pass_costs() -> None:
    plan = resident_plan(model(), Format("float32"), kv=Format("float32"), context=256)
    p = predict(plan, Ask(context=256), PROBED)
    found = of_decoding(plan, p, PROBED, 64, 1)
    assert found.figure == Figure("host", "pass", "*", 0, "alpha_s")
    assert found.share == pytest.approx(2e-4 * p.decode_tokens_per_s)


def test_what_streams_hangs_on_the_disks_bytes() -> None:
    ask = Ask(host_memory_bytes=GIB, context=512, prompt_tokens=4)
    solved = solve(ask, LLAMA_1B, BF16, PROBED)
    p = solved.prediction
    for found in (of_decoding(solved.plan, p, PROBED, 64, 1), of_prompts(solved.plan, p, PROBED, 4, 1)):
        assert found.figure == Figure("disk0", "*", "*", 0, "s_per_byte") and 0.8 < found.share <= 1


def test_addends_are_what_a_task_takes() -> None:
    ask = settle_context(Ask(host_memory_bytes=GIB, context=512, batch=3), LLAMA_1B)
    plan, cost = solve(ask, LLAMA_1B, BF16, PROBED).plan, Cost(PROBED)
    from penstock.graph import passes
    from penstock.graph.lower import Lowering

    lowering, seqs = Lowering(plan), range(3)
    wanted = [*passes.prompts(plan, seqs, (64,) * 3, passes.DECODE), passes.decode(plan, seqs, (64,) * 3, None)]
    for task in (task for p in wanted for task in lowering.step(p)):
        per_lane = [sum(seconds for _, seconds in cost.by_figure(lane, task)) for lane in task.lanes]
        assert max(per_lane) == pytest.approx(cost.seconds(task))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("prompt", [1, 700])
@pytest.mark.parametrize("mib", [300, 900, 4000])
@pytest.mark.parametrize("device", [0, 600 * MIB])
def test_every_plan_hangs_on_something(device: int, mib: int, prompt: int, batch: int) -> None:
    machine = replace(WITH_DEVICE, rates=(*WITH_DEVICE.rates, *RATES), device_process_bytes=0) if device else PROBED
    spec = replace(LLAMA_1B, layers=LLAMA_1B.layers[:4], vocab=32000)
    ask = Ask(host_memory_bytes=mib * MIB, device_memory_bytes=device or None, context=1024, prompt_tokens=prompt,
              batch=batch, kv_home="disk" if mib == 300 and not device else None)  # fmt: skip
    solved = solve(settle_context(ask, spec), spec, BF16, machine)
    p = solved.prediction
    seqs = min(batch, solved.plan.batch_seqs * solved.plan.batches_per_pass)
    for found, lane in (
        (of_decoding(solved.plan, p, machine, prompt, seqs), p.bound_by),
        (of_prompts(solved.plan, p, machine, prompt, seqs), p.ttft_bound_by),
    ):
        assert 0 < found.share <= 1
        assert found.figure.lane in (lane, "host", "h2d0", "d2h0", "disk0")


def test_a_lane_that_rests_in_that_pass() -> None:
    ask = Ask(context=512)
    solved = solve(ask, LLAMA_1B, BF16, MACHINE)
    p = replace(solved.prediction, bound_by="disk0", lane_share={"disk0": 1.0}, ttft_lane_share={"disk0": 1.0})
    assert of_decoding(solved.plan, p, MACHINE, 64, 1).share == of_prompts(solved.plan, p, MACHINE, 64, 1).share == 0


def test_lanes_before_the_first_token() -> None:
    """As the timeline of the prompt has them."""
    ask = settle_context(Ask(host_memory_bytes=GIB, context=512, prompt_tokens=400), LLAMA_1B)
    solved = solve(ask, LLAMA_1B, BF16, MACHINE)
    found = predict(solved.plan, ask, MACHINE)
    busy: dict[str, float] = {}
    for timeline, p in timelines(solved.plan, ask, MACHINE, 1):
        if p is not None and p.purpose == "prefill":
            busy = {lane: busy.get(lane, 0.0) + seconds for lane, seconds in timeline.busy_s().items()}
    assert set(found.ttft_lane_share) == set(busy)
    for lane, seconds in busy.items():
        assert found.ttft_lane_share[lane] == pytest.approx(min(1, seconds / found.ttft_s), rel=1e-6)
    assert found.ttft_bound_by == max(busy, key=lambda lane: busy[lane])
    assert solved.prediction.ttft_bound_by == found.ttft_bound_by
