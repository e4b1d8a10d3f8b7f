"""FlexGen's linear program: shares of weights, KV and activations in three tiers (slides, "Cost Model, Policy Search").

With the block decided (a batch on the device, batches a block) what is left is linear:

    minimise    T / block,   T = T_pre · l + T_gen · (n − 1) · l
    T_pre  ≥    each of five lanes: disk → host, host → disk, host → device, device → host, compute; T_gen likewise
    peak bytes of each tier  ≤  what it has
    shares of weights, of KV, of activations: each three sum to one

The slides give this much; the terms of lanes and tiers are ours (`terms`). Here they are only lines over the nine
shares. Compute is one lane, device and CPU added up: inside a layer one waits for the other. Beside the five lanes a
program may have a sixth line, `window`: what our runtime's two windows for KV that moves allow.

Two things are not linear: lanes slow each other, and wait for each other where layers differ in who attends, since only
so much runs ahead. Both are worked out for one solution, and the program is solved again with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.planner.solve import highs
from penstock.spec.machine import Sharing
from penstock.spec.places import CPU, DISK, GPU

TIERS = ("device", "ram", "disk")
KINDS = ("weights", "kv", "acts")
READ, WRITE, TO_DEVICE, TO_HOST, COMPUTE = LANES = (
    DISK.reads, DISK.writes, GPU.to_device, GPU.to_host, "compute",
)  # fmt: skip
WINDOW = "window"  # a sixth bound: see `terms`
LOADED, HELD, SAVED = "loaded", "held", "saved"  # what a window's turn is made of; bounds too, but never the greatest
EXECUTORS = (GPU.kernels, CPU)  # whose seconds make up `compute`
_ROUNDS = 3  # after which busy shares move by less than a hundredth
_WAITING = ", waiting"  # a lane with what it waits beside its work
_LEAST_SHARE = 1e-6  # what HiGHS leaves of a zero

Shares = tuple[float, float, float]
_NOTHING: Shares = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """Where the bytes live: for each kind (device, host, disk), which sum to one."""

    weights: Shares
    kv: Shares
    acts: Shares

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.weights, *self.kv, *self.acts)


@dataclass(frozen=True, slots=True)
class Line:
    """constant + Σ coefficient · share: seconds of a lane, or bytes of a tier."""

    constant: float = 0.0
    weights: Shares = _NOTHING
    kv: Shares = _NOTHING
    acts: Shares = _NOTHING

    def at(self, policy: Policy) -> float:
        return self.constant + sum(a * b for a, b in zip(self.vector, policy.vector, strict=True))

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.weights, *self.kv, *self.acts)

    def __add__(self, other: Line) -> Line:
        both = [a + b for a, b in zip(self.vector, other.vector, strict=True)]
        return Line(self.constant + other.constant, _three(both), _three(both[3:]), _three(both[6:]))

    def times(self, factor: float) -> Line:
        scaled = [x * factor for x in self.vector]
        return Line(self.constant * factor, _three(scaled), _three(scaled[3:]), _three(scaled[6:]))


def _three(numbers: Sequence[float]) -> Shares:
    return numbers[0], numbers[1], numbers[2]


Stage = Mapping[str, Line]  # seconds a layer, by lane; of compute by executor


@dataclass(frozen=True, slots=True)
class Program:
    """`prefill`, `decode`: seconds of one layer, averaged over the layers and (decode) over the tokens. `steps`: n − 1.
    `memory`: bytes of each tier, `capacity`: what it has. `allowed`: the tiers that a kind may be in. `ring_layers`: so
    many layers' weights come ahead (0: waiting is not counted). `moved_tier`: whose KV comes through windows, for
    `batches` of a pass. `ends_s`: of a layer's computing in prefill and decode, its part of what is in no layer."""

    layers: int
    steps: int
    block: int
    prefill: Stage
    decode: Stage
    memory: Mapping[str, Line]
    capacity: Mapping[str, float]
    allowed: Mapping[str, tuple[bool, bool, bool]]
    sharing: tuple[Sharing, ...] = ()
    ring_layers: float = 0.0
    moved_tier: int = 2
    batches: int = 1
    ends_s: tuple[float, float] = (0.0, 0.0)

    @property
    def rounds(self) -> int:
        """How often it is solved again."""
        return _ROUNDS if self.sharing or self.ring_layers else 0

    def seconds(self, policy: Policy) -> float:
        """T of a block, sharing and waiting left out."""
        t_pre, t_gen = (max(lanes(stage, policy).values()) for stage in (self.prefill, self.decode))
        return t_pre * self.layers + t_gen * self.steps * self.layers

    def fits(self, policy: Policy, tolerance: float = 0.0) -> bool:
        inside = all(self.memory[t].at(policy) <= self.capacity[t] * (1 + tolerance) + tolerance for t in self.memory)
        shares = zip(policy.vector, (free for kind in KINDS for free in self.allowed[kind]), strict=True)
        return inside and all(share <= tolerance or free for share, free in shares)

    @property
    def least_s(self) -> float:
        """A bound of T from below: what every policy pays on each lane."""
        t_pre, t_gen = (max(sum(_least(line, self) for line in lane) for lane in _by_lane(stage).values())
                        for stage in (self.prefill, self.decode))  # fmt: skip
        return t_pre * self.layers + t_gen * self.steps * self.layers


