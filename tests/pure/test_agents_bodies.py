"""Requests as agents send them to the dialects: what they ask of the conversation is done, and what is refused names
itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import BadRequest
from penstock.serve.api.dialects.anthropic_wire import CountRequest, MessagesRequest
from penstock.serve.api.dialects.responses_wire import ResponsesRequest
from penstock.serve.api.wire import what_is_wrong

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


def turn(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def thought(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": ""}


def claude_code(**more: Any) -> dict[str, Any]:
    """A body as Claude Code 2.1.332 sends it, its texts cut."""
    return {
        "model": "tiny", "max_tokens": 32000, "stream": True,
        "system": [text("You are an agent."), text("Be brief.", cache_control={"type": "ephemeral"})],
        "messages": [
            turn("user", text("Say hello", cache_control={"type": "ephemeral"})),
            {"role": "system", "content": "Agent types: claude."},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs a command.", "input_schema": NO_ARGUMENTS},
            {"name": "Later", "description": "Never call it.", "input_schema": NO_ARGUMENTS, "defer_loading": True},
        ],
        "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"}, **more,
    }  # fmt: skip


def test_a_body_of_claude_codes() -> None:
    body = MessagesRequest.model_validate(claude_code())
    assert [(each["role"], each["content"]) for each in body.conversation()] == [
        ("system", "You are an agent.Be brief."), ("user", "Say hello"), ("system", "Agent types: claude."),
    ]  # fmt: skip
    tools = body.callable()
    assert tools is not None and [tool.name for tool in tools.offered] == ["Bash"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("all", ["a", "b", "c"]),
        ({"type": "all"}, ["a", "b", "c"]),
        ({"type": "thinking_turns", "value": 2}, ["b", "c"]),
        (None, ["c"]),
        ({"type": "thinking_turns", "value": 9}, ["a", "b", "c"]),
    ],
)
def test_thoughts_are_cleared_as_asked(keep: Any, left: list[str]) -> None:
    turns = [
        turn("user", text("1")), turn("assistant", thought("a"), text("one")),
        turn("user", text("2")), turn("assistant", thought("b")), turn("user", text("3")),
        turn("assistant", text("three")), turn("user", text("4")), turn("assistant", thought("c"), text("four")),
        turn("user", text("5")),
    ]  # fmt: skip
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    body = CountRequest.model_validate({"messages": turns, "context_management": {"edits": [edit]}})
    said = body.conversation()
    assert [each["reasoning_content"] for each in said if "reasoning_content" in each] == left
    assert [each["content"] for each in said if each["role"] == "user"] == ["1", "2", "3", "4", "5"]
    assert [each["content"] for each in said if each["content"] in ("one", "three", "four")] == ["one", "three", "four"]


def test_a_tool_that_was_found_may_be_called() -> None:
    found = [text("Found: "), {"type": "tool_reference", "tool_name": "Later"}]
    search = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
    more = [
        turn("assistant", search),
        turn("user", {"type": "tool_result", "tool_use_id": "toolu_1", "content": found}),
    ]
    body = MessagesRequest.model_validate(claude_code(messages=[turn("user", text("Say hello")), *more]))
    tools = body.callable()
    assert tools is not None and [tool.name for tool in tools.offered] == ["Bash", "Later"]
    assert body.conversation()[-1]["content"] == "Found: Later may be called now.\n"
    alone = MessagesRequest.model_validate(claude_code(tools=claude_code()["tools"][1:]))
    assert alone.callable() is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_thinking_20251015"),
        ({"context_management": {"edits": [], "compact": True}}, "compact"),
        ({"container": "a"}, "container"),
        ({"tools": [{"name": "a", "input_schema": NO_ARGUMENTS, "input_examples": []}]}, "input_examples"),
        ({"messages": [turn("user", {"type": "redacted_thinking", "data": ""})]}, "'redacted_thinking'"),
    ],
)
def test_what_claude_code_may_not_ask(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MessagesRequest.model_validate(claude_code(**more))
    assert says in what_is_wrong(refused.value.errors())[0]


def said_by(role: str, said: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": said}]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}


def codex(**more: Any) -> dict[str, Any]:
    """A body as Codex 0.169.0 sends it, its texts cut, without its web search."""
    function = {"type": "function", "description": "Runs.", "strict": False, "parameters": NO_ARGUMENTS}
    agents = [{**function, "name": name} for name in ("spawn_agent", "close_agent")]
    return {
        "model": "tiny", "stream": True, "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"}, "store": False, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2", "client_metadata": {"session_id": "01a2", "turn_id": "01a3"},
        "input": [
            said_by("developer", "Code."), said_by("user", "Say hello"),
        ],
        "tools": [
            {**function, "name": "exec_command"},
            {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": agents},
        ],
        **more,
    }  # fmt: skip


def test_a_body_of_codexs() -> None:
    body = ResponsesRequest.model_validate(codex())
    assert [(each["role"], each["content"]) for each in body.conversation()] == [
        ("system", "Code."), ("user", "Say hello"),
    ]  # fmt: skip
    tools = body.callable()
    assert tools is not None
    assert [(tool.name, tool.description) for tool in tools.offered] == [
        ("exec_command", "Runs."), ("agents.spawn_agent", "Runs.\n\nOf agents."),
        ("agents.close_agent", "Runs.\n\nOf agents."),
    ]  # fmt: skip
    assert body.spaces == {
        "agents.spawn_agent": ("agents", "spawn_agent"), "agents.close_agent": ("agents", "close_agent"),
    }  # fmt: skip


def test_calls_into_a_namespace_are_the_models_again() -> None:
    call = {
        "type": "function_call",
        "call_id": "call_1",
        "name": "spawn_agent",
        "namespace": "agents",
        "arguments": "{}",
    }
    output = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    body = ResponsesRequest.model_validate(codex(input=[*codex()["input"], call, output]))
    assert body.conversation()[-2]["tool_calls"][0]["function"]["name"] == "agents.spawn_agent"


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([{"type": "web_search", "external_web_access": False}], "web_search"),
        ([{"type": "custom", "name": "apply_patch", "format": {}}], "custom"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "web_search"}]}], "namespace a should have a name"),
        ([{"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}], "custom"),
        ([{"type": "namespace", "name": "a", "tools": [], "functions": []}], "functions"),
        ([{"type": "namespace", "name": "a b", "tools": [{"type": "function", "name": "c"}]}], "a tool's name"),
    ],
)
def test_what_codex_may_not_ask(tools: list[dict[str, Any]], says: str) -> None:
    body = ResponsesRequest.model_validate(codex(tools=tools))
    with pytest.raises(BadRequest, match=says):
        body.callable()
