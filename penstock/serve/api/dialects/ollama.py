"""Ollama's API: /api/chat and /api/generate, streamed line by line unless told otherwise; embed; tags, show, ps,
version."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

import penstock
from penstock.errors import BadRequest, PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import ChatPrompt
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.embeddings import AskedVectors, Vectors, embedded, numbers
from penstock.serve.api.shelf import Shelf
from penstock.serve.api.wire import MAX_MESSAGES, MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS, NoImages, Sent
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams, with_model_defaults
from penstock.serve.schemas import JSON_OBJECT
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.reading import Collected, Reading, ToolCall

_LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


class Options(Sent):
    """How tokens are chosen. `num_predict`: -1 and -2 for as many as the context has room for. `num_ctx`: refused where
    it is more than the server's context, and means nothing otherwise. Nor do those that follow `stop`: they tell Ollama
    how to compute, and change no answer."""

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
    """What both kinds of answers take. `keep_alive`: means nothing, the server has its own way. `think`: models think
    as their template has it; false leaves what they think out of the answer. `logprobs` are not here: refused."""

    model: str
    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: str | int | float | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    def params(self, generation_config: dict[str, Any], most_tokens: int) -> SamplingParams:
        """How tokens are chosen. Raises BadRequest."""
        given = self.options or Options()
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise BadRequest(f"stop may have {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
        if given.num_predict == 0:
            raise BadRequest("num_predict is 0; it should be at least 1, or -1 for what the context has room for")
        named = given.num_predict is not None and given.num_predict > 0
        return with_model_defaults(
            generation_config, max_tokens=given.num_predict if named else most_tokens, temperature=given.temperature,
            top_k=given.top_k, top_p=given.top_p, min_p=given.min_p, repetition_penalty=given.repeat_penalty,
            presence_penalty=given.presence_penalty, frequency_penalty=given.frequency_penalty, seed=given.seed,
            stop=tuple(stops) or None, json_schema=JSON_OBJECT if self.format == "json" else self.format or None,
        )  # fmt: skip


class CalledFunction(Sent):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class Called(Sent):
    """`index`: Open WebUI has it here, Ollama beside the name."""

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class OllamaMessage(Sent):
    """`tool_name`: of a message of a tool; Ollama's have no id of the call."""

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
    """A body of /api/generate. `raw`: the prompt is given to the model as it is; else it is a chat of one message."""

    prompt: str = ""
    preface: str | None = Field(default=None, alias="system")
    raw: bool = False
    suffix: Literal[""] | None = None
    images: NoImages = None


class OllamaEmbed(Sent):
    """A body of /api/embed. `truncate`: what is longer than the context loses its end, else it is refused."""

    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=0, le=1 << 20)
    options: Options | None = None
    keep_alive: str | int | float | None = None


class OllamaEmbedding(Sent):
    """A body of /api/embeddings, which older clients send. `truncate`: as of /api/embed."""

    model: str
    prompt: str = ""
    truncate: bool = True
    options: Options | None = None
    keep_alive: str | int | float | None = None


