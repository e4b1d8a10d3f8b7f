"""Takes requests of every dialect to the service, and brings the answers back in that dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from penstock.errors import BadRequest
from penstock.serve.api.answers import Answers, Gone, Post
from penstock.serve.api.chats import ChatPrompt, chat_of
from penstock.serve.api.guard import LET_GO, OWNER, SPEND, Receive, Scope, Send
from penstock.serve.api.shelf import Hold, Shelf
from penstock.serve.api.wire import MAX_SCORES
from penstock.serve.generation import Generation, Used
from penstock.serve.sampling import SamplingParams
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.tools.asked import Tools

T = TypeVar("T")
Ids = NDArray[np.int32]
Prompt = list[int] | Ids  # ids


class Form(Protocol):
    """How a dialect writes answers. `media_type`: of a stream."""

    @property
    def media_type(self) -> str: ...

    def whole(self, answers: Sequence[Generation], used: Used) -> dict[str, Any]:
        """Whole answers, as the object that is sent."""

    def events(self, answers: Answers) -> AsyncIterator[bytes]:
        """Answers piece by piece, as the bytes that are sent. Errors are a part of them."""


# Makes the sampling parameters from the model's generation_config.json, and from the most tokens of an answer if the
# client names no length.
Choosing = Callable[[dict[str, Any], int], SamplingParams]


@dataclass(frozen=True)
class Asked:
    """What a client asks for, apart from the prompt. `n`: answers to each prompt."""

    model: str | None
    params: Choosing
    stream: bool
    n: int = 1
    priority: int = 0


@dataclass(frozen=True)
class AskedChat(Asked):
    """A conversation to go on with.

    messages  in the form that chat templates take
    context   tokens that the client wants room for
    form      makes the `Form` of the answers from the model's name, the tokenizer, the chat and the sampling parameters
    """

    messages: Sequence[dict[str, Any]] = ()
    tools: Tools | None = None
    context: int | None = None
    form: Callable[[str, Tokenizer, ChatPrompt, SamplingParams], Form] = field(kw_only=True)


class Desk:
    """All requests of a server. Make one, and use it in one event loop."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        # One text at a time goes to the tokenizer: its process does one at a time, and a list of ids takes 36 bytes
        # each.
        self.one = CapacityLimiter(1)
        # And one schema at a time is compiled: each may take a second, and answers wait for their masks meanwhile.
        self._compiling = CapacityLimiter(1)
        self._post: Post | None = None  # of the event loop, which runs when the first request comes

    async def hold(self, request: Request, name: str | None) -> Hold:
        """Waits until a model is loaded: the named one, or else the first. Raises HTTPException if there is no such
        model, and Gone: for a client that has gone none is loaded."""
        return await unless_gone(request, self._shelf.hold(self.name_of(name)))

    def name_of(self, name: str | None) -> str:
        """A model's name. Raises HTTPException where there is no such model."""
        names = self._shelf.names
        if name in (None, ""):
            return names[0]
        if name not in names:
            raise HTTPException(404, f"this server has no model {name[:200]!r}: it has {', '.join(names)[:1000]}")
        return name

    async def chat(self, request: Request, asked: AskedChat, raw: str | None = None) -> Response:
        """An answer to a conversation; to the text `raw` instead where one is given. Raises as `chat_of` and
        `answered`, BadRequest where the client wants more room than the context has."""
        hold = await self.hold(request, asked.model)
        try:
            ids, params, form = await self._opened(asked, raw, hold)
            return await self.answered(request, asked, [ids], params, form, hold)
        except BaseException:
            hold.end()
            raise

    async def _opened(self, asked: AskedChat, raw: str | None, hold: Hold) -> tuple[Ids, SamplingParams, Form]:
        """(the prompt, how its answers are chosen, how they are written). A request may wait for long, and keeps no
        more than that of its rendered conversation. Raises as `chat`."""
        engine = hold.loaded.service.engine
        tokenizer, context = engine.tokenizer, engine.plan.context
        if asked.context is not None and asked.context > context:
            raise BadRequest(f"a context of {asked.context} is more than the server's {context}")
        if raw is None:
            chat = await to_thread.run_sync(chat_of, tokenizer, asked.messages, asked.tools, limiter=self.one)
        else:
            chat = ChatPrompt(await to_thread.run_sync(tokenizer.encode, raw, limiter=self.one))
        ids = np.array(chat.ids, np.int32)
        params = chat.ruled(self.params(asked, [ids], hold, None))
        return ids, params, asked.form(hold.loaded.name, tokenizer, chat, params)

    async def ids(self, given: str | list[int], tokenizer: Tokenizer) -> Prompt:
        """The ids of a prompt. Those of a text take 4 bytes each, those of a list what the body has of them anyway."""
        if not isinstance(given, str):
            return given
        return np.array(await to_thread.run_sync(tokenizer.encode, given, limiter=self.one), np.int32)

    def params(self, asked: Asked, prompts: Sequence[Prompt], hold: Hold, most: int | None) -> SamplingParams:
        """The sampling parameters. `most`: the tokens of an answer if the client names no length; None for what the
        context has room for. Raises BadRequest."""
        engine = hold.loaded.service.engine
        room = engine.plan.context - max(map(len, prompts)) + 1
        return asked.params(engine.tokenizer.generation_config, max(1, room) if most is None else most)

    def post(self) -> Post:
        """The post that brings answers to the running event loop."""
        if self._post is None or not self._post.is_here:
            self._post = Post()
        return self._post

    async def answered(
        self, request: Request, asked: Asked, prompts: Sequence[Prompt], params: SamplingParams, form: Form,
        hold: Hold,
    ) -> Response:  # fmt: skip
        """The answers, as a response. The hold on the model ends with them, or with their stream. It stays if this
        raises. Raises as `Service.submit`, BadRequest where the rule of the answers cannot be followed or too many log
        probabilities are wanted, Gone."""
        loaded, engine = hold.loaded, hold.loaded.service.engine
        _require_few_scores(params, asked.n, prompts, engine.plan.context)
        if params.rule is not None:  # refused before any answer begins
            if not loaded.schemas:
                raise BadRequest("this server holds no answers to JSON schemas or tools: it was started without")
            await to_thread.run_sync(engine.guides.check, params.rule, limiter=self._compiling)
        answers = Answers(loaded.service, asked.n, request.scope.get(OWNER, ""), self.post())
        try:
            for ids in prompts:
                answers.submit(ids, params, asked.priority)
            if asked.stream:
                return _EventStream(answers, form, hold, request)
            generations = await unless_gone(request, answers.gathered())
            answer = JSONResponse(await to_thread.run_sync(form.whole, generations, answers.used, limiter=self.one))
            hold.end()
            return answer
        except BaseException:
            answers.cancel()
            raise
        finally:
            if SPEND in request.scope and not asked.stream:
                request.scope[SPEND](answers.tokens)


