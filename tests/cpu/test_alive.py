"""Streams that are silent for long: what clients of each dialect hear while a prompt is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.serve.api.answers import ALIVE_S, Answers, Post
from penstock.serve.api.dialects.ollama import OllamaForm
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.generation import Generation
from penstock.serve.sampling import SamplingParams
from penstock.serve.told import Ended, Tell
from penstock.serve.tools.reading import Reading

SILENT = 3  # times that nothing came for ALIVE_S


class Reads:
    """A service that reads a prompt for long. `tell`: of its one request."""

    tell: Tell

    def submit(self, _ids: object, _params: object, tell: Tell, _priority: int, _owner: str) -> int:
        self.tell = tell
        return 0

    def cancel(self, _number: int) -> None:
        pass


def heard(write: Callable[[Answers], Any]) -> list[bytes]:
    """What a client hears of a request whose answer ends after 30 s of silence. No clock runs."""

    async def run() -> list[bytes]:
        service: Any = Reads()
        waits = list[float]()

        async def wait_for(what: Awaitable[Any], seconds: float) -> Any:
            waits.append(seconds)
            if len(waits) <= SILENT:
                asyncio.ensure_future(what).cancel()
                raise TimeoutError
            service.tell(Ended(Generation(3, 1, 64, text="done", token_ids=[5], finish_reason="stop")))
            return await what

        answers = Answers(service, 1, "", Post(), wait_for)
        answers.submit([1, 2, 3], SamplingParams(), 0)
        found = [event async for event in write(answers)]
        assert waits == [ALIVE_S] * (SILENT + 1) and ALIVE_S == 10
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_a_comment_comes_every_10_seconds(kind: str) -> None:
    tokenizer: Any = None  # no texts of single tokens are wanted
    found = heard(Shape(kind, head_of("x", "1", "tiny"), tokenizer).events)
    assert [event.startswith(b": ") and event.endswith(b"\n\n") for event in found[:SILENT]] == [True] * SILENT
    assert all(event.startswith(b"data: ") for event in found[SILENT:]) and found[-1] == b"data: [DONE]\n\n"


def test_ollamas_lines_have_no_comments() -> None:
    found = heard(OllamaForm("tiny", True, Reading(), True, 3).events)
    assert found and all(line.startswith(b"{") for line in found)
