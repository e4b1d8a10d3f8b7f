"""A plan: where every byte lives, who computes on it, and in what order. It is complete: it has no "auto" and no None.

Tiers and executors are named as `spec/places` says. A unit's placement is written in two letters, for its home and its
executor: G (a device), C (RAM, the CPU) or D (a disk). A unit of placement CG lies in RAM, and a device computes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from penstock.spec import codec
from penstock.spec.format import Format, Mixed
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import parts_by_key
from penstock.spec.parts import Part, predictor_part
from penstock.spec.places import GPU, HOST, Executor, Tier, is_device, is_disk
from penstock.units import MIB

SCHEMA, VERSION = "penstock.plan", 3

# In which order work is handed out (PIPO §3.2). `overlapped` loads as far ahead as the ring has room. `saving` loads
# only for the current block. `flexgen` loads the next block while this one is computed, and waits for everything in
# between.
ORDERS = ("overlapped", "saving", "flexgen")
IO_ENGINES = ("threads", "io_uring")
# The most bytes that one load brings, in plans of ours. Direct reads of 4 MiB and more run at the disk's full rate
# (docs/LOG.md).
UNIT_BYTES = 16 * MIB
# What is done about neurons that do not fire.
# off         nothing
# exact       the weights that their zero multiplies are left out (PowerInfer §3)
# predict     also, neurons that predictors call inactive are taken for zeros, and left out whole: lossy
# threshold   activations below a level are taken for zeros: lossy
SPARSITIES = ("off", "exact", "predict", "threshold")


@dataclass(frozen=True, slots=True)
class Unit:
    """Granules lo..hi of a part, with one home, one executor for decode and one for prefill. `active`: the share of its
    neurons that decoding a full batch is expected to compute (PowerInfer). The others are skipped: wholly where a
    predictor tells them, else after their activation was computed. `asked`: only of an FFN unit on a disk that lies
    neuron by neuron. Its records stay on the disk, and all other bytes of it in RAM. Decode passes read the records of
    neurons that fire, or that predictors call active (`graph.asked`). `recent_slots`: so many slots in RAM keep records
    of such a unit that were asked for often and lately (`graph.recent`)."""

    part: str
    lo: int
    hi: int
    home: Tier
    decode: Executor
    prefill: Executor
    active: float = 1.0
    asked: bool = False
    recent_slots: int = 0

    def executor(self, purpose: str) -> Executor:
        """Who computes the unit in passes of this purpose (`graph.tasks.Pass`)."""
        return self.prefill if purpose == "prefill" else self.decode

    @property
    def placement(self) -> str:
        return _letter(self.home) + _letter(self.decode)


@dataclass(frozen=True, slots=True)
class KvHome:
    """KV of layers [lo, hi) × sequences [lo, hi): its home tier, its number format, and the executor of attention."""

    layers: tuple[int, int]
    seqs: tuple[int, int]
    home: Tier
    format: Format
    attend: Executor


@dataclass(frozen=True, slots=True)
class ActHome:
    """Activations of layers [lo, hi) × sequences [lo, hi): `home` holds them, and does norms and merges."""

    layers: tuple[int, int]
    seqs: tuple[int, int]
    home: Executor


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts before a layer's FFN which of its neurons a token needs (PowerInfer §5.1). It is two matrices, from
    d_model to `rank` and from there to the neurons, in the format `weights`. `home`: the tier that holds it, which is
    also its executor. `ahead`: 0, or 1: it hears the FFN's input one layer before its own, so that reads begin a layer
    earlier. The first layer's predictor hears its own layer either way."""

    layer: int
    rank: int
    home: Executor
    weights: Format
    ahead: int = 0

    @property
    def hears(self) -> int:
        """The layer whose FFN's input it is given."""
        return max(0, self.layer - self.ahead)

    def part(self, spec: ModelSpec) -> Part:
        """The predictor as a part of the plan, for this model."""
        neurons = spec.layers[self.layer].ffns[0].neurons
        return predictor_part(self.layer, spec.d_model, self.rank, neurons, self.weights)


