"""Checks which KV pages a pass names, beside `verify`, which checks its tasks."""

from __future__ import annotations

from penstock.errors import InternalError
from penstock.graph.arenas import Layout
from penstock.graph.tasks import Pass


def check_tables(layout: Layout, p: Pass) -> None:
    """Every page that a pass names is in the pools, and no sequence has too few of them. Raises InternalError.

    It costs some microseconds a pass, since kernels trust the tables."""
    page_tokens, count = layout.plan.page_tokens, layout.kv.pages
    for batch in p.batches:
        if not batch.pages:
            if layout.plan.kv_pages and (batch.last_seq + 1) * layout.kv.pages_per_seq > count:
                raise InternalError(f"sequence {batch.last_seq} has no pages of its own in pools of {count} pages")
            continue
        if len(batch.pages) != len(batch.seqs):
            raise InternalError(f"{len(batch.pages)} lists of pages for {len(batch.seqs)} sequences")
        for seq, pages, start, rows in zip(batch.seqs, batch.pages, batch.start, batch.rows, strict=True):
            if not -(-(start + rows) // page_tokens) <= len(pages) <= layout.kv.pages_per_seq:
                raise InternalError(f"sequence {seq} has {len(pages)} pages for {start + rows} tokens")
            if p.pages_used is not None and max(pages) >= p.pages_used:
                raise InternalError(f"sequence {seq} has page {max(pages)}, and of the pools {p.pages_used} are used")
            if min(pages) < 0 or max(pages) >= count:
                raise InternalError(f"sequence {seq} has pages {min(pages)}..{max(pages)}, the pools have {count}")
