"""Predicts a plan's speed on a machine, by simulating the passes that the engine will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.ops import Experts, Lift, Load, Route, Slot
from penstock.graph.tasks import Pass, Task, fetched_bytes, kv_loaded_bytes, streamed_bytes
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay, RouterTrace, stated
from penstock.planner.simulate import WARM_PASSES, Lowered, Simulator, lowered_pass
from penstock.planner.sizes import prompt_and_half_way
from penstock.spec import codec
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import HOST, Lane, Tier, is_device, tier_of
from penstock.spec.plan import Plan

_STEADY_PASSES = 2  # decode passes that are averaged after WARM_PASSES, because passes differ a little
# Of the prompts' passes the first 3 are simulated, which start cold, and 6 of the others. Attention takes evenly more
# from chunk to chunk, so a few tell the sum. With 16, planning a prompt of 131,072 tokens took half a minute.
_FIRST_PASSES, _SAMPLED_PASSES = 3, 6
# The spread between tokens is taken over up to 16 passes, while they have less than 2,000 tasks in all.
_MOST_PASSES, _MOST_TASKS = 16, 2000
# If passes depend on what routers say, 128 passes come before, to fill the caches, and 16 are averaged.
CACHE_PASSES, _ANSWERED_PASSES = 128, 16
# If they depend on which neurons fire, as many are averaged as draw for so many neurons. With 3 % of these firing, the
# number that fire is within 0.8 % of its mean then (one standard deviation), and more passes tell no more.
_DRAWN_NEURONS = 1 << 19
# The least seconds of a pass. A simulated clock that stands at hours cannot tell less.
_LEAST_S = 1e-12
COLD_PASSES = 16  # decode passes after a prompt, while caches are nearly empty. `ExpertUse.cold_s` is theirs


@dataclass(frozen=True)
class Spread:
    """Seconds between tokens: the median, the 95th percentile and the maximum over the simulated passes."""

    p50: float
    p95: float
    most: float


@dataclass(frozen=True)
class ExpertUse:
    """How well a plan's caches for experts do, as averages over decode passes, a sequence.

    wanted          experts that the layers with a cache want
    missed          wanted experts that were not in the cache when the pass began. If a layer has two caches, this is
                    about the device's
    absent          missed experts that were not in the cache in RAM either. None if no layer has two caches
    guessed         missed experts that a guess had loaded ahead
    wrong           experts that a guess had loaded and that nobody wanted
    loaded_bytes    bytes that were read from a disk for missed experts and for wrong guesses
    source          where the routers' answers come from that were taken
    cold_s          seconds of the first COLD_PASSES passes after the prompts; 0 if these were not simulated
    """

    wanted: float
    missed: float
    absent: float | None
    guessed: float
    wrong: float
    loaded_bytes: float
    source: str
    cold_s: float

    @property
    def hit_rate(self) -> float:
        """The share of the wanted experts that are in the cache."""
        return 1 - self.missed / self.wanted if self.wanted else 1.0

    @property
    def hit_rate_beneath(self) -> float | None:
        """The share of what a device's cache misses that is in the cache in RAM beneath; None without such a cache."""
        if self.absent is None:
            return None
        return 1 - self.absent / self.missed if self.missed else 1.0


@dataclass(frozen=True)
class Prediction:
    """What a plan will do.

    ttft_s          seconds until every sequence has its first token
    decode_tokens_per_s  of the whole batch, half-way through the output
    total_s         seconds of all answers
    bound_by        the lane that is busiest in decode
    lane_share      lane → the share of the time in which it is busy in decode
    ttft_lane_share  the same until the first tokens
    disk_bytes_per_token  bytes that a decode pass reads from disks, a sequence
    inter_token_s   seconds between tokens
    tier_bytes      memory tier → peak bytes
    experts         the use of caches; None for plans without any
    """

    ttft_s: float
    decode_tokens_per_s: float
    total_s: float
    bound_by: Lane
    lane_share: dict[Lane, float]
    ttft_lane_share: dict[Lane, float]
    disk_bytes_per_token: float
    inter_token_s: Spread
    tier_bytes: dict[Tier, int]
    experts: ExpertUse | None = None

    @property
    def peak_host_bytes(self) -> int:
        return self.tier_bytes[HOST]

    @property
    def peak_device_bytes(self) -> int:
        return sum(nbytes for tier, nbytes in self.tier_bytes.items() if is_device(tier))

    def to_json(self) -> dict[str, Any]:
        """The fields, and both peaks."""
        peaks = {"peak_host_bytes": self.peak_host_bytes, "peak_device_bytes": self.peak_device_bytes}
        fields: dict[str, Any] = codec.to_json(self)
        return fields | peaks

    @property
    def ttft_bound_by(self) -> Lane:
        """The lane that is busiest until the first tokens are there."""
        return max(self.ttft_lane_share, key=lambda lane: self.ttft_lane_share[lane])


