"""PowerInfer's plans: hot neurons on the device, cold neurons on the CPU, and inactive neurons are skipped.

Device memory is filled in this order:
1. the head, which no plan beside a device leaves to the CPU
2. predictors (section 8.3.4 prefers them there), layer by layer
3. attention with its KV, layer by layer
4. groups of neurons. A group is a granule. A layer's neurons are sorted by activity before they are packed, so the
   chosen granules of a layer are its first ones.

The rest of the model lies in RAM. Which groups the device holds is decided in four ways, to be compared: by the paper's
integer program (`programs/neurons`), by the seconds that a token takes (`programs/placement`), hottest first, and at
random.

In decode a unit costs the share of its neurons that a token is expected to need. This assumes that single neurons can
be skipped: the 64 neurons of a granule are hardly ever inactive together. The device adds up the two partial sums. A
prompt needs nearly all neurons, so it is read densely (section 8.2).

Such plans run where predictors are asked for (`--sparsity predict`) and neurons lie one by one. Then all rows have
their neurons predicted, a prompt's too, and activity is that of the model's profile, where it has one. Of other models
the plans show what PowerInfer's published figures would give.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.activity import NeuronProfile, predictor_rank, published
from penstock.planner.homes import kv_layers
from penstock.planner.programs import neurons as ilp
from penstock.planner.programs import placement
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import Resident, all_of, usual_chunks
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, within_device
from penstock.spec.parts import Part, active_columns
from penstock.spec.places import CPU, GPU, HOST
from penstock.spec.plan import Plan, Predictor, Unit
from penstock.units import format_bytes

NAME = "hot and cold neurons (PowerInfer)"
MEASURED = "hot and cold neurons, by seconds"
HOTTEST, RANDOM = "hottest neurons first", "neurons at random"
CANNOT_RUN = "wants --sparsity predict, and weights that lie neuron by neuron"
LOSSY = "skips neurons that predictors call inactive"
_SHORT_PROMPT = 256  # in a prompt of so many tokens the CPU may compute its neurons as fast as the link lifts them


@dataclass(frozen=True, slots=True)
class Chosen:
    """How many groups of each layer the device holds, the seconds that the layers take so, and a sentence about who
    chose them."""

    counts: ilp.Counts
    seconds: float
    why: str


Choose = Callable[[ilp.NeuronProgram, Sequence[placement.Rates]], Chosen | None]


def runs(problem: Problem) -> bool:
    """Whether the runtime runs such plans."""
    return problem.sparsity == "predict" and problem.weights.neurons


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Candidates of each way to choose, by the model's own profile where they run, else by PowerInfer's published
    figures. None for models of which no activity is known."""
    profile = (_measured(problem) if runs(problem) else None) or published(problem.spec)
    if profile is None:
        return
    # A layer that is whole on the device may want more scratch there, and so leave less room than hottest first has.
    for name, ways in ((NAME, (by_program,)), (MEASURED, (hottest, by_seconds)), (HOTTEST, (hottest,))):
        yield from with_profile(problem, profile, ways, name)
    yield from with_profile(problem, _shuffled(profile), (drawn,), RANDOM)


def with_profile(
    problem: Problem, profile: NeuronProfile, ways: Sequence[Choose] = (), name: str = NAME
) -> Iterator[Candidate]:  # fmt: skip
    """One candidate in which the device computes the CPU's neurons too where a prompt is read. For short prompts there
    is another one in which it does not. There is none without a device, if the two memories do not hold the model, if
    the user limits the weights that stay, or if KV is wanted on the disk. `ways`: of which the fastest answer is
    taken; none: `by_program`."""
    ask, ways = problem.ask, ways or (by_program,)
    if not problem.has_device or ask.resident_bytes is not None or ask.kv_home == "disk":
        return
    for prompts in (True, False) if ask.prompt_tokens <= _SHORT_PROMPT else (True,):
        for chunk_rows in usual_chunks(ask):
            skeleton = device_skeleton(problem, chunk_rows, problem.layers, lifted=0.0, prompts=prompts)
            found = [each for choose in ways if (each := _filled(skeleton, profile, choose)) is not None]
            if found:
                plan, chosen = min(found, key=lambda each: each[1].seconds)
                refused = ("", "") if runs(problem) else (CANNOT_RUN, LOSSY)
                yield Candidate(name, plan, _reasons(plan, profile, chosen, prompts), *refused)
                break


def by_program(program: ilp.NeuronProgram, rates: Sequence[placement.Rates]) -> Chosen | None:
    found = ilp.solve(program)
    if found is None:
        return None
    return Chosen(
        found.counts,
        placement.seconds_of(program, rates, found.counts),
        f"placed by an integer program ({found.found_by}, within {found.gap:.2%} of the best there is)",
    )


