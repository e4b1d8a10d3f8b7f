"""OpenAI's Responses API: /v1/responses, whole and streamed, with functions and thoughts. Nothing is stored: a client
sends the conversation each time."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from penstock.errors import BadRequest, PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import Chat
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.shape import call_id
from penstock.serve.api.wire import MAX_MESSAGES, MAX_TOKENS, TEXT_ALONE, Sent
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.schemas import JSON_OBJECT
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.reading import CallBegun, CallMore, Collected, Part, Reading, Said, Thought


class _Given(BaseModel):
    """An item as an earlier response had it: what else it holds is not read."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class ResponseText(_Given):
    type: Annotated[Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"], TEXT_ALONE]
    text: str


class MessageItem(_Given):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponseText]


class CallItem(_Given):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Given):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponseText]


class ReasoningItem(_Given):
    type: Literal["reasoning"]
    content: list[ResponseText] | None = None


def _kind(item: Any) -> str:
    """Which item it is: a message need not say so."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class AnswerFormat(Sent):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Sent):
    """`verbosity`: means nothing."""

    format: AnswerFormat | None = None
    verbosity: str | None = None


class NamedResponseFunction(Sent):
    type: Literal["function"]
    name: str


class ResponsesRequest(Sent):
    """A body of /v1/responses. `store`, `include`, `metadata`, `reasoning` and names of the client's are taken, and
    mean nothing: models think as their template has it."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The items as chat templates take them: calls that follow each other are one message's."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):
                thought += _text(item.content or "")
                continue
            if isinstance(item, OutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif isinstance(item, CallItem):
                call = {
                    "id": item.call_id, "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                }  # fmt: skip
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"], thought = thought, ""
        return messages

    def callable(self) -> Tools | None:
        """The functions that the answer may call. Raises BadRequest."""
        tools = Tools(offered(self.tools or ()), parallel=self.parallel_tool_calls is not False)
        if not self.tools or self.tool_choice == "none":
            return None
        if isinstance(self.tool_choice, NamedResponseFunction):
            return tools.only(self.tool_choice.name)
        return replace(tools, choice="required") if self.tool_choice == "required" else tools

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        form = self.text.format if self.text is not None else None
        schema = JSON_OBJECT if form is not None and form.type == "json_object" else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise BadRequest("text.format is a json_schema without its schema")
        return with_model_defaults(
            generation_config, max_tokens=self.max_output_tokens or most_tokens, temperature=self.temperature,
            top_p=self.top_p, json_schema=form.schema_ if form is not None and form.schema_ is not None else schema,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What a response repeats of its request. Raises BadRequest for what no JSON can hold."""
        told = self._told()
        try:
            json.dumps(told, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request holds what JSON cannot: {str(error)[:200]}") from None
        return told

    def _told(self) -> dict[str, Any]:
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": self.temperature,
            "tool_choice": "auto" if self.tool_choice is None else _plain(self.tool_choice),
            "tools": self.tools or [],
            "top_p": self.top_p,
            "text": {"format": {"type": "text"}} if self.text is None else _plain(self.text),
            "truncation": "disabled",
        }


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, BaseModel) else value


def _text(content: str | Sequence[ResponseText]) -> str:
    """A text, or parts of it."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


@dataclass
class ResponseForm:
    """`told`: what the response repeats of its request. `reading`: takes the answer apart."""

    model: str
    told: dict[str, Any]
    reading: Reading
    media_type: str = "text/event-stream"
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created_s: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        (answer,) = answers
        read = self.reading.whole(answer.text)
        return self._response(answer, used, _items(read, answer.finish_reason == "length"))

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        events = _ResponseEvents()
        begun = {**self._head("in_progress"), "output": [], "usage": None}
        yield events.event("response.created", response=begun)
        yield events.event("response.in_progress", response=begun)
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    yield b": still waiting, or reading the prompt\n\n"
                    continue
                parts = self.reading.finish() if isinstance(piece, Generation) else self.reading.push(piece.text)
                for part in parts:
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
    """The events of a streamed response. `items`: those that are whole. One at a time is open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._number = 0
        self._open: dict[str, Any] | None = None

    def event(self, kind: str, **more: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number, **more}, ensure_ascii=False)
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()

    def of(self, part: Part) -> list[bytes]:
        """The events of a part."""
        match part:
            case Said(text):
                return [*self._turn_to("message"), self._more("response.output_text.delta", text, logprobs=[])]
            case Thought(text):
                return [*self._turn_to("reasoning"), self._more("response.reasoning_text.delta", text)]
            case CallBegun(name):
                return [*self.close(), *self._begin(_call_item(name, ""))]
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


def _items(read: Collected, cut: bool) -> list[dict[str, Any]]:
    """All items of an answer, of which the last one is incomplete where the answer was cut."""
    items = [_item("reasoning", read.thought)] if read.thought else []
    if read.said or not read.calls:
        items.append(_item("message", read.said))
    items += [_call_item(call.name, call.arguments) for call in read.calls]
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


def _call_item(name: str, arguments: str) -> dict[str, Any]:
    number = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call_id()}
    return {**number, "type": "function_call", "name": name, "arguments": arguments}


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
        def form(name: str, _: Tokenizer, chat: Chat, params: SamplingParams) -> ResponseForm:
            return ResponseForm(name, told, chat.reading(params))

        told = body.told()
        about: dict[str, Any] = {"model": body.model, "params": body.params, "stream": bool(body.stream)}
        asked = AskedChat(**about, messages=body.conversation(), tools=body.callable(), form=form)
        return await desk.chat(request, asked)
