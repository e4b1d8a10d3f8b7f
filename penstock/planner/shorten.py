"""Predicts a plan of many layers that are alike quickly, from simulations of two plans with few of these layers.

To lower and simulate some passes of an 80-layer model in units of 16 MiB takes seconds. A pass takes the seconds of its
ends (embedding, head, the pause between passes) and of its layers, which are alike. So two short plans with the same
ring tell both, by a line through them. If the first layers keep their KV elsewhere than the others, there are two runs
of layers, and three short plans. If layers with KV here and there alternate, as FlexGen's do, the short plans have as
many layers of either kind, in their order.

Layers differ in how many of their neurons fire. If a plan asks a disk for these, short plans have layers for which the
line comes nearest to the neurons that all layers are expected to ask for, too.

A short plan has every kind of layer. It streams its ring full several times, so that loads run ahead as they do in the
long plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, tee
from math import ceil
from operator import add
from typing import NamedTuple

from penstock.graph.arenas import Layout, gathers
from penstock.planner.predict import ExpertUse, Prediction, Spread, half_way, lowered, predict
from penstock.planner.routing import RouterTrace
from penstock.planner.simulate import Lowered
from penstock.spec.ask import Ask
from penstock.spec.format import Format, Mixed
from penstock.spec.machine import MachineSpec
from penstock.spec.part_keys import gathered_key
from penstock.spec.places import Lane, is_disk
from penstock.spec.plan import Plan, PlanModel

_FEW_UNITS = 400  # a plan of so few units is simulated itself, which takes a tenth of a second
# The shortest plan streams its ring full at least 3 times. If it has less than 4 layers, it does so 8 times.
_RINGS, _MANY_RINGS = 3, 8
# What caches miss differs from layer to layer. So the longer plan has so many layers more than the shorter one. With
# two layers and four, the line through them told 436 MB a token of a plan whose layers read 512 together.
_CACHED_LAYERS = 8
# The same where neurons are asked for. Which ones fire is drawn, and layers differ much. So the longer plan has the
# layers of the shorter one too, for which the same is drawn, and what both differ by is as all layers are in the mean.
_ASKED_LAYERS = 4
_CLOSE = 0.01  # sums of layers' counts this close to each other are as good
_MANY_UNITS = 80  # one layer of so many units is enough for a short plan
_MOST_RUNS = 2  # runs of layers whose KV has one home
_LONGEST_PERIOD = 8  # the kinds of layers repeat after so many at most: after 1 in most models, after 2 in gemma2


# Layers of a short plan, () for the plan itself → its passes, as `predict.lowered` yields them.
Kept = dict[tuple[int, ...], Iterator[Lowered]]


def quick(
    plan: Plan, ask: Ask, machine: MachineSpec, spread: bool = True, trace: RouterTrace | None = None,
    kept: Kept | None = None,
) -> Prediction:  # fmt: skip
    """The prediction of a plan, as `predict` makes it. For a plan of few units it is the same. For others it is exact
    within some hundredths, and takes a fraction of the time. `kept`: keeps the passes, and has those that a prediction
    for another machine has kept."""
    kept = None if plan.asks else kept  # what answers decide differs from time to time

    def of(layers: Sequence[int]) -> Prediction:
        short, heard = (plan, trace) if not layers else (shortened(plan, layers), trace and trace.of_layers(layers))
        tasks = None if kept is None else _kept(kept, tuple(layers), lambda: lowered(short, ask, spread, heard))
        return predict(short, ask, machine, spread, heard, tasks)

    if (few := _short_plans(plan, _asked_neurons(plan, trace), staying(plan, ask))) is None:
        return of(())
    near, further = few
    return further_on(of(near), [(share, of(layers)) for share, layers in further], plan, ask)


def _asked_neurons(plan: Plan, trace: RouterTrace | None) -> list[float]:
    """Of each layer, how many neurons a token is expected to ask for; [] for a plan that asks for none."""
    asked = [0.0] * len(plan.target.spec.layers)
    for unit in plan.units:
        if unit.asked:
            layer, (lo, hi) = plan.parts[unit.part].layer, plan.unit_rows(unit)
            known = trace is not None and trace.fires
            asked[layer] += sum(memoryview(known[layer]).cast("f")[lo:hi]) if known else hi - lo
    return asked if any(asked) else []


def _kept(kept: Kept, key: tuple[int, ...], lower: Callable[[], Iterator[Lowered]]) -> Iterator[Lowered]:
    """The passes of a plan from the first on. They are kept for the next time."""
    tasks, kept[key] = tee(kept[key] if key in kept else lower())
    return tasks


def quick_s(plan: Plan, seconds: Callable[[Plan], float]) -> float:
    """The seconds of a plan, by a function that may be slow for a plan of many units: it is asked about short plans
    then. Its seconds are to be a line over layers that are alike."""
    if (few := _short_plans(plan)) is None:
        return seconds(plan)
    near, further = few
    near_s = seconds(shortened(plan, near))
    more_s = sum(share * (seconds(shortened(plan, layers)) - near_s) for share, layers in further)
    return max(near_s, near_s + more_s)


def short(plan: Plan) -> Plan:
    """A plan with few of the layers, whose passes compare as the plan's do. For a plan of few units it is the plan."""
    few = _short_plans(plan)
    return plan if few is None else shortened(plan, few[0])


