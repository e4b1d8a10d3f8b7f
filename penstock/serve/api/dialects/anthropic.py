"""Anthropic's Messages API: /v1/messages, whole and streamed, with tools and thoughts; count_tokens beside it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request, Response

from penstock.errors import PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import ChatPrompt, chat_of
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.dialects.anthropic_wire import CountRequest, MessagesRequest
from penstock.serve.api.errors import error_body
from penstock.serve.api.streams import named_event, parts_of
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.reading import AnswerPart, CallBegun, CallMore, Reading, Said, Thought

_PATH = "/v1/messages"


@dataclass(frozen=True)
class MessageForm:
    """How one answer is written down. `reading`: takes the answer apart."""

    model: str
    prompt_tokens: int
    reading: Reading
    media_type: str = "text/event-stream"

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        (answer,) = answers
        read = self.reading.whole(answer.text)
        content: list[dict[str, Any]] = []
        if read.thought:
            content.append({"type": "thinking", "thinking": read.thought, "signature": ""})
        if read.said or not (read.thought or read.calls):
            content.append({"type": "text", "text": read.said})
        for call in read.calls:
            content.append({**_use(call.name), "input": call.arguments_object()})
        ends = {**_end(answer, bool(read.calls)), "usage": _usage(used)}
        return {**self._head(), "content": content, **ends}

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        started = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_event("message_start", message=started)
        blocks = _Blocks()
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    yield named_event("ping")
                    continue
                for part in parts_of(self.reading, piece):
                    for event in blocks.of(part):
                        yield event
                if isinstance(piece, Generation):
                    for event in blocks.end():
                        yield event
            delta = _end(answers.whole[0], bool(self.reading.calls))
            yield named_event("message_delta", delta=delta, usage=_usage(answers.used))
            yield named_event("message_stop")
        except (PenstockError, Gone) as error:  # the status is sent already
            body = error_body(_PATH, 500, str(error), "server_error")
            yield named_event("error", error=body["error"])

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": self.model}


class _Blocks:
    """The blocks of a streamed message: one at a time is open."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""

    def of(self, part: AnswerPart) -> list[bytes]:
        """The events of a part."""
        match part:
            case Said(text):
                return self._more("text", {"type": "text", "text": ""}, type="text_delta", text=text)
            case Thought(text):
                begun = {"type": "thinking", "thinking": "", "signature": ""}
                return self._more("thinking", begun, type="thinking_delta", thinking=text)
            case CallBegun(name):
                return [*self.close(), self._begin("tool_use", {**_use(name), "input": {}})]
            case CallMore(arguments):
                return [self._delta(type="input_json_delta", partial_json=arguments)]

    def close(self) -> list[bytes]:
        """Ends the open block, if any."""
        if not self._open:
            return []
        self._open = ""
        return [named_event("content_block_stop", index=self._index)]

    def end(self) -> list[bytes]:
        """The message ends. One without any block has an empty text."""
        empty = [self._begin("text", {"type": "text", "text": ""})] if self._index < 0 else []
        return [*empty, *self.close()]

    def _more(self, kind: str, begun: dict[str, Any], **delta: Any) -> list[bytes]:
        opening = [] if self._open == kind else [*self.close(), self._begin(kind, begun)]
        return [*opening, self._delta(**delta)]

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index, self._open = self._index + 1, kind
        return named_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=delta)


def _use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}


def _end(answer: Generation, calls: bool) -> dict[str, Any]:
    """Why an answer ended."""
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _usage(used: Used) -> dict[str, int]:
    """Tokens; those of the prompt that were read for an earlier one are counted apart."""
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_read_input_tokens": used.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.output,
    }


def routes(app: FastAPI, desk: Desk) -> None:
    """Adds this API's routes."""

    @app.post(_PATH)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        def form(name: str, _: Tokenizer, chat: ChatPrompt, params: SamplingParams) -> MessageForm:
            return MessageForm(name, len(chat.ids), chat.reading(params))

        about: dict[str, Any] = {"model": body.model, "params": body.params, "stream": body.stream}
        asked = AskedChat(**about, messages=body.conversation(), tools=body.callable(), form=form)
        return await desk.chat(request, asked)

    @app.post(f"{_PATH}/count_tokens")
    async def count(body: CountRequest, request: Request) -> dict[str, int]:
        hold = await desk.hold(request, body.model)
        try:
            chat = partial(chat_of, hold.loaded.service.engine.tokenizer, body.conversation(), body.callable())
            return {"input_tokens": len((await to_thread.run_sync(chat, limiter=desk.one)).ids)}
        finally:
            hold.end()