def predict(
    plan: Plan, ask: Ask, machine: MachineSpec, spread: bool = True, trace: RouterTrace | None = None,
    steps: Iterator[Lowered] | None = None,
) -> Prediction:  # fmt: skip
    """The prediction of a plan: simulates the prompts and a few decode passes. `spread`: simulate more decode passes,
    for the spread between tokens. `trace`: what routers say; None: `routing.stated`. `steps`: those of `lowered`, if
    the plan was lowered already."""
    steps = lowered(plan, ask, spread, trace) if steps is None else steps
    simulator, pause_s = Simulator(Cost(machine)), Cost(machine).between_passes_s
    seqs, wanted, _ = _wanted(plan, ask)
    ttft_s, ttft_share = _reading(((next(steps), times) for _, times in wanted), simulator, pause_s)
    cold_s = 0.0
    if plan.caches and spread:
        start_s = simulator.now_s
        for _ in range(COLD_PASSES):
            simulator.busy_s(*next(steps))
            simulator.pause(pause_s)
        cold_s = simulator.now_s - start_s
    tasks_seen = 0
    busy: dict[Lane, float] = {}
    gaps: list[float] = []
    most_passes = _MOST_PASSES if spread else 0
    least = WARM_PASSES + _averaged(plan, trace)
    streamed, use = 0.0, _Use(plan)
    while len(gaps) < least or (tasks_seen < _MOST_TASKS and len(gaps) < most_passes):
        if len(gaps) == WARM_PASSES:
            busy = {}
        start_s = simulator.now_s
        step, one_piece = next(steps)
        for lane, seconds in simulator.busy_s(step, one_piece).items():
            busy[lane] = busy.get(lane, 0.0) + seconds
        simulator.pause(pause_s)
        gaps.append(max(_LEAST_S, simulator.now_s - start_s))
        tasks_seen += len(step)
        if len(gaps) > WARM_PASSES:
            streamed += sum(streamed_bytes(t, plan.units) + fetched_bytes(t) + kv_loaded_bytes(t) for t in step)
            use.count(step)
    steady = gaps[WARM_PASSES:]
    streamed = streamed / len(steady)
    step_s = sum(steady) / len(steady)
    return Prediction(
        ttft_s=ttft_s,
        decode_tokens_per_s=len(seqs) / step_s,
        total_s=ttft_s + step_s * ask.output_tokens,
        bound_by=max(busy, key=lambda lane: busy[lane]),
        # Tasks that ended in the pause before the first pass count too, and may have begun before that: so at most 1.
        lane_share={lane: min(1.0, seconds / sum(steady)) for lane, seconds in busy.items()},
        ttft_lane_share=ttft_share,
        disk_bytes_per_token=streamed / len(seqs),
        inter_token_s=_spread(steady),
        tier_bytes=plan.tier_bytes(),
        experts=use.per_token(len(steady) * len(seqs), (trace or stated(plan.target.spec)).source, cold_s)
        if plan.caches
        else None,
    )


