"""Where every byte of a plan lies: the sizes that simulate, verify and the runtime agree on.

Per memory tier (`host`, `gpu0`) these arenas, each 2 MiB-aligned so that huge pages fill it exactly:

    T.weights   resident units, in plan order          T.kv       K and V pools, layer after layer
    T.ring      units in flight from a slower tier     T.act      activations, per batch of a pass
    T.scratch   an op's own temporaries (one lane runs one op at a time)
    T.cache     slots of experts that come from a slower tier, layer after layer
    T.window    K and V of one or two layers whose KV lives elsewhere, while attention runs
    host.staging  granules read for single embedding rows
    host.stage    units on their way from a disk to a device

`disk0.kv` is a file: the KV that lives on a disk. Tokens come from the host and logits go to it, so they have slots
there whichever executor computes. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, lcm

from penstock.graph import scratch
from penstock.graph.batch import Batch
from penstock.graph.tasks import Slot, Stream
from penstock.spec.model import Layer, Routed
from penstock.spec.parts import PAGE_BYTES, Part, head_key, predictor_part
from penstock.spec.places import HOST, Executor, executor_of, is_disk, tier_of
from penstock.spec.plan import Arena, Cache, KvHome, Plan, Predictor, Unit
from penstock.units import MIB, round_up

ARENA_ALIGN = 2 * MIB  # a huge page: the kernel charges an arena in whole ones, however much of it is used
SLOT_ALIGN = 64
_KEPT_ACTS = 4096  # slots that `act` keeps: the buffers of each batch, for several numbers of rows


class Layout:
    """The slots of a plan. It is pure arithmetic, and asks nothing of a machine. `executors`: all executors of the
    plan, the main one first."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.parts = plan.parts
        self._fill: dict[str, int] = {}
        self._last_unit = {unit.part: i for i, unit in enumerate(plan.units)}
        self._cached = {f"{cache.layer}.experts" for cache in plan.caches}
        self.executors = self._executors()
        self.delegated = self._delegated()
        self.weights = self._place_weights()
        self.predictors = {
            p.layer: self._take(f"{p.home}.weights", self.predictor_part(p).nbytes) for p in plan.predictors
        }
        self._norms = self._place_norms()
        self.page_group = self._page_group()
        self.pages_per_seq = round_up(-(-plan.context // plan.page_tokens), self.page_group)
        self.kv_pages = plan.kv_pages or plan.batch_seqs * plan.batches_per_pass * self.pages_per_seq
        self._kv = self._place_kv()
        self.windows: list[Slot] = []
        self._window_of = self._place_windows()
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
        if plan.stage_bytes:
            self._take("host.stage", plan.stage_bytes)

    # -- what streams ---------------------------------------------------------------------------------

    def streams(self, unit: Unit, stream: Stream) -> bool:
        """Whether a pass loads the unit into its executor's ring. An embedding is gathered instead, unless it is the
        head as well. Experts with a cache are loaded when they are asked for."""
        if unit.part == "embed" and not self.plan.target.spec.tied:
            return False
        if stream.asks and unit.part in self._cached:
            return False
        return unit.home != unit.executor(stream.purpose)

    @property
    def gathers(self) -> Executor | None:
        """The executor whose memory holds all embedding rows. None: each row is read from a disk."""
        return gathers(self.plan)

    def _executors(self) -> tuple[Executor, ...]:
        units = self.plan.units
        computing = sorted({unit.decode for unit in units} | {unit.prefill for unit in units})
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

    def predictor_part(self, predictor: Predictor) -> Part:
        spec, weights = self.plan.target.spec, self.plan.target.weights
        neurons = neurons_of(spec.layers[predictor.layer])
        return predictor_part(predictor.layer, spec.d_model, predictor.rank, neurons, weights)

    def norms(self, layer: int, executor: Executor) -> Slot:
        """The slot of a layer's norms where an executor reads them. The executor of attention needs them too, since qkv
        norms q and k."""
        return self._norms[executor, layer]

    @property
    def copied_norms(self) -> dict[str, list[Slot]]:
        """Part → slots that hold a copy of it, besides the slot at its home."""
        main = self.plan.main
        copies: dict[str, list[Slot]] = {}
        for (executor, layer), slot in self._norms.items():
            if executor != main:
                copies.setdefault(f"{layer}.norms", []).append(slot)
        return copies

    def cache_slot(self, layer: int, executor: Executor, number: int) -> Slot:
        """A slot of a layer's cache in an executor's memory: room for an expert."""
        whole, nbytes = self._caches[layer, executor], self.parts[f"{layer}.experts"].least_bytes
        return Slot(whole.arena, whole.lo + number * nbytes, whole.lo + (number + 1) * nbytes)

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

    def kv_home(self, layer: int, batch: Batch) -> KvHome:
        """The home of the batch's KV in a layer. A batch has one home per layer."""
        for home in self.plan.kv:
            if home.layers[0] <= layer < home.layers[1] and home.seqs[0] <= batch.seqs[0] < home.seqs[1]:
                return home
        raise AssertionError(f"no KV home for layer {layer}, sequence {batch.seqs[0]}")

    def _page_group(self) -> int:
        """So many consecutive pages, from a multiple of the number on, belong to one sequence or are shared together.
        It is 1, but where KV lives on a disk they fill whole blocks of it."""
        group = 1
        for home in self.plan.kv:
            if is_disk(home.home):
                for layer in range(*home.layers):
                    group = lcm(group, PAGE_BYTES // gcd(PAGE_BYTES, self.kv_page_bytes(layer, home)))
        return group

    def shares_pages(self, batch: Batch) -> bool:
        """Whether the batch's pages may be anywhere in the pools. Else each sequence has its own range of them."""
        return bool(batch.pages or self.plan.kv_pages)

    def pages_of(self, batch: Batch) -> Sequence[Sequence[int]]:
        """The pages of each of the batch's sequences, in the order of positions, as they lie in the slots of `kv`."""
        if batch.pages:
            return batch.pages
        each, first = self.pages_per_seq, 0 if self.plan.kv_pages else batch.first_seq
        return [range((seq - first) * each, (seq - first + 1) * each) for seq in batch.seqs]

    def kv_page_bytes(self, layer: int, home: KvHome) -> int:
        """Bytes of one page of K (or of V) of one layer: a block of P positions for each KV head (spec/format.py)."""
        a = self.plan.target.spec.layers[layer].attention
        return a.kv_heads * self.plan.page_tokens * home.format.kv_bytes(a.head_dim)

    def kv(self, layer: int, batch: Batch) -> tuple[Slot, Slot]:
        """(keys, values) where attention reads them: the pages from the batch's first sequence to its last one, or all
        pages where they are shared."""
        home = self.kv_home(layer, batch)
        return self._of_batch(layer, batch, self._window_of.get(layer, self._kv[layer, home.seqs[0]]))

    def page_slots(self, page: int) -> list[Slot]:
        """K and V of one page at their home, layer after layer."""
        slots = []
        for home in self.plan.kv:
            for layer in range(*home.layers):
                nbytes = self.kv_page_bytes(layer, home)
                for pool in self._kv[layer, home.seqs[0]]:
                    slots.append(Slot(pool.arena, pool.lo + page * nbytes, pool.lo + (page + 1) * nbytes))
        return slots

    def kv_stored(self, layer: int, batch: Batch) -> tuple[Slot, Slot]:
        """(keys, values) of the same pages as `kv`, at their home."""
        return self._of_batch(layer, batch, self._kv[layer, self.kv_home(layer, batch).seqs[0]])

    def kv_spans(self, layer: int, batch: Batch, save: bool) -> list[tuple[int, int]]:
        """Byte ranges within `kv` that a batch's `kv_load` (or `kv_save`) moves. They are the same for K and for V: the
        pages before the batch's rows (or the pages with its rows), for a disk in whole blocks."""
        if self.shares_pages(batch):
            return self._shared_spans(layer, batch, save)
        seq_bytes = self.pages_per_seq * self.kv_page_bytes(layer, self.kv_home(layer, batch))
        moved = self._moved_pages(layer, batch, save)
        spans = []
        for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
            lo, hi = moved[start, rows]
            if lo < hi:
                seq_lo = (seq - batch.first_seq) * seq_bytes
                spans.append((seq_lo + lo, seq_lo + hi))
        return spans

    def kv_moved(self, layer: int, batch: Batch, save: bool) -> tuple[int, int]:
        """(bytes, count) of the ranges of `kv_spans`, without listing them where sequences have their own."""
        if batch.pages:
            spans = self._shared_spans(layer, batch, save)
            return sum(hi - lo for lo, hi in spans), len(spans)
        counts = [
            (hi - lo, batch.spans[span]) for span, (lo, hi) in self._moved_pages(layer, batch, save).items() if lo < hi
        ]
        return sum(nbytes * seqs for nbytes, seqs in counts), sum(seqs for _, seqs in counts)

    def _moved_pages(self, layer: int, batch: Batch, save: bool) -> dict[tuple[int, int], tuple[int, int]]:
        """(start, rows) → lo..hi, the bytes of a sequence's pages in a layer that a sequence with these rows moves."""
        home = self.kv_home(layer, batch)
        page, page_bytes = self.plan.page_tokens, self.kv_page_bytes(layer, home)
        block = PAGE_BYTES if is_disk(home.home) else 1
        ranges = {}
        for start, rows in batch.spans:
            first, last = (start // page, -(-(start + rows) // page)) if save else (0, -(-start // page))
            ranges[start, rows] = first * page_bytes // block * block, round_up(last * page_bytes, block)
        return ranges

    def _shared_spans(self, layer: int, batch: Batch, save: bool) -> list[tuple[int, int]]:
        """`kv_spans` of pages that lie anywhere: each page once, neighbours together."""
        home, page_tokens = self.kv_home(layer, batch), self.plan.page_tokens
        page_bytes, block = self.kv_page_bytes(layer, home), PAGE_BYTES if is_disk(home.home) else 1
        moved: set[int] = set()
        for pages, start, rows in zip(self.pages_of(batch), batch.start, batch.rows, strict=True):
            first, last = start // page_tokens if save else 0, -(-(start + rows if save else start) // page_tokens)
            moved.update(pages[first:last])
        spans: list[tuple[int, int]] = []
        for page in sorted(moved):
            lo, hi = page * page_bytes // block * block, round_up((page + 1) * page_bytes, block)
            if spans and lo <= spans[-1][1]:
                spans[-1] = (spans[-1][0], hi)
            else:
                spans.append((lo, hi))
        return spans

    def _of_batch(self, layer: int, batch: Batch, pools: tuple[Slot, Slot]) -> tuple[Slot, Slot]:
        home, (keys, values) = self.kv_home(layer, batch), pools
        page_bytes = self.kv_page_bytes(layer, home)
        lo = (batch.first_seq - home.seqs[0]) * self.pages_per_seq * page_bytes
        hi = (batch.last_seq - home.seqs[0] + 1) * self.pages_per_seq * page_bytes
        if self.shares_pages(batch):
            lo, hi = 0, self.kv_pages * page_bytes
        return (
            Slot(keys.arena, keys.lo + lo, keys.lo + hi),
            Slot(values.arena, values.lo + lo, values.lo + hi),
        )

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

    def _place_weights(self) -> dict[int, Slot]:
        """Unit index → slot, for units whose home is a memory tier."""
        granule_bytes = {key: part.granule_bytes for key, part in self.parts.items()}
        homes = dict.fromkeys(unit.home for unit in self.plan.units)
        arenas = {home: f"{home}.weights" for home in homes if not is_disk(home)}
        ends, slots = dict.fromkeys(arenas, 0), dict[int, Slot]()
        for i, unit in enumerate(self.plan.units):
            home = unit.home
            if home in arenas:
                lo = ends[home]  # granules are whole pages, so units need no alignment between them
                ends[home] = hi = lo + (unit.hi - unit.lo) * granule_bytes[unit.part]
                slots[i] = Slot(arenas[home], lo, hi)
        self._fill |= {arenas[home]: end for home, end in ends.items()}
        return slots

    def _place_norms(self) -> dict[tuple[Executor, int], Slot]:
        """(executor, layer) → slot of its norms. They are at home with the activations. An executor of attention
        elsewhere has a copy."""
        slots = {}
        for home in self.plan.kv:
            for layer in range(*home.layers):
                key = f"{layer}.norms"
                slots[self.plan.main, layer] = self.weights[self._last_unit[key]]
                if home.attend != self.plan.main and layer not in self.delegated:
                    nbytes = self.parts[key].granule_bytes
                    slots[home.attend, layer] = self._take(f"{home.attend}.weights", nbytes, PAGE_BYTES)
        return slots

    def _place_kv(self) -> dict[tuple[int, int], tuple[Slot, Slot]]:
        pools = {}
        for home in self.plan.kv:
            pages = self.plan.kv_pages or (home.seqs[1] - home.seqs[0]) * self.pages_per_seq
            for layer in range(*home.layers):
                nbytes = pages * self.kv_page_bytes(layer, home)
                arena, align = f"{home.home}.kv", PAGE_BYTES if is_disk(home.home) else SLOT_ALIGN
                pools[layer, home.seqs[0]] = (self._take(arena, nbytes, align), self._take(arena, nbytes, align))
        return pools

    def _place_windows(self) -> dict[int, tuple[Slot, Slot]]:
        """Layer → (keys, values) in a window, for layers whose KV lives elsewhere. One such layer's attention may run
        while the next layer's KV is loaded, so there are two windows that layers use by turns. Where the order saves
        memory there is one."""
        moved = [home for home in self.plan.kv if home.home != home.attend]
        windows: dict[int, tuple[Slot, Slot]] = {}
        for tier in dict.fromkeys(home.attend for home in moved):
            layers = [layer for home in moved if home.attend == tier for layer in range(*home.layers)]
            nbytes = max(self._kv[layer, home.seqs[0]][0].nbytes for home in moved for layer in range(*home.layers))
            count = min(len(layers), 1 if self.plan.order == "saving" else 2)
            arena = f"{tier}.window"
            pairs = [(self._take(arena, nbytes, PAGE_BYTES), self._take(arena, nbytes, PAGE_BYTES))
                     for _ in range(count)]  # fmt: skip
            self.windows += [slot for pair in pairs for slot in pair]
            windows |= {layer: pairs[i % count] for i, layer in enumerate(layers)}
        return windows

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
        if plan.predictors:
            buffers["active"] = plan.batch_seqs * max(map(neurons_of, spec.layers))
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
        for layer, executor in self.delegated.items():  # new K and V, on their way to where attention runs
            a, home = spec.layers[layer].attention, next(h for h in plan.kv if h.layers[0] <= layer < h.layers[1])
            nbytes = rows * a.kv_heads * home.format.kv_bytes(a.head_dim)
            needed[executor] |= {name: max(nbytes, needed[executor].get(name, 0)) for name in ("k", "v")}
        for executor in self.executors[1:]:  # its partial sums land here before the merge
            needed[plan.main][f"partial.{executor}"] = buffers["partial"]
        return {
            (tier, batch, name): self._take(f"{tier}.act", nbytes)
            for batch in range(plan.batches_per_pass)
            for tier, names in needed.items()
            for name, nbytes in names.items()
        }

    def _place_cache(self, cache: Cache) -> Slot:
        nbytes = self.parts[f"{cache.layer}.experts"].least_bytes  # whole pages
        return self._take(f"{cache.executor}.cache", cache.slots * nbytes, PAGE_BYTES)

    def _place_staging(self) -> Slot | None:
        if self.gathers is not None:
            return None
        return self._take("host.staging", self.parts["embed"].granule_bytes)


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
