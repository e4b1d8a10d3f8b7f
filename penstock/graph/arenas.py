"""Where every byte of a plan lies: the sizes that simulate, verify and the runtime agree on.

Per memory tier (`host`, `gpu0`) these arenas, each 2 MiB-aligned so that huge pages fill it exactly:

    T.weights   resident units, in plan order          T.kv       K and V pools, layer after layer
    T.ring      units in flight from a slower tier     T.act      activations, per batch of a pass
    T.scratch   an op's own temporaries (one lane runs one op at a time)
    T.cache     slots of experts that come from a slower tier, layer after layer
    host.asked  pages with records of a layer's units that are asked for (`graph.asked`). All layers have the same
                bytes. Where predictors hear the layer before theirs, there is room for one unit more: units take turns
    host.recent slots for records of units that are asked for, unit after unit (`graph.recent`)
    T.window    K and V of one or two layers whose KV lives elsewhere, while attention runs
    host.staging  granules on their way for single embedding rows
    host.stage    units on their way from a disk to a device

`disk0.kv` is a file: the KV that lives on a disk. Tokens come from the host and logits go to it, so they have slots
there whichever executor computes. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate

from penstock.graph import scratch
from penstock.graph.guests import Guest, guests
from penstock.graph.kv_layout import SLOT_ALIGN, KvLayout
from penstock.graph.records import Records
from penstock.graph.tasks import Slot, Stream
from penstock.spec.format import Format
from penstock.spec.machine import FETCHED_AT_ONCE
from penstock.spec.model import Layer, ModelSpec, Routed
from penstock.spec.part_keys import gathered_key, head_key, parts_by_key
from penstock.spec.parts import GRANULE_ROWS, PAGE_BYTES, active_columns
from penstock.spec.places import HOST, Executor, Tier, executor_of, is_disk, tier_of
from penstock.spec.plan import Arena, Cache, Plan, Unit
from penstock.units import MIB, round_up

ARENA_ALIGN = 2 * MIB  # a huge page: the kernel charges an arena in whole ones, however much of it is used
FRESH_TURNS = 2  # batches that have buffers for fresh K and V, which the others share
_KEPT_ACTS = 4096  # slots that `act` keeps: the buffers of each batch, for several numbers of rows


class Layout:
    """The slots of a plan. It is pure arithmetic, and asks nothing of a machine. `executors`: all executors of the
    plan, the main one first. `kv`: the slots of keys and values."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts = plan.parts
        self._fill: dict[str, int] = {}
        self._last_unit = {unit.part: i for i, unit in enumerate(plan.units)}
        # Layers that have an answer of predictors at the same time.
        self._turns = 1 + max((each.hears < each.layer for each in plan.predictors), default=False)
        self._cached = {f"{cache.layer}.experts" for cache in plan.caches}
        self._gathered = gathered_key(plan.target.spec)
        self.executors = self._executors()
        self.delegated = self._delegated()
        self._fill_weights()
        self.predictors = {
            p.layer: self._take(f"{p.home}.weights", p.part(plan.target.spec).nbytes, PAGE_BYTES)
            for p in plan.predictors
        }
        self._norm_copies = self._place_norm_copies()
        # By the number of a unit that is asked for: what of it stays in RAM, room for its pages with records, and which
        # turn that is. Units with the same turn have the same room.
        self.kept, self.asked, self.asked_turns = self._place_asked()
        # By its number, slots for records that the unit was asked for often.
        self.recent = {
            u: self._take(f"{HOST}.recent", unit.recent_slots * Records.of(self.parts[unit.part]).stride, PAGE_BYTES)
            for u, unit in ((u, plan.units[u]) for u in self.asked)
            if unit.recent_slots
        }
        self.kv = KvLayout(plan, self._take)
        self._act = self._place_acts()
        # The slots that `act` gave so far, since a step asks for the same few of them often.
        self._cut_acts: dict[tuple[Executor, int, str, int], Slot] = {}
        self.scratch = {
            tier: self._take(f"{tier}.scratch", scratch.scratch_bytes(plan, tier)) for tier in self.executors
        }
        self.staging = self._place_staging()
        for tier, nbytes in plan.ring_bytes.items():
            self._take(f"{tier}.ring", nbytes)
        self._caches = {(cache.layer, cache.executor): self._place_cache(cache) for cache in plan.caches}
        self._cache_slots: dict[tuple[int, Executor, int], Slot] = {}  # that `cache_slot` gave so far
        if plan.stage_bytes:
            self._take(f"{HOST}.stage", plan.stage_bytes)

    # -- what streams ---------------------------------------------------------------------------------

    def streams(self, unit: Unit, stream: Stream) -> bool:
        """Whether a pass loads the unit into its executor's ring. An embedding is gathered instead, unless it is the
        head as well. Experts with a cache are loaded when they are asked for."""
        if unit.part == self._gathered:
            return False
        if stream.asks and (unit.asked or unit.part in self._cached):
            return False
        return unit.home != unit.executor(stream.purpose)

    @property
    def gathers(self) -> Executor | None:
        """The executor whose memory holds all embedding rows. None: each row is read from a disk."""
        return gathers(self.plan)

    def _executors(self) -> tuple[Executor, ...]:
        both = {(unit.decode, unit.prefill) for unit in self.plan.units}
        computing = sorted({executor for each in both for executor in each})
        attend = (home.attend for home in self.plan.kv)
        predict = (predictor.home for predictor in self.plan.predictors)
        return tuple(dict.fromkeys([self.plan.main, *computing, *attend, *predict]))

    def _delegated(self) -> dict[int, Executor]:
        """Layer → executor of its projections, where attention itself runs on another one."""
        units = self.plan.units
        attends = {layer: home.attend for home in self.plan.kv for layer in range(*home.layers)}
        projecting = {layer: units[self._last_unit[f"{layer}.attn"]].decode for layer in attends}
        return {layer: executor for layer, executor in projecting.items() if executor != attends[layer]}

    # -- slots ----------------------------------------------------------------------------------------

    def norms(self, layer: int, executor: Executor) -> Slot:
        """The slot of a layer's norms where an executor reads them. The executor of attention needs them too, since qkv
        norms q and k."""
        copy = self._norm_copies.get((executor, layer))
        return self.weights[self._last_unit[f"{layer}.norms"]] if copy is None else copy

    @property
    def copied_norms(self) -> dict[str, list[Slot]]:
        """Part → slots that hold a copy of it, besides the slot at its home."""
        copies: dict[str, list[Slot]] = {}
        for (_, layer), slot in self._norm_copies.items():
            copies.setdefault(f"{layer}.norms", []).append(slot)
        return copies

    def cache_slot(self, layer: int, executor: Executor, number: int) -> Slot:
        """A slot of a layer's cache in an executor's memory: room for an expert."""
        slot = self._cache_slots.get((layer, executor, number))
        if slot is None:
            whole, nbytes = self._caches[layer, executor], self.parts[f"{layer}.experts"].least_bytes
            slot = Slot(whole.arena, whole.lo + number * nbytes, whole.lo + (number + 1) * nbytes)
            self._cache_slots[layer, executor, number] = slot
        return slot

    def filled_bytes(self, arena: str) -> int:
        """Bytes of an arena that are used, before they are rounded up to whole huge pages."""
        return self._fill.get(arena, 0)

    def act(self, executor: Executor, batch: int, name: str, nbytes: int | None = None) -> Slot:
        """A batch's buffer on an executor's tier, or its first `nbytes` where given."""
        if nbytes is None:
            return self._act[executor, batch, name]
        key = (executor, batch, name, nbytes)
        slot_of_rows = self._cut_acts.get(key)
        if slot_of_rows is None:
            slot = self._act[executor, batch, name]
            assert nbytes <= slot.nbytes, f"{name} of batch {batch}: {nbytes} > {slot.nbytes}"
            if len(self._cut_acts) >= _KEPT_ACTS:
                self._cut_acts.clear()
            slot_of_rows = self._cut_acts[key] = Slot(slot.arena, slot.lo, slot.lo + nbytes)
        return slot_of_rows

    def arenas(self) -> tuple[Arena, ...]:
        """Every arena with its size, rounded up to whole huge pages. Empty ones are left out."""
        return tuple(
            Arena(name, tier_of(name), round_up(nbytes, ARENA_ALIGN)) for name, nbytes in self._fill.items() if nbytes
        )

    # -- placing --------------------------------------------------------------------------------------

    def _take(self, arena: str, nbytes: int, align: int = SLOT_ALIGN) -> Slot:
        lo = -(-self._fill.get(arena, 0) // align) * align
        self._fill[arena] = lo + nbytes
        return Slot(arena, lo, lo + nbytes)

    def _fill_weights(self) -> None:
        """Takes the bytes of `weights`, without its slots: whoever only asks for sizes needs none."""
        sizes = _granule_bytes(self.plan.target.spec, self.plan.target.weights)
        ends: dict[Tier, int] = dict.fromkeys([unit.home for unit in self.plan.units], 0)
        for unit in self.plan.units:
            ends[unit.home] += (unit.hi - unit.lo) * sizes[unit.part]
        self._fill |= {f"{home}.weights": end for home, end in ends.items() if not is_disk(home)}

    @cached_property
    def weights(self) -> dict[int, Slot]:
        """Unit index → slot, for units whose home is a memory tier."""
        homes = dict.fromkeys(unit.home for unit in self.plan.units)
        arenas = {home: f"{home}.weights" for home in homes if not is_disk(home)}
        ends, slots = dict.fromkeys(arenas, 0), dict[int, Slot]()
        for i, unit in enumerate(self.plan.units):
            home = unit.home
            if home in arenas:
                lo = ends[home]  # granules are whole pages, so units need no alignment between them
                ends[home] = hi = lo + (unit.hi - unit.lo) * self.parts[unit.part].granule_bytes
                slots[i] = Slot(arenas[home], lo, hi)
        return slots

    @cached_property
    def guests(self) -> dict[int, Guest]:
        """By its number, where a unit on a disk may stay while nobody has these KV pages. No arena depends on it, so
        whoever only asks for sizes does not wait for it."""
        return guests(self.plan, self.kv.pools_in_ram()) if self.plan.guests else {}

    def active_name(self, layer: int) -> str:
        """The name of the buffer with what predictors say of a layer. Two layers take turns if they have an answer at
        the same time."""
        return "active_odd" if self._turns > 1 and layer % 2 else "active"

    def _place_asked(self) -> tuple[dict[int, Slot], dict[int, Slot], dict[int, int]]:
        kept, sizes, by_part = dict[int, Slot](), dict[int, int](), dict[str, list[int]]()
        for u, unit in [(u, unit) for u, unit in enumerate(self.plan.units) if unit.asked]:
            records, granules = Records.of(self.parts[unit.part]), unit.hi - unit.lo
            kept[u] = self._take(f"{HOST}.weights", granules * records.kept_bytes, PAGE_BYTES)
            sizes[u] = granules * records.page_bytes  # whole pages
            by_part.setdefault(unit.part, []).append(u)
        most = max(map(len, by_part.values()), default=0)
        slots, turns = dict[int, Slot](), dict[int, int]()
        if self._turns == 1:
            for units in by_part.values():
                ends = list(accumulate(sizes[u] for u in units))
                slots |= {u: Slot(f"{HOST}.asked", hi - sizes[u], hi) for u, hi in zip(units, ends, strict=True)}
                turns |= {u: i for i, u in enumerate(units)}
        else:
            in_order = [u for part in sorted(by_part, key=lambda key: self.parts[key].layer) for u in by_part[part]]
            turns = {u: i % (most + 1) for i, u in enumerate(in_order)}
            room = max(sizes.values(), default=0)
            slots = {u: Slot(f"{HOST}.asked", turns[u] * room, turns[u] * room + sizes[u]) for u in in_order}
        if slots:
            self._take(f"{HOST}.asked", max(slot.hi for slot in slots.values()), PAGE_BYTES)
        return kept, slots, turns

    def _place_norm_copies(self) -> dict[tuple[Executor, int], Slot]:
        """(executor, layer) → slot of a copy of its norms, which are at home with the activations. An executor of
        attention elsewhere has one, unless it computes the scores alone and there are no sinks among them."""
        slots, layers = {}, self.plan.target.spec.layers
        for home in self.plan.kv:
            for layer in range(*home.layers) if home.attend != self.plan.main else ():
                if layer not in self.delegated or layers[layer].attention.sinks:
                    nbytes = self.parts[f"{layer}.norms"].granule_bytes
                    slots[home.attend, layer] = self._take(f"{home.attend}.weights", nbytes, PAGE_BYTES)
        return slots

    def _place_acts(self) -> dict[tuple[Executor, int, str], Slot]:
        plan, spec = self.plan, self.plan.target.spec
        rows = max(plan.chunk_rows, plan.batch_seqs)
        heads = max(layer.attention.heads * layer.attention.head_dim for layer in spec.layers)
        wide = max(spec.d_model, spec.d_embed)
        buffers = {
            "h": 4 * rows * wide,
            "q": 4 * rows * heads,
            "a": 4 * rows * heads,
            "partial": 4 * rows * spec.d_model,
            "pending": 4 * rows * spec.d_model,
        }
        routed = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, Routed)]
        if routed:
            buffers["routes"] = max(ffn.routes_bytes(rows) for ffn in routed)
        if plan.caches:
            outputs = 4 * plan.asking_rows * max(ffn.active for ffn in routed) * spec.d_model
        if self.asked and plan.sparsity != "predict":
            granules = max(self.parts[plan.units[u].part].granules for u in self.asked)
            buffers["values"] = 4 * plan.batch_seqs * granules * GRANULE_ROWS
        if plan.predictors:
            predicted = rows if plan.sparsity == "predict" else plan.batch_seqs
            nbytes = predicted * max(active_columns(neurons_of(layer)) for layer in spec.layers)
            buffers |= {self.active_name(turn): nbytes for turn in range(self._turns)}
        answers = {"logits": 4 * plan.logits_rows * spec.vocab, "best": 8 * plan.logits_rows}
        ends = {"tokens": 4 * rows, "rows": 4 * rows * spec.d_embed}
        needed: dict[Executor, dict[str, int]] = {executor: dict(buffers) for executor in self.executors}
        needed[plan.main] |= {**ends, "x": 4 * rows * spec.d_model, **answers}
        if plan.main != HOST:
            needed.setdefault(HOST, {}).update({**ends, **answers})
        for cache in plan.caches:  # of a device's cache, the CPU computes what is missing
            needed[cache.executor]["outputs"] = needed[HOST]["outputs"] = outputs
        if any(cache.guesses for cache in plan.caches):
            needed[HOST]["guessed_h"] = 4 * plan.asking_rows * spec.d_model
            needed[HOST]["guessed_routes"] = max(ffn.routes_bytes(plan.asking_rows) for ffn in routed)
        # Fresh K and V, on their way to where attention runs. Two batches have room for theirs, and take turns.
        fresh = dict.fromkeys(("k", "v"), max(map(self.kv.most_fresh_bytes, self.delegated), default=0))
        crossing = {HOST, *self.delegated.values()} if self.delegated else set()
        for executor in self.executors[1:]:  # its partial sums land here before the merge
            needed[plan.main][f"partial.{executor}"] = buffers["partial"]
        return {
            (tier, batch, name): self._take(f"{tier}.act", nbytes)
            for batch in range(plan.batches_per_pass)
            for tier, names in needed.items()
            for name, nbytes in {**names, **(fresh if batch < FRESH_TURNS and tier in crossing else {})}.items()
        }

    def _place_cache(self, cache: Cache) -> Slot:
        nbytes = self.parts[f"{cache.layer}.experts"].least_bytes  # whole pages
        return self._take(f"{cache.executor}.cache", cache.slots * nbytes, PAGE_BYTES)

    def _place_staging(self) -> Slot | None:
        if self.gathers is not None:
            return None
        granules = min(FETCHED_AT_ONCE, max(self.plan.chunk_rows, self.plan.batch_seqs))
        return self._take(f"{HOST}.staging", granules * self.parts["embed"].granule_bytes)


@lru_cache(maxsize=64)
def _granule_bytes(model: ModelSpec, weights: Format) -> dict[str, int]:
    """Part key → bytes of a granule. Whoever adds up thousands of units asks no part for it."""
    return {part.key: part.granule_bytes for part in parts_by_key(model, weights).values()}


def with_arenas(plan: Plan) -> Plan:
    """The plan with the arenas that follow from its other fields. Arenas are derived nowhere else."""
    return replace(plan, arenas=Layout(plan).arenas())


def neurons_of(layer: Layer) -> int:
    """Neurons of a layer's dense FFN, or of one of its experts."""
    return layer.ffns[0].neurons


def gathers(plan: Plan) -> Executor | None:
    """As `Layout.gathers`."""
    homes = {unit.home for unit in plan.units if unit.part == "embed"}
    home = homes.pop()
    return executor_of(home) if not homes and home in (plan.main, HOST) else None


def head_units(plan: Plan) -> list[int]:
    """Indices of the head's units, in order. A tied head has the units of the embedding."""
    key = head_key(plan.target.spec)
    return [i for i, unit in enumerate(plan.units) if unit.part == key]
