"""ScheInfer's policy and its peers', as plans of a model on a test bed, and what such plans take.

*ScheInfer* is `solve/scheinfer` as the paper has it: attention on the device, memory assigned for decode. *llama.cpp*:
`solve/llama_cpp`, whole layers on the device; where a prompt is read it sends the others' FFNs there. *Fiddler* is for
experts; of a dense model its rule makes whole FFNs: as many as fit on the device, the others the CPU's in decode, and
where a prompt is read the link's or the CPU's, whichever is quicker. *PowerInfer* never sends weights: what is not on
the device is the CPU's, in a prompt too.

Dense FFNs stand for experts (`stand_ins`): for those that a token goes to in decode, for all in a prompt. Device memory
is shared out by the bytes of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from bench.papers.compare import machine_of, model_of
from bench.papers.published import device_gb
from bench.papers.stand_ins import dense, shared_neurons, sparing
from bench.papers.traits import Traits
from penstock.graph import passes
from penstock.graph.arenas import ARENA_ALIGN
from penstock.graph.lower import Lowering
from penstock.planner.programs.slicing import best_r_cg
from penstock.planner.shares import Resident, all_of, share_out
from penstock.planner.shorten import quick_s
from penstock.planner.simulate import Simulator
from penstock.planner.sizes import CHUNK_ROWS
from penstock.planner.solve import llama_cpp as whole_layers
from penstock.planner.solve import settle_context
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer import PAPER, plan_of, solve_slices
from penstock.planner.solve.scheinfer.layer_work import LayerWork, Shares
from penstock.planner.solve.skeleton import Skeleton, device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.parts import Part
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

# What the paper does not state. Prompts are of 1024 tokens by default (section V-C); that the speed-ups of the whole
# answer are close to decode's tells that answers took longer than prompts, as 128 tokens do.
PROMPT, OUTPUT = 1024, 128
_WARM_PASSES, _PASSES = 1, 2
THREADS = 16  # of Table I, and of the machine files: the most that section V-E tries


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a test bed, with a limit of the device's memory in GB, and a number of the CPU's threads."""

    machine: str
    model: str
    weights: str
    limit_gb: int
    threads: int = THREADS
    prompt: int = PROMPT
    traits: Traits = ()

    @property
    def is_routed(self) -> bool:
        return model_of(self.model, self.weights)[0].is_routed


@dataclass(frozen=True)
class Spent:
    """What a system's plans take. `token`, `whole`: the model in decode, and where prompts are read: another one of a
    model with experts. `plan`: of decode. `prompts`: plans of which the quickest reads prompts."""

    token: Problem
    whole: Problem
    plan: Plan
    prompts: tuple[Plan, ...]

    @cached_property
    def ttft_s(self) -> float:
        return min(quick_s(plan, partial(_prompt_s, self.whole)) for plan in self.prompts)

    @cached_property
    def step_s(self) -> float:
        """Of a decode pass half-way through the answer."""
        return quick_s(self.plan, partial(_decode_s, self.token))

    @property
    def total_s(self) -> float:
        return self.ttft_s + (OUTPUT - 1) * self.step_s


def _prompt_s(problem: Problem, plan: Plan) -> float:
    lowering, simulator = Lowering(plan), Simulator(problem.cost)
    for p in passes.prompts(plan, (0,), [problem.ask.prompt_tokens], passes.DECODE):
        simulator.run(lowering.step(p))
        simulator.pause(problem.cost.between_passes_s)
    return simulator.now_s


def _decode_s(problem: Problem, plan: Plan) -> float:
    lowering, simulator = Lowering(plan), Simulator(problem.cost)
    ends = []
    for _ in range(_WARM_PASSES + _PASSES):
        simulator.run(lowering.step(passes.decode(plan, (0,), (problem.half_way,), passes.DECODE)))
        simulator.pause(problem.cost.between_passes_s)
        ends.append(simulator.now_s)
    return (ends[-1] - ends[_WARM_PASSES - 1]) / _PASSES


def best_rate(setting: Setting) -> float:
    """r_CG of the first layer in decode where its FFN has no share on the device."""
    return _r_cg(_problem(setting), 0.0)