def by_seconds(program: ilp.NeuronProgram, rates: Sequence[placement.Rates]) -> Chosen | None:
    found = placement.fastest(program, rates)
    if found is None:
        return None
    whole = sum(n == len(layer.impacts) for n, layer in zip(found.counts, program.layers, strict=True))
    return Chosen(
        found.counts,
        found.seconds,
        f"placed by the seconds of a token (within {found.gap:.2%} of the best there is): {whole} layers are there"
        " whole, and wait for no CPU",
    )


def hottest(program: ilp.NeuronProgram, rates: Sequence[placement.Rates]) -> Chosen | None:
    return _if_allowed(program, rates, placement.hottest_first(program), "the hottest neurons of all layers come first")


def drawn(program: ilp.NeuronProgram, rates: Sequence[placement.Rates]) -> Chosen | None:
    return _if_allowed(program, rates, placement.at_random(program), "neurons are drawn at random")


def _if_allowed(
    program: ilp.NeuronProgram, rates: Sequence[placement.Rates], counts: ilp.Counts, why: str
) -> Chosen | None:  # fmt: skip
    used = sum(n * layer.group_bytes for n, layer in zip(counts, program.layers, strict=True))
    seconds = placement.seconds_of(program, rates, counts)
    return Chosen(counts, seconds, why) if 0 <= program.total_bytes - used <= program.host_bytes else None


def _measured(problem: Problem) -> NeuronProfile | None:
    """What is known of the model's own neurons, granule by granule, in the order in which they are packed."""
    trace = problem.trace
    if trace is None or not any(trace.fires):
        return None

    def shares(part: Part) -> tuple[float, ...]:
        rates = memoryview(trace.fires[part.layer]).cast("f")
        each = (rates[i : i + part.granule_rows] for i in range(0, len(rates), part.granule_rows))
        return tuple(sum(some) / len(some) for some in each)

    return NeuronProfile(tuple(map(shares, problem.of_kind("ffn"))), trace.source)


def _shuffled(profile: NeuronProfile) -> NeuronProfile:
    """The same neurons in no order."""
    draw = random.Random(0)
    return replace(profile, layers=tuple(tuple(draw.sample(layer, len(layer))) for layer in profile.layers))


def device_share(plan: Plan, profile: NeuronProfile) -> float:
    """Of the neurons that a token needs, the share that the device computes."""
    there, whole, sizes = 0.0, 0.0, plan.parts
    for unit in plan.units:
        part = sizes[unit.part]
        for i in range(unit.lo, unit.hi) if part.kind == "ffn" else ():
            active = profile.layers[part.layer][i] * part.rows_of(i, i + 1)
            there, whole = there + active * (unit.decode == GPU.executor), whole + active
    return there / whole


def program_of(problem: Problem, profile: NeuronProfile, device_bytes: int, host_bytes: int) -> ilp.NeuronProgram:
    """The integer program of a machine. `device_bytes`, `host_bytes`: what either memory has for neurons."""
    layers = []
    for part, rates in zip(problem.of_kind("ffn"), rates_of(problem), strict=True):
        rows = [
            part.rows_of(i, i + 1) / part.granule_rows for i in range(part.granules)
        ]  # the last group may have fewer neurons
        impacts = tuple(f * share for f, share in zip(profile.layers[part.layer], rows, strict=True))
        least = ilp.least_groups(part.granule_rows, rates.device_s, rates.host_s, rates.sync_s)
        layers.append(ilp.LayerGroups(impacts, part.granule_bytes, least))
    return ilp.NeuronProgram(tuple(layers), device_bytes, host_bytes)


def rates_of(problem: Problem) -> list[placement.Rates]:
    """What a machine's measured figures say of each layer. A synchronisation (Eq. 4) takes a task on the device, a task
    on the CPU, and over the link a copy of one row of activations each way, and of which neurons are active."""
    cost, kind, row_bytes = problem.cost, problem.weights.kind, 4 * problem.spec.d_model
    sync_s = sum(cost.call_s(lane, "copy", "*", nbytes=row_bytes) for lane in (GPU.to_device, GPU.to_host))
    sync_s += sum(cost.task_s(lane) for lane in (GPU.kernels, CPU))
    begin_s = cost.call_s(GPU.kernels, "ffn", kind, nbytes=0)

    def of(part: Part) -> placement.Rates:
        active_s = cost.call_s(GPU.to_host, "copy", "*", nbytes=active_columns(part.rows))
        device_s, host_s = (cost.least_s(lane, "ffn", kind, 1, part.granule_bytes) for lane in (GPU.kernels, CPU))
        return placement.Rates(device_s, host_s, sync_s + active_s, begin_s)

    return [of(part) for part in problem.of_kind("ffn")]