@dataclass(frozen=True, slots=True)
class Solution:
    """`seconds`: T of the block. `t_pre_s`, `t_gen_s`: of a layer. `busiest`: the lanes that decide them."""

    policy: Policy
    seconds: float
    t_pre_s: float
    t_gen_s: float
    busiest: tuple[str, str]


def lanes(stage: Stage, policy: Policy) -> dict[str, float]:
    """Seconds of each of the five lanes, a layer."""
    return {lane: sum(line.at(policy) for line in found) for lane, found in _by_lane(stage).items()}


def solve(program: Program, kv: Shares | None = None, below_s: float = inf) -> Solution | None:
    """The optimum (with `kv`, the one that has KV so), or None where nothing fits or takes less than `below_s`. Lanes
    that slow each other are slowed by how much of the time the other one is busy in the solution before, and wait as
    they do there, some rounds long."""
    slowed, found = program, None
    for _ in range(1 + program.rounds):
        policy = _optimum(slowed, kv)
        if policy is None:
            return found
        found = evaluate(slowed, policy)
        if slowed is program and found.seconds >= below_s:
            return None  # without slowing and waiting: with them it only takes longer
        slowed = _slowed(program, slowed, policy)
    return found


def evaluate(program: Program, policy: Policy) -> Solution:
    """T of a policy, and what decides it."""
    pre, gen = lanes(program.prefill, policy), lanes(program.decode, policy)
    busiest = max(pre, key=lambda lane: pre[lane]), max(gen, key=lambda lane: gen[lane])
    names = busiest[0].removesuffix(_WAITING), busiest[1].removesuffix(_WAITING)
    return Solution(policy, program.seconds(policy), pre[busiest[0]], gen[busiest[1]], names)


def settled(program: Program, policy: Policy) -> Solution:
    """T of a policy, with lanes that slow each other and wait for each other."""
    slowed = program
    for _ in range(program.rounds):
        slowed = _slowed(program, slowed, policy)
    return evaluate(slowed, policy)


def _slowed(program: Program, before: Program, policy: Policy) -> Program:
    stages = [_slowed_stage(getattr(program, s), getattr(before, s), policy, program.sharing) for s in _STAGES]
    prefill, decode = (_waiting(s, policy, program, e) for s, e in zip(stages, program.ends_s, strict=True))
    return replace(program, prefill=prefill, decode=decode)


_STAGES = ("prefill", "decode")


def _slowed_stage(stage: Stage, before: Stage, policy: Policy, sharing: Sequence[Sharing]) -> Stage:
    whole = max(lanes(before, policy).values())
    factors = dict.fromkeys(stage, 1.0)
    for pair in sharing:
        if pair.lane in stage and pair.beside in stage and whole > 0:
            # Executors take turns; what goes on beside them is spread over the whole time.
            turns = pair.lane in EXECUTORS and pair.beside in EXECUTORS
            busy = 0.0 if turns else min(1.0, before[pair.beside].at(policy) / whole)
            factors[pair.lane] *= 1 + (pair.factor - 1) * busy
    return {lane: line.times(factors[lane]) for lane, line in stage.items()}


