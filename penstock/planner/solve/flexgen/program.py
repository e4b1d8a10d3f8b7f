"""FlexGen's linear program, which places weights, KV and activations in three tiers (slides, "Cost Model, Policy
Search").

The size of a block is given. The unknowns are nine shares: of each kind (weights, KV, activations) the shares in device
memory, in RAM and on the disk.

    minimise    T / block,   T = T_pre · l + T_gen · (n − 1) · l
    T_pre  ≥    seconds of each of five lanes, a layer: disk → host, host → disk, host → device, device → host, compute
    T_gen  ≥    the same in decode
    bytes of each tier ≤ its capacity
    the three shares of each kind sum to one

l is the number of layers, n of output tokens. The slides give this much. The seconds and bytes, lines over the nine
shares, are ours (`terms`). Compute is one lane, to which device and CPU both add: inside a layer one waits for the
other. A program may have a sixth line, `window`: the seconds that our runtime's two windows for moving KV take.

Two effects are not linear. Lanes that share RAM slow each other. Lanes wait for each other where the KV of layers has
different homes, because loads run ahead only as far as a ring has room. Both are computed for one solution, and then
the program is solved again with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import itemgetter
from typing import NamedTuple

from penstock.planner.solve import highs
from penstock.spec.machine import Sharing
from penstock.spec.places import CPU, DISK, GPU

KINDS = ("weights", "kv", "acts")
READ, WRITE, TO_DEVICE, TO_HOST, COMPUTE = LANES = (
    DISK.reads, DISK.writes, GPU.to_device, GPU.to_host, "compute",
)  # fmt: skip
WINDOW = "window"  # the sixth line
# A window is loaded, held by attention, and saved. Each of the three is a line too, but none is ever the greatest.
LOADED, HELD, SAVED = "loaded", "held", "saved"
EXECUTORS = (GPU.kernels, CPU)  # lanes whose seconds add up to COMPUTE
_ROUNDS = 3  # rounds of solving again, after which shares of busy time change by less than a hundredth
_WAITING = ", waiting"  # the suffix of a line that has a lane's waiting as well as its work
_LEAST_SHARE = 1e-6  # HiGHS may return a smaller share where it means zero

Shares = tuple[float, float, float]
_NOTHING: Shares = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Policy:
    """Where the bytes of a block live. Each kind has shares on the device, in RAM and on the disk, which sum to one."""

    weights: Shares
    kv: Shares
    acts: Shares

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.weights, *self.kv, *self.acts)


class Line(NamedTuple):
    """A linear function of a policy: constant + Σ coefficient · share. It gives the seconds of a lane, or the bytes of
    a tier. `weights`, `kv`, `acts`: the coefficients of the kinds.

    A search adds a hundred thousand lines, so each addend is written out: loops over the shares took a fifth of the
    seconds that planning 10,000 sequences took."""

    constant: float = 0.0
    weights: Shares = _NOTHING
    kv: Shares = _NOTHING
    acts: Shares = _NOTHING

    def at(self, policy: Policy) -> float:
        """The value for a policy."""
        (a, b, c), (d, e, f), (g, h, i) = self.weights, self.kv, self.acts
        (r, s, t), (u, v, w), (x, y, z) = policy.weights, policy.kv, policy.acts
        return self.constant + (a * r + b * s + c * t + d * u + e * v + f * w + g * x + h * y + i * z)

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.weights, *self.kv, *self.acts)

    def plus(self, other: Line, times: float = 1.0) -> Line:
        """The sum of this line and `times` the other."""
        (a, b, c), (d, e, f), (g, h, i) = self.weights, self.kv, self.acts
        (r, s, t), (u, v, w), (x, y, z) = other.weights, other.kv, other.acts
        return Line(
            self.constant + times * other.constant,
            (a + times * r, b + times * s, c + times * t),
            (d + times * u, e + times * v, f + times * w),
            (g + times * x, h + times * y, i + times * z),
        )

    def times(self, factor: float) -> Line:
        """The line with all its values multiplied."""
        return Line().plus(self, factor)


def _by_kind(numbers: Sequence[float]) -> tuple[Shares, Shares, Shares]:
    """Nine numbers as three triples: those of weights, of KV and of activations."""
    a, b, c, d, e, f, g, h, i = numbers
    return (a, b, c), (d, e, f), (g, h, i)


Stage = Mapping[str, Line]  # lane → seconds of a layer. Instead of COMPUTE it has the lanes of EXECUTORS


@dataclass(frozen=True, slots=True)
class PolicyProgram:
    """The linear program of a block.

    layers, steps   l and n − 1
    prefill, decode  seconds of one layer, averaged over the layers, and in decode over the tokens
    memory          tier → (bytes of the block there, bytes that there are)
    allowed         kind → for each tier, whether the kind may be there
    sharing         which lanes slow each other
    ring_layers     the ring holds the weights of so many layers; 0: waiting is not counted
    moved_tier      the tier (0, 1 or 2) whose KV comes through windows
    batches         batches of a pass
    ends_s          (prefill, decode): seconds that the executors compute outside all layers, divided by the layers
    """

    layers: int
    steps: int
    prefill: Stage
    decode: Stage
    memory: Mapping[str, tuple[Line, float]]
    allowed: Mapping[str, tuple[bool, bool, bool]]
    sharing: tuple[Sharing, ...] = ()
    ring_layers: float = 0.0
    moved_tier: int = 2
    batches: int = 1
    ends_s: tuple[float, float] = (0.0, 0.0)

    @property
    def rounds(self) -> int:
        """How often the program is solved again for the effects that are not linear."""
        return _ROUNDS if self.sharing or self.ring_layers else 0

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """(prefill, decode)."""
        return self.prefill, self.decode

    def total_s(self, t_pre_s: float, t_gen_s: float) -> float:
        """T: seconds of a block, from the seconds of a layer in prefill and in decode."""
        return t_pre_s * self.layers + t_gen_s * self.steps * self.layers

    @property
    def least_s(self) -> float:
        """A lower bound of T: on each lane every kind is in its cheapest tier."""
        each = (_by_lane(stage).values() for stage in self.stages)
        return self.total_s(*(max(sum(_least(line, self) for line in lines) for lines in by_lane) for by_lane in each))


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy with its seconds. `seconds`: T of the block; `t_pre_s`, `t_gen_s`: of a layer in prefill and in decode;
    `busiest`: the lanes that take so long."""

    policy: Policy
    seconds: float
    t_pre_s: float
    t_gen_s: float
    busiest: tuple[str, str]