def _filled(skeleton: Skeleton, profile: NeuronProfile, choose: Choose) -> tuple[Plan, Chosen] | None:
    """The plan that fills device memory in the order of the module's docstring, and its placement of neurons. None if
    nothing fits, or if the program has no answer in time."""
    problem, limit = skeleton.problem, skeleton.problem.device_bytes
    plan_of = partial(_plan, skeleton, profile)
    if not problem.fits(plan_of(0, 0, {}), GPU.executor):
        return None
    predictors = problem.most_on_device(problem.layers, lambda count: plan_of(0, count, {}))
    attention = problem.most_on_device(problem.layers, lambda count: plan_of(count, predictors, {}))
    bare, ffns = plan_of(attention, predictors, {}).tier_bytes(), problem.of_kind("ffn")
    total = sum(part.nbytes for part in ffns)
    host_bytes = problem.host_bytes - (bare[HOST] - total)
    # Kernels need more scratch for units that stay than for units that cross the link. The additional scratch is taken
    # to be that of a plan with even shares.
    spare = (limit - bare[GPU.executor]) // ARENA_ALIGN * ARENA_ALIGN
    even = {part.key: int(part.granules * min(1.0, spare / total)) for part in ffns}
    with_even = plan_of(attention, predictors, even).tier_bytes()
    spare -= max(0, with_even[GPU.executor] - bare[GPU.executor] - problem.bytes_of(even))

    def placed(budget: int) -> tuple[Plan, Chosen] | None:
        found = choose(program_of(problem, profile, budget, host_bytes), rates_of(problem))
        if found is None:
            return None
        there = {part.key: count for part, count in zip(ffns, found.counts, strict=True)}
        return plan_of(attention, predictors, there), found

    found = within_device(problem, spare, placed)
    return None if found is None else (_with_activity(found[0], profile), found[1])


def _plan(skeleton: Skeleton, profile: NeuronProfile, attention: int, predictors: int, ffns: Resident) -> Plan:
    """The plan with `ffns`, the attention of the first `attention` layers, and the first `predictors` predictors on the
    device. All neurons count as active."""
    problem = skeleton.problem
    there = ffns | all_of([problem.head, *problem.of_kind("attn")[:attention]])
    known = problem.predictors
    if not known:
        ranks = [predictor_rank(problem.spec.d_model, sum(layer) / len(layer)) for layer in profile.layers]
        known = tuple(Predictor(i, rank, HOST, problem.weights) for i, rank in enumerate(ranks))
    every = tuple(replace(each, home=GPU.executor if i < predictors else HOST) for i, each in enumerate(known))
    return replace(skeleton, attention_layers=attention, predictors=every).plan(there)


def _with_activity(plan: Plan, profile: NeuronProfile) -> Plan:
    """The plan with the share of each unit's neurons that decoding a batch needs (`Unit.active`). Nothing moves."""
    layer_of = {key: part.layer for key, part in plan.parts.items() if part.kind == "ffn"}

    def with_share(unit: Unit) -> Unit:
        if unit.part not in layer_of:
            return unit
        return replace(unit, active=profile.active(layer_of[unit.part], unit.lo, unit.hi, plan.batch_seqs))

    return replace(plan, units=tuple(map(with_share, plan.units)))


def _reasons(plan: Plan, profile: NeuronProfile, chosen: Chosen, prompts: bool) -> tuple[str, ...]:
    sizes, layout = plan.parts, Layout(plan)
    ffns = [unit for unit in plan.units if sizes[unit.part].kind == "ffn"]
    whole = sum(map(plan.unit_bytes, ffns))
    hot = sum(plan.unit_bytes(unit) for unit in ffns if unit.home == GPU.executor)
    predictors = {GPU.executor: 0, HOST: 0}
    for predictor in plan.predictors:
        predictors[predictor.home] += layout.predictor_part(predictor).nbytes
    attention, layers = kv_layers(plan, GPU.executor), len(profile.layers)
    where = f"predictors take {format_bytes(predictors[GPU.executor])} of device memory"
    if predictors[HOST]:
        where += f" and {format_bytes(predictors[HOST])} of RAM"
    return (
        f"a token is expected to need {profile.mean:.0%} of the FFNs' neurons: {profile.source}",
        f"the hottest {format_bytes(hot)} of {format_bytes(whole)} of FFNs stay in device memory and make "
        f"{device_share(plan, profile):.0%} of the active neurons; the CPU computes what is active of the others",
        chosen.why,
        where,
        f"attention and KV of {attention} of {layers} layers on the device, of the others on the CPU",
        "a prompt is read densely, the CPU's neurons by the device" if prompts else "a prompt is read densely",
    )