def shortened(plan: Plan, layers: Sequence[int]) -> Plan:
    """The plan with no layers but these, which are numbered anew. `layers`: ascending."""
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
        kv=tuple(replace(home, layers=within(home.layers)) for home in plan.kv if len({*within(home.layers)}) > 1),
        acts=tuple(replace(home, layers=within(home.layers)) for home in plan.acts),
        predictors=tuple(replace(p, layer=number[str(p.layer)]) for p in plan.predictors if str(p.layer) in number),
        caches=tuple(replace(c, layer=number[str(c.layer)]) for c in plan.caches if str(c.layer) in number),
        levels=tuple(level for i, level in enumerate(plan.levels) if str(i) in number),
        device_rows=tuple(replace(t, layer=number[str(t.layer)]) for t in plan.device_rows if str(t.layer) in number),
    )


class _LayerRun(NamedTuple):
    """`layers` layers in a row. `near`, `far`: those of them that the shorter and the longer plan have. If `far` is
    empty, all short plans have all of them."""

    layers: int
    near: list[int]
    far: list[int]


def _short_plans(
    plan: Plan, asked: Sequence[float] = (), there: Collection[int] = ()
) -> tuple[list[int], list[tuple[float, list[int]]]] | None:
    """The layers of the shortest plan; (share, layers) of each longer one, whose difference to the shortest is added
    `share` times. None if the plan itself is to be simulated: it has few units, or no short plans tell its time.
    `asked`: of each layer, how many neurons a token asks for; () where that is not known. `there`: the units of
    `staying`."""
    chosen = _choose(plan, asked, there) if len(plan.units) > _FEW_UNITS else None
    if chosen is None:
        return None
    further = []
    for run in chosen:
        if run.far:
            layers = [i for other in chosen for i in (other.far if other is run else other.near)]
            further.append(((run.layers - len(run.near)) / (len(run.far) - len(run.near)), layers))
    return [i for run in chosen for i in run.near], further