def _waiting(stage: Stage, policy: Policy, program: Program, ends_s: float) -> Stage:
    """With what a lane that brings weights waits while a layer computes for longer than a ring full of them takes, and
    what windows wait where layers whose KV moves follow each other."""
    if not program.ring_layers:
        return stage
    found, tier = dict(stage), program.moved_tier
    computing_s = [
        sum(stage[name].at(replace(policy, kv=_ALONE[t])) for name in EXECUTORS if name in stage) for t in range(3)
    ]
    for lane in (TO_DEVICE, READ):
        line = stage.get(lane, Line())
        if any(a * b > 0 for a, b in zip(line.weights, policy.weights, strict=True)):
            ahead_s = program.ring_layers * line.at(policy)
            waits_s = sum(
                share * max(0.0, seconds - ahead_s) for share, seconds in zip(policy.kv, computing_s, strict=True)
            )
            found[lane + _WAITING] = line + Line(waits_s)  # of its own: who waits slows nobody
    window = stage.get(WINDOW, Line())
    if policy.kv[tier] > 0 and window.kv[tier] > 0:
        in_layer_s = [max(0.0, seconds - ends_s) for seconds in computing_s]
        layer_s = ends_s + _through_windows(stage, in_layer_s, policy.kv, program)
        found[WINDOW + _WAITING] = window + Line(max(0.0, layer_s - window.at(policy)))
    return found


_ALONE: tuple[Shares, Shares, Shares] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _through_windows(stage: Stage, computing_s: Sequence[float], kv: Shares, program: Program) -> float:
    """Seconds of a layer where those whose KV moves are spread evenly. Two windows: what a batch's KV of such a layer
    takes is free again when that of the last but one was saved, and the lane brings one after the other."""
    tier, batches = program.moved_tier, program.batches
    share, nothing = kv[tier], Line()
    load_s, held_s, save_s = (stage.get(name, nothing).kv[tier] / batches for name in (LOADED, HELD, SAVED))
    others_s = sum(kv[t] * computing_s[t] for t in range(3) if t != tier) / max(1 - share, _LEAST_SHARE)
    first_s = load_s / program.layers  # is in the computing already, for a share of one
    after_s = max(0.0, computing_s[tier] - first_s - batches * held_s)
    now_s = loaded_s = saved_s = 0.0
    free_s = [[0.0] * batches, [0.0] * batches]
    for i in range(program.layers):
        if round((i + 1) * share - _LEAST_SHARE) == round(i * share - _LEAST_SHARE):
            now_s += others_s
            continue
        window = free_s.pop(0)
        for batch in range(batches):
            loaded_s = max(loaded_s, window[batch]) + load_s
            now_s = max(now_s, loaded_s) + held_s
            saved_s = window[batch] = max(saved_s, now_s) + save_s
        free_s.append(window)
        now_s += after_s
    return now_s / program.layers


def _by_lane(stage: Stage) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {lane: [] for lane in LANES}
    for name, line in stage.items():
        found.setdefault(COMPUTE if name in EXECUTORS else name, []).append(line)
    return found


def _least(line: Line, program: Program) -> float:
    total = line.constant
    for kind in KINDS:
        coefficients = zip(getattr(line, kind), program.allowed[kind], strict=True)
        total += min(coefficient for coefficient, free in coefficients if free)
    return total


def _optimum(program: Program, kv: Shares | None) -> Policy | None:
    """By HiGHS. Columns: nine shares, T_pre, T_gen in units of the bound; rows: lanes, tiers, sums. Everything is
    scaled to about one, since its tolerances are absolute."""
    scale, every = max(program.least_s, 1e-12), range(11)
    rows = []
    for stage, seconds in ((program.prefill, (-1.0, 0.0)), (program.decode, (0.0, -1.0))):
        for found in _by_lane(stage).values():
            line = sum(found, Line())
            rows.append(highs.Row(-inf, -line.constant / scale, every, [*(x / scale for x in line.vector), *seconds]))
    for tier, line in program.memory.items():
        unit = max(program.capacity[tier], 1.0)
        values = [x / unit for x in line.vector]
        rows.append(highs.Row(-inf, (program.capacity[tier] - line.constant) / unit, every, [*values, 0.0, 0.0]))
    for kind in range(3):
        rows.append(highs.Row(1.0, 1.0, range(3 * kind, 3 * kind + 3), (1.0, 1.0, 1.0)))
    lower, upper = [0.0] * 9, [float(may) for kind in KINDS for may in program.allowed[kind]]
    if kv is not None:
        lower[3:6] = upper[3:6] = kv
    costs = [0.0] * 9 + [program.layers, program.layers * program.steps]
    shares = highs.solve(costs, [*lower, 0.0, 0.0], [*upper, inf, inf], rows).values
    return None if shares is None else Policy(*(_cleaned(shares[i : i + 3]) for i in (0, 3, 6)))


def _cleaned(values: Sequence[float]) -> Shares:
    """Shares that sum to one, without what a simplex leaves of zeros."""
    kept = [value if value > _LEAST_SHARE else 0.0 for value in values]
    return _three([value / sum(kept) for value in kept])
