"""The routes of the server. Each turns a body into requests to the `Service`, and what comes of them into JSON."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import penstock
from penstock.errors import BadRequest, InternalError, PenstockError
from penstock.planner.pace import Pace
from penstock.serve.api.answers import Answers, Gone, Shape, head_of
from penstock.serve.api.guard import OWNER, Access, App, Guard, Limits, Receive, Scope, Send, error_body
from penstock.serve.api.metrics import CONTENT_TYPE, metrics
from penstock.serve.api.wire import MAX_SCORES, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from penstock.serve.scheduler import QueueFull
from penstock.serve.service import Service
from penstock.spec import plan as plans

RETRY_S = 5  # what a client is told to wait where the queue is full


@dataclass
class Served:
    """What the routes serve. `name`: of the model, for clients. `created_s`: when it was loaded. `schemas`: answers
    may be held to JSON schemas. `ending`: the server takes no more requests."""

    service: Service
    name: str
    pace: Pace
    created_s: int
    schemas: bool = False
    ending: bool = False


def guarded(served: Served, access: Access, limits: Limits) -> App:
    """The application behind its guard."""
    return Guard(make_app(served), access, limits)


def make_app(served: Served) -> FastAPI:
    """The application, without any check of who asks."""
    app = FastAPI(title="penstock", version=penstock.__version__, docs_url=None, redoc_url=None)
    _errors(app)
    _completions(app, served)
    _about(app, served)
    return app


def _completions(app: FastAPI, served: Served) -> None:
    tokenizer, config = served.service.engine.tokenizer, served.service.engine.tokenizer.generation_config
    # One text at a time goes to the tokenizer: its process does one at a time, and a list of ids takes 36 bytes each.
    one = CapacityLimiter(1)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _require_model(body.model, served)
        messages = [message.plain() for message in body.messages]
        ids = await to_thread.run_sync(tokenizer.encode_chat, messages, limiter=one)
        shape = Shape("chat.completion", head_of("chatcmpl", secrets.token_hex(12), served.name), tokenizer)
        return await _answered(request, body, [ids], shape)

    @app.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request) -> Response:
        _require_model(body.model, served)
        prompts = [
            await to_thread.run_sync(tokenizer.encode, prompt, limiter=one) if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        echoed = await _echoed(body, prompts) if body.echo else ()
        shape = Shape("text_completion", head_of("cmpl", secrets.token_hex(12), served.name), tokenizer, echoed)
        return await _answered(request, body, prompts, shape)

    async def _echoed(body: CompletionRequest, prompts: list[list[int]]) -> tuple[str, ...]:
        """What is written before each answer. Raises BadRequest where so many scores are wanted that their JSON would
        take much memory."""
        n, count = body.n or 1, 1 + (body.prompt_alternatives or 0)
        entries = 0 if body.prompt_alternatives is None else sum(map(len, prompts)) * n * count
        if entries > MAX_SCORES:
            raise BadRequest(f"echo would give {entries} log probabilities; a request may have {MAX_SCORES}")
        texts = [
            given if isinstance(given, str) else await to_thread.run_sync(tokenizer.decode, ids, False, limiter=one)
            for given, ids in zip(body.prompts(), prompts, strict=True)
        ]
        return tuple(text for text in texts for _ in range(n))

    async def _answered(
        request: Request, body: ChatRequest | CompletionRequest, prompts: list[list[int]], shape: Shape
    ) -> Response:
        room = served.service.engine.plan.context - max(map(len, prompts)) + 1
        params = body.params(config, max(1, room) if shape.chats else 16)
        if params.json_schema is not None:  # refused before any answer begins
            if not served.schemas:
                raise BadRequest("this server holds no answers to JSON schemas: it was started without")
            await to_thread.run_sync(served.service.engine.guides.check, params.json_schema)
        answers = Answers(served.service, body.n or 1, request.scope.get(OWNER, ""))
        try:
            for ids in prompts:
                answers.submit(ids, params, body.priority)
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                return _Events(answers, answers.events(shape, usage))
            found = await _unless_gone(request, answers)
            choices = [await to_thread.run_sync(shape.choice, i, answer, limiter=one) for i, answer in enumerate(found)]
            head = {**shape.head, "object": shape.kind}
            return JSONResponse({**head, "choices": choices, "usage": answers.usage})
        except BaseException:
            answers.cancel()
            raise


def _about(app: FastAPI, served: Served) -> None:
    service, tokenizer = served.service, served.service.engine.tokenizer
    plan = service.engine.plan

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        about = {"id": served.name, "object": "model", "created": served.created_s, "owned_by": "penstock"}
        return {"object": "list", "data": [{**about, "max_model_len": plan.context}]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _require_model(name, served)
        about = {"id": served.name, "object": "model", "created": served.created_s, "owned_by": "penstock"}
        return {**about, "max_model_len": plan.context}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ending" if served.ending else "ok"}, 503 if served.ending else 200)

    @app.get("/metrics")
    async def told() -> Response:
        return Response(metrics(served.service), media_type=CONTENT_TYPE)

    @app.get("/v1/plan")
    async def planned() -> dict[str, Any]:
        prediction, counts = service.engine.prediction, service.counts
        return {
            "plan": plans.to_json(plan),
            "predicted": {
                "ttft_s": prediction.ttft_s,
                "decode_tokens_per_s": prediction.decode_tokens_per_s,
                "gap_ratio_beside_prompts": served.pace.gap_ratio,
            },
            "sequences": plan.batch_seqs * plan.batches_per_pass,
            "prompt_rows": served.pace.prompt_rows,
            "running": counts.running,
            "waiting": counts.waiting,
            "reasons": [*service.engine.solved.reasons, served.pace.reason],
        }

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        _require_model(body.model, served)
        ids = await to_thread.run_sync(tokenizer.encode, body.prompt, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": plan.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        _require_model(body.model, served)
        if any(not 0 <= token < plan.target.spec.vocab for token in body.tokens):
            raise BadRequest(f"tokens should be from 0 to {plan.target.spec.vocab - 1}")
        return {"prompt": await to_thread.run_sync(tokenizer.decode, body.tokens, False)}


class _Events(StreamingResponse):
    """Server-sent events. Whatever is left of the answers is cancelled when nobody takes them any more."""

    def __init__(self, answers: Answers, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def _unless_gone(request: Request, answers: Answers) -> list[Any]:
    """The answers. Raises Gone as soon as the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gathering, leaving = asyncio.ensure_future(answers.gathered()), asyncio.ensure_future(gone())
    # Where the client goes, an error of its answers may come before they are cancelled, and nobody asks for it.
    gathering.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait([gathering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            raise Gone("the client has gone")
        return gathering.result()
    finally:
        gathering.cancel()
        leaving.cancel()


def _require_model(name: str | None, served: Served) -> None:
    if name not in (None, "", served.name):
        raise HTTPException(404, f"this server has no model {name[:200]!r}: it has {served.name!r}")


def _errors(app: FastAPI) -> None:
    """Errors in the shape that OpenAI's clients read."""

    @app.exception_handler(PenstockError)
    async def ours(_: Request, error: PenstockError) -> Response:
        if isinstance(error, QueueFull):
            body = error_body(error.message, "rate_limit_error", "queue_full")
            return JSONResponse(body, 429, {"retry-after": str(RETRY_S)})
        if isinstance(error, BadRequest):
            return JSONResponse(error_body(error.message, "invalid_request_error"), 400)
        status = 500 if isinstance(error, InternalError) else 503
        return JSONResponse(error_body(error.message, "server_error", type(error).__name__), status)

    @app.exception_handler(Gone)
    async def gone(_: Request, error: Gone) -> Response:
        return JSONResponse(error_body(str(error), "server_error", "cancelled"), 503)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(at) for at in first["loc"] if at != "body")
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(error_body(message[:1000], "invalid_request_error", param=where[:200] or None), 400)

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        code = "model_not_found" if error.status_code == 404 and "no model" in str(error.detail) else None
        return JSONResponse(error_body(str(error.detail), kind, code), error.status_code, error.headers)