def _choose(plan: Plan, asked: Sequence[float], there: Collection[int]) -> list[_LayerRun] | None:
    """The runs of layers and the layers of the short plans. None if the plan itself is to be simulated.

    Layers whose KV has one home are a run. For each run there is a short plan that has more of its layers. `asked`,
    `there`: as for `_short_plans`."""
    count = len(plan.target.spec.layers)
    if len({unit.home for unit in plan.units if is_disk(unit.home)}) > 1:
        return None  # short plans might miss the layers that lie on one of the disks
    if not _formats_alike(plan):
        return None  # layers differ in their bytes
    if (plan.predictors and plan.sparsity != "predict") or (not asked and any(unit.asked for unit in plan.units)):
        return None  # layers differ in how many of their neurons are active
    spans = sorted({home.layers for home in plan.kv})
    if any(act.layers != (0, count) for act in plan.acts):
        return None
    if any(lo < before for (_, before), (lo, _) in pairwise(spans)):
        return None
    kinds = list({replace(home, layers=(0, 0)): None for home in plan.kv})
    if len(spans) > _MOST_RUNS and len(kinds) > 2:
        return None
    decode_bytes, prompts = streamed(plan, without=there), streamed(plan, purpose="prefill")
    most = max(sum(decode_bytes.values()) - decode_bytes[-1], sum(prompts.values()) - prompts[-1])
    ring_layers = sum(plan.ring_bytes.values()) * count / max(1, most)
    least = 1 if len(plan.units) > _MANY_UNITS * count else 2
    if len(spans) > _MOST_RUNS:
        homes = sorted(plan.kv, key=lambda home: home.layers)
        second = [replace(home, layers=(0, 0)) == kinds[-1] for home in homes for _ in range(*home.layers)]
        if len(second) != count:
            return None  # sequences have homes of their own
        whole = _run(plan, range(count), decode_bytes, ring_layers, least, second, asked)
        return [whole] if whole.far else None
    runs = (run for span in spans for run in _split(plan, range(*span)))
    chosen = [_run(plan, run, decode_bytes, ring_layers, least, asked=asked) for run in runs]
    return chosen if any(run.far for run in chosen) else None


def _formats_alike(plan: Plan) -> bool:
    """Whether a matrix has the same format in every layer, as in gpt-oss, of which experts alone are in mxfp4."""
    if not isinstance(plan.target.weights, Mixed):
        return True
    formats: dict[tuple[str, str], set[Format]] = {}
    for part in plan.parts.values():
        for block in part.blocks if part.layer >= 0 else ():
            formats.setdefault((part.kind, block.name), set()).add(block.format)
    return all(len(each) == 1 for each in formats.values())


def _split(plan: Plan, run: range) -> list[range]:
    """Cuts a run in two if its first layers are of one kind and all others of another: dense layers before those with
    experts."""
    layers = plan.target.spec.layers
    first = next((i for i in run if layers[i] != layers[run.start]), run.stop)
    leads = first < run.stop and len(set(layers[first : run.stop])) == 1
    return [range(run.start, first), range(first, run.stop)] if leads else [run]


