"""A machine as data: its tiers in bytes, and for each lane, op and format the cost of a task in seconds.

Tiers and lanes are named as `spec/places` says. Besides the ops of `graph/ops` a lane may have rates for

    task   picking up a task, and noticing that the tasks it waits for have ended
    call   preparing the operands of a call that nobody has prepared yet
    pass   the time between two passes: sampling
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.blocks import BLOCKS
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import CPU, DISK, HOST, Lane, Tier, device_of, is_device, is_disk
from penstock.spec.plan import IO_ENGINES
from penstock.units import MIB

SCHEMA, VERSION = "penstock.machine", 3

# Bytes of the process beside its arenas. Interpreter, numpy, tokenizers and our own code peak at 57 to 61 MiB
# (docs/LOG.md). The rest is a margin for jinja2 and thread stacks. It is one number, not a measurement of the moment,
# so that the minimum that a refusal names is the minimum the next time too.
PROCESS_BYTES = 80 * MIB

# Bounds of every figure in seconds, so that all results computed from figures stay finite and above zero.
_LEAST_S, _MOST_S = 1e-18, 1e6


@dataclass(frozen=True, slots=True)
class Capacity:
    """A tier of a machine. `bytes`: how much of it a process may use. `source`: the source of that figure, if it is not
    the machine's. Raises BadRequest for a size that no tier has."""

    name: Tier
    bytes: int
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.bytes < 2**63:
            raise BadRequest(f"tier {self.name} has {self.bytes} bytes")


@dataclass(frozen=True, slots=True)
class Rate:
    """The time of an op: t = alpha_s + max(bytes · s_per_byte, flops · s_per_flop), ScheInfer Eq. 3 in two regimes.

    `op` and `format` may be "*". `rows`: the rate holds for passes of at most so many rows, 0: of any number. Kernels
    for few rows have speeds of their own, so there may be several. For the head it counts rows of logits, for attention
    rows of a sequence. `r2`: how much of the measurements' variance the fit explains. On the CPU the begin of a product
    of many rows grows with them: `alpha_s` is that of 384 rows, and of 40 where `rows` is 64.
    Raises BadRequest for figures that make no sense, and for an op that takes no time.
    """

    lane: Lane
    op: str
    format: str
    alpha_s: float
    s_per_byte: float
    s_per_flop: float = 0.0
    r2: float = 1.0
    rows: int = 0
    source: str = ""

    def figure(self, term: str) -> Figure:
        return Figure(self.lane, self.op, self.format, self.rows, term)

    def __post_init__(self) -> None:
        if not 0 <= self.rows < 2**31 or not -_MOST_S <= self.r2 <= 1:
            raise BadRequest(f"rate of {self.lane}/{self.op}/{self.format}: rows {self.rows}, r2 {self.r2}")
        for name in ("alpha_s", "s_per_byte", "s_per_flop"):
            value = getattr(self, name)
            if not 0 <= value <= _MOST_S:  # NaN fails both comparisons
                raise BadRequest(f"rate of {self.lane}/{self.op}/{self.format}: {name} is {value}")
        if self.alpha_s + self.s_per_byte + self.s_per_flop < _LEAST_S:
            raise BadRequest(f"rate of {self.lane}/{self.op}/{self.format}: nothing is free, but this costs no time")


@dataclass(frozen=True, slots=True)
class Figure:
    """Names one number of a machine: `term`, one of TERMS, of the rate that has this lane, op, format and rows."""

    lane: Lane
    op: str
    format: str
    rows: int
    term: str

    def __str__(self) -> str:
        """'host ffn int4, up to 4 rows: s_per_byte'."""
        rows = f", up to {self.rows} row{'s' if self.rows > 1 else ''}" if self.rows else ""
        return f"{self.lane} {self.op} {self.format}{rows}: {self.term}"


