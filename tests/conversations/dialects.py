"""The dialects of the server: a request as each writes it, and what whole answers and streams say, in one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.conversations.draws import Asked

Body = dict[str, Any]


@dataclass
class Said:
    """An answer. `calls`: [name, arguments as they were written] each. `more`: what else has to be the same."""

    text: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reason: str | None = None
    tokens: int = 0
    more: list[Any] = field(default_factory=list)


class Dialect(NamedTuple):
    """`body(asked, stream)`; `whole(answer)`; `streamed(objects of the events)`."""

    path: str
    body: Callable[[Asked, bool], Body]
    whole: Callable[[Any], Said]
    streamed: Callable[[Sequence[Any]], Said]


def objects(text: bytes) -> list[Any]:
    """The objects of a stream: of server-sent events, or of lines of JSON."""
    lines = text.split(b"\n")
    sent = [line.removeprefix(b"data: ") for line in lines if line.startswith((b"data: ", b"{"))]
    return [json.loads(line) for line in sent if line != b"[DONE]"]


def _functions(asked: Asked) -> list[Body]:
    return [{"type": "function", "function": tool} for tool in asked.tools]


def _chat_body(asked: Asked, stream: bool) -> Body:
    body: Body = {"messages": asked.messages, "max_tokens": asked.max_tokens, **asked.options}
    if asked.tools:
        body |= {"tools": _functions(asked), "tool_choice": "required" if asked.must else "auto"}
    if asked.schema is not None:
        named = {"name": "x", "schema": asked.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _chat_whole(answer: Any) -> Said:
    (choice,) = answer["choices"]
    message, scores = choice["message"], (choice["logprobs"] or {}).get("content") or []
    called = [call["function"] for call in message.get("tool_calls", [])]
    return Said(
        message["content"] or "", message.get("reasoning_content", ""),
        [[call["name"], call["arguments"]] for call in called],
        choice["finish_reason"], answer["usage"]["completion_tokens"], scores,
    )  # fmt: skip


def _chat_streamed(events: Sequence[Any]) -> Said:
    said = Said(tokens=events[-1]["usage"]["completion_tokens"])
    for (choice,) in (event["choices"] for event in events if event["choices"]):
        delta = choice["delta"]
        said.text += delta.get("content") or ""
        said.thought += delta.get("reasoning_content") or ""
        said.more += (choice["logprobs"] or {}).get("content") or []
        for call in delta.get("tool_calls", []):
            said.calls += [["", ""] for _ in range(call["index"] + 1 - len(said.calls))]
            for i, name in enumerate(("name", "arguments")):
                said.calls[call["index"]][i] += call["function"].get(name) or ""
        assert said.reason is None, "nothing comes after the reason"
        said.reason = choice["finish_reason"]
    return said


def _messages_body(asked: Asked, stream: bool) -> Body:
    system = [each["content"] for each in asked.messages if each["role"] == "system"]
    others = [each for each in asked.messages if each["role"] != "system"]
    body: Body = {"model": "m", "messages": others, "max_tokens": asked.max_tokens, "temperature": 0, "stream": stream}
    body |= {"system": system[0]} if system else {}
    if asked.tools:
        body["tools"] = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in asked.tools
        ]
        body |= {"tool_choice": {"type": "any"}} if asked.must else {}
    return body


def _messages_whole(answer: Any) -> Said:
    said = Said(reason=answer["stop_reason"], tokens=answer["usage"]["output_tokens"])
    for block in answer["content"]:
        said.text += block.get("text", "")
        said.thought += block.get("thinking", "")
        said.calls += [[block["name"], json.dumps(block["input"])]] if block["type"] == "tool_use" else []
        said.more.append(block["type"])
    return said


def _messages_streamed(events: Sequence[Any]) -> Said:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            for name in {"text", "thinking", "partial_json"} & event["delta"].keys():
                blocks[event["index"]][name] += event["delta"][name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _object(block["partial_json"])
    (ended,) = (event for event in events if event["type"] == "message_delta")
    return _messages_whole({"content": blocks, "usage": ended["usage"], **ended["delta"]})


def _object(arguments: str) -> Any:
    """Arguments as an object: {} where an answer was cut in them."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _ollama_body(asked: Asked, stream: bool) -> Body:
    body: Body = {"model": "m", "messages": asked.messages, "stream": stream}
    body |= {"tools": _functions(asked)} if asked.tools else {}
    body |= {"format": asked.schema} if asked.schema is not None else {}
    return body | {"options": {"num_predict": asked.max_tokens, "temperature": 0}}


def _ollama_whole(answer: Any) -> Said:
    return _ollama_streamed([answer])


def _ollama_streamed(events: Sequence[Any]) -> Said:
    said = Said(reason=events[-1]["done_reason"], tokens=events[-1]["eval_count"])
    for message in (event["message"] for event in events):
        said.text += message["content"]
        said.thought += message.get("thinking", "")
        called = [call["function"] for call in message.get("tool_calls", [])]
        said.calls += [[call["name"], json.dumps(call["arguments"])] for call in called]
    return said


def _responses_body(asked: Asked, stream: bool) -> Body:
    body: Body = {"input": asked.messages, "max_output_tokens": asked.max_tokens, "temperature": 0, "stream": stream}
    if asked.tools:
        body["tools"] = [{"type": "function", **tool} for tool in asked.tools]
        body |= {"tool_choice": "required"} if asked.must else {}
    if asked.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": asked.schema}}
    return body


def _responses_whole(answer: Any) -> Said:
    said = Said(reason=answer["status"], tokens=answer["usage"]["output_tokens"])
    for item in answer["output"]:
        text = "".join(part["text"] for part in item.get("content", []))
        said.text += text if item["type"] == "message" else ""
        said.thought += text if item["type"] == "reasoning" else ""
        said.calls += [[item["name"], item["arguments"]]] if item["type"] == "function_call" else []
        said.more.append((item["type"], item["status"]))
    return said


def _responses_streamed(events: Sequence[Any]) -> Said:
    """What the last event tells, which the pieces have to be."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    said = _responses_whole(events[-1]["response"])
    whole = {"output_text": said.text, "reasoning_text": said.thought}
    whole["function_call_arguments"] = "".join(arguments for _, arguments in said.calls)
    for kind, text in whole.items():
        assert "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") == text, kind
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return said


DIALECTS = (
    Dialect("/v1/chat/completions", _chat_body, _chat_whole, _chat_streamed),
    Dialect("/v1/messages", _messages_body, _messages_whole, _messages_streamed),
    Dialect("/api/chat", _ollama_body, _ollama_whole, _ollama_streamed),
    Dialect("/v1/responses", _responses_body, _responses_whole, _responses_streamed),
)
