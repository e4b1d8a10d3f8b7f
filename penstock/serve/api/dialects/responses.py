"""OpenAI's Responses API: /v1/responses, whole and streamed, with functions and thoughts. Nothing is stored: a client
sends the conversation each time."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from penstock.errors import PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import ChatPrompt
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.dialects.responses_wire import ResponsesRequest
from penstock.serve.api.shape import call_id
from penstock.serve.api.streams import STILL_HERE, named_event, parts_of
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.reading import AnswerPart, CallBegun, CallMore, Collected, Reading, Said, Thought


@dataclass
class ResponseForm:
    """How one answer is written down.

    told     the fields of the request that the response repeats
    reading  takes the answer apart
    spaces   as `ResponsesRequest.spaces`
    """

    model: str
    told: dict[str, Any]
    reading: Reading
    spaces: Mapping[str, tuple[str, str]]
    media_type: str = "text/event-stream"
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created_s: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        (answer,) = answers
        read = self.reading.whole(answer.text)
        return self._response(answer, used, _items(read, answer.finish_reason == "length", self.spaces))

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        events = _ResponseEvents(self.spaces)
        begun = {**self._head("in_progress"), "output": [], "usage": None}
        yield events.event("response.created", response=begun)
        yield events.event("response.in_progress", response=begun)
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    yield STILL_HERE
                    continue
                for part in parts_of(self.reading, piece):
                    for event in events.of(part):
                        yield event
                if isinstance(piece, Generation):
                    for event in events.end(cut=piece.finish_reason == "length"):
                        yield event
            answer = answers.whole[0]
            response = self._response(answer, answers.used, events.items)
            yield events.event(f"response.{response['status']}", response=response)
        except (PenstockError, Gone) as error:  # the status is sent already
            wrong = {"code": "server_error", "message": str(error)}
            failed = {**self._head("failed"), "output": events.items, "usage": None, "error": wrong}
            yield events.event("response.failed", response=failed)

    def _head(self, status: str) -> dict[str, Any]:
        about = {"id": self.id, "object": "response", "created_at": self.created_s, "status": status}
        return {**about, "error": None, "incomplete_details": None, "model": self.model, **self.told}

    def _response(self, answer: Generation, used: Used, output: list[dict[str, Any]]) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        response = {**self._head("incomplete" if cut else "completed"), "output": output, "usage": _usage(used)}
        return {**response, "incomplete_details": {"reason": "max_output_tokens"}} if cut else response


class _ResponseEvents:
    """The events of a streamed response. `items`: the items that are whole. At most one item is open."""

    def __init__(self, spaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[dict[str, Any]] = []
        self._spaces = spaces
        self._number = 0
        self._open: dict[str, Any] | None = None

    def event(self, kind: str, **more: Any) -> bytes:
        event = named_event(kind, sequence_number=self._number, **more)
        self._number += 1
        return event

    def of(self, part: AnswerPart) -> list[bytes]:
        """The events of a part."""
        match part:
            case Said(text):
                return [*self._turn_to("message"), self._more("response.output_text.delta", text, logprobs=[])]
            case Thought(text):
                return [*self._turn_to("reasoning"), self._more("response.reasoning_text.delta", text)]
            case CallBegun(name):
                return [*self.close(), *self._begin(_call_item(name, "", self._spaces))]
            case CallMore(arguments):
                assert self._open is not None, "arguments follow the beginning of their call"
                self._open["arguments"] += arguments
                kind = "response.function_call_arguments.delta"
                return [self.event(kind, **self._where(), delta=arguments)]

    def end(self, cut: bool) -> list[bytes]:
        """The answer ends. One without any item has an empty message."""
        empty = self._begin(_item("message", "")) if self._open is None and not self.items else []
        return [*empty, *self.close("incomplete" if cut else "completed")]

    def close(self, status: str = "completed") -> list[bytes]:
        """Ends the open item, if any."""
        item = self._open
        if item is None:
            return []
        events: list[bytes] = []
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            events.append(self.event(kind, **self._where(), name=item["name"], arguments=item["arguments"]))
        else:
            (part,) = item["content"]
            name = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            events.append(
                self.event(f"response.{name}.done", **self._where(), content_index=0, text=part["text"], **logprobs)
            )
            events.append(self.event("response.content_part.done", **self._where(), content_index=0, part=part))
        item["status"] = status
        events.append(self.event("response.output_item.done", output_index=len(self.items), item=item))
        self.items.append(item)
        self._open = None
        return events

    def _turn_to(self, kind: str) -> list[bytes]:
        if self._open is not None and self._open["type"] == kind:
            return []
        return [*self.close(), *self._begin(_item(kind, ""))]

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        self._open = {**item, "status": "in_progress"}
        shown = {**self._open, "content": []} if "content" in item else self._open
        events = [self.event("response.output_item.added", output_index=len(self.items), item=shown)]
        if "content" in item:
            part = item["content"][0]
            events.append(self.event("response.content_part.added", **self._where(), content_index=0, part=part))
        return events

    def _more(self, kind: str, text: str, **more: Any) -> bytes:
        assert self._open is not None, "an item was turned to"
        self._open["content"][0]["text"] += text
        return self.event(kind, **self._where(), content_index=0, delta=text, **more)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None, "an item is open"
        return {"item_id": self._open["id"], "output_index": len(self.items)}


def _items(read: Collected, cut: bool, spaces: Mapping[str, tuple[str, str]]) -> list[dict[str, Any]]:
    """All items of an answer, of which the last one is incomplete where the answer was cut."""
    items = [_item("reasoning", read.thought)] if read.thought else []
    if read.said or not (read.thought or read.calls):
        items.append(_item("message", read.said))
    items += [_call_item(call.name, call.arguments, spaces) for call in read.calls]
    for item in items:
        item["status"] = "incomplete" if cut and item is items[-1] else "completed"
    return items


def _item(kind: str, text: str) -> dict[str, Any]:
    """A message, or what was thought."""
    number = secrets.token_hex(12)
    if kind == "reasoning":
        return {
            "id": f"rs_{number}",
            "type": kind,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": f"msg_{number}", "type": kind, "role": "assistant", "content": [part]}


def _call_item(name: str, arguments: str, spaces: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    space, name = spaces.get(name, (None, name))
    number = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call_id()}
    inside = {} if space is None else {"namespace": space}
    return {**number, "type": "function_call", **inside, "name": name, "arguments": arguments}


def _usage(used: Used) -> dict[str, Any]:
    """Tokens. Those of thoughts are not counted apart."""
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt + used.output,
    }


def routes(app: FastAPI, desk: Desk) -> None:
    """Adds this API's route."""

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        def form(name: str, _: Tokenizer, chat: ChatPrompt, params: SamplingParams) -> ResponseForm:
            return ResponseForm(name, told, chat.reading(params), spaces)

        told, spaces = body.told(), body.spaces
        about: dict[str, Any] = {"model": body.model, "params": body.params, "stream": bool(body.stream)}
        asked = AskedChat(**about, messages=body.conversation(), tools=body.callable(), form=form)
        return await desk.chat(request, asked)
