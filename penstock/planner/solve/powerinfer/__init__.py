"""Hot neurons on the device, cold ones with the CPU, those that are not active skipped: PowerInfer's plan.

Of device memory the head comes first, since the CPU cannot take it; then what every token reads whole: predictors
(section 8.3.4 has them preferably there) and attention, layer by layer with its KV; then the groups of neurons that
the program of `program` chooses. A layer's granules are those of its neurons sorted by activity, so what it chooses
of a layer is the first so many. The rest of the model lies in RAM.

While decoding, a unit costs the share of its neurons that a token is expected to need, neuron by neuron: that assumes
the neuron layout, since 64 neurons are hardly ever inactive together. The device merges the two partial sums. A prompt
needs nearly all neurons: it is read densely, as in section 8.2. The runtime has no such kernels yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.planner.homes import kv_layers
from penstock.planner.solve.beside import DeviceSkeleton, Split, device_skeleton
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import Resident, bytes_of, usual_chunks
from penstock.planner.solve.powerinfer.activity import Profile, predictor_rank, published
from penstock.planner.solve.powerinfer.program import LIMIT_S, LayerGroups, Placement, Program, least_groups, solve
from penstock.planner.solve.problem import Problem, most
from penstock.spec.places import CPU, GPU, HOST, Tier
from penstock.spec.plan import Plan, Predictor
from penstock.units import format_bytes

NAME = "hot and cold neurons (PowerInfer)"
CANNOT_RUN = "kernels that skip neurons are not built yet"
LOSSY = "skips neurons that predictors call inactive"
_SHORT_PROMPT = 256  # tokens up to which the CPU may be as quick at its own neurons as the link
_ATTEMPTS = 3


def candidates(problem: Problem) -> Iterator[Candidate]:
    """For models that are known to be sparse; of others nobody knows which neurons are active."""
    profile = published(problem.spec)
    if profile is not None:
        yield from with_profile(problem, profile)


def with_profile(problem: Problem, profile: Profile, limit_s: float = LIMIT_S) -> Iterator[Candidate]:
    """The device computes the CPU's neurons where a prompt is read; for short prompts also a plan where it does not.
    None without a device, and where the two memories do not hold the model. `limit_s`: for the program, each time."""
    ask = problem.ask
    if not problem.has_device or ask.resident_bytes is not None or ask.kv_home == "disk":
        return
    for prompts in (True, False) if ask.prompt_tokens <= _SHORT_PROMPT else (True,):
        for chunk_rows in usual_chunks(ask):
            skeleton = device_skeleton(problem, Split("CPU", 0.0, problem.layers, GPU.executor, prompts), chunk_rows)
            found = _filled(skeleton, profile, limit_s)
            if found is not None:
                plan, placement = found
                yield Candidate(NAME, plan, _reasons(plan, profile, placement, prompts), CANNOT_RUN, LOSSY)
                break


def device_share(plan: Plan, profile: Profile) -> float:
    """The share of the neurons that a token needs which the device computes."""
    there, whole, sizes = 0.0, 0.0, plan.parts
    for unit in plan.units:
        part = sizes[unit.part]
        for i in range(unit.lo, unit.hi) if part.kind == "ffn" else ():
            active = profile.layers[part.layer][i] * part.rows_of(i, i + 1)
            there, whole = there + active * (unit.decode == GPU.executor), whole + active
    return there / whole


def program_of(problem: Problem, profile: Profile, device_bytes: int, host_bytes: int) -> Program:
    """Coefficients are the machine's: what a group takes on either executor; a synchronisation is a task's way to the
    device and one to the CPU, and activations over the link both ways."""
    cost, kind, row_bytes = problem.cost, problem.weights.kind, 4 * problem.spec.d_model
    sync_s = sum(cost.call_s(lane, "copy", "*", nbytes=row_bytes) for lane in (GPU.to_device, GPU.to_host))
    sync_s += sum(cost.task_s(lane) for lane in (GPU.kernels, CPU))
    layers = []
    for part in problem.of_kind("ffn"):
        rows = [part.rows_of(i, i + 1) / part.granule_rows for i in range(part.granules)]  # of the last one fewer
        impacts = tuple(f * share for f, share in zip(profile.layers[part.layer], rows, strict=True))
        device_s, host_s = (cost.least_s(lane, "ffn", kind, 1, part.granule_bytes) for lane in (GPU.kernels, CPU))
        least = least_groups(part.granule_rows, device_s, host_s, sync_s)
        layers.append(LayerGroups(impacts, part.granule_bytes, least))
    return Program(tuple(layers), device_bytes, host_bytes)


def _filled(skeleton: DeviceSkeleton, profile: Profile, limit_s: float) -> tuple[Plan, Placement] | None:
    problem, limit = skeleton.problem, skeleton.problem.device_bytes

    def used(attention: int, predictors: int, ffns: Resident | None = None) -> dict[Tier, int]:
        return _plan(skeleton, profile, attention, predictors, ffns or {}).tier_bytes()

    if used(0, 0)[GPU.executor] > limit:
        return None
    predictors = most(problem.layers, lambda count: used(0, count)[GPU.executor], limit)
    attention = most(problem.layers, lambda count: used(count, predictors)[GPU.executor], limit)
    bare, ffns = used(attention, predictors), problem.of_kind("ffn")
    total = sum(part.nbytes for part in ffns)
    host_bytes = problem.host_bytes - (bare[HOST] - total)
    # Kernels need more scratch for units that stay than for those that cross the link: as much as for even shares.
    spare = (limit - bare[GPU.executor]) // ARENA_ALIGN * ARENA_ALIGN
    even = {part.key: int(part.granules * min(1.0, spare / total)) for part in ffns}
    spare -= max(
        0, used(attention, predictors, even)[GPU.executor] - bare[GPU.executor] - bytes_of(problem.parts, even)
    )
    for _ in range(_ATTEMPTS):
        placement = solve(program_of(problem, profile, spare, host_bytes), limit_s) if spare >= 0 else None
        if placement is None:
            return None
        chosen = {part.key: len(groups) for part, groups in zip(ffns, placement.chosen, strict=True)}
        plan = _plan(skeleton, profile, attention, predictors, chosen)
        if problem.fits(plan):
            return _with_activity(plan, profile), placement
        spare -= max(ARENA_ALIGN, plan.tier_bytes()[GPU.executor] - limit)
    return None


def _plan(skeleton: DeviceSkeleton, profile: Profile, attention: int, predictors: int, ffns: Resident) -> Plan:
    """With attention of the first so many layers, and the predictors of so many, on the device. All neurons count as
    active so far."""
    problem = skeleton.problem
    there = {problem.head.key: problem.head.granules} | ffns
    there |= {f"{i}.attn": problem.parts[f"{i}.attn"].granules for i in range(attention)}
    found = tuple(
        Predictor(
            i, predictor_rank(problem.spec.d_model, sum(layer) / len(layer)), GPU.executor if i < predictors else HOST
        )
        for i, layer in enumerate(profile.layers)
    )
    return replace(skeleton.with_split(attention_layers=attention), predictors=found).plan(there)


def _with_activity(plan: Plan, profile: Profile) -> Plan:
    """The share of each unit's neurons that decoding a batch needs; it changes nothing of what lies where."""
    sizes = {key: part for key, part in plan.parts.items() if part.kind == "ffn"}
    units = (
        replace(unit, active=profile.active(sizes[unit.part].layer, unit.lo, unit.hi, plan.batch_seqs))
        if unit.part in sizes
        else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))


def _reasons(plan: Plan, profile: Profile, placement: Placement, prompts: bool) -> tuple[str, ...]:
    sizes, layout = plan.parts, Layout(plan)
    hot = whole = 0
    for unit in plan.units:
        if sizes[unit.part].kind == "ffn":
            nbytes = plan.unit_bytes(unit)
            hot, whole = hot + nbytes * (unit.home == GPU.executor), whole + nbytes
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
