"""Tools through real chat templates: what they render, what the grammar lets a model say, and a server's clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer as Core

import penstock
from penstock.errors import BadRequest
from penstock.serve.api.chats import ChatPrompt, chat_of
from penstock.serve.guides import Guides
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.reading import ToolCall
from penstock.serve.tools.writing import WRITINGS
from tests.cpu.guided import byte_level, sentencepiece
from tests.cpu.servers import Server, serving
from tests.pure.test_tools import written

BUNDLED = Path(penstock.__file__).parent / "assets" / "tale-llama"
TEMPLATES = sorted((Path(__file__).parents[2].parent / "shared" / "data" / "templates").glob("*.jinja"))
needs_templates = pytest.mark.skipif(not TEMPLATES, reason="no real chat templates here")
NAME = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
    "additionalProperties": False,
}
LEGS = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 0, "maximum": 9, "description": "How many."}},
    "required": ["legs"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": NAME}},
    {"type": "function", "function": {"name": "count_legs", "description": "Legs.", "parameters": LEGS}},
]
CALL = {"id": "call_0123", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Ulm?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0123", "content": "Rain, 7 degrees."},
]


def opened(folder: Path, template: str, marks: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer with this chat template, and with these marks as special tokens."""
    core: Core = byte_level()
    core.add_special_tokens(list(marks))
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.open(folder)


def follows(chat: ChatPrompt, guides: Guides, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar lets a model say this text, and end there."""
    rule = chat.ruled(SamplingParams()).rule
    assert rule is not None
    guide = guides.begin(rule)
    for token in tokenizer.encode(text, add_special=False):
        if not guide.allowed().tokens[token]:
            return False
        guide.push(token)
    return guide.allowed().end


@needs_templates
@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem[:30])
def test_each_template(path: Path, special: bool, tmp_path: Path) -> None:
    source = path.read_text()
    marks = tuple(dict.fromkeys(mark for writing in WRITINGS for mark in writing.marks)) if special else ()
    with closing(opened(tmp_path / "model", source, marks)) as tokenizer:
        tools = Tools(offered(TOOLS))
        prompt = tokenizer.decode(chat_of(tokenizer, TALK, tools).ids, skip_special=False)
        for said in ("Weather in Ulm?", "get_weather", "count_legs", "Ulm", "Rain, 7 degrees.", "city"):
            assert said in prompt, said
        first = chat_of(tokenizer, TALK[:1], tools)
        assert first.writing is not None
        writing = tokenizer.writing
        assert (writing is None) == (source.count("tools") == 0 or "R1-Distill" in path.name)
        with closing(Guides(tokenizer, tokenizer.size, lambda: 1 << 30)) as guides:
            calls = [ToolCall("get_weather", '{"city": "Ulm"}'), ToolCall("count_legs", '{"legs": 4}')]
            calls = calls if first.writing.between is not None else calls[:1]
            text = written(first.writing, "", calls)
            thought = "so</think>\n\n" if first.thinking else ""
            reading = first.reading(SamplingParams())
            assert follows(first, guides, tokenizer, thought + text)
            assert reading.whole(thought + text).calls == calls
            assert follows(first, guides, tokenizer, thought + "It rains.")
            if first.thinks:  # a mark in thoughts is none
                quoted = "" if first.thinking else "<think>"
                quoted += f"{first.writing.head} it said</think>\n\n"
                special_head = first.writing.head in first.marks
                assert follows(first, guides, tokenizer, quoted + "Well.") == (not special_head)
            for bad in ('{"city": 3}', '{"town": "Ulm"}'):
                assert not follows(
                    first, guides, tokenizer, thought + written(first.writing, "", [ToolCall("get_weather", bad)])
                )
            assert not follows(
                first, guides, tokenizer, thought + written(first.writing, "", [ToolCall("other", "{}")])
            )
            must = chat_of(tokenizer, TALK[:1], tools.only("count_legs"))
            thought = "so</think>\n\n" if must.thinking else ""
            assert follows(
                must, guides, tokenizer, thought + written(first.writing, "", [ToolCall("count_legs", '{"legs": 4}')])
            )
            for bad in ("It rains.", written(first.writing, "", calls)):
                assert not follows(must, guides, tokenizer, thought + bad)


def test_a_form_and_tools_do_not_go_together(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "model", "{{ messages[-1].content }}")) as tokenizer:
        chat = chat_of(tokenizer, TALK[:1], Tools(offered(TOOLS)))
        with pytest.raises(BadRequest, match="do not go with tools"):
            chat.ruled(SamplingParams(json_schema="{}"))


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    with serving(BUNDLED, cache, "--batch", 4, "--name", "tiny", "--context", 512) as found:
        yield found


def ask(server: Server, tools: list[Any], **asked: Any) -> Any:
    asked = {"temperature": 1, "max_tokens": 100, **asked}
    return server.client().chat.completions.create(model="tiny", messages=TALK[:1], tools=tools, **asked)  # type: ignore[call-overload]


def test_two_turns_with_a_call(server: Server) -> None:
    """A random model has to call, so its calls are random too, and valid."""
    tools = [{"type": "function", "function": {"name": "count_legs", "parameters": LEGS}}]
    done = ask(server, tools, tool_choice="required", seed=4, n=2)
    for choice in done.choices:
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        for call in choice.message.tool_calls:
            Draft202012Validator(LEGS).validate(json.loads(call.function.arguments))
            assert call.function.name == "count_legs"
    answered = [*TALK[:1], done.choices[0].message.model_dump(exclude_none=True)]
    if calls := done.choices[0].message.tool_calls:
        answered.append({"role": "tool", "tool_call_id": calls[0].id, "content": "4"})
    said = server.client().chat.completions.create(model="tiny", messages=answered, tools=tools, max_tokens=5)
    assert said.usage.completion_tokens


def test_a_streamed_call_is_the_whole_one(server: Server) -> None:
    asked = {"tool_choice": {"type": "function", "function": {"name": "count_legs"}}, "seed": 4}
    whole = ask(server, TOOLS, **asked).choices[0]
    names, arguments, said, reason = [], "", "", None
    for event in ask(server, TOOLS, stream=True, **asked):
        choice = event.choices[0]
        said += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    assert reason == whole.finish_reason and not said
    assert [(name, arguments) for name in names] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]


def test_without_a_call_an_answer_is_text(server: Server) -> None:
    plain = ask(server, TOOLS, tool_choice="none", seed=1, max_tokens=8).choices[0]
    assert plain.message.tool_calls is None and plain.message.content is not None
    free = ask(server, TOOLS, seed=1, max_tokens=8).choices[0]
    assert free.finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice is for tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "do not go with tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "http://x"}}}]}, "cannot be"),
        ({"grammar": "start: 3"}, "cannot be followed"),
        ({"grammar": "root ::= other"}, "cannot be followed"),
        ({"grammar": "root ::= ["}, "cannot be followed"),
        ({"grammar": "root ::= " + "(" * 3000}, "cannot be followed"),
        ({"grammar": "start: /a/", "response_format": {"type": "json_object"}}, "not both"),
    ],
)
def test_what_is_refused(server: Server, body: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        asked = {"messages": TALK[:1], "stream": stream, **body}
        status, _, found = server.ask("POST", "/v1/chat/completions", asked)
        assert status == 400 and says in found["error"]["message"], found


@pytest.mark.parametrize("grammar", ["start: /[a-c]{3}/", "root ::= [a-c] [a-c] [a-c]"])
def test_grammars_of_clients(server: Server, grammar: str) -> None:
    body = {"prompt": "x", "grammar": grammar, "temperature": 1, "max_tokens": 20}
    _, _, found = server.ask("POST", "/v1/completions", body)
    text = found["choices"][0]["text"]
    assert len(text) == 3 and set(text) <= set("abc"), found


def test_forced_text_takes_the_tokens_that_models_write(tmp_path: Path) -> None:
    """SentencePiece's vocabularies have a token for `{` and one for its byte: models write the first."""
    core = sentencepiece()
    core.add_special_tokens(["[TOOL_CALLS]"])
    folder = tmp_path / "model"
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for t in tools %}{% endfor %}[TOOL_CALLS]")
    with (
        closing(Tokenizer.open(folder)) as tokenizer,
        closing(Guides(tokenizer, tokenizer.size, lambda: 1 << 30)) as guides,
    ):
        chat = chat_of(tokenizer, TALK[:1], Tools(offered(TOOLS), "required"))
        rule = chat.ruled(SamplingParams()).rule
        assert rule is not None
        guide = guides.begin(rule)
        for name in ("[TOOL_CALLS]", "[", "{"):
            token = core.token_to_id(name)
            assert guide.allowed().tokens[token], name
            guide.push(token)


