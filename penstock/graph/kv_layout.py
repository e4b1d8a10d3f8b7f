"""Where keys and values lie: pools of pages at home, and windows for those that live elsewhere than where attention
runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd, lcm

from penstock.graph.batch import Batch
from penstock.graph.fresh import FreshRows, fresh_rows, most_fresh_tokens
from penstock.graph.guests import Pool
from penstock.graph.ops.operand import Slot
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import HOST, Tier, is_device, is_disk
from penstock.spec.plan import KvHome, Plan
from penstock.units import round_up

SLOT_ALIGN = 64  # of slots in memory


class KvLayout:
    """The slots of a plan's KV. `take(arena, bytes, align)`: hands out the next bytes of an arena.

    page_group      so many consecutive pages, from a multiple of the number on, belong to one sequence or are shared
                    together: 1, but where KV lives on a disk they fill whole blocks of it
    pages_per_seq   pages of a whole context
    pages           in each layer's pool
    copies          whether a page can get what another one holds: in RAM alone, for elsewhere no task copies KV
    windows         slots of the windows, each of keys or of values. KV on a disk that a device attends to has windows
                    in RAM and on the device
    """

    def __init__(self, plan: Plan, take: Callable[[str, int, int], Slot]) -> None:
        self.plan, self._take = plan, take
        self.page_group = self._page_group()
        self.pages_per_seq = round_up(-(-plan.context // plan.page_tokens), self.page_group)
        self.pages = plan.kv_pages or plan.sequences * self.pages_per_seq
        self.copies = all(home.home == HOST for home in plan.kv)
        self._pools = self._place_pools()
        self.windows: list[Slot] = []
        self._windows_of = self._place_windows()

    def home(self, layer: int, batch: Batch) -> KvHome:
        """The home of the batch's KV in a layer. A batch has one home per layer. Raises AssertionError if the plan has
        none."""
        for home in self.plan.kv:
            if home.layers[0] <= layer < home.layers[1] and home.seqs[0] <= batch.seqs[0] < home.seqs[1]:
                return home
        raise AssertionError(f"no KV home for layer {layer}, sequence {batch.seqs[0]}")

    def shares_pages(self, batch: Batch) -> bool:
        """Whether the batch's pages may be anywhere in the pools. Else each sequence has its own range of them."""
        return bool(batch.pages or self.plan.kv_pages)

    def pages_of(self, batch: Batch) -> Sequence[Sequence[int]]:
        """The pages of each of the batch's sequences, in the order of positions, as they lie in `slots`."""
        if batch.pages:
            return batch.pages
        each, first = self.pages_per_seq, 0 if self.plan.kv_pages else batch.first_seq
        return [range((seq - first) * each, (seq - first + 1) * each) for seq in batch.seqs]

    def page_bytes(self, layer: int, home: KvHome) -> int:
        """Bytes of one page of K (or of V) of one layer: a block of P positions for each KV head (spec/format.py)."""
        return self.plan.page_tokens * self._token_bytes(layer, home)

    def slots(self, layer: int, batch: Batch, pages_used: int | None = None) -> tuple[Slot, Slot]:
        """(keys, values) where attention reads them: the pages from the batch's first sequence to its last one, or all
        pages where they are shared. `pages_used`: no more than so many of a pool in RAM (`Pass.pages_used`). So
        attention does not wait for weights that come into the others."""
        both = self.way(layer, batch)[-1][1]
        if pages_used is None:
            return both
        home = self.home(layer, batch)
        most = pages_used * self.page_bytes(layer, home)
        keys, values = (
            slot._replace(hi=min(slot.hi, pool.lo + most))
            for slot, pool in zip(both, self._pools[layer, home.seqs[0]], strict=True)
        )
        return keys, values

    def way(self, layer: int, batch: Batch) -> list[tuple[Tier, tuple[Slot, Slot]]]:
        """(tier, (keys, values)) of each place that the batch's KV passes, from its home to where attention reads
        it."""
        home = self.home(layer, batch)
        pools = [(home.home, self._pools[layer, home.seqs[0]]), *self._windows_of.get(layer, ())]
        return [(tier, self._of_batch(layer, batch, both)) for tier, both in pools]

    def pools_in_ram(self) -> Iterator[Pool]:
        """K and V of all pages, for layers whose KV lives in RAM."""
        for home in self.plan.kv:
            for layer in range(*home.layers) if home.home == HOST else ():
                for slot in self._pools[layer, home.seqs[0]]:
                    yield Pool(layer, slot, self.page_bytes(layer, home))

    def page_slots(self, page: int) -> list[Slot]:
        """K and V of one page at their home, layer after layer. `page`: the number of a group of pages (`page_group`),
        which are kept together."""
        slots = []
        for home in self.plan.kv:
            for layer in range(*home.layers):
                nbytes = self.page_group * self.page_bytes(layer, home)
                for pool in self._pools[layer, home.seqs[0]]:
                    slots.append(Slot(pool.arena, pool.lo + page * nbytes, pool.lo + (page + 1) * nbytes))
        return slots

    def spans(self, layer: int, batch: Batch, save: bool) -> list[tuple[int, int]]:
        """The byte ranges within `slots` that a batch's `kv_load` moves, or with `save` its `kv_save`. They are the
        same for K and for V. A load moves the pages before the batch's rows. A save moves the bytes from the batch's
        first row to its last one. On a disk either is rounded to whole blocks."""
        if self.shares_pages(batch):
            return self._shared_spans(layer, batch, save)
        seq_bytes = self.pages_per_seq * self.page_bytes(layer, self.home(layer, batch))
        moved = self._moved_pages(layer, batch, save)
        spans = []
        for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
            lo, hi = moved[start, rows]
            if lo < hi:
                seq_lo = (seq - batch.first_seq) * seq_bytes
                spans.append((seq_lo + lo, seq_lo + hi))
        return spans

    def moved(self, layer: int, batch: Batch, save: bool) -> tuple[int, int]:
        """(bytes, count) of the ranges of `spans`, without listing them where sequences have their own."""
        if batch.pages:
            spans = self._shared_spans(layer, batch, save)
            return sum(hi - lo for lo, hi in spans), len(spans)
        counts = [
            (hi - lo, batch.spans[span]) for span, (lo, hi) in self._moved_pages(layer, batch, save).items() if lo < hi
        ]
        return sum(nbytes * seqs for nbytes, seqs in counts), sum(seqs for _, seqs in counts)

    def loaded_bytes(self, batches: Sequence[Batch], from_disk: bool = False) -> int:
        """Bytes of K and V that come to where the batches' attention runs. `from_disk`: from homes on disks alone."""
        total, known = 0, dict[tuple[int, int, KvHome], int]()
        for i, batch in enumerate(batches):
            for layer, of in enumerate(self.plan.target.spec.layers):
                home = self.home(layer, batch)
                if home.home != home.attend and (not from_disk or is_disk(home.home)):
                    key = i, id(of.attention), home
                    if key not in known:
                        known[key] = 2 * self.moved(layer, batch, save=False)[0]
                    total += known[key]
        return total

    def fresh(self, batch: Batch) -> FreshRows:
        """How K and V of the batch's rows lie apart from the cache."""
        return fresh_rows(batch, self.plan.page_tokens)

    def fresh_bytes(self, layer: int, batch: Batch) -> int:
        """Bytes of the batch's fresh K (or V) of a layer."""
        rows = self.fresh(batch)
        return rows.page_count * rows.page_tokens * self._token_bytes(layer, self.home(layer, batch))

    def most_fresh_bytes(self, layer: int) -> int:
        """Bytes of the fresh K (or V) of a layer that any batch may have."""
        plan = self.plan
        home = next(home for home in plan.kv if home.layers[0] <= layer < home.layers[1])
        rows = max(plan.chunk_rows, plan.batch_seqs)
        return most_fresh_tokens(rows, plan.batch_seqs, plan.page_tokens) * self._token_bytes(layer, home)

    def fresh_spans(self, layer: int, batch: Batch) -> list[tuple[int, int, int]]:
        """(from, to, bytes): the whole pages of a batch of beginnings, from its fresh K (or V) to `slots`."""
        page_bytes = self.page_bytes(layer, self.home(layer, batch))
        spans: list[tuple[int, int, int]] = []
        for fresh, pages in zip(self.fresh(batch).pages, self.pages_of(batch), strict=True):
            for source, target in zip(fresh, pages, strict=False):
                lo, to, nbytes = spans[-1] if spans else (0, 0, 0)
                if spans and (lo + nbytes, to + nbytes) == (source * page_bytes, target * page_bytes):
                    spans[-1] = (lo, to, nbytes + page_bytes)
                else:
                    spans.append((source * page_bytes, target * page_bytes, page_bytes))
        return spans

    def _token_bytes(self, layer: int, home: KvHome) -> int:
        a = self.plan.target.spec.layers[layer].attention
        return a.kv_heads * home.format.kv_bytes(a.head_dim)

    def _moved_pages(self, layer: int, batch: Batch, save: bool) -> dict[tuple[int, int], tuple[int, int]]:
        """(start, rows) → lo..hi, the bytes of a sequence's pages in a layer that a sequence with these rows moves."""
        home = self.home(layer, batch)
        page, page_bytes = self.plan.page_tokens, self.page_bytes(layer, home)
        block = PAGE_BYTES if is_disk(home.home) else 1
        ranges = {}
        for start, rows in batch.spans:
            if save:
                (begin, _), (_, end) = (self._rows_in_page(layer, home, row, 1) for row in (start, start + rows - 1))
                lo, hi = start // page * page_bytes + begin, (start + rows - 1) // page * page_bytes + end
            else:
                lo, hi = 0, -(-start // page) * page_bytes
            ranges[start, rows] = lo // block * block, round_up(hi, block)
        return ranges

    def _rows_in_page(self, layer: int, home: KvHome, start: int, rows: int) -> tuple[int, int]:
        """lo..hi: the bytes of a page from the first KV head's row at position `start` to the last head's last row. The
        page has other rows between them where there are several heads: one range of more bytes takes less time than a
        range for each head (docs/LOG.md)."""
        a, page = self.plan.target.spec.layers[layer].attention, self.plan.page_tokens
        codes_bytes, first = home.format.kv_codes_bytes(a.head_dim), start % page
        # A block ends with its last group's minimums, float16 [P], and where it has none with rows of numbers.
        last_bytes = 2 if home.format.is_quantised else codes_bytes
        return first * codes_bytes, self.page_bytes(layer, home) - (page - first - rows) * last_bytes

    def _shared_spans(self, layer: int, batch: Batch, save: bool) -> list[tuple[int, int]]:
        """`spans` of pages that lie anywhere: each page once, neighbours together."""
        home, page_tokens = self.home(layer, batch), self.plan.page_tokens
        page_bytes, block = self.page_bytes(layer, home), PAGE_BYTES if is_disk(home.home) else 1
        moved: dict[int, tuple[int, int]] = {}  # page → lo..hi of its bytes
        for pages, start, rows in zip(self.pages_of(batch), batch.start, batch.rows, strict=True):
            end = start + rows
            if not save:
                moved.update(dict.fromkeys(pages[: -(-start // page_tokens)], (0, page_bytes)))
                continue
            for number in range(start // page_tokens, -(-end // page_tokens)):
                begin = max(start, number * page_tokens)
                lo, hi = self._rows_in_page(layer, home, begin, min(end, (number + 1) * page_tokens) - begin)
                known = moved.get(pages[number], (lo, hi))
                moved[pages[number]] = min(lo, known[0]), max(hi, known[1])
        spans: list[tuple[int, int]] = []
        for page in sorted(moved):
            lo, hi = moved[page]
            lo, hi = (page * page_bytes + lo) // block * block, round_up(page * page_bytes + hi, block)
            if spans and lo <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(hi, spans[-1][1]))
            else:
                spans.append((lo, hi))
        return spans

    def _of_batch(self, layer: int, batch: Batch, pools: tuple[Slot, Slot]) -> tuple[Slot, Slot]:
        home, (keys, values) = self.home(layer, batch), pools
        page_bytes = self.page_bytes(layer, home)
        lo = (batch.first_seq - home.seqs[0]) * self.pages_per_seq * page_bytes
        hi = (batch.last_seq - home.seqs[0] + 1) * self.pages_per_seq * page_bytes
        if self.shares_pages(batch):
            lo, hi = 0, self.pages * page_bytes
        return (
            Slot(keys.arena, keys.lo + lo, keys.lo + hi),
            Slot(values.arena, values.lo + lo, values.lo + hi),
        )

    def _page_group(self) -> int:
        """So many consecutive pages, from a multiple of the number on, belong to one sequence or are shared together.
        It is 1, but where KV lives on a disk they fill whole blocks of it."""
        group = 1
        for home in self.plan.kv:
            if is_disk(home.home):
                for layer in range(*home.layers):
                    group = lcm(group, PAGE_BYTES // gcd(PAGE_BYTES, self.page_bytes(layer, home)))
        return group

    def _place_pools(self) -> dict[tuple[int, int], tuple[Slot, Slot]]:
        pools, layers = {}, self.plan.target.spec.layers
        for home in self.plan.kv:
            pages = self.plan.kv_pages or (home.seqs[1] - home.seqs[0]) * self.pages_per_seq
            arena, align = f"{home.home}.kv", PAGE_BYTES if is_disk(home.home) else SLOT_ALIGN
            nbytes_of: dict[int, int] = {}  # most layers share their attention with others
            for layer in range(*home.layers):
                kind = id(layers[layer].attention)
                if kind not in nbytes_of:
                    nbytes_of[kind] = pages * self.page_bytes(layer, home)
                nbytes = nbytes_of[kind]
                pools[layer, home.seqs[0]] = (self._take(arena, nbytes, align), self._take(arena, nbytes, align))
        return pools

    def _place_windows(self) -> dict[int, list[tuple[Tier, tuple[Slot, Slot]]]]:
        """Layer → (tier, (keys, values)) of its windows, for layers whose KV lives elsewhere, in the order in which it
        passes them. One such layer's attention may run while the next layer's KV is loaded, so there are two windows
        that layers use by turns. Where the order saves memory there is one."""
        windows: dict[int, list[tuple[Tier, tuple[Slot, Slot]]]] = {}
        passing: dict[Tier, list[KvHome]] = {}
        for home in self.plan.kv:
            if is_disk(home.home) and is_device(home.attend):
                passing.setdefault(HOST, []).append(home)
        for home in self.plan.kv:
            if home.home != home.attend:
                passing.setdefault(home.attend, []).append(home)
        for tier, homes in passing.items():
            layers = [layer for home in homes for layer in range(*home.layers)]
            nbytes = max(self._pools[layer, home.seqs[0]][0].nbytes for home in homes for layer in range(*home.layers))
            count = min(len(layers), 1 if self.plan.order == "saving" else 2)
            arena = f"{tier}.window"
            pairs = [(self._take(arena, nbytes, PAGE_BYTES), self._take(arena, nbytes, PAGE_BYTES))
                     for _ in range(count)]  # fmt: skip
            self.windows += [slot for pair in pairs for slot in pair]
            for i, layer in enumerate(layers):
                windows.setdefault(layer, []).append((tier, pairs[i % count]))
        return windows
