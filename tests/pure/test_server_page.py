"""The page of what a client may send names every field that is taken, and no other as taken."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.serve.api.dialects.anthropic_wire import MessagesRequest
from penstock.serve.api.dialects.ollama_wire import OllamaChat, OllamaEmbed, OllamaGenerate, Options
from penstock.serve.api.dialects.responses_wire import ResponsesRequest
from penstock.serve.api.wire import ChatRequest, CompletionRequest, EmbeddingRequest, what_is_wrong
from tests.cpu.commands import ROOT

FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def fields_of(*models: type[BaseModel]) -> set[str]:
    """The fields of some bodies, by the names that clients send."""
    return {each.alias or name for model in models for name, each in model.model_fields.items()}


def rows_of(heading: str, table: str = "field |") -> dict[str, str]:
    """Field → what it is here, of the table of a section whose heading begins so."""
    _, _, behind = (ROOT / "docs" / "SERVER.md").read_text().partition(f"\n## {heading}\n")
    _, found, table = behind.partition("\n## ")[0].partition(f"\n| {table}")
    assert found, "there is no such table"
    rows = [line.split("|")[1:-1] for line in table.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    return {name: here.strip() for first, here, *_ in rows for name in re.findall(r"`(\w+)`", first)}


def test_every_field_has_its_row() -> None:
    named = rows_of("What a client may send")
    assert named.keys() >= FIELDS
    elsewhere = {"prompt_logprobs"}  # asked for by other names here
    assert named.keys() - FIELDS == elsewhere


def test_every_field_of_embeddings_has_its_row() -> None:
    assert rows_of("Embeddings").keys() == fields_of(EmbeddingRequest)


def test_every_field_of_a_dialect_has_its_row() -> None:
    assert rows_of("Responses").keys() == fields_of(ResponsesRequest)
    assert rows_of("Anthropic's clients", "field of `/v1/messages`").keys() == fields_of(MessagesRequest)
    ollamas = rows_of("Ollama's clients", "field of `/api/chat`")
    assert ollamas.keys() == fields_of(OllamaChat, OllamaGenerate)
    assert {*re.findall(r"`(\w+)`", ollamas["options"])} == fields_of(Options)
    assert rows_of("Ollama's clients", "field of `/api/embed`").keys() == fields_of(OllamaEmbed)


def said(content: Any, **more: Any) -> dict[str, Any]:
    """A conversation of one message."""
    return {"messages": [{"role": "user", "content": content, **more}]}


def holding(kind: str) -> dict[str, Any]:
    """A conversation of one message with a part of this type."""
    return said([{"type": kind}])


ONE, A = {"max_tokens": 1}, {"model": "a"}


@pytest.mark.parametrize(
    ("model", "body", "says"),
    [
        (ChatRequest, holding("image_url"), "images are not read"),
        (ChatRequest, holding("input_audio"), "audio are not read"),
        (ChatRequest, {**said("a"), "modalities": ["audio"]}, "modalities"),
        (ChatRequest, {**said("a"), "prediction": {}}, "prediction"),
        (ResponsesRequest, {"input": holding("input_image")["messages"]}, "images are not read"),
        (ResponsesRequest, {"input": holding("input_file")["messages"]}, "files are not read"),
        (ResponsesRequest, {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        (MessagesRequest, {**ONE, **holding("image")}, "'image'"),
        (MessagesRequest, {**ONE, **holding("document")}, "'document'"),
        (MessagesRequest, {**ONE, **said("a"), "mcp_servers": []}, "mcp_servers"),
        (OllamaChat, {**A, **said("a", images=["x"])}, "images are not read"),
        (OllamaGenerate, {**A, "prompt": "a", "images": ["x"]}, "images are not read"),
        (OllamaGenerate, {**A, "prompt": "a", "template": "x"}, "template"),
        (OllamaChat, {**A, "messages": [], "options": {"mirostat": 1}}, "mirostat"),
        (OllamaEmbed, {**A, "input": "a", "images": ["x"]}, "images"),
        (EmbeddingRequest, {"input": [holding("image_url")]}, "input"),
    ],
)
def test_what_is_not_there_is_refused_by_name(model: type[BaseModel], body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert says in what_is_wrong(refused.value.errors())[0]


def test_calls_as_open_webui_sends_them_to_ollama() -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}
    body = {**A, "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    (message,) = OllamaChat.model_validate(body).conversation()
    assert message["tool_calls"] == [
        {"id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}
    ]
