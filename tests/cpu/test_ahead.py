"""The first pass of a prompt, begun while the weights that it reads are loaded."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.graph.tasks import Task
from penstock.runtime import first_loads
from penstock.runtime.ahead import Arrived, PassAhead
from penstock.runtime.dispatch import Work
from penstock.runtime.movers import DiskLoad
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.session import Session
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE
from tests.cpu.engines import GREEDY, load, make_model, streaming

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def opened(folder: Path, prompt: tuple[int, ...] = PROMPT, **how: Any) -> Any:
    return closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, prompt=prompt, **how)))


class Apart:
    """One load at a time. Each is waited for when all calls are done that the loads before it allow. `done`: the calls
    that were done before each load."""

    def __init__(self) -> None:
        self.done = list[int]()
        self.ahead: PassAhead | None = None
        self.waits_for = -1  # the number of the call that the pass stands at

    def settle(self, arrived: Arrived) -> None:
        ahead, start_s = self.ahead, time.perf_counter()
        assert ahead is not None
        while ahead.calls_done < len(ahead._tasks) and not ahead._failed:
            if self.waits_for >= 0 and arrived._needed[self.waits_for] > arrived._done:
                break
            time.sleep(1e-4)
            assert time.perf_counter() - start_s < 600, "the pass stands still"
        self.done.append(ahead.calls_done)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Apart:
    """Weights begin as NaN."""
    found = Apart()
    wait, note, begin, loads = Arrived.wait, Arrived.note, PassAhead.__init__, Session._load_weights

    def begun(self: PassAhead, tasks: Iterable[Task], work: Work) -> None:
        found.ahead = self
        begin(self, tasks, work)

    def waiting(self: Arrived, number: int) -> bool:
        found.waits_for = number
        return wait(self, number)

    def noted(self: Arrived, done: int) -> None:
        note(self, done)
        found.settle(self)

    def poisoned(self: Session, *arguments: Any) -> None:
        self._arenas.whole("host.weights")[...] = 0xFF
        loads(self, *arguments)

    monkeypatch.setattr(first_loads, "_LOADS_AHEAD", 0)
    monkeypatch.setattr(PassAhead, "__init__", begun)
    monkeypatch.setattr(Arrived, "wait", waiting)
    monkeypatch.setattr(Arrived, "note", noted)
    monkeypatch.setattr(Session, "_load_weights", poisoned)
    return found


def both(engine: Engine) -> tuple[list[int], bytes, bool]:
    """The ids of an answer, the logits behind its last pass, and whether its prompt was read ahead."""
    answer = engine.generate([PROMPT], GREEDY)[0]
    layout, vocab = engine.session.lowering.layout, engine.packed.spec.vocab
    logits = engine.session._arenas.view(layout.act("host", 0, "logits", 4 * vocab))
    return answer.token_ids, logits.tobytes(), answer.read_ahead


@pytest.mark.parametrize("kernels", [None, "portable", "reference"])
@pytest.mark.parametrize(
    ("name", "weights"),
    [("llama", "int4"), ("qwen3", "bfloat16"), ("gemma2", "int8"), ("opt", "float32"), ("qwen2_moe", "int4"),
     ("gpt_oss", "float32"), ("falcon", "int8")],
)  # fmt: skip
def test_says_the_same(name: str, weights: str, kernels: str | None, tmp_path: Path, apart: Apart) -> None:
    folder = make_model(tmp_path, name, weights)
    with opened(folder, (), kernels=kernels) as engine:
        *expected, was_ahead = both(engine)
    assert not apart.done and not was_ahead
    with opened(folder, kernels=kernels) as engine:
        assert both(engine) == (*expected, True)
        assert both(engine) == (*expected, False)
    assert apart.done == sorted(apart.done) and apart.done[0] < apart.done[-1]


def test_one_token(tmp_path: Path, apart: Apart) -> None:
    """What follows the pass is no matter."""
    folder = make_model(tmp_path, "llama", "int4")
    with opened(folder) as engine:
        assert engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].read_ahead


def test_another_prompt_than_foreseen(tmp_path: Path, apart: Apart) -> None:
    folder = make_model(tmp_path, "llama", "int4")
    with opened(folder, ()) as engine:
        *expected, _ = both(engine)
    for foreseen in (PROMPT[:-1], (*PROMPT[:-1], 77), (*PROMPT, 1)):
        with opened(folder, foreseen) as engine:
            assert both(engine) == (*expected, False)
    assert apart.done


def test_a_prompt_of_several_passes(tmp_path: Path, apart: Apart) -> None:
    folder, prompt = make_model(tmp_path, "llama", "int4"), tuple(range(1, 100))
    plan = streaming(open_packed(folder), ("norms", "edges", "attn", "ffn", "embed", "head"), 0, chunk_rows=16)
    with opened(folder, (), plan=plan) as engine:
        expected = engine.generate([prompt], GREEDY)[0]
    with opened(folder, prompt, plan=plan) as engine:
        answer = engine.generate([prompt], GREEDY)[0]
        assert answer.token_ids == expected.token_ids and answer.read_ahead and not expected.read_ahead


def test_whoever_listens_hears_all(tmp_path: Path, apart: Apart) -> None:
    folder = make_model(tmp_path, "qwen2_moe", "int4")
    with opened(folder) as engine:
        rows = list[int]()
        with engine.session.hearing.routers(lambda call, experts: rows.append(len(experts))):
            assert not engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].read_ahead
        assert rows == [len(PROMPT)]
    with opened(folder) as engine:
        spans = list[int]()
        engine.session.watchers.append(lambda timeline, p: spans.append(len(timeline.spans)))
        assert not engine.generate([PROMPT], SamplingParams(max_tokens=1))[0].read_ahead
        assert spans[0] > 0


def test_where_weights_stream(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", "int4")
    plan = streaming(open_packed(folder))
    with load(folder, plan) as engine:
        expected = engine.generate([PROMPT], GREEDY)[0]
    with opened(folder, plan=plan) as engine:
        answer = engine.generate([PROMPT], GREEDY)[0]
        assert answer.token_ids == expected.token_ids and not answer.read_ahead


def test_one_task_after_the_other(tmp_path: Path) -> None:
    with opened(make_model(tmp_path, "llama", "int4"), serial=True) as engine:
        assert not engine.generate([PROMPT], GREEDY)[0].read_ahead


def test_loading_fails(tmp_path: Path, apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the load is raised, and no thread waits on."""
    folder, loads, wait = make_model(tmp_path, "llama", "int4"), list[DiskLoad](), DiskLoad.wait

    def failing(self: DiskLoad) -> int:
        loads.append(self)
        if len(loads) == 5:
            wait(self)
            raise StorageFailed("the disk is gone")
        return wait(self)

    monkeypatch.setattr(DiskLoad, "wait", failing)
    with pytest.raises(StorageFailed, match="the disk is gone"):
        Engine.load(folder, Ask(), Loading(machine=MACHINE, prompt=PROMPT))
    assert apart.ahead is not None and apart.ahead.calls_done < len(apart.ahead._tasks)


def test_a_pass_that_fails_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, "llama", "int4")
    with load(folder) as engine:
        expected = engine.generate([PROMPT], GREEDY)[0]

    def fail(self: PassAhead) -> None:
        raise MemoryError

    monkeypatch.setattr(PassAhead, "_do_next", fail)
    monkeypatch.setattr(Arrived, "wait", lambda self, number: True)  # else loading may be over before the thread begins
    with opened(folder) as engine:
        answer = engine.generate([PROMPT], GREEDY)[0]
        assert answer.token_ids == expected.token_ids and not answer.read_ahead


def test_a_prompt_that_is_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", "int4")
    for prompt, why in (((1, 300), "outside the vocabulary"), (tuple(range(256)) * 2, "the context room for")):
        with pytest.raises(BadRequest, match=why):
            Engine.load(folder, Ask(), Loading(machine=MACHINE, prompt=prompt))