@dataclass
class OllamaForm:
    """`chats`: whether answers are messages. `thoughts`: whether what is thought is told."""

    model: str
    chats: bool
    reading: Reading
    thoughts: bool
    prompt_tokens: int
    begun_s: float = field(default_factory=time.perf_counter)
    media_type: str = "application/x-ndjson"

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        (answer,) = answers
        return self._line(self.reading.whole(answer.text), self._end(answer))

    async def events(self, answers: Answers) -> AsyncIterator[bytes]:
        collected = Collected()  # of calls: Ollama's are told whole
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    continue  # its lines have no comments
                whole = isinstance(piece, Generation)
                parts = self.reading.finish() if isinstance(piece, Generation) else self.reading.push(piece.text)
                collected.add(parts)
                now = Collected(collected.said, collected.thought, collected.calls if whole else [])
                if now.said or now.calls or (now.thought and self.thoughts):
                    yield _json_line(self._line(now, {"done": False}))
                collected.said = collected.thought = ""
            yield _json_line(self._line(Collected(), self._end(answers.whole[0])))
        except (PenstockError, Gone) as error:  # the status is sent already
            yield _json_line({"error": str(error)})

    def _line(self, read: Collected, more: dict[str, Any]) -> dict[str, Any]:
        head = {"model": self.model, "created_at": _now()}
        thought = {"thinking": read.thought} if read.thought and self.thoughts else {}
        if not self.chats:
            return {**head, "response": read.said, **thought, **more}
        calls = {"tool_calls": [_called(call) for call in read.calls]} if read.calls else {}
        return {**head, "message": {"role": "assistant", "content": read.said, **thought, **calls}, **more}

    def _end(self, answer: Generation) -> dict[str, Any]:
        """The last line's fields, times in nanoseconds."""
        total_s = time.perf_counter() - self.begun_s
        return {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": round(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.prompt_tokens,
            "prompt_eval_duration": round(answer.ttft_s * 1e9),
            "eval_count": answer.output_tokens,
            "eval_duration": round(sum(answer.inter_token_s) * 1e9),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _called(call: ToolCall) -> dict[str, Any]:
    """A call; one that was cut has no arguments."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    return {"function": {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _json_line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def _vectors_body(answer: Vectors, before: str, after: str, more: dict[str, Any]) -> Response:
    """An object with the vectors between two texts, and with other fields, vector by vector."""

    def pieces() -> Iterator[str]:
        yield "{" + before
        for i, each in enumerate(answer.vectors):
            yield (", " if i else "") + numbers(each)
        yield after + json.dumps({**answer.about, **more})[1:]

    return StreamingResponse(pieces(), media_type="application/json")


class Named(Sent):
    """A body of /api/show, which older clients send with `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def routes(app: FastAPI, desk: Desk, shelf: Shelf) -> None:
    """Adds this API's routes."""

    begun = _now()

    def ours(name: str) -> str:
        return name if name in shelf.names else name.removesuffix(_LATEST)

    def asked(body: OllamaChat | OllamaGenerate, messages: list[dict[str, Any]], tools: Tools | None) -> AskedChat:
        chats = isinstance(body, OllamaChat)

        def form(name: str, _: Tokenizer, chat: ChatPrompt, params: SamplingParams) -> OllamaForm:
            return OllamaForm(name, chats, chat.reading(params), body.think is not False, len(chat.ids))

        about: dict[str, Any] = {"model": ours(body.model), "params": body.params, "stream": body.stream}
        return AskedChat(
            **about, messages=messages, tools=tools, form=form, context=(body.options or Options()).num_ctx
        )

    async def loaded(body: _Asked | OllamaEmbed | OllamaEmbedding, empty: dict[str, Any]) -> Response:
        """The answer to a request that says nothing: the model is loaded."""
        hold = await desk.hold(ours(body.model))
        hold.end()
        return JSONResponse({"model": body.model, "created_at": _now(), **empty, "done": True, "done_reason": "load"})

    @app.post("/api/chat")
    async def chat(body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            return await loaded(body, {"message": {"role": "assistant", "content": ""}})
        tools = Tools(offered(body.tools)) if body.tools else None
        return await desk.chat(request, asked(body, body.conversation(), tools))

    @app.post("/api/generate")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        if not body.prompt and not body.preface:
            return await loaded(body, {"response": ""})
        system = [{"role": "system", "content": body.preface}] if body.preface else []
        given = asked(body, [*system, {"role": "user", "content": body.prompt}], None)
        return await desk.chat(request, given, raw=body.prompt if body.raw else None)

    def vectors(body: OllamaEmbed | OllamaEmbedding, inputs: list[str], **how: Any) -> AskedVectors:
        return AskedVectors(ours(body.model), inputs, context=(body.options or Options()).num_ctx, **how)

    @app.post("/api/embed")
    async def embed(body: OllamaEmbed, request: Request) -> Response:
        begin_s = time.perf_counter()
        inputs = [body.input] if isinstance(body.input, str) else body.input
        if not inputs or inputs == [""]:
            return await loaded(body, {"embeddings": []})
        asked = vectors(body, inputs, dimensions=body.dimensions or None, cuts=body.truncate)
        answer = await embedded(desk, request, asked)
        took = {"total_duration": round((time.perf_counter() - begin_s) * 1e9), "load_duration": 0}
        return _vectors_body(answer, '"embeddings": [', "], ", {**took, "prompt_eval_count": answer.prompt_tokens})

    @app.post("/api/embeddings")
    async def embedding(body: OllamaEmbedding, request: Request) -> Response:
        """Ollama leaves these at the length that they have."""
        if not body.prompt:
            return await loaded(body, {"embedding": []})
        answer = await embedded(desk, request, vectors(body, [body.prompt], normalize=False, cuts=body.truncate))
        return _vectors_body(answer, '"embedding": ', ", ", {})

    def details(name: str) -> dict[str, Any]:
        now = shelf.now
        if now is None or now.name != name:
            return {"format": "penstock", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
        target = now.service.engine.plan.target
        family, weights = target.spec.model_type, str(target.weights.name)
        about = {"format": "penstock", "family": family, "families": [family]}
        return {**about, "parameter_size": "", "quantization_level": weights}

    def listed(name: str) -> dict[str, Any]:
        return {"name": name, "model": name, "modified_at": begun, "size": 0, "digest": "", "details": details(name)}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [listed(name) for name in shelf.names]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        return {"models": [listed(shelf.now.name)] if shelf.now is not None else []}

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": penstock.__version__}

    @app.post("/api/show")
    async def show(body: Named) -> dict[str, Any]:
        name = desk.name_of(ours(body.model or body.name or ""))
        now = shelf.now
        loaded = now is not None and now.name == name
        tokenizer = now.service.engine.tokenizer if now is not None and loaded else None
        context = now.service.engine.plan.context if now is not None and loaded else None
        family = details(name)["family"]
        also = ["thinking"] if tokenizer and tokenizer.thinks else []
        also += ["embedding"] if now is not None and loaded and now.service.engine.pooling else []
        return {
            "details": details(name),
            "model_info": {"general.architecture": family, f"{family}.context_length": context} if loaded else {},
            "capabilities": ["completion", "tools", *also],
        }
