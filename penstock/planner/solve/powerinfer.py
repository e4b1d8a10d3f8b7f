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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from penstock.graph.arenas import ARENA_ALIGN
from penstock.planner.activity import NeuronProfile, measured, predictor_rank, published, with_activity
from penstock.planner.candidate import Candidate
from penstock.planner.paper_reasons import hot_and_cold
from penstock.planner.programs import neurons as ilp
from penstock.planner.programs import placement
from penstock.planner.programs.neuron_choice import Choose, ChosenNeurons, by_program, by_seconds, drawn, hottest
from penstock.planner.shares import Resident, all_of
from penstock.planner.sizes import usual_chunks
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, within_device
from penstock.spec.parts import Part, active_columns
from penstock.spec.places import CPU, GPU, HOST
from penstock.spec.plan import Plan, Predictor

NAME = "hot and cold neurons (PowerInfer)"
MEASURED = "hot and cold neurons, by seconds"
HOTTEST, RANDOM = "hottest neurons first", "neurons at random"
CANNOT_RUN = "wants --sparsity predict, and weights that lie neuron by neuron"
LOSSY = "skips neurons that predictors call inactive"
_SHORT_PROMPT = 256  # in a prompt of so many tokens the CPU may compute its neurons as fast as the link lifts them


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
    yield from with_profile(problem, profile.shuffled(), (drawn,), RANDOM)


def with_profile(
    problem: Problem, profile: NeuronProfile, ways: Sequence[Choose] = (), name: str = NAME
) -> Iterator[Candidate]:  # fmt: skip
    """One candidate in which the device computes the CPU's neurons too while a prompt is read. For short prompts there
    is a second one in which the CPU computes its own. There is no candidate without a device, if the two memories do
    not hold the model, if the user limits the weights that stay, or if KV is wanted on the disk.

    `ways`: ways to choose neurons, of which the one is taken whose plan is fastest by its own account; (): `by_program`
    alone. `name`: the strategy's."""
    ask, ways = problem.ask, ways or (by_program,)
    if not problem.has_device or ask.resident_bytes is not None or ask.kv_home == "disk":
        return
    for prompts in (True, False) if ask.prompt_tokens <= _SHORT_PROMPT else (True,):
        for chunk_rows in usual_chunks(ask):
            skeleton = device_skeleton(problem, chunk_rows, problem.layers, lifted=0.0, prompts=prompts)
            filled = [each for choose in ways if (each := _filled(skeleton, profile, choose)) is not None]
            if filled:
                plan, chosen = min(filled, key=lambda each: each[1].seconds)
                refused = ("", "") if runs(problem) else (CANNOT_RUN, LOSSY)
                yield Candidate(name, plan, hot_and_cold(plan, profile, chosen.why, prompts), *refused)
                break


def _measured(problem: Problem) -> NeuronProfile | None:
    """What is known of the model's own neurons, granule by granule, in the order in which they are packed."""
    trace = problem.trace
    if trace is None or not any(trace.fires):
        return None
    return measured(problem.of_kind("ffn"), trace.fires, trace.source)


def program_of(problem: Problem, profile: NeuronProfile, device_bytes: int, host_bytes: int) -> ilp.NeuronProgram:
    """The integer program of a machine. `device_bytes`, `host_bytes`: what either memory has for neurons."""
    layers = []
    for part, rates in zip(problem.of_kind("ffn"), rates_of(problem), strict=True):
        # The last group may have fewer neurons.
        filled = [part.rows_of(i, i + 1) / part.granule_rows for i in range(part.granules)]
        impacts = tuple(f * share for f, share in zip(profile.layers[part.layer], filled, strict=True))
        least = ilp.least_groups(part.granule_rows, rates.device_s, rates.host_s, rates.sync_s)
        layers.append(ilp.LayerGroups(impacts, part.granule_bytes, least))
    return ilp.NeuronProgram(tuple(layers), device_bytes, host_bytes)


def rates_of(problem: Problem) -> list[placement.TokenTimes]:
    """What a machine's measured figures say of each layer. A synchronisation (Eq. 4) takes a task on the device, a task
    on the CPU, and over the link a copy of one row of activations each way, and of which neurons are active."""
    cost, kind, row_bytes = problem.cost, problem.weights.kind, 4 * problem.spec.d_model
    sync_s = sum(cost.call_s(lane, "copy", "*", nbytes=row_bytes) for lane in (GPU.to_device, GPU.to_host))
    sync_s += sum(cost.task_s(lane) for lane in (GPU.kernels, CPU))
    begin_s = cost.call_s(GPU.kernels, "ffn", kind, nbytes=0)

    def of(part: Part) -> placement.TokenTimes:
        active_s = cost.call_s(GPU.to_host, "copy", "*", nbytes=active_columns(part.rows))
        device_s, host_s = (cost.least_s(lane, "ffn", kind, 1, part.granule_bytes) for lane in (GPU.kernels, CPU))
        return placement.TokenTimes(device_s, host_s, sync_s + active_s, begin_s)

    return [of(part) for part in problem.of_kind("ffn")]


def _filled(skeleton: Skeleton, profile: NeuronProfile, choose: Choose) -> tuple[Plan, ChosenNeurons] | None:
    """The plan that fills device memory in the order of the module's docstring, and its placement of neurons. None if
    nothing fits, or if the program has no answer in time."""
    problem, limit = skeleton.problem, skeleton.problem.device_bytes
    planned = partial(plan_of, skeleton, profile)
    if not problem.fits(planned(0, 0, {}), GPU.executor):
        return None
    predictors = problem.most_on_device(problem.layers, lambda count: planned(0, count, {}))
    attention = problem.most_on_device(problem.layers, lambda count: planned(count, predictors, {}))
    bare, ffns = planned(attention, predictors, {}).tier_bytes(), problem.of_kind("ffn")
    total = sum(part.nbytes for part in ffns)
    host_bytes = problem.host_bytes - (bare[HOST] - total)
    # Kernels need more scratch for units that stay than for units that cross the link. The additional scratch is taken
    # to be that of a plan with even shares.
    spare = (limit - bare[GPU.executor]) // ARENA_ALIGN * ARENA_ALIGN
    even = {part.key: int(part.granules * min(1.0, spare / total)) for part in ffns}
    with_even = planned(attention, predictors, even).tier_bytes()
    spare -= max(0, with_even[GPU.executor] - bare[GPU.executor] - problem.bytes_of(even))

    def chosen(budget: int) -> ChosenNeurons | None:
        return choose(program_of(problem, profile, budget, host_bytes), rates_of(problem))

    def placed(groups: ChosenNeurons) -> Plan:
        there = {part.key: count for part, count in zip(ffns, groups.counts, strict=True)}
        return planned(attention, predictors, there)

    fitting = within_device(problem, spare, chosen, placed)
    return None if fitting is None else (with_activity(fitting[0], profile), fitting[1])


def plan_of(skeleton: Skeleton, profile: NeuronProfile, attention: int, predictors: int, ffns: Resident) -> Plan:
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
