"""PIPO's figures, and FlexGen's beside them, as penstock's planner predicts them.

Each row's policy is a plan of `solve/pipo`: whole blocks of attention and FFN, all computed on the device, weights and
KV where the row says; PIPO's pipeline is the order "overlapped", FlexGen's the order "flexgen", with the same ring for
two blocks. Prompts of a batch are read together. What a row does not say is assumed for all such rows alike: batch 4,
which Table 6 states and Tables 3 and 5 imply between them (0.837 s a token at batch 1, 4.925 tokens/s); weights in the
checkpoint's own format; KV in RAM (section 3.1.1) in half precision; answers of 32 tokens (section 4.1).
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from bench.papers.compare import Predicted, explained, machine_of, model_of
from bench.papers.published import DESKTOP, LAPTOP, SEVERAL, UNSUPPORTED, Published
from bench.papers.stand_ins import dense, sparing
from bench.papers.traits import Traits, of_system
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.programs.pipo_memory import Configuration
from penstock.planner.simulate import WARM_PASSES, Simulator
from penstock.planner.solve import pipo
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.part_keys import head_key
from penstock.spec.parts import FFNS, parts
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import GIB

BATCH, MOST_BATCH, OUTPUT = 4, 32, 32  # assumed; the largest, and the answers, of section 4.1
# Of appendix C.4: the best of Figure 12 is taken to be the largest batch of section 4.1, and that DeepSeek-R1 answered
# at all, to be one sequence, in the 8 bits of its checkpoint.
_BATCHES = {"mixtral-8x7b": MOST_BATCH, "deepseek-r1-671b": 1}
_OWN_FORMAT = {"deepseek-r1-671b": "int8"}
NOT_PREDICTED = {
    "transfers from disk to device alone": "a measurement of one part, which the machine file takes from data sheets",
}

# Physics: one direction of PCIe 4.0 (x8, x16), of a disk's four lanes, device memory, half precision on tensor cores.
_LINK = {LAPTOP: 15.75e9, DESKTOP: 31.5e9}
_DISK = 7.88e9
_MEMORY = {LAPTOP: 336e9, DESKTOP: 1008e9}
_FLOPS = {LAPTOP: 22.81e12, DESKTOP: 165.15e12}
_HOST_BYTES = {LAPTOP: 16 * GIB, DESKTOP: 64 * GIB}  # the machine's; its tier is less by what the system takes
_HOMES: dict[str, Tier] = {"on the device": GPU.executor, "in RAM": HOST, "on disk": DISK.tier}
_ORDERS = {"PIPO": "overlapped", "FlexGen": "flexgen"}
_FAMILIES = ("opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "llama-3.1-8b", "llama-3.1-70b")  # section 4.1
_STEADY_PASSES = 2  # as planner.predict, without a spread
_PARTS_OF_PIPO = ("the pipeline alone", "with the transfer suite")  # of Figure 9
_UTILISATION = (("llama-3.1-8b", 16), ("opt-30b", 12))  # appendix C.1, int4 from the disk


class Policy(NamedTuple):
    """What a row does, complete. `share`: of weights on the device, the rest at `home`. `traits`: of its system."""

    machine: str
    model: str
    weights: str
    kv: str
    prompt: int
    output: int
    batch: int
    order: str
    home: Tier
    share: float
    kv_home: Tier
    traits: Traits


@dataclass(frozen=True)
class Speeds:
    """Seconds until the batch has its first tokens, of which the device computes `ttft_busy_s`; of a step after them,
    at the middle of the output; and the plan's bytes per tier."""

    ttft_s: float
    ttft_busy_s: float
    step_s: float
    step_busy_s: float
    tier_bytes: dict[Tier, int]

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
        busy_s = simulator.run(lowering.step(p)).busy_s().get(GPU.kernels, 0.0)
        simulator.pause(cost.between_passes_s)
        return simulator.now_s - start_s, busy_s

    first = [run(p) for p in passes.prompts(plan, range(seqs), [ask.prompt_tokens] * seqs, passes.DECODE)]
    position = ask.prompt_tokens + ask.output_tokens // 2
    decode = passes.decode(plan, range(seqs), (position,) * seqs, passes.DECODE)
    steps = [run(decode) for _ in range(WARM_PASSES + _STEADY_PASSES)][WARM_PASSES:]
    return Speeds(
        ttft_s=sum(seconds for seconds, _ in first), ttft_busy_s=sum(busy_s for _, busy_s in first),
        step_s=sum(seconds for seconds, _ in steps) / len(steps), tier_bytes=plan.tier_bytes(),
        step_busy_s=sum(busy_s for _, busy_s in steps) / len(steps),
    )  # fmt: skip


