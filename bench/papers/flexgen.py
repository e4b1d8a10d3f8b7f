"""FlexGen's figures, and its peers' beside them, as penstock's planner predicts them.

The slides give a policy for three rows. Those of all rows stand in FlexGen's public repository, FMInference/FlexLLMGen
(benchmark/flexgen/bench_suite.py and bench_*_4x1.sh, benchmark/hf_ds/bench_hf.py and bench_all_1x4.sh,
benchmark/batch_size_table.md), and are taken from there. Each is a plan of `solve/flexgen` on the machine of
Table 1: FlexGen's in its own order of loads, with attention on the CPU where its flags say so. The peers go row by row
with KV on the device: DeepSpeed streams all weights ahead of time, Accelerate loads them when it needs them, so its
time is the sum of the lanes'.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from bench.papers.compare import Predicted, explained, machine_of, model_of
from bench.papers.published import T4, Published
from bench.papers.traits import Traits, of_system
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.cost import Cost
from penstock.planner.programs.policy import Shares
from penstock.planner.shorten import quick
from penstock.planner.solve import flexgen
from penstock.planner.solve.flexgen.shape import BlockShape
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

OUTPUT, PROMPT = 32, 512  # tokens; the prompt of rows that do not state it (Figure 1)
DEVICES = 4  # of Table 3
BLOCKS = 4  # that a pipeline has under way (the scripts' inner iterations)
NOT_PREDICTED = {"Petals": "many machines that share a model over a network: no plan of one machine"}

_FLOPS = 65e12  # physics: the T4's data sheet, half precision


class Policy(NamedTuple):
    """What a row does, complete. `weights`, `kv`: shares on device, in RAM, on disk. `attends`: of
    flexgen.shape.ATTENDS. `parts`: into so many the layers are cut, of which the plan has one. `traits`: of the
    system."""

    model: str
    prompt: int
    weight_format: str
    kv_format: str
    gpu_batch: int
    batches: int
    weights: Shares
    kv: Shares
    attends: str
    order: str
    parts: int = 1
    traits: Traits = ()

    @property
    def block(self) -> int:
        return self.gpu_batch * self.batches


class Spent(NamedTuple):
    """Seconds of the prompts and of one step after them."""

    prefill_s: float
    step_s: float


Flags = tuple[int, int, Shares, Shares, str]  # batch, batches, weights, KV, who attends
_DEVICE, _RAM, _DISKS, _HALF = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.5, 0.5)
_FLEXGEN: dict[tuple[str, int, bool], Flags] = {  # by model, prompt, whether compressed
    ("opt-6.7b", 512, False): (2, 1, _DEVICE, _DEVICE, "device"),
    ("opt-6.7b", 1024, False): (1, 1, _DEVICE, _DEVICE, "device"),
    ("opt-6.7b", 512, True): (72, 1, _DEVICE, _DEVICE, "device"),
    ("opt-6.7b", 1024, True): (28, 1, _DEVICE, _DEVICE, "device"),
    ("opt-30b", 512, False): (48, 3, (0.2, 0.8, 0.0), _RAM, "cpu scores"),
    ("opt-30b", 1024, False): (20, 4, (0.04, 0.96, 0.0), _RAM, "cpu scores"),
    ("opt-30b", 512, True): (64, 8, _RAM, _RAM, "device"),
    ("opt-30b", 1024, True): (20, 12, _RAM, _RAM, "device"),
    ("opt-175b", 512, False): (32, 8, _HALF, _DISKS, "cpu scores"),
    ("opt-175b", 1024, False): (12, 12, _HALF, _DISKS, "cpu scores"),
    ("opt-175b", 512, True): (48, 3, _RAM, _RAM, "device"),
    ("opt-175b", 1024, True): (12, 4, _RAM, _RAM, "device"),
}
_NO_SEARCH: dict[str, Flags] = {
    "opt-30b": (48, 3, _RAM, _RAM, "cpu scores"),
    "opt-175b": (32, 1, _HALF, _DISKS, "cpu scores"),
}
_PIPELINE: dict[str, Flags] = {
    "opt-6.7b": (24, 1, _DEVICE, _DEVICE, "device"),
    "opt-30b": (64, 3, (0.2, 0.8, 0.0), _RAM, "cpu scores"),
    "opt-175b": (40, 1, _RAM, _RAM, "cpu scores"),
}
# Batch and home of the weights.
_DEEPSPEED_POLICY = {"opt-30b": (8, _RAM), "opt-175b": (2, _DISKS)}  # Table 4, in FlexGen's runtime
_DEEPSPEED_4 = {"opt-6.7b": (12, _RAM), "opt-30b": (6, _RAM), "opt-175b": (1, _DISKS)}  # a device, of 48, 24, 4
_PEERS = {
    ("Accelerate", 512): {"opt-6.7b": (2, _DEVICE), "opt-30b": (8, _RAM), "opt-175b": (2, _DISKS)},
    ("Accelerate", 1024): {"opt-6.7b": (1, _DEVICE), "opt-30b": (4, _RAM), "opt-175b": (1, _DISKS)},
    ("DeepSpeed", 512): {"opt-6.7b": (16, _RAM), "opt-30b": (4, _RAM), "opt-175b": (1, _DISKS)},
    ("DeepSpeed", 1024): {"opt-6.7b": (8, _RAM), "opt-30b": (2, _RAM), "opt-175b": (1, _DISKS)},
}


def predicted(row: Published, traits: Traits) -> Predicted | None:
    """None: a figure that is no prediction (NOT_PREDICTED)."""
    if row.system in NOT_PREDICTED:
        return None
    if row.metric == "speedup":
        value, bound, note = _speedup(row, traits), None, "both sides predicted, at prompts of 512 tokens"
    else:
        devices = DEVICES if "pipeline" in row.setting else 1
        policy = policy_of(row, devices)._replace(traits=of_system(traits, row.paper, row.system))
        bound = _bound(row, policy, devices)
        if row.setting == "no attention on the CPU":
            policy = _searched(policy._replace(traits=()))._replace(traits=policy.traits)
        note = f"{policy.batches} device batches of {policy.gpu_batch}"
        if row.table == "Table 8":
            value = _of_breakdown(row, policy)
        else:
            value = _speed(row, policy, devices)
    if "pipeline" in row.setting:
        note += f"; {DEVICES} machines with a device each, as the repository's scripts have it"
    return explained(row, value, bound, note)


def policy_of(row: Published, devices: int = 1) -> Policy:
    """The policy of a row, as its system's scripts have it."""
    prompt, weights, kv = row.prompt or PROMPT, row.weights or "float16", row.kv or "float16"
    compressed = kv == "int4"
    if compressed and row.model == "opt-30b":
        weights = "float16"  # its flags compress the cache alone
    if row.system in ("Accelerate", "DeepSpeed") or row.setting == "DeepSpeed's policy":
        peers = _DEEPSPEED_POLICY if row.system == "FlexGen" else _PEERS[row.system, prompt]
        batch, home = (_DEEPSPEED_4 if devices > 1 else peers)[row.model]
        return Policy(row.model, prompt, weights, kv, batch, 1, home, _DEVICE, "device", "overlapped")
    flags = _FLEXGEN[row.model, prompt, compressed]
    if devices > 1:
        flags = _PIPELINE[row.model]
    elif row.setting == "no policy search":
        flags = _NO_SEARCH[row.model]
    return Policy(row.model, prompt, weights, kv, *flags, "flexgen", devices)


