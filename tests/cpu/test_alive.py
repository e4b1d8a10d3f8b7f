"""Streams: what clients of each dialect hear while a prompt is read for long, and how calls and thoughts come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.serve.api.answers import ALIVE_S, Answers, Post
from penstock.serve.api.dialects.anthropic import MessageForm
from penstock.serve.api.dialects.ollama import OllamaForm
from penstock.serve.api.dialects.responses import ResponseForm
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.generation import Generation, Used, used
from penstock.serve.sampling import SamplingParams
from penstock.serve.told import AnswerPiece, Ended, Tell
from penstock.serve.tools.reading import Reading
from penstock.serve.tools.writing import WRITINGS, Writing

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


class Pieces:
    """An answer that came in pieces of 7 characters."""

    def __init__(self, text: str) -> None:
        self.whole = [Generation(3, 1, 64, text=text, token_ids=[5], finish_reason="stop")]

    @property
    def used(self) -> Used:
        return used(3, self.whole, 1)

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece | Generation | None]]:
        for at in range(0, len(self.whole[0].text), 7):
            yield 0, AnswerPiece(self.whole[0].text[at : at + 7])
        yield 0, self.whole[0]


@pytest.mark.parametrize("writing", WRITINGS, ids=lambda writing: writing.open or writing.before)
def test_calls_in_ollamas_stream(writing: Writing) -> None:
    """Text as it comes, then each call whole, with arguments that are an object."""
    arguments = json.dumps({"word": "ha}{", "n": [1, 2]})
    said = "I look. " if writing.head and not writing.channels else ""
    called = f"{writing.before}look_up{writing.middle}{arguments}{writing.after}"

    async def run() -> list[Any]:
        answers: Any = Pieces(f"{said}{writing.head}{writing.open}{called}{writing.close}")
        form = OllamaForm("tiny", True, Reading(writing), True, 3)
        return [json.loads(line) async for line in form.events(answers)]

    lines = asyncio.run(run())
    assert "".join(line["message"]["content"] for line in lines) == said.strip()
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == [{"function": {"name": "look_up", "arguments": json.loads(arguments)}}]


def objects(form: Any, answers: Any) -> list[dict[str, Any]]:
    """The objects of a stream's events."""

    async def run() -> list[dict[str, Any]]:
        return [json.loads(event.partition(b"data: ")[2]) async for event in form.events(answers)]

    return asyncio.run(run())


@pytest.mark.parametrize("text", ["I wonder, and", "", "I know</think>it is.", "I know</think>"])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_whole_answer_has_the_parts_of_its_stream(text: str, reason: str) -> None:
    """Also one that ends in the middle of its thoughts: no empty text comes after them."""

    def reading() -> Reading:
        return Reading(None, True, True)

    answers: Any = Pieces(text)
    answers.whole[0].finish_reason = reason
    messages = [MessageForm("tiny", 3, reading()) for _ in range(2)]
    kinds = [e["content_block"]["type"] for e in objects(messages[0], answers) if e["type"] == "content_block_start"]
    whole = messages[1].whole(answers.whole, answers.used)
    assert [block["type"] for block in whole["content"]] == kinds and kinds

    responses = [ResponseForm("tiny", {}, reading(), {}) for _ in range(2)]
    streamed, whole = objects(responses[0], answers)[-1]["response"], responses[1].whole(answers.whole, answers.used)
    parts = [[(item["type"], item["status"], item["content"]) for item in each["output"]] for each in (streamed, whole)]
    assert parts[0] == parts[1] != []
