"""Several models behind one server, of which one is loaded: the line of requests, and a server with two."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import Request

from penstock.cli.options import Machine
from penstock.cli.output import progress
from penstock.cli.serve import Serving, _load
from penstock.errors import DamagedModel, DoesNotFit
from penstock.planner.pace import Pace
from penstock.serve.api.answers import Gone
from penstock.serve.api.desk import Desk
from penstock.serve.api.shelf import Hold, Loaded, Shelf
from penstock.serve.failures import Failures
from penstock.serve.scheduler import Ending, QueueFull
from penstock.serve.source import Source
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.ask import Ask
from penstock.spec.format import FLOAT32
from penstock.store.synth import synth
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import load
from tests.cpu.servers import CONTEXT, serving, text_of


class Fake:
    """Models that are loaded in no time. `events`: what happened to them."""

    def __init__(self, *names: str, queue: int = 100, failing: str = "", slow: str = "") -> None:
        self.events: list[str] = []
        self.failing, self.slow, self.ends = failing, slow, threading.Event()
        loads = {name: lambda name=name: self.load(name) for name in names}
        self.shelf = Shelf(self.load(names[0]), loads, queue, self.ends.set)

    def load(self, name: str) -> Loaded:
        if name == self.slow:
            with progress(self.ends) as tell:
                while True:
                    time.sleep(0.01)
                    tell("packing", 1, 2)
        if name == self.failing:
            self.events.append(f"{name} fails")
            raise DoesNotFit("no room", tier="host", need_bytes=2, have_bytes=1, minimum_bytes=2)
        self.events.append(f"{name} loaded")
        return Loaded(name, Quiet(), Pace(1, 1.0, ""), False, lambda: self.events.append(f"{name} closed"))  # type: ignore[arg-type]


class Quiet:
    def __init__(self) -> None:
        self.failures = Failures()

    def refuse(self, why: str) -> None: ...
    def abandon(self) -> None: ...
    def idle(self, within_s: float) -> bool:
        return True


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_a_model_waits_until_the_other_is_idle_and_nobody_overtakes() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b")
        first, second = await fake.shelf.hold("a"), await fake.shelf.hold("a")
        other = asyncio.ensure_future(fake.shelf.hold("b"))
        late = asyncio.ensure_future(fake.shelf.hold("a"))  # came after one for b
        await asyncio.sleep(0.01)
        assert not other.done() and not late.done()
        first.end()
        first.end()  # twice is once
        await asyncio.sleep(0.01)
        assert not other.done()
        second.end()
        held = await other
        assert held.loaded.name == "b" and not late.done()
        held.end()
        assert (await late).loaded.name == "a"
        assert fake.events == ["a loaded", "a closed", "b loaded", "b closed", "a loaded"]

    run(scenario)


def test_a_model_that_does_not_load_fails_those_who_asked_for_it() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b", failing="b")
        asked = [asyncio.ensure_future(fake.shelf.hold(name)) for name in ("b", "b", "a")]
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(told[0], DoesNotFit) and isinstance(told[1], DoesNotFit)
        assert isinstance(told[2], Hold) and told[2].loaded.name == "a"
        assert fake.events == ["a loaded", "a closed", "b fails", "a loaded"]

    run(scenario)


def test_a_model_with_a_damaged_copy_is_loaded_again() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b")
        first = await fake.shelf.hold("a")
        first.loaded.service.failures.note(DamagedModel("granule 2 does not fit"), True)
        again = asyncio.ensure_future(fake.shelf.hold("a"))
        await asyncio.sleep(0.01)
        assert not again.done()  # its other clients are told first
        first.end()
        (await again).end()
        (await fake.shelf.hold("a")).end()
        assert fake.events == ["a loaded", "a closed", "a loaded"]

    run(scenario)


def test_clients_that_leave_hold_nothing_and_the_line_is_bounded() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b", queue=2)
        first = await fake.shelf.hold("a")
        waiting = [asyncio.ensure_future(fake.shelf.hold("b")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await fake.shelf.hold("a")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        first.end()
        again = await fake.shelf.hold("a")
        assert again.loaded.name == "a" and fake.events == ["a loaded"]
        # One that is cancelled in the moment in which its turn comes gives its hold back.
        other, task = (asyncio.ensure_future(fake.shelf.hold(name)) for name in "ba")
        await asyncio.sleep(0)
        again.end()
        (await other).end()
        while fake.shelf.now is None or fake.shelf.now.name != "a":
            await asyncio.sleep(0)
        task.cancel()
        for told in await asyncio.gather(task, return_exceptions=True):
            if isinstance(told, Hold):
                told.end()
        (await fake.shelf.hold("b")).end()
        assert fake.events[-2:] == ["a closed", "b loaded"]

    run(scenario)


def test_no_model_is_loaded_for_a_client_that_has_gone() -> None:
    async def scenario() -> None:
        fake, gone = Fake("a", "b"), asyncio.Event()
        desk, held = Desk(fake.shelf), await fake.shelf.hold("a")

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        waiting = asyncio.ensure_future(desk.hold(Request({"type": "http"}, receive), "b"))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(fake.shelf.hold("a"))
        await asyncio.sleep(0.01)
        assert not late.done()  # one who waits for b is before it
        gone.set()
        with pytest.raises(Gone):
            await waiting
        held.end()
        (await late).end()
        assert fake.events == ["a loaded"]

    run(scenario)


def test_an_ending_server_takes_none_and_loads_none() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b")
        held = await fake.shelf.hold("a")
        waiting = asyncio.ensure_future(fake.shelf.hold("b"))
        await asyncio.sleep(0)
        fake.shelf.refuse("the server is ending")
        for asked in (waiting, fake.shelf.hold("a")):
            with pytest.raises(Ending, match="ending"):
                await asked
        held.end()
        assert fake.events == ["a loaded"] and fake.shelf.settle(1)
        fake.shelf.close()
        assert fake.events == ["a loaded", "a closed"]

    run(scenario)


def test_a_server_that_ends_loads_no_further_and_tells_those_who_wait() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b", slow="b")
        waiting = [asyncio.ensure_future(fake.shelf.hold(name)) for name in "bab"]
        await asyncio.sleep(0.05)
        assert fake.events == ["a loaded", "a closed"]
        fake.shelf.refuse("the server is ending")
        for each in waiting:  # packing, which a load may begin with, takes many minutes
            with pytest.raises(Ending, match="ending"):
                await asyncio.wait_for(each, 60)
        assert await asyncio.to_thread(fake.shelf.settle, 60)
        fake.shelf.close()
        assert fake.events == ["a loaded", "a closed"]

    run(scenario)


def test_a_load_that_tells_nothing_does_not_hold_up_the_end() -> None:
    """Planning and measuring tell nobody how far they are, so that `ends` does not break them off."""
    fake, go = Fake("a"), threading.Event()

    def stands() -> Loaded:
        go.wait()
        return fake.load("b")

    shelf = Shelf(fake.shelf.now, {"b": stands}, 10)  # type: ignore[arg-type]

    async def scenario() -> None:
        waiting = asyncio.ensure_future(shelf.hold("b"))
        await asyncio.sleep(0.05)
        shelf.refuse("the server is ending")
        with pytest.raises(Ending, match="ending"):
            await asyncio.wait_for(waiting, 60)
        assert not await asyncio.to_thread(shelf.settle, 0.1)

    run(scenario)
    assert shelf.loads and shelf.now is None
    go.set()


def test_a_request_that_leaves_the_line_lets_those_behind_it_go_on() -> None:
    async def scenario() -> None:
        fake = Fake("a", "b")
        held = await fake.shelf.hold("a")
        gone = asyncio.ensure_future(fake.shelf.hold("b"))
        behind = asyncio.ensure_future(fake.shelf.hold("a"))
        await asyncio.sleep(0.01)
        assert not behind.done()
        gone.cancel()
        (await asyncio.wait_for(behind, 60)).end()  # while the first one is still answered
        held.end()
        assert fake.events == ["a loaded"]

    run(scenario)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_its_model_in_the_end(seed: int) -> None:
    async def scenario() -> None:
        rng, fake, had = random.Random(seed), Fake("a", "b", "c"), list[str]()

        async def ask(name: str) -> None:
            await asyncio.sleep(rng.random() / 50)
            held = await fake.shelf.hold(name)
            try:  # it may be cancelled here too
                assert fake.shelf.now is held.loaded and held.loaded.name == name
                await asyncio.sleep(rng.random() / 500)
                assert fake.shelf.now is held.loaded
                had.append(name)
            finally:
                held.end()

        tasks = [asyncio.ensure_future(ask(rng.choice("aabc"))) for _ in range(60)]
        for task in rng.sample(tasks, 15):
            asyncio.get_running_loop().call_later(rng.random() / 20, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(had) >= 45 and len(fake.events) % 2 == 1
        for closed, loaded in zip(fake.events[1::2], fake.events[2::2], strict=True):
            assert closed.endswith(" closed") and loaded.endswith(" loaded")

    run(scenario)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("two")
    found = {}
    for name, config in (("small", TINY_CONFIGS["llama"]), ("other", TINY_CONFIGS["qwen3"])):
        (folder / f"{name}.json").write_text(config)
        found[name] = synth(folder / f"{name}.json", folder / name, FLOAT32)
    return found


def test_a_server_with_two_models(two: dict[str, Path], cache: Path) -> None:
    expected = {}
    for name, folder in two.items():
        with load(folder, context=CONTEXT) as engine:
            expected[name] = [text_of(engine, f"{i} and", max_tokens=8, ignore_eos=True) for i in range(4)]
    assert expected["small"] != expected["other"]
    flags = ("--name", "small", "--model", f"other={two['other']}", "--batch", 2)
    with serving(two["small"], cache, *flags) as server:
        client = server.client()
        assert [each.id for each in client.models.list()] == ["small", "other"]
        with pytest.raises(openai.NotFoundError, match="small, other"):
            client.completions.create(model="third", prompt="a")

        def ask(k: int) -> bool:
            name, i, stream = ("small", "other")[k % 2], k % 4, k % 3 == 0
            asked: dict[str, Any] = {"model": name, "prompt": f"{i} and", "max_tokens": 8, "temperature": 0}
            done = server.client().completions.create(**asked, stream=stream, extra_body={"ignore_eos": True})
            text = "".join(event.choices[0].text for event in done) if stream else done.choices[0].text
            return bool(text == expected[name][i])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(ask, range(24)))
        # The one that a request names is loaded for it; without a name the first one is.
        tokens = server.ask("POST", "/tokenize", {"prompt": "abc", "model": "other"})[2]["tokens"]
        assert server.ask("GET", "/v1/plan")[2]["model"] == "other"
        assert server.ask("GET", "/v1/plan?model=small")[2]["model"] == "other"  # a GET changes no model
        assert server.ask("POST", "/detokenize", {"tokens": tokens, "model": "other"})[2]["prompt"].endswith("abc")
        assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[2]["model"] == "small"
        metrics = server.ask("GET", "/metrics")[2]
        assert re.search(r"^penstock_model_loaded 1.0$", metrics, re.MULTILINE)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert len(children) <= 1  # the tokenizer of the one that is loaded


def test_a_model_that_does_not_load_leaves_no_process(two: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before, here = children.read_text(), list[str]()

    def refusing(*_: object, tokenizer: Tokenizer, **how: object) -> None:
        tokenizer.encode("a")
        here.append(children.read_text())
        raise DoesNotFit("no room", tier="host", need_bytes=2, have_bytes=1, minimum_bytes=2)

    monkeypatch.setattr("penstock.cli.serve.loaded", refusing)
    how: Any = {"ask": Ask(), "machine": Machine(), "plan": None, "serving": Serving(), "kept": None}
    with pytest.raises(DoesNotFit) as refused:  # whose frames hold what was opened
        _load("small", Source(two["small"], None), **how, ends=threading.Event())
    assert refused.value and here != [before] and children.read_text() == before


def test_names_and_paths_are_checked(two: dict[str, Path], cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cpu.commands import here

    for given, says in (("other", "NAME=PATH"), ("=x", "NAME=PATH"), (f"small={two['other']}", "already")):
        found = here(capsys, "serve", two["small"], "--name", "small", "--model", given, "--cache", cache)
        assert found.code == 2 and says in found.err


def test_a_second_model_that_does_not_fit_is_said_and_the_first_comes_back(
    two: dict[str, Path], cache: Path, tmp_path: Path
) -> None:
    with serving(two["small"], cache, "--name", "small", "--model", f"none={tmp_path / 'nothing'}") as server:
        status, _, found = server.ask("POST", "/v1/completions", {"prompt": "a", "model": "none"})
        assert status in (400, 503) and "nothing" in json.dumps(found)
        assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