# -- seconds ----------------------------------------------------------------------------------------------


def _speed(row: Published, policy: Policy, devices: int) -> float:
    """Tokens a second. A pipeline has BLOCKS blocks under way, and is filled once; DeepSpeed's devices work side by
    side, each with its own link."""
    serial = row.setting == "no overlap" or row.system == "Accelerate"
    spent = _serial(policy) if serial else _spent(policy)
    if row.metric == "decode_tokens_per_s":
        return policy.block / spent.step_s * (devices if row.system == "DeepSpeed" else 1)
    if policy.parts > 1:
        seconds = (BLOCKS + devices - 1) * spent.prefill_s + (OUTPUT - 1) * BLOCKS * spent.step_s
        return BLOCKS * policy.block * OUTPUT / seconds
    return devices * policy.block * OUTPUT / (spent.prefill_s + (OUTPUT - 1) * spent.step_s)


def _speedup(row: Published, traits: Traits) -> float:
    """Over the better of the peers, both predicted."""
    own = replace(row, setting="", metric="throughput", prompt=PROMPT)
    peers = (replace(own, system=name, weights="float16", kv="float16") for name in ("DeepSpeed", "Accelerate"))

    def speed(of: Published) -> float:
        return _speed(of, policy_of(of)._replace(traits=of_system(traits, of.paper, of.system)), 1)

    return speed(own) / max(map(speed, peers))


