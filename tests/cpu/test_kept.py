"""Prompts that go on from what earlier ones left: the same answers as without, whatever came between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageFailed
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass, Task
from penstock.serve.engine import Engine
from penstock.serve.kept import Held, common
from penstock.serve.sampling import SamplingParams
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from tests.cpu.engines import load, make_model, streaming
from tests.plans import resident_plan

CONTEXT = 48
SIZES = {"batch_seqs": 2, "chunk_rows": 8, "logits_rows": 8, "context": CONTEXT}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


def plans(folder: Path) -> dict[str, Plan]:
    packed = open_packed(folder)
    return {
        "resident": resident_plan(packed.spec, packed.weights, **SIZES),
        "streaming": streaming(packed, **SIZES),  # type: ignore[arg-type]
    }


def streamed(engine: Engine, ids: list[int]) -> list[int]:
    for _ in engine.stream(ids, PARAMS):
        pass
    assert engine.last is not None
    return engine.last.token_ids


# A prompt is so many tokens of one of two texts. Between prompts others are answered, or scored, or a stream is left.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["stream", "stream", "leave", "generate", "score"]), st.integers(0, 1),
              st.integers(1, CONTEXT - 4)),
    min_size=2, max_size=8,
)  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ["resident", "streaming"])
def test_whatever_came_before_the_answer_is_the_same(folder: Path, name: str) -> None:
    rng = np.random.default_rng(4)
    with load(folder, plan=plans(folder)[name]) as engine:
        texts = [rng.integers(0, engine.plan.target.spec.vocab, CONTEXT).tolist() for _ in range(2)]
        alone = {
            (which, n): engine.generate([texts[which][:n]], PARAMS)[0].token_ids
            for which in range(2)
            for n in range(1, CONTEXT - 3)
        }

        @settings(deadline=None, max_examples=settings().max_examples // 4)
        @given(events=EVENTS)
        def check(events: list[tuple[str, int, int]]) -> None:
            for what, which, n in events:
                ids = texts[which][:n]
                if what == "stream":
                    held = engine.holds(ids)
                    assert streamed(engine, ids) == alone[which, n]
                    assert engine.last is not None and engine.last.cached_tokens == held < n
                elif what == "leave":
                    next(engine.stream(ids, PARAMS), None)  # three tokens may end before any text is certain
                elif what == "generate":
                    engine.generate([ids, texts[1 - which][:n]], PARAMS)
                else:
                    list(engine.score(ids))

        check()


@pytest.mark.fuzz
def test_weights_that_stay_in_a_sequences_free_pages_change_nothing(folder: Path) -> None:
    """One sequence of 4 pages grows, ends and begins anew. Weights come into the pages that it has not reached."""
    sizes: dict[str, Any] = {"chunk_rows": 32, "logits_rows": 32, "context": 256}
    packed = open_packed(folder)
    plan = with_arenas(replace(streaming(packed, **sizes), guests=True))
    rooms = Layout(plan).guests
    assert len({room.first_page for room in rooms.values()}) > 2
    rng = np.random.default_rng(6)
    texts = [rng.integers(0, packed.spec.vocab, 256).tolist() for _ in range(2)]
    known: dict[tuple[int, int], list[int]] = {}
    with load(folder, plan=plan) as engine, load(folder, plan=resident_plan(packed.spec, packed.weights, **sizes)) as r:

        def alone(which: int, n: int) -> list[int]:
            if (which, n) not in known:
                known[which, n] = r.generate([texts[which][:n]], PARAMS)[0].token_ids
            return known[which, n]

        @settings(deadline=None, max_examples=settings().max_examples // 4)
        @given(
            st.lists(
                st.tuples(st.sampled_from(["stream", "stream", "leave", "generate", "score"]), st.integers(0, 1),
                          st.sampled_from([1, 40, 61, 62, 63, 64, 65, 127, 128, 200, 253])),
                min_size=2, max_size=8,
            )
        )  # fmt: skip
        def check(events: list[tuple[str, int, int]]) -> None:
            for what, which, n in events:
                ids = texts[which][:n]
                if what == "stream":
                    assert streamed(engine, ids) == alone(which, n)
                elif what == "leave":
                    next(engine.stream(ids, PARAMS), None)
                elif what == "generate":
                    answers = engine.generate([ids, texts[1 - which][:n]], PARAMS)
                    assert [each.token_ids for each in answers] == [alone(which, n), alone(1 - which, n)]
                else:
                    list(engine.score(ids))

        check()
        streamed(engine, texts[0][:40])
        few = engine.session.consumed_bytes
        streamed(engine, texts[0][:253])
        assert few < engine.session.consumed_bytes  # the longest one leaves no page


def test_a_chats_next_turn_reads_what_is_new(folder: Path) -> None:
    with load(folder, plan=plans(folder)["resident"]) as engine:
        first = [5, 6, 7, 8]
        answer = streamed(engine, first)
        assert engine.holds([*first, *answer, 9]) == 6  # the answer's last token never went through the model
        streamed(engine, [*first, *answer, 9])
        assert engine.last is not None and engine.last.cached_tokens == 6
        assert engine.holds([5, 7]) == 1 and engine.holds([4]) == 0


@pytest.mark.parametrize("name", ["resident", "streaming"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_ctrl_c_in_a_pass_leaves_what_was_there_before(
    folder: Path, name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the third of three chunks, after some of its tasks."""
    ids = list(range(20))
    with load(folder, plan=plans(folder)[name]) as engine:
        expected, session = engine.generate([ids], PARAMS)[0].token_ids, engine.session
        engine.session.held.forget()
        counted, passes = session._counted, list[Pass]()

        def broken(p: Pass) -> Iterator[Task]:
            passes.append(p)
            for i, task in enumerate(counted(p)):
                if len(passes) == 3 and i == after:
                    raise KeyboardInterrupt
                yield task
            if len(passes) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(session, "_counted", broken)
        with pytest.raises(KeyboardInterrupt):
            streamed(engine, ids)
        monkeypatch.undo()
        assert engine.holds(ids) == 16
        assert streamed(engine, ids) == expected and engine.last is not None and engine.last.cached_tokens == 16


