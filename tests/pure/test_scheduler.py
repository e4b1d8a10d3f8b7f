"""The scheduler beside a model of what it may do: rows in order, no sequence twice, nobody waits for ever, and before a
row its sequence holds what the request said so far."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.serve.kept import Ids
from penstock.serve.scheduler import AGING_S, QueueFull, Scheduler, Step
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.plans import random_plans, resident_plan
from tests.pure.machine import model

SPEC, WEIGHTS = model(layers=2), parse_format("float32")


def plan(seqs: int = 4, batches: int = 1, chunk: int = 8, context: int = 64, logits: int = 1) -> Plan:
    rows = {"chunk_rows": chunk, "logits_rows": max(seqs, logits), "context": context}
    return resident_plan(SPEC, WEIGHTS, batch_seqs=seqs, batches_per_pass=batches, **rows)


class Checked:
    """A scheduler, and what its requests have had so far."""

    def __init__(self, made: Plan, prompt_rows: int, queue: int = 1000) -> None:
        self.plan, self.scheduler = made, Scheduler(made, prompt_rows, queue, self.of)
        self.prompt_rows = prompt_rows
        self.prompts: dict[int, int] = {}
        self.ids: dict[int, list[int]] = {}  # of prompt and answer
        self.owners: dict[int, str] = {}
        # What each sequence holds at each position, and whose it is.
        self.held: dict[int, list[tuple[int, str]]] = {s: [] for s in range(made.batch_seqs * made.batches_per_pass)}
        self.cached = 0
        self.answers: dict[int, int] = {}  # tokens that are still to come
        self.scored: set[int] = set()  # requests that want logits of every token of the prompt
        self.had: Counter[int] = Counter()  # tokens of prompt and answer that went through the model
        self.seqs: dict[int, int] = {}
        self.now_s = 0.0

    def submit(
        self,
        prompt: int,
        answer: int,
        priority: int = 0,
        word: int | None = None,
        owner: str = "",
        scores: bool = False,
    ) -> int:
        """A prompt of so many tokens, that begins like others with the same `word`; all say 0 as an answer."""
        number = len(self.prompts)
        ids = [number + 100] * prompt if word is None else [*[0] * (prompt - word % prompt), *[word] * (word % prompt)]
        self.scheduler.submit(number, np.array(ids, np.int32), priority, self.now_s, owner, scores)
        self.scored |= {number} if scores else set()
        self.ids[number], self.owners[number] = ids, owner
        self.prompts[number], self.answers[number] = prompt, min(answer, self.plan.context - prompt + 1)
        return number

    def end(self, numbers: list[int], failed: bool = False) -> None:
        self.scheduler.end(numbers)
        for n in numbers:
            self.answers.pop(n, None)
            if (seq := self.seqs.pop(n, None)) is not None and failed:
                self.held[seq] = []

    def of(self, seq: int) -> Ids:
        return np.array([token for token, _ in self.held[seq]], np.int32)

    def step(self) -> Step | None:
        """A pass, every row of which is looked at."""
        step = self.scheduler.next(self.now_s)
        if step is None:
            assert not self.answers
            return None
        self.now_s += 0.1
        rows = [r for members in step.rows for r in members]
        assert len({r.request for r in rows}) == len(rows) == len({r.seq for r in rows})
        speaking = [r for r in rows if not r.reads]
        if speaking:
            assert sum(r.tokens for r in rows if r.reads) <= self.prompt_rows
        for batch, members in zip(step.taken.batches, step.rows, strict=True):
            assert batch.seqs == tuple(r.seq for r in members) == tuple(sorted(batch.seqs))
            assert batch.rows == tuple(r.tokens for r in members)
            assert batch.start == tuple(r.start for r in members)
            assert batch.total_rows <= max(self.plan.chunk_rows, self.plan.batch_seqs)
            first = 0
            wanted: list[int] = []
            for r in members:
                wanted += range(first + r.tokens - r.logits, first + r.tokens)
                first += r.tokens
            assert batch.logits == tuple(wanted) and len(wanted) <= self.plan.logits_rows
            assert {r.seq // self.plan.batch_seqs for r in members} == {batch.id}
        for r in rows:
            assert r.request in self.answers
            assert self.seqs.setdefault(r.request, r.seq) == r.seq
            if r.request not in self.had:
                self.had[r.request] = r.start
                self.cached += r.start
            assert r.start == self.had[r.request] and r.reads == (r.start < self.prompts[r.request])
            mine = [(token, self.owners[r.request]) for token in self.ids[r.request][: r.start + r.tokens]]
            assert self.held[r.seq][: r.start] == mine[: r.start] and len(mine) == r.start + r.tokens
            self.held[r.seq][r.start :] = mine[r.start :]
            self.had[r.request] += r.tokens
            assert self.had[r.request] <= self.plan.context
            assert r.says == (self.had[r.request] >= self.prompts[r.request])
            assert r.logits == (r.tokens if r.reads and r.request in self.scored else r.says)
            assert not (r.request in self.scored and self.had[r.request] == r.tokens and r.start)
            self.answers[r.request] -= r.says
            self.ids[r.request] += [0] * r.says
        # Every answer that has begun goes on in every pass.
        begun = {n for n in self.seqs if self.had[n] > self.prompts[n] or (self.had[n] == self.prompts[n])}
        assert begun & self.answers.keys() <= {r.request for r in rows}
        assert len(set(self.seqs.values())) == len(self.seqs)
        over = [n for n, left in self.answers.items() if left == 0]
        self.end(over)
        return step


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
        ),
        st.tuples(st.sampled_from(["cancel", "fail"]), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 5)),
    ),
    max_size=40,
)


@pytest.mark.fuzz
@given(events=EVENTS, seqs=st.integers(1, 4), batches=st.integers(1, 2), chunk=st.integers(1, 12),
       prompt_rows=st.integers(1, 12), logits=st.integers(1, 12))  # fmt: skip
def test_every_request_gets_its_rows_in_order(
    events: list[tuple[object, ...]], seqs: int, batches: int, chunk: int, prompt_rows: int, logits: int
) -> None:
    checked = Checked(plan(seqs, batches, chunk, logits=logits), prompt_rows)
    for what, *numbers in events:
        if what == "submit":
            checked.submit(*numbers)  # type: ignore[arg-type]
        elif what in ("cancel", "fail"):
            checked.end([numbers[0]], failed=what == "fail")  # type: ignore[list-item]
        else:
            for _ in range(numbers[0]):  # type: ignore[call-overload]
                checked.step()
    most = 3000
    while checked.step() is not None:
        most -= 1
        assert most, "somebody waits for ever"
    assert checked.scheduler.free_sequences == seqs * batches
    assert checked.scheduler.running == checked.scheduler.waiting == 0


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
    assert rows == [("prefill", (1, 4)), ("prefill", (1, 4)), ("prefill", (1, 2)), ("decode", (1, 1))]


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
    scheduler = Scheduler(plan(seqs=1), 8, 1, lambda _: one[:0])
    scheduler.submit(0, one, 0, 0.0)
    scheduler.submit(1, one, 0, 0.0)
    with pytest.raises(QueueFull, match="1 may"):
        scheduler.submit(2, one, 0, 0.0)
    scheduler.end([1])
    scheduler.submit(2, one, 0, 0.0)


def test_a_chat_goes_on_where_it_was() -> None:
    checked = Checked(plan(seqs=2), prompt_rows=8)
    first = checked.submit(20, 10, word=0)
    while checked.answers:
        checked.step()
    other = checked.submit(5, 1)  # takes the empty sequence, not that of the chat
    while checked.answers:
        checked.step()
    checked.submit(40, 1, word=0)
    step = checked.step()
    # 29 of 30 tokens went through the model: the answer's last one was never fed back.
    assert step is not None and step.rows[0][0].start == 29 and step.rows[0][0].seq == 0 and (first, other) == (0, 1)
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
    assert step is not None and (step.rows[0][0].seq, step.rows[0][0].start) == (1, 0)
