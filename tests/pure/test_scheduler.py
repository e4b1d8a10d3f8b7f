"""The scheduler beside a model of what it may do: rows in order, no page twice, nobody waits for ever, and before a row
its pages hold what the request said so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.serve.pages import Copied, Restore, Save
from penstock.serve.pooling import POOLS
from penstock.serve.scheduler import AGING_S, QueueFull, Scheduler
from penstock.spec.plan import DeviceRows
from tests.plans import random_plans
from tests.pure.checked_scheduler import SPEC, WEIGHTS, Checked, plan

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 30), st.integers(-1, 2)),
        st.tuples(
            st.just("submit"),
            st.integers(1, 40),
            st.integers(1, 30),
            st.integers(-1, 2),
            st.integers(0, 9),
            st.sampled_from("ab"),
            st.booleans(),
            st.sampled_from([None, None, *POOLS]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["step", "step", "fail", "lose"]), st.integers(1, 5)),
    ),
    max_size=40,
)


@pytest.mark.fuzz
@given(events=EVENTS, seqs=st.integers(1, 4), batches=st.integers(1, 2), chunk=st.integers(1, 12),
       prompt_rows=st.integers(1, 12), page=st.sampled_from([4, 8, 32]), logits=st.integers(1, 12),
       spare=st.none() | st.integers(0, 20), stores=st.booleans(), swaps=st.booleans(),
       guests=st.booleans())  # fmt: skip
def test_every_request_gets_its_rows_in_order(
    events: list[tuple[object, ...]], seqs: int, batches: int, chunk: int, prompt_rows: int, page: int, logits: int,
    spare: int | None, stores: bool, swaps: bool, guests: bool,
) -> None:  # fmt: skip
    """`spare`: pages beyond those of one context; None: every sequence has its whole context."""
    kv_pages = 0 if spare is None else 64 // page + spare
    made = plan(seqs, batches, chunk, page=page, kv_pages=kv_pages, logits=logits, guests=guests)
    checked = Checked(made, prompt_rows, stores=stores, swaps=swaps)
    for what, *numbers in events:
        if what == "submit":
            checked.submit(*numbers)  # type: ignore[arg-type]
        elif what == "cancel":
            checked.end([numbers[0]])  # type: ignore[list-item]
        else:
            for i in range(numbers[0], 0, -1):  # type: ignore[call-overload]
                checked.step(fails=what == "fail" and i == 1, loses=what == "lose")
    checked.run()
    assert checked.scheduler.free_sequences == seqs * batches


def test_crowds_with_few_pages() -> None:
    """Long random runs, in which pages run out, are shared, come back from a store and are lost."""
    given_back = restored = cached = 0
    for seed in range(60):
        rng = Random(seed)
        page, seqs, batches = rng.choice([4, 8]), rng.randint(1, 6), rng.randint(1, 2)
        made = plan(seqs, batches, rng.randint(1, 32), page=page, kv_pages=64 // page + rng.randint(0, 64 // page))
        checked = Checked(made, rng.randint(1, 16), stores=seed % 2 == 0, swaps=seed % 4 < 2)
        for _ in range(40):
            what = rng.choice(["submit"] * 6 + ["step"] * 6 + ["cancel", "fail", "lose"])
            if what == "submit":
                word, prompt = rng.choice([None, 0, 0, 1, 7]), rng.randint(1, 50)
                priority, owner, scores = rng.randint(-1, 1), rng.choice("aab"), rng.random() < 0.2
                pools = rng.choice([None, None, None, *POOLS])
                checked.submit(prompt, rng.randint(1, 64), priority, word, owner, scores, pools)
            elif what == "cancel" and checked.prompts:
                checked.end([rng.randrange(len(checked.prompts))])
            else:
                for i in range(rng.randint(1, 6)):
                    step = checked.step(fails=what == "fail" and not i, loses=what == "lose")
                    restored += sum(isinstance(move, Restore) for move in step.moves) if step is not None else 0
        checked.run()
        given_back, cached = given_back + checked.scheduler.given_back, cached + checked.cached
    assert given_back > 50 and restored > 20 and cached > 1000


def test_what_gives_way_comes_back_from_the_store() -> None:
    """Three long answers and pages for two of them: without a store they are computed again, with one they are not."""
    computed = {}
    for swaps in (False, True):
        checked = Checked(plan(seqs=3, chunk=64, page=8, kv_pages=13), prompt_rows=64, swaps=swaps)
        for _ in range(3):
            checked.submit(20, 40)
        computed[swaps] = 0
        while (step := checked.step()) is not None:
            computed[swaps] += sum(r.tokens for members in step.rows for r in members if r.reads)
            assert swaps or not any(isinstance(move, Save) for move in step.moves)
        assert checked.scheduler.given_back
    assert computed[False] > 60 and computed[True] <= 60 + 8 * checked.scheduler.given_back


@pytest.mark.fuzz
@given(data=st.data(), events=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=6))
def test_passes_of_prompts_and_answers_stay_within_their_arenas(
    data: st.DataObject, events: list[tuple[int, int]]
) -> None:
    sizes = {"batch_seqs": data.draw(st.integers(1, 3)), "batches_per_pass": data.draw(st.integers(1, 2))}
    made = data.draw(random_plans(SPEC, WEIGHTS, **sizes, chunk_rows=data.draw(st.integers(1, 9)), context=32))
    checked, lowering, tasks = Checked(made, 4), Lowering(made), []
    for prompt, answer in events:
        checked.submit(prompt, answer)
        step = checked.step()
        tasks += list(lowering.step(step.taken)) if step else []
    for _ in range(6):
        step = checked.step()
        tasks += list(lowering.step(step.taken)) if step else []
    verify(tasks, made.arenas, made.units)


def test_a_prompt_is_read_beside_answers_a_few_rows_at_a_time() -> None:
    checked = Checked(plan(seqs=2, chunk=16), prompt_rows=4)
    checked.submit(2, 20)
    first = checked.step()
    assert first is not None and first.taken.purpose == "prefill" and first.taken.batches[0].rows == (2,)
    checked.submit(10, 3)
    rows = []
    for _ in range(4):
        step = checked.step()
        assert step is not None
        rows.append((step.taken.purpose, step.taken.batches[0].rows))
    assert rows == [("mixed", (1, 4)), ("mixed", (1, 4)), ("mixed", (1, 2)), ("decode", (1, 1))]


def test_what_a_pass_foretells_is_what_the_next_one_reads() -> None:
    """While a prompt is left, the next pass is of both, and few rows ask routers as decode does."""
    checked = Checked(plan(seqs=2, chunk=16), prompt_rows=4)
    checked.submit(2, 20)
    checked.step()
    checked.submit(10, 3)
    foretold = passes.DECODE
    for _ in range(6):
        step = checked.step()
        assert step is not None and (step.taken.purpose == "mixed") == any(r.reads for r in step.rows[0])
        assert foretold in (step.taken.stream, passes.DECODE)
        assert step.taken.then is not None
        foretold = step.taken.then
    assert foretold == passes.DECODE


def test_embeddings_read_no_head() -> None:
    """A prompt that is pooled wants no logits, and the pass before its last one says so. Beside an answer the head is
    read. Of the mean nothing is shared, since every row counts."""
    checked = Checked(plan(seqs=2, chunk=8, page=8), prompt_rows=4)
    for pools in POOLS:
        checked.submit(20, 1, word=1, pools=pools)
    streams, foretold = [], None
    while (step := checked.step()) is not None:
        assert not streams or foretold == step.taken.stream
        streams.append(step.taken.stream)
        foretold = step.taken.then
    assert not any(stream.logits for stream in streams) and len(streams) == 5 and foretold is None
    checked.submit(3, 9)
    checked.step()
    cached = checked.cached
    for pools in POOLS:
        checked.submit(20, 1, word=1, pools=pools)
    step = checked.step()
    assert step is not None and step.taken.stream.logits
    checked.run()
    assert checked.cached == cached + 19


def test_of_a_page_that_is_not_whole_the_first_tokens_are_copied() -> None:
    """Of a prompt of 21 tokens in pages of 8, two pages are shared. The five tokens after them are copied, but for the
    last, whose logits each answer wants."""
    checked = Checked(plan(seqs=4, chunk=32, page=8), prompt_rows=32)
    for _ in range(4):
        checked.submit(21, 12, word=21)
    read = []
    while (step := checked.step()) is not None:
        read += [r.tokens for members in step.rows for r in members if r.reads]
    assert read == [21, 1, 1, 1] and checked.copies == 3


def test_alone_a_prompt_fills_the_chunk() -> None:
    checked = Checked(plan(seqs=2, chunk=16), prompt_rows=4)
    checked.submit(40, 1)
    step = checked.step()
    assert step is not None and step.taken.batches[0].rows == (16,) and step.taken.batches[0].logits == ()


def test_priority_counts_and_waiting_counts_too() -> None:
    checked = Checked(plan(seqs=1), prompt_rows=8)
    running = checked.submit(1, 1)
    low, high = checked.submit(1, 1, priority=0), checked.submit(1, 1, priority=1)
    order = []
    for _ in range(3):
        step = checked.step()
        assert step is not None
        order.append(step.rows[0][0].request)
    assert order == [running, high, low] or order == [high, running, low]
    old = checked.submit(1, 1, priority=0)
    checked.now_s += 2 * AGING_S
    new = checked.submit(1, 1, priority=1)
    assert checked.scheduler.place(old, checked.now_s) == 0 and checked.scheduler.place(new, checked.now_s) == 1


def test_a_full_queue_takes_no_more() -> None:
    one = np.ones(1, np.int32)
    scheduler = Scheduler(plan(seqs=1), 8, 1, lambda *_: one[:0])
    scheduler.submit(0, one, 0, 0.0)
    scheduler.submit(1, one, 0, 0.0)
    with pytest.raises(QueueFull, match="1 may"):
        scheduler.submit(2, one, 0, 0.0)
    scheduler.end([1])
    scheduler.submit(2, one, 0, 0.0)


def test_a_chat_goes_on_where_it_was() -> None:
    checked = Checked(plan(seqs=2), prompt_rows=8)
    checked.submit(20, 10, word=0)
    while checked.answers:
        checked.step()
    checked.submit(5, 1)  # takes a page that holds nothing, not that of the chat
    while checked.answers:
        checked.step()
    checked.submit(40, 1, word=0)
    step = checked.step()
    # 29 of 30 tokens went through the model: the answer's last one was never fed back.
    assert step is not None and step.rows[0][0].start == 29
    while checked.answers:
        checked.step()
    checked.submit(40, 1, word=0, owner="another")
    step = checked.step()
    assert step is not None and step.rows[0][0].start == 0


def test_all_but_the_last_token_may_be_there() -> None:
    checked = Checked(plan(seqs=1), prompt_rows=8)
    for start in (0, 7, 7):
        checked.submit(8, 1, word=0)
        step = checked.step()
        assert step is not None and step.rows[0][0].start == start and step.rows[0][0].says


def test_a_long_chat_is_not_given_up_for_a_few_words() -> None:
    checked = Checked(plan(seqs=2), prompt_rows=8)
    checked.submit(30, 1, word=0)
    while checked.answers:
        checked.step()
    checked.submit(9, 1, word=3)  # six words in common
    step = checked.step()
    assert step is not None and step.rows[0][0].start == 6 and isinstance(step.moves[0], Copied)
    while checked.answers:
        checked.step()
    checked.submit(31, 1, word=1)
    step = checked.step()
    assert step is not None and step.rows[0][0].start == 30


def test_whole_pages_are_shared_while_they_are_had() -> None:
    checked = Checked(plan(seqs=4, chunk=64, page=8), prompt_rows=64)
    first = checked.submit(30, 20, word=0)
    checked.step()
    for word in range(2):  # one with the same prompt, one whose last page differs in its last token
        checked.submit(30, 1, word=word)
    step = checked.step()
    assert step is not None
    rows = {r.request: (r.start, r.tokens) for r in step.rows[0]}
    assert rows == {first: (30, 1), 1: (29, 1), 2: (29, 1)}
    pages = {r.request: step.taken.batches[0].pages[i] for i, r in enumerate(step.rows[0])}
    assert pages[first][:3] == pages[1][:3] == pages[2][:3]
    assert len({pages[n][3] for n in range(3)}) == 3
    checked.run()


def test_several_answers_to_a_prompt_read_it_once() -> None:
    checked = Checked(plan(seqs=4, chunk=16, page=8), prompt_rows=16)
    for _ in range(4):
        checked.submit(40, 5, word=0)
    other = checked.submit(40, 5, word=0, owner="another")
    read: Counter[int] = Counter()
    while (step := checked.step()) is not None:
        for r in step.rows[0]:
            read[r.request] += r.tokens * r.reads
    # Of five whole pages four are shared, for the last token is read. The second answer reads the fifth page beside the
    # first one. The others copy it, but for that token.
    assert read == {0: 40, 1: 8, 2: 1, 3: 1, other: 40}


def test_the_least_urgent_gives_its_pages_back_and_goes_on_later() -> None:
    """Two answers grow to 7 and 8 pages of 8 tokens, and there are 11."""
    checked = Checked(plan(seqs=2, chunk=16, page=8, kv_pages=11), prompt_rows=16)
    first, second = checked.submit(8, 48), checked.submit(8, 56)
    ended = []
    while checked.step() is not None:
        ended += [n for n in (first, second) if n not in checked.answers and n not in ended]
    assert ended == [first, second] and checked.scheduler.given_back == 1
    assert [len(checked.ids[n]) for n in (first, second)] == [8 + 48, 8 + 56]


def test_who_does_not_fit_is_not_overtaken() -> None:
    checked = Checked(plan(seqs=4, chunk=64, page=8, kv_pages=9), prompt_rows=64)
    running = checked.submit(30, 10)
    checked.step()
    large, small = checked.submit(40, 1), checked.submit(1, 1)
    order = []
    while (step := checked.step()) is not None:
        order += [r.request for r in step.rows[0] if r.request not in order]
    assert order == [running, large, small]


def test_a_short_request_that_waits_is_foretold_as_it_is_read() -> None:
    """A device takes rows from five on: what is read in shorter passes is the CPU's, so its weights do not stream."""
    made = replace(plan(seqs=1, chunk=16), device_rows=(DeviceRows(0, (5,), (0,)),))
    for waiting, purpose in ((3, passes.MIXED), (9, "prefill")):
        scheduler = Scheduler(made, 16, 10, lambda request, start, count: np.zeros(count, np.int32))
        for request, tokens in enumerate((8, waiting)):
            scheduler.submit(request, np.arange(tokens, dtype=np.int32), 0, 0.0, most=1)
        first = scheduler.next(0.0)
        scheduler.end([0])
        second = scheduler.next(0.0)
        assert first is not None and second is not None and second.taken.purpose == purpose
        assert first.taken.then == second.taken.stream