def _run(
    plan: Plan, run: range, layer_bytes: Mapping[int, int], ring_layers: float, least: int,
    second: Sequence[bool] = (), asked: Sequence[float] = (),
) -> _LayerRun:  # fmt: skip
    """The layers of a run that the short plans have. Layers differ by a granule that stays or streams. So layers are
    chosen for which the line through the short plans comes nearest to the bytes that the whole run streams.

    run             the layers of the run
    layer_bytes     layer → bytes that it streams in decode
    ring_layers     so many layers fill the ring once
    least           the least layers of a short plan
    second          whether a layer's KV is of the second of two kinds that alternate; () if all are of one kind. Then
                    chosen layers follow each other, and the line comes near to the layers of that kind too
    asked           of each layer of the plan, how many neurons a token asks for. The line comes near to these too
    """
    layers, whole = plan.target.spec.layers[run.start : run.stop], _LayerRun(len(run), list(run), [])
    period = next((p for p in range(1, _LONGEST_PERIOD + 1) if layers[p:] == layers[:-p]), None)
    if period is None:
        return whole
    rings = ring_layers / period
    few = max(least, ceil(_RINGS * rings), min(4, ceil(_MANY_RINGS * rings)), _ASKED_LAYERS if asked else 0)
    if 6 * few * period > len(run):
        return whole
    periods = range(0, len(run) - len(run) % period, period)
    # Of each layer: its bytes, whether it is in `second`, its neurons that are asked for
    counts: tuple[list[float], ...] = (
        [layer_bytes[i] for i in run],
        [*map(int, second)],
        [asked[i] for i in run if asked],
    )
    by_period = [[sum(count[first : first + period]) for first in periods] for count in counts if count]
    long, totals = len(run) / period, [max(1, sum(count)) for count in counts if count]

    def read(numbers: range) -> list[float]:
        """Each count of the periods of these numbers."""
        chosen = slice(numbers.start, numbers.stop, numbers.step)
        return [sum(count[chosen]) for count in by_period]

    def error(told: Iterable[float]) -> float:
        """How far the counts of the whole run are from what the short plans tell of each."""
        return sum([abs(count - total) / total for count, total in zip(told, totals, strict=True)])

    def of_length(least: int, most: int) -> Iterable[range]:
        """Numbers of periods to choose from. Layers are of a few kinds, so of thousands of choices few differ."""
        every: Iterable[range] = _progressions(len(periods), least)
        if second:
            every = (range(i, i + n) for n in range(least, most) for i in range(len(periods) - n + 1))
        unlike: dict[tuple[float, ...], range] = {}
        for numbers in every:
            unlike.setdefault((len(numbers), *read(numbers)), numbers)
        return unlike.values()

    def line(longer_by: int, counts: Iterable[float]) -> list[float]:
        """What short plans tell of the whole run's counts, if the longer one has so many periods, and these counts,
        more than the shorter."""
        share = (long - len(near)) / longer_by
        return [at_near + share * more for at_near, more in zip(near_counts, counts, strict=True)]

    near = min(of_length(few, 2 * few), key=lambda n: error([count / len(n) * long for count in read(n)]))
    near_counts = read(near)
    longer_by = max(len(near), _CACHED_LAYERS if plan.caches else _ASKED_LAYERS if asked else 0)
    if len(near) + longer_by > len(periods):
        return whole
    if asked:
        every = (n for n in _progressions(len(periods), longer_by) if not set(n).intersection(near))
        # The most spread ones come first, and any that is as close as this is as good.
        added = min(every, key=lambda n: round(error(line(len(n), read(n))) / _CLOSE), default=range(0))
        if not added:
            return whole
        far = sorted((*near, *added))
    else:
        some = of_length(len(near) + longer_by, 2 * len(near) + few)
        less = [-count for count in near_counts]
        longer_run = min(some, key=lambda n: error(line(len(n) - len(near), map(add, read(n), less))))
        far = list(longer_run)
    shorter, longer = ([run[i * period + j] for i in numbers for j in range(period)] for numbers in (near, far))
    return _LayerRun(len(run), shorter, longer)