def test_a_description_with_grammar_in_it_is_no_grammar(server: Server) -> None:
    described = {**LEGS, "description": "BNF, as expr ::= term"}
    tools = [{"type": "function", "function": {"name": "f", "description": "a ::= b", "parameters": described}}]
    choice = ask(server, tools, tool_choice="required", parallel_tool_calls=False, seed=1).choices[0]
    assert choice.message.tool_calls[0].function.name == "f"


@needs_templates
def test_templates_that_fail_as_they_are_asked(tmp_path: Path) -> None:
    """Without a list of tools, with a system prompt, and with two calls in a message."""
    system = {"role": "system", "content": "Be brief."}
    both = {**TALK[1], "tool_calls": [CALL, {**CALL, "id": "call_9999"}]}
    results = [TALK[2], {**TALK[2], "tool_call_id": "call_9999", "content": "Sun."}]
    for i, path in enumerate(TEMPLATES):
        with closing(opened(tmp_path / f"m{i}", path.read_text())) as tokenizer:
            prompt = tokenizer.decode(chat_of(tokenizer, [system, TALK[0]], None).ids)
            assert "Weather in Ulm?" in prompt and "Be brief." in prompt, path.stem
            told = chat_of(tokenizer, [TALK[0], both, *results], Tools(offered(TOOLS)))
            assert "Sun." in tokenizer.decode(told.ids), path.stem
