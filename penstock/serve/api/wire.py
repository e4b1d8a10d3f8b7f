"""What clients send, as OpenAI's API has it, turned into what the engine takes.

A field that is not supported is refused and never ignored: a client that asks for JSON and gets prose would break
later. Values that ask for nothing (`n: 1`, `logprobs: false`, no penalty) are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from penstock.errors import BadRequest
from penstock.serve.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams, with_model_defaults
from penstock.serve.schemas import JSON_OBJECT, MAX_SCHEMA_BYTES
from penstock.serve.tools.asked import Tools, offered

MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
MAX_MESSAGES = 10_000
MAX_TOKENS = 1 << 20
# Log probabilities of prompts that a request may have, and as many of its answers: each takes some 150 bytes while
# their JSON is made.
MAX_SCORES = 1 << 16


class Sent(BaseModel):
    """A body. Names that are not here are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def stop_strings(given: str | list[str] | None, field: str) -> tuple[str, ...] | None:
    """Strings that end an answer; None where there are none, so that the model's own count. `field`: what the dialect
    calls them. Raises BadRequest for too many or too long ones."""
    stops = [given] if isinstance(given, str) else given or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise BadRequest(f"{field} may have {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
    return tuple(stops) or None


class StreamOptions(Sent):
    include_usage: bool = False


class TextFormat(Sent):
    type: Literal["text"]


class JsonObjectFormat(Sent):
    type: Literal["json_object"]


class NamedSchema(Sent):
    """`strict`: answers follow the schema whatever is said here."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Sent):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class _Sampled(Sent):
    """The sampling fields of both kinds of completion."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=1e6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=1e6)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    priority: int = Field(default=0, ge=-100, le=100)
    user: str | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(default=None, max_length=MAX_SCHEMA_BYTES)
    skip_special_tokens: bool = True

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. `most_tokens` where the client names no length, or so many as may have log
        probabilities, where it wants these. Raises BadRequest."""
        self.check()
        if self.alternatives is not None:
            most_tokens = min(most_tokens, MAX_SCORES // ((self.n or 1) * (1 + self.alternatives)))
        return with_model_defaults(
            generation_config,
            several=(self.n or 1) > 1,
            max_tokens=most_tokens if self.length is None else self.length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=stop_strings(self.stop, "stop"),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._biases(),
            logprobs=self.alternatives,
            prompt_logprobs=self.prompt_alternatives,
            json_schema=self._schema(),
            grammar=self.grammar,
            skip_special_tokens=self.skip_special_tokens,
            thinking_tokens=self.most_thoughts,
        )

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are wanted beside each; None if no log probabilities are wanted."""
        return None

    @property
    def prompt_alternatives(self) -> int | None:
        """As `alternatives`, for the prompt's tokens."""
        return None

    @property
    def most_thoughts(self) -> int | None:
        """The most tokens of thought; None for no limit."""
        return None

    def _biases(self) -> dict[int, float] | None:
        """`logit_bias`, whose ids JSON has as strings. Raises BadRequest."""
        biases = {}
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) < 19):
                raise BadRequest(f"logit_bias has {token[:100]!r}; it should be a token's id")
            biases[int(token)] = bias
        return biases or None

    def _schema(self) -> str | dict[str, Any] | None:
        """The schema that the answer has to follow."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return self.response_format.json_schema.schema_
        return JSON_OBJECT if isinstance(self.response_format, JsonObjectFormat) else None

    @property
    def length(self) -> int | None:
        return self.max_tokens

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the tokens used."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises BadRequest for fields that are not supported."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is for stream: true")


# Parts of messages that hold no text, by what they hold, in every dialect.
_NO_TEXT = {
    "image_url": "images", "input_image": "images", "image": "images", "input_audio": "audio", "audio_url": "audio",
    "input_video": "videos", "video_url": "videos", "file": "files", "input_file": "files", "document": "documents",
}  # fmt: skip


def _text_alone(value: Any) -> Any:
    """A part's type. Raises where it is known to hold no text."""
    if isinstance(value, str) and value in _NO_TEXT:
        raise PydanticCustomError("no_text", "{what} are not read, text alone is", {"what": _NO_TEXT[value]})
    return value


