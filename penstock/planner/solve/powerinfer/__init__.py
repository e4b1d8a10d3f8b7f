"""PowerInfer's plans: hot neurons on the device, cold neurons on the CPU, and inactive neurons are skipped.

Device memory is filled in this order:
1. the head, which no plan beside a device leaves to the CPU
2. predictors (section 8.3.4 prefers them there), layer by layer
3. attention with its KV, layer by layer
4. the groups of neurons that the integer program of `program` chooses. A group is a granule. A layer's neurons are
   sorted by activity before they are packed, so the chosen granules of a layer are its first ones.

The rest of the model lies in RAM.

In decode a unit costs the share of its neurons that a token is expected to need. This assumes that single neurons can
be skipped: the 64 neurons of a granule are hardly ever inactive together. The device adds up the two partial sums. A
prompt needs nearly all neurons, so it is read densely (section 8.2). The runtime has no
predictors beside a device yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.activity import NeuronProfile, predictor_rank, published
from penstock.planner.candidate import Candidate
from penstock.planner.homes import kv_layers
from penstock.planner.shares import Resident, all_of
from penstock.planner.solve.fill import usual_chunks
from penstock.planner.solve.powerinfer import program as ilp
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, within_device
from penstock.spec.places import CPU, GPU, HOST
from penstock.spec.plan import Plan, Predictor, Unit
from penstock.units import format_bytes

NAME = "hot and cold neurons (PowerInfer)"
CANNOT_RUN = "predictors beside a device are not built yet"
LOSSY = "skips neurons that predictors call inactive"
_SHORT_PROMPT = 256  # in a prompt of so many tokens the CPU may compute its neurons as fast as the link lifts them


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Candidates by PowerInfer's published figures. None for models of which no activity is published."""
    profile = published(problem.spec)
    if profile is not None:
        yield from with_profile(problem, profile)


def with_profile(problem: Problem, profile: NeuronProfile, limit_s: float = ilp.LIMIT_S) -> Iterator[Candidate]:
    """One candidate in which the device computes the CPU's neurons too where a prompt is read. For short prompts there
    is another one in which it does not. There is none without a device, if the two memories do not hold the model, if
    the user limits the weights that stay, or if KV is wanted on the disk. `limit_s`: the time limit of each integer
    program."""
    ask = problem.ask
    if not problem.has_device or ask.resident_bytes is not None or ask.kv_home == "disk":
        return
    for prompts in (True, False) if ask.prompt_tokens <= _SHORT_PROMPT else (True,):
        for chunk_rows in usual_chunks(ask):
            skeleton = device_skeleton(problem, chunk_rows, problem.layers, lifted=0.0, prompts=prompts)
            filled = _filled(skeleton, profile, limit_s)
            if filled is not None:
                plan, placement = filled
                yield Candidate(NAME, plan, _reasons(plan, profile, placement, prompts), CANNOT_RUN, LOSSY)
                break


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
    """The integer program of a machine. `device_bytes`, `host_bytes`: what either memory has for neurons.

    A synchronisation (Eq. 4) takes a task on the device, a task on the CPU, and a copy of one row of activations over
    the link each way."""
    cost, kind, row_bytes = problem.cost, problem.weights.kind, 4 * problem.spec.d_model
    sync_s = sum(cost.call_s(lane, "copy", "*", nbytes=row_bytes) for lane in (GPU.to_device, GPU.to_host))
    sync_s += sum(cost.task_s(lane) for lane in (GPU.kernels, CPU))
    layers = []
    for part in problem.of_kind("ffn"):
        rows = [
            part.rows_of(i, i + 1) / part.granule_rows for i in range(part.granules)
        ]  # the last group may have fewer neurons
        impacts = tuple(f * share for f, share in zip(profile.layers[part.layer], rows, strict=True))
        device_s, host_s = (cost.least_s(lane, "ffn", kind, 1, part.granule_bytes) for lane in (GPU.kernels, CPU))
        least = ilp.least_groups(part.granule_rows, device_s, host_s, sync_s)
        layers.append(ilp.LayerGroups(impacts, part.granule_bytes, least))
    return ilp.NeuronProgram(tuple(layers), device_bytes, host_bytes)


def _filled(skeleton: Skeleton, profile: NeuronProfile, limit_s: float) -> tuple[Plan, ilp.Placement] | None:
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

    def placed(budget: int) -> tuple[Plan, ilp.Placement] | None:
        placement = ilp.solve(program_of(problem, profile, budget, host_bytes), limit_s)
        if placement is None:
            return None
        chosen = {part.key: count for part, count in zip(ffns, placement.counts, strict=True)}
        return plan_of(attention, predictors, chosen), placement

    found = within_device(problem, spare, placed)
    return None if found is None else (_with_activity(found[0], profile), found[1])


def _plan(skeleton: Skeleton, profile: NeuronProfile, attention: int, predictors: int, ffns: Resident) -> Plan:
    """The plan with `ffns`, the attention of the first `attention` layers, and the first `predictors` predictors on the
    device. All neurons count as active."""
    problem = skeleton.problem
    there = ffns | all_of([problem.head, *problem.of_kind("attn")[:attention]])
    ranks = [predictor_rank(problem.spec.d_model, sum(layer) / len(layer)) for layer in profile.layers]
    homes = [GPU.executor if i < predictors else HOST for i in range(len(ranks))]
    every = tuple(Predictor(i, *each, problem.weights) for i, each in enumerate(zip(ranks, homes, strict=True)))
    return replace(skeleton, attention_layers=attention, predictors=every).plan(there)


def _with_activity(plan: Plan, profile: NeuronProfile) -> Plan:
    """The plan with the share of each unit's neurons that decoding a batch needs (`Unit.active`). Nothing moves."""
    layer_of = {key: part.layer for key, part in plan.parts.items() if part.kind == "ffn"}

    def with_share(unit: Unit) -> Unit:
        if unit.part not in layer_of:
            return unit
        return replace(unit, active=profile.active(layer_of[unit.part], unit.lo, unit.hi, plan.batch_seqs))

    return replace(plan, units=tuple(map(with_share, plan.units)))


def _reasons(plan: Plan, profile: NeuronProfile, placement: ilp.Placement, prompts: bool) -> tuple[str, ...]:
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
        f"placed by an integer program ({placement.found_by}, within {placement.gap:.2%} of the best there is)",
        where,
        f"attention and KV of {attention} of {layers} layers on the device, of the others on the CPU",
        "a prompt is read densely, the CPU's neurons by the device" if prompts else "a prompt is read densely",
    )
