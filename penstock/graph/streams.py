"""Decides which loads and lifts of weights are handed out, and when. A part of the lowering.

Each ring is filled from a cyclic stream: the units that this pass streams through it, in order, then the units of the
pass that follows. Units on a disk that a device computes are loaded into the stage first, a ring of pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from penstock.graph import ops
from penstock.graph.arenas import Layout, head_units
from penstock.graph.cache import Caches
from penstock.graph.emit import Emitter
from penstock.graph.ring import Piece, Ring, Streamed
from penstock.graph.tasks import Call, Pass, Slot, Stream
from penstock.spec.part_keys import block_keys
from penstock.spec.places import HOST, Executor, is_device, kernels_of, lane_between

# How many blocks beyond the one being computed loads may be for.
_BLOCKS_AHEAD = {"overlapped": inf, "saving": 0, "flexgen": 1}


class Streams:
    """The rings of a plan. The lowering says which block begins, takes units, and gives their bytes back."""

    def __init__(self, layout: Layout, emit: Emitter, caches: Caches) -> None:
        plan = self._plan = layout.plan
        self._layout, self._emit, self._caches = layout, emit, caches
        self._rings = {
            tier: Ring(f"{tier}.ring", nbytes, even=not is_device(tier) and plan.order != "saving")
            for tier, nbytes in plan.ring_bytes.items()
        }
        self._device = next((tier for tier in self._rings if is_device(tier)), None)  # its disk units cross the stage
        self._stage = Ring(f"{HOST}.stage", plan.stage_bytes)
        # By stream and tier: the units that stream, each with the block that computes it.
        self._units_of: dict[tuple[Stream, str], list[tuple[int, int]]] = {}
        # The same units as whole pieces, for passes in which caches cut none of them.
        self._whole: dict[tuple[Stream, str], list[Streamed]] = {}
        self._last_block: float = 0  # the last block that loads may be for
        self._guests = layout.guests
        self._staying: set[int] = set()  # guests whose weights are where they stay

    @property
    def slots(self) -> list[Slot]:
        """The whole rings."""
        slots = [Slot(ring.arena, 0, ring.nbytes) for ring in self._rings.values()]
        if self._device and self._plan.stage_bytes:
            slots.append(Slot(f"{HOST}.stage", 0, self._plan.stage_bytes))
        return slots

    @property
    def held(self) -> tuple[object, ...]:
        """The state of all rings between two passes, and the guests that stay."""
        return (*(ring.held for ring in (*self._rings.values(), self._stage)), frozenset(self._staying))

    def idle(self, p: Pass) -> bool:
        """Whether neither this pass nor the next one streams anything."""
        each = [stream for stream in (p.stream, p.then) if stream is not None]
        return not any(self._stream(stream, tier) for stream in each for tier in self._rings)

    def begin(self, p: Pass) -> None:
        """Begins a pass. Units that were loaded ahead for it stay in the rings."""
        blocks = 2 * len(self._plan.target.spec.layers) + int(p.stream.logits)
        free = {u for u, guest in self._guests.items() if p.pages_used is not None and p.pages_used <= guest.first_page}
        self._staying &= free
        for tier, ring in self._rings.items():
            now = [each for each in self._stream(p.stream, tier) if each[0][0] not in self._staying]
            come = {piece: self._guests[piece[0]].slot for piece, _, _ in now if piece[0] in free}
            there = self._staying.union(u for u, _, _ in come)
            then = [each for each in self._stream(p.then, tier) if each[0][0] not in there] if p.then else []
            ring.begin(now, [(piece, nbytes, blocks + block) for piece, nbytes, block in then], come)
        if self._device:
            waiting = self._rings[self._device].waiting
            self._stage.begin([load for load in waiting if self._plan.units[load[0][0]].home != HOST], [])

    def begin_block(self, number: int) -> None:
        """Begins block `number` of the pass: the calls that are emitted from here on belong to it."""
        self._last_block = number + _BLOCKS_AHEAD[self._plan.order]
        if self._plan.order == "saving":  # the ring is small: each block takes the bytes of the block before it
            for ring in (*self._rings.values(), self._stage):
                ring.rewind()

    def cut(self, u: int, stream: Stream) -> Iterator[tuple[int, int, Slot | None]]:
        """Cuts a unit's granules into runs lo..hi. Each expert that lies in a cache of its executor is a run, with its
        slot. The missing experts between two of these are a run too, with None: `take` gives its slot. A unit of
        another kind is a single run, and so is a unit of experts whose executor has no cache."""
        unit, part = self._plan.units[u], self._layout.parts[self._plan.units[u].part]
        executor = unit.executor(stream.purpose)
        cache = self._caches.get((part.layer, executor)) if part.kind == "experts" else None
        if cache is None or not self._layout.streams(unit, stream):
            yield unit.lo, unit.hi, None
            return
        expert_granules, start = part.expert_granules, unit.lo
        for lo in range(unit.lo, unit.hi, expert_granules):
            number = cache.slot(lo // expert_granules)
            if number is None:
                continue
            if start < lo:
                yield start, lo, None
            yield lo, lo + expert_granules, self._layout.cache_slot(part.layer, executor, number)
            start = lo + expert_granules
        if start < unit.hi:
            yield start, unit.hi, None

    def take(self, u: int, stream: Stream, run: tuple[int, int] | None = None) -> Slot:
        """The slot that holds a unit (or a run of its granules) when its calls run: at home, in the ring, or in KV
        pages that nobody has."""
        unit = self._plan.units[u]
        if not self._layout.streams(unit, stream):
            return self._layout.weights[u]
        if u in self._staying:
            return self._guests[u].slot
        return self._rings[unit.executor(stream.purpose)].take((u, *(run or (unit.lo, unit.hi))))

    def release(self, u: int, stream: Stream, run: tuple[int, int] | None = None) -> None:
        """Frees a unit's bytes in the ring for loads that wait: the last call that reads the unit is emitted."""
        unit = self._plan.units[u]
        if self._layout.streams(unit, stream) and u not in self._staying:
            self._emit.close(kernels_of(unit.executor(stream.purpose)))
            slot = self._rings[unit.executor(stream.purpose)].release((u, *(run or (unit.lo, unit.hi))))
            if u in self._guests and slot == self._guests[u].slot:
                self._staying.add(u)
            self.pump()

    def pump(self) -> None:
        """Emits every load and lift that a ring has room for, for the blocks that may be loaded now."""
        for tier, ring in self._rings.items():
            if tier == HOST:
                self._load(ring)
                continue
            self._load(self._stage)
            while (lift := ring.admit(self._last_block, self._at_hand)) is not None:
                piece, slot = lift
                u, unit = piece[0], self._plan.units[piece[0]]
                source = self._at_home(piece) if unit.home == HOST else self._stage.take(piece)
                fmt = self._layout.parts[unit.part].kinds()
                lift_call = Call(ops.Lift(source, slot), u, None, fmt, slot.nbytes, 0)
                self._emit.alone((lane_between(HOST, tier),), lift_call)
                if unit.home != HOST:
                    self._stage.release(piece)
                    self._load(self._stage)

    def _load(self, ring: Ring) -> None:
        """Emits the loads from disks into a ring of the host that may begin now."""
        while (load := ring.admit(self._last_block, lambda _: True)) is not None:
            (u, lo, hi), slot = load
            unit = self._plan.units[u]
            fmt = self._layout.parts[unit.part].kinds()
            self._emit.alone(
                (lane_between(unit.home, HOST),), Call(ops.Load(slot, lo, hi), u, None, fmt, slot.nbytes, 0)
            )

    def _at_home(self, piece: Piece) -> Slot:
        """A piece of a unit that is at home in memory."""
        u, lo, hi = piece
        whole, unit = self._layout.weights[u], self._plan.units[u]
        granule_bytes = self._layout.parts[unit.part].granule_bytes
        return Slot(whole.arena, whole.lo + (lo - unit.lo) * granule_bytes, whole.lo + (hi - unit.lo) * granule_bytes)

    def _at_hand(self, piece: Piece) -> bool:
        """Whether a unit can be lifted: it is at home in memory, or its load into the stage was emitted."""
        return self._plan.units[piece[0]].home == HOST or self._stage.holds_next(piece)

    def _stream(self, stream: Stream, tier: Executor) -> list[Streamed]:
        """All that a pass of this kind streams through a tier's ring, in order."""
        key = (stream, tier)
        if key not in self._units_of:
            self._units_of[key] = list(self._streaming(stream, tier))
            self._whole[key] = [piece for u, block in self._units_of[key] for piece in self._pieces(u, block, stream)]
        if not self._caches or stream.asks:
            return self._whole[key]
        return [piece for u, block in self._units_of[key] for piece in self._pieces(u, block, stream)]

    def _pieces(self, u: int, block: int, stream: Stream) -> Iterator[Streamed]:
        granule_bytes = self._layout.parts[self._plan.units[u].part].granule_bytes
        for lo, hi, slot in self.cut(u, stream):
            if slot is None:
                yield (u, lo, hi), (hi - lo) * granule_bytes, block

    def _streaming(self, stream: Stream, tier: Executor) -> Iterator[tuple[int, int]]:
        """Yields each unit that such a pass streams to the tier, with the block that computes it."""
        by_part: dict[str, list[int]] = {}
        for u, unit in enumerate(self._plan.units):
            by_part.setdefault(unit.part, []).append(u)
        layers = range(len(self._plan.target.spec.layers))
        spec, kinds = self._plan.target.spec, ("attn", "ffn")
        blocks = [[u for key in block_keys(spec, i, kind) for u in by_part[key]] for i in layers for kind in kinds]
        blocks += [head_units(self._plan)] if stream.logits else []
        for block, block_units in enumerate(blocks):
            for u in block_units:
                unit = self._plan.units[u]
                if unit.executor(stream.purpose) == tier and self._layout.streams(unit, stream):
                    yield u, block