def _require_few_scores(params: SamplingParams, n: int, prompts: Sequence[Prompt], context: int) -> None:
    """Raises BadRequest where the answers may have so many log probabilities that they would take much memory: an
    answer keeps its own until the end."""
    if params.logprobs is None:
        return
    each = n * (1 + params.logprobs)
    entries = each * sum(min(params.max_tokens, max(0, context - len(ids) + 1)) for ids in prompts)
    if entries > MAX_SCORES:
        most = MAX_SCORES // (each * len(prompts))
        raise BadRequest(
            f"answers of {params.max_tokens} tokens would have {entries} log probabilities; a request may have"
            f" {MAX_SCORES}, here with max_tokens of {most}"
        )


class _EventStream(StreamingResponse):
    """A stream of answers. When nobody reads it any more, the answers that are left are cancelled, and their hold on
    the model ends, and the client's key has spent the tokens that they took.

    A stream may wait and last for hours, so it lets go of the request's body. Starlette would keep it as long."""

    def __init__(self, answers: Answers, form: Form, hold: Hold, request: Request) -> None:
        events = form.events(answers)
        super().__init__(events, media_type=form.media_type, headers={"cache-control": "no-store"})
        self._answers, self._hold, self._request = answers, hold, request
        self._spend: Callable[[int], None] = request.scope.get(SPEND, lambda _: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._request._body, self._request._json = b"", None
        scope.get(LET_GO, lambda: None)()
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()
            self._hold.end()
            self._spend(self._answers.tokens)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. Raises Gone as soon as the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gathering, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
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