def test_what_a_failed_pass_leaves_is_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(folder, plan=plans(folder)["streaming"]) as engine:
        streamed(engine, [5, 6, 7])
        assert engine.holds([5, 6, 7, 8]) == 3

        def fails(*_: object) -> None:
            raise StorageFailed("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine.session._executor, "run", fails)
            with pytest.raises(StorageFailed):
                streamed(engine, [5, 6, 9])
        assert engine.holds([5, 6, 7, 8]) == 0


SPANS = st.dictionaries(st.integers(0, 2), st.tuples(st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=3)


@given(spans_of_passes=st.lists(SPANS, min_size=1, max_size=6), rng=st.randoms(use_true_random=False))
def test_held_is_what_passes_wrote(spans_of_passes: list[dict[int, tuple[int, int]]], rng: Random) -> None:
    """Beside a model that knows every position, also those beyond a gap."""
    held, written = Held(), [dict[int, int]() for _ in range(3)]
    for spans in spans_of_passes:
        seqs = tuple(sorted(spans))
        start, rows = zip(*(spans[seq] for seq in seqs), strict=True)
        ids = [rng.randrange(4) for _ in range(sum(rows))]
        held.note(Pass("prefill", (Batch(0, seqs, start, rows, ()),), None), [np.array(ids, np.int32)])
        for seq in seqs:
            first, count = spans[seq]
            # What lies behind new rows was computed from what they replace.
            written[seq] = {at: token for at, token in written[seq].items() if at < first}
            written[seq] |= {first + i: ids.pop(0) for i in range(count)}
        for seq in range(3):
            known = held.of(seq).tolist()
            assert known == [written[seq][at] for at in range(len(known))] and len(known) not in written[seq]


def test_common() -> None:
    def n(prompt: list[int], held: list[int]) -> int:
        return common(np.array(prompt, np.int32), np.array(held, np.int32))

    assert n([1, 2, 3], [1, 2, 3, 4]) == 2 and n([1, 2, 3], [1, 2]) == 2 and n([1], [1]) == 0
    assert n([1, 2, 3], []) == 0 and n([1, 2, 3], [2, 2]) == 0 and n([1, 2, 3, 4], [1, 9, 3]) == 1
