"""A line of a batch file turned into what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.api.chats import ChatPrompt, chat_of
from penstock.serve.api.embeddings import MAX_INPUTS
from penstock.serve.api.wire import MAX_SCORES, ChatRequest, CompletionRequest, EmbeddingRequest, what_is_wrong
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.spec.codec import loads_json
from penstock.store.files import no_json

Body = ChatRequest | CompletionRequest | EmbeddingRequest

_BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
}
_MOST_NAME = 512  # characters of a custom_id


class NoRequest(Exception):
    """A line that is no request. `code`, `message`: of its error. `custom_id`: as far as it was read."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.custom_id = code, message[:1000], custom_id


class _Line(BaseModel):
    """A line. Other fields of it are not read."""

    model_config = ConfigDict(extra="ignore", strict=True)
    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class LineRequest:
    """A line's request. `prompts`: token ids of each prompt. `chat`: its conversation, if it is a chat."""

    custom_id: str
    body: Body
    prompts: tuple[list[int], ...]
    chat: ChatPrompt | None = None

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """The sampling parameters. Those of embeddings mean nothing. Raises BadRequest."""
        if isinstance(self.body, EmbeddingRequest):
            return SamplingParams(max_tokens=1)
        params = self.body.params(generation_config, most_tokens)
        return params if self.chat is None else self.chat.ruled(params)

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return 1 if isinstance(self.body, EmbeddingRequest) else self.body.n or 1


def read(line: bytes, names: Sequence[str], tokenizer: Tokenizer) -> LineRequest:
    """The request of a line. `names`: by which the model may be called. Raises NoRequest."""
    try:
        value = loads_json(line.decode())
        if not isinstance(value, dict):
            raise NoRequest("invalid_line", "the line is no JSON object")
        parsed = _Line.model_validate(value)
    except UnicodeDecodeError:
        raise NoRequest("invalid_line", "the line is not UTF-8 text") from None
    except ValidationError as error:
        custom_id = value.get("custom_id")
        custom_id = custom_id[:_MOST_NAME] if isinstance(custom_id, str) else None
        message, field = what_is_wrong(error.errors())
        message = message if field else f"body: {message}"  # the one field that goes without its name there
        raise NoRequest("invalid_line", message, custom_id) from None
    except (ValueError, RecursionError) as error:
        raise NoRequest("invalid_line", f"the line is not JSON: {no_json(error)}") from None
    custom_id = parsed.custom_id[:_MOST_NAME]
    if len(parsed.custom_id) > _MOST_NAME:
        raise NoRequest("invalid_line", f"custom_id has more than {_MOST_NAME} characters", custom_id)
    kind = _BODIES.get(parsed.url)
    if kind is None or parsed.method != "POST":
        message = f"{parsed.method} {parsed.url} cannot be asked in a batch: {', '.join(_BODIES)} can, by POST"
        raise NoRequest("invalid_url", message, custom_id)
    try:
        body = kind.model_validate(parsed.body)
        if not isinstance(body, EmbeddingRequest) and body.stream:
            raise BadRequest("stream is not for batches")
        if body.model is not None and body.model not in names:
            raise NoRequest("model_not_found", f"this batch is answered by {names[0]}, not by {body.model}", custom_id)
        if isinstance(body, ChatRequest):
            chat = chat_of(tokenizer, [message.plain() for message in body.messages], body.callable())
            return LineRequest(custom_id, body, (chat.ids,), chat)
        if isinstance(body, EmbeddingRequest):
            given = body.inputs()
            if not 0 < len(given) <= MAX_INPUTS:
                raise BadRequest(f"a request may have 1 to {MAX_INPUTS} inputs, not {len(given)}")
            return LineRequest(custom_id, body, _ids(given, tokenizer))
        return LineRequest(custom_id, body, _prompts(body, tokenizer))
    except ValidationError as error:
        raise NoRequest("invalid_request", what_is_wrong(error.errors())[0], custom_id) from None
    except (BadRequest, BrokenModel) as error:  # the tokenizer's process, which this text takes too much of, too
        raise NoRequest("invalid_request", error.message, custom_id) from None
    except RecursionError:
        raise NoRequest("invalid_request", "the messages nest too deep", custom_id) from None


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line, as far as it has one."""
    try:
        value = loads_json(line.decode())
    except (ValueError, RecursionError):
        return None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def _ids(given: Sequence[str | list[int]], tokenizer: Tokenizer) -> tuple[list[int], ...]:
    return tuple(tokenizer.encode(each) if isinstance(each, str) else each for each in given)


def _prompts(body: CompletionRequest, tokenizer: Tokenizer) -> tuple[list[int], ...]:
    ids = _ids(body.prompts(), tokenizer)
    entries = sum(map(len, ids)) * (body.n or 1) * (1 + (body.prompt_alternatives or 0))
    if body.prompt_alternatives is not None and entries > MAX_SCORES:
        raise BadRequest(f"echo would give {entries} log probabilities; a request may have {MAX_SCORES}")
    return ids


def echoed(request: LineRequest, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts that are written before the answers; () if there are none."""
    body = request.body
    if not isinstance(body, CompletionRequest) or not body.echo:
        return ()
    texts = [
        given if isinstance(given, str) else tokenizer.decode(ids, False)
        for given, ids in zip(body.prompts(), request.prompts, strict=True)
    ]
    return tuple(text for text in texts for _ in range(request.count))
