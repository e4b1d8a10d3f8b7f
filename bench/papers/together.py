"""A plan's speed as the papers count it: the prompts, the steps, and how much of both the device computes.

As `planner.predict`, with the device's own share.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.simulate import Simulator
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import DEVICE, Plan

_WARM_PASSES, _STEADY_PASSES = 2, 2  # as planner.predict, without a spread


@dataclass(frozen=True)
class Speeds:
    """Seconds until the batch has its first tokens, of which the device computes `ttft_busy_s`; of a step after them,
    at the middle of the output; and the plan's bytes per tier."""

    ttft_s: float
    ttft_busy_s: float
    step_s: float
    step_busy_s: float
    tier_bytes: dict[str, int]

    def answer_s(self, output: int) -> float:
        """Seconds for `output` tokens of each sequence, the first with the prompts."""
        return self.ttft_s + (output - 1) * self.step_s

    def throughput(self, batch: int, output: int) -> float:
        """Tokens a second of the whole batch, the prompts' time counted."""
        return batch * output / self.answer_s(output)

    def device_share(self, output: int) -> float:
        """Of the answer's time, the share in which the device computes."""
        return (self.ttft_busy_s + (output - 1) * self.step_busy_s) / self.answer_s(output)


def together(plan: Plan, ask: Ask, machine: MachineSpec) -> Speeds:
    """Lowers and simulates the prompts and some decode passes."""
    cost = Cost(machine)
    lowering, simulator = Lowering(plan), Simulator(cost)
    seqs = min(ask.batch, plan.batch_seqs * plan.batches_per_pass)

    def run(p: Pass) -> tuple[float, float]:
        start_s = simulator.now_s
        busy_s = simulator.run(lowering.step(p)).busy_s().get(DEVICE, 0.0)
        simulator.pause(cost.between_passes_s)
        return simulator.now_s - start_s, busy_s

    first = [run(p) for p in passes.prompts(plan, range(seqs), [ask.prompt_tokens] * seqs, passes.DECODE)]
    position = ask.prompt_tokens + ask.output_tokens // 2
    decode = passes.decode(plan, range(seqs), (position,) * seqs, passes.DECODE)
    steps = [run(decode) for _ in range(_WARM_PASSES + _STEADY_PASSES)][_WARM_PASSES:]
    return Speeds(
        ttft_s=sum(seconds for seconds, _ in first), ttft_busy_s=sum(busy_s for _, busy_s in first),
        step_s=sum(seconds for seconds, _ in steps) / len(steps), tier_bytes=plan.tier_bytes(),
        step_busy_s=sum(busy_s for _, busy_s in steps) / len(steps),
    )  # fmt: skip
