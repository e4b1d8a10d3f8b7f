"""One request's answers on their way from the service's thread to a client: gathered, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from anyio import to_thread

from penstock.errors import PenstockError
from penstock.serve.api.guard import error_body
from penstock.serve.api.shape import Shape, usage_of
from penstock.serve.generation import Generation
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import Cancelled, Ended, Failed, Piece, Told

ALIVE_S = 10.0  # a comment goes to a client that has heard nothing for so long: proxies close silent connections


class Gone(Exception):
    """The request was cancelled: the server is ending."""


class Post:
    """Brings what other threads tell to queues of an event loop.

    It wakes the loop once for all that was told before it woke. Where each token of 32 streams woke it, the service's
    thread gave the interpreter up at each of them, and waited up to 5 ms until it had it back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._wakes = False  # the loop was woken, and has not come yet

    @property
    def is_here(self) -> bool:
        """Whether this is the loop that runs."""
        return self._loop is asyncio.get_running_loop()

    def put(self, to: asyncio.Queue[Any], what: Any) -> None:
        """May be called by any thread."""
        self._told.append((to, what))
        if not self._wakes:
            self._wakes = True
            with suppress(RuntimeError):  # the loop has ended: nobody listens any more
                self._loop.call_soon_threadsafe(self._bring)

    def _bring(self) -> None:
        self._wakes = False  # first, so that nothing that is told from here on is left
        while self._told:
            to, what = self._told.popleft()
            to.put_nowait(what)


class Answers:
    """The answers to some prompts, `n` each, numbered as OpenAI's API does: all answers to the first prompt come first.
    `owner`: who asks. `post`: of the running loop. `wait_for(awaitable, seconds)`: raises TimeoutError where nothing
    came for so long.

    Whoever makes one must `cancel` it in the end, whatever happened."""

    def __init__(
        self, service: Service, n: int, owner: str, post: Post,
        wait_for: Callable[..., Awaitable[Any]] = asyncio.wait_for,
    ) -> None:  # fmt: skip
        self._service, self._n, self._owner, self._post, self._wait_for = service, n, owner, post, wait_for
        self._prompt_tokens = 0
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        self._numbers: list[int] = []
        self._said = 0  # tokens, so far
        self.whole: dict[int, Generation] = {}

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int) -> None:
        """Asks for `n` answers to a prompt. Raises as `Service.submit`. Waits for the service's lock alone."""
        self._prompt_tokens += len(prompt_ids)
        for i in range(self._n):
            tell = self._teller(len(self._numbers))
            self._numbers.append(self._service.submit(prompt_ids, params.nth(i), tell, priority, self._owner))

    def cancel(self) -> None:
        """Whatever has not ended leaves."""
        for number in self._numbers:
            self._service.cancel(number)

    async def gathered(self) -> list[Generation]:
        """All answers. Raises PenstockError where one fails, Gone."""
        async for _ in self._pieces():
            pass
        return [self.whole[i] for i in range(len(self._numbers))]

    @property
    def tokens(self) -> int:
        """Of prompts and of what was said so far."""
        return self._prompt_tokens + self._said

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, when all answers are whole."""
        return usage_of(self._prompt_tokens, [self.whole[i] for i in range(len(self._numbers))], self._n)

    async def events(self, shape: Shape, with_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, usage where it is wanted, and the end."""
        kind = "chat.completion.chunk" if shape.chats else shape.kind
        begun: dict[int, int] = {}  # answer → characters that were sent

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            usage = {"usage": None} if with_usage else {}
            body = {**shape.head, "object": kind, "choices": choices, **usage, **more}
            return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

        try:
            async for index, piece in self._pieces():
                if piece is None:
                    yield b": still waiting, or reading the prompt\n\n"
                    continue
                sent, first = begun.get(index, 0), index not in begun
                if isinstance(piece, Generation):
                    # An answer of no tokens has no piece before its end: here its prompt is written.
                    chunk = partial(shape.chunk, index, shape.echo(index) if first else "", first=first)
                    scores = piece.prompt_scores if first else None
                    chunk = partial(chunk, finish_reason=piece.finish_reason, prompt_scores=scores)
                    yield event([await to_thread.run_sync(chunk) if scores else chunk()])
                elif piece.text or piece.likely or first:
                    text = shape.echo(index) + piece.text if first else piece.text
                    chunk = partial(shape.chunk, index, text, piece.likely, sent, first=first)
                    chunk = partial(chunk, prompt_scores=piece.prompt_scores)
                    at_hand = piece.prompt_scores is None and shape.has_texts(piece.likely)
                    yield event([chunk() if at_hand else await to_thread.run_sync(chunk)])
                    begun[index] = sent + len(text)
            if with_usage:
                yield event([], usage=self.usage)
            yield b"data: [DONE]\n\n"
        except (PenstockError, Gone) as error:  # the status is sent already
            yield b"data: " + json.dumps(error_body(str(error), "server_error")).encode() + b"\n\n"

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece | Generation | None]]:
        """(answer, what has become certain), then (answer, the whole of it); (-1, None) where nothing came for
        long."""
        while len(self.whole) < len(self._numbers):
            try:
                index, told = await self._wait_for(self._told.get(), ALIVE_S)
            except TimeoutError:
                yield -1, None
                continue
            if isinstance(told, Piece):
                self._said += 1
                yield index, told
            elif isinstance(told, Ended):
                self.whole[index] = told.answer
                yield index, told.answer
            elif isinstance(told, Failed):
                raise told.error
            elif isinstance(told, Cancelled):
                raise Gone("the server is ending")

    def _teller(self, index: int) -> Callable[[Told], None]:
        return lambda told: self._post.put(self._told, (index, told))