def lanes(stage: Stage, policy: Policy) -> dict[str, float]:
    """Lane → seconds of a layer, of the five lanes and of other lines."""
    return {lane: sum(line.at(policy) for line in lines) for lane, lines in _by_lane(stage).items()}


def solve(program: PolicyProgram, kv: Shares | None = None, below_s: float = inf) -> Solution | None:
    """The optimum, or the optimum of the policies whose KV has the shares `kv`. None if nothing fits, or if nothing
    takes less than `below_s`. Raises InternalError if HiGHS fails.

    Each round solves the program with lanes slowed and waiting as they are in the solution of the round before."""
    slowed, solution = program, None
    for _ in range(1 + program.rounds):
        policy = _optimum(slowed, kv)
        if policy is None:
            return solution
        solution = evaluate(slowed, policy)
        if slowed is program and solution.seconds >= below_s:
            return None  # slowing and waiting, which are not counted yet, only add to it
        slowed = _slowed(program, slowed, policy)
    return solution


def evaluate(program: PolicyProgram, policy: Policy) -> Solution:
    """T of a policy, and the lanes that decide it."""
    pre, gen = (max(lanes(stage, policy).items(), key=itemgetter(1)) for stage in program.stages)
    busiest = pre[0].removesuffix(_WAITING), gen[0].removesuffix(_WAITING)
    return Solution(policy, program.total_s(pre[1], gen[1]), pre[1], gen[1], busiest)


def settled(program: PolicyProgram, policy: Policy) -> Solution:
    """T of a policy, with lanes that slow each other and wait for each other, after the program's rounds."""
    slowed = program
    for _ in range(program.rounds):
        slowed = _slowed(program, slowed, policy)
    return evaluate(slowed, policy)


def _slowed(program: PolicyProgram, before: PolicyProgram, policy: Policy) -> PolicyProgram:
    """The program with its lanes slowed and waiting as they are for `policy`. `before`: the same of the round
    before."""
    prefill, decode = (
        _waiting(_slowed_stage(stage, earlier, policy, program.sharing), policy, program, ends_s)
        for stage, earlier, ends_s in zip(program.stages, before.stages, program.ends_s, strict=True)
    )
    return replace(program, prefill=prefill, decode=decode)


def _slowed_stage(stage: Stage, before: Stage, policy: Policy, sharing: Sequence[Sharing]) -> Stage:
    """The stage in which each lane is slowed by the share of the time in which another lane is busy."""
    whole = max(lanes(before, policy).values())
    factors = dict.fromkeys(stage, 1.0)
    for pair in sharing:
        if pair.lane in stage and pair.beside in stage and whole > 0:
            # Executors take turns, so they do not slow each other. All other work is spread evenly over the time.
            turns = pair.lane in EXECUTORS and pair.beside in EXECUTORS
            busy = 0.0 if turns else min(1.0, before[pair.beside].at(policy) / whole)
            factors[pair.lane] *= 1 + (pair.factor - 1) * busy
    return {lane: line.times(factors[lane]) for lane, line in stage.items()}


