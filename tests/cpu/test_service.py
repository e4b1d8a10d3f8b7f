"""Requests that come and go while others are answered: each answer is the one that it would have had alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.graph.arenas import Layout
from penstock.planner.measured_pace import MeasuredPace
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.scheduler import Ending, QueueFull
from penstock.serve.service import Service
from penstock.serve.told import Cancelled, Ended, Failed, Told
from penstock.spec.ask import Ask
from penstock.spec.plan import Unit
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE
from tests.cpu.engines import load, make_model
from tests.cpu.services import CONTEXT, SEQS, Heard, plans, prompts, serving
from tests.plans import make_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches", "few pages", "KV on disk", "guests"])
def test_answers_in_company_are_those_alone(folder: Path, name: str) -> None:
    plan = plans(folder)[name]
    assert bool(Layout(plan).guests) == (name == "guests")  # six units, which come and go as pages are used
    some = prompts(11, plan.target.spec.vocab)
    params = [
        SamplingParams(max_tokens=3 + 4 * i, ignore_eos=True, seed=i, temperature=0.8 * (i % 3 == 2))
        for i in range(len(some))
    ]
    with load(folder, plan=plan) as engine:
        alone = [engine.generate([ids], p)[0] for ids, p in zip(some, params, strict=True)]
        heard = [Heard() for _ in some]
        with serving(engine) as service:
            for i, (ids, p, each) in enumerate(zip(some, params, heard, strict=True)):
                service.submit(ids, p, each.tell)
                if i % 3 == 0:  # some come while others are in the middle
                    each.next()
            for each, expected in zip(heard, alone, strict=True):
                text, told = each.end()
                assert isinstance(told, Ended) and told.answer.token_ids == expected.token_ids
                assert told.answer.text == expected.text and told.answer.text.endswith(text)
                assert told.answer.finish_reason == expected.finish_reason
                assert told.answer.ttft_s > 0 and len(told.answer.inter_token_s) == len(expected.token_ids) - 1
            assert service.idle(600) and service.free_sequences == SEQS
            counts = service.counts
        assert counts.answered == len(some) and counts.failed == counts.cancelled == 0
        assert counts.given_back or counts.prompt_tokens == sum(map(len, some))
        # With few pages some are mostly given back, but not where requests happen to come one after the other.
        assert (counts.given_back == 0 or name == "few pages") and not counts.pages_had
        assert counts.output_tokens == sum(len(a.token_ids) for a in alone)
        assert engine.generate([some[0]], params[0])[0].token_ids == alone[0].token_ids  # it is free again


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches"])
def test_rows_of_prompts_may_change_between_passes(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they change after each pass. Answers stay what they are alone."""
    rows = cycle((1, 9, 2, 5, 13))

    def note(pace: MeasuredPace, *_: float) -> bool:
        pace.rows = next(rows)
        return True

    monkeypatch.setattr(MeasuredPace, "note", note)
    plan = plans(folder)[name]
    some = prompts(9, plan.target.spec.vocab)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    with load(folder, plan=plan) as engine:
        alone = [engine.generate([ids], params)[0].token_ids for ids in some]
        with closing(Service(engine, prompt_rows=5, queue=100, follows=True)) as service:
            assert (service.prompt_rows, service.pace_reason) == (5, None)
            heard = [Heard() for _ in some]
            seen = set[int]()
            for ids, each in zip(some, heard, strict=True):
                service.submit(ids, params, each.tell)
                each.next()
                seen.add(service.prompt_rows)
            for each, expected in zip(heard, alone, strict=True):
                told = each.end()[1]
                assert isinstance(told, Ended) and told.answer.token_ids == expected
        assert len(seen) > 1


