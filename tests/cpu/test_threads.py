"""One loaded model under several threads and open streams: every answer is right, or a clear error."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.errors import BadRequest, BrokenModel
from penstock.serve.confined import Child
from penstock.serve.engine import Engine
from penstock.serve.sampling import SamplingParams
from penstock.serve.turns import Turns
from tests.cpu.commands import machine_cache
from tests.cpu.engines import GREEDY, load, make_model

PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(10)]
LONG_S = 600.0  # nothing here takes a second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("threads"), "llama", "float32")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with load(folder, context=128) as engine:
        return [engine.generate_ids(ids, GREEDY) for ids in PROMPTS]


@pytest.fixture(params=[None, 0], ids=["in memory", "streamed"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(folder, context=128, resident_bytes=request.param) as engine:
        yield engine


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(LONG_S)


def test_calls_from_threads_are_answered_as_alone(engine: Engine, expected: list[list[int]]) -> None:
    def stream(ids: list[int]) -> list[int]:
        for _ in engine.stream(ids, GREEDY):
            pass
        return []

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, ids) for ids in PROMPTS]
        calls = [pool.submit(engine.generate_ids, ids, GREEDY) for ids in PROMPTS + PROMPTS]
        assert [each.result(LONG_S) for each in calls] == expected + expected
        for each in streams:
            each.result(LONG_S)


def test_an_open_stream_refuses_its_own_thread(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.stream(PROMPTS[1], GREEDY)
    next(stream)
    for ask in (
        lambda: engine.generate_ids(PROMPTS[0], GREEDY),
        lambda: next(engine.stream(PROMPTS[0], GREEDY)),
        lambda: next(engine.score(PROMPTS[0])),
    ):
        with pytest.raises(BadRequest, match="this thread has begun"):
            ask()
    for _ in stream:
        pass
    assert engine.last is not None and engine.last.token_ids == expected[1]
    assert engine.generate_ids(PROMPTS[0], GREEDY) == expected[0]


@pytest.mark.parametrize("end", ["close", "collect"])
def test_an_abandoned_stream_frees_the_model(engine: Engine, expected: list[list[int]], end: str) -> None:
    stream = engine.stream(PROMPTS[1], GREEDY)
    next(stream)
    if end == "close":
        stream.close()  # type: ignore[attr-defined]
    else:
        del stream
        gc.collect()
    assert engine.generate_ids(PROMPTS[2], GREEDY) == expected[2]
    assert in_another_thread(lambda: engine.generate_ids(PROMPTS[3], GREEDY)) == expected[3]


def test_other_threads_wait_for_a_stream(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.stream(PROMPTS[1], GREEDY)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate_ids, PROMPTS[0], GREEDY)
        for _ in stream:
            assert not waiting.done()
        assert engine.last is not None and engine.last.token_ids == expected[1]
        assert waiting.result(LONG_S) == expected[0]


def test_a_stream_may_change_threads(engine: Engine, expected: list[list[int]]) -> None:
    stream = engine.stream(PROMPTS[1], GREEDY)
    next(stream)
    assert in_another_thread(lambda: [*stream]) is not None
    assert engine.last is not None and engine.last.token_ids == expected[1]
    assert engine.generate_ids(PROMPTS[0], GREEDY) == expected[0]


def test_closing_ends_what_other_threads_do(folder: Path) -> None:
    with load(folder, context=128) as engine:
        stream = engine.stream(PROMPTS[1], GREEDY)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engine.generate_ids, PROMPTS[0], GREEDY)
            engine.close()
            with pytest.raises(BadRequest, match="closed"):
                list(stream)
            with pytest.raises(BadRequest, match="closed"):
                waiting.result(LONG_S)


def test_closing_while_another_thread_computes(folder: Path) -> None:
    for _ in range(10):
        with load(folder, context=128, resident_bytes=0) as engine, ThreadPoolExecutor(1) as pool:
            begun = threading.Event()
            engine.session.watchers.append(lambda *_, begun=begun: begun.set())
            answer = pool.submit(engine.generate_ids, PROMPTS[9], GREEDY)
            assert begun.wait(LONG_S)
            engine.close()
            error = answer.exception(LONG_S)  # none where it had just ended
            assert error is None or (isinstance(error, BadRequest) and "closed" in error.message)


def test_a_tokenizer_is_closed_in_the_middle_of_a_request_of_the_same_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As garbage collection may do it, whose thread could not wait for itself."""
    tokenizer, exchange = engine.tokenizer, Child.exchange

    def collected(this: Child, request: list[Any]) -> tuple[dict[str, Any], float]:
        monkeypatch.setattr(Child, "exchange", exchange)
        tokenizer.close()
        return exchange(this, request)

    monkeypatch.setattr(Child, "exchange", collected)
    with pytest.raises((BrokenModel, OSError)):
        in_another_thread(lambda: tokenizer.encode("hello"))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"  # another request starts another process


def test_a_turn_ends_with_an_error_inside(engine: Engine, expected: list[list[int]]) -> None:
    with pytest.raises(BadRequest, match="vocabulary"):
        engine.generate_ids([10**6], GREEDY)
    assert engine.generate_ids(PROMPTS[0], GREEDY) == expected[0]


def test_turns_exclude_each_other() -> None:
    turns, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with turns.turn():
                inside += 1
                most = max(most, inside)
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(work) for _ in range(8)]:
            each.result(LONG_S)
    assert most == 1


def test_llm_answers_threads_together_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """More prompts than sequences, from several threads. An LLM that nobody closes is collected with its memory."""
    machine_cache(tmp_path)

    def scenario() -> weakref.ref[Engine]:
        llm = LLM(folder, cache=tmp_path, batch=3, context=64)
        texts = [f"{i} times" for i in range(8)]
        params = SamplingParams(max_tokens=7, ignore_eos=True)
        alone = [llm.generate(text, params)[0].text for text in texts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda k: llm.generate([texts[k], texts[k - 1]], params), range(8)))
        assert [[a.text for a in answers] for answers in found] == [[alone[k], alone[k - 1]] for k in range(8)]
        return weakref.ref(llm.engine)

    engine = scenario()
    for thread in threading.enumerate():
        if thread.name == "penstock-serve":
            thread.join(LONG_S)  # it ends by itself where nothing is left to do
    gc.collect()
    assert engine() is None
