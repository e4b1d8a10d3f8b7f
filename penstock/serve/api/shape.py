"""How OpenAI's API writes answers down: choices, chunks of them, log probabilities, and the tokens used."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyio import to_thread

from penstock.errors import PenstockError
from penstock.serve.api import logprobs
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.errors import error_body
from penstock.serve.api.streams import STILL_HERE
from penstock.serve.generation import Generation, Used
from penstock.serve.log_probabilities import Likely, ids_of
from penstock.serve.scores import Scores
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.reading import AnswerPart, CallBegun, CallMore, Collected, Reading, Said, Thought


def call_id() -> str:
    """Of a call of a tool: 9 letters and digits, which the chat template of every family takes (`tools.asked`)."""
    return secrets.token_hex(5)[:9]


@dataclass(frozen=True)
class Shape:
    """How answers are written down.

    kind        chat.completion or text_completion
    head        the fields that every object has
    tokenizer   for the texts of single tokens, if log probabilities are wanted
    reading     makes what takes one answer of a chat apart
    echoed      the prompt that is written before each answer; () if none is
    with_usage  a stream ends with the tokens used
    """

    kind: str
    head: dict[str, Any]
    tokenizer: Tokenizer
    reading: Callable[[], Reading] = Reading
    echoed: tuple[str, ...] = ()
    with_usage: bool = False
    media_type: str = "text/event-stream"

    @property
    def chats(self) -> bool:
        return self.kind == "chat.completion"

    def has_texts(self, tokens: Sequence[Likely]) -> bool:
        """Whether the texts of these tokens are known already."""
        return not tokens or self.tokenizer.has_texts(ids_of(tokens))

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        """Whole answers."""
        choices = [self.choice(i, answer) for i, answer in enumerate(answers)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage_of(used)}

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """A whole answer. Where log probabilities were asked for it takes 70 µs for each token in them."""
        prompt, reason = self.echo(index), answer.finish_reason
        if self.chats:
            read = self.reading().whole(answer.text)
            said: dict[str, Any] = {"message": _message(read)}
            reason = reason_of(reason, len(read.calls))
        else:
            said = {"text": prompt + answer.text}
        about = self._logprobs(answer.logprobs, 0, answer.prompt_scores, prompt)
        return {"index": index, **said, "logprobs": about, "finish_reason": reason}

    def echo(self, index: int) -> str:
        """The prompt that is written before an answer."""
        return self.echoed[index] if self.echoed else ""

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, usage where it is wanted, and the end."""
        kind = "chat.completion.chunk" if self.chats else self.kind
        open_: dict[int, _OpenChoice] = {}

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            usage = {"usage": None} if self.with_usage else {}
            body = {**self.head, "object": kind, "choices": choices, **usage, **more}
            return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

        likely: Sequence[Likely]
        try:
            async for index, piece in answers.pieces():
                if piece is None:
                    yield STILL_HERE
                    continue
                first = index not in open_
                now = open_.setdefault(index, _OpenChoice(self.reading()))
                if isinstance(piece, Generation):
                    # An answer of no tokens has no piece before its end: here its prompt is written.
                    parts = now.reading.finish() if self.chats else []
                    text, likely = self.echo(index) if first else "", ()
                    scores = piece.prompt_scores if first else None
                    reason = reason_of(piece.finish_reason, now.reading.calls)
                elif piece.text or piece.likely or first:
                    text, likely = self.echo(index) + piece.text if first else piece.text, piece.likely
                    parts, scores, reason = (now.reading.push(text) if self.chats else []), piece.prompt_scores, None
                else:
                    continue
                said = now.delta(parts, first) if self.chats else {"text": text}
                chunk = partial(self._chunk, index, said, likely, now.sent, scores, reason)
                at_hand = scores is None and self.has_texts(likely)
                if reason is not None or likely or not self.chats or said["delta"]:
                    yield event([chunk() if at_hand else await to_thread.run_sync(chunk)])
                now.sent += len(text)
            if self.with_usage:
                yield event([], usage=usage_of(answers.used))
            yield b"data: [DONE]\n\n"
        except (PenstockError, Gone) as error:  # the status is sent already
            yield b"data: " + json.dumps(error_body("", 500, str(error), "server_error")).encode() + b"\n\n"

    def _chunk(
        self, index: int, said: dict[str, Any], tokens: Sequence[Likely], offset: int, scores: Scores | None,
        reason: str | None,
    ) -> dict[str, Any]:  # fmt: skip
        """A piece of an answer. `tokens`: that it is made of, where log probabilities were asked for. `offset`:
        characters before it. `scores`: of the prompt, where it is a part of the piece."""
        about = self._logprobs(tokens, offset, scores, self.echo(index))
        return {"index": index, **said, "logprobs": about, "finish_reason": reason}

    def _logprobs(
        self, tokens: Sequence[Likely], offset: int, prompt_scores: Scores | None, prompt: str
    ) -> dict[str, Any] | None:
        if not tokens and prompt_scores is None:
            return None
        if self.chats:
            return logprobs.of_chat(self.tokenizer, tokens)
        if prompt_scores is None:
            return logprobs.of_text(self.tokenizer, tokens, offset)
        return logprobs.of_echo(self.tokenizer, prompt_scores, prompt, tokens)


@dataclass
class _OpenChoice:
    """An answer that streams. `sent`: characters of it so far. `begun`: its calls of tools so far."""

    reading: Reading
    sent: int = 0
    begun: int = field(default=0)

    def delta(self, parts: Sequence[AnswerPart], first: bool) -> dict[str, Any]:
        """What some parts add to a message."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        for part in parts:
            match part:
                case Said(text):
                    delta["content"] = delta.get("content", "") + text
                case Thought(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegun(name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": self.begun, "id": call_id(), "type": "function", "function": function}
                    delta.setdefault("tool_calls", []).append(call)
                    self.begun += 1
                case CallMore(arguments):
                    calls = delta.setdefault("tool_calls", [])
                    if not calls or calls[-1]["index"] != self.begun - 1:
                        calls.append({"index": self.begun - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += arguments
        return {"delta": delta}


def _message(read: Collected) -> dict[str, Any]:
    """A whole message of a chat. `content` is null where a call has no text beside it."""
    message: dict[str, Any] = {"role": "assistant", "content": (read.said or None) if read.calls else read.said}
    if read.thought:
        message["reasoning_content"] = read.thought
    if read.calls:
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in read.calls
        ]
    return message


def reason_of(reason: str, calls: int) -> str:
    """Why an answer ended. `tool_calls` if it has calls and was not cut."""
    return "tool_calls" if calls and reason == "stop" else reason


def head_of(prefix: str, number: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{number}", "created": int(time.time()), "model": model}


def usage_of(used: Used) -> dict[str, Any]:
    """The tokens used, as OpenAI's API has them, and how long the request waited."""
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.output,
        "total_tokens": used.prompt + used.output,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        "wait_s": used.wait_s,
    }
