"""KV pages in any order: which tables are right, what they cost to lower, and which pages prompts find again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.pages import check_tables
from penstock.graph.tasks import Pass
from penstock.graph.verify import verify
from penstock.serve.pages import Ids, Pages
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.plans import make_plan, page_orders, random_plans, resident_plan, with_pages
from tests.pure.machine import model
from tests.pure.written_pages import WrittenPages, verify_pages

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


def row_bytes(layout: Layout, made: Plan, page: int, rows: Iterable[int]) -> set[int]:
    """Where K (or V) of some rows of a page lies in layer 0, byte by byte, as spec/format.py says."""
    attention, fmt = SPEC.layers[0].attention, made.kv[0].format
    codes, groups = fmt.kv_codes_bytes(attention.head_dim), fmt.groups(attention.head_dim) if fmt.is_quantised else 0
    positions, found = made.page_tokens, set[int]()
    for head in range(attention.kv_heads):
        lo = page * layout.kv.page_bytes(0, made.kv[0]) + head * positions * fmt.kv_bytes(attention.head_dim)
        for row in rows:
            found.update(range(lo + row * codes, lo + (row + 1) * codes))
            for group in range(2 * groups):  # scales, then minimums
                place = lo + positions * codes + 2 * (group * positions + row)
                found.update((place, place + 1))
    return found


@given(st.sampled_from(("float32", "float16", "int8", "int4")), st.booleans(), st.booleans(), st.data())
def test_a_save_holds_all_bytes_of_its_rows_and_little_else(
    kv: str, disk: bool, tables: bool, data: st.DataObject
) -> None:  # fmt: skip
    base = resident_plan(SPEC, WEIGHTS, batch_seqs=2, context=256)
    home = replace(base.kv[0], format=parse_format(kv), home="disk0" if disk else "gpu0")
    made = with_arenas(replace(base, kv=(home,)))
    layout = Layout(made)
    starts = data.draw(st.tuples(*[st.integers(0, 199)] * 2))
    rows = data.draw(st.tuples(*[st.integers(1, 56)] * 2))
    each = layout.kv.pages_per_seq
    pages = tuple(tuple(range(seq * each, -(-(starts[seq] + rows[seq]) // 64) + seq * each)) for seq in range(2))
    batch = Batch(0, (0, 1), starts, rows, (), (), pages if tables else ())
    spans = layout.kv.spans(0, batch, save=True)
    wanted = set[int]()
    for seq in range(2):
        for position in range(starts[seq], starts[seq] + rows[seq]):
            wanted |= row_bytes(layout, made, seq * each + position // 64, (position % 64,))
    covered = {byte for lo, hi in spans for byte in range(lo, hi)}
    assert wanted <= covered
    block = 4096 if disk else 1
    edges = {edge for span in spans for edge in span}
    assert all(edge % block == 0 for edge in edges)
    for lo, hi in spans:  # a range begins and ends with a row's bytes, but for the disk's blocks
        assert any(byte in wanted for byte in range(lo, lo + block))
        assert any(byte in wanted for byte in range(hi - block, hi))
    assert layout.kv.moved(0, batch, save=True) == (sum(hi - lo for lo, hi in spans), len(spans))


def test_what_kv_moves_is_counted_page_by_page() -> None:
    units = resident_plan(SPEC, WEIGHTS).units
    made = make_plan(SPEC, WEIGHTS, list(units), ring_bytes={}, batch_seqs=2, context=256, kv_spilled=frozenset({0}))
    layout = Layout(made)
    assert layout.kv.page_group == 1
    page_bytes = layout.kv.page_bytes(0, made.kv[0])
    batch = Batch(0, (0, 1), (130, 64), (2, 1), (), (), ((7, 2, 3), (7, 5)))
    assert layout.kv.spans(0, batch, save=False) == [(2 * page_bytes, 4 * page_bytes), (7 * page_bytes, 8 * page_bytes)]
    # Sequence 0 adds rows 2 and 3 of page 3, sequence 1 row 0 of page 5. What comes before the first head's rows and
    # after the last head's stays as it is.
    blocks = {row // 4096 for page, rows in ((3, (2, 3)), (5, (0,))) for row in row_bytes(layout, made, page, rows)}
    saved = layout.kv.spans(0, batch, save=True)
    assert {block for lo, hi in saved for block in range(lo // 4096, hi // 4096)} >= blocks
    assert not any(edge % 4096 for span in saved for edge in span)
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
    assert (pages.kept, pages.had) == (4, 0)
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
    assert pages.had == 2 and pages.kept == 0
    pages.drop(second)
    assert pages.had == pages.kept == 0
