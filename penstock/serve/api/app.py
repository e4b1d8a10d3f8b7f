"""The routes of the server. Each route turns a body into requests to the `Service`, and their answers into JSON."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import penstock
from penstock.errors import BadRequest, InternalError, PenstockError
from penstock.serve.api import page
from penstock.serve.api.answers import Gone
from penstock.serve.api.chats import ChatPrompt
from penstock.serve.api.desk import Asked, AskedChat, Desk, Prompt
from penstock.serve.api.dialects import anthropic, ollama, responses
from penstock.serve.api.embeddings import AskedVectors, embedded, openai_response
from penstock.serve.api.errors import error_body
from penstock.serve.api.guard import Access, App, Guard, Limits
from penstock.serve.api.metrics import CONTENT_TYPE, metrics
from penstock.serve.api.shape import Shape, head_of
from penstock.serve.api.shelf import Loaded, Shelf
from penstock.serve.api.wire import (
    MAX_SCORES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    what_is_wrong,
)
from penstock.serve.foretold import Newcomer
from penstock.serve.sampling import SamplingParams
from penstock.serve.scheduler import Ending, QueueFull
from penstock.serve.tokenizer import Tokenizer
from penstock.spec import plan as plans

Tokens = Annotated[int | None, Query(ge=1, le=2**31 - 1)]
RETRY_S = 5  # so long a client is told to wait if the queue is full


def guarded(shelf: Shelf, access: Access, limits: Limits) -> App:
    """The application behind its guard."""
    return Guard(make_app(shelf), access, limits)


def make_app(shelf: Shelf) -> FastAPI:
    """The application, without any check of who asks."""
    app = FastAPI(title="penstock", version=penstock.__version__, docs_url=None, redoc_url=None)
    _errors(app)
    desk = Desk(shelf)
    _completions(app, desk)
    _about(app, desk, shelf)
    _texts(app, desk)
    _embeddings(app, desk)
    anthropic.routes(app, desk)
    ollama.routes(app, desk, shelf)
    responses.routes(app, desk)
    page.routes(app, shelf)
    return app


def _completions(app: FastAPI, desk: Desk) -> None:
    def asked(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
        stream = bool(body.stream)
        return dict(model=body.model, params=body.params, stream=stream, n=body.n or 1, priority=body.priority)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        def form(name: str, tokenizer: Tokenizer, chat: ChatPrompt, params: SamplingParams) -> Shape:
            head = head_of("chatcmpl", secrets.token_hex(12), name)
            return Shape("chat.completion", head, tokenizer, chat.readings(params), with_usage=body.with_usage)

        messages = [message.plain() for message in body.messages]
        return await desk.chat(request, AskedChat(**asked(body), messages=messages, tools=body.callable(), form=form))

    @app.post("/v1/completions")
    async def completion(body: CompletionRequest, request: Request) -> Response:
        hold = await desk.hold(request, body.model)
        try:
            tokenizer = hold.loaded.service.engine.tokenizer
            prompts = [await desk.ids(given, tokenizer) for given in body.prompts()]
            echoed = await _echoed(body, prompts, tokenizer) if body.echo else ()
            head = head_of("cmpl", secrets.token_hex(12), hold.loaded.name)
            shape = Shape("text_completion", head, tokenizer, echoed=echoed, with_usage=body.with_usage)
            given = Asked(**asked(body))
            return await desk.answered(request, given, prompts, desk.params(given, prompts, hold, 16), shape, hold)
        except BaseException:
            hold.end()
            raise

    async def _echoed(body: CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer) -> tuple[str, ...]:
        """The prompts that are written before the answers. Raises BadRequest if so many scores are wanted that their
        JSON would take much memory."""
        n, count = body.n or 1, 1 + (body.prompt_alternatives or 0)
        entries = 0 if body.prompt_alternatives is None else sum(map(len, prompts)) * n * count
        if entries > MAX_SCORES:
            raise BadRequest(f"echo would give {entries} log probabilities; a request may have {MAX_SCORES}")
        texts = [
            given
            if isinstance(given, str)
            else await to_thread.run_sync(tokenizer.decode, ids, False, limiter=desk.one)
            for given, ids in zip(body.prompts(), prompts, strict=True)
        ]
        return tuple(text for text in texts for _ in range(n))


def _about(app: FastAPI, desk: Desk, shelf: Shelf) -> None:
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
        return about(desk.name_of(name))

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
        loaded = shelf.require_now()
        engine, counts = loaded.service.engine, loaded.service.counts
        plan, prediction = engine.plan, engine.prediction
        followed = (reason,) if (reason := loaded.service.pace_reason) is not None else ()
        return {
            "model": loaded.name,
            "plan": plans.to_json(plan),
            "predicted": {
                "ttft_s": prediction.ttft_s,
                "decode_tokens_per_s": prediction.decode_tokens_per_s,
                "gap_ratio_beside_prompts": loaded.pace.gap_ratio,
            },
            "sequences": plan.sequences,
            "prompt_rows": loaded.service.prompt_rows,
            "passes": [
                {"answers": answers, "prompt_rows": rows, "seconds": took.seconds, "passes": took.passes}
                for (answers, rows), took in sorted(loaded.service.pass_times.measured.items())
            ],
            "running": counts.running,
            "waiting": counts.waiting,
            "next_request": await to_thread.run_sync(
                _next_request, loaded, prompt_tokens, output_tokens, limiter=foretelling
            ),
            "reasons": [*engine.solved.reasons, loaded.pace.reason, *followed, *loaded.reasons],
        }


def _next_request(loaded: Loaded, prompt_tokens: int | None, output_tokens: int | None) -> dict[str, Any]:
    """What a request would find if it came now. It has as many tokens as the plan was made for, unless the client names
    others. Raises BadRequest for more than the context has."""
    ask, context = loaded.service.engine.ask, loaded.service.engine.plan.context
    # A context that is shorter than both together is shared as they are.
    most = max(1, min(context - 1, context * ask.prompt_tokens // ask.sequence_tokens))
    prompt = prompt_tokens or min(ask.prompt_tokens, most)
    if prompt > context:
        raise BadRequest(f"a prompt of {prompt} tokens does not fit a context of {context}")
    output = min(output_tokens or ask.output_tokens, context - prompt + 1)
    asked = {"prompt_tokens": prompt, "output_tokens": output}
    try:
        return {**asked, **loaded.service.newcomer(prompt, output)._asdict(), "refused": None}
    except QueueFull as error:
        return {**asked, **dict.fromkeys(Newcomer._fields), "refused": error.message}


def _texts(app: FastAPI, desk: Desk) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        hold = await desk.hold(request, body.model)
        try:
            engine = hold.loaded.service.engine
            ids = await to_thread.run_sync(engine.tokenizer.encode, body.prompt, body.add_special_tokens)
            return {"tokens": ids, "count": len(ids), "max_model_len": engine.plan.context}
        finally:
            hold.end()

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        hold = await desk.hold(request, body.model)
        try:
            engine = hold.loaded.service.engine
            vocab = engine.plan.target.spec.vocab
            if any(not 0 <= token < vocab for token in body.tokens):
                raise BadRequest(f"tokens should be from 0 to {vocab - 1}")
            return {"prompt": await to_thread.run_sync(engine.tokenizer.decode, body.tokens, False)}
        finally:
            hold.end()


def _embeddings(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        about: Any = {"pooling": body.pooling, "dimensions": body.dimensions, "priority": body.priority}
        vectors = await embedded(desk, request, AskedVectors(body.model, body.inputs(), **about))
        return openai_response(vectors, body.encoding_format == "base64")


def _errors(app: FastAPI) -> None:
    """Errors in the shape that the clients of each dialect read."""

    def answer(
        request: Request, status: int, message: str, kind: str | None = None, code: str | None = None,
        param: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> Response:  # fmt: skip
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        body = error_body(request.url.path, status, message, kind, code, param)
        return JSONResponse(body, status, dict(headers or {}))

    @app.exception_handler(PenstockError)
    async def ours(request: Request, error: PenstockError) -> Response:
        if isinstance(error, QueueFull):
            later = {"retry-after": str(RETRY_S)}
            return answer(request, 429, error.message, "rate_limit_error", "queue_full", headers=later)
        if isinstance(error, Ending):
            return answer(request, 503, error.message, code="ending", headers={"retry-after": str(RETRY_S)})
        if isinstance(error, BadRequest):
            return answer(request, 400, error.message)
        return answer(
            request, 500 if isinstance(error, InternalError) else 503, error.message, code=type(error).__name__
        )

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> Response:
        return answer(request, 500, f"{type(error).__name__}: {error}"[:1000], code="InternalError")

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return answer(request, 503, str(error), code="cancelled")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        message, where = what_is_wrong(error.errors())
        return answer(request, 400, message, param=where or None)

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        code = "model_not_found" if error.status_code == 404 and "no model" in str(error.detail) else None
        return answer(request, error.status_code, str(error.detail), code=code, headers=error.headers)
