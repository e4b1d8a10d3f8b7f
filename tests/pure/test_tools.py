"""Answers that call tools, taken apart however they are cut into pieces; tools that clients offer; conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.serve.tools.asked import Tools, _one_by_one, for_template, in_words, offered, short_id
from penstock.serve.tools.budget import Budget
from penstock.serve.tools.grammar import grammar
from penstock.serve.tools.reading import Collected, Reading, ToolCall
from penstock.serve.tools.writing import HARMONY, WRITINGS, Writing

PLAIN = [writing for writing in WRITINGS if not writing.channels]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}
json_objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)),
    max_size=3,
)
names = st.from_regex(r"[a-zA-Z0-9_.-]{1,12}", fullmatch=True)


def written(writing: Writing, said: str, calls: list[ToolCall]) -> str:
    """An answer as this family writes it."""
    found = [f"{writing.before}{call.name}{writing.middle}{call.arguments}{writing.after}" for call in calls]
    joined = (writing.between or "").join(found)
    return f"{said}{writing.head}{writing.open}{joined}{writing.close}"


def read(reading: Reading, text: str, cuts: list[int]) -> Collected:
    """The answer in pieces that end at `cuts`."""
    found, at = Collected(), 0
    for cut in sorted({*(cut % (len(text) + 1) for cut in cuts), len(text)}):
        found.add(reading.push(text[at:cut]))
        at = cut
    return found.add(reading.finish())


@given(st.sampled_from(PLAIN), st.text(max_size=20), st.lists(st.tuples(names, json_objects), min_size=1, max_size=3),
       st.lists(st.integers(0, 400), max_size=12))  # fmt: skip
def test_calls_however_they_are_cut(
    writing: Writing, said: str, asked: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    calls = [ToolCall(name, json.dumps(arguments)) for name, arguments in asked]
    calls = calls if writing.between is not None else calls[:1]
    if not writing.head or (said and writing.head.startswith(said[-1])) or writing.head in said:
        said = ""
    reading = Reading(writing)
    found = read(reading, written(writing, said, calls), cuts)
    assert (found.said, found.calls) == (said.rstrip(), calls)
    assert reading.calls == len(calls)


@given(st.sampled_from([None, *PLAIN]), st.text(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_text_without_calls_stays(writing: Writing | None, text: str, cuts: list[int]) -> None:
    if writing is not None and (writing.head in text if writing.head else text.startswith("{")):
        return
    found = read(Reading(writing), text, cuts)
    assert (found.said, found.thought, found.calls) == (text, "", [])


@given(st.booleans(), st.lists(st.integers(0, 80), max_size=8))
def test_thoughts(begun: bool, cuts: list[int]) -> None:
    text = ("" if begun else "<think>") + "\nThat is < 3 </thin> so\n</think>\n\nIt is 2."
    found = read(Reading(None, thinks=True, thinking=begun), text, cuts)
    assert (found.thought, found.said) == ("\nThat is < 3 </thin> so\n", "It is 2.")
    assert read(Reading(None, thinks=True), "  no thought", cuts).said == "no thought"
    assert read(Reading(None, thinks=True, thinking=True), "cut in the middle </th", cuts).thought[-5:] == " </th"


@given(st.lists(st.integers(0, 200), max_size=8))
def test_channels(cuts: list[int]) -> None:
    think = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    found = read(Reading(HARMONY), f"{think}<|channel|>final<|message|>Yes.", cuts)
    assert (found.thought, found.said, found.calls) == ("Hm.", "Yes.", [])
    call = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "a}"}'
    found = read(Reading(HARMONY), think + call, cuts)
    assert (found.thought, found.said, found.calls) == ("Hm.", "", [ToolCall("look_up", '{"word": "a}"}')])
    assert read(Reading(HARMONY), "no channel", cuts).said == "no channel"


def test_an_answer_that_is_cut_has_what_there_is() -> None:
    whole = written(WRITINGS[-1], "a", [ToolCall("look_up", '{"word": "x"}')])
    for length in range(len(whole)):
        found = Reading(WRITINGS[-1]).whole(whole[:length])
        assert found.said in ("a", whole[:length]) and (not found.calls or found.calls[0].name == "look_up")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([3], "an object"),
        ([{"type": "retrieval"}], "type: function"),
        ([{"type": "function", "function": {"name": "a b"}}], "name"),
        ([{"type": "function", "function": {"name": "a", "description": 3}}], "description"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "type: object"),
        ([TOOL, TOOL], "same name"),
        ([TOOL] * 129, "128"),
    ],
)
def test_tools_that_are_none(given: list[Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        offered(given)


def test_a_choice_has_to_be_offered() -> None:
    tools = Tools(offered([TOOL]))
    assert tools.only("look_up").choice == "required"
    with pytest.raises(BadRequest, match="none of the tools"):
        tools.only("other")


def test_a_conversation_with_calls() -> None:
    call = {"id": "call_123", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
    messages = [
        {"role": "user", "content": "What is x?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_123", "content": "a letter"},
        {"role": "tool", "tool_call_id": "call_124", "content": "a name"},
    ]
    for writing in WRITINGS:
        told, tools = for_template(messages, writing, Tools(offered([TOOL])))
        arguments = told[1]["tool_calls"][0]["function"]["arguments"]
        assert arguments == ('{"word": "x"}' if writing.arguments_as_text else {"word": "x"})
        assert told[1]["tool_calls"][0]["id"] == told[2]["tool_call_id"] == short_id("call_123")
        assert tools is not None and tools[0]["function"]["name"] == "look_up"
    words = in_words(messages, Tools(offered([TOOL])))
    assert [each["role"] for each in words] == ["user", "assistant", "user"]
    assert "look_up" in words[0]["content"] and words[0]["content"].endswith("What is x?")
    assert words[1]["content"] == '<tool_call>\n{"name": "look_up", "arguments": {"word": "x"}}\n</tool_call>'
    assert "a letter" in words[2]["content"] and "a name" in words[2]["content"]
    for calls, says in (
        (3, "a list"), ([{"function": {}}], "a name"), ([{"function": {"name": "a", "arguments": "{"}}], "JSON"),
        ([{"function": {"name": "a", "arguments": "3"}}], "an object"),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=says):
            for_template([{"role": "assistant", "tool_calls": calls}], WRITINGS[0], None)


def test_marks_that_are_tokens_are_named_by_id() -> None:
    tools = Tools(offered([TOOL]))
    for writing in WRITINGS:
        text = grammar(
            writing, tools, {mark: 1000 + i for i, mark in enumerate(writing.marks)}, thinks=False, thinking=False
        )
        assert ("<[1000]>" in text) == bool(writing.marks)
        assert not any(json.dumps(mark)[1:-1] in text for mark in writing.marks)


def test_a_budget_puts_the_end_of_thoughts_in() -> None:
    def answer(limit: int, begun: bool, texts: list[str]) -> str:
        budget, said, left = Budget(limit, [7, 8], begun), "", list(texts)
        ends = {7: "</think>", 8: "\n\n"}
        while left:
            forced = budget.forced()
            text = left.pop(0) if forced is None else ends[forced]
            budget.take(forced is not None, text)
            said += text
        return said

    words = ["a ", "b ", "c ", "d ", "e "]
    assert answer(2, True, words) == "a b </think>\n\nc d e "
    assert answer(0, True, words) == "</think>\n\na b c d e "
    assert answer(9, True, words) == answer(2, False, words) == "a b c d e "
    assert answer(3, False, ["<thi", "nk>", *words]) == "<think>a </think>\n\nb c d e "
    assert answer(2, True, ["a", "</think>", *words]) == "a</think>a b c d e "


def test_results_go_to_the_calls_before_them() -> None:
    """Ids may come again: in the next turn, or of two calls of one function."""

    def call(name: str, said: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": said})}}

    def result(name: Any, said: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": name, "content": said}

    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "Bern"), call("f", "Rome")]},
        result("f", "rain"), result("f", "sun"),
        {"role": "assistant", "content": "", "tool_calls": [call("0", "c"), call("1", "d")]},
        result("1", "D"), result("0", "C"), result(["x"], "nobody's"),
        {"role": "user", "content": "b"},
    ]  # fmt: skip
    found = _one_by_one(messages)
    told = [each["content"] or each["tool_calls"][0]["function"]["arguments"] for each in found]
    assert told == [
        "a",
        '{"x": "Bern"}',
        "rain",
        '{"x": "Rome"}',
        "sun",
        '{"x": "c"}',
        "C",
        '{"x": "d"}',
        "D",
        "nobody's",
        "b",
    ]