def _waiting(stage: Stage, policy: Policy, program: PolicyProgram, ends_s: float) -> Stage:
    """The stage with two kinds of waiting. A lane that brings weights fills the ring while a layer computes; if the
    layer takes longer than that, the lane waits. Windows wait where layers whose KV moves follow each other."""
    if not program.ring_layers:
        return stage
    waiting, tier = dict(stage), program.moved_tier
    executors = [stage[name] for name in EXECUTORS if name in stage]
    computing_s = [sum(line.at(replace(policy, kv=alone)) for line in executors) for alone in _ALONE]
    for lane in (TO_DEVICE, READ):
        line = stage.get(lane, Line())
        if any(a * b > 0 for a, b in zip(line.weights, policy.weights, strict=True)):
            ahead_s = program.ring_layers * line.at(policy)
            by_tier = zip(policy.kv, computing_s, strict=True)
            waits_s = sum(share * max(0.0, seconds - ahead_s) for share, seconds in by_tier)
            waiting[lane + _WAITING] = line.plus(
                Line(waits_s)
            )  # a line of its own, since a lane that waits slows no other
    window = stage.get(WINDOW, Line())
    if policy.kv[tier] > 0 and window.kv[tier] > 0:
        in_layer_s = [max(0.0, seconds - ends_s) for seconds in computing_s]
        layer_s = ends_s + _through_windows(stage, in_layer_s, policy.kv, program)
        waiting[WINDOW + _WAITING] = window.plus(Line(max(0.0, layer_s - window.at(policy))))
    return waiting


_ALONE: tuple[Shares, Shares, Shares] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _through_windows(stage: Stage, computing_s: Sequence[float], kv: Shares, program: PolicyProgram) -> float:
    """Seconds of a layer, averaged over all, if the layers whose KV moves are spread evenly over the model.

    There are two windows, each with room for one layer's KV of all batches. A batch's KV is loaded when the KV of the
    layer but one before was saved from there. The lane loads one batch after the other. `computing_s`: seconds of a
    layer whose KV is in each of the three tiers."""
    tier, batches = program.moved_tier, program.batches
    share, nothing = kv[tier], Line()
    load_s, held_s, save_s = (stage.get(name, nothing).kv[tier] / batches for name in (LOADED, HELD, SAVED))
    others_s = sum(kv[t] * computing_s[t] for t in range(3) if t != tier) / max(1 - share, _LEAST_SHARE)
    first_s = load_s / program.layers  # the wait for the first load is in `computing_s` already
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
    """Lane → its lines. COMPUTE has the lines of both executors."""
    by_lane: dict[str, list[Line]] = {lane: [] for lane in LANES}
    for name, line in stage.items():
        by_lane.setdefault(COMPUTE if name in EXECUTORS else name, []).append(line)
    return by_lane


def _least(line: Line, program: PolicyProgram) -> float:
    """The line's value if every kind is in its cheapest tier."""
    total = line.constant
    for kind in KINDS:
        coefficients = zip(getattr(line, kind), program.allowed[kind], strict=True)
        total += min(coefficient for coefficient, free in coefficients if free)
    return total


def _optimum(program: PolicyProgram, kv: Shares | None) -> Policy | None:
    """The optimum of the linear program, by HiGHS. None if nothing fits.

    There are eleven columns: the nine shares, T_pre and T_gen. Seconds are in units of `least_s` and bytes in units of
    the capacity, so that all numbers are about one: HiGHS's tolerances are absolute."""
    scale, every = max(program.least_s, 1e-12), range(11)
    rows = []
    for stage, seconds in ((program.prefill, (-1.0, 0.0)), (program.decode, (0.0, -1.0))):
        for lines in _by_lane(stage).values():
            line = reduce(Line.plus, lines, Line())
            rows.append(highs.Row(-inf, -line.constant / scale, every, [*(x / scale for x in line.vector), *seconds]))
    for line, capacity in program.memory.values():
        unit = max(capacity, 1.0)
        values = [x / unit for x in line.vector]
        rows.append(highs.Row(-inf, (capacity - line.constant) / unit, every, [*values, 0.0, 0.0]))
    for kind in range(3):
        rows.append(highs.Row(1.0, 1.0, range(3 * kind, 3 * kind + 3), (1.0, 1.0, 1.0)))
    lower, upper = [0.0] * 9, [float(may) for kind in KINDS for may in program.allowed[kind]]
    if kv is not None:
        lower[3:6] = upper[3:6] = kv
    costs = [0.0] * 9 + [program.layers, program.layers * program.steps]
    shares = highs.solve(costs, [*lower, 0.0, 0.0], [*upper, inf, inf], rows).values
    return None if shares is None else Policy(*map(_cleaned, _by_kind(shares[:9])))


def _cleaned(shares: Shares) -> Shares:
    """Shares that sum to one, with the tiny shares that a simplex leaves set to zero."""
    kept = [share if share > _LEAST_SHARE else 0.0 for share in shares]
    first, second, third = (share / sum(kept) for share in kept)
    return first, second, third
