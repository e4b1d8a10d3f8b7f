"""One request's answers on their way from the service's thread to a client: gathered, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio import to_thread

from penstock.errors import PenstockError
from penstock.serve.api import logprobs
from penstock.serve.api.guard import error_body
from penstock.serve.generation import Generation
from penstock.serve.sampling import Likely, SamplingParams, ids_of
from penstock.serve.scores import Scores
from penstock.serve.service import Service
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.told import Cancelled, Ended, Failed, Piece, Told

ALIVE_S = 10.0  # a comment goes to a client that has heard nothing for so long: proxies close silent connections


class Gone(Exception):
    """The request was cancelled: the server is ending."""


@dataclass(frozen=True)
class Shape:
    """How answers are written. `kind`: chat.completion or text_completion. `head`: the fields of every object.
    `tokenizer`: for the texts of single tokens, where log probabilities are wanted. `echoed`: of each answer the prompt
    that is written before it; () where none is."""

    kind: str
    head: dict[str, Any]
    tokenizer: Tokenizer
    echoed: tuple[str, ...] = ()

    @property
    def chats(self) -> bool:
        return self.kind == "chat.completion"

    def has_texts(self, tokens: Sequence[Likely]) -> bool:
        """Whether the texts of these tokens are at hand."""
        return not tokens or self.tokenizer.has_texts(ids_of(tokens))

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """A whole answer. Where log probabilities were asked for it takes 70 µs for each token in them."""
        prompt = self.echo(index)
        said = (
            {"message": {"role": "assistant", "content": answer.text}} if self.chats else {"text": prompt + answer.text}
        )
        about = self._logprobs(answer.logprobs, 0, answer.prompt_scores, prompt)
        return {"index": index, **said, "logprobs": about, "finish_reason": answer.finish_reason}

    def echo(self, index: int) -> str:
        """The prompt that is written before an answer."""
        return self.echoed[index] if self.echoed else ""

    def chunk(
        self, index: int, text: str, tokens: Sequence[Likely] = (), offset: int = 0, *,
        finish_reason: str | None = None, first: bool = False, prompt_scores: Scores | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A piece of an answer. `tokens`: that it is made of, where log probabilities were asked for. `offset`:
        characters before it. `prompt_scores`: the prompt is a part of it."""
        if self.chats:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            said: dict[str, Any] = {"delta": {**delta, "content": text} if text or first else delta}
        else:
            said = {"text": text}
        about = self._logprobs(tokens, offset, prompt_scores, self.echo(index))
        return {"index": index, **said, "logprobs": about, "finish_reason": finish_reason}

    def _logprobs(
        self, tokens: Sequence[Likely], offset: int, prompt_scores: Scores | None, prompt: str
    ) -> dict[str, Any] | None:
        if not tokens and prompt_scores is None:
            return None
        if self.chats:
            return logprobs.of_chat(self.tokenizer, tokens)
        if prompt_scores is None:
            return logprobs.of_text(self.tokenizer, tokens, offset)
        return logprobs.of_echo(self.tokenizer, prompt_scores, prompt, tokens)


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
        """Tokens, when all answers are whole. A prompt counts once, however many answers it has, and what was there of
        it already is what its first answer found."""
        said = sum(answer.output_tokens for answer in self.whole.values())
        cached = sum(self.whole[i].cached_tokens for i in range(0, len(self._numbers), self._n))
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": said,
            "total_tokens": self._prompt_tokens + said,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

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


def head_of(prefix: str, number: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{number}", "created": int(time.time()), "model": model}