def _r_cg(problem: Problem, r_gg: float) -> float:
    work = LayerWork(problem)
    return best_r_cg(work.ffn(problem.spec.layers[0], work.decode(), Shares(r_gg)), r_gg)[0]


@cache
def scheinfer(setting: Setting, prompts: bool | None = None) -> Spent:
    """Slices by §IV. `prompts`: whether the device takes a prompt's tokens with the CPU's weights; None: by Eq. 15."""
    if setting.is_routed:
        return _experts(setting, _there(setting), best=True, prompts=prompts)
    found = solve_slices(_problem(setting), PAPER)
    assert found is not None, setting
    plan, slices = found
    if prompts is not None:
        skeleton = device_skeleton(_problem(setting), plan.chunk_rows, attention_layers=0, lifted=0.0)
        plan = plan_of(skeleton, replace(slices, prompts=prompts))
    return _spent(setting, plan)


@cache
def llama_cpp(setting: Setting) -> Spent:
    """Whole layers on the device, as many as fit."""
    if setting.is_routed:
        return _layers_of_experts(setting)
    plan = whole_layers.plan_of(_problem(setting))
    assert plan is not None, setting
    return _spent(setting, plan)


@cache
def fiddler(setting: Setting) -> Spent:
    """Whole FFNs on the device, as many as fit beside attention; the CPU's in decode, the quicker way in a prompt. Of
    experts as many of each layer: a token's are there as often as any."""
    if setting.is_routed:
        return _experts(setting, _there(setting), best=False)
    either = [_ffns(setting, whole=True, r_cg=0.0, prompts=there) for there in (True, False)]
    return _spent(setting, either[0], either)


@cache
def power_infer(setting: Setting) -> Spent:
    """Even shares of all FFNs on the device (its hot neurons), and no weight over the link."""
    return _spent(setting, _ffns(setting, whole=False, r_cg=0.0, prompts=False))


@cache
def whole_ffns(setting: Setting) -> Spent:
    """Section V-E3's peer: r_GG is 0 or 1; with the best r_CG where it is 0."""
    if setting.is_routed:
        layers = model_of(setting.model)[0].layers
        whole = int(_there(setting) * len(layers))
        return _experts(setting, [float(i < whole) for i in range(len(layers))], best=True)
    return _spent(setting, _ffns(setting, whole=True, r_cg=best_rate(setting)))


@cache
def no_ffns(setting: Setting, r_cg: float) -> Spent:
    """Section V-E2: no FFN has a share on the device, the link lifts `r_cg` of each."""
    if setting.is_routed:
        return _experts(setting, 0.0, r_cg=r_cg)
    skeleton, there = _beside(setting, r_cg)
    return _spent(setting, skeleton.plan(there))


