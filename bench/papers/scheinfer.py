"""ScheInfer's rows, predicted: its own policy and its peers', as plans on its test beds.

*ScheInfer* is `solve/scheinfer` as the paper has it: attention on the device, memory assigned for decode. *llama.cpp*:
`solve/llama_cpp`, whole layers on the device; where a prompt is read it sends the others' FFNs there. *Fiddler* is for
experts; of a dense model its rule makes whole FFNs: as many as fit on the device, the others the CPU's in decode, and
where a prompt is read the link's or the CPU's, whichever is quicker. *PowerInfer* never sends weights: what is not on
the device is the CPU's, in a prompt too.

Rows over several models take those of the paper's seven that there are plans for, on each bed with 12 and 24 GB (bed
C: its 11). Two are dense; four have experts, and the planner is asked for each of them: what it refuses stands in the
note. A Qwen2-14B was never published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean

from bench.papers.compare import Predicted, machine_of, model_of, require_plans
from bench.papers.published import BED_A, BED_B, BED_C, Published, device_gb
from penstock.errors import PenstockError
from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.predict import Prediction
from penstock.planner.programs.slicing import best_r_cg
from penstock.planner.shares import Resident, all_of, share_out
from penstock.planner.shorten import quick
from penstock.planner.sizes import CHUNK_ROWS
from penstock.planner.solve import llama_cpp as whole_layers
from penstock.planner.solve import settle_context
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer import NAME, PAPER, plan_of, solve_slices
from penstock.planner.solve.scheinfer.layer_work import LayerWork, Shares
from penstock.planner.solve.skeleton import Skeleton, device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

# What the paper does not state. Prompts are of 1024 tokens by default (section V-C); that the speed-ups of the whole
# answer are close to decode's tells that answers took longer than prompts, as 128 tokens do.
PROMPT, OUTPUT = 1024, 128
THREADS = 16  # of Table I, and of the machine files: the most that section V-E tries

_TOKENS_NOTE = (
    "ScheInfer's CPU takes as long for each token as for one alone (Table I's 5.4 ps a multiply-add for all of them"
    " would give 11, 45 and 62 times here), where penstock's reads a weight once for a chunk: its tokens cost far less"
)

_LEAST_NOTE = (
    "the least is beside Fiddler, whose CPU, as penstock's, reads a weight once for a prompt here: where the bed is "
    "slow at products, both are bound by it or by the link"
)
_DENSE = (("llama-2-70b", "int4"), ("llama-2-13b", "float16"))
_LARGEST = ("mixtral-8x22b", "int4")  # used only with 24 GB (section V-C)
_EXPERTS = (("mixtral-8x7b", "int4"), _LARGEST, ("qwen2-57b-a14b", "int4"), ("phi-3.5-moe", "float16"))
_RATES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a test bed, with a limit of the device's memory in GB, and a number of the CPU's threads."""

    machine: str
    model: str
    weights: str
    limit_gb: int
    threads: int = THREADS
    prompt: int = PROMPT


def predicted(row: Published) -> Predicted:
    """Raises what the planner refuses with, for a row of a model with experts."""
    for table, found in (
        ("V-E1", _of_threads), ("V-E2", _of_rates), ("V-E3", _of_assignment), ("V-E4", _of_tokens),
    ):  # fmt: skip
        if table in row.table:
            return found(row)
    return _of_ranges(row)


def _of_ranges(row: Published) -> Predicted:
    """Sections V-C and V-D: the least or the most over models, beds and limits."""
    phase, _, which = row.setting.partition(", ")
    seconds: dict[str, Callable[[Prediction], float]] = {
        "decode": lambda p: 1 / p.decode_tokens_per_s, "prefill": lambda p: p.ttft_s,
        "prompt and answer": lambda p: p.total_s,
    }  # fmt: skip
    if row.against == "PowerInfer":
        settings, without = _planned(_settings(_DENSE, (BED_A, BED_B), (12,)))
        found = [_ratio(seconds[phase], power_infer, s) for s in settings]
    else:
        settings, without = _planned(_settings((*_DENSE, *_EXPERTS), (BED_A, BED_B, BED_C), (12, 24)))
        found = [_ratio(seconds[phase], peer, s) for peer, s in product((llama_cpp, fiddler), settings)]
    value = (min if which == "least" else max)(found)
    note = f"assumed: prompts of {PROMPT}, answers of {OUTPUT} tokens, 12 and 24 GB{without}"
    if row.setting == "prefill, least":
        note += f"; {_LEAST_NOTE}"
    return Predicted(value, None, note)


