"""The requests of a service that have not ended, and what passes say to them. A request that fails does not end
others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InternalError, PenstockError
from penstock.serve.log_probabilities import ids_of
from penstock.serve.pooling import Pooled
from penstock.serve.reply import Reply
from penstock.serve.steps import Rows
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.told import AnswerPiece, Ended, Failed, Tell, Told


@dataclass
class OpenRequest:
    """A request that has not ended."""

    reply: Reply | Pooled
    tell: Tell
    priority: int
    arrived_s: float
    last_s: float  # when it got its last token, or when it came
    begun: bool = False  # whether it had rows in a pass
    tokens: int = 0  # tokens of its answer that it was told of
    cancelled: bool = False

    def note_token(self) -> None:
        """Notes when a token came."""
        answer, now_s = self.reply.answer, time.perf_counter()
        if len(answer.token_ids) == 1:
            answer.ttft_s = answer.batch_ttft_s = now_s - self.arrived_s
        else:
            answer.inter_token_s.append(now_s - self.last_s)
        self.last_s = now_s


class OpenRequests(dict[int, OpenRequest]):
    """Requests by number. The service's lock guards which are here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def known(self, number: int, start: int, count: int) -> NDArray[np.int32]:
        """The ids of a request's prompt and answer from a position on, int32 [count]."""
        return self[number].reply.rows(start, count)

    def ids(self, rows: Rows) -> NDArray[np.int32]:
        """The ids of some rows, int32 [tokens]."""
        return self.known(rows.request, rows.start, rows.tokens)

    def hear(
        self, rows: Sequence[Rows], logits: NDArray[np.float32], best: Sequence[tuple[float, int]],
        hidden: NDArray[np.float32] | None, ended: dict[int, Told],
    ) -> list[Rows]:  # fmt: skip
        """Gives each request its rows of a batch: `logits` float32 [n, V], the largest logit of each row with its id,
        and `hidden` float32 [T, D]. Returns the rows of the requests that have chosen a token. Requests whose embedding
        is whole, and requests that failed, are put into `ended`."""
        speaking: list[Rows] = []
        end = last = 0
        for r in rows:
            first, end, last = end, end + r.logits, last + r.tokens
            with _failing_alone(r, ended):
                if r.hidden and hidden is not None:
                    self._pool(r, hidden[last - r.hidden : last], ended)
                elif r.logits:
                    self._choose(r, logits[first:end], best[first:end])
                    speaking += [r] if r.says else []
        return speaking

    def _pool(self, r: Rows, hidden: NDArray[np.float32], ended: dict[int, Told]) -> None:
        """Takes the last `r.hidden` rows of a request, float32 [n, D], for its embedding, which may be whole then."""
        request = self[r.request]
        assert isinstance(request.reply, Pooled)
        request.reply.take(r.start + r.tokens - r.hidden, hidden)
        if r.says:
            request.reply.answer.ttft_s = time.perf_counter() - request.arrived_s
            ended[r.request] = Ended(request.reply.answer)

    def _choose(self, r: Rows, logits: NDArray[np.float32], best: Sequence[tuple[float, int]]) -> None:
        """Takes the last `r.logits` rows of a request, logits float32 [n, V], for its answer."""
        reply = self[r.request].reply
        assert isinstance(reply, Reply)
        if r.reads and reply.answer.prompt_scores is not None:
            reply.hear(r.start + r.tokens - r.logits, logits)
        if r.says:
            reply.choose(logits[-1], best[-1])

    def say(self, speaking: Sequence[Rows], ended: dict[int, Told]) -> list[tuple[Tell, Told]]:
        """What the clients of requests are to be told of the tokens that were chosen. Answers that end are put into
        `ended`.

        Texts are asked for together. With a request to the tokenizer's process, and a wake of the clients' loop, for
        each of eight answers a pass took 286 ms instead of 222. Meanwhile a disk of 2.7 GB/s fills a ring of 64 MiB in
        25 ms, and stands still."""
        requests = [self[r.request] for r in speaking]
        replies = [request.reply for request in requests if isinstance(request.reply, Reply)]
        self._tokenizer.advance([reply.text for reply in replies])
        newest = [each for reply in replies for each in reply.answer.logprobs[-1:]]
        self._tokenizer.prefetch_texts(ids_of(newest))
        told: list[tuple[Tell, Told]] = []
        for r, request, reply in zip(speaking, requests, replies, strict=True):
            answer = reply.answer
            with _failing_alone(r, ended):
                piece, tokens = reply.say(), len(answer.token_ids)
                if tokens > request.tokens:
                    request.note_token()
                    scores = None if request.tokens else answer.prompt_scores
                    told.append((request.tell, AnswerPiece(piece, tuple(answer.logprobs[-1:]), scores)))
                elif piece:  # the schema ended the answer
                    told.append((request.tell, AnswerPiece(piece)))
                request.tokens = tokens
                if reply.finished:
                    ended[r.request] = Ended(answer)
        return told


def failure(error: Exception) -> Failed:
    """What the client is told of a request whose answer an error has ended."""
    if isinstance(error, PenstockError):
        return Failed(error)
    return Failed(InternalError(f"{type(error).__name__}: {error}"))


@contextmanager
def _failing_alone(rows: Rows, ended: dict[int, Told]) -> Iterator[None]:
    """An error in this block ends the answer of these rows, and no other."""
    try:
        yield
    except Exception as error:
        ended[rows.request] = failure(error)
