"""What a plan will do on a machine: simulate the passes that the engine will run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import fetched_bytes, ring_bytes
from penstock.planner.cost import Cost
from penstock.planner.simulate import Simulator
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan

# The first decode pass still profits from loads that ran ahead during prefill; and passes differ a little, since
# units do not fill a ring evenly.
_WARM_PASSES, _STEADY_PASSES = 1, 2


@dataclass(frozen=True)
class Prediction:
    """`decode_tokens_per_s` is of the whole batch, at the context half-way through the output. `bound_by`: the
    lane that is busiest while decoding. `disk_bytes_per_token`: read per decode pass, per sequence."""

    ttft_s: float
    decode_tokens_per_s: float
    total_s: float
    bound_by: str
    lane_share: dict[str, float]
    disk_bytes_per_token: float
    peak_host_bytes: int
    peak_device_bytes: int


def predict(plan: Plan, ask: Ask, machine: MachineSpec) -> Prediction:
    """Lowers and simulates the prompts and a few decode passes."""
    lowering, simulator = Lowering(plan), Simulator(Cost(machine))
    seqs = tuple(range(min(ask.batch, plan.batch_seqs * plan.batches_per_pass)))
    prompt = max(1, min(ask.prompt_tokens, plan.context - 1))
    for seq in seqs:
        then = passes.DECODE if seq == seqs[-1] else None
        for p in passes.prefill(plan, seq, prompt, then):
            simulator.run(lowering.step(p))
    ttft_s = simulator.now_s
    position = min(prompt + ask.output_tokens // 2, plan.context - 1)
    streamed = 0
    busy: dict[str, float] = {}
    steady_s = 0.0
    for i in range(_WARM_PASSES + _STEADY_PASSES):
        if i == _WARM_PASSES:
            busy, steady_s = {}, simulator.now_s
        tasks = list(lowering.step(passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)))
        for lane, seconds in simulator.run(tasks).busy_s().items():
            busy[lane] = busy.get(lane, 0.0) + seconds / _STEADY_PASSES
        streamed = sum(ring_bytes(task) + fetched_bytes(task) for task in tasks)
    step_s = (simulator.now_s - steady_s) / _STEADY_PASSES
    tier_bytes = plan.tier_bytes()
    bound_by = max(busy, key=lambda lane: busy[lane])
    return Prediction(
        ttft_s=ttft_s,
        decode_tokens_per_s=len(seqs) / step_s,
        total_s=ttft_s + step_s * ask.output_tokens,
        bound_by=bound_by,
        lane_share={lane: seconds / step_s for lane, seconds in busy.items()},
        disk_bytes_per_token=streamed / len(seqs),
        peak_host_bytes=tier_bytes["host"],
        peak_device_bytes=sum(n for tier, n in tier_bytes.items() if tier.startswith("gpu")),
    )
