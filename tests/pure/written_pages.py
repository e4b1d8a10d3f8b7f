"""Checks over many passes which KV pages they write and read, by rules of its own."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InternalError
from penstock.graph.arenas import Layout
from penstock.graph.pages import check_tables
from penstock.graph.tasks import Pass
from penstock.spec.plan import Plan


class WrittenPages:
    """What passes have written to the pages of a plan. `take` raises InternalError for the first pass that
    - names a page outside the pools, or too few pages,
    - writes a page that another of its sequences reads or writes,
    - or reads positions that nobody wrote."""

    def __init__(self, plan: Plan) -> None:
        self._layout = Layout(plan)
        self._tokens: dict[int, int] = {}  # page → how many of its first positions are written

    def restored(self, page: int) -> None:
        """A page that was kept elsewhere was brought back, whole."""
        self._tokens[page] = self._layout.plan.page_tokens

    def copied(self, page: int, source: int) -> None:
        """A page got what another one held."""
        self._tokens[page] = self._tokens.get(source, 0)

    def take(self, p: Pass) -> None:
        """Takes a pass's pages as written. Raises InternalError if a sequence has a page twice, if a page is written
        that another sequence uses, or if positions are read that nobody has written."""
        check_tables(self._layout, p)
        size, users, written = self._layout.plan.page_tokens, dict[int, list[int]](), dict[int, int]()
        for batch in p.batches:
            tables = batch.pages or [
                range(seq * self._layout.kv.pages_per_seq, (seq + 1) * self._layout.kv.pages_per_seq)
                for seq in batch.seqs
            ]
            for seq, pages, start, rows in zip(batch.seqs, tables, batch.start, batch.rows, strict=True):
                used = pages[: -(-(start + rows) // size)]
                if len(set(used)) != len(used):
                    raise InternalError(f"sequence {seq} has a page twice: {list(used)}")
                for i, page in enumerate(used):
                    users.setdefault(page, []).append(seq)
                    if self._tokens.get(page, 0) < min(size, start - i * size):
                        raise InternalError(f"sequence {seq} reads page {page} beyond what was written")
                    if (i + 1) * size > start:
                        written[page] = min(size, start + rows - i * size)
        for page, tokens in written.items():
            if len(users[page]) > 1:
                raise InternalError(f"page {page} is written while sequences {users[page]} have it")
            self._tokens[page] = tokens


def verify_pages(plan: Plan, passes: Iterable[Pass]) -> None:
    """Checks the KV pages of passes, from the first pass of a plan on. Raises InternalError as `WrittenPages`."""
    written = WrittenPages(plan)
    for p in passes:
        written.take(p)
