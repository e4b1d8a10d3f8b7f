"""Passes of a server with its model in memory: few shapes, each lowered once, and the same tasks as if lowered anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.passes import DECODE
from penstock.graph.repeats import shape_of
from penstock.graph.tasks import Call, Pass, Slot, Task
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler
from penstock.spec.plan import Plan
from tests.pure.checked_scheduler import plan

REQUESTS = 200


def server_passes(made: Plan, prompt_rows: int, arrivals: float) -> Iterator[Pass]:
    """Of 200 requests with prompts of 1 to 600 tokens and answers of 1 to 60; `arrivals`: so many a pass."""
    random, said = Random(1), Counter[int]()
    prompts = [np.full(random.randint(1, 600), i, np.int32) for i in range(REQUESTS)]
    tokens = [random.randint(1, 60) for _ in range(REQUESTS)]

    def ids(request: int, start: int, count: int) -> Ids:
        return np.full(count, request, np.int32)

    scheduler, came, now_s, over = Scheduler(made, prompt_rows, REQUESTS, ids), 0, 0.0, 0
    while over < REQUESTS:
        while came < REQUESTS and random.random() < arrivals:
            scheduler.submit(came, prompts[came], 0, now_s)
            came += 1
        now_s += 1
        if (step := scheduler.next(now_s)) is None:
            continue
        yield step.taken
        ended = []
        for each in (each for rows in step.rows for each in rows):
            said[each.request] += each.says
            ended += [each.request] if each.says and said[each.request] == tokens[each.request] else []
        scheduler.end(ended)
        over += len(ended)


# They are 220, 85 and 263. Before shapes forgot which sequence has which rows: 330, 388 and 422.
@pytest.mark.parametrize(
    ("seqs", "prompt_rows", "most"), [(8, 256, 230), (8, 64, 95), (32, 128, 275)], ids=["fast", "many", "32"]
)
def test_so_many_passes_are_lowered(seqs: int, prompt_rows: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(seqs=seqs, chunk=512, context=1024, page=256)
    lowering, lowered, count = Lowering(made), list[Pass](), 0
    lower = lowering._lower
    monkeypatch.setattr(lowering, "_lower", lambda p, answer: [lowered.append(p), lower(p, answer)][1])
    for p in server_passes(made, prompt_rows, 0.2):
        tasks, count = list(lowering.step(p)), count + 1
        if count % 20 == 0:  # whether it was lowered or found
            assert [alike(task) for task in tasks] == [alike(task) for task in Lowering(made).step(p)]
    assert len(lowered) <= most and count > 700


@pytest.mark.parametrize(("seqs", "prompt_rows"), [(8, 256), (8, 64), (32, 128)], ids=["fast", "many", "32"])
def test_by_batches_each_form_is_lowered_once(
    seqs: int, prompt_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Numbers of rows, of logits and of sequences are data then: four forms in all."""
    made = plan(seqs=seqs, chunk=512, context=1024, page=256)
    lowering, lowered, shapes = Lowering(made), list[Pass](), set[object]()
    lower = lowering._lower
    monkeypatch.setattr(lowering, "_lower", lambda p, answer: [lowered.append(p), lower(p, answer)][1])
    first: dict[int, Task] = {}
    for p in server_passes(made, prompt_rows, 0.2):
        shapes.add(shape_of(p))
        for task in lowering.step(p, by_batches=True):
            if task.like < 0:
                first[task.id] = task
                continue
            assert task.batches == p.batches
            known, anew = first[task.like], next(iter(Lowering(made).step(p))) if task.id % 50 == 0 else None
            assert task.calls is known.calls
            if anew is not None:  # the same ops on the same weights, where rows begin
                assert [places(call) for call in anew.calls] == [places(call) for call in known.calls]
    assert len(lowered) <= 4 and len(shapes) > 50


def places(call: Call) -> object:
    """An op, its settings, and where its operands begin."""
    assert call.batch is not None
    return call.op, call.unit, call.format, call.batch.id, [begins(operand) for operand in call.operands]


def begins(operand: object) -> object:
    if isinstance(operand, Slot):
        return operand.arena, operand.lo
    return tuple(map(begins, operand)) if isinstance(operand, tuple) else operand


def alike(task: Task) -> tuple[object, ...]:
    """All of a task but for ids and whom it waits for."""
    return (task.lanes, list(task.calls), task.reads, task.writes, task.bytes, task.flops)


def test_what_is_data_and_what_is_not() -> None:
    def shape(*rows: int, logits: tuple[int, ...] = (0,), pages: bool = True, start: int = 0) -> object:
        seqs = tuple(range(len(rows)))
        tables = tuple((i,) for i in seqs) if pages else ()
        return shape_of(Pass("mixed", (Batch(0, seqs, (start,) * len(rows), rows, logits, (), tables),), DECODE))

    assert shape(1, 5, 2) == shape(2, 1, 5) == shape(3, 4, 1, logits=(7,), start=9)
    assert len({shape(1, 5), shape(1, 5, logits=(0, 1)), shape(1, 6), shape(1, 1, 4)}) == 4
    assert shape(1, 5, pages=False) != shape(5, 1, pages=False)  # their cache lies elsewhere


def test_the_shape_seen_longest_ago_is_forgotten() -> None:
    made = plan(seqs=32, chunk=64)
    lowering, known = Lowering(made), []

    def decode(n: int) -> Pass:
        tables = tuple((i,) for i in range(n))
        return Pass("decode", (Batch(0, tuple(range(n)), (3,) * n, (1,) * n, tuple(range(n)), (), tables),), DECODE)

    for n in range(1, 33):
        for p in (decode(1), decode(n)):  # one comes again and again
            known.append(lowering._repeats.find(p, by_batches=False) is not None)
            list(lowering.step(p))
    assert all(known[2::2]) and not any(known[3::2])
    assert len(lowering._repeats._known) == 16
