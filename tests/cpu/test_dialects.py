"""Clients of other dialects at our server: whole, streamed, tools in two turns, errors in each one's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.cpu.servers import Server, serving
from tests.cpu.test_tools import BUNDLED, LEGS

QUESTION: list[Any] = [{"role": "user", "content": "Once upon a time"}]
TOOL: Any = {"name": "count_legs", "description": "Legs.", "input_schema": LEGS}
USE: Any = {"type": "tool_use", "id": "1", "name": "a", "input": {}}
GREEDY = {"temperature": 0}  # the package has no name for it
OLLAMA_TOOL: Any = {"type": "function", "function": {"name": "count_legs", "description": "Legs.", "parameters": LEGS}}


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    with serving(BUNDLED, cache, "--batch", 4, "--name", "tale", "--context", 512) as found:
        yield found


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def llama(server: Server) -> ollama.Client:
    return ollama.Client(host=f"http://127.0.0.1:{server.port}", timeout=600)


@pytest.fixture(scope="module")
def said(server: Server) -> str:
    """The greedy answer, by OpenAI's API."""
    done = server.client().chat.completions.create(model="tale", messages=QUESTION, max_tokens=12, temperature=0)
    return done.choices[0].message.content or ""


def test_a_message_of_anthropics(claude: anthropic.Anthropic, said: str) -> None:
    done = claude.messages.create(model="tale", max_tokens=12, messages=QUESTION, extra_body=GREEDY)
    assert (done.content[0].text, done.stop_reason, done.role) == (said, "max_tokens", "assistant")  # type: ignore[union-attr]
    assert done.usage.output_tokens == 12 and done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) > 5
    with claude.messages.stream(model="tale", max_tokens=12, messages=QUESTION, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == said
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    stop = said.split()[2]
    cut = claude.messages.create(
        model="tale", max_tokens=12, messages=QUESTION, extra_body=GREEDY, stop_sequences=[stop]
    )
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    blocks: list[Any] = [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]
    parts = claude.messages.create(
        model="tale", max_tokens=12, messages=[{"role": "user", "content": blocks}], extra_body=GREEDY
    )
    assert parts.content[0].text == said  # type: ignore[union-attr]
    form: Any = {"format": {"type": "json_schema", "schema": LEGS}}
    held = claude.messages.create(model="tale", max_tokens=90, messages=QUESTION, output_config=form)
    assert 0 <= json.loads(held.content[0].text)["legs"] <= 9  # type: ignore[union-attr]
    counted = claude.messages.count_tokens(model="tale", messages=QUESTION, system="Be brief.")
    assert counted.input_tokens > claude.messages.count_tokens(model="tale", messages=QUESTION).input_tokens


def test_tools_of_anthropics_in_two_turns(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": "tale", "max_tokens": 120, "tools": [TOOL], "extra_body": GREEDY,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    done = claude.messages.create(messages=QUESTION, **asked)
    assert done.stop_reason == "tool_use"
    used = [block for block in done.content if block.type == "tool_use"]
    assert used and all(0 <= block.input["legs"] <= 9 for block in used)  # type: ignore[index]
    with claude.messages.stream(messages=QUESTION, **asked) as stream:
        final = stream.get_final_message()
    assert [(b.name, b.input) for b in final.content if b.type == "tool_use"] == [(b.name, b.input) for b in used]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "4"} for block in used]
    turns: list[Any] = [
        *QUESTION, {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in done.content]},
        {"role": "user", "content": results},
    ]  # fmt: skip
    asked = {**asked, "tool_choice": {"type": "none"}, "max_tokens": 5}
    assert claude.messages.create(messages=turns, **asked).usage.output_tokens


def test_errors_of_anthropics(server: Server, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        claude.messages.create(model="other", max_tokens=5, messages=QUESTION)
    for body, says in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "not empty"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, "last message"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "name"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "assistant"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
    ):  # fmt: skip
        given: dict[str, Any] = {"model": "tale", "max_tokens": 5, "messages": QUESTION, **body}
        with pytest.raises(anthropic.BadRequestError, match=says) as refused:
            claude.messages.create(**given)
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    status, _, found = server.ask("POST", "/v1/messages", {}, {"host": "elsewhere.example"})
    assert status == 421 and found["type"] == "error"