def _averaged(plan: Plan, trace: RouterTrace | None) -> int:
    """How many decode passes are averaged at least. Where answers are recorded ones, as many as for routers."""
    if not plan.asks:
        return _STEADY_PASSES
    if plan.caches or (trace is not None and trace.live):
        return _ANSWERED_PASSES
    neurons = sum(hi - lo for lo, hi in (plan.unit_rows(unit) for unit in plan.units if unit.asked))
    return min(_ANSWERED_PASSES, max(2 * _STEADY_PASSES, -(-_DRAWN_NEURONS // max(1, neurons))))


def with_prompts(
    prediction: Prediction, wanted: Sequence[Pass], plan: Plan, machine: MachineSpec, trace: RouterTrace | None = None
) -> Prediction:
    """The same prediction, but for prompts that are read in the passes `wanted`. `trace`: as for `predict`."""
    simulator, pause_s = Simulator(Cost(machine)), Cost(machine).between_passes_s
    lowering, replay = Lowering(plan), Replay(plan, trace)
    read = ((lowered_pass(lowering, p, replay.answer), times) for p, times in _sampled(wanted))
    ttft_s, share = _reading(read, simulator, pause_s)
    total_s = prediction.total_s - prediction.ttft_s + ttft_s
    return replace(prediction, ttft_s=ttft_s, ttft_lane_share=share, total_s=total_s)


def lowered(plan: Plan, ask: Ask, spread: bool = True, trace: RouterTrace | None = None) -> Iterator[Lowered]:
    """The passes that `predict` simulates, with their tasks: those that read the prompts, then decode passes without
    end. They are the same for every machine. `spread`, `trace`: as for `predict`."""
    lowering, replay = Lowering(plan), Replay(plan, trace)
    _, wanted, step = _wanted(plan, ask)
    for p, _ in wanted:
        yield lowered_pass(lowering, p, replay.answer)
    cold = COLD_PASSES if plan.caches else 0
    for _ in range(cold if spread else 0):
        yield lowered_pass(lowering, step, replay.answer)
    # With the spread or without, the passes that count have the same answers: others differ by up to 9 %.
    replay.warm(lowering, step, CACHE_PASSES + (0 if spread else cold))
    while True:
        yield lowered_pass(lowering, step, replay.answer)


def reads_short(plan: Plan, ask: Ask) -> bool:
    """Whether a pass that reads prompts of the ask has fewer rows than the plan's break-even length."""
    return any(p.purpose != "prefill" for p, _ in _wanted(plan, ask)[1])


def half_way(plan: Plan, ask: Ask) -> Pass:
    """A decode pass of all sequences that the plan takes at once, half-way through the output."""
    return _wanted(plan, ask)[2]


def _wanted(plan: Plan, ask: Ask) -> tuple[tuple[int, ...], list[tuple[Pass, int]], Pass]:
    """(sequences, passes that read the prompts with how many each stands for, a decode pass half-way through the
    output)."""
    seqs = tuple(range(plan.at_once(ask.batch, ask.sequence_tokens)))
    prompts, step = answer_passes(plan, ask, seqs)
    return seqs, list(_sampled(prompts)), step


def answer_passes(plan: Plan, ask: Ask, seqs: Sequence[int]) -> tuple[list[Pass], Pass]:
    """(the passes that read the prompts of some sequences, a decode pass of these half-way through their output)."""
    prompt, position = prompt_and_half_way(ask, plan.context)
    prompts = passes.prompts(plan, seqs, (prompt,) * len(seqs), passes.DECODE)
    return list(prompts), passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)


def _reading(
    read: Iterable[tuple[Lowered, int]], simulator: Simulator, pause_s: float
) -> tuple[float, dict[Lane, float]]:
    """(seconds of the passes that read the prompts, lane → the share of them in which it is busy). `read`: each pass,
    and how many passes it stands for."""
    ttft_s, busy = 0.0, dict[Lane, float]()
    for step, times in read:
        start_s = simulator.now_s
        for lane, seconds in simulator.busy_s(*step).items():
            busy[lane] = busy.get(lane, 0.0) + times * seconds
        simulator.pause(pause_s)
        ttft_s += times * max(_LEAST_S, simulator.now_s - start_s)
    return ttft_s, {lane: min(1.0, seconds / ttft_s) for lane, seconds in busy.items()}


class _Use:
    """Counts the experts that passes want from caches, and those that are missing there."""

    def __init__(self, plan: Plan) -> None:
        self._cached = {cache.layer for cache in plan.caches}
        self._on_device = {cache.layer for cache in plan.caches if is_device(cache.executor)}
        self._in_ram = {cache.layer for cache in plan.caches if not is_device(cache.executor)}
        self._wanted = self._missed = self._absent = self._guessed = self._wrong = self._loaded_bytes = 0
        self._parts, self._units = plan.parts, plan.units

    def count(self, tasks: list[Task]) -> None:
        """Counts the tasks of a pass."""
        guesses: set[Slot] = set()  # answers of routers that are guesses
        ahead: set[Slot] = set()  # slots of caches that a guess has filled, and whose experts nobody has wanted yet
        lifted: set[Slot] = set()  # slots of a device's caches that this pass has filled, and that nobody has read yet
        for call in (call for task in tasks for call in task.calls) if self._cached else ():
            operands = call.operands
            if isinstance(operands, Route) and operands.guesses:
                guesses.add(operands.routes)
            elif isinstance(operands, Load) and operands.target.arena.endswith(".cache"):
                self._loaded_bytes += call.bytes
                self._wrong += operands.target in ahead  # that leaves for this one
                ahead.discard(operands.target)
                if guesses.intersection(operands.asked):
                    ahead.add(operands.target)
                elif self._parts[self._units[call.unit].part].layer in self._on_device:
                    self._absent += 1
                else:
                    self._missed += 1
            elif isinstance(operands, Lift) and operands.target.arena.endswith(".cache"):
                lifted.add(operands.target)
            elif isinstance(operands, Experts) and operands.outputs:
                self._wanted += len(operands.first_experts)
                right = ahead.intersection(operands.weights)
                self._guessed, self._missed = self._guessed + len(right), self._missed + len(right)
                ahead -= right
                # What a device's cache misses is lifted, or the CPU computes it and it is lifted for later passes.
                by_cpu = operands.layer in self._on_device and tier_of(operands.outputs[0].arena) == HOST
                self._missed += len(operands.weights) if by_cpu else len(lifted.intersection(operands.weights))
                lifted.difference_update(operands.weights)
        self._wrong += len(ahead)

    def per_token(self, tokens: int, source: str, cold_s: float) -> ExpertUse:
        counts = (self._wanted, self._missed, self._absent, self._guessed, self._wrong, self._loaded_bytes)
        wanted, missed, absent, guessed, wrong, loaded_bytes = (count / tokens for count in counts)
        both = bool(self._on_device & self._in_ram)
        return ExpertUse(wanted, missed, absent if both else None, guessed, wrong, loaded_bytes, source, cold_s)


def _sampled(wanted: Sequence[Pass]) -> Iterator[tuple[Pass, int]]:
    """(pass to simulate, how many passes it stands for). If a prompt is read in hundreds of chunks, the passes in its
    middle differ only in what they attend to, so evenly spread ones tell the sum."""
    inner = range(_FIRST_PASSES, len(wanted) - 1)
    step = max(1, -(-len(inner) // _SAMPLED_PASSES))
    yield from ((p, 1) for p in wanted[:_FIRST_PASSES])
    sampled: list[tuple[Pass, int]] = []
    for lo in range(inner.start, inner.stop, step):
        hi = min(lo + step, inner.stop)
        p, times = wanted[(lo + hi) // 2], hi - lo
        if len(sampled) > 1 and _spans(p) == _spans(sampled[-1][0]) == _spans(sampled[-2][0]):
            # These passes read whole prompts of one length, so two of them stand for all.
            p, times = sampled[-1][0], times + sampled.pop()[1]
        sampled.append((p, times))
    yield from sampled
    yield from ((p, 1) for p in wanted[max(_FIRST_PASSES, len(wanted) - 1) :])


def _spans(p: Pass) -> list[Counter[tuple[int, int]]]:
    """The spans that attention works on, batch by batch."""
    return [batch.spans for batch in p.batches]


def _spread(gaps: list[float]) -> Spread:
    ordered = sorted(gaps)
    return Spread(ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)], ordered[-1])
