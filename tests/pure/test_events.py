"""Server-sent events of an answer: a client that hears nothing for 10 s gets a comment. No clock is read: the test says
when time has passed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from threading import Thread
from typing import Any

import pytest

from penstock.errors import StorageFailed
from penstock.serve.api.answers import ALIVE_S, Answers, Post
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.generation import Generation
from penstock.serve.sampling import SamplingParams
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Failed, Tell, Told

SILENCE = "10 s pass"


class Requests:
    """Stands in for a service: takes requests, and tells what the test says."""

    def __init__(self) -> None:
        self.tells: list[Tell] = []
        self.cancelled: list[int] = []

    def submit(self, ids: Sequence[int], params: SamplingParams, tell: Tell, priority: int, owner: str) -> int:
        self.tells.append(tell)
        return len(self.tells) - 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def events(script: list[Told | str], n: int = 1) -> list[str]:
    """The lines that a client gets where these things happen one after the other, to its first answer."""

    async def run() -> list[str]:
        requests, left = Requests(), list(script)

        async def wait_for(awaitable: Awaitable[Any], seconds: float) -> Any:
            assert seconds == ALIVE_S == 10
            happens = left.pop(0)
            if isinstance(happens, str):
                awaitable.close()  # type: ignore[attr-defined]
                raise TimeoutError
            requests.tells[0](happens)
            return await awaitable

        answers = Answers(requests, n, "", Post(), wait_for)  # type: ignore[arg-type]
        answers.submit([1, 2], SamplingParams(), 0)
        shape = Shape("text_completion", head_of("cmpl", "1", "tiny"), None)  # type: ignore[arg-type]
        lines = [line.decode() async for line in shape.events(answers)]
        answers.cancel()
        assert not left and requests.cancelled == list(range(n))
        return lines

    return asyncio.run(run())


def texts(lines: list[str]) -> list[str]:
    """What each line is: a comment, a text, an error, or the end."""
    found = []
    for line in lines:
        assert line.endswith("\n\n")
        if line.startswith(":"):
            found.append("comment")
        elif line == "data: [DONE]\n\n":
            found.append("done")
        else:
            body = json.loads(line.removeprefix("data: "))
            found.append(body["choices"][0]["text"] if "choices" in body else body["error"]["message"])
    return found


def test_comments_while_a_request_waits_and_a_prompt_is_read() -> None:
    answer = Generation(2, 1, 9, "ab", [5, 6], finish_reason="stop")
    script = [SILENCE, SILENCE, AnswerPiece("a"), SILENCE, AnswerPiece("b"), Ended(answer)]
    assert texts(events(script)) == ["comment", "comment", "a", "comment", "b", "", "done"]
    assert texts(events([AnswerPiece("ab"), Ended(answer)])) == ["ab", "", "done"]


def test_comments_come_before_an_error_too() -> None:
    assert texts(events([SILENCE, Failed(StorageFailed("the disk is gone"))])) == ["comment", "the disk is gone"]
    assert texts(events([SILENCE, Cancelled()])) == ["comment", "the server is ending"]


def test_the_loop_is_woken_once_for_all_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop, wakes = asyncio.get_running_loop(), list[None]()
        soon = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            wakes.append(None)
            return soon(*arguments)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        post, queue = Post(), asyncio.Queue[int]()
        for number in range(100):
            post.put(queue, number)
        assert [await queue.get() for _ in range(100)] == list(range(100)) and len(wakes) == 1
        queues = [asyncio.Queue[int]() for _ in range(4)]
        threads = [Thread(target=lambda to=each: [post.put(to, n) for n in range(500)]) for each in queues]
        for thread in threads:
            thread.start()
        for each in queues:
            assert [await each.get() for _ in range(500)] == list(range(500))
        for thread in threads:
            thread.join()
        assert post.is_here

    asyncio.run(asyncio.wait_for(run(), 60))
