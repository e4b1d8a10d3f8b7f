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
other.

That lanes which share RAM slow each other, and that they wait for each other, no line can hold. `simulate` judges it.
But a lane that works beside a slower one still slows it a little. So of policies with the same T, the one whose lanes
work least is taken: the sum of their seconds counts too, _IN_SHADOW times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import NamedTuple

from penstock.planner.programs import highs
from penstock.spec.places import DISK, GPU

KINDS = ("weights", "kv", "acts")
READ, WRITE, TO_DEVICE, TO_HOST, COMPUTE = LANES = (
    DISK.reads, DISK.writes, GPU.to_device, GPU.to_host, "compute",
)  # fmt: skip
# With 0 one of 300 random plans had all KV on a disk, where half of it fits into RAM, and took 13 % longer. T may be
# above the least by _IN_SHADOW times the seconds of all lanes together.
_IN_SHADOW = 1e-4
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
    a tier. `weights`, `kv`, `acts`: the coefficients of the kinds."""

    constant: float = 0.0
    weights: Shares = _NOTHING
    kv: Shares = _NOTHING
    acts: Shares = _NOTHING

    @property
    def vector(self) -> tuple[float, ...]:
        return (*self.weights, *self.kv, *self.acts)

    def at(self, policy: Policy) -> float:
        """The value for a policy."""
        return self.constant + sum(a * share for a, share in zip(self.vector, policy.vector, strict=True))

    def plus(self, other: Line, times: float = 1.0) -> Line:
        """The sum of this line and `times` the other."""
        pairs = zip(self.vector, other.vector, strict=True)
        return Line(self.constant + times * other.constant, *_by_kind([a + times * b for a, b in pairs]))

    def times(self, factor: float) -> Line:
        """The line with all its values multiplied."""
        return Line().plus(self, factor)


def _by_kind(numbers: Sequence[float]) -> tuple[Shares, Shares, Shares]:
    """Nine numbers as three triples: those of weights, of KV and of activations."""
    a, b, c, d, e, f, g, h, i = numbers
    return (a, b, c), (d, e, f), (g, h, i)


Stage = Mapping[str, Line]  # lane → seconds of a layer


@dataclass(frozen=True, slots=True)
class PolicyProgram:
    """The linear program of a block.

    layers, steps   l and n − 1
    prefill, decode  seconds of one layer, averaged over the layers, and in decode over the tokens
    memory          tier → (bytes of the block there, bytes that there are)
    allowed         kind → for each tier, whether the kind may be there
    """

    layers: int
    steps: int
    prefill: Stage
    decode: Stage
    memory: Mapping[str, tuple[Line, float]]
    allowed: Mapping[str, tuple[bool, bool, bool]]

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """(prefill, decode)."""
        return self.prefill, self.decode

    def total_s(self, t_pre_s: float, t_gen_s: float) -> float:
        """T: seconds of a block, from the seconds of a layer in prefill and in decode."""
        return t_pre_s * self.layers + t_gen_s * self.steps * self.layers

    @property
    def lanes_s(self) -> Line:
        """The seconds of all lanes of a block, added up."""
        total = Line()
        for stage, times in ((self.prefill, self.layers), (self.decode, self.steps * self.layers)):
            for line in stage.values():
                total = total.plus(line, times)
        return total

    @property
    def least_s(self) -> float:
        """A lower bound of T: on each lane every kind is in its cheapest tier."""
        return self.total_s(*(max(_least(line, self) for line in stage.values()) for stage in self.stages))


class Busiest(NamedTuple):
    """The lane that is busy for longest in a layer, and its seconds."""

    lane: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy with its seconds. `seconds`: T of the block; `prefill`, `decode`: T_pre and T_gen; `lanes_s`: seconds of
    all lanes together."""

    policy: Policy
    seconds: float
    prefill: Busiest
    decode: Busiest
    lanes_s: float

    @property
    def minimised_s(self) -> float:
        """What the program minimises."""
        return self.seconds + _IN_SHADOW * self.lanes_s


def solve(program: PolicyProgram, kv: Shares | None = None) -> Solution | None:
    """The optimum, or the optimum of the policies whose KV has the shares `kv`. None if nothing fits. Raises
    InternalError if HiGHS fails."""
    policy = _optimum(program, kv)
    return None if policy is None else evaluate(program, policy)


def evaluate(program: PolicyProgram, policy: Policy) -> Solution:
    """T of a policy, and the lanes that decide it."""
    prefill, decode = (
        max((Busiest(lane, line.at(policy)) for lane, line in stage.items()), key=attrgetter("seconds"))
        for stage in program.stages
    )
    total_s = program.total_s(prefill.seconds, decode.seconds)
    return Solution(policy, total_s, prefill, decode, program.lanes_s.at(policy))


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
        for line in stage.values():
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
    costs = [_IN_SHADOW / scale * x for x in program.lanes_s.vector]
    costs += [program.layers, program.layers * program.steps]
    shares = highs.solve(costs, [*lower, 0.0, 0.0], [*upper, inf, inf], rows).values
    return None if shares is None else Policy(*map(_cleaned, _by_kind(shares[:9])))


def _cleaned(shares: Shares) -> Shares:
    """Shares that sum to one, with the tiny shares that a simplex leaves set to zero."""
    kept = [share if share > _LEAST_SHARE else 0.0 for share in shares]
    first, second, third = (share / sum(kept) for share in kept)
    return first, second, third
