"""The routes of the server. Each turns a body into requests to the `Service`, and what comes of them into JSON."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import penstock
from penstock.errors import BadRequest, InternalError, PenstockError
from penstock.serve.api.answers import Answers, Gone, Post
from penstock.serve.api.chats import chat_of
from penstock.serve.api.guard import OWNER, SPEND, Access, App, Guard, Limits, Receive, Scope, Send, error_body
from penstock.serve.api.metrics import CONTENT_TYPE, metrics
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.api.shelf import Hold, Loaded, Shelf
from penstock.serve.api.wire import (
    MAX_SCORES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    what_is_wrong,
)
from penstock.serve.foretold import Newcomer
from penstock.serve.sampling import SamplingParams
from penstock.serve.scheduler import QueueFull
from penstock.serve.tokenizer import Tokenizer
from penstock.spec import plan as plans

Tokens = Annotated[int | None, Query(ge=1, le=2**31 - 1)]
RETRY_S = 5  # what a client is told to wait where the queue is full


def guarded(shelf: Shelf, access: Access, limits: Limits) -> App:
    """The application behind its guard."""
    return Guard(make_app(shelf), access, limits)


def make_app(shelf: Shelf) -> FastAPI:
    """The application, without any check of who asks."""
    app = FastAPI(title="penstock", version=penstock.__version__, docs_url=None, redoc_url=None)
    _errors(app)
    _completions(app, shelf)
    _about(app, shelf)
    _texts(app, shelf)
    return app


def _completions(app: FastAPI, shelf: Shelf) -> None:
    # One text at a time goes to the tokenizer: its process does one at a time, and a list of ids takes 36 bytes each.
    one = CapacityLimiter(1)
    # And one schema at a time is compiled: each may take a second, and answers wait for their masks meanwhile.
    compiling = CapacityLimiter(1)
    post: Post | None = None  # of the event loop, which runs when the first request comes

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        hold = await _hold(body.model, shelf)
        try:
            tokenizer = hold.loaded.service.engine.tokenizer
            messages = [message.plain() for message in body.messages]
            asked = await to_thread.run_sync(chat_of, tokenizer, messages, body.callable(), limiter=one)
            params = asked.ruled(_params(body, [asked.ids], hold, None))
            head = head_of("chatcmpl", secrets.token_hex(12), hold.loaded.name)
            shape = Shape("chat.completion", head, tokenizer, lambda: asked.reading(params), with_usage=body.with_usage)
            return await _answered(request, body, [asked.ids], params, shape, hold)
        except BaseException:
            hold.end()
            raise

    @app.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request) -> Response:
        hold = await _hold(body.model, shelf)
        try:
            tokenizer = hold.loaded.service.engine.tokenizer
            prompts = [
                await to_thread.run_sync(tokenizer.encode, prompt, limiter=one) if isinstance(prompt, str) else prompt
                for prompt in body.prompts()
            ]
            echoed = await _echoed(body, prompts, tokenizer) if body.echo else ()
            head = head_of("cmpl", secrets.token_hex(12), hold.loaded.name)
            shape = Shape("text_completion", head, tokenizer, echoed=echoed, with_usage=body.with_usage)
            return await _answered(request, body, prompts, _params(body, prompts, hold, 16), shape, hold)
        except BaseException:
            hold.end()
            raise

    async def _echoed(body: CompletionRequest, prompts: list[list[int]], tokenizer: Tokenizer) -> tuple[str, ...]:
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
        request: Request, body: ChatRequest | CompletionRequest, prompts: list[list[int]], params: SamplingParams,
        shape: Shape, hold: Hold,
    ) -> Response:  # fmt: skip
        """The answers. The hold on the model ends with them, or with their stream."""
        loaded, engine = hold.loaded, hold.loaded.service.engine
        if params.rule is not None:  # refused before any answer begins
            if not loaded.schemas:
                raise BadRequest("this server holds no answers to JSON schemas or calls: it was started without")
            await to_thread.run_sync(engine.guides.check, params.rule, limiter=compiling)
        nonlocal post
        post = post if post is not None and post.is_here else Post()
        answers = Answers(loaded.service, body.n or 1, request.scope.get(OWNER, ""), post)
        try:
            for ids in prompts:
                answers.submit(ids, params, body.priority)
            if body.stream:
                spend = request.scope.get(SPEND, lambda _: None)
                return _Events(answers, shape.events(answers), hold, spend)
            found = await _unless_gone(request, answers)
            answer = JSONResponse(await to_thread.run_sync(shape.whole, found, answers.used, limiter=one))
            hold.end()
            return answer
        except BaseException:
            answers.cancel()
            raise
        finally:
            if SPEND in request.scope and not body.stream:
                request.scope[SPEND](answers.tokens)


def _about(app: FastAPI, shelf: Shelf) -> None:
    created_s = int(time.time())
    foretelling = CapacityLimiter(1)  # each takes up to 0.2 s of processor time, which passes need too

    def about(name: str) -> dict[str, Any]:
        now = shelf.now
        known = {"id": name, "object": "model", "created": created_s, "owned_by": "penstock"}
        loaded = now is not None and now.name == name
        return {**known, "max_model_len": now.service.engine.plan.context if now is not None and loaded else None}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about(name) for name in shelf.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return about(_required(name, shelf))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ending" if shelf.ending else "ok"}, 503 if shelf.ending else 200)

    @app.get("/metrics")
    async def told() -> Response:
        return Response(metrics(shelf.now.service if shelf.now else None), media_type=CONTENT_TYPE)

    @app.get("/v1/plan")
    async def planned(prompt_tokens: Tokens = None, output_tokens: Tokens = None) -> dict[str, Any]:
        # Of the model that is loaded. To load another one for a GET would let any web page change models: a browser
        # sends no Origin with it.
        if (loaded := shelf.now) is None:
            raise HTTPException(503, "a model is being loaded: try again later")
        engine, counts = loaded.service.engine, loaded.service.counts
        plan, prediction = engine.plan, engine.prediction
        return {
            "model": loaded.name,
            "plan": plans.to_json(plan),
            "predicted": {
                "ttft_s": prediction.ttft_s,
                "decode_tokens_per_s": prediction.decode_tokens_per_s,
                "gap_ratio_beside_prompts": loaded.pace.gap_ratio,
            },
            "sequences": plan.batch_seqs * plan.batches_per_pass,
            "prompt_rows": loaded.pace.prompt_rows,
            "passes": [
                {"answers": answers, "prompt_rows": rows, "seconds": seconds}
                for (answers, rows), seconds in sorted(loaded.service.pass_times.measured.items())
            ],
            "running": counts.running,
            "waiting": counts.waiting,
            "next_request": await to_thread.run_sync(
                _next_request, loaded, prompt_tokens, output_tokens, limiter=foretelling
            ),
            "reasons": [*engine.solved.reasons, loaded.pace.reason, *loaded.reasons],
        }


def _next_request(loaded: Loaded, prompt_tokens: int | None, output_tokens: int | None) -> dict[str, Any]:
    """What a request would find that came now: of as many tokens as the plan was made for, where none are named. Raises
    BadRequest for more than the context has."""
    ask, context = loaded.service.engine.ask, loaded.service.engine.plan.context
    prompt = prompt_tokens or min(ask.prompt_tokens, context - 1)
    if prompt > context:
        raise BadRequest(f"a prompt of {prompt} tokens does not fit a context of {context}")
    output = min(output_tokens or ask.output_tokens, context - prompt + 1)
    asked = {"prompt_tokens": prompt, "output_tokens": output}
    try:
        return {**asked, **loaded.service.newcomer(prompt, output)._asdict(), "refused": None}
    except QueueFull as error:
        return {**asked, **dict.fromkeys(Newcomer._fields), "refused": error.message}


def _texts(app: FastAPI, shelf: Shelf) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        hold = await _hold(body.model, shelf)
        try:
            engine = hold.loaded.service.engine
            ids = await to_thread.run_sync(engine.tokenizer.encode, body.prompt, body.add_special_tokens)
            return {"tokens": ids, "count": len(ids), "max_model_len": engine.plan.context}
        finally:
            hold.end()

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        hold = await _hold(body.model, shelf)
        try:
            engine = hold.loaded.service.engine
            vocab = engine.plan.target.spec.vocab
            if any(not 0 <= token < vocab for token in body.tokens):
                raise BadRequest(f"tokens should be from 0 to {vocab - 1}")
            return {"prompt": await to_thread.run_sync(engine.tokenizer.decode, body.tokens, False)}
        finally:
            hold.end()


class _Events(StreamingResponse):
    """Server-sent events. When nobody takes them any more, whatever is left of the answers is cancelled, and their hold
    on the model ends. `spend`: takes the tokens that they took."""

    def __init__(
        self, answers: Answers, events: AsyncIterator[bytes], hold: Hold, spend: Callable[[int], None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._answers, self._hold, self._spend = answers, hold, spend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()
            self._hold.end()
            self._spend(self._answers.tokens)


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


def _params(
    body: ChatRequest | CompletionRequest, prompts: Sequence[list[int]], hold: Hold, most: int | None
) -> SamplingParams:
    """How a request's tokens are chosen. `most`: tokens where the client names no length; None for what the context has
    room for. Raises BadRequest."""
    engine = hold.loaded.service.engine
    room = engine.plan.context - max(map(len, prompts)) + 1
    return body.params(engine.tokenizer.generation_config, max(1, room) if most is None else most)


async def _hold(name: str | None, shelf: Shelf) -> Hold:
    """Waits until a model is loaded, the first one where none is named."""
    return await shelf.hold(_required(name, shelf))


def _required(name: str | None, shelf: Shelf) -> str:
    """A model's name. Raises HTTPException where there is no such model."""
    if name in (None, ""):
        return shelf.names[0]
    if name not in shelf.names:
        raise HTTPException(404, f"this server has no model {name[:200]!r}: it has {', '.join(shelf.names)[:1000]}")
    return name


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
        message, where = what_is_wrong(error.errors())
        return JSONResponse(error_body(message, "invalid_request_error", param=where or None), 400)

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        code = "model_not_found" if error.status_code == 404 and "no model" in str(error.detail) else None
        return JSONResponse(error_body(str(error.detail), kind, code), error.status_code, error.headers)
