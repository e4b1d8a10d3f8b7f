"""`response_format` as clients send it: both of OpenAI's shapes, streamed and whole, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.cpu.guided import HOSTILE
from tests.cpu.servers import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 4}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=4)


@pytest.fixture(scope="module")
def server(model: Path, cache: Path) -> Iterator[Server]:
    with serving(model, cache, "--batch", 4, "--name", "tiny") as found:
        yield found


def chat(server: Server, **asked: Any) -> Any:
    messages = [{"role": "user", "content": "Which?"}]
    return server.client().chat.completions.create(model="tiny", messages=messages, temperature=1, **asked)  # type: ignore[call-overload]


def test_both_shapes_whole_and_streamed(server: Server) -> None:
    done = chat(server, n=4, seed=1, max_tokens=60, response_format=NAMED)
    assert [choice.finish_reason for choice in done.choices] == ["stop"] * 4
    for choice in done.choices:
        Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))
    assert len({choice.message.content for choice in done.choices}) > 1
    events = list(chat(server, seed=1, max_tokens=60, response_format=NAMED, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == done.choices[0].message.content
    some = chat(server, n=4, seed=3, max_tokens=90, response_format={"type": "json_object"})
    for choice in some.choices:
        assert choice.message.content.lstrip().startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert chat(server, max_tokens=3, response_format={"type": "text"}).choices
    _, _, text = server.ask(
        "POST", "/v1/completions", {"prompt": "a", "max_tokens": 60, "response_format": NAMED, "logprobs": 1}
    )
    Draft202012Validator(SCHEMA).validate(json.loads(text["choices"][0]["text"]))
    assert len(text["choices"][0]["logprobs"]["tokens"]) == text["usage"]["completion_tokens"]


def test_the_openai_package_parses_what_it_asked_for(server: Server) -> None:
    found = server.client().chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "Which?"}], temperature=1, seed=2, max_tokens=80,
        response_format=Animal,
    )  # fmt: skip
    assert isinstance(found.choices[0].message.parsed, Animal)


def test_what_cannot_be_followed_is_refused_before_it_streams(server: Server) -> None:
    deep: Any = {}
    for _ in range(80):
        deep = {"items": deep}
    for given, says in (
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "grammar"}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "schema"),
        ({"type": "json_schema", "json_schema": {"schema": deep}}, "deeper"),
        *(
            ({"type": "json_schema", "json_schema": {"schema": HOSTILE[name]}}, "JSON schema")
            for name in ("look-ahead", "products", "elsewhere", "unknown words", "impossible", "own grammar")
        ),
    ):
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "a"}], "response_format": given, "stream": stream}
            status, _, found = server.ask("POST", "/v1/chat/completions", body)
            assert status == 400 and says in found["error"]["message"], (given, found)
    with pytest.raises(openai.BadRequestError, match="ignore_eos"):
        chat(server, response_format=NAMED, extra_body={"ignore_eos": True})
    assert "penstock_sequences_free 4.0" in server.ask("GET", "/metrics")[2]


def test_without_schemas_they_take_no_memory_and_are_refused(model: Path, cache: Path) -> None:
    with serving(model, cache, "--no-schemas") as server:
        with pytest.raises(openai.BadRequestError, match="without"):
            server.client().chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "a"}], response_format={"type": "json_object"}
            )
        lean = server.ask("GET", "/v1/plan")[2]["plan"]["process_bytes"]
    with serving(model, cache) as server:
        assert server.ask("GET", "/v1/plan")[2]["plan"]["process_bytes"] > lean
