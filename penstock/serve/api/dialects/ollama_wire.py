"""What Ollama's clients send, turned into what the engine takes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.errors import BadRequest
from penstock.serve.api.wire import MAX_MESSAGES, MAX_TOKENS, NoImages, Sent, stop_strings
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.schemas import JSON_OBJECT


class Options(Sent):
    """How tokens are chosen.

    num_predict  the most tokens of the answer; -1 and -2 for as many as the context has room for
    num_ctx      tokens of context that the client wants. More than the server's is refused
    num_keep …   this field and those after it tell Ollama how to compute. They are taken, and change no answer
    """

    num_predict: int | None = Field(default=None, ge=-2, le=MAX_TOKENS)
    num_ctx: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=1e-6, le=1e6)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class _Asked(Sent):
    """The fields that /api/chat and /api/generate share.

    keep_alive  is taken, and means nothing: the server itself decides how long a model stays loaded
    think       false leaves the model's thoughts out of the answer. Whether it thinks, its template decides

    `logprobs` is no field here, so it is refused.
    """

    model: str
    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: str | int | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        given = self.options or Options()
        if given.num_predict == 0:
            raise BadRequest("num_predict is 0; it should be at least 1, or -1 for what the context has room for")
        named = given.num_predict is not None and given.num_predict > 0
        return with_model_defaults(
            generation_config, max_tokens=given.num_predict if named else most_tokens, temperature=given.temperature,
            top_k=given.top_k, top_p=given.top_p, min_p=given.min_p, repetition_penalty=given.repeat_penalty,
            presence_penalty=given.presence_penalty, frequency_penalty=given.frequency_penalty, seed=given.seed,
            stop=stop_strings(given.stop, "stop"),
            json_schema=JSON_OBJECT if self.format == "json" else self.format or None,
        )  # fmt: skip


class CalledFunction(Sent):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class Called(Sent):
    """A call of a tool in a message of the assistant. Open WebUI sends `index` here, Ollama beside the name."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class OllamaMessage(Sent):
    """A message of a chat. A tool's result names its tool by `tool_name`: Ollama's calls have no ids."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: NoImages = None

    def plain(self, call: str) -> dict[str, Any]:
        """The message as chat templates take it. `call`: the id of the call that a tool's message answers."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": each.id or each.function.name, "function": each.function.model_dump(exclude={"index"})}
                for each in self.tool_calls
            ]
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id or self.tool_name or call, "name": self.tool_name or call}
        return message


class OllamaChat(_Asked):
    """A body of /api/chat."""

    messages: list[OllamaMessage] = Field(max_length=MAX_MESSAGES)
    tools: list[Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. A tool's message without a name answers the last call."""
        messages, call = [], ""
        for message in self.messages:
            messages.append(message.plain(call))
            if message.tool_calls:
                call = message.tool_calls[-1].function.name
        return messages


class OllamaGenerate(_Asked):
    """A body of /api/generate. `raw`: the model gets the prompt as it is; else as a chat of one message."""

    prompt: str = ""
    preface: str | None = Field(default=None, alias="system")
    raw: bool = False
    suffix: Literal[""] | None = None
    images: NoImages = None


class OllamaEmbed(Sent):
    """A body of /api/embed. `truncate`: a text that is too long for the context loses its end; else it is refused."""

    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=0, le=1 << 20)
    options: Options | None = None
    keep_alive: str | int | float | None = None


class OllamaEmbedding(Sent):
    """A body of /api/embeddings, which older clients send. `truncate` is that of /api/embed."""

    model: str
    prompt: str = ""
    truncate: bool = True
    options: Options | None = None
    keep_alive: str | int | float | None = None


class Named(Sent):
    """A body of /api/show, which older clients send with `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