@pytest.mark.parametrize("mixed", ["mixed", "prefill"])
@pytest.mark.parametrize("attend", ["host", "gpu0"])
def test_a_device_computes_prompts_beside_answers_either_way(folder: Path, mixed: str, attend: str) -> None:
    """FFNs are computed by the CPU in decode and by the device for prompts; KV is in RAM, where a prompt that begins as
    another copies what it needs."""
    packed = open_packed(folder)
    units = []
    for part in packed.parts.values():
        computed = ("host", "host", "gpu0") if part.kind == "ffn" else ("gpu0", "gpu0", "gpu0")
        computed = (attend,) * 3 if part.kind == "attn" else computed
        units += [Unit(part.key, lo, lo + 1, *computed) for lo in range(part.granules)]
    largest = max(part.granule_bytes for part in packed.parts.values())
    plan = make_plan(
        packed.spec, packed.weights, units, ring_bytes={"gpu0": 3 * largest}, stage_bytes=largest, main="gpu0",
        kv_homes=[("host", attend)] * len(packed.spec.layers), batch_seqs=SEQS, chunk_rows=16, context=CONTEXT,
    )  # fmt: skip
    some = [
        ids + prompts(9, plan.target.spec.vocab)[-1] for ids in prompts(2, plan.target.spec.vocab) for _ in range(4)
    ]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with closing(Engine.load(folder, Ask(), Loading(machine=MACHINE, plan=plan, device="emulated"))) as engine:
        alone = [engine.generate([ids], params)[0].token_ids for ids in some]
        with closing(Service(engine, prompt_rows=5, queue=100, mixed=mixed)) as service:
            heard = [Heard() for _ in some]
            for ids, each in zip(some, heard, strict=True):
                service.submit(ids, params, each.tell)
                each.next()  # a token: it is answered while the next prompt comes
            for each, expected in zip(heard, alone, strict=True):
                _, told = each.end()
                assert isinstance(told, Ended) and told.answer.token_ids == expected
            assert service.counts.cached_tokens > sum(len(ids) // 2 for ids in some)


def test_a_mistake_of_ours_leaves_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans(folder)["resident"]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with load(folder, plan=plan) as engine, serving(engine) as service:
        for place in ("_note", "_move_pages", "_unsaved"):
            with monkeypatch.context() as patched:
                patched.setattr(service, place, _broken)
                heard = [Heard(), Heard()]
                for each in heard:
                    service.submit([1, 2, 3], params, each.tell)
                ends = [each.end()[1] for each in heard]
                assert place == "_unsaved" or all(isinstance(end, Failed) for end in ends)
                assert service.idle(600)
            again = Heard()
            service.submit([1, 2, 3], params, again.tell)
            assert isinstance(again.end()[1], Ended) and service.free_sequences == SEQS


def _broken(*_: object) -> None:
    raise RuntimeError("a mistake")


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches"])
def test_turns_of_chats_go_on_from_what_is_there(folder: Path, name: str) -> None:
    """Three chats of four turns, and a stranger who asks the same: the answers are those without anything kept."""
    plan = plans(folder)[name]
    rng = np.random.default_rng(9)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    turns: list[tuple[int, list[int], list[int]]] = []  # number, prompt, answer
    with load(folder, plan=plan) as engine:
        chats = [rng.integers(0, plan.target.spec.vocab, 6 + i).tolist() for i in range(3)]
        for turn in range(4):
            for ids in chats:
                answer = engine.generate([ids], params)[0].token_ids
                turns.append((turn, list(ids), answer))
                ids += [*answer, *rng.integers(0, plan.target.spec.vocab, 4).tolist()]
        with serving(engine) as service:
            for lo in range(0, len(turns), 3):
                heard = [Heard() for _ in chats]
                for (_, ids, _), each in zip(turns[lo : lo + 3], heard, strict=True):
                    service.submit(ids, params, each.tell, owner="a")
                for (turn, ids, answer), each in zip(turns[lo : lo + 3], heard, strict=True):
                    _, told = each.end()
                    assert isinstance(told, Ended) and told.answer.token_ids == answer
                    assert told.answer.cached_tokens == (len(ids) - 5 if turn else 0)
                stranger = Heard()
                service.submit(turns[lo][1], params, stranger.tell, owner="b")
                _, told = stranger.end()
                assert isinstance(told, Ended) and told.answer.token_ids == turns[lo][2]
            assert service.counts.cached_tokens >= sum(len(ids) - 5 for turn, ids, _ in turns if turn)


def test_cancelled_requests_leave_and_the_others_stay_right(folder: Path) -> None:
    plan = plans(folder)["streaming"]
    some = prompts(12, plan.target.spec.vocab)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    with load(folder, plan=plan) as engine:
        alone = [engine.generate([ids], long)[0].token_ids for ids in some]
        with serving(engine, prompt_rows=2) as service:
            heard = [Heard() for _ in some]
            numbers = [service.submit(ids, long, each.tell) for ids, each in zip(some, heard, strict=True)]
            heard[0].next()
            for i in (1, 4, 7, 11):  # in the middle of prompts, and while they wait
                service.cancel(numbers[i])
            service.cancel(999)
            for i, each in enumerate(heard):
                _, told = each.end()
                if i in (1, 4, 7, 11):
                    assert isinstance(told, Cancelled | Ended)
                else:
                    assert isinstance(told, Ended) and told.answer.token_ids == alone[i]
            assert service.idle(600) and service.free_sequences == SEQS and service.counts.cancelled >= 1


def test_threads_ask_at_once(folder: Path) -> None:
    plan = plans(folder)["resident"]
    some = prompts(24, plan.target.spec.vocab)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    with load(folder, plan=plan) as engine:
        alone = [engine.generate([ids], params)[0].token_ids for ids in some]
        found: dict[int, list[int]] = {}
        with serving(engine) as service:

            def ask(i: int) -> None:
                heard = Heard()
                service.submit(some[i], params, heard.tell)
                _, told = heard.end()
                assert isinstance(told, Ended)
                found[i] = told.answer.token_ids

            threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(some))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert [found[i] for i in range(len(some))] == alone