def test_a_key_as_anthropics_clients_send_it(model: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    (tmp_path / "keys").chmod(0o600)
    with serving(model, cache, "--key-file", tmp_path / "keys") as server:
        url = f"http://127.0.0.1:{server.port}"
        ask: dict[str, Any] = {"model": "", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        good = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0)
        assert good.messages.create(**ask).usage.output_tokens
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="other", max_retries=0).messages.create(**ask)


def test_a_chat_of_ollamas(llama: ollama.Client, said: str) -> None:
    options: Any = {"num_predict": 12, "temperature": 0, "num_ctx": 512}
    done = llama.chat(model="tale", messages=QUESTION, options=options)
    assert (done.message.content, done.done, done.done_reason) == (said, True, "length")
    assert done.eval_count == 12 and done.prompt_eval_count and done.total_duration
    pieces = list(llama.chat(model="tale:latest", messages=QUESTION, options=options, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == said
    assert pieces[-1].done and pieces[-1].eval_count == 12
    assert llama.generate(model="tale", prompt="Once upon a time", options=options).response == said
    raw = llama.generate(model="tale", prompt="Once upon a time", options=options, raw=True).response
    assert raw and raw != said
    held = llama.chat(model="tale", messages=QUESTION, options={"num_predict": 90, "seed": 1}, format=LEGS)
    assert 0 <= json.loads(held.message.content or "")["legs"] <= 9


def test_tools_of_ollamas_in_two_turns(llama: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": "tale", "tools": [OLLAMA_TOOL], "options": {"num_predict": 8}}
    assert llama.chat(messages=QUESTION, **asked).message.content is not None
    turns = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"function": {"name": "count_legs", "arguments": {"legs": 4}}}]},
        {"role": "tool", "tool_name": "count_legs", "content": "four"},
    ]  # fmt: skip
    assert llama.chat(messages=turns, **asked).eval_count


def test_what_ollamas_clients_ask_about(llama: ollama.Client, server: Server) -> None:
    assert [model.model for model in llama.list().models] == ["tale"]
    assert llama.ps().models[0].model == "tale"
    shown = llama.show("tale")
    assert shown.capabilities and "tools" in shown.capabilities and shown.details and shown.details.family == "llama"
    assert server.ask("GET", "/api/version")[2]["version"]
    with pytest.raises(ollama.ResponseError, match="no model") as refused:
        llama.chat(model="other", messages=QUESTION)
    assert refused.value.status_code == 404
    assert llama.generate(model="tale").done_reason == llama.chat(model="tale").done_reason == "load"
    for options, says in (
        ({"num_predict": 0}, "num_predict is 0"),
        ({"num_ctx": 4096}, "more than the server's 512"),
        ({"mirostat": 1}, "mirostat"),
    ):
        with pytest.raises(ollama.ResponseError, match=says):
            llama.chat(model="tale", messages=QUESTION, options=options)
    with pytest.raises(ollama.ResponseError, match="images"):
        llama.chat(model="tale", messages=[{**QUESTION[0], "images": [b"abc"]}])


