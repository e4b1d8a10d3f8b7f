"""Anthropic's Messages API: /v1/messages, whole and streamed, with tools and thoughts; count_tokens beside it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from pydantic import Field

from penstock.errors import BadRequest, PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import Chat, chat_of
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.errors import error_body
from penstock.serve.api.wire import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, Sent
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.reading import CallBegun, CallMore, Part, Reading, Said, Thought

_PATH = "/v1/messages"


class _Block(Sent):
    """`cache_control`: means nothing here, since what prompts begin with is always shared."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Sent):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(_Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Sent):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Sent):
    """Models think or do not think as their template has it. `budget_tokens`: the most of what they think. `display`:
    means nothing."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    display: str | None = None


class OutputFormat(Sent):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Sent):
    """`effort`: means nothing."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Sent):
    """A body of /v1/messages/count_tokens. `preface`: the system prompt."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    preface: str | list[TextBlock] | None = Field(default=None, alias="system")
    tools: list[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them, in OpenAI's form. Raises BadRequest if the last one is the
        assistant's."""
        if self.messages[-1].role == "assistant":
            raise BadRequest("the last message should be the user's: an answer cannot be begun for the model")
        found = [{"role": "system", "content": _text(self.preface)}] if self.preface else []
        return [*found, *(message for turn in self.messages for message in _messages(turn))]

    def callable(self) -> Tools | None:
        """The tools that the answer may call. Raises BadRequest."""
        choice = self.tool_choice or ToolChoice(type="auto")
        if not self.tools or choice.type == "none":
            return None
        given = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema} for tool in self.tools
        ]
        tools = Tools(offered(given), parallel=not choice.disable_parallel_tool_use)
        if choice.type == "tool":
            return tools.only(choice.name or "")
        return replace(tools, choice="required") if choice.type == "any" else tools


class MessagesRequest(CountRequest):
    """A body of /v1/messages. `metadata`, `service_tier` and `cache_control` are taken, and mean nothing."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None

    def _schema(self) -> dict[str, Any] | None:
        return self.output_config.format.schema_ if self.output_config and self.output_config.format else None

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        stops = self.stop_sequences or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise BadRequest(f"stop_sequences may have {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
        return with_model_defaults(
            generation_config, max_tokens=min(self.max_tokens, most_tokens), temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k, stop=tuple(stops) or None, json_schema=self._schema(),
            thinking_tokens=self.thinking.budget_tokens if self.thinking is not None else None,
        )  # fmt: skip


def _text(content: str | Sequence[TextBlock] | None) -> str:
    """A text, or blocks of it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn in OpenAI's form: results of tools are messages of their own, before what the user says beside them.
    Raises BadRequest where a block is the other side's."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": turn.role, "content": ""}
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            _require(turn.role == "user", "tool_result", "user")
            result = f"Error: {_text(block.content)}" if block.is_error else _text(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif isinstance(block, ToolUseBlock):
            _require(turn.role == "assistant", "tool_use", "assistant")
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        else:
            message["content"] += block.text
    said = message["content"] or "tool_calls" in message or not messages
    return [*messages, message] if said else messages


def _require(good: bool, block: str, role: str) -> None:
    if not good:
        raise BadRequest(f"a {block} block is for messages of the {role}")


@dataclass(frozen=True)
class MessageForm:
    """`prompt_tokens`: of the request. `reading`: takes the answer apart."""

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
        if read.said or not read.calls:
            content.append({"type": "text", "text": read.said})
        for call in read.calls:
            content.append({**_use(call.name), "input": _object(call.arguments)})
        ends = {**_end(answer, bool(read.calls)), "usage": _usage(used)}
        return {**self._head(), "content": content, **ends}

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        started = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=started)
        blocks = _Blocks()
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    yield _event("ping")
                    continue
                whole = isinstance(piece, Generation)
                parts = self.reading.finish() if isinstance(piece, Generation) else self.reading.push(piece.text)
                for part in parts:
                    for event in blocks.of(part):
                        yield event
                if whole:
                    for event in blocks.end():
                        yield event
            delta = _end(answers.whole[0], bool(self.reading.calls))
            yield _event("message_delta", delta=delta, usage=_usage(answers.used))
            yield _event("message_stop")
        except (PenstockError, Gone) as error:  # the status is sent already
            body = error_body(_PATH, 500, str(error), "server_error")
            yield _event("error", error=body["error"])

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": self.model}


class _Blocks:
    """The blocks of a streamed message: one at a time is open."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""

    def of(self, part: Part) -> list[bytes]:
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
        return [_event("content_block_stop", index=self._index)]

    def end(self) -> list[bytes]:
        """The message ends. One without any block has an empty text."""
        empty = [self._begin("text", {"type": "text", "text": ""})] if self._index < 0 else []
        return [*empty, *self.close()]

    def _more(self, kind: str, begun: dict[str, Any], **delta: Any) -> list[bytes]:
        opening = [] if self._open == kind else [*self.close(), self._begin(kind, begun)]
        return [*opening, self._delta(**delta)]

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index, self._open = self._index + 1, kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **more: Any) -> bytes:
    body = json.dumps({"type": kind, **more}, ensure_ascii=False)
    return f"event: {kind}\ndata: {body}\n\n".encode()


def _use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name}


def _object(arguments: str) -> dict[str, Any]:
    """Arguments of a call; those of one that was cut are none."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


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
        def form(name: str, _: Tokenizer, chat: Chat, params: SamplingParams) -> MessageForm:
            return MessageForm(name, len(chat.ids), chat.reading(params))

        about: dict[str, Any] = {"model": body.model, "params": body.params, "stream": body.stream}
        asked = AskedChat(**about, messages=body.conversation(), tools=body.callable(), form=form)
        return await desk.chat(request, asked)

    @app.post(f"{_PATH}/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        hold = await desk.hold(body.model)
        try:
            chat = partial(chat_of, hold.loaded.service.engine.tokenizer, body.conversation(), body.callable())
            return {"input_tokens": len((await to_thread.run_sync(chat, limiter=desk.one)).ids)}
        finally:
            hold.end()