@dataclass(frozen=True, slots=True)
class Cache:
    """`slots` for experts of a layer in the memory of `executor`. `policy`: which expert leaves, one of
    `graph.cache.POLICIES`.

    In RAM it is for experts that are at home on a disk. A decode pass loads the experts that it asks for and that have
    no slot. In a device's memory it is for experts in RAM: at home there, or in the layer's other cache. A missing
    expert that at least `lifted_rows` rows of a pass ask for is lifted for them. One for fewer rows is computed by the
    CPU, and lifted for later passes.

    `guesses`: at most so many experts of this layer are loaded ahead for each row: of those that its router names for
    the input of the FFN one layer before, the likeliest that are missing. 0: none."""

    layer: int
    executor: Executor
    slots: int
    policy: str
    lifted_rows: int = 1
    guesses: int = 0


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Who computes which rows of a prompt, in a layer (token assignment, ScheInfer Eq. 15): of its FFN units in RAM
    that the CPU computes in decode and a device where prompts are read. A table over the rows of a batch: `rows` rise,
    and of a batch of `rows[i]` the CPU takes the last `cpu[i]`, the device the others. A batch between two entries has
    the CPU's rows of the shorter one. In passes in which all batches are shorter than `rows[0]` the CPU takes all."""

    layer: int
    rows: tuple[int, ...]
    cpu: tuple[int, ...]

    def on_device(self, rows: int) -> int:
        """n_g: so many of a batch's rows are the device's. A batch shorter than all entries is the device's as a
        whole, if it comes in a pass with others."""
        entry = bisect_right(self.rows, rows) - 1
        return rows - self.cpu[entry] if entry >= 0 else rows


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation: `host.weights`, `host.ring`, `host.kv`, … on a tier."""

    name: str
    tier: Tier
    bytes: int


@dataclass(frozen=True)
class PlanModel:
    spec: ModelSpec
    weights: Format | Mixed

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """The parts by key. They are asked for with every task: to look them up by model and format each time took a
        fifth of the planning of a mixture of formats."""
        return parts_by_key(self.spec, self.weights)


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions about a run, in these fields:

    batches_per_pass, batch_seqs  so many batches of up to so many sequences go through a layer together (FlexGen's
                                  zig-zag block)
    chunk_rows      the most rows of a batch in a prefill pass
    logits_rows     the most rows of a batch whose logits are kept
    context         the most tokens of a sequence; its KV lies in pages of `page_tokens`
    kv_pages        pages in each layer's pool, which sequences share; 0: as many as give every sequence its whole
                    context, page after page
    ring_bytes      per tier, the ring that weights stream through. It bounds how far loads run ahead
    stage_bytes     pinned memory that units cross on their way from a disk to a device
    order           one of ORDERS
    io_block_bytes, io_depth, io_engine  reads of a disk are cut into such blocks, so many in flight, by this engine.
                    Experts that native code asks for come by an io_uring where there is one, with the blocks of
                    two of them in flight at least
    process_bytes   memory of the process beside its arenas
    context_bytes   device memory that its driver and libraries take (0 without a device)
    predictors      at most one for each layer; with `sparsity` predict each has one
    caches          by layer; for each at most one in RAM and, after it, one in a device's memory
    sparsity        one of SPARSITIES
    hole_bytes      between two records that are asked for, a hole of at most so many bytes is read through
    levels          with `sparsity` threshold, by layer: activations below the level count as zeros
    device_rows     a table for each layer in which a device and the CPU share the rows of prompts
    guests          units of FFNs at home on a disk stay in KV pages that nobody has (`graph.guests`)
    value_share     below 1, attention reads the values of a query's best positions alone (FlexGen §4, sparse
                    attention): of n positions, of the ceil(value_share · n) with the largest scores
    """

    models: tuple[PlanModel, ...]
    units: tuple[Unit, ...]
    kv: tuple[KvHome, ...]
    acts: tuple[ActHome, ...]
    arenas: tuple[Arena, ...]
    batches_per_pass: int
    batch_seqs: int
    chunk_rows: int
    logits_rows: int
    context: int
    page_tokens: int
    ring_bytes: dict[Executor, int]
    stage_bytes: int
    order: str
    io_block_bytes: int
    io_depth: int
    io_engine: str
    process_bytes: int
    context_bytes: int
    predictors: tuple[Predictor, ...] = ()
    caches: tuple[Cache, ...] = ()
    kv_pages: int = 0
    sparsity: str = "off"
    hole_bytes: int = 0
    levels: tuple[float, ...] = ()
    device_rows: tuple[DeviceRows, ...] = ()
    value_share: float = 1.0
    guests: bool = False

    @property
    def least_device_rows(self) -> int:
        """The break-even length of a prompt: passes with fewer rows a batch are computed by the executors of decode. 0
        where the rows of prompts are not shared."""
        return min((table.rows[0] for table in self.device_rows), default=0)

    @property
    def target(self) -> PlanModel:
        return self.models[0]

    @property
    def chosen_from(self) -> int:
        """The most positions from which attention chooses the best ones; 0 where it reads the values of all."""
        return self.context if self.value_share < 1 else 0

    @property
    def asks(self) -> bool:
        """Whether tasks depend on answers: of routers, or of who fires."""
        return bool(self.caches) or any(unit.asked for unit in self.units)

    @property
    def parts(self) -> Mapping[str, Part]:
        return self.target.parts

    def activates_all(self, part: Part) -> bool:
        """Whether the activations of all of an FFN's neurons are computed. Else nothing is read of a neuron that is not
        active (`Unit.active`): all of its weights lie together, or are taken to."""
        return self.sparsity in ("exact", "threshold") or (self.sparsity == "predict" and not part.by_records)

    @property
    def asking_rows(self) -> int:
        """The most rows of a batch in a pass that asks routers which experts it wants. These are decode passes, and
        prompts of so few rows that at least half of the experts are not wanted. 0 where no layer has a cache."""
        routed = [self.target.spec.layers[cache.layer].routed for cache in self.caches]
        few = min((ffn.experts // (2 * ffn.active) for ffn in routed if ffn is not None), default=0)
        return max(self.batch_seqs, few) if routed else 0

    @property
    def sequences(self) -> int:
        """The sequences that a pass may have, of all its batches."""
        return self.batch_seqs * self.batches_per_pass

    def at_once(self, batch: int, tokens: int) -> int:
        """How many sequences of a batch go through one pass, with KV room for so many tokens of each."""
        seqs = min(batch, self.sequences)
        if self.kv_pages:
            seqs = min(seqs, max(1, self.kv_pages // -(-min(tokens, self.context) // self.page_tokens)))
        return seqs

    @property
    def main(self) -> Executor:
        """The executor that holds activations, norms and merges."""
        return self.acts[0].home

    def unit_bytes(self, unit: Unit) -> int:
        """Bytes of a unit's weights, padding included."""
        return (unit.hi - unit.lo) * self.parts[unit.part].granule_bytes

    def unit_rows(self, unit: Unit) -> tuple[int, int]:
        """lo..hi of the neurons, KV heads or vocabulary rows of a unit. Not for experts, which have tails of their
        own."""
        part = self.parts[unit.part]
        return unit.lo * part.granule_rows, min(unit.hi * part.granule_rows, part.rows)

    def tier_bytes(self) -> dict[Tier, int]:
        """Peak bytes per memory tier: the arenas, on the host also the process itself, on a device also its context."""
        total: dict[Tier, int] = {HOST: self.process_bytes}
        if self.context_bytes:
            total[GPU.executor] = self.context_bytes
        for arena in self.arenas:
            total[arena.tier] = total.get(arena.tier, 0) + arena.bytes
        return total


def _letter(place: Tier) -> str:
    return "D" if is_disk(place) else "G" if is_device(place) else "C" if place == HOST else "?"


def dumps(plan: Plan) -> str:
    """The plan as the text of a plan file."""
    return codec.dumps(plan, SCHEMA, VERSION)


def loads(text: str, where: str) -> Plan:
    """The plan of a plan file's text. `where` names the file in errors. Raises BadRequest."""
    return codec.loads(Plan, text, SCHEMA, VERSION, where)


def to_json(plan: Plan) -> dict[str, object]:
    """The plan as it stands in `plan --json`; `loads` reads the same object back."""
    return {"schema": f"{SCHEMA}/{VERSION}", **{f.name: codec.to_json(getattr(plan, f.name)) for f in fields(plan)}}
