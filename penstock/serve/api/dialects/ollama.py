"""Ollama's API: /api/chat and /api/generate, streamed line by line unless the client says otherwise; embeddings; and
what Ollama's clients ask about models."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

import penstock
from penstock.errors import PenstockError
from penstock.serve.api.answers import Answers, Gone
from penstock.serve.api.chats import ChatPrompt
from penstock.serve.api.desk import AskedChat, Desk
from penstock.serve.api.dialects.ollama_wire import (
    Named,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    Options,
)
from penstock.serve.api.embeddings import AskedVectors, Vectors, embedded, numbers
from penstock.serve.api.shelf import Loaded, Shelf
from penstock.serve.api.streams import parts_of
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools, offered
from penstock.serve.tools.reading import Collected, Reading, ToolCall

_LATEST = ":latest"  # what Ollama's clients put behind a name that has no tag


@dataclass
class OllamaForm:
    """How one answer is written down.

    chats     the answer is a message, as /api/chat has it; else a text, as /api/generate has it
    reading   takes the answer apart
    thoughts  the client is told what the model thought
    begun_s   when the request came, by `time.perf_counter`
    """

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
        collected = Collected()  # text goes out at once; a call waits until it is whole, as Ollama has it
        try:
            async for _, piece in answers.pieces():
                if piece is None:
                    continue  # a stream of JSON lines has no comments
                collected.add(parts_of(self.reading, piece))
                whole = isinstance(piece, Generation)
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
    return {"function": {"name": call.name, "arguments": call.arguments_object()}}


def _json_line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def _vectors_body(answer: Vectors, before: str, after: str, more: dict[str, Any]) -> Response:
    """An object that is sent vector by vector. `before` and `after` stand around the vectors, and `more` holds the
    fields behind them."""

    def pieces() -> Iterator[str]:
        yield "{" + before
        for i, each in enumerate(answer.vectors):
            yield (", " if i else "") + numbers(each)
        yield after + json.dumps({**answer.about, **more})[1:]

    return StreamingResponse(pieces(), media_type="application/json")


class _Routes:
    """The handlers of all paths. A request that asks for no answer only loads the model, as Ollama has it."""

    def __init__(self, desk: Desk, shelf: Shelf) -> None:
        self._desk, self._shelf, self._begun = desk, shelf, _now()

    async def chat(self, body: OllamaChat, request: Request) -> Response:
        if not body.messages:
            return await self._load(request, body.model, {"message": {"role": "assistant", "content": ""}})
        tools = Tools(offered(body.tools)) if body.tools else None
        return await self._desk.chat(request, self._asked(body, body.conversation(), tools))

    async def generate(self, body: OllamaGenerate, request: Request) -> Response:
        if not body.prompt and not body.preface:
            return await self._load(request, body.model, {"response": ""})
        system = [{"role": "system", "content": body.preface}] if body.preface else []
        asked = self._asked(body, [*system, {"role": "user", "content": body.prompt}], None)
        return await self._desk.chat(request, asked, raw=body.prompt if body.raw else None)

    async def embed(self, body: OllamaEmbed, request: Request) -> Response:
        begin_s = time.perf_counter()
        inputs = [body.input] if isinstance(body.input, str) else body.input
        if not inputs or inputs == [""]:
            return await self._load(request, body.model, {"embeddings": []})
        answer = await self._vectors(request, body, inputs, dimensions=body.dimensions or None)
        took = {"total_duration": round((time.perf_counter() - begin_s) * 1e9), "load_duration": 0}
        return _vectors_body(answer, '"embeddings": [', "], ", {**took, "prompt_eval_count": answer.prompt_tokens})

    async def embedding(self, body: OllamaEmbedding, request: Request) -> Response:
        """The vector is not brought to length 1 here: Ollama does that on /api/embed alone."""
        if not body.prompt:
            return await self._load(request, body.model, {"embedding": []})
        answer = await self._vectors(request, body, [body.prompt], normalize=False)
        return _vectors_body(answer, '"embedding": ', ", ", {})

    async def tags(self) -> dict[str, Any]:
        return {"models": [self._listed(name) for name in self._shelf.names]}

    async def running(self) -> dict[str, Any]:
        now = self._shelf.now
        return {"models": [self._listed(now.name)] if now is not None else []}

    async def version(self) -> dict[str, str]:
        return {"version": penstock.__version__}

    async def show(self, body: Named) -> dict[str, Any]:
        name = self._desk.name_of(self._ours(body.model or body.name or ""))
        details, loaded = self._details(name), self._loaded(name)
        if loaded is None:
            return {"details": details, "model_info": {}, "capabilities": ["completion", "tools"]}
        engine, family = loaded.service.engine, details["family"]
        thinks = ["thinking"] if engine.tokenizer and engine.tokenizer.thinks else []
        embeds = ["embedding"] if engine.pooling else []
        return {
            "details": details,
            "model_info": {"general.architecture": family, f"{family}.context_length": engine.plan.context},
            "capabilities": ["completion", "tools", *thinks, *embeds],
        }

    def _ours(self, name: str) -> str:
        """The server's name for a model that a client names."""
        return name if name in self._shelf.names else name.removesuffix(_LATEST)

    def _loaded(self, name: str) -> Loaded | None:
        """The model of this name, if it is the one that is loaded."""
        now = self._shelf.now
        return now if now is not None and now.name == name else None

    def _asked(
        self, body: OllamaChat | OllamaGenerate, messages: list[dict[str, Any]], tools: Tools | None
    ) -> AskedChat:
        chats = isinstance(body, OllamaChat)

        def form(name: str, _: Tokenizer, chat: ChatPrompt, params: SamplingParams) -> OllamaForm:
            return OllamaForm(name, chats, chat.reading(params), body.think is not False, len(chat.ids))

        about: dict[str, Any] = {"model": self._ours(body.model), "params": body.params, "stream": body.stream}
        context = (body.options or Options()).num_ctx
        return AskedChat(**about, messages=messages, tools=tools, form=form, context=context)

    async def _vectors(
        self, request: Request, body: OllamaEmbed | OllamaEmbedding, inputs: list[str], **how: Any
    ) -> Vectors:
        context = (body.options or Options()).num_ctx
        asked = AskedVectors(self._ours(body.model), inputs, context=context, cuts=body.truncate, **how)
        return await embedded(self._desk, request, asked)

    async def _load(self, request: Request, model: str, empty: dict[str, Any]) -> Response:
        """Waits until the model is loaded. `empty`: the field that would hold an answer."""
        hold = await self._desk.hold(request, self._ours(model))
        hold.end()
        return JSONResponse({"model": model, "created_at": _now(), **empty, "done": True, "done_reason": "load"})

    def _details(self, name: str) -> dict[str, Any]:
        """What Ollama tells of every model. Of one that is not loaded the fields are empty."""
        loaded = self._loaded(name)
        family = level = ""
        if loaded is not None:
            target = loaded.service.engine.plan.target
            family, level = target.spec.model_type, str(target.weights.name)
        families = [family] if family else []
        about = {"format": "penstock", "family": family, "families": families}
        return {**about, "parameter_size": "", "quantization_level": level}

    def _listed(self, name: str) -> dict[str, Any]:
        about = {"name": name, "model": name, "modified_at": self._begun, "size": 0, "digest": ""}
        return {**about, "details": self._details(name)}


def routes(app: FastAPI, desk: Desk, shelf: Shelf) -> None:
    """Adds this API's routes."""
    ours = _Routes(desk, shelf)
    app.post("/api/chat")(ours.chat)
    app.post("/api/generate")(ours.generate)
    app.post("/api/embed")(ours.embed)
    app.post("/api/embeddings")(ours.embedding)
    app.get("/api/tags")(ours.tags)
    app.get("/api/ps")(ours.running)
    app.get("/api/version")(ours.version)
    app.post("/api/show")(ours.show)
