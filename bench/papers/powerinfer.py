"""PowerInfer's figures as penstock's planner predicts them: its policy and llama.cpp's on its two PCs.

PowerInfer is `solve/powerinfer.py` with the activity that the paper publishes, llama.cpp is `solve/llama_cpp`,
FlexGen the device plan that lifts all that is not there. Speeds are of both phases, as the paper measures them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from bench.papers.compare import Predicted, is_beyond, machine_of, model_of, told
from bench.papers.published import PC_HIGH, PC_LOW, SEVERAL, UNSUPPORTED, UNSUPPORTED_MACHINES, Published
from penstock.planner.activity import NeuronProfile, published, synthetic, with_activity
from penstock.planner.programs.neuron_choice import drawn
from penstock.planner.shares import all_of
from penstock.planner.shorten import quick
from penstock.planner.sizes import usual_chunks
from penstock.planner.solve import llama_cpp, powerinfer, settle_context
from penstock.planner.solve.ours import device
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import head_key
from penstock.spec.parts import parts
from penstock.spec.places import CPU, GPU, Lane
from penstock.spec.plan import Plan

T = TypeVar("T")
_PERCENTILE = "a prediction has no spread over a text's tokens"
_INPUTS = ("sparsity", "predictor_weights")  # what the plan is made from; the hot shares of Figure 4 too
_SPEC_INFER = "speculative decoding is no plan yet"
# Section 8.1 and data sheets, bytes/s: nothing reads faster.
_RAM_PEAK = {PC_HIGH: 67.2e9, PC_LOW: 38.4e9}
_DEVICE_PEAK = {PC_HIGH: 1008e9, PC_LOW: 616e9}

# Figures 10, 11 and 13 have prompts of 64 and 128 tokens (the text) and answers of several lengths (an axis: assumed).
# 64 is taken for all, and 128 for the answer where one length is to stand for all: they have both.
_PROMPT, _OUTPUT, _OUTPUTS = 64, 128, (8, 128, 512)
_ONE_NOTE = "prompt of 64 and answer of 128 tokens assumed"
_SET_NOTE = "mean of {} with answers of 8, 128 and 512 tokens (assumed: models and lengths stand in a picture)"

# Models of Table 3 that the figures may be of: with a ReLU, larger than the device's memory, within both memories.
_RELU = (
    "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b", "falcon-relu-40b", "relullama-7b", "relullama-13b",
    "relullama-70b",
)  # fmt: skip
# On PC-High in FP16 no 13B: Table 4 has one at 17.8 tokens/s, and the figure's most is 16.06.
_LEFT_OUT = {(PC_HIGH, "float16"): ("opt-13b", "relullama-13b")}
# Tables 1 and 3, and Figure 4's curve of the most like model: LLaMA2(SwiGLU)-70B of models with SiLU, of which the
# planner claims nothing, OPT-30B of Falcon, which has no gate either, LLaMA2(ReGLU)-70B of Bamboo.
_OWN_ACTIVITY = {
    "llama-2-13b": (0.57, 0.69, 0.75), "yi-1.5-34b": (0.47, 0.69, 0.75), "falcon-relu-40b": (0.05, 0.26, 0.17),
    "bamboo-7b": (0.10, 0.43, 0.26),
}  # fmt: skip
# Figure 15: what each step adds to llama.cpp.
STEPS = {
    "with predictors and operators": "+PO",
    "with the hybrid engine": "+Engine",
    "with the placement policy": "PowerInfer",
}
_BATCHES = (1, 2, 4, 8, 16)  # of Figure 14 below 32 (its axis is a picture)


@dataclass(frozen=True, slots=True)
class Setting:
    """`layers`: only so many, spread over the model's, beside as much less of the device's memory; 0: all."""

    machine: str
    model: str
    weights: str
    prompt: int = _PROMPT
    batch: int = 1
    layers: int = 0

    @property
    def spec(self) -> ModelSpec:
        spec, _ = model_of(self.model)
        return replace(spec, layers=self.some(spec.layers)) if self.layers else spec

    def some(self, layers: tuple[T, ...]) -> tuple[T, ...]:
        """Those that are left."""
        return layers[:: len(layers) // self.layers][: self.layers] if self.layers else layers

    @property
    def device_bytes(self) -> int | None:
        """All of it; of fewer layers, as much for each, and the head."""
        if not self.layers:
            return None
        whole = machine_of(self.machine).tier(GPU.executor).bytes
        head = next(part.nbytes for part in parts(self.spec, self.format) if part.key == head_key(self.spec))
        return head + (whole - head) * self.layers // len(model_of(self.model)[0].layers)

    @property
    def format(self) -> Format:
        return parse_format(self.weights)

    @property
    def ask(self) -> Ask:
        context = self.prompt + max(_OUTPUTS)
        ask = Ask(self.prompt, _OUTPUT, self.batch, context, device_memory_bytes=self.device_bytes)
        return settle_context(ask, self.spec)

    @property
    def problem(self) -> Problem:
        return Problem(self.ask, self.spec, self.format, machine_of(self.machine))


@dataclass(frozen=True, slots=True)
class Speed:
    """A plan and what it does. `token_s` is of the middle of an answer of 128 tokens; some hundred positions of KV more
    are less than 1 % of it."""

    ttft_s: float
    token_s: float
    lane_share: dict[Lane, float]
    plan: Plan

    def total_s(self, output: int) -> float:
        return self.ttft_s + output * self.token_s


def predicted(row: Published) -> Predicted | None:
    """None: there is no prediction; `why_not` says why."""
    if why_not(row):
        return None
    if row.metric == "share":
        found = _share(row)
    else:
        found = _of_several(row) if row.model == SEVERAL else _of_one(row)
    note = "; ".join(filter(None, (told(row, found.value), found.note)))
    return replace(found, note=note, is_policy=found.is_policy and not is_beyond(row))


def why_not(row: Published) -> str:
    """Why a row is not predicted; empty where it is."""
    if row.metric in _INPUTS or row.table.startswith("Figure 4"):
        return "an input: what the plan is made from"
    if row.model in UNSUPPORTED:
        return f"{row.model}: {UNSUPPORTED[row.model]}"
    if "percentile" in row.setting:
        return _PERCENTILE
    if row.machine in UNSUPPORTED_MACHINES or "A100" in row.against:
        return f"A100: {UNSUPPORTED_MACHINES['a100-80gb']}"
    return _SPEC_INFER if "SpecInfer" in (row.system, row.against) else ""


def _of_one(row: Published) -> Predicted:
    setting = Setting(row.machine, row.model, row.weights or "float16", row.prompt or _PROMPT, row.batch or 1)
    output = row.output or _OUTPUT
    if row.batch is None and row.table.startswith("Figure 14"):
        several = [replace(setting, batch=batch) for batch in _BATCHES]
        ratios = [of_system(s, row.against, output).total_s(output) / of_system(s, row.system, output).total_s(output)
                  for s in several]  # fmt: skip
        return Predicted(_mean(ratios), None, f"{_ONE_NOTE}; batches of 1, 2, 4, 8 and 16 assumed")
    speed = of_system(setting, STEPS.get(row.setting, row.system), output)
    least_s = _least_token_s(setting, sparse=row.system == "PowerInfer")
    note = "" if row.prompt else _ONE_NOTE
    if row.metric == "throughput":
        return Predicted(output / speed.total_s(output), 1 / least_s, note)
    if row.metric == "speedup":
        other = of_system(setting, row.against, output)
        return Predicted(other.total_s(output) / speed.total_s(output), None, note)
    if row.metric == "latency_s":
        return Predicted(speed.total_s(output), least_s * output, note)
    assert row.metric == "decode_s", row
    return Predicted(speed.token_s, least_s, note)


def _of_several(row: Published) -> Predicted:
    """Means and extremes over models and lengths."""
    pcs = (PC_HIGH, PC_LOW) if row.machine == SEVERAL else (row.machine,)
    settings = [setting for pc in pcs for setting in _settings(pc, row.weights or "float16")]
    outputs = (8,) if "below 8 tokens" in row.setting else _OUTPUTS
    values = []
    for setting in settings:
        for output in outputs:
            total_s = of_system(setting, "PowerInfer", output).total_s(output)
            other_s = of_system(setting, "llama.cpp", output).total_s(output)
            values.append(other_s / total_s if row.metric == "speedup" else output / total_s)
    of = max if "most" in row.setting else min if "least" in row.setting else _mean
    bounds = [1 / _least_token_s(setting, sparse=True) for setting in settings]
    names = ", ".join(dict.fromkeys(setting.model for setting in settings))
    note = _SET_NOTE.format(names) if len(outputs) > 1 else f"a prompt of 64 and an answer of 8 tokens, of {names}"
    return Predicted(of(values), of(bounds) if row.metric == "throughput" else None, note)


def _share(row: Published) -> Predicted:
    if "active neurons" in row.setting:
        settings = _settings(row.machine, "float16")
        settings = [setting for setting in settings if setting.model == "opt-30b" or "60 GB" not in row.note]
        sparse = row.system == "PowerInfer"
        shares = (_load_share(of_system(setting, row.system, _OUTPUT).plan, sparse) for setting in settings)
        names = ", ".join(setting.model for setting in settings)
        return Predicted(_mean(shares), None, f"FP16, {names}; rows and columns of attention count, as in footnote 1")
    setting = Setting(row.machine, row.model, row.weights or "float16")
    if row.system == "FlexGen":
        return Predicted(_flexgen_link_share(setting), None, _ONE_NOTE)
    speed = of_system(setting, row.system, _OUTPUT)
    if "weights in device memory" in row.setting:
        total = sum(part.nbytes for part in speed.plan.parts.values())
        there = sum(speed.plan.unit_bytes(unit) for unit in speed.plan.units if unit.home == GPU.executor)
        return Predicted(there / total, None, "KV, activations and a GiB for driver and screen take the rest")
    busy = speed.lane_share
    return Predicted(busy[CPU] / (busy[CPU] + busy[GPU.kernels]), None, _ONE_NOTE)


def _load_share(plan: Plan, sparse: bool) -> float:
    """Of the rows and columns that a token needs, by their bytes, the share that the device computes."""
    there = whole = 0.0
    for unit in plan.units:
        if unit.part.endswith((".attn", ".ffn")):
            nbytes = plan.unit_bytes(unit) * (unit.active if sparse else 1.0)
            there, whole = there + nbytes * (unit.decode == GPU.executor), whole + nbytes
    return there / whole


@cache
def _settings(pc: str, weights: str) -> list[Setting]:
    """What may be behind a mean (see _RELU)."""
    limit = machine_of(pc).tier(GPU.executor).bytes
    found = []
    for setting in (Setting(pc, model, weights) for model in _RELU if model not in _LEFT_OUT.get((pc, weights), ())):
        nbytes = sum(part.nbytes for part in parts(setting.spec, setting.format))
        if nbytes > limit and _power_infer(setting) and _llama_cpp(setting):
            found.append(setting)
    return found


def of_system(setting: Setting, system: str, output: int) -> Speed:
    """The fastest of its plans for an answer of so many tokens."""
    found = {
        "PowerInfer": _power_infer, "+Engine": _at_random, "+PO": _operators, "llama.cpp": _llama_cpp,
        "not stated": _llama_cpp,
    }[system](setting)  # fmt: skip
    return min(found, key=lambda speed: speed.total_s(output))


@cache
def _power_infer(setting: Setting) -> tuple[Speed, ...]:
    found = powerinfer.with_profile(setting.problem, _profile(setting))
    return tuple(_speed(candidate.plan, setting) for candidate in found)


@cache
def _at_random(setting: Setting) -> tuple[Speed, ...]:
    """Neurons of a layer on both sides, drawn by chance (Figure 15's +Engine)."""
    profile = _profile(setting).shuffled()
    found = powerinfer.with_profile(setting.problem, profile, (drawn,), powerinfer.RANDOM)
    return tuple(_speed(candidate.plan, setting) for candidate in found)


@cache
def _operators(setting: Setting) -> tuple[Speed, ...]:
    """Whole layers on the device or the CPU, whose predictors leave out inactive neurons (Figure 15's +PO)."""
    problem, profile = setting.problem, _profile(setting)
    skeleton = device_skeleton(problem, next(usual_chunks(problem.ask)), problem.layers, lifted=0.0)
    ffns = problem.of_kind("ffn")

    def plan_of(layers: int) -> Plan:
        return powerinfer.plan_of(skeleton, profile, layers, layers, all_of(ffns[:layers]))

    layers = problem.most_on_device(problem.layers, cache(plan_of))
    return (_speed(with_activity(plan_of(layers), profile), setting),) if layers else ()


@cache
def _llama_cpp(setting: Setting) -> tuple[Speed, ...]:
    """It has the device compute a prompt's products from 32 tokens on."""
    plan = llama_cpp.plan_of(setting.problem)
    return (_speed(plan, setting),) if plan is not None else ()


@cache
def _flexgen_link_share(setting: Setting) -> float:
    plans = device.candidates(setting.problem)
    return _speed(next(plans).plan, setting).lane_share[GPU.to_device]  # the first lifts all that is not there


def _speed(plan: Plan, setting: Setting) -> Speed:
    found = quick(plan, setting.ask, machine_of(setting.machine), spread=False)
    return Speed(found.ttft_s, setting.ask.batch / found.decode_tokens_per_s, found.lane_share, plan)


def _least_token_s(setting: Setting, sparse: bool) -> float:
    """What a token needs, hottest first in the device's memory, the rest read from RAM while the device reads: at the
    peaks of both. KV, predictors and prompts cost nothing."""
    profile = _profile(setting) if sparse else None
    needed: list[tuple[float, int]] = []  # how often, bytes
    for part in parts(setting.spec, setting.format):
        if part.kind == "ffn" and profile is not None:
            needed += [(f, part.granule_bytes) for f in profile.layers[part.layer]]
        elif part.kind in ("attn", "ffn") or part.key == head_key(setting.spec):
            needed.append((1.0, part.nbytes))
    left = machine_of(setting.machine).tier(GPU.executor).bytes
    device_bytes = host_bytes = 0.0
    for often, nbytes in sorted(needed, reverse=True):
        there = min(nbytes, left)
        left -= there
        device_bytes, host_bytes = device_bytes + often * there, host_bytes + often * (nbytes - there)
    known = setting.machine.partition("×")[0]
    return max(device_bytes / _DEVICE_PEAK[known], host_bytes / _RAM_PEAK[known])


def _profile(setting: Setting) -> NeuronProfile:
    profile = _whole_profile(setting.model)
    return replace(profile, layers=setting.some(profile.layers)) if setting.layers else profile


@cache
def _whole_profile(model: str) -> NeuronProfile:
    found = published(model_of(model)[0]) if model not in _OWN_ACTIVITY else None
    if found is None:
        return synthetic(model_of(model)[0], *_OWN_ACTIVITY[model], "PowerInfer, Tables 1 and 3, Figure 4")
    return found


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
