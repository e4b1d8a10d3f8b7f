"""Where every byte of a plan lies: the sizes that simulate, verify and the runtime agree on.

Per memory tier (`host`, `gpu0`) these arenas, each 2 MiB-aligned so that huge pages fill it exactly:

    T.weights   resident units, in plan order          T.kv       K and V pools, layer after layer
    T.ring      units in flight from a slower tier     T.act      activations, per batch of a pass
    T.scratch   an op's own temporaries (one lane runs one op at a time)
    T.cache     slots of experts that are at home on a disk, layer after layer
    T.window    K and V of a layer or two whose KV lives elsewhere, while attention runs
    host.staging  granules read for single embedding rows
    host.stage    units on their way from a disk to a device

`disk0.kv` is a file: what of the KV lives on a disk. Tokens come from the host and logits go to it: there they have
slots whoever computes.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from penstock.graph import scratch
from penstock.graph.batch import Batch
from penstock.graph.tasks import Slot, Stream
from penstock.spec.model import Layer, Routed
from penstock.spec.parts import PAGE_BYTES, Part, head_key, predictor_part
from penstock.spec.places import HOST, Executor, executor_of, is_disk, tier_of
from penstock.spec.plan import Arena, Cache, KvHome, Plan, Predictor, Unit
from penstock.units import MIB, round_up

ARENA_ALIGN = 2 * MIB  # a huge page: an arena is charged in whole ones whatever it uses
SLOT_ALIGN = 64
_KEPT_ACTS = 4096  # slots that `act` keeps: some of each batch's buffers, for a step's numbers of rows


class Layout:
    """The slots of a plan. Pure arithmetic; asks nothing of a machine. `executors`: of the plan, the main one first."""

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
        self.pages_per_seq = self._pages_per_seq()
        self._kv = self._place_kv()
        self.windows: list[Slot] = []
        self._window_of = self._place_windows()
        self._act = self._place_acts()
        # As `act` gave them: a step asks for few of them, often.
        self._cut_acts: dict[tuple[Executor, int, str, int], Slot] = {}
        self.scratch = {
            tier: self._take(f"{tier}.scratch", scratch.scratch_bytes(plan, tier)) for tier in self.executors
        }
        self.staging = self._place_staging()
        for tier, nbytes in plan.ring_bytes.items():
            self._take(f"{tier}.ring", nbytes)
        self._caches = {cache.layer: self._place_cache(cache) for cache in plan.caches}
        if plan.stage_bytes:
            self._take("host.stage", plan.stage_bytes)

    # -- what streams ---------------------------------------------------------------------------------

    def streams(self, unit: Unit, stream: Stream) -> bool:
        """Whether a pass loads the unit into its executor's ring. An embedding is gathered instead,
        unless it is the head as well; experts with a cache are loaded when they are asked for."""
        if unit.part == "embed" and not self.plan.target.spec.tied:
            return False
        if stream.asks and unit.part in self._cached:
            return False
        return unit.home != unit.executor(stream.purpose)

    @property
    def gathers(self) -> Executor | None:
        """The executor whose memory holds all embedding rows; None: each is read from a disk."""
        return gathers(self.plan)

    def _executors(self) -> tuple[Executor, ...]:
        units = self.plan.units
        found = sorted({unit.decode for unit in units} | {unit.prefill for unit in units})
        attend = (home.attend for home in self.plan.kv)
        predict = (predictor.home for predictor in self.plan.predictors)
        return tuple(dict.fromkeys([self.plan.main, *found, *attend, *predict]))

    def _delegated(self) -> dict[int, Executor]:
        """Layer → executor of its projections, where attention itself runs on another one."""
        units = self.plan.units
        attends = {layer: home.attend for home in self.plan.kv for layer in range(*home.layers)}
        found = {layer: units[self._last_unit[f"{layer}.attn"]].decode for layer in attends}
        return {layer: executor for layer, executor in found.items() if executor != attends[layer]}

    # -- slots ----------------------------------------------------------------------------------------

    def predictor_part(self, predictor: Predictor) -> Part:
        spec, weights = self.plan.target.spec, self.plan.target.weights
        neurons = neurons_of(spec.layers[predictor.layer])
        return predictor_part(predictor.layer, spec.d_model, predictor.rank, neurons, weights)

    def norms(self, layer: int, executor: Executor) -> Slot:
        """A layer's norms where an executor reads them: qkv norms q and k wherever attention is computed."""
        return self._norms[executor, layer]

    @property
    def copied_norms(self) -> dict[str, list[Slot]]:
        """Part → slots that hold it besides its home."""
        main = self.plan.main
        found: dict[str, list[Slot]] = {}
        for (executor, layer), slot in self._norms.items():
            if executor != main:
                found.setdefault(f"{layer}.norms", []).append(slot)
        return found

    def cache_slot(self, layer: int, number: int) -> Slot:
        """A slot of a layer's cache: room for an expert."""
        whole, nbytes = self._caches[layer], self.parts[f"{layer}.experts"].least_bytes
        return Slot(whole.arena, whole.lo + number * nbytes, whole.lo + (number + 1) * nbytes)

    def filled_bytes(self, arena: str) -> int:
        """What of an arena is used, before it is rounded up to whole huge pages."""
        return self._fill.get(arena, 0)

    def act(self, executor: Executor, batch: int, name: str, nbytes: int | None = None) -> Slot:
        """A batch's buffer on an executor's tier; its first `nbytes` where given."""
        if nbytes is None:
            return self._act[executor, batch, name]
        key = (executor, batch, name, nbytes)
        found = self._cut_acts.get(key)
        if found is None:
            slot = self._act[executor, batch, name]
            assert nbytes <= slot.nbytes, f"{name} of batch {batch}: {nbytes} > {slot.nbytes}"
            if len(self._cut_acts) >= _KEPT_ACTS:
                self._cut_acts.clear()
            found = self._cut_acts[key] = Slot(slot.arena, slot.lo, slot.lo + nbytes)
        return found

    def kv_home(self, layer: int, batch: Batch) -> KvHome:
        """The home of the batch's KV in a layer; a batch has one."""
        for home in self.plan.kv:
            if home.layers[0] <= layer < home.layers[1] and home.seqs[0] <= batch.seqs[0] < home.seqs[1]:
                return home
        raise AssertionError(f"no KV home for layer {layer}, sequence {batch.seqs[0]}")

    def _pages_per_seq(self) -> int:
        """Pages of a sequence; where KV lives on a disk, so many that they are whole blocks of it."""
        pages = -(-self.plan.context // self.plan.page_tokens)
        for home in self.plan.kv:
            if is_disk(home.home):
                for layer in range(*home.layers):
                    page_bytes = self.kv_page_bytes(layer, home)
                    pages = round_up(pages, PAGE_BYTES // gcd(PAGE_BYTES, page_bytes))
        return pages

    def kv_page_bytes(self, layer: int, home: KvHome) -> int:
        """One page of K (or of V) of one layer: a block of P positions for each KV head (spec/format.py)."""
        a = self.plan.target.spec.layers[layer].attention
        return a.kv_heads * self.plan.page_tokens * home.format.kv_bytes(a.head_dim)

    def kv(self, layer: int, batch: Batch) -> tuple[Slot, Slot]:
        """(keys, values) where attention reads them: the pages of the batch's sequences, from the first one's to the
        last one's."""
        home = self.kv_home(layer, batch)
        return self._of_batch(layer, batch, self._window_of.get(layer, self._kv[layer, home.seqs[0]]))

    def kv_stored(self, layer: int, batch: Batch) -> tuple[Slot, Slot]:
        """(keys, values) where they live, the same pages."""
        return self._of_batch(layer, batch, self._kv[layer, self.kv_home(layer, batch).seqs[0]])

    def kv_spans(self, layer: int, batch: Batch, save: bool) -> list[tuple[int, int]]:
        """Byte ranges within `kv` that a batch's `kv_load` (or `kv_save`) moves, of K and of V alike: the pages before
        its rows (or with them), of a disk in whole blocks."""
        seq_bytes = self.pages_per_seq * self.kv_page_bytes(layer, self.kv_home(layer, batch))
        moved = self._moved_pages(layer, batch, save)
        found = []
        for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
            lo, hi = moved[start, rows]
            if lo < hi:
                at = (seq - batch.first_seq) * seq_bytes
                found.append((at + lo, at + hi))
        return found

    def kv_moved(self, layer: int, batch: Batch, save: bool) -> tuple[int, int]:
        """(bytes, how many) of the ranges of `kv_spans`, counted without listing them."""
        counts = [
            (hi - lo, batch.spans[span]) for span, (lo, hi) in self._moved_pages(layer, batch, save).items() if lo < hi
        ]
        return sum(nbytes * seqs for nbytes, seqs in counts), sum(seqs for _, seqs in counts)

    def _moved_pages(self, layer: int, batch: Batch, save: bool) -> dict[tuple[int, int], tuple[int, int]]:
        """(start, rows) → the bytes lo..hi, of a sequence's pages in a layer, that such a sequence moves."""
        home = self.kv_home(layer, batch)
        page, page_bytes = self.plan.page_tokens, self.kv_page_bytes(layer, home)
        block = PAGE_BYTES if is_disk(home.home) else 1
        found = {}
        for start, rows in batch.spans:
            first, last = (start // page, -(-(start + rows) // page)) if save else (0, -(-start // page))
            found[start, rows] = first * page_bytes // block * block, round_up(last * page_bytes, block)
        return found

    def _of_batch(self, layer: int, batch: Batch, pools: tuple[Slot, Slot]) -> tuple[Slot, Slot]:
        home, (keys, values) = self.kv_home(layer, batch), pools
        page_bytes = self.kv_page_bytes(layer, home)
        lo = (batch.first_seq - home.seqs[0]) * self.pages_per_seq * page_bytes
        hi = (batch.last_seq - home.seqs[0] + 1) * self.pages_per_seq * page_bytes
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
        ends, found = dict.fromkeys(arenas, 0), dict[int, Slot]()
        for i, unit in enumerate(self.plan.units):
            home = unit.home
            if home in arenas:
                lo = ends[home]  # granules are whole pages, so nothing is lost between them
                ends[home] = hi = lo + (unit.hi - unit.lo) * granule_bytes[unit.part]
                found[i] = Slot(arenas[home], lo, hi)
        self._fill |= {arenas[home]: end for home, end in ends.items()}
        return found

    def _place_norms(self) -> dict[tuple[Executor, int], Slot]:
        """(executor, layer) → norms: at home where the activations are, and a copy where else attention is computed."""
        found = {}
        for home in self.plan.kv:
            for layer in range(*home.layers):
                key = f"{layer}.norms"
                found[self.plan.main, layer] = self.weights[self._last_unit[key]]
                if home.attend != self.plan.main and layer not in self.delegated:
                    nbytes = self.parts[key].granule_bytes
                    found[home.attend, layer] = self._take(f"{home.attend}.weights", nbytes, PAGE_BYTES)
        return found

    def _place_kv(self) -> dict[tuple[int, int], tuple[Slot, Slot]]:
        pools = {}
        for home in self.plan.kv:
            pages = (home.seqs[1] - home.seqs[0]) * self.pages_per_seq
            for layer in range(*home.layers):
                nbytes = pages * self.kv_page_bytes(layer, home)
                arena, align = f"{home.home}.kv", PAGE_BYTES if is_disk(home.home) else SLOT_ALIGN
                pools[layer, home.seqs[0]] = (self._take(arena, nbytes, align), self._take(arena, nbytes, align))
        return pools

    def _place_windows(self) -> dict[int, tuple[Slot, Slot]]:
        """Layer → (keys, values) in a window, for layers whose KV lives elsewhere. One such layer's attention may run
        while the next one's KV comes: two windows by turns, one where the order saves memory."""
        moved = [home for home in self.plan.kv if home.home != home.attend]
        found: dict[int, tuple[Slot, Slot]] = {}
        for tier in dict.fromkeys(home.attend for home in moved):
            layers = [layer for home in moved if home.attend == tier for layer in range(*home.layers)]
            nbytes = max(self._kv[layer, home.seqs[0]][0].nbytes for home in moved for layer in range(*home.layers))
            count = min(len(layers), 1 if self.plan.order == "saving" else 2)
            arena = f"{tier}.window"
            pairs = [(self._take(arena, nbytes, PAGE_BYTES), self._take(arena, nbytes, PAGE_BYTES))
                     for _ in range(count)]  # fmt: skip
            self.windows += [slot for pair in pairs for slot in pair]
            found |= {layer: pairs[i % count] for i, layer in enumerate(layers)}
        return found

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
            buffers["routes"] = max(each.routes_bytes(rows) for each in routed)
        if plan.caches:
            buffers["outputs"] = 4 * plan.asking_rows * max(each.active for each in routed) * spec.d_model
        if plan.predictors:
            buffers["active"] = plan.batch_seqs * max(map(neurons_of, spec.layers))
        answers = {"logits": 4 * plan.logits_rows * spec.vocab, "best": 8 * plan.logits_rows}
        ends = {"tokens": 4 * rows, "rows": 4 * rows * spec.d_embed}
        wanted: dict[Executor, dict[str, int]] = {executor: dict(buffers) for executor in self.executors}
        wanted[plan.main] |= {**ends, "x": 4 * rows * spec.d_model, **answers}
        if plan.main != HOST:
            wanted.setdefault(HOST, {}).update({**ends, **answers})
        for layer, executor in self.delegated.items():  # new K and V, on their way to where attention runs
            a, home = spec.layers[layer].attention, next(h for h in plan.kv if h.layers[0] <= layer < h.layers[1])
            nbytes = rows * a.kv_heads * home.format.kv_bytes(a.head_dim)
            wanted[executor] |= {name: max(nbytes, wanted[executor].get(name, 0)) for name in ("k", "v")}
        for executor in self.executors[1:]:  # where its partial lands before the merge
            wanted[plan.main][f"partial.{executor}"] = buffers["partial"]
        return {
            (tier, batch, name): self._take(f"{tier}.act", nbytes)
            for batch in range(plan.batches_per_pass)
            for tier, names in wanted.items()
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
    """The plan with the arenas that the rest of it leads to: the one place where they are derived."""
    return replace(plan, arenas=Layout(plan).arenas())


def neurons_of(layer: Layer) -> int:
    """Of its dense FFN, or of an expert."""
    return layer.ffns[0].neurons


def gathers(plan: Plan) -> Executor | None:
    """As `Layout.gathers`."""
    homes = {unit.home for unit in plan.units if unit.part == "embed"}
    home = homes.pop()
    return executor_of(home) if not homes and home in (plan.main, HOST) else None


def head_units(plan: Plan) -> list[int]:
    """Units of the head, in order; with a tied head those of the embedding."""
    key = head_key(plan.target.spec)
    return [i for i, unit in enumerate(plan.units) if unit.part == key]