def predicted(row: Published, traits: Traits) -> Predicted | None:
    """None: see NOT_PREDICTED, or a model that `ModelSpec` cannot say. Raises what the planner refuses with."""
    if row.setting in NOT_PREDICTED or row.model in UNSUPPORTED:
        return None
    if row.metric == "speedup":
        return _speedup(row, traits)
    if row.metric == "share":
        return _utilisation(row, traits)
    policy = policy_of(row, traits)
    speeds, share = simulated(policy)
    value = {
        "throughput": speeds.throughput(policy.batch, policy.output),
        "ttft_s": speeds.ttft_s,
        "decode_s": speeds.step_s,
        "device_gb": speeds.tier_bytes[GPU.executor] / 1e9,
        "host_gb": (speeds.tier_bytes[HOST] + _system_bytes(policy.machine)) / 1e9,
    }[row.metric]
    notes = _assumed(row)
    if share < policy.share:
        notes.append(f"{policy.share:.0%} of the weights do not fit the device: {share:.0%} there")
    most = bound(row, policy, row.batch or MOST_BATCH)
    if row.batch is None:
        alone = bound(row, policy, 1)
        notes.append(f"batch {policy.batch} assumed, bound at {MOST_BATCH}; at batch 1 it would be {alone:.3g}")
    return explained(row, value, most, *notes)


def policy_of(row: Published, traits: Traits) -> Policy:
    """A row's, with what it does not say assumed."""
    share = re.match(r"weights (\d+)% on the device, \d+% in RAM", row.setting)
    places = re.match(r"weights (on the device|in RAM|on disk)(?:, KV (on the device|in RAM))?$", row.setting)
    assert share or places, row.setting
    home = HOST if share else _HOMES[places[1]]  # type: ignore[index]
    kv_home = _HOMES[places[2]] if places and places[2] else HOST
    assert row.prompt is not None
    return Policy(
        row.machine, row.model, row.weights or _OWN_FORMAT.get(row.model, ""), row.kv or "float16", row.prompt,
        row.output or OUTPUT, row.batch or _BATCHES.get(row.model, BATCH), _ORDERS[row.system], home,
        int(share[1]) / 100 if share else float(home == GPU.executor), kv_home,
        of_system(traits, row.paper, row.system),
    )  # fmt: skip


@cache
def simulated(policy: Policy) -> tuple[Speeds, float]:
    """Its speeds, and the share of weights that the device holds: the policy's, or what fits. Experts are those that
    the rows of a prompt go to, and after it those of a step."""
    if not model_of(policy.model, policy.weights)[0].is_routed:
        plan, ask, machine, share = planned(policy)
        return together(plan, ask, machine), share
    found = []
    for rows in (policy.batch * policy.prompt, policy.batch):
        plan, ask, machine, share = planned(policy, rows)
        found.append(together(plan, ask, machine))
    return replace(found[0], step_s=found[1].step_s, step_busy_s=found[1].step_busy_s), share


def planned(policy: Policy, rows: int = 0) -> tuple[Plan, Ask, MachineSpec, float]:
    """Its plan, for what and on which machine, and the share of weights that the device holds. `rows`: of a pass, of a
    model with experts, for which stands a dense one."""
    spec, fmt = model_of(policy.model, policy.weights)
    ask = Ask(
        prompt_tokens=policy.prompt, output_tokens=policy.output, batch=policy.batch, kv=policy.kv,
        context=policy.prompt + policy.output,
    )  # fmt: skip
    machine = machine_of(policy.machine, policy.traits)
    if spec.is_routed:
        machine, spec = sparing(machine, spec, rows), dense(spec, rows)
    problem = Problem(ask, spec, fmt, machine)
    share, plan = policy.share, None
    while plan is None or (not problem.fits(plan) and policy.home != GPU.executor and share > 0.01):
        share -= 0.01 if plan else 0.0
        choice = Configuration(policy.home, "overlapped", share)
        plan = pipo.plan(problem, choice, policy.kv_home, policy.batch * policy.prompt, policy.order)
    return plan, problem.ask, machine, share


def throughput(policy: Policy) -> float:
    return simulated(policy)[0].throughput(policy.batch, policy.output)


