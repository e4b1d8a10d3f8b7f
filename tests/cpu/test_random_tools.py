"""Calls of tools with random schemas, as every family of chat templates writes them: each one parses and validates.

Two hundred schemas run in `make test`; `make fuzz` runs three thousand, several hundred of each family.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import penstock
from penstock.serve.api.chats import ChatPrompt
from penstock.serve.engine import Engine
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.writing import WRITINGS
from penstock.store.pack import pack
from tests.cpu.engines import load

BUNDLED = Path(penstock.__file__).parent / "assets" / "tale-llama"
AT_ONCE = 8  # schemas of an example: their answers share passes
NAMES = ("x", "y", "zed", "a b", "é", "kind")
MOST = 480  # tokens of an answer


def lengths(most: int) -> st.SearchStrategy[dict[str, int]]:
    """Bounds of a string or a list, or none below."""
    return st.tuples(st.integers(0, 2), st.integers(2, most)).map(lambda pair: {"min": pair[0], "max": pair[1]})


leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(
        [
            {"type": "boolean"}, {"type": "null"}, {"enum": ["a", "b c", 3, None, True]}, {"const": 'say "é"\n'},
            {"type": "string", "format": "date"}, {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": ["integer", "null"], "minimum": -3, "maximum": 40}, {"type": "string", "enum": ["\\", "/", "\t"]},
        ]
    ),
    st.tuples(st.integers(-1000, 0), st.integers(0, 1000)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}
    ),
    lengths(9).map(lambda n: {"type": "string", "minLength": n["min"], "maxLength": n["max"]}),
)  # fmt: skip


def deeper(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects, some of whose fields may be missing, lists, and either of two."""
    objects = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=3).flatmap(
        lambda parts: st.lists(st.sampled_from([*parts]), unique=True).map(
            lambda required: {
                "type": "object", "properties": parts, "required": required, "additionalProperties": False,
            }
        )
    )  # fmt: skip
    lists = st.tuples(inner, lengths(3)).map(
        lambda both: {"type": "array", "items": both[0], "minItems": both[1]["min"], "maxItems": both[1]["max"]}
    )
    return st.one_of(objects, lists, st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}))


values = st.recursive(leaves, deeper, max_leaves=5)
parameters = st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3).map(
    lambda parts: {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = tmp_path_factory.mktemp("tale") / "packed"
    pack(BUNDLED, target)
    with load(target, batch=AT_ONCE, context=512) as found:
        yield found


@pytest.fixture(scope="module")
def service(engine: Engine) -> Iterator[Service]:
    with closing(Service.of_whole_answers(engine)) as found:
        yield found


@pytest.mark.fuzz
def test_every_call_validates(engine: Engine, service: Service) -> None:
    """Of nearly all schemas, and of every family, there is a call that is whole."""
    calls, asked = Counter[str](), 0
    prompt = engine.tokenizer.encode("Once upon a time")

    @settings(max_examples=max(8, settings().max_examples // 12), deadline=None)
    @given(
        schemas=st.lists(parameters, min_size=AT_ONCE, max_size=AT_ONCE), seed=st.integers(0, 1 << 30),
        first=st.integers(0, len(WRITINGS) - 1), parallel=st.booleans(),
    )  # fmt: skip
    def run(schemas: list[dict[str, Any]], seed: int, first: int, parallel: bool) -> None:
        nonlocal asked
        chats, params = [], []
        for i, schema in enumerate(schemas):
            function = {"name": "look.up-it", "parameters": schema}
            tools = Tools(offered([{"type": "function", "function": function}]), "required", parallel)
            chats.append(ChatPrompt(prompt, tools, writing=WRITINGS[(first + i) % len(WRITINGS)]))
            params.append(chats[-1].ruled(SamplingParams(max_tokens=MOST, temperature=1.0, seed=seed + i)))
        answers = service.generate([prompt] * AT_ONCE, params)
        for chat, schema, how, answer in zip(chats, schemas, params, answers, strict=True):
            assert chat.writing is not None
            made = chat.reading(how).whole(answer.text).calls
            if answer.finish_reason == "length":  # its last call may be cut; who may call more than once, often is
                made = made[:-1]
            else:
                assert made, answer.text
            for call in made:
                assert call.name == "look.up-it"
                Draft202012Validator(schema).validate(json.loads(call.arguments))
            calls[chat.writing.name] += bool(made)
        asked += AT_ONCE

    run()
    assert calls.keys() == {writing.name for writing in WRITINGS}
    assert calls.total() >= 0.85 * asked, (asked, calls)
