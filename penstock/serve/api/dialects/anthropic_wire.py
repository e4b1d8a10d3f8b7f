"""What clients of Anthropic's Messages API send, turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.errors import BadRequest
from penstock.serve.api.wire import MAX_MESSAGES, MAX_TOKENS, Sent, stop_strings
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.tools.asked import Tools, offered


class _Block(Sent):
    """A part of a message. `cache_control` is taken, and means nothing: equal beginnings of prompts always share KV."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolReferenceBlock(_Block):
    """A result of a search for tools: this one may be called from here on."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] = ""
    is_error: bool = False


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Sent):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class OfferedTool(_Block):
    """A tool that the client offers.

    defer_loading          the model is not told of the tool before a `tool_reference` in the conversation names it
    eager_input_streaming  is taken, and means nothing: arguments always stream piece by piece
    """

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: bool = False
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Sent):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Sent):
    """`budget_tokens`: the most tokens of thought. Whether a model thinks at all, its template decides, so `type` and
    `display` are taken and mean nothing."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    display: str | None = None


class OutputFormat(Sent):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Sent):
    """`effort`: means nothing."""

    effort: str | None = None
    format: OutputFormat | None = None


class LastThoughts(Sent):
    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


class AllThoughts(Sent):
    type: Literal["all"]


class ClearThinking(Sent):
    """Leaves thoughts out of older messages of the assistant. `keep`: "all" leaves every thought in; a number leaves
    them in that many of the last messages that hold thoughts."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | LastThoughts | AllThoughts = LastThoughts(type="thinking_turns", value=1)


class ContextManagement(Sent):
    """Edits of the conversation. Thoughts may be left out; other edits are refused by their type."""

    edits: list[ClearThinking] = Field(default=[], max_length=16)


class CountRequest(Sent):
    """A body of /v1/messages/count_tokens. `preface`: the system prompt."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    preface: str | list[TextBlock] | None = Field(default=None, alias="system")
    tools: list[OfferedTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them, in OpenAI's form. Raises BadRequest if the last one is the
        assistant's."""
        if self.messages[-1].role == "assistant":
            raise BadRequest("the last message should be the user's: an answer cannot be begun for the model")
        messages = [{"role": "system", "content": _text(self.preface)}] if self.preface else []
        return [*messages, *(message for turn in self._kept() for message in _messages(turn))]

    def _kept(self) -> list[Turn]:
        """The messages without the thoughts that `context_management` clears."""
        turns = self.messages
        for edit in self.context_management.edits if self.context_management is not None else ():
            if not isinstance(edit.keep, LastThoughts):
                continue
            thoughtful = [i for i, turn in enumerate(turns) if turn.role == "assistant" and _has_thoughts(turn)]
            cleared = set(thoughtful[: -edit.keep.value])
            turns = [_without_thoughts(turn) if i in cleared else turn for i, turn in enumerate(turns)]
        return turns

    def _found(self) -> set[str]:
        """The tools that results of this conversation refer to."""
        blocks = (block for turn in self.messages if not isinstance(turn.content, str) for block in turn.content)
        parts = (part for block in blocks if isinstance(block, ToolResultBlock) for part in block.content)
        return {part.tool_name for part in parts if isinstance(part, ToolReferenceBlock)}

    def callable(self) -> Tools | None:
        """The tools that the answer may call. Raises BadRequest."""
        choice = self.tool_choice or ToolChoice(type="auto")
        referred = self._found()
        given = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            for tool in self.tools or ()
            if not tool.defer_loading or tool.name in referred
        ]
        if self.tools and not given and choice.type in ("any", "tool"):
            raise BadRequest(f"tool_choice is {choice.type}, but all tools are deferred and none was referred to")
        if not given or choice.type == "none":
            return None
        tools = Tools(offered(given), parallel=not choice.disable_parallel_tool_use)
        if choice.type == "tool":
            return tools.only(choice.name or "")
        return replace(tools, choice="required") if choice.type == "any" else tools


class MessagesRequest(CountRequest):
    """A body of /v1/messages. `metadata`, `service_tier` and `cache_control` are taken, and mean nothing."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None

    def _schema(self) -> dict[str, Any] | None:
        return self.output_config.format.schema_ if self.output_config and self.output_config.format else None

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        return with_model_defaults(
            generation_config, max_tokens=min(self.max_tokens, most_tokens), temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k, stop=stop_strings(self.stop_sequences, "stop_sequences"),
            json_schema=self._schema(),
            thinking_tokens=self.thinking.budget_tokens if self.thinking is not None else None,
        )  # fmt: skip


def _text(content: str | Sequence[TextBlock | ToolReferenceBlock] | None) -> str:
    """The text of some content. A reference to a tool becomes a line of text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        block.text if isinstance(block, TextBlock) else f"{block.tool_name} may be called now.\n" for block in content
    )


def _has_thoughts(turn: Turn) -> bool:
    return not isinstance(turn.content, str) and any(isinstance(block, ThinkingBlock) for block in turn.content)


def _without_thoughts(turn: Turn) -> Turn:
    assert not isinstance(turn.content, str), "it has thoughts"
    said: list[Block] = [block for block in turn.content if not isinstance(block, ThinkingBlock)]
    return Turn(role=turn.role, content=said or "")


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn in OpenAI's form: results of tools are messages of their own, before what the user says beside them.
    Raises BadRequest where a block is the other side's."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": turn.role, "content": ""}
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            _require(turn.role == "user", "tool_result", "user")
            result = f"Error: {_text(block.content)}" if block.is_error else _text(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif isinstance(block, ToolUseBlock):
            _require(turn.role == "assistant", "tool_use", "assistant")
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            message.setdefault("tool_calls", []).append(call)
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        else:
            message["content"] += block.text
    said = message["content"] or "tool_calls" in message or not messages
    return [*messages, message] if said else messages


def _require(good: bool, block: str, role: str) -> None:
    if not good:
        raise BadRequest(f"a {block} block is for messages of the {role}")