def _ffns(setting: Setting, whole: bool, r_cg: float, prompts: bool = True) -> Plan:
    """Attention and head on the device, and FFNs: `whole` ones, or even shares; of the others the link lifts `r_cg`."""
    skeleton, there = _beside(setting, r_cg, prompts)
    problem = skeleton.problem
    budget = problem.spare_bytes(skeleton.plan(there), GPU.executor)
    assert budget is not None, setting
    ffns = problem.of_kind("ffn")
    while True:
        more = all_of(ffns[: budget // ffns[0].nbytes]) if whole else share_out(ffns, budget)
        plan = skeleton.plan(there | more)
        if problem.fits(plan):
            return plan
        budget -= ARENA_ALIGN  # kernels take more scratch for units that stay
        assert budget > 0, setting


def _beside(setting: Setting, r_cg: float, prompts: bool = True) -> tuple[Skeleton, Resident]:
    """All but FFNs on the device."""
    problem = _problem(setting)
    skeleton = device_skeleton(problem, CHUNK_ROWS, problem.layers, r_cg, prompts=prompts)
    return skeleton, all_of([*problem.of_kind("attn"), problem.head])


def _spent(setting: Setting, plan: Plan, prompts: Sequence[Plan] = ()) -> Spent:
    """`prompts`: plans of which the quickest reads prompts; none: the same plan."""
    problem = _problem(setting)
    return Spent(problem, problem, plan, tuple(prompts or (plan,)))


# -- experts --------------------------------------------------------------------------------------------


def _there(setting: Setting) -> float:
    """The share of the experts that the device has room for beside all else of the model, by their own bytes."""
    problem = _own_problem(setting)
    every = [*problem.of_kind("attn"), *problem.of_kind("shared"), problem.head]
    skeleton = device_skeleton(problem, CHUNK_ROWS, problem.layers, lifted=0.0)
    spare = problem.spare_bytes(skeleton.plan(all_of(every)), GPU.executor)
    assert spare is not None, setting
    return min(1.0, spare / sum(part.nbytes for part in problem.of_kind("experts")))


def _experts(
    setting: Setting, there: float | list[float], *, best: bool = False, r_cg: float = 0.0, prompts: bool | None = None
) -> Spent:  # fmt: skip
    """Decode with the experts of a token, prompts with all. `there`: of each layer, the share of the experts on the
    device. `best`: of the rest the link lifts what is best for decode; else `r_cg`. `prompts`: as for `scheinfer`."""
    token, whole = _problem(setting), _problem(setting, experts=True)
    shares = there if isinstance(there, list) else [there] * token.layers

    def plan(problem: Problem, there_too: bool) -> Plan:
        ffns, lifted = problem.of_kind("ffn"), []
        on_device = all_of([*problem.of_kind("attn"), problem.head])
        for part, share in zip(ffns, shares, strict=True):
            r_gg = _with_shared(setting, part, share)
            on_device[part.key] = round(r_gg * part.granules)
            r = _r_cg(token, r_gg) if best else r_cg * (1 - r_gg)
            lifted.append(min(1.0, r / (1 - r_gg)) if r_gg < 1 else 0.0)
        skeleton = device_skeleton(problem, CHUNK_ROWS, problem.layers, 0.0, prompts=there_too)
        return replace(skeleton, lifted=tuple(lifted)).plan(on_device)

    either = (True, False) if prompts is None else (prompts,)
    return Spent(token, whole, plan(token, True), tuple(plan(whole, each) for each in either))


def _with_shared(setting: Setting, part: Part, share: float) -> float:
    """The share of a dense FFN that is there, if a share of the experts is, and the expert that every row goes to."""
    routed = model_of(setting.model)[0].layers[part.layer].routed
    always = shared_neurons(routed) / part.rows if routed is not None else 0.0
    return always + share * (1 - always)


def _layers_of_experts(setting: Setting) -> Spent:
    """Whole layers, as many as fit by their own bytes."""
    own = _own_problem(setting)

    def plan_of(problem: Problem, layers: int) -> Plan:
        kinds = ("attn", "ffn", "experts", "shared", "router")
        there = all_of(p for p in problem.parts.values() if p.kind in kinds and p.layer < layers)
        return device_skeleton(problem, CHUNK_ROWS, layers, lifted=0.0).plan(there | all_of([problem.head]))

    layers = own.most_on_device(own.layers, cache(partial(plan_of, own)))
    assert layers, setting
    token, whole = _problem(setting), _problem(setting, experts=True)
    return Spent(token, whole, plan_of(token, layers), (plan_of(whole, layers),))


# -- settings -------------------------------------------------------------------------------------------


@cache
def _problem(setting: Setting, experts: bool = False) -> Problem:
    """Of a model with experts, the dense one of the experts that a token goes to, or of all `experts` for a prompt."""
    own = _own_problem(setting)
    if not setting.is_routed:
        return own
    rows = 0 if experts else 1
    return replace(own, spec=dense(own.spec, rows), machine=sparing(own.machine, own.spec, rows))


@cache
def _own_problem(setting: Setting) -> Problem:
    spec, weights = model_of(setting.model, setting.weights)
    ask = Ask(
        prompt_tokens=setting.prompt, output_tokens=OUTPUT, context=max(PROMPT, setting.prompt) + OUTPUT,
        device_memory_bytes=device_gb(setting.limit_gb),
    )  # fmt: skip
    machine = with_threads(machine_of(setting.machine, setting.traits), setting.threads)
    return Problem(settle_context(ask, spec), spec, weights, machine)


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