def test_a_response(server: Server, said: str) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "tale", "input": "Once upon a time", "max_output_tokens": 12, "temperature": 0}
    done = client.responses.create(**asked)
    assert (done.output_text, done.status, done.incomplete_details.reason) == (said, "incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert done.usage is not None and done.usage.output_tokens == 12 and done.usage.total_tokens > 12
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == said
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Once upon a time"}]}]
    assert client.responses.create(**{**asked, "input": parts}).output_text == said
    schema = {"type": "json_schema", "name": "legs", "schema": LEGS}
    held = client.responses.create(**{**asked, "max_output_tokens": 90, "text": {"format": schema}})
    assert held.status == "completed" and 0 <= json.loads(held.output_text)["legs"] <= 9
    for more, says in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "type: function"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "item_reference"),
        ({"input": []}, "input"),
        ({"tool_choice": "none", "tools": [{"type": "function", "name": "a b"}]}, "name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "without its schema"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            client.responses.create(**{**asked, **more})


def test_what_no_json_can_hold_is_not_said_back(server: Server) -> None:
    for more in (
        '"metadata": {"a": "\\ud800"}',
        '"tools": [{"type": "function", "name": "f", "x": NaN}], "tool_choice": "none"',
    ):
        body = f'{{"input": "a", "max_output_tokens": 2, {more}}}'.encode()
        status, _, found = server.ask("POST", "/v1/responses", body, {"content-type": "application/json"})
        assert status in (200, 400) and found, (more, found)


def test_functions_of_a_response_in_two_turns(server: Server) -> None:
    client = server.client()
    tool = {"type": "function", "name": "count_legs", "parameters": LEGS, "strict": True}
    asked: dict[str, Any] = {
        "model": "tale", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
    }  # fmt: skip
    question: list[Any] = [{"role": "user", "content": "Once upon a time"}]
    done = client.responses.create(input=question, max_output_tokens=120, **asked)
    (call,) = done.output
    assert call.type == "function_call" and 0 <= json.loads(call.arguments)["legs"] <= 9
    with client.responses.stream(input=question, max_output_tokens=120, **asked) as stream:
        final = stream.get_final_response()
    assert [(each.name, each.arguments) for each in final.output] == [(call.name, call.arguments)]  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    turns = [*question, call.model_dump(exclude_none=True), result]
    asked["tool_choice"] = "none"
    assert client.responses.create(input=turns, max_output_tokens=5, **asked).usage.output_tokens  # type: ignore[union-attr]


def test_calls_into_a_namespace(server: Server) -> None:
    client = server.client()
    inner = {"type": "function", "name": "count", "description": "Legs.", "parameters": LEGS}
    tools: list[Any] = [{"type": "namespace", "name": "legs", "description": "Of legs.", "tools": [inner]}]
    asked: dict[str, Any] = {
        "model": "tale", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
        "input": [{"role": "user", "content": "Once upon a time"}],
        "extra_body": {"client_metadata": {"turn_id": "1"}},
    }  # fmt: skip
    (call,) = client.responses.create(max_output_tokens=120, **asked).output
    assert call.type == "function_call" and 0 <= json.loads(call.arguments)["legs"] <= 9
    assert (call.name, call.model_dump().get("namespace")) == ("count", "legs")
    events = list(client.responses.create(max_output_tokens=120, stream=True, **asked))
    (item,) = events[-1].response.output
    assert (item.name, item.model_dump().get("namespace"), item.arguments) == ("count", "legs", call.arguments)
    asked["input"] = [
        *asked["input"], call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "4"},
    ]  # fmt: skip
    asked["tool_choice"] = "none"
    assert client.responses.create(max_output_tokens=5, **asked).usage.output_tokens


def test_a_keyword_that_cannot_be_held_is_refused_of_strict_tools_alone(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"legs": {"type": "object", "propertyNames": {"maxLength": 2}}}}
    asked: dict[str, Any] = {"model": "tale", "max_tokens": 5, "messages": QUESTION}
    tool: dict[str, Any] = {"name": "a", "input_schema": schema}
    assert claude.messages.create(tools=[tool], **asked).usage.output_tokens
    with pytest.raises(anthropic.BadRequestError, match="propertyNames"):
        claude.messages.create(tools=[{**tool, "strict": True}], **asked)


def test_a_client_that_goes_leaves_nothing(llama: ollama.Client, claude: anthropic.Anthropic, server: Server) -> None:
    for stream in (
        llama.chat(model="tale", messages=QUESTION, stream=True),
        claude.messages.create(model="tale", max_tokens=300, messages=QUESTION, stream=True),
    ):
        next(iter(stream))  # type: ignore[call-overload]
        stream.close()  # type: ignore[union-attr]
    for _ in range(200):
        if "penstock_sequences_free 4.0" in server.ask("GET", "/metrics")[2]:
            return
    pytest.fail("an answer that nobody takes goes on")