def _progressions(count: int, wanted: int) -> Iterator[range]:
    """The arithmetic progressions of `wanted` numbers below `count`, the ones with the largest steps first."""
    for step in range((count - 1) // max(1, wanted - 1), 0, -1):
        for start in range(count - step * (wanted - 1)):
            yield range(start, start + step * wanted, step)


def staying(plan: Plan, ask: Ask) -> frozenset[int]:
    """The numbers of the units that stay in KV pages when a single sequence is half-way through its output. Of several
    sequences it is not known which pages they leave free."""
    if not plan.guests or (used := half_way(plan, ask).pages_used) is None:
        return frozenset()
    return frozenset(u for u, room in Layout(plan).guests.items() if room.first_page >= used)


def streamed(
    plan: Plan, from_disk: bool = False, purpose: str = "decode", without: Collection[int] = ()
) -> dict[int, int]:  # fmt: skip
    """Layer → bytes of weights that a pass streams. The key -1 is of parts outside the layers. `from_disk`: only bytes
    that come from disks. `purpose`: "decode" or "prefill". In decode, experts with a cache and units that are asked for
    are left out. `without`: numbers of units that are there already (`staying`)."""
    parts, gathered = plan.parts, gathered_key(plan.target.spec)
    cached = {f"{cache.layer}.experts" for cache in plan.caches}
    layer_bytes = dict.fromkeys(range(-1, len(plan.target.spec.layers)), 0)
    for u, unit in enumerate(plan.units):
        if u in without or (purpose == "decode" and (unit.asked or unit.part in cached)):
            continue  # answers decide what of caches is loaded
        away = is_disk(unit.home) if from_disk else unit.home != unit.executor(purpose)
        if away and unit.part != gathered:  # as `Layout.streams` has it
            part = parts[unit.part]
            layer_bytes[part.layer] += (unit.hi - unit.lo) * part.granule_bytes
    return layer_bytes


def kv_moved(plan: Plan, ask: Ask, from_disk: bool = False) -> int:
    """Bytes of KV that a decode pass half-way through the output brings to where attention runs. `from_disk`: only
    bytes that come from disks."""
    if not any(is_disk(home.home) if from_disk else home.home != home.attend for home in plan.kv):
        return 0
    return Layout(plan).kv.loaded_bytes(half_way(plan, ask).batches, from_disk)


def further_on(
    near: Prediction, further: Sequence[tuple[float, Prediction]], plan: Plan | None, ask: Ask
) -> Prediction:
    """The prediction of the whole plan, from that of the shortest plan (`near`) and those of longer ones. Seconds are a
    line over the layers of each run: to `near`'s seconds, the difference to each longer plan is added `share` times.
    Bytes are counted in the plan itself, but for bytes of neurons that are asked for: these are on the line too.

    further         (share, prediction) of each longer plan
    plan            the whole plan; None if nobody made it. Then all bytes are on the line
    """

    def line(of: Callable[[Prediction], float]) -> float:
        return max(of(near), of(near) + sum(share * (of(far) - of(near)) for share, far in further))

    def busy(of: Callable[[Prediction], dict[Lane, float]], wall_s: Callable[[Prediction], float]) -> dict[Lane, float]:
        """Lane → its share of the time, from lines over the lanes' seconds and over the time."""
        return {
            lane: min(1.0, line(lambda p, lane=lane: of(p).get(lane, 0.0) * wall_s(p)) / line(wall_s))  # type: ignore[misc]
            for lane in dict.fromkeys(lane for _, far in further for lane in of(far))
        }

    shares = busy(lambda p: p.lane_share, lambda p: 1 / p.decode_tokens_per_s)

    def of_experts(of: Callable[[ExpertUse], float]) -> float:
        return line(lambda p: of(p.experts) if p.experts is not None else 0.0)

    loaded_bytes = of_experts(lambda use: use.loaded_bytes)
    disk_bytes = line(lambda p: p.disk_bytes_per_token)
    if plan is not None and not any(unit.asked for unit in plan.units):
        there = staying(plan, ask)
        moved_bytes = sum(streamed(plan, True, without=there).values()) + kv_moved(plan, ask, from_disk=True)
        seqs = plan.at_once(ask.batch, ask.sequence_tokens)
        fetched = 0 if gathers(plan) else plan.parts["embed"].granule_bytes
        disk_bytes = moved_bytes / seqs + fetched + loaded_bytes
    tiers = dict.fromkeys(tier for _, far in further for tier in far.tier_bytes)
    use = None
    if near.experts is not None:
        use = ExpertUse(
            of_experts(lambda use: use.wanted), of_experts(lambda use: use.missed),
            None if near.experts.absent is None else of_experts(lambda use: use.absent or 0.0),
            of_experts(lambda use: use.guessed), of_experts(lambda use: use.wrong), loaded_bytes, near.experts.source,
            of_experts(lambda use: use.cold_s),
        )  # fmt: skip
    return Prediction(
        ttft_s=line(lambda p: p.ttft_s),
        decode_tokens_per_s=1 / line(lambda p: 1 / p.decode_tokens_per_s),
        total_s=line(lambda p: p.total_s),
        bound_by=max(shares, key=lambda lane: shares[lane]),
        lane_share=shares,
        ttft_lane_share=busy(lambda p: p.ttft_lane_share, lambda p: p.ttft_s),
        disk_bytes_per_token=disk_bytes,
        inter_token_s=Spread(
            line(lambda p: p.inter_token_s.p50), line(lambda p: p.inter_token_s.p95),
            line(lambda p: p.inter_token_s.most),
        ),
        tier_bytes=plan.tier_bytes()
        if plan is not None
        else {tier: round(line(lambda p, tier=tier: p.tier_bytes.get(tier, 0))) for tier in tiers},  # type: ignore[misc]
        experts=use,
    )  # fmt: skip