def _of_threads(row: Published) -> Predicted:
    """Section V-E1: the mean over the same models, beds and limits."""
    threads = _threads_of(row)
    peer = fiddler if row.against == "Fiddler" else llama_cpp
    every = _settings((*_DENSE, *_EXPERTS), (BED_A, BED_B, BED_C), (12, 24), threads)
    settings, without = _planned(every)
    value = fmean(_ratio(lambda p: 1 / p.decode_tokens_per_s, peer, s) for s in settings)
    return Predicted(value, None, f"assumed: all models, beds and limits; a CPU's time goes as 1 / threads{without}")


def _of_rates(row: Published) -> Predicted:
    """Section V-E2: the best r_CG where no FFN has a share on the device, and what it gains over fixed ones."""
    setting = Setting(BED_A, "llama-2-70b", "int4", 24, _threads_of(row))
    if row.metric == "share":
        note = "a CPU's time goes as 1 / threads; the link's 24.9 GB/s, not Table I's 38"
        return Predicted(_best_rate(setting), None, note)
    settings, without = _planned((setting, replace(setting, model="mixtral-8x7b", limit_gb=12)))
    gains: list[float] = []
    for each in settings:
        speed = no_ffns(each, _best_rate(each)).decode_tokens_per_s
        gains += [speed / no_ffns(each, rate).decode_tokens_per_s for rate in _RATES]
    return Predicted(fmean(gains), None, f"a CPU's time goes as 1 / threads{without}")


def _best_rate(setting: Setting) -> float:
    """r_CG of the first layer in decode where its FFN has no share on the device."""
    problem = _problem(setting)
    work = LayerWork(problem)
    return best_r_cg(work.ffn(problem.spec.layers[0], work.decode(), Shares()))[0]