def _no_images(value: Any) -> Any:
    if value:
        raise PydanticCustomError("no_text", "images are not read, text alone is")
    return value


# For the types of parts that hold text, and for images beside a message's text.
TEXT_ALONE = BeforeValidator(_text_alone)
NoImages = Annotated[list[str] | None, BeforeValidator(_no_images)]


class TextPart(Sent):
    type: Annotated[Literal["text"], TEXT_ALONE]
    text: str


class Message(BaseModel):
    """A message of a chat. What else it holds is the chat template's to read."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """The message for a chat template, its parts of text joined."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class NamedFunction(Sent):
    name: str


class FunctionChoice(Sent):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(_Sampled):
    """A body of /v1/chat/completions. The fields from `reasoning_effort` on are taken, and mean nothing. Some of them
    are labels. Others say how much a model should think or say, which its template decides."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    reasoning_budget: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        """Raises BadRequest for fields that do not go together."""
        super().check()
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice is for tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is for logprobs: true")

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def most_thoughts(self) -> int | None:
        return self.reasoning_budget

    def callable(self) -> Tools | None:
        """The tools that the answer may call. Raises BadRequest."""
        if not self.tools or self.tool_choice == "none":
            return None
        tools = Tools(offered(self.tools), parallel=self.parallel_tool_calls is not False)
        if isinstance(self.tool_choice, FunctionChoice):
            return tools.only(self.tool_choice.function.name)
        return replace(tools, choice="required") if self.tool_choice == "required" else tools


class CompletionRequest(_Sampled):
    """A body of /v1/completions. `prompt`: a text or a list of them, ids or a list of lists of ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """Raises BadRequest for fields that do not go together, or that this version has not."""
        super().check()
        if self.suffix:
            raise BadRequest("suffix is not supported by this version")
        if self.max_tokens == 0 and self.prompt_alternatives is None:
            raise BadRequest("max_tokens is 0; it should be at least 1 without echo and logprobs")
        if self.best_of not in (None, 1, self.n):
            raise BadRequest("best_of is not supported by this version")

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        return self.logprobs if self.echo else None

    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt, as text or as ids. Raises BadRequest where there is none, or too many."""
        prompts = _each(self.prompt)
        if not prompts or len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise BadRequest(f"a request may have 1 to {MAX_CHOICES} answers, not {len(prompts) * (self.n or 1)}")
        return prompts


class EmbeddingRequest(Sent):
    """A body of /v1/embeddings. `input` has the forms of a text completion's prompt. `pooling` is a field of ours: it
    replaces the model's own way."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=1 << 20)
    pooling: Literal["last", "mean"] | None = None
    priority: int = Field(default=0, ge=-100, le=100)
    user: str | None = None

    def inputs(self) -> Sequence[str | list[int]]:
        """Each text, or its ids."""
        return _each(self.input)


class TokenizeRequest(Sent):
    """A body of /tokenize. `add_special_tokens`: the text begins with BOS, if the tokenizer adds one."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(Sent):
    """A body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def _each(given: Any) -> Sequence[str | list[int]]:
    """A list of texts or of lists of ids, from one of them or several."""
    alone = isinstance(given, str) or (given and isinstance(given[0], int))
    return [given] if alone else given


def what_is_wrong(errors: Sequence[Any]) -> tuple[str, str]:
    """(the first of some errors in words, the field that it is about), as pydantic tells them."""
    # Of what may be a text or a list, the error that lies deepest tells most.
    error = max(errors, key=lambda each: len(each["loc"]))
    if error["type"] == "json_invalid":  # its place is a character of the body, and no field
        why = error.get("ctx", {}).get("error", error["msg"])
        return f"the body is no JSON: {why}, at character {error['loc'][-1]}"[:1000], ""
    where = ".".join(str(at) for at in error["loc"] if at != "body")
    said = "there is no such field here" if error["type"] == "extra_forbidden" else str(error["msg"])
    message = f"{where}: {said}" if where else said
    return message[:1000], where[:200]
