"""What a plan will do on a machine: simulate the passes that the engine will run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.ops import Experts, Lift, Load
from penstock.graph.tasks import Pass, Task, fetched_bytes, kv_loaded_bytes, streamed_bytes
from penstock.planner.cost import Cost
from penstock.planner.routing import Replay, Trace, stated
from penstock.planner.simulate import Simulator
from penstock.spec.ask import Ask
from penstock.spec.machine import MachineSpec
from penstock.spec.places import HOST, Lane, Tier, is_device
from penstock.spec.plan import Plan

# The first decode passes still profit from loads that ran ahead during prefill, and prepare calls that later ones
# repeat; and passes differ a little, since units do not fill a ring evenly.
_WARM_PASSES, _STEADY_PASSES = 2, 2
# Of prompts: the first ones start cold; of the others so many are simulated. What attention takes grows evenly from
# chunk to chunk, so a few tell the sum; 16 made planning a prompt of 131,072 tokens take half a minute.
_FIRST_PASSES, _SAMPLED_PASSES = 3, 6
# The spread between tokens is taken over more of them where a pass has few tasks.
_MOST_PASSES, _MOST_TASKS = 16, 2000
# Where passes depend on what routers say: so many come before, to fill the caches, and are averaged.
CACHE_PASSES, _ANSWERED_PASSES = 128, 16
# No pass is taken to be shorter, in seconds: a simulated clock that stands at hours does not see less.
_LEAST_S = 1e-12
COLD_PASSES = 16  # the first ones after a prompt, which are told apart: their caches are empty or nearly so


@dataclass(frozen=True)
class Spread:
    """Seconds between tokens: the median, the 95th percentile and the most of the simulated passes."""

    p50: float
    p95: float
    most: float


@dataclass(frozen=True)
class ExpertUse:
    """Of a decode pass, per sequence, on average: experts that layers with a cache want, those that are missing, and
    their bytes. `source`: what routers were taken to say. `cold_s`: of the first COLD_PASSES passes after the prompts;
    0 where they were not simulated."""

    wanted: float
    missed: float
    missed_bytes: float
    source: str
    cold_s: float

    @property
    def hit_rate(self) -> float:
        return 1 - self.missed / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class Prediction:
    """`ttft_s`: until every sequence has its first token. `decode_tokens_per_s` is of the whole batch, at the context
    half-way through the output. `bound_by`: the lane that is busiest while decoding. `lane_share`: how busy lanes are
    while decoding, `ttft_lane_share` before. `disk_bytes_per_token`: read per decode pass, per sequence. `tier_bytes`:
    the peak per memory tier. `experts`: of plans with caches, how these fare."""

    ttft_s: float
    decode_tokens_per_s: float
    total_s: float
    bound_by: Lane
    lane_share: dict[Lane, float]
    ttft_lane_share: dict[Lane, float]
    disk_bytes_per_token: float
    peak_host_bytes: int
    peak_device_bytes: int
    inter_token_s: Spread
    tier_bytes: dict[Tier, int]
    experts: ExpertUse | None = None

    @property
    def ttft_bound_by(self) -> Lane:
        """The lane that is busiest until the first tokens."""
        return max(self.ttft_lane_share, key=lambda lane: self.ttft_lane_share[lane])


def predict(plan: Plan, ask: Ask, machine: MachineSpec, spread: bool = True, trace: Trace | None = None) -> Prediction:
    """Lowers and simulates the prompts and a few decode passes; without `spread`, as few as speed needs. `trace`: what
    routers say; None: what is stated of them."""
    lowering, simulator, replay = Lowering(plan), Simulator(Cost(machine)), Replay(plan, trace)
    spec = plan.target.spec
    seqs = tuple(range(min(ask.batch, plan.batch_seqs * plan.batches_per_pass)))
    prompt = max(1, min(ask.prompt_tokens, plan.context - 1))
    pause_s = Cost(machine).between_passes_s
    ttft_s = 0.0
    ttft_busy: dict[Lane, float] = {}
    for p, times in _sampled(list(passes.prompts(plan, seqs, (prompt,) * len(seqs), passes.DECODE))):
        start_s = simulator.now_s
        for lane, seconds in simulator.busy_s(lowering.step(p, replay.answer)).items():
            ttft_busy[lane] = ttft_busy.get(lane, 0.0) + times * seconds
        simulator.pause(pause_s)
        ttft_s += times * max(_LEAST_S, simulator.now_s - start_s)
    position = min(prompt + ask.output_tokens // 2, plan.context - 1)
    tasks_seen, tasks = 0, list[Task]()
    busy: dict[Lane, float] = {}
    gaps: list[float] = []
    most_passes = _MOST_PASSES if spread else 0
    step = passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)
    cold_s = 0.0
    if plan.caches and spread:
        start_s = simulator.now_s
        for _ in range(COLD_PASSES):
            simulator.busy_s(lowering.step(step, replay.answer))
            simulator.pause(pause_s)
        cold_s = simulator.now_s - start_s
    replay.warm(lowering, step, CACHE_PASSES)
    decoding = _repeated(lowering, step, replay)
    least = _WARM_PASSES + (_ANSWERED_PASSES if plan.caches else _STEADY_PASSES)
    streamed, use = 0.0, _Use(plan)
    while len(gaps) < least or (tasks_seen < _MOST_TASKS and len(gaps) < most_passes):
        if len(gaps) == _WARM_PASSES:
            busy, streamed, use = {}, 0.0, _Use(plan)
        start_s = simulator.now_s
        tasks = next(decoding)
        for lane, seconds in simulator.busy_s(tasks).items():
            busy[lane] = busy.get(lane, 0.0) + seconds
        simulator.pause(pause_s)
        gaps.append(max(_LEAST_S, simulator.now_s - start_s))
        tasks_seen += len(tasks)
        streamed += sum(streamed_bytes(t, plan.units) + fetched_bytes(t) + kv_loaded_bytes(t) for t in tasks)
        use.count(tasks)
    steady = gaps[_WARM_PASSES:]
    streamed = streamed / len(steady)
    step_s = sum(steady) / len(steady)
    tier_bytes = plan.tier_bytes()
    return Prediction(
        ttft_s=ttft_s,
        decode_tokens_per_s=len(seqs) / step_s,
        total_s=ttft_s + step_s * ask.output_tokens,
        bound_by=max(busy, key=lambda lane: busy[lane]),
        # What ended in the pause before counts too, and may have begun earlier.
        lane_share={lane: min(1.0, seconds / sum(steady)) for lane, seconds in busy.items()},
        ttft_lane_share={lane: min(1.0, seconds / ttft_s) for lane, seconds in ttft_busy.items()},
        disk_bytes_per_token=streamed / len(seqs),
        peak_host_bytes=tier_bytes[HOST],
        peak_device_bytes=sum(n for tier, n in tier_bytes.items() if is_device(tier)),
        inter_token_s=_spread(steady),
        tier_bytes=tier_bytes,
        experts=use.per_token(len(steady) * len(seqs), (trace or stated(spec)).source, cold_s) if plan.caches else None,
    )


class _Use:
    """Counts what passes want of caches, and what they find missing."""

    def __init__(self, plan: Plan) -> None:
        self._cached = {cache.layer for cache in plan.caches}
        self._wanted = self._missed = self._missed_bytes = 0

    def count(self, tasks: list[Task]) -> None:
        for call in (call for task in tasks for call in task.calls) if self._cached else ():
            operands = call.operands
            if isinstance(operands, Load) and operands.target.arena.endswith(".cache"):
                self._missed, self._missed_bytes = self._missed + 1, self._missed_bytes + call.bytes
            elif isinstance(operands, Lift) and operands.target.arena.endswith(".cache"):
                self._missed += 1  # of bytes from a disk there are none
            elif isinstance(operands, Experts) and operands.outputs:
                self._wanted += len(operands.first_experts)

    def per_token(self, tokens: int, source: str, cold_s: float) -> ExpertUse:
        counts = (self._wanted / tokens, self._missed / tokens, self._missed_bytes / tokens)
        return ExpertUse(*counts, source, cold_s)


def _repeated(lowering: Lowering, p: Pass, replay: Replay) -> Iterator[list[Task]]:
    """The tasks of this pass, again and again. What streams comes round after a few passes: where the rings hold the
    same before two passes running as they did before two others, what follows is known."""
    held: list[tuple[object, ...] | None] = []
    found: list[list[Task]] = []
    while True:
        held.append(lowering.held)
        first = next((i for i in range(1, len(found)) if held[i] == held[-1] and _alike(found[i - 1], found[-1])), None)
        if first is not None and held[-1] is not None:
            break
        found.append(list(lowering.step(p, replay.answer)))
        yield found[-1]
    cycle = found[first:]
    ids = sum(map(len, cycle))
    for shift in count(ids, ids):
        for tasks in cycle:
            yield [t._replace(id=t.id + shift, after=tuple([other + shift for other in t.after])) for t in tasks]


def _alike(tasks: list[Task], others: list[Task]) -> bool:
    """Whether two passes are the same but for ids. Their edges too: an edge that an earlier one implies is left out, so
    the first passes may lack some that the later ones have."""
    first, other = tasks[0].id, others[0].id
    return [(t.writes, [i - first for i in t.after]) for t in tasks] == [
        (t.writes, [i - other for i in t.after]) for t in others
    ]


def _sampled(wanted: list[Pass]) -> Iterator[tuple[Pass, int]]:
    """Passes to simulate, and how many each stands for. Where a prompt is read in hundreds of chunks, those in its
    middle differ by what they attend to alone, so evenly spread ones tell the sum."""
    inner = range(_FIRST_PASSES, len(wanted) - 1)
    step = max(1, -(-len(inner) // _SAMPLED_PASSES))
    yield from ((p, 1) for p in wanted[:_FIRST_PASSES])
    found: list[tuple[Pass, int]] = []
    for lo in range(inner.start, inner.stop, step):
        hi = min(lo + step, inner.stop)
        p, times = wanted[(lo + hi) // 2], hi - lo
        if len(found) > 1 and _spans(p) == _spans(found[-1][0]) == _spans(found[-2][0]):
            # Whole prompts, of one length: two of these passes stand for all.
            p, times = found[-1][0], times + found.pop()[1]
        found.append((p, times))
    yield from found
    yield from ((p, 1) for p in wanted[max(_FIRST_PASSES, len(wanted) - 1) :])


def _spans(p: Pass) -> list[Counter[tuple[int, int]]]:
    """What each batch's attention works on."""
    return [batch.spans for batch in p.batches]


def _spread(gaps: list[float]) -> Spread:
    ordered = sorted(gaps)
    return Spread(ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)], ordered[-1])