TERMS = ("alpha_s", "s_per_byte", "s_per_flop")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tasks on `lane` take `factor` times as long while the lane `beside` is busy: both use the RAM and its bus.
    Raises BadRequest for a factor below 1 or above 1000."""

    lane: Lane
    beside: Lane
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 1000:
            raise BadRequest(
                f"{self.lane} beside {self.beside}: a factor of {self.factor}; it should be from 1 to 1000"
            )


@dataclass(frozen=True, slots=True)
class Reads:
    """How loads of at most `most_bytes` (0: of any size) are read from a disk: in blocks of `block_bytes`, `depth` of
    them in flight, by `engine`, one of IO_ENGINES. `bytes_per_s`: the speed that was measured so, 0: not measured.
    `reason`: why these were chosen, for people. Raises BadRequest for sizes that no reads have, and another engine."""

    lane: Lane
    block_bytes: int
    depth: int
    engine: str
    bytes_per_s: float
    reason: str
    most_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_bytes % PAGE_BYTES or not 0 < self.block_bytes <= 1 << 30 or not 1 <= self.depth <= 256:
            raise BadRequest(f"reads of {self.lane}: {self.depth} blocks of {self.block_bytes} bytes in flight")
        if self.engine not in IO_ENGINES:
            raise BadRequest(f"reads of {self.lane} by {self.engine!r}; there are {', '.join(IO_ENGINES)}")
        if not 0 <= self.bytes_per_s <= 1e18 or not 0 <= self.most_bytes < 2**63:
            raise BadRequest(f"reads of {self.lane}: {self.bytes_per_s} bytes/s, most_bytes {self.most_bytes}")


# For disks that nobody measured. PIPO's appendix A finds blocks of 8 MiB best on a laptop's NVMe disk. Two are in
# flight, so that the disk has the next block to read while the end of this one is noticed.
USUAL_READS = Reads(
    DISK.reads, 8 * MIB, 2, "threads", 0.0, "not measured: 2 blocks of 8 MiB in flight, as on most disks"
)  # fmt: skip

# Reads or writes of KV in flight. A batch's KV on a disk is many reads and writes of some 100 KiB. On a disk that gives
# 2 GB/s to large reads, 32 reads of 128 KiB gave 0.87 GB/s one at a time, 1.07 with 2 in flight, 1.3 with 4, 1.5 with 8
# and with 16. 32 writes of 64 KiB gave 0.64, 0.78, 1.01 and 1.13 GB/s with 1, 2, 4 and 8.
KV_IN_FLIGHT = 8


# Reads of neurons' records in flight. Hundreds of them are asked for at once, of two pages each. With 8, 32 and 128 in
# flight a disk did 51, 63 and 81 thousand reads of 4 KiB a second, and 36, 46 and 53 thousand of 16 KiB.
PICKS_IN_FLIGHT = 128
# Granules of single embedding rows in flight: some hundred KiB each, so that a few are all that a disk can do.
FETCHED_AT_ONCE = 8
_LEAST_IN_FLIGHT_BYTES = 4 * MIB  # what a disk of 4 GB/s reads in a millisecond


def experts_in_flight(expert_bytes: int, block_bytes: int) -> int:
    """Blocks in flight of experts that a layer waits for: those of two experts. Then one ends after the other, and
    experts are computed meanwhile; with those of all in flight, all end together. Of small experts as many as keep a
    disk busy."""
    return max(2 * -(-expert_bytes // block_bytes), -(-_LEAST_IN_FLIGHT_BYTES // expert_bytes))


# Op → the op whose products are most like its own. Its rate is taken where nobody has measured the first.
_LIKE = {"append": "attend", "experts": "ffn", "fire": "ffn", "route": "head", "pick": "kv_load"}

# Columns of a scale → seconds of a multiplication with many rows, of int4's with groups of 64: q4_0 took 1.29 and q4_k
# 1.32 of int4's time, q6_k 1.49, uint4_g128 1.24 (docs/LOG.md).
_LIKE_INT4 = {128: 1.3, 64: 1.3, 32: 1.3, 16: 1.5}
# float8, which is widened, of int4's seconds a byte and a flop: a row took 4.6 times as long a byte.
_FLOAT8 = 4.6, 12.0
# Records between slots and pages, of the seconds a byte that all threads take to read the RAM: one thread copies 9 GB/s
# where all of them read 49.
_RECALL = 5.4


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """All figures of a machine. `source`: where they are from, a probe with its date or a data sheet. `process_bytes`:
    memory of the process beside its arenas. `device_process_bytes`: what the process takes more where it drives a
    device. `context_bytes`: device memory that the driver and libraries take. `rough`: most
    figures are another machine's, scaled by a few that were measured here. `crowded`: during what share of these few
    measurements other processes had a core; 0 where nobody looked.

    Raises BadRequest for figures that are missing or contradict each other."""

    name: str
    tiers: tuple[Capacity, ...]
    rates: tuple[Rate, ...]
    threads: int
    cpu: str = ""
    source: str = ""
    process_bytes: int = PROCESS_BYTES
    device_process_bytes: int = 0
    context_bytes: int = 0
    sharing: tuple[Sharing, ...] = ()
    reads: tuple[Reads, ...] = ()
    rough: bool = False
    crowded: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.threads < 2**31 or not 0 < self.process_bytes < 2**63:
            raise BadRequest(f"machine {self.name}: threads {self.threads}, process_bytes {self.process_bytes}")
        for name in ("device_process_bytes", "context_bytes"):
            if not 0 <= getattr(self, name) < 2**63:
                raise BadRequest(f"machine {self.name}: {name} {getattr(self, name)}")
        if not 0 <= self.crowded <= 1:
            raise BadRequest(f"machine {self.name}: crowded {self.crowded}, which is a share")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise BadRequest(f"machine {self.name} names a tier twice")
        for tier, lane in ((HOST, CPU), (DISK.tier, DISK.reads)):
            if tier not in names:
                raise BadRequest(f"machine {self.name} lacks the tier {tier}")
            if not any(rate.lane == lane for rate in self.rates):
                raise BadRequest(f"machine {self.name} has no rate for the lane {lane}")
        for lane in (lane for name in names if is_device(name) for lane in device_of(name)[1:]):
            if not any(rate.lane == lane for rate in self.rates):
                raise BadRequest(f"machine {self.name} has device memory but no rate for the lane {lane}")
        keys = [(rate.lane, rate.op, rate.format, rate.rows) for rate in self.rates]
        twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) != len(keys) else None
        if twice is not None:
            raise BadRequest(f"machine {self.name} has two rates for {'/'.join(str(part) for part in twice)}")

    def tier(self, name: Tier) -> Capacity:
        """The tier of that name. Raises BadRequest if the machine has none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise BadRequest(f"machine {self.name} has no tier {name}")

    def rate(self, lane: Lane, op: str, fmt: str, rows: int = 1) -> Rate:
        """The most specific rate for a call: for its op and format, then its op, then an op like it, then its format,
        then its lane alone. Of several such rates it is the one for the fewest rows that are at least `rows`. A format
        of quantised files that nobody has measured has the rate of int4, with more seconds a flop (float8: a byte too).
        Raises BadRequest where there is none."""
        if is_disk(lane) and not any(rate.lane == lane for rate in self.rates):
            lane = DISK.reads  # for writes, or a second disk, that nobody has measured
        if op == "recall" and not any((rate.lane, rate.op) == (lane, op) for rate in self.rates):
            rate = self.rate(lane, "*", fmt, rows)
            return replace(rate, s_per_byte=rate.s_per_byte * _RECALL)
        like = _LIKE.get(op, op)
        if fmt in BLOCKS and not any(rate.lane == lane and rate.format == fmt for rate in self.rates):
            rate = self.rate(lane, op, "int4", rows)
            if fmt == "float8":
                per_byte, per_flop = _FLOAT8
                return replace(rate, s_per_byte=rate.s_per_byte * per_byte, s_per_flop=rate.s_per_flop * per_flop)
            return replace(rate, s_per_flop=rate.s_per_flop * _LIKE_INT4[BLOCKS[fmt].scaled])
        for key in ((op, fmt), (op, "*"), (like, fmt), (like, "*"), ("*", fmt), ("*", "*")):
            rates = [r for r in self.rates if r.lane == lane and (r.op, r.format) == key and (r.rows or rows) >= rows]
            if rates:
                return min(rates, key=lambda r: r.rows or 2**31)
        raise BadRequest(f"machine {self.name} has no rate for {op} in {fmt} on the lane {lane}")

    def faster(self, is_faster: Callable[[Lane], bool], times: float) -> MachineSpec:
        """The same machine, but lanes that `is_faster` picks move bytes so many `times` as fast. The cost of a task
        beside its bytes stays the same, and so does the slowing of lanes by each other."""
        rates = tuple(
            replace(rate, s_per_byte=rate.s_per_byte / times) if is_faster(rate.lane) else rate for rate in self.rates
        )
        return replace(self, rates=rates)

    def value(self, figure: Figure) -> float:
        """The number that a figure names; 0 where this machine has no such rate."""
        return next((getattr(r, figure.term) for r in self.rates if r.figure(figure.term) == figure), 0.0)

    def longer(self, picks: Callable[[Figure], bool], times: float) -> MachineSpec:
        """The same machine, but bytes and flops of the figures that `picks` picks take so many `times` as long."""

        def of(rate: Rate) -> Rate:
            by_bytes, by_flops = (times if picks(rate.figure(term)) else 1.0 for term in ("s_per_byte", "s_per_flop"))
            return replace(rate, s_per_byte=rate.s_per_byte * by_bytes, s_per_flop=rate.s_per_flop * by_flops)

        return replace(self, rates=tuple(map(of, self.rates)))

    def reads_of(self, lane: Lane, nbytes: int) -> Reads:
        """How loads of so many bytes are read. Of the entries that cover them it is the one for the fewest bytes, else
        USUAL_READS."""
        covering = [r for r in self.reads if r.lane == lane and (r.most_bytes or nbytes) >= nbytes]
        return min(covering, key=lambda r: r.most_bytes or 2**63, default=USUAL_READS)

    def overhead_s(self, lane: Lane, kind: str) -> float:
        """Seconds that a `task`, a `call` or a `pass` costs on a lane beside its ops; 0 where the machine does not
        say."""
        rate = self.overhead(lane, kind)
        return rate.alpha_s if rate is not None else 0.0

    def overhead(self, lane: Lane, kind: str) -> Rate | None:
        """The rate whose `alpha_s` is `overhead_s`, if there is one. `kind`: task, call or pass."""
        return next((r for r in self.rates if (r.lane, r.op) == (lane, kind)), None)


def dumps(machine: MachineSpec) -> str:
    """The machine as the text of a machine file."""
    return codec.dumps(machine, SCHEMA, VERSION)


def loads(text: str, where: str) -> MachineSpec:
    """The machine of a machine file's text. `where` names the file in errors. Raises BadRequest."""
    return codec.loads(MachineSpec, text, SCHEMA, VERSION, where)
