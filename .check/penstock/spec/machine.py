"""A machine as data: tiers in bytes, and for each lane, op and format what a task costs in seconds.

Lanes: `host` (CPU kernels), `disk0` (reads), `h2d0`, `d2h0` (the link's two directions), `gpu0`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.units import MIB

SCHEMA, VERSION = "penstock.machine", 1

# What the process takes beside its arenas: interpreter, numpy, tokenizers and our own code peak at
# 57 to 61 MiB (docs/LOG.md); jinja2 and thread stacks want a margin. One number, not a measurement of
# the moment, so that the minimum that a refusal names is the minimum the next time too.
PROCESS_BYTES = 80 * MIB

# Bounds of every figure in seconds, so that what is computed from them stays finite and above zero.
_LEAST_S, _MOST_S = 1e-18, 1e6


@dataclass(frozen=True, slots=True)
class Tier:
    """A home of bytes: `host`, `disk0`, `gpu0`. `bytes`: what a process may use of it."""

    name: str
    bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.bytes < 2**63:
            raise BadRequest(f"tier {self.name} has {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class Rate:
    """t = alpha_s + max(bytes · s_per_byte, flops · s_per_flop), ScheInfer Eq. 3 in two regimes.

    `op` and `format` may be "*". `r2`: how much of the measurements' variance the fit explains.
    """

    lane: str
    op: str
    format: str
    alpha_s: float
    s_per_byte: float
    s_per_flop: float = 0.0
    r2: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "s_per_byte", "s_per_flop"):
            value = getattr(self, name)
            if not 0 <= value <= _MOST_S:  # NaN is neither
                raise BadRequest(f"rate of {self.lane}/{self.op}/{self.format}: {name} is {value}")
        if self.alpha_s + self.s_per_byte + self.s_per_flop < _LEAST_S:
            raise BadRequest(f"rate of {self.lane}/{self.op}/{self.format}: nothing is free, but this costs no time")


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """`source` says where the figures are from: a probe with its date, or a data sheet."""

    name: str
    tiers: tuple[Tier, ...]
    rates: tuple[Rate, ...]
    threads: int
    cpu: str = ""
    source: str = ""
    process_bytes: int = PROCESS_BYTES

    def __post_init__(self) -> None:
        if not 1 <= self.threads < 2**31 or not 0 < self.process_bytes < 2**63:
            raise BadRequest(f"machine {self.name}: threads {self.threads}, process_bytes {self.process_bytes}")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise BadRequest(f"machine {self.name} names a tier twice")
        for tier, lane in (("host", "host"), ("disk0", "disk0")):
            if tier not in names:
                raise BadRequest(f"machine {self.name} lacks the tier {tier}")
            if not any(rate.lane == lane for rate in self.rates):
                raise BadRequest(f"machine {self.name} has no rate for the lane {lane}")

    def tier(self, name: str) -> Tier:
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise BadRequest(f"machine {self.name} has no tier {name}")

    def rate(self, lane: str, op: str, fmt: str) -> Rate:
        """The most specific rate: op and format, op, format, lane. Raises BadRequest where there is none."""
        table = {(r.lane, r.op, r.format): r for r in self.rates}
        for key in ((lane, op, fmt), (lane, op, "*"), (lane, "*", fmt), (lane, "*", "*")):
            if key in table:
                return table[key]
        raise BadRequest(f"machine {self.name} has no rate for {op} in {fmt} on the lane {lane}")


def dumps(machine: MachineSpec) -> str:
    return codec.dumps(machine, SCHEMA, VERSION)


def loads(text: str, where: str) -> MachineSpec:
    return codec.loads(MachineSpec, text, SCHEMA, VERSION, where)
