"""KV pages in any order: which tables are right, what they cost to lower, and which pages prompts find again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.pages import WrittenPages, check_tables, verify_pages
from penstock.graph.tasks import Pass
from penstock.graph.verify import verify
from penstock.serve.pages import Ids, Pages
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.plans import make_plan, page_orders, random_plans, resident_plan, with_pages
from tests.pure.machine import model

SPEC, WEIGHTS = model(layers=2), parse_format("float32")


def plan(kv_pages: int = 6) -> Plan:
    made = resident_plan(SPEC, WEIGHTS, batch_seqs=3, context=256)
    return with_arenas(replace(made, kv_pages=kv_pages))


def one(*pages: tuple[int, ...], start: tuple[int, ...] = (), rows: tuple[int, ...] = ()) -> Pass:
    n = len(pages)
    batch = Batch(0, tuple(range(n)), start or (0,) * n, rows or (1,) * n, (), (), pages)
    return Pass("prefill", (batch,), None)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (one((6,)), "pools have 6"),
        (one((-1,)), "pools have 6"),
        (one((0,), rows=(65,)), "1 pages for 65"),
        (one((0, 1, 2, 3, 4)), "5 pages for 1"),
        (one((0,), (0,)), "written while"),
        (one((0, 0), rows=(65,)), "twice"),
        (one((0,), start=(1,)), "beyond what was written"),
    ],
)
def test_tables_that_are_wrong(wrong: Pass, why: str) -> None:
    with pytest.raises(InternalError, match=why):
        verify_pages(plan(), [wrong])


def test_a_shared_page_is_read_and_not_written() -> None:
    written = WrittenPages(plan())
    written.take(one((5, 1), rows=(100,)))
    written.take(one((5, 1), (5, 2), start=(100, 64)))
    with pytest.raises(InternalError, match="written while"):
        written.take(one((5, 1), (5, 2), start=(101, 63), rows=(1, 2)))


def test_without_tables_a_plan_has_room_for_whole_contexts() -> None:
    batch = Batch(0, (1,), (0,), (1,), ())
    check_tables(Layout(plan(8)), Pass("prefill", (batch,), None))
    with pytest.raises(InternalError, match="no pages of its own"):
        check_tables(Layout(plan(7)), Pass("prefill", (batch,), None))


def test_pages_are_data_and_not_shape() -> None:
    lowering = Lowering(plan())
    tasks = [list(lowering.step(p)) for p in (one((0,), (1,)), one((3,), (2,)), one((0, 1), (2, 3), start=(64, 70)))]
    assert [len(some) for some in tasks] == [1, 1, 1]
    assert tasks[1][0].like == tasks[2][0].like == tasks[0][0].id
    assert tasks[2][0].calls[-1].batch is not None and tasks[2][0].calls[-1].batch.pages == ((0, 1), (2, 3))


@pytest.mark.fuzz
@given(st.data())
def test_passes_with_pages_in_any_order_stay_within_their_arenas(data: st.DataObject) -> None:
    made = data.draw(random_plans(SPEC, WEIGHTS, batch_seqs=2, batches_per_pass=2, context=150))
    made, order = data.draw(page_orders(made))
    lowering, tasks, wanted = Lowering(made), [], []
    for start, rows in ((0, 90), (90, 1), (91, 1)):
        batches = tuple(Batch(i, (2 * i, 2 * i + 1), (start,) * 2, (rows // 6 or 1,) * 2, (0,)) for i in range(2))
        if start:
            batches = tuple(b._replace(start=(15 + start - 90,) * 2) for b in batches)
        wanted.append(with_pages(made, order, Pass("prefill" if not start else "decode", batches, None)))
        tasks += list(lowering.step(wanted[-1]))
    verify(tasks, made.arenas, made.units)
    verify_pages(made, wanted)


def test_what_kv_moves_is_counted_page_by_page() -> None:
    units = resident_plan(SPEC, WEIGHTS).units
    made = make_plan(SPEC, WEIGHTS, list(units), ring_bytes={}, batch_seqs=2, context=256, kv_spilled=frozenset({0}))
    layout = Layout(made)
    assert layout.kv.page_group == 1
    page_bytes = layout.kv.page_bytes(0, made.kv[0])
    batch = Batch(0, (0, 1), (130, 64), (2, 1), (), (), ((7, 2, 3), (7, 5)))
    assert layout.kv.spans(0, batch, save=False) == [(2 * page_bytes, 4 * page_bytes), (7 * page_bytes, 8 * page_bytes)]
    assert layout.kv.spans(0, batch, save=True) == [(3 * page_bytes, 4 * page_bytes), (5 * page_bytes, 6 * page_bytes)]
    assert layout.kv.moved(0, batch, save=False) == (3 * page_bytes, 2)


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def said(tokens: Ids, pages: Pages, owner: str = "") -> None:
    """Somebody reads these tokens, and ends."""
    table = pages.begin(pages.digests(owner, tokens), tokens, 0)
    assert table is not None
    pages.wrote(table, len(tokens), lambda start, n: tokens[start : start + n])
    pages.end(table, lambda start, n: tokens[start : start + n])


def found(tokens: Ids, pages: Pages, owner: str = "") -> int:
    """How many tokens of a prompt are there."""
    table = pages.begin(pages.digests(owner, tokens), tokens, 0)
    assert table is not None
    there = table.written
    pages.end(table, lambda start, n: tokens[start : start + n])
    return there


def test_a_prompt_finds_whole_pages_and_the_beginning_of_one() -> None:
    pages = Pages(8, 4)
    said(ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), pages)
    assert found(ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), pages) == 10
    assert found(ids(1, 2, 3, 4, 5, 6, 7, 8), pages) == 7  # the last token is read
    assert found(ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), pages, "another") == 0
    assert found(ids(2, 2, 3, 4, 5, 6, 7, 8), pages) == 0


def test_the_longest_unused_page_goes_first_and_a_beginning_last() -> None:
    pages = Pages(4, 2)
    said(ids(1, 2, 3, 4, 5), pages)
    said(ids(9, 9, 9), pages)  # one page was free: the last one of the text before goes
    assert (pages.free, pages.kept, pages.had) == (0, 4, 0)
    assert found(ids(1, 2, 3, 4, 5), pages) == 4


def test_a_page_that_somebody_has_is_not_given_away() -> None:
    pages = Pages(3, 2)
    tokens = ids(1, 2, 3)
    table = pages.begin(pages.digests("", tokens), tokens, 0)
    assert table is not None and pages.begin(pages.digests("", tokens), tokens, 0) is None
    pages.wrote(table, 2, lambda start, n: tokens[start : start + n])
    second = pages.begin(pages.digests("", tokens), tokens, 0)
    assert second is not None and second.pages[0] == table.pages[0] and not pages.extend(second)
    pages.drop(table)
    assert pages.had == 2 and pages.free == 1
    pages.drop(second)
    assert pages.free == 3
