"""Prompts of several sequences as passes: everything once, in order, and as few passes as the rows allow."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.spec.format import Format
from penstock.spec.plan import DeviceRows
from tests.plans import resident_plan
from tests.pure.machine import model

PLAN = resident_plan(model(), Format("float32"), chunk_rows=8)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 16), st.integers(1, 4),
    st.sampled_from([None, passes.DECODE]), st.data(),
)  # fmt: skip
def test_every_row_of_every_prompt_comes_once_and_in_order(
    lengths: list[int], chunk_rows: int, batch_seqs: int, then: passes.Stream | None, data: st.DataObject
) -> None:
    plan = replace(PLAN, chunk_rows=chunk_rows, batch_seqs=batch_seqs, batches_per_pass=9)
    starts = data.draw(st.one_of(st.just([]), st.tuples(*(st.integers(0, length - 1) for length in lengths))))
    found = list(passes.prompts(plan, range(len(lengths)), lengths, then, starts))
    done = dict(enumerate(starts or [0] * len(lengths)))
    ended = []
    for i, p in enumerate(found):
        assert len({batch.id for batch in p.batches}) == len(p.batches)
        for batch in p.batches:
            assert 1 <= batch.total_rows <= chunk_rows and len(batch.logits) <= batch_seqs
            for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
                assert seq // batch_seqs == batch.id and start == done[seq]
                done[seq] += rows
            ended += [(i, seq) for seq in passes.ended(batch)]
        assert p.then == (found[i + 1].stream if i + 1 < len(found) else then)
    assert [done[seq] for seq in done] == lengths
    assert sorted(seq for _, seq in ended) == list(done)
    left = [length - start for length, start in zip(lengths, starts or [0] * len(lengths), strict=True)]
    groups = [left[lo : lo + batch_seqs] for lo in range(0, len(lengths), batch_seqs)]
    assert len(found) == max(-(-sum(group) // chunk_rows) for group in groups)


def test_one_prompt_is_cut_as_before() -> None:
    found = list(passes.prefill(PLAN, 3, 20, passes.DECODE))
    assert [(b.seqs, b.start, b.rows, b.logits) for p in found for b in p.batches] == [
        ((3,), (0,), (8,), ()), ((3,), (8,), (8,), ()), ((3,), (16,), (4,), (3,)),
    ]  # fmt: skip


def test_short_passes_that_score_are_those_of_decode_where_a_device_takes_no_rows() -> None:
    """As other prompts: 5 of the chunks' 8 rows are the least that the device takes."""
    plan = replace(PLAN, logits_rows=8, device_rows=(DeviceRows(0, (5,), (0,)),))
    found = list(passes.prefill(plan, 0, 11, passes.DECODE, score=True))
    assert [p.purpose for p in found] == ["prefill", passes.MIXED]
    assert [p.then for p in found] == [found[1].stream, passes.DECODE]
    assert passes.scored(plan, 11) == found[0].stream and passes.scored(plan, 3) == found[1].stream