@cache
def _spent(policy: Policy) -> Spent:
    """With the lanes side by side."""
    plan, ask = _plan(policy._replace(traits=()))
    found = quick(plan, ask, machine_of(T4, policy.traits), spread=False)
    return Spent(found.ttft_s, policy.block / found.decode_tokens_per_s)


@cache
def _parts(policy: Policy) -> dict[tuple[str, str], float]:
    """(stage, part) → seconds of all its tasks, one after the other; of decode, of all steps."""
    plan, ask = _plan(policy._replace(traits=()))
    lowering, cost = Lowering(plan), Cost(machine_of(T4, policy.traits))
    seqs = range(policy.block)
    position = ask.prompt_tokens + OUTPUT // 2
    step = passes.decode(plan, seqs, (position,) * policy.block, passes.DECODE)
    stages = {
        "prefill": (list(passes.prompts(plan, seqs, (ask.prompt_tokens,) * policy.block, passes.DECODE)), 1),
        "decode": ([step], OUTPUT - 1),
    }
    found: dict[tuple[str, str], float] = {}

    def add(stage: str, wanted: list[Pass], times: int) -> None:
        for p in wanted:
            for task in lowering.step(p):
                part = _PART_OF.get(task.calls[0].op, "compute")
                found[stage, part] = found.get((stage, part), 0.0) + cost.seconds(task) * times

    for stage, (wanted, times) in stages.items():
        add(stage, wanted, times)
    return found


_PART_OF = {"load": "weights read", "lift": "weights read", "kv_load": "KV read", "kv_save": "KV written"}


@cache
def _serial(policy: Policy) -> Spent:
    """With the lanes one after the other."""
    totals = {stage: sum(s for (at, _), s in _parts(policy).items() if at == stage) for stage in ("prefill", "decode")}
    return Spent(totals["prefill"], totals["decode"] / (OUTPUT - 1))


def _of_breakdown(row: Published, policy: Policy) -> float:
    """Table 8, which was measured without overlap: its totals are its parts' sums, nearly."""
    stage, part = row.setting.split(", ")
    found = _parts(policy)
    total = sum(seconds for (at, _), seconds in found.items() if at == stage)
    if row.metric == "share":
        return found[stage, "compute"] / total
    return total if part == "total" else found.get((stage, part), 0.0)


# -- plans ------------------------------------------------------------------------------------------------


