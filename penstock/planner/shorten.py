"""The prediction of a plan of many layers that are alike, from two plans of few of them.

To lower and simulate some passes of an 80-layer model in units of 16 MiB takes seconds. Its time is that of its ends
(embedding, head, what lies between passes) and that of its layers, which are alike: so two short plans with the same
ring tell both; where the first layers keep their KV on a device and the others in RAM, three. Short means: every kind
of layer is in them, and they stream their ring full several times, so that loads run ahead as they do in the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from penstock.graph.arenas import gathers
from penstock.planner.predict import ExpertUse, Prediction, Spread, predict
from penstock.planner.routing import Trace
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import HOST, Lane, is_device, is_disk
from penstock.spec.plan import Plan, PlanModel

_FEW_UNITS = 400  # up to so many the plan itself is simulated, in a tenth of a second
_RINGS, _MANY_RINGS = 3, 8  # times that the shorter plan streams its ring full: at least, and with less than 4 layers
_MANY_UNITS = 80  # of a layer, of which one is enough
_MOST_RUNS = 2  # of layers whose KV lives in one place
_LONGEST_PERIOD = 8  # layers after which their kinds come again: 1 in most models, 2 in gemma2


def quick(plan: Plan, ask: Ask, machine: MachineSpec, spread: bool = True, trace: Trace | None = None) -> Prediction:
    """As `predict`: the same for a plan of few units, within some hundredths for others, in a fraction of its time."""
    chosen = _choose(plan) if len(plan.units) > _FEW_UNITS else None
    if chosen is None:
        return predict(plan, ask, machine, spread, trace)

    def of(layers: list[int]) -> Prediction:
        heard = None if trace is None else replace(trace, layers=tuple(trace.layers[i] for i in layers))
        return predict(shortened(plan, layers), ask, machine, spread, heard)

    near = of([i for run in chosen for i in run.near])
    further = []
    for run in chosen:
        if run.far:
            layers = [i for other in chosen for i in (other.far if other is run else other.near)]
            share = (run.layers - len(run.near)) / (len(run.far) - len(run.near))
            further.append((share, of(layers)))
    return _further(near, further, plan, ask)


def shortened(plan: Plan, layers: Sequence[int]) -> Plan:
    """The plan with these layers alone."""
    spec = plan.target.spec
    number = {str(layer): i for i, layer in enumerate(layers)}
    units = []
    for unit in plan.units:
        layer, _, kind = unit.part.partition(".")
        if not kind:
            units.append(unit)
        elif layer in number:
            units.append(replace(unit, part=f"{number[layer]}.{kind}"))

    def within(span: tuple[int, int]) -> tuple[int, int]:
        return sum(layer < span[0] for layer in layers), sum(layer < span[1] for layer in layers)

    return replace(
        plan,
        models=(PlanModel(replace(spec, layers=tuple(spec.layers[i] for i in layers)), plan.target.weights),),
        units=tuple(units),
        kv=tuple(replace(home, layers=within(home.layers)) for home in plan.kv),
        acts=tuple(replace(home, layers=within(home.layers)) for home in plan.acts),
        predictors=tuple(replace(p, layer=number[str(p.layer)]) for p in plan.predictors if str(p.layer) in number),
        caches=tuple(replace(c, layer=number[str(c.layer)]) for c in plan.caches if str(c.layer) in number),
    )


class _Run(NamedTuple):
    """So many layers in a row, and those of them that the shorter and the longer plan have; none in `far`: all plans
    have them all."""

    layers: int
    near: list[int]
    far: list[int]


def _choose(plan: Plan) -> list[_Run] | None:
    """The layers of the short plans, or None: simulate the plan itself. Layers whose KV lives in one place are one run,
    of which there may be two; a plan for each run is longer in that one."""
    count = len(plan.target.spec.layers)
    if len({unit.home for unit in plan.units if is_disk(unit.home)}) > 1:
        return None  # every n-th layer may lie on one of the disks alone
    if plan.predictors:
        return None  # layers differ in how many of their neurons are active
    spans = sorted({home.layers for home in plan.kv})
    if any(act.layers != (0, count) for act in plan.acts) or len(spans) > _MOST_RUNS:
        return None
    if any(lo < before for (_, before), (lo, _) in pairwise(spans)):
        return None
    found, prompts = streamed(plan), streamed(plan, purpose="prefill")
    most = max(sum(found.values()) - found[-1], sum(prompts.values()) - prompts[-1])
    ring_layers = sum(plan.ring_bytes.values()) * count / max(1, most)
    least = 1 if len(plan.units) > _MANY_UNITS * count else 2
    chosen = [_run(plan, those, found, ring_layers, least) for span in spans for those in _split(plan, range(*span))]
    return chosen if any(run.far for run in chosen) else None


def _split(plan: Plan, those: range) -> list[range]:
    """Layers whose first are unlike all others (dense ones before those with experts) are two runs."""
    layers = plan.target.spec.layers
    first = next((i for i in those if layers[i] != layers[those.start]), those.stop)
    leads = first < those.stop and len(set(layers[first : those.stop])) == 1
    return [range(those.start, first), range(first, those.stop)] if leads else [those]


def _run(plan: Plan, those: range, found: Mapping[int, int], ring_layers: float, least: int) -> _Run:
    """Layers differ by a granule that stays or streams; these are the ones that, continued, come closest to what the
    whole run reads. `ring_layers`: so many fill the ring once."""
    layers, whole = plan.target.spec.layers[those.start : those.stop], _Run(len(those), list(those), [])
    period = next((p for p in range(1, _LONGEST_PERIOD + 1) if layers[p:] == layers[:-p]), None)
    if period is None:
        return whole
    rings = ring_layers / period
    few = max(least, ceil(_RINGS * rings), min(4, ceil(_MANY_RINGS * rings)))
    if 6 * few * period > len(those):
        return whole
    runs = [
        sum(found[those[i]] for i in range(at, at + period))
        for at in range(0, len(those) - len(those) % period, period)
    ]
    long, total = len(those) / period, sum(found[i] for i in those)

    def read(numbers: range) -> int:
        return sum(runs[numbers.start : numbers.stop : numbers.step])

    near = min(_progressions(len(runs), few), key=lambda numbers: abs(read(numbers) / few * long - total))
    start, share = read(near), (long - few) / few
    far = min(
        _progressions(len(runs), 2 * few),
        key=lambda numbers: abs(start + share * (read(numbers) - start) - total),
    )
    shorter, longer = ([those[at * period + j] for at in numbers for j in range(period)] for numbers in (near, far))
    return _Run(len(those), shorter, longer)


def _progressions(count: int, wanted: int) -> Iterator[range]:
    """Arithmetic progressions of `wanted` numbers below `count`, those that reach furthest first."""
    for step in range((count - 1) // max(1, wanted - 1), 0, -1):
        for start in range(count - step * (wanted - 1)):
            yield range(start, start + step * wanted, step)


def streamed(plan: Plan, from_disk: bool = False, purpose: str = "decode") -> dict[int, int]:
    """Bytes that a pass streams (or reads from disks), of each layer; -1: of what is in none, the head. In decode
    experts with a cache are left out."""
    parts, tied = plan.parts, plan.target.spec.tied
    cached = {f"{cache.layer}.experts" for cache in plan.caches}
    found = dict.fromkeys(range(-1, len(plan.target.spec.layers)), 0)
    for unit in plan.units:
        if purpose == "decode" and unit.part in cached:
            continue  # what is missing of them depends on the routers
        away = is_disk(unit.home) if from_disk else unit.home != unit.executor(purpose)
        if away and (unit.part != "embed" or tied):  # as `Layout.streams` has it
            part = parts[unit.part]
            found[part.layer] += (unit.hi - unit.lo) * part.granule_bytes
    return found


def _further(near: Prediction, further: Sequence[tuple[float, Prediction]], plan: Plan, ask: Ask) -> Prediction:
    """From `near` the `share` times the way to each longer plan: times lie on a line in the layers of every run; bytes
    are counted in the plan itself."""

    def line(of: Callable[[Prediction], float]) -> float:
        return max(of(near), of(near) + sum(share * (of(far) - of(near)) for share, far in further))

    def busy(of: Callable[[Prediction], dict[Lane, float]], wall_s: Callable[[Prediction], float]) -> dict[Lane, float]:
        """Shares of lanes, from their seconds."""
        return {
            lane: min(1.0, line(lambda p, lane=lane: of(p).get(lane, 0.0) * wall_s(p)) / line(wall_s))  # type: ignore[misc]
            for lane in dict.fromkeys(lane for _, far in further for lane in of(far))
        }

    shares = busy(lambda p: p.lane_share, lambda p: 1 / p.decode_tokens_per_s)
    seqs = min(ask.batch, plan.batch_seqs * plan.batches_per_pass)
    fetched = 0 if gathers(plan) else plan.parts["embed"].granule_bytes
    tier_bytes = plan.tier_bytes()

    def of_experts(of: Callable[[ExpertUse], float]) -> float:
        return line(lambda p: of(p.experts) if p.experts is not None else 0.0)

    missed_bytes = of_experts(lambda use: use.missed_bytes)
    use = None
    if near.experts is not None:
        wanted, missed = of_experts(lambda use: use.wanted), of_experts(lambda use: use.missed)
        cold_s = of_experts(lambda use: use.cold_s)
        use = ExpertUse(wanted, missed, missed_bytes, near.experts.source, cold_s)
    return Prediction(
        ttft_s=line(lambda p: p.ttft_s),
        decode_tokens_per_s=1 / line(lambda p: 1 / p.decode_tokens_per_s),
        total_s=line(lambda p: p.total_s),
        bound_by=max(shares, key=lambda lane: shares[lane]),
        lane_share=shares,
        ttft_lane_share=busy(lambda p: p.ttft_lane_share, lambda p: p.ttft_s),
        disk_bytes_per_token=sum(streamed(plan, from_disk=True).values()) / seqs + fetched + missed_bytes,
        peak_host_bytes=tier_bytes[HOST],
        peak_device_bytes=sum(n for tier, n in tier_bytes.items() if is_device(tier)),
        inter_token_s=Spread(
            line(lambda p: p.inter_token_s.p50), line(lambda p: p.inter_token_s.p95),
            line(lambda p: p.inter_token_s.most),
        ),
        tier_bytes=tier_bytes,
        experts=use,
    )  # fmt: skip