def _of_assignment(row: Published) -> Predicted:
    """Section V-E3: slices against FFNs that are whole on the device or not at all, both with the best r_CG."""
    assert row.device_memory_bytes is not None
    setting = Setting(BED_A, row.model, "int4", row.device_memory_bytes // device_gb(1))
    return Predicted(
        scheinfer(setting).decode_tokens_per_s / whole_ffns(setting).decode_tokens_per_s, None,
        f"assumed: decode after a prompt of {PROMPT} tokens",
    )  # fmt: skip


def _of_tokens(row: Published) -> Predicted:
    """Section V-E4: prefill with all of a chunk's tokens on the device, against none of those of CC."""
    assert row.device_memory_bytes is not None and row.prompt is not None
    setting = Setting(BED_A, row.model, "int4", row.device_memory_bytes // device_gb(1), prompt=row.prompt)
    return Predicted(scheinfer(setting, prompts=False).ttft_s / scheinfer(setting).ttft_s, None, _TOKENS_NOTE)


# -- policies -------------------------------------------------------------------------------------------


@cache
def scheinfer(setting: Setting, prompts: bool | None = None) -> Prediction:
    """Slices by §IV. `prompts`: whether the device takes a prompt's tokens with the CPU's weights; None: by Eq. 15."""
    found = solve_slices(_problem(setting), PAPER)
    assert found is not None, setting
    plan, slices = found
    if prompts is not None:
        skeleton = device_skeleton(_problem(setting), plan.chunk_rows, attention_layers=0, lifted=0.0)
        plan = plan_of(skeleton, replace(slices, prompts=prompts))
    return _predict(setting, plan)


@cache
def llama_cpp(setting: Setting) -> Prediction:
    """Whole layers on the device, as many as fit."""
    plan = whole_layers.plan_of(_problem(setting))
    assert plan is not None, setting
    return _predict(setting, plan)


@cache
def fiddler(setting: Setting) -> Prediction:
    """Whole FFNs on the device, as many as fit beside attention; the CPU's in decode, the quicker way in a prompt."""
    either = (_predict(setting, _ffns(setting, whole=True, r_cg=0.0, prompts=there)) for there in (True, False))
    return min(either, key=lambda p: p.ttft_s)


@cache
def power_infer(setting: Setting) -> Prediction:
    """Even shares of all FFNs on the device (its hot neurons), and no weight over the link."""
    return _predict(setting, _ffns(setting, whole=False, r_cg=0.0, prompts=False))


@cache
def whole_ffns(setting: Setting) -> Prediction:
    """Section V-E3's peer: r_GG is 0 or 1; with the best r_CG where it is 0."""
    return _predict(setting, _ffns(setting, whole=True, r_cg=_best_rate(setting)))


@cache
def no_ffns(setting: Setting, r_cg: float) -> Prediction:
    """Section V-E2: no FFN has a share on the device, the link lifts `r_cg` of each."""
    skeleton, there = _beside(setting, r_cg)
    return _predict(setting, skeleton.plan(there))


def _ffns(setting: Setting, whole: bool, r_cg: float, prompts: bool = True) -> Plan:
    """Attention and head on the device, and FFNs: `whole` ones, or even shares; of the others the link lifts `r_cg`."""
    skeleton, there = _beside(setting, r_cg, prompts)
    problem = skeleton.problem
    budget = problem.spare_bytes(skeleton.plan(there), GPU.executor)
    assert budget is not None, setting
    ffns = problem.of_kind("experts" if problem.spec.is_routed else "ffn")
    while True:
        more = all_of(ffns[: budget // ffns[0].nbytes]) if whole else share_out(ffns, budget)
        plan = skeleton.plan(there | more)
        if problem.fits(plan):
            return plan
        budget -= ARENA_ALIGN  # kernels take more scratch for units that stay
        assert budget > 0, setting


def _beside(setting: Setting, r_cg: float, prompts: bool = True) -> tuple[Skeleton, Resident]:
    """All but FFNs on the device; of experts those that every token goes to are there too."""
    problem = _problem(setting)
    skeleton = device_skeleton(problem, CHUNK_ROWS, problem.layers, r_cg, prompts=prompts)
    every = [*problem.of_kind("attn"), *problem.of_kind("shared"), problem.head]
    return skeleton, all_of(every)


def _predict(setting: Setting, plan: Plan) -> Prediction:
    problem = _problem(setting)
    return quick(plan, problem.ask, problem.machine, spread=False)


# -- settings -------------------------------------------------------------------------------------------


@cache
def _problem(setting: Setting) -> Problem:
    """Raises what the planner refuses with, where it has no plans of the two systems that most rows have."""
    spec, weights = model_of(setting.model, setting.weights)
    ask = Ask(
        prompt_tokens=setting.prompt, output_tokens=OUTPUT, context=max(PROMPT, setting.prompt) + OUTPUT,
        device_memory_bytes=device_gb(setting.limit_gb),
    )  # fmt: skip
    machine = with_threads(machine_of(setting.machine), setting.threads)
    problem = Problem(settle_context(ask, spec), spec, weights, machine)
    require_plans(problem, NAME, whole_layers.NAME)
    return problem


def with_threads(machine: MachineSpec, threads: int) -> MachineSpec:
    """The machine with fewer of its CPU's threads at work.

    Seconds go as 1 / threads: at 16 of them Table I has 125, 133 and 80 GB/s of float16 weights on beds A, B and C,
    where the RAM gives 164, 164 and 112 (0.8 of its peak). So the cores are the limit, not the RAM, and fewer cores all
    the more so; then the link takes nothing from them either (at 8 threads 62 + 25 GB/s of 164).
    """
    if threads == THREADS:
        return machine
    slower = THREADS / threads
    rates = tuple(
        replace(rate, s_per_byte=rate.s_per_byte * slower, s_per_flop=rate.s_per_flop * slower)
        if rate.lane == "host" else rate
        for rate in machine.rates
    )  # fmt: skip
    sharing = tuple(each for each in machine.sharing if (each.lane, each.beside) != ("host", "h2d0"))
    return replace(machine, rates=rates, sharing=sharing, threads=threads)


def _settings(
    models: tuple[tuple[str, str], ...], beds: tuple[str, ...], limits: tuple[int, ...], threads: int = THREADS
) -> Iterator[Setting]:
    """Every model on every bed; a limit that a bed does not reach is all of its memory."""
    for bed, model, limit in product(beds, models, limits):
        if (limit == min(limits) or bed != BED_C) and (limit >= 24 or model != _LARGEST):
            yield Setting(bed, *model, limit, threads)


def _planned(settings: Iterable[Setting]) -> tuple[list[Setting], str]:
    """The settings that there are plans for. Of the others, as the end of a note, which models and why."""
    found: list[Setting] = []
    refused: dict[str, list[str]] = {}  # why → models
    for setting in settings:
        try:
            _problem(setting)
        except PenstockError as refusal:
            refused.setdefault(refusal.message, []).append(setting.model)
        else:
            found.append(setting)
    without = (f"without {', '.join(dict.fromkeys(models))} ({why})" for why, models in refused.items())
    return found, "".join(f"; {each}" for each in without)


def _ratio(seconds: Callable[[Prediction], float], peer: Callable[[Setting], Prediction], setting: Setting) -> float:
    """How many times as fast as the peer ScheInfer is."""
    return seconds(peer(setting)) / seconds(scheinfer(setting))


def _threads_of(row: Published) -> int:
    return int(next(word for word in row.setting.replace(",", "").split() if word.isdigit()))