@cache
def _plan(policy: Policy) -> tuple[Plan, Ask]:
    """The policy with as many rows of a prompt at a time as fit beside the rest, and the ring of two layers or one."""
    ask = _ask(policy)
    problem = Problem(ask, _spec(policy.model, policy.parts), parse_format(policy.weight_format), machine_of(T4))
    rows = sorted({min(policy.gpu_batch, max(1, n // policy.prompt)) * policy.prompt for n in (2048, 1024, 512)})
    for chunk_rows in reversed(rows):
        for ring_layers in (2.0, 1.0):
            shape = BlockShape(
                problem, GPU.executor, policy.gpu_batch, policy.batches, chunk_rows, policy.attends, ring_layers,
                policy.order,
            )  # fmt: skip
            plan = shape.plan(policy.weights, policy.kv)
            if problem.fits(plan):
                return plan, ask
    raise AssertionError(f"{policy} does not fit: {plan.tier_bytes()}")


@cache
def _searched(policy: Policy) -> Policy:
    """What our search finds where the device attends. FlexGen's own policies do not fit then: our windows hold a
    layer's KV of the whole block, where FlexGen's hold a batch's."""
    best: flexgen.BestPolicy | None = None
    for block in (policy.block, policy.block // 2, policy.block // 4, policy.block // 8):
        ask = Ask(policy.prompt, OUTPUT, block, policy.prompt + OUTPUT, "latency", kv=policy.kv_format)
        spec, fmt = _spec(policy.model), parse_format(policy.weight_format)
        found = flexgen.search(Problem(ask, spec, fmt, machine_of(T4)), ("device",)).values()
        best = min((*found, *([best] if best else [])), key=lambda policy: policy.seconds_a_sequence, default=None)
    assert best is not None
    shape, where = best.shape, best.solution.policy
    return policy._replace(
        gpu_batch=shape.gpu_batch, batches=shape.batches, weights=where.weights, kv=where.kv, attends="device",
        order="overlapped",
    )  # fmt: skip


def _ask(policy: Policy) -> Ask:
    return Ask(policy.prompt, OUTPUT, policy.block, policy.prompt + OUTPUT, "throughput", kv=policy.kv_format)


@cache
def _spec(model: str, parts: int = 1) -> ModelSpec:
    spec, _ = model_of(model)
    return replace(spec, layers=spec.layers[: len(spec.layers) // parts])


def weight_bytes(spec: ModelSpec, weights: Format) -> int:
    """Bytes of all matrices of the layers. In FlexGen's shape and 16 bits these are l · (8·h1² + 4·h1·h2)."""
    layers = (part for part in parts(spec, weights) if part.kind in ("attn", "ffn"))
    return sum(block.nbytes * part.granules for part in layers for block in part.blocks if block.tiled)


def kv_bytes(spec: ModelSpec, fmt: Format, seqs: int, tokens: int) -> int:
    """Bytes of K and V of `seqs` sequences of `tokens` tokens. In FlexGen's shape and 16 bits these are
    4 · b · l · h1 · (s + n)."""
    a_token = sum(2 * a.kv_heads * fmt.kv_bytes(a.head_dim) for a in (layer.attention for layer in spec.layers))
    return seqs * tokens * a_token


def _bound(row: Published, policy: Policy, devices: int) -> float | None:
    """The best in the row's metric: all products at the data sheet's speed. The disk has no part in it: the slides
    round it to 2 and 1 GB/s, which Table 8 exceeds."""
    batch = policy.block * (BLOCKS if policy.parts > 1 else devices)
    flops = weight_bytes(_spec(policy.model), parse_format("float16")) * batch  # two for each weight
    step_s, prefill_s = flops / (_FLOPS * devices), flops * policy.prompt / (_FLOPS * devices)
    if row.metric == "decode_tokens_per_s":
        return batch / step_s
    if row.metric == "throughput":
        return batch * OUTPUT / (prefill_s + (OUTPUT - 1) * step_s)
    bounds = {
        "prefill, total": prefill_s, "prefill, compute": prefill_s,
        "decode, total": (OUTPUT - 1) * step_s, "decode, compute": (OUTPUT - 1) * step_s,
    }  # fmt: skip
    return bounds.get(row.setting) if row.metric == "seconds" else None
