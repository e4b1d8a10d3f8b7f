"""The tools that a client offers, checked, and a conversation with calls as a chat template takes it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import BadRequest
from penstock.serve.schemas import checked_schema
from penstock.serve.tools.writing import HERMES, Writing

MAX_TOOLS, MAX_TOOLS_BYTES = 128, 256 << 10
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ANY_OBJECT = {"type": "object"}
_ID_LENGTH = 9  # of a call: Mistral's template takes no other

Choice = Literal["auto", "required"]


@dataclass(frozen=True)
class Tool:
    """A tool that a client offers.

    parameters  the JSON schema of the arguments, which are an object
    strict      the tool is refused if answers cannot be held to a keyword of the schema. Without `strict` the model is
                only told such a keyword
    """

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False

    @property
    def sent(self) -> dict[str, Any]:
        """The tool as chat templates take it: OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools that an answer may call. `choice`: `required` if it has to. `parallel`: it may make several calls."""

    offered: tuple[Tool, ...]
    choice: Choice = "auto"
    parallel: bool = True

    def only(self, name: str) -> Tools:
        """The same, but the answer has to call this one tool. Raises BadRequest if it was not offered."""
        named = tuple(tool for tool in self.offered if tool.name == name)
        if not named:
            raise BadRequest(f"tool_choice names {name[:200]!r}, which is none of the tools")
        return Tools(named, "required", parallel=False)


def offered(given: Sequence[Any]) -> tuple[Tool, ...]:
    """Tools in OpenAI's form, or in its shorter one (`name` beside `type`). Raises BadRequest."""
    if len(given) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(given)} entries; it may have {MAX_TOOLS}")
    offered = tuple(_tool(each) for each in given)
    names = [tool.name for tool in offered]
    if len(set(names)) < len(names):
        raise BadRequest("tools has two of the same name")
    nbytes = sum(len(json.dumps(tool.sent)) for tool in offered)
    if nbytes > MAX_TOOLS_BYTES:
        raise BadRequest(f"tools has {nbytes} bytes; it may have {MAX_TOOLS_BYTES}")
    return offered


def _tool(given: Any) -> Tool:
    if not isinstance(given, Mapping):
        raise BadRequest("a tool should be an object with type: function")
    if (kind := given.get("type", "function")) != "function":
        raise BadRequest(f"a tool has the type {str(kind)[:200]!r}; it should be an object with type: function")
    function = given.get("function", given)
    if not isinstance(function, Mapping):
        raise BadRequest("a tool's function should be an object")
    name, description = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest("a tool's name should be 1 to 128 letters, digits, dots, dashes and underscores")
    if not isinstance(description, str):
        raise BadRequest(f"the description of {name} should be a text")
    try:
        description.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"the description of {name} is not valid Unicode text (UTF-8)") from None
    parameters = json.loads(checked_schema(function.get("parameters") or _ANY_OBJECT))
    if parameters.setdefault("type", "object") != "object":
        raise BadRequest(f"the parameters of {name} should have type: object")
    return Tool(name, description, parameters, function.get("strict") is True)


def for_template(messages: Sequence[dict[str, Any]], writing: Writing | None, tools: Tools | None) -> tuple[
    list[dict[str, Any]], list[dict[str, Any]] | None
]:  # fmt: skip
    """(messages, tools) as the model's template takes them. `writing`: of the template's family; None if the template
    knows no tools, so that these are told in words. Raises BadRequest for calls in messages that are malformed."""
    if writing is None:
        return in_words(messages, tools), None
    one = messages if writing.between is not None else _one_by_one(messages)
    messages = [_with_calls(message, writing) for message in one]
    return messages, None if tools is None else [tool.sent for tool in tools.offered]


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for templates that take one call a message: several calls become one message each, with its result
    behind it.

    Results are those directly behind the calls. Ids say which is whose, and of several with one id the first comes
    first. For clients may number each turn's calls anew, and Ollama's have only a function's name, which two calls may
    share."""
    ordered: list[dict[str, Any]] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            ordered.append(message)
            continue
        results: list[dict[str, Any]] = []
        while left and left[0].get("tool_call_id") is not None:
            results.append(left.popleft())
        for i, call in enumerate(calls):
            ordered.append({**message, "content": message.get("content") if i == 0 else "", "tool_calls": [call]})
            number = call.get("id") if isinstance(call, Mapping) else None
            place = next((at for at, each in enumerate(results) if each["tool_call_id"] == number), None)
            if place is not None:
                ordered.append(results.pop(place))
        ordered += results  # of calls that nobody made
    return ordered


def _with_calls(message: dict[str, Any], writing: Writing) -> dict[str, Any]:
    if message.get("tool_call_id") is not None:
        return {**message, "tool_call_id": short_id(str(message["tool_call_id"]))}
    if not message.get("tool_calls"):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    calls = []
    for name, arguments, number in calls_of(message):
        said = json.dumps(arguments, ensure_ascii=False) if writing.arguments_as_text else arguments
        calls.append(
            {"id": short_id(number), "type": "function", "function": {"name": name, "arguments": said}}
        )  # fmt: skip
    return {**message, "content": message.get("content") or None, "tool_calls": calls}


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """(name, arguments, id) of each call of a message, whose arguments are JSON or an object. Raises BadRequest."""
    found = []
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise BadRequest(f"tool_calls should be a list of at most {MAX_TOOLS} calls")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise BadRequest("a call in tool_calls should have a function with a name")
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise BadRequest(f"the arguments of the call of {name[:200]} should be JSON") from None
        if not isinstance(arguments, dict | None):
            raise BadRequest(f"the arguments of the call of {name[:200]} should be an object")
        found.append((name, arguments or {}, str(call.get("id") or name)))
    return found


def short_id(number: str) -> str:
    """A call's id with the 9 letters and digits that every template takes. One that has them stays what it is."""
    if len(number) == _ID_LENGTH and number.isascii() and number.isalnum():
        return number
    return hashlib.sha256(number.encode("utf-8", "replace")).hexdigest()[:_ID_LENGTH]


def in_words(messages: Sequence[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: they are told in the first message of the user, in the words
    that models of the Hermes family learn, calls become text of the assistant's, and results text of the user's."""
    plain_turns: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        elif calls := calls_of(message):
            content = "\n".join([*([content] if content else []), *(_as_text(name, said) for name, said, _ in calls)])
        plain = {"role": role, "content": content}
        if plain_turns and role == "user" and plain_turns[-1]["role"] == "user" and message["role"] == "tool":
            plain_turns[-1] = {"role": "user", "content": f"{plain_turns[-1]['content']}\n{content}"}
        else:
            plain_turns.append(plain)
    first = next((i for i, message in enumerate(plain_turns) if message["role"] == "user"), None)
    if tools is not None:
        told = _told(tools)
        if first is None:
            plain_turns.append({"role": "user", "content": told})
        else:
            plain_turns[first] = {"role": "user", "content": f"{told}\n\n{plain_turns[first]['content']}"}
    return plain_turns


def _as_text(name: str, arguments: dict[str, Any]) -> str:
    said = json.dumps(arguments, ensure_ascii=False)
    return f"{HERMES.head}{HERMES.before}{name}{HERMES.middle}{said}{HERMES.after}"


def _told(tools: Tools) -> str:
    lines = [json.dumps(tool.sent, ensure_ascii=False) for tool in tools.offered]
    form = f'{HERMES.head}{HERMES.before}NAME{HERMES.middle}{{"argument": "value"}}{HERMES.after}'
    return "\n".join(["You may call these functions:", *lines, "To call one, answer with:", form])
