"""The prediction of a plan of many layers that are alike, from two plans of few of them.

To lower and simulate some passes of an 80-layer model in units of 16 MiB takes seconds. Its time is that of its ends
(embedding, head, what lies between passes) and that of its layers, which are alike: so two short plans with the same
ring tell both. Short means: every kind of layer is in them, and they stream their ring full several times, so that
loads run ahead as they do in the long one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from penstock.graph.arenas import Layout
from penstock.planner.predict import Prediction, Spread, predict
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.plan import Plan, PlanModel

_FEW_UNITS = 400  # up to so many the plan itself is simulated, in a tenth of a second
_RINGS, _MANY_RINGS = 3, 8  # times that the shorter plan streams its ring full: at least, and with less than 4 layers
_MANY_UNITS = 80  # of a layer, of which one is enough
_LONGEST_PERIOD = 8  # layers after which their kinds come again: 1 in most models, 2 in gemma2


def quick(plan: Plan, ask: Ask, machine: MachineSpec, spread: bool = True) -> Prediction:
    """As `predict`: the same for a plan of few units, within some hundredths for others, in a fraction of its time."""
    chosen = _choose(plan) if len(plan.units) > _FEW_UNITS else None
    if chosen is None:
        return predict(plan, ask, machine, spread)
    near, far = (len(layers) for layers in chosen)
    share = (len(plan.target.spec.layers) - near) / (far - near)
    shorter, longer = (predict(shortened(plan, layers), ask, machine, spread) for layers in chosen)
    return _further(shorter, longer, share, plan, ask)


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
    everything = (0, len(layers))
    return replace(
        plan,
        models=(PlanModel(replace(spec, layers=tuple(spec.layers[i] for i in layers)), plan.target.weights),),
        units=tuple(units),
        kv=tuple(replace(home, layers=everything) for home in plan.kv),
        acts=tuple(replace(home, layers=everything) for home in plan.acts),
        predictors=tuple(replace(p, layer=number[str(p.layer)]) for p in plan.predictors if str(p.layer) in number),
    )


def _choose(plan: Plan) -> tuple[list[int], list[int]] | None:
    """The layers of the two short plans, or None: simulate the plan itself. Layers differ by a granule that stays or
    streams; these are the ones that, continued, come closest to what the whole plan reads."""
    layers = plan.target.spec.layers
    count = len(layers)
    if len({unit.home for unit in plan.units if unit.home.startswith("disk")}) > 1:
        return None  # every n-th layer may lie on one of the disks alone
    if plan.predictors:
        return None  # layers differ in how many of their neurons are active
    if any(span != (0, count) for span in (*(kv.layers for kv in plan.kv), *(act.layers for act in plan.acts))):
        return None
    period = next((p for p in range(1, _LONGEST_PERIOD + 1) if layers[p:] == layers[:-p]), None)
    if period is None:
        return None
    found, prompts = streamed(plan), streamed(plan, purpose="prefill")
    total, ring_bytes = sum(found.values()) - found[-1], sum(plan.ring_bytes.values())
    most = max(total, sum(prompts.values()) - prompts[-1])
    rings = ring_bytes * count / max(1, most * period)  # in one run of layers
    least = 1 if len(plan.units) > _MANY_UNITS * count else 2
    few = max(least, ceil(_RINGS * rings), min(4, ceil(_MANY_RINGS * rings)))
    if 6 * few * period > count:
        return None
    runs = [sum(found[i] for i in range(at, at + period)) for at in range(0, count - count % period, period)]
    long = count / period

    def read(those: Sequence[int]) -> int:
        return sum(runs[i] for i in those)

    near = min(_progressions(len(runs), few), key=lambda those: abs(read(those) / few * long - total))
    start, share = read(near), (long - few) / few
    far = min(
        _progressions(len(runs), 2 * few),
        key=lambda those: abs(start + share * (read(those) - start) - total),
    )
    shorter, longer = ([at * period + j for at in those for j in range(period)] for those in (near, far))
    return shorter, longer


def _progressions(count: int, wanted: int) -> Iterator[range]:
    """Arithmetic progressions of `wanted` numbers below `count`, those that reach furthest first."""
    for step in range((count - 1) // max(1, wanted - 1), 0, -1):
        for start in range(count - step * (wanted - 1)):
            yield range(start, start + step * wanted, step)


def streamed(plan: Plan, from_disk: bool = False, purpose: str = "decode") -> dict[int, int]:
    """Bytes that a pass streams (or reads from disks), of each layer; -1: of what is in none, the head."""
    parts, tied = plan.parts, plan.target.spec.tied
    found = dict.fromkeys(range(-1, len(plan.target.spec.layers)), 0)
    for unit in plan.units:
        away = unit.home.startswith("disk") if from_disk else unit.home != unit.executor(purpose)
        if away and (unit.part != "embed" or tied):  # as `Layout.streams` has it
            part = parts[unit.part]
            found[part.layer] += (unit.hi - unit.lo) * part.granule_bytes
    return found


def _further(near: Prediction, far: Prediction, share: float, plan: Plan, ask: Ask) -> Prediction:
    """`share` times the way from `near` to `far`: times lie on a line; bytes are counted in the plan itself."""

    def line(a: float, b: float) -> float:
        return max(a, a + share * (b - a))

    per_token_s = line(1 / near.decode_tokens_per_s, 1 / far.decode_tokens_per_s)
    shares: dict[str, float] = {}
    for lane, each in far.lane_share.items():
        busy_s = line(near.lane_share.get(lane, 0.0) / near.decode_tokens_per_s, each / far.decode_tokens_per_s)
        shares[lane] = min(1.0, busy_s / per_token_s)
    seqs = min(ask.batch, plan.batch_seqs * plan.batches_per_pass)
    fetched = 0 if Layout(plan).gathers else plan.parts["embed"].granule_bytes
    spreads = (near.inter_token_s, far.inter_token_s)
    tier_bytes = plan.tier_bytes()
    return Prediction(
        ttft_s=line(near.ttft_s, far.ttft_s),
        decode_tokens_per_s=1 / per_token_s,
        total_s=line(near.total_s, far.total_s),
        bound_by=max(shares, key=lambda lane: shares[lane]),
        lane_share=shares,
        disk_bytes_per_token=sum(streamed(plan, from_disk=True).values()) / seqs + fetched,
        peak_host_bytes=tier_bytes["host"],
        peak_device_bytes=sum(n for tier, n in tier_bytes.items() if tier.startswith("gpu")),
        inter_token_s=Spread(*(line(getattr(spreads[0], f), getattr(spreads[1], f)) for f in ("p50", "p95", "most"))),
        tier_bytes=tier_bytes,
    )
