"""`LLM` and `AsyncLLM` as people write them: texts and ids, chats, streams, several answers, memory given back."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock import LLM, AsyncLLM, SamplingParams
from penstock.errors import BadRequest
from penstock.serve.shapes import MODEL
from tests.cpu.commands import ROOT
from tests.cpu.engines import make_model
from tools.wheel.sample import examples, program

BRIEF = SamplingParams(max_tokens=6, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, n=3)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ASKED = [{"role": "user", "content": "who?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("python"), "llama", "float32")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path, cache: Path) -> Iterator[LLM]:
    with LLM(folder, cache=cache, batch=2, context=128, verify=False) as llm:
        yield llm


def test_ids_are_a_prompt_too(llm: LLM) -> None:
    (text,) = llm.generate("hello", BRIEF)
    assert text.prompt == "hello" and text.ttft_s > 0 and text.decode_tokens_per_s > 0
    (ids,) = llm.generate(text.prompt_token_ids, BRIEF)
    assert (ids.prompt, ids.token_ids, ids.text) == (None, text.token_ids, text.text)
    mixed = llm.generate([text.prompt_token_ids, "world"], BRIEF)
    assert mixed[0].token_ids == text.token_ids and mixed[1].prompt == "world"


def test_n_answers_are_those_of_n_requests(llm: LLM) -> None:
    (found,) = llm.generate("hello", DRAWN)
    alone = [llm.generate("hello", DRAWN.nth(i))[0].token_ids for i in range(DRAWN.n)]
    assert [each.token_ids for each in found.outputs] == alone and len({*map(tuple, alone)}) > 1
    assert [each.index for each in found.outputs] == [0, 1, 2]


def test_streams_and_chats_say_what_whole_answers_do(llm: LLM) -> None:
    (whole,) = llm.generate("hello", BRIEF)
    assert "".join(llm.stream("hello", BRIEF)) == whole.text
    (turn,) = llm.chat(ASKED, BRIEF)
    rendered = llm.engine.tokenizer.encode("<user>who?<assistant>", add_special=False)
    assert turn.prompt_token_ids == rendered
    assert "".join(llm.stream_chat(ASKED, BRIEF)) == turn.text
    assert [each.text for each in llm.chat([ASKED, ASKED], BRIEF)] == [turn.text] * 2


def test_a_stream_that_is_left_ends_and_others_go_on_beside_it(llm: LLM) -> None:
    (whole,) = llm.generate("hello", BRIEF)
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.generate("hello", BRIEF)[0].text == whole.text
    stream.close()  # type: ignore[attr-defined]
    assert llm.service().idle(30)


def test_a_model_tells_what_it_is(llm: LLM) -> None:
    assert f"{llm!r}".startswith("<LLM ") and "context 128, batch 2, " in f"{llm!r}"


def test_exact_and_threads(tmp_path: Path, cache: Path) -> None:
    """As the command line has them: exact rounds no activations, and threads change nothing."""
    folder, scores = make_model(tmp_path, "llama", "int4"), []
    for exact, threads in ((False, None), (False, 1), (True, 1)):
        with LLM(folder, cache=cache, context=64, kv="float32", exact=exact, threads=threads) as llm:
            scores.append(llm.score("hello there").logprobs)
    assert scores[0] == scores[1] != scores[2]
    with pytest.raises(BadRequest, match="threads is 0"):
        LLM(folder, cache=cache, threads=0)


def test_what_is_wrong_is_told(llm: LLM) -> None:
    for wrong in ("who?", [], [{}], [[]], [{"role": 3}], None):
        with pytest.raises(TypeError, match="messages should be"):
            llm.chat(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="a stream is one answer: n is 3"):
        llm.stream("hello", DRAWN)
    for n in (0, 1000):
        with pytest.raises(BadRequest, match="n is"):
            SamplingParams(n=n)
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        llm.generate([1 << 40])


def test_garbage_gives_memory_back(folder: Path, cache: Path) -> None:
    llm = LLM(folder, cache=cache, context=64, verify=False)
    llm.generate("hello", BRIEF)
    session, left = llm.engine.session, weakref.ref(llm)
    del llm
    gc.collect()
    assert left() is None
    with pytest.raises(BadRequest, match="closed"):
        session.drain() or session.step(None, [])  # type: ignore[arg-type,func-returns-value]


def test_garbage_in_the_middle_of_a_pass(folder: Path, cache: Path) -> None:
    """A stream that nobody reads is garbage with its model, and the collector comes in the service's own thread, which
    cannot wait for the end of the pass that it runs."""
    llm = LLM(folder, cache=cache, context=128, verify=False)
    holder: list[object] = [llm, llm.stream("hello", SamplingParams(max_tokens=120, ignore_eos=True))]
    holder.append(holder)
    next(holder[1])  # type: ignore[call-overload]
    service, session, left = llm.service(), llm.engine.session, weakref.ref(llm)
    dropped, collected = threading.Event(), threading.Event()
    (thread,) = (each for each in threading.enumerate() if each.name == "penstock-serve")

    def collect(*_: object) -> None:
        if dropped.is_set():
            gc.collect()
            collected.set()

    gc.disable()
    try:
        session.watchers.append(collect)
        del llm, holder
        dropped.set()
        assert collected.wait(60), "the thread waits for itself"
    finally:
        gc.enable()
    assert left() is None and service.idle(60)
    thread.join(60)
    with pytest.raises(BadRequest, match="closed"):
        session.step(None, [])  # type: ignore[arg-type]


def test_a_closed_model_says_so_and_starts_no_processes(folder: Path, cache: Path) -> None:
    llm = LLM(folder, cache=cache, context=64, verify=False)
    llm.generate("hello", BRIEF)
    engine, held = llm.engine, SamplingParams(json_schema={"enum": ["a", "b"]})
    llm.close()
    before = child_processes()
    asks: list[Callable[[], object]] = [
        lambda: llm.generate("hello", BRIEF), lambda: llm.generate([1, 2], BRIEF), lambda: llm.generate([1, 2], held),
        lambda: list(llm.stream("hello", BRIEF)), lambda: llm.chat(ASKED, BRIEF), lambda: llm.embed("hello"),
        lambda: llm.score("hello"), lambda: llm.score([1, 2]), lambda: engine.generate_ids([1, 2], held),
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(BadRequest, match="this model was closed: load it again"):
            ask()
    assert child_processes() == before


def child_processes() -> set[int]:
    """Numbers of the processes that this one has started."""
    children = (file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    return {int(number) for each in children for number in each.split()}


def test_tasks_share_a_model(llm: LLM) -> None:
    whole, turn = llm.generate("hello", BRIEF)[0].text, llm.chat(ASKED, BRIEF)[0].text

    async def work() -> None:
        both = AsyncLLM(llm)
        (one,), (two,), (three,) = await asyncio.gather(
            both.generate("hello", BRIEF), both.chat(ASKED, BRIEF), both.generate("hello", DRAWN)
        )
        assert (one.text, two.text) == (whole, turn)
        assert [each.token_ids for each in three.outputs] == [
            each.token_ids for each in llm.generate("hello", DRAWN)[0].outputs
        ]
        assert "".join([piece async for piece in both.stream("hello", BRIEF)]) == whole
        assert "".join([piece async for piece in both.stream_chat(ASKED, BRIEF)]) == turn
        answers, score = await asyncio.gather(both.generate("hello", BRIEF), both.score("hello world", 2))
        assert answers[0].text == whole and score == llm.score("hello world", 2)
        with pytest.raises(BadRequest, match="outside the vocabulary"):
            await both.generate(["hello", [1 << 40]], BRIEF)
        task = asyncio.ensure_future(both.generate("hello", SamplingParams(max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(llm.service().idle, 30)

    asyncio.run(work())


def test_every_example_of_the_page_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.llm.default_cache", lambda: cache)
    monkeypatch.setattr("penstock.serve.planning.default_cache", lambda: cache)
    names: dict[str, object] = {"MODEL": MODEL}
    for block in examples():
        exec(compile(block, "docs/PYTHON.md", "exec"), names)


def test_the_types_of_every_example_are_right(tmp_path: Path) -> None:
    written = tmp_path / "program.py"
    written.write_text(program("m"))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", written], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stdout


def test_public_names_are_there() -> None:
    assert all(getattr(penstock, name) for name in penstock.__all__)
