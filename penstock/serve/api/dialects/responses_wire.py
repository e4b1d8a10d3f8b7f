"""What clients of OpenAI's Responses API send, turned into what the engine takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from penstock.errors import BadRequest
from penstock.serve.api.wire import MAX_MESSAGES, MAX_TOKENS, TEXT_ALONE, Sent, what_is_wrong
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.schemas import JSON_OBJECT
from penstock.serve.tools.asked import MAX_TOOLS, MAX_TOOLS_BYTES, Tools, offered


class _Given(BaseModel):
    """An item as an earlier response had it: what else it holds is not read."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class ResponseText(_Given):
    type: Annotated[Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"], TEXT_ALONE]
    text: str


class MessageItem(_Given):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponseText]


class CallItem(_Given):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    @property
    def said(self) -> str:
        """The function's name as the model says it."""
        return self.name if self.namespace is None else _joined(self.namespace, self.name)


class OutputItem(_Given):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponseText]


class ReasoningItem(_Given):
    type: Literal["reasoning"]
    content: list[ResponseText] | None = None


def _kind(item: Any) -> str:
    """Which item it is: a message need not say so."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class AnswerFormat(Sent):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Sent):
    """`verbosity`: means nothing."""

    format: AnswerFormat | None = None
    verbosity: str | None = None


class NamedResponseFunction(Sent):
    type: Literal["function"]
    name: str
    namespace: str | None = None

    @property
    def said(self) -> str:
        """As the model says it."""
        return _joined(self.namespace, self.name) if self.namespace else self.name


class ToolNamespace(Sent):
    """Functions under one name. A model says both names with a dot between them."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]

    def names(self) -> list[str]:
        """The functions' names within the namespace. Raises BadRequest."""
        for tool in self.tools:
            if not isinstance(tool.get("name"), str) or "function" in tool:
                raise BadRequest(f"a tool of the namespace {self.name[:200]} should have a name beside its type")
        return [tool["name"] for tool in self.tools]

    def functions(self) -> list[dict[str, Any]]:
        """The functions. Each is named by both names, and its description ends with the namespace's. Raises
        BadRequest."""
        functions = []
        for tool, name in zip(self.tools, self.names(), strict=True):
            about = tool.get("description") or ""
            both = f"{about}\n\n{self.description}" if self.description and isinstance(about, str) else about
            functions.append({**tool, "name": _joined(self.name, name), "description": both})
        return functions


class ResponsesRequest(Sent):
    """A body of /v1/responses. `store`, `include`, `metadata`, `client_metadata`, `reasoning` and the fields that name
    the client are taken, and mean nothing. Whether a model thinks, its template decides."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The items as chat templates take them: calls that follow each other are one message's."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thought = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):
                thought += _text(item.content or "")
                continue
            if isinstance(item, OutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif isinstance(item, CallItem):
                call = {
                    "id": item.call_id, "type": "function",
                    "function": {"name": item.said, "arguments": item.arguments},
                }  # fmt: skip
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            if thought and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"], thought = thought, ""
        return messages

    def _namespaces(self) -> list[ToolNamespace]:
        """The namespaces among the tools. Raises BadRequest."""
        try:
            namespaces = [
                ToolNamespace.model_validate(each) for each in self.tools or () if each.get("type") == "namespace"
            ]
        except ValidationError as error:
            raise BadRequest(f"tools: {what_is_wrong(error.errors())[0]}") from None
        # Each tool's description will end with its namespace's. Without this check a small body could make that large.
        count = sum(len(space.tools) for space in namespaces)
        nbytes = sum(len(space.tools) * len(space.description or "") for space in namespaces)
        if count > MAX_TOOLS or nbytes > MAX_TOOLS_BYTES:
            raise BadRequest(
                f"tools has {count} functions in namespaces, whose descriptions take {nbytes} bytes; it may have"
                f" {MAX_TOOLS} and {MAX_TOOLS_BYTES}"
            )
        return namespaces

    @property
    def spaces(self) -> dict[str, tuple[str, str]]:
        """A function as the model says it → (its namespace, its name there). Raises BadRequest."""
        return {_joined(space.name, name): (space.name, name) for space in self._namespaces() for name in space.names()}

    def callable(self) -> Tools | None:
        """The functions that the answer may call. Raises BadRequest."""
        alone = [each for each in self.tools or () if each.get("type") != "namespace"]
        inside = [function for space in self._namespaces() for function in space.functions()]
        tools = Tools(offered([*alone, *inside]), parallel=self.parallel_tool_calls is not False)
        if not self.tools or self.tool_choice == "none":
            return None
        if isinstance(self.tool_choice, NamedResponseFunction):
            return tools.only(self.tool_choice.said)
        return replace(tools, choice="required") if self.tool_choice == "required" else tools

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        form = self.text.format if self.text is not None else None
        schema = JSON_OBJECT if form is not None and form.type == "json_object" else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise BadRequest("text.format is a json_schema without its schema")
        return with_model_defaults(
            generation_config, max_tokens=self.max_output_tokens or most_tokens, temperature=self.temperature,
            top_p=self.top_p, json_schema=form.schema_ if form is not None and form.schema_ is not None else schema,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What a response repeats of its request. Raises BadRequest for what no JSON can hold."""
        told = self._told()
        try:
            json.dumps(told, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the request holds what JSON cannot: {str(error)[:200]}") from None
        return told

    def _told(self) -> dict[str, Any]:
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": self.temperature,
            "tool_choice": "auto" if self.tool_choice is None else _plain(self.tool_choice),
            "tools": self.tools or [],
            "top_p": self.top_p,
            "text": {"format": {"type": "text"}} if self.text is None else _plain(self.text),
            "truncation": "disabled",
        }


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}.{name}"


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, BaseModel) else value


def _text(content: str | Sequence[ResponseText]) -> str:
    """A text, or parts of it."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
