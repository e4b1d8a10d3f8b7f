"""Hands out KV pages to requests, and finds pages again that hold what a prompt begins with.

A page is free, or requests have it, or it is kept: it holds tokens, and nobody has it. Requests of one owner share
whole pages. A whole page is found by a digest of its owner, its tokens and all tokens before them. Owners never share
pages: from the time that a prompt takes, one owner could tell what another one sent.

A prompt may begin with only some tokens of a page. If nobody has that page, the prompt takes it over. Else its first
tokens are copied into another page. Where no page is free, the kept page that was unused longest is given away.

Whole pages may also be stored elsewhere. Stored pages that a prompt begins with come back, into pages of their own,
before anybody reads them. `unsaved` names a whole page that is not stored yet. With `swaps`, a kept page is stored
before it is given away. `moves` lists what is to be done with pages before the next pass, in order.

Free pages are taken from the first one on. Where weights may stay in pages that nobody has (`graph.guests`), kept pages
are worth their room for `most_kept` passes. Then they go before a page is taken that lies beyond all others, and at the
end of the used ones.

It is pure: the caller says which tokens a page holds. A page here may be several pages of a plan, which lie together
(`Layout.kv.page_group`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
IdsOf = Callable[[int, int], Ids]  # (first position, count) → the ids of these positions of a sequence, int32 [count]
_DIGEST_BYTES = 16

# So many passes a kept page is worth the weights that could stay in its place. Weights of 8 MB, as 64 tokens of an 8B
# model have, are read in 4 ms at 2 GB/s, and the tokens are computed in 1 s. Whoever keeps a page for so long spends at
# most twice what knowing the future would.
KEPT_PASSES = 256


class Save(NamedTuple):
    """A page is stored elsewhere, for it will be written over."""

    page: int
    digest: bytes


class Restore(NamedTuple):
    """What is stored elsewhere is brought into a page."""

    page: int
    digest: bytes


class Copied(NamedTuple):
    """A page gets what another one holds."""

    page: int
    source: int


Move = Save | Restore | Copied


@dataclass
class Table:
    """The pages of one sequence, in the order of its positions. `digests[i]`: of all tokens before page i, known up to
    the first page that is not whole yet. `written`: positions whose keys and values are there."""

    pages: list[int]
    digests: list[bytes]
    written: int = 0


class _Content(NamedTuple):
    """What a page holds: the digest of all before it, its tokens int32 [n], and where it is whole the digest of all up
    to its end."""

    before: bytes
    ids: Ids
    digest: bytes | None


class _Part(NamedTuple):
    """A page that holds the first `tokens` tokens of what a prompt wants after its whole pages; no page where there is
    none. `goes_on`: the prompt goes on in it, else it is copied."""

    pages: list[int]
    goes_on: bool
    tokens: int


@dataclass
class _Index:
    """Where content is found."""

    content: dict[int, _Content] = field(default_factory=dict)  # by page
    whole: dict[bytes, int] = field(default_factory=dict)  # digest → page
    after: dict[bytes, set[int]] = field(default_factory=dict)  # digest → pages that go on from there
    unsaved: dict[bytes, int] = field(default_factory=dict)  # the whole ones that may not be stored elsewhere

    def add(self, page: int, content: _Content) -> None:
        self.remove(page)
        self.content[page] = content
        self.after.setdefault(content.before, set()).add(page)
        if content.digest is not None:
            self.whole[content.digest] = self.unsaved[content.digest] = page

    def remove(self, page: int) -> None:
        content = self.content.pop(page, None)
        if content is None:
            return
        self.after[content.before].discard(page)
        if not self.after[content.before]:
            del self.after[content.before]
        if content.digest is not None:
            del self.whole[content.digest]
            self.unsaved.pop(content.digest, None)


class Pages:
    """`count` pages of `tokens` positions each. `stored(digest)`: whether a whole page lies elsewhere too. `swaps`:
    kept pages are stored before they are given away. `copies`: pages can be copied. `most_kept`: passes for which kept
    pages are worth their room, None for any number."""

    def __init__(
        self, count: int, tokens: int, stored: Callable[[bytes], bool] = lambda _: False, swaps: bool = False,
        copies: bool = False, most_kept: int | None = None,
    ) -> None:  # fmt: skip
        self.count, self.tokens, self.stored, self._swaps, self._copies = count, tokens, stored, swaps, copies
        self._most_kept, self._passes = most_kept, 0
        self.moves: list[Move] = []
        self._users = [0] * count
        self._free = list(range(count))  # a heap
        self._kept: OrderedDict[int, int] = OrderedDict()  # the longest unused first → the pass since which it is kept
        self._index = _Index()

    @property
    def kept(self) -> int:
        """Pages that nobody has, and that hold what a prompt may begin with."""
        return len(self._kept)

    @property
    def had(self) -> int:
        """Pages that requests have: 0 where there are none, or pages have leaked."""
        return self.count - len(self._free) - len(self._kept)

    @property
    def top(self) -> int:
        """Pages from this one on hold nothing."""
        free, top = set(self._free), self.count
        while top and top - 1 in free:
            top -= 1
        return top

    def tick(self) -> None:
        """A pass begins. Pages at the end of the used ones that are kept for longer than they are worth become free."""
        self._passes += 1
        while self._most_kept is not None and self._is_stale(page := self.top - 1):
            self._give_away(page)
            heappush(self._free, page)

    def digests(self, owner: str, ids: Ids) -> list[bytes]:
        """The digests of a prompt int32 [n] before each of its pages, and after its last whole one."""
        digests = [blake2b(owner.encode(), digest_size=_DIGEST_BYTES).digest()]
        for lo in range(0, len(ids) - self.tokens + 1, self.tokens):
            digests.append(_after(digests[-1], ids[lo : lo + self.tokens]))
        return digests

    def lacks(self, digests: Sequence[bytes], ids: Ids) -> bytes | None:
        """The digest of the first page that is not there, of the whole pages before the last token of a prompt."""
        whole = digests[1 : 1 + (len(ids) - 1) // self.tokens]
        there = self._index.whole
        return next((digest for digest in whole if digest not in there and not self.stored(digest)), None)

    def unsaved(self) -> tuple[int, bytes] | None:
        """(page, digest) of a whole page that is not stored elsewhere, the latest first; None where there is none."""
        while self._index.unsaved:
            digest, page = next(reversed(self._index.unsaved.items()))
            if not self.stored(digest):
                return page, digest
            del self._index.unsaved[digest]
        return None

    def saved(self, digest: bytes) -> None:
        """The page is stored now, or cannot be."""
        self._index.unsaved.pop(digest, None)

    def begin(self, digests: Sequence[bytes], ids: Ids, spare: int, reuse: bool = True) -> Table | None:
        """Pages for all of a prompt int32 [n], those that hold its beginning among them. At least the last token is
        left to go through the model, since logits are wanted of it. None where not `spare` pages would be left besides.
        `digests`: as `digests` gives them. `reuse`: without it all pages are new, since all of the prompt is to go
        through the model."""
        shared: list[int | None] = []  # None: stored elsewhere
        for digest in digests[1 : 1 + (len(ids) - 1) // self.tokens] if reuse else ():
            page = self._index.whole.get(digest)
            if page is None and not self.stored(digest):
                break
            shared.append(page)
        here = [page for page in shared if page is not None]
        start, left = len(shared) * self.tokens, -(-len(ids) // self.tokens) - len(shared)
        wanted = ids[start : min(start + self.tokens, len(ids) - 1)] if reuse else ids[:0]
        if (partly := self._part(digests[len(shared)], wanted, here, left + len(shared) + spare)) is None:
            return None
        used = [*here, *partly.pages]
        for page in used:
            self._kept.pop(page, None)
            self._users[page] += 1
        pages = [self._take() if page is None else page for page in shared]
        for i, page in enumerate(shared):
            if page is None:
                inside = ids[i * self.tokens : (i + 1) * self.tokens]
                self._index.add(pages[i], _Content(digests[i], inside, digests[i + 1]))
                self.moves.append(Restore(pages[i], digests[i + 1]))
        if partly.goes_on:  # what differs in it will be written over
            (page,) = partly.pages
            self._index.remove(page)
            if self._copies:
                self._index.add(page, _Content(digests[len(shared)], wanted[: partly.tokens], None))
            pages.append(page)
        pages += [self._take() for _ in range(len(shared) + left - len(pages))]
        if partly.pages and not partly.goes_on:
            (source,) = partly.pages
            self.moves.append(Copied(pages[len(shared)], source))
            self._users[source] -= 1
            if not self._users[source]:
                self._kept[source] = self._passes
        return Table(pages, list(digests[: len(shared) + 1]), start + partly.tokens)

    def extend(self, table: Table) -> bool:
        """Gives a sequence another page. False where there is none."""
        if not self._free and not self._kept:
            return False
        table.pages.append(self._take())
        return True

    def wrote(self, table: Table, positions: int, ids: IdsOf) -> None:
        """The first `positions` of a sequence are written. Its whole pages can be shared from now on, and what a prompt
        wrote of its last page can be copied."""
        reads, table.written = positions - table.written > 1, positions
        while (i := len(table.digests) - 1) < positions // self.tokens:
            inside = ids(i * self.tokens, self.tokens)
            table.digests.append(_after(table.digests[i], inside))
            if table.digests[-1] not in self._index.whole:  # else another sequence has written the same meanwhile
                self._index.add(table.pages[i], _Content(table.digests[i], inside, table.digests[-1]))
            else:
                self._index.remove(table.pages[i])
        i, more = divmod(positions, self.tokens)
        if reads and more and self._copies:
            self._index.add(table.pages[i], _Content(table.digests[i], ids(i * self.tokens, more), None))

    def end(self, table: Table, ids: IdsOf) -> None:
        """A sequence has ended. What it wrote is kept as long as no page is wanted."""
        last, inside = divmod(table.written, self.tokens)
        for i in reversed(range(len(table.pages))):  # so that its beginning is kept longest
            page = table.pages[i]
            self._users[page] -= 1
            if self._users[page]:
                continue
            if i == last and inside:
                self._index.add(page, _Content(table.digests[i], ids(i * self.tokens, inside), None))
            if page in self._index.content:
                self._kept[page] = self._passes
            else:
                heappush(self._free, page)
        table.pages.clear()

    def drop(self, table: Table) -> None:
        """A sequence has ended, and what it wrote is not known."""
        for page in reversed(table.pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._index.remove(page)
                heappush(self._free, page)
        table.pages.clear()

    def forget(self) -> None:
        """What pages hold is not known any more."""
        self._index = _Index()
        self.moves.clear()
        self._free += self._kept
        heapify(self._free)
        self._kept.clear()

    def _part(self, before: bytes, ids: Ids, here: Sequence[int], wanted: int) -> _Part | None:
        """The page with the most of ids int32 [n] after `before` that leaves so many `wanted` pages, `here` and itself
        among them where nobody has them; None where nothing does. To go on in a page nobody has is as good as to copy
        it. But then other requests cannot share what it holds, so at least half of that has to be wanted."""
        best = _Part([], False, 0)
        if not self._leaves(here, wanted - len(here)):
            return None
        for page in self._index.after.get(before, ()):
            held = self._index.content[page].ids
            same = _common(ids, held)
            goes_on = not self._users[page] and 2 * same >= len(held)
            if not same or (same, goes_on) <= (best.tokens, best.goes_on):
                continue
            if goes_on or (self._copies and self._leaves([*here, page], wanted - len(here))):
                best = _Part([page], goes_on, same)
        return best

    def _leaves(self, held: Sequence[int], wanted: int) -> bool:
        """Whether so many pages are to be had besides these."""
        return len(self._free) + len(self._kept) - sum(not self._users[page] for page in held) >= wanted

    def _take(self) -> int:
        """A page that nobody has, for one sequence."""
        stale = self._most_kept is not None and self._is_stale(next(iter(self._kept), None))
        if self._free and not (stale and self._free[0] >= self.top):
            page = heappop(self._free)
        else:
            page = next(iter(self._kept))
            self._give_away(page)
        assert not self._users[page], f"page {page} is had"
        self._users[page] = 1
        return page

    def _is_stale(self, page: int | None) -> bool:
        """Whether a page is kept for longer than it is worth."""
        since = self._kept.get(page) if page is not None else None
        return since is not None and self._most_kept is not None and self._passes - since > self._most_kept

    def _give_away(self, page: int) -> None:
        """What a kept page holds will be written over."""
        del self._kept[page]
        digest = self._index.content[page].digest
        if self._swaps and digest is not None and not self.stored(digest):
            self.moves.append(Save(page, digest))
        self._index.remove(page)


def _after(before: bytes, ids: Ids) -> bytes:
    return blake2b(before + ids.astype("<i4").tobytes(), digest_size=_DIGEST_BYTES).digest()


def _common(a: Ids, b: Ids) -> int:
    """How many first ids are the same."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
