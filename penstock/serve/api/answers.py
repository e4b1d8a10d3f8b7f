"""One request's answers on their way from the service's thread to a client: gathered, or piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.serve.generation import Generation, Used, used
from penstock.serve.pooling import Pooling
from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from penstock.serve.told import AnswerPiece, Cancelled, Ended, Failed, Told

ALIVE_S = 10.0  # a comment goes to a client that has heard nothing for so long: proxies close silent connections


class Gone(Exception):
    """The request was cancelled: the server is ending."""


class Post:
    """Brings what other threads tell to queues of an event loop.

    The loop is woken once for everything that is put before it wakes. When each token of 32 streams woke it, the
    service's thread gave the interpreter up at each token, and waited up to 5 ms until it had it back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self._wakes = False  # whether the loop was woken and has not run yet

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in this post's loop."""
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
    `owner`: who asks. `post`: of the running loop. `wait_for(awaitable, seconds)`: raises TimeoutError if nothing comes
    for so long.

    Whoever makes an `Answers` must call `cancel` in the end, whatever happened."""

    def __init__(
        self, service: Service, n: int, owner: str, post: Post,
        wait_for: Callable[..., Awaitable[Any]] = asyncio.wait_for,
    ) -> None:  # fmt: skip
        self._service, self._n, self._owner, self._post, self._wait_for = service, n, owner, post, wait_for
        self._prompt_tokens = 0
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        self._numbers: list[int] = []
        self._said = 0  # tokens so far
        self.whole: dict[int, Generation] = {}

    def submit(
        self, prompt_ids: Sequence[int] | NDArray[np.int32], params: SamplingParams | Pooling, priority: int
    ) -> None:  # fmt: skip
        """Asks for `n` answers to a prompt, int32 [T] or a list. Raises as `Service.submit`. Waits for nothing
        but the service's lock."""
        self._prompt_tokens += len(prompt_ids)
        for i in range(self._n):
            tell = self._teller(len(self._numbers))
            self._numbers.append(self._service.submit(prompt_ids, params.nth(i), tell, priority, self._owner))

    def cancel(self) -> None:
        """Cancels the answers that have not ended."""
        for number in self._numbers:
            self._service.cancel(number)

    async def gathered(self) -> list[Generation]:
        """All answers, once they are whole. Raises the PenstockError of an answer that fails, and Gone."""
        async for _ in self.pieces():
            pass
        return [self.whole[i] for i in range(len(self._numbers))]

    @property
    def tokens(self) -> int:
        """Tokens of the prompts and of the answers so far."""
        return self._prompt_tokens + self._said

    @property
    def used(self) -> Used:
        """The tokens that were used, once all answers are whole."""
        return used(self._prompt_tokens, [self.whole[i] for i in range(len(self._numbers))], self._n)

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece | Generation | None]]:
        """Yields (answer, text that has become certain), at its end (answer, the whole of it), and (-1, None) whenever
        nothing came for long. Raises the PenstockError of an answer that fails, and Gone."""
        while len(self.whole) < len(self._numbers):
            try:
                index, told = await self._wait_for(self._told.get(), ALIVE_S)
            except TimeoutError:
                yield -1, None
                continue
            if isinstance(told, AnswerPiece):
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