def bound(row: Published, policy: Policy, batch: int) -> float | None:
    """The best that the machine's links, memory and arithmetic allow at a batch, with 4.0 bits an int4 weight. Of
    experts, as many are wanted as one token goes to: all tokens may go to the same ones."""
    spec, fmt = model_of(policy.model, policy.weights)
    weights = 0
    for part in parts(spec, fmt):
        if part.kind in ("attn", *FFNS) or part.key == head_key(spec):
            wanted = spec.layers[part.layer].active if part.experts > 1 else 1
            weights += part.weights_of(0, wanted * part.expert_granules)
    weight_bytes, a = weights * fmt.bits / 8, spec.layers[0].attention
    tokens = policy.prompt + policy.output // 2
    kv_bytes = 2 * batch * tokens * len(spec.layers) * a.kv_heads * a.head_dim * parse_format(policy.kv).bits / 8
    away = (1 - policy.share) * weight_bytes
    if row.metric in ("device_gb", "host_gb"):
        tier = GPU.executor if row.metric == "device_gb" else HOST
        held = policy.share * weight_bytes if tier == GPU.executor else away if policy.home == HOST else 0.0
        return (held + (kv_bytes if policy.kv_home == tier else 0.0)) / 1e9 or None
    moved_s = away / (min(_LINK[policy.machine], _DISK) if policy.home == DISK.tier else _LINK[policy.machine])
    kv_s = kv_bytes / _LINK[policy.machine] if policy.kv_home == HOST else 0.0
    step_s = max(moved_s, kv_s, weight_bytes / _MEMORY[policy.machine])
    ttft_s = max(moved_s, 2 * weights * batch * policy.prompt / _FLOPS[policy.machine])
    whole = batch * policy.output / (ttft_s + (policy.output - 1) * step_s)
    return {"throughput": whole, "ttft_s": ttft_s, "decode_s": step_s}[row.metric]


def _speedup(row: Published, traits: Traits) -> Predicted:
    """PIPO's throughput over FlexGen's: of one policy, or the mean or most of several."""
    weights, batch = row.weights or "float16", row.batch or BATCH
    models = (row.model,) if row.model != SEVERAL else _FAMILIES if row.weights else ("opt-6.7b", "llama-3.1-8b")
    homes: tuple[Tier, ...] = (GPU.executor, HOST, DISK.tier)
    homes = homes[2:] if "on disk" in row.setting else homes[1:] if row.weights else homes
    flexgen, mine = of_system(traits, row.paper, "FlexGen"), _ablation(row, traits)
    found = []
    for model in models:
        for home in homes:
            ours, theirs = (
                Policy(
                    row.machine, model, weights, "float16", 512, 32, batch, order, home,
                    float(home == GPU.executor), HOST, system,
                )
                for order, system in (("overlapped", mine), ("flexgen", flexgen))
            )  # fmt: skip
            if home != HOST or simulated(ours)[0].tier_bytes[HOST] <= machine_of(row.machine).tier(HOST).bytes:
                found.append(throughput(ours) / throughput(theirs))
    value = max(found) if "most" in row.setting else statistics.mean(found)
    found_of = explained(row, value, None, f"{len(found)} policies at batch {batch}")
    # Appendix C.2 takes parts of the system away, which only traits tell apart.
    return replace(found_of, is_policy=bool(traits) or not any(part in row.setting for part in _PARTS_OF_PIPO))


def _ablation(row: Published, traits: Traits) -> Traits:
    """PIPO's traits, or those of appendix C.2: its pipeline with FlexGen's transfers and kernels, then with its own
    transfers, then with its own kernels as well. The pipeline hides FlexGen's copies of what was read."""
    flexgen, pipo_own = (of_system(traits, row.paper, system) for system in ("FlexGen", "PIPO"))
    own_but_kernels = tuple(t for t in pipo_own if not t.kind.startswith(("unpacking", "products of few rows")))
    kernels = tuple(t for t in flexgen if t.kind.startswith("unpacking"))
    transfers = tuple(t for t in flexgen if t.kind.startswith("disk reads"))
    alone, with_transfers = _PARTS_OF_PIPO
    if alone in row.setting:
        return (*own_but_kernels, *kernels, *transfers)
    return (*own_but_kernels, *kernels) if with_transfers in row.setting else pipo_own


def _utilisation(row: Published, traits: Traits) -> Predicted:
    """The share of time in which the device computes: the mean of appendix C.1's two settings."""
    found = []
    for model, batch in _UTILISATION:
        policy = Policy(
            row.machine, model, "int4", "float16", 512, 32, batch, _ORDERS[row.system], DISK.tier, 0.0, HOST,
            of_system(traits, row.paper, row.system),
        )  # fmt: skip
        found.append(simulated(policy)[0].device_share(policy.output))
    return explained(row, statistics.mean(found), 1.0, "the settings of appendix C.1")


def _system_bytes(machine: str) -> int:
    """What the machine file leaves to the system: the paper's figures are the whole machine's (16.57 GB of 17.18)."""
    return _HOST_BYTES[machine] - machine_of(machine).tier(HOST).bytes


def _assumed(row: Published) -> list[str]:
    found = []
    if row.weights is None:
        found.append("weights in the checkpoint's own format")
    if row.model in _BATCHES:
        found.append("experts as a dense FFN of those that are wanted, where each row draws for itself")
    if row.metric == "host_gb":
        found.append("with the 3 GiB that the machine file leaves to the system")
    return found