def test_a_pass_that_fails_ends_those_that_it_was_for_and_no_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plans(folder)["resident"]
    some = prompts(SEQS + 2, plan.target.spec.vocab)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with load(folder, plan=plan) as engine:
        alone = [engine.generate([ids], params)[0].token_ids for ids in some]
        step, failing = engine.session.step, iter([True])

        def fails_once(*arguments: object) -> object:
            if next(failing, False):
                raise StorageFailed("the disk is gone")
            return step(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.session, "step", fails_once)
        with serving(engine) as service:
            first = Heard()
            service.submit(some[0], params, first.tell)
            _, told = first.end()
            assert isinstance(told, Failed) and "the disk is gone" in told.error.message
            others = [Heard() for _ in some]
            for ids, each in zip(some, others, strict=True):
                service.submit(ids, params, each.tell)
            for each, expected in zip(others, alone, strict=True):
                _, told = each.end()
                assert isinstance(told, Ended) and told.answer.token_ids == expected
            assert service.counts.failed == 1


def test_what_cannot_be_taken_is_refused_at_once(folder: Path) -> None:
    plan = plans(folder)["resident"]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with load(folder, plan=plan) as engine:
        with serving(engine, queue=0) as service:
            with pytest.raises(BadRequest, match="room for"):
                service.submit([1] * (CONTEXT + 1), params, Heard().tell)
            with pytest.raises(BadRequest, match="vocabulary"):
                service.submit([plan.target.spec.vocab], params, Heard().tell)
            heard = [Heard() for _ in range(SEQS)]
            for each in heard:
                service.submit([1, 2], params, each.tell)
            with pytest.raises(QueueFull):
                service.submit([1], params, Heard().tell)
            service.refuse("the server is ending")
            with pytest.raises(Ending, match="ending"):
                service.submit([1], params, Heard().tell)
        assert all(isinstance(each.end()[1], Cancelled | Ended) for each in heard)  # closing cancels


def test_the_engine_answers_nobody_else_while_requests_are_here(folder: Path) -> None:
    with load(folder, plan=plans(folder)["resident"]) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        with serving(engine) as service:
            heard, may_go_on = Heard(), threading.Event()

            def tell(told: Told) -> None:
                heard.tell(told)
                may_go_on.wait(600)

            service.submit([1], params, tell)
            heard.next()
            late = threading.Thread(target=lambda: engine.generate([[1]], params), daemon=True)
            late.start()
            late.join(0.2)
            assert late.is_alive()
            may_go_on.set()
            heard.end()
            late.join(600)
            assert not late.is_alive()  # the service is open still, and has nothing to do


