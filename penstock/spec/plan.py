"""A plan: where every byte lives, who computes on it, in what order. Complete: no "auto", no None.

Tiers and executors are named as `spec/places` says. A unit's placement is written in two letters, its home and its
executor, each one of G (a device), C (RAM, the CPU) and D (a disk): CG lies in RAM and a device computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts_by_key
from penstock.spec.places import GPU, HOST, Executor, Tier, is_device, is_disk

SCHEMA, VERSION = "penstock.plan", 3

# In which order work is handed out (PIPO §3.2): `overlapped` loads as far ahead as the ring holds, `saving` only what
# the block at hand needs, `flexgen` loads the next block under this one and waits for everything in between.
ORDERS = ("overlapped", "saving", "flexgen")
IO_ENGINES = ("threads", "io_uring")


@dataclass(frozen=True, slots=True)
class Unit:
    """Granules lo..hi of a part: one home, one executor for decode and one for prefill. `active`: of its neurons, the
    share that decoding a full batch is expected to compute (PowerInfer); the others are skipped."""

    part: str
    lo: int
    hi: int
    home: Tier
    decode: Executor
    prefill: Executor
    active: float = 1.0

    def executor(self, purpose: str) -> Executor:
        return self.prefill if purpose == "prefill" else self.decode

    @property
    def placement(self) -> str:
        return _letter(self.home) + _letter(self.decode)


@dataclass(frozen=True, slots=True)
class KvHome:
    """KV of layers [lo, hi) × sequences [lo, hi): home tier, number format, executor of attention."""

    layers: tuple[int, int]
    seqs: tuple[int, int]
    home: Tier
    format: Format
    attend: Executor


@dataclass(frozen=True, slots=True)
class ActHome:
    """Activations of layers × sequences: the tier that holds them; its executor does norms and merges."""

    layers: tuple[int, int]
    seqs: tuple[int, int]
    home: Executor


@dataclass(frozen=True, slots=True)
class Predictor:
    """What says before a layer's FFN which of its neurons a token needs (PowerInfer §5.1): two matrices, from d_model
    to `rank` to the neurons, in the format of the weights. `home`: the memory that holds it and the executor of it."""

    layer: int
    rank: int
    home: Executor


@dataclass(frozen=True, slots=True)
class Cache:
    """`slots` for experts of a layer in the memory of `executor`, while its units' home is a disk: a decode pass loads
    what it asks for and does not find there. `policy`: who leaves, of `graph.cache.POLICIES`."""

    layer: int
    executor: Executor
    slots: int
    policy: str


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation: `host.weights`, `host.ring`, `host.kv`, … on a tier."""

    name: str
    tier: Tier
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanModel:
    spec: ModelSpec
    weights: Format


@dataclass(frozen=True, slots=True)
class Plan:
    """`batches_per_pass` batches of up to `batch_seqs` sequences go through a layer together (FlexGen's
    zig-zag block). `chunk_rows`: rows of a prefill pass, at most. `logits_rows`: logits kept of a batch.
    `context`: KV room per sequence in tokens, in pages of `page_tokens`. `ring_bytes`: per tier, what
    weights stream through; it bounds how far loads run ahead. `stage_bytes`: of pinned memory that units cross on
    their way from a disk to a device. `order`: one of ORDERS. A read of a disk is done in blocks of `io_block_bytes`,
    `io_depth` of them in flight, by `io_engine`. `process_bytes`: of the process beside its arenas; `context_bytes`:
    of the device's memory, what its driver and libraries take (0 without one). `predictors`, `caches`: one at most of
    each layer.
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

    @property
    def target(self) -> PlanModel:
        return self.models[0]

    @property
    def parts(self) -> Mapping[str, Part]:
        return parts_by_key(self.target.spec, self.target.weights)

    @property
    def asking_rows(self) -> int:
        """Rows of a pass that asks routers which experts it wants, at most: those of decode, and of a prompt so few
        that half of the experts are not wanted. 0 where no layer has a cache."""
        routed = [self.target.spec.layers[cache.layer].routed for cache in self.caches]
        few = min((each.experts // (2 * each.active) for each in routed if each is not None), default=0)
        return max(self.batch_seqs, few) if routed else 0

    @property
    def main(self) -> Executor:
        """The executor that holds activations, norms and merges."""
        return self.acts[0].home

    def unit_bytes(self, unit: Unit) -> int:
        return (unit.hi - unit.lo) * self.parts[unit.part].granule_bytes

    def unit_rows(self, unit: Unit) -> tuple[int, int]:
        """lo..hi of what its granules cut: neurons, KV heads or vocabulary rows. Not of experts, which have tails."""
        part = self.parts[unit.part]
        return unit.lo * part.granule_rows, min(unit.hi * part.granule_rows, part.rows)

    def tier_bytes(self) -> dict[Tier, int]:
        """Peak bytes per memory tier: the arenas, and on the host the process itself, on a device its context."""
        total: dict[Tier, int] = {HOST: self.process_bytes}
        if self.context_bytes:
            total[GPU.executor] = self.context_bytes
        for arena in self.arenas:
            total[arena.tier] = total.get(arena.tier, 0) + arena.bytes
        return total


def _letter(place: Tier) -> str:
    return "D" if is_disk(place) else "G" if is_device(place) else "C" if place == HOST else "?"


def dumps(plan: Plan) -> str:
    return codec.dumps(plan, SCHEMA, VERSION)


def loads(text: str, where: str) -> Plan:
    return codec.loads(Plan, text, SCHEMA, VERSION, where)


def to_json(plan: Plan) -> dict[str, object]:
    """The plan as it stands in `plan --json`; `loads` reads the same object back."""
    return {"schema": f"{SCHEMA}/{VERSION}", **{f.name: codec.to_json(getattr(plan, f.name)) for f in fields(plan)}}