def test_threads_wait_for_answers_together(folder: Path) -> None:
    """Each thread has its own prompts and parameters. They share passes, and one that is refused disturbs nobody."""
    plan = plans(folder)["streaming"]
    some = prompts(18, plan.target.spec.vocab)
    with load(folder, plan=plan) as engine:
        params = [SamplingParams(max_tokens=6 + i, ignore_eos=True, temperature=i / 6, seed=i) for i in range(6)]
        groups = [some[3 * i : 3 * i + 3] for i in range(6)]
        alone = [[a.token_ids for a in engine.generate(group, p)] for group, p in zip(groups, params, strict=True)]
        with serving(engine, prompt_rows=16) as service:

            def ask(i: int) -> list[list[int]]:
                if i == 6:
                    with pytest.raises(BadRequest, match="vocabulary"):
                        service.generate([[1], [-1]], params[0])
                    return []
                return [answer.token_ids for answer in service.generate(groups[i], params[i])]

            with ThreadPoolExecutor(7) as pool:
                assert list(pool.map(ask, range(7))) == [*alone, []]
            assert service.idle(600) and service.free_sequences == SEQS
            assert service.counts.passes < sum(len(ids) for answers in alone for ids in answers)
            stream = engine.stream([1, 2], params[0])
            next(stream)
            with pytest.raises(BadRequest, match="this thread has begun"):
                service.generate([[1]], params[0])
            stream.close()  # type: ignore[attr-defined]
            assert service.generate([groups[0][0]], params[0])[0].token_ids == alone[0][0]
        with pytest.raises(BadRequest, match="ending"):
            service.generate([[1]], params[0])


@pytest.mark.parametrize("name", ["resident", "few pages", "KV on disk"])
def test_what_others_wrote_over_is_read_again(folder: Path, name: str) -> None:
    """Between requests the engine may answer somebody else, whose passes take the same pages."""
    plan = plans(folder)[name]
    long, other = prompts(40, plan.target.spec.vocab)[:2]
    long = [*long, *range(1, 81 - len(long))]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with load(folder, plan=plan) as engine:
        alone = engine.generate([long], params)[0].token_ids
        with serving(engine) as service:
            assert service.generate([long], params)[0].token_ids == alone
            assert service.generate([long], params)[0].cached_tokens > 60
            before = "".join(engine.stream(other, params))
            again = service.generate([long], params)[0]
            assert (again.token_ids, again.cached_tokens) == (alone, 0)
            assert "".join(engine.stream(other, params)) == before


def test_closing_ends_what_threads_wait_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth pass does not end before closing has begun."""
    with load(folder, plan=plans(folder)["streaming"]) as engine:
        service = Service(engine, prompt_rows=4, queue=100)
        step, abandon, abandoned = engine.session.step, service.abandon, threading.Event()

        def waiting(*arguments: Any) -> Any:
            assert service.counts.passes < 3 or abandoned.wait(600)
            return step(*arguments)

        monkeypatch.setattr(engine.session, "step", waiting)
        monkeypatch.setattr(service, "abandon", lambda: (abandon(), abandoned.set()))
        long = SamplingParams(max_tokens=90, ignore_eos=True)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(service.generate, [[i]], long) for i in range(3)]
            while service.counts.passes < 3:
                time.sleep(0.001)
            service.close("this model was closed")
            for each in waiting:
                with pytest.raises(BadRequest, match="was closed"):
                    each.result()


@pytest.mark.parametrize("name", ["resident", "streaming", "two batches", "few pages", "KV on disk"])
def test_tells_what_a_request_would_find(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is held by somebody else, all requests wait. Each has 40 tokens to say, and SEQS say them at
    once."""
    with load(folder, plan=plans(folder)[name]) as engine, serving(engine, queue=20) as service:
        idle = service.newcomer(9, 5)
        assert idle.place == 0 and idle.wait_s == 0
        assert idle.ttft_s is not None and idle.ttft_s > 0 and idle.tokens_per_s is not None
        with engine.held():
            heard = [Heard() for _ in range(9)]
            for each in heard:
                service.submit([7] * 20, SamplingParams(max_tokens=40, ignore_eos=True), each.tell)
            busy = service.newcomer(9, 5)
            assert busy.place == 9 and service.newcomer(9, 1).tokens_per_s is None
            assert busy.wait_s is not None and busy.ttft_s is not None
            assert busy.wait_s > 40 * idle.ttft_s / 20 and busy.ttft_s > busy.wait_s
            for _ in range(20 + SEQS - 9):
                service.submit([7] * 20, SamplingParams(max_tokens=4), Heard().tell)
            with pytest.raises(QueueFull):
                service.newcomer(9, 5)
            monkeypatch.setattr("penstock.serve.service.MOST_REQUESTS", 5)
            assert service.newcomer(9, 5) == (20 + SEQS, None, None, None)
        assert all(isinstance(each.end()[1], Ended) for each in heard)  # nobody's answer was touched
