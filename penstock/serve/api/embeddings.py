"""Embeddings of texts for clients of all dialects: what clients may ask, how a few are computed at a time, and how they
are written."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.serve.answering import checked_ids
from penstock.serve.api.answers import Answers
from penstock.serve.api.desk import Desk, Ids, unless_gone
from penstock.serve.api.guard import OWNER, SPEND
from penstock.serve.generation import Generation
from penstock.serve.pooling import NOT_MADE, Pooling, chosen_pooling, require_dimensions, unit
from penstock.serve.scheduler import QueueFull

MAX_INPUTS = 2048  # OpenAI's limit
# Of all vectors of a request together: 16 MiB as they are kept, 50 MB of text, which is made piece by piece.
MAX_NUMBERS = 1 << 22
_AT_ONCE = 16  # texts that wait or are read at once, as of a request for answers

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class AskedVectors:
    """What a client asks for.

    inputs   texts, or token ids
    pooling  None for the model's own
    cuts     a text that is longer than the context loses its end. Without `cuts` it is refused
    context  tokens that the client wants room for
    """

    model: str | None
    inputs: Sequence[str | list[int]]
    pooling: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    cuts: bool = False
    context: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class Vectors:
    """`note`: a sentence about a model that was not made for embeddings, and about texts that were cut."""

    model: str
    vectors: list[Vector]
    prompt_tokens: int
    note: str | None

    @property
    def about(self) -> dict[str, str]:
        """The fields of an object that tell of the model."""
        return {"model": self.model} | ({"note": self.note} if self.note else {})


async def embedded(desk: Desk, request: Request, asked: AskedVectors) -> Vectors:
    """The vectors of all inputs. A few inputs at a time are computed, beside other requests. Raises BadRequest for
    inputs that are no ids of this model or do not fit the context, and for more numbers than a request may have; Gone;
    and as `Service.submit`."""
    hold = await desk.hold(request, asked.model)
    try:
        engine = hold.loaded.service.engine
        plan, tokenizer = engine.plan, engine.tokenizer
        if asked.context is not None and asked.context > plan.context:
            raise BadRequest(f"a context of {asked.context} is more than the server's {plan.context}")
        width = require_dimensions(asked.dimensions, plan.target.spec.d_embed)
        if not 0 < len(asked.inputs) <= MAX_INPUTS or len(asked.inputs) * width > MAX_NUMBERS:
            most = min(MAX_INPUTS, MAX_NUMBERS // width)
            raise BadRequest(f"a request may have 1 to {most} inputs for this model, not {len(asked.inputs)}")

        cut: list[int] = []  # lengths in tokens of the texts that were cut

        async def encoded() -> list[Ids]:
            prompts: list[Ids] = []
            for given in asked.inputs:
                ids = await desk.ids(given, tokenizer)
                if asked.cuts and len(ids) > plan.context:
                    cut.append(len(ids))
                    ids = ids[: plan.context]
                prompts.append(checked_ids(ids, plan))
            return prompts

        prompts = await unless_gone(request, encoded())
        pooling = chosen_pooling(asked.pooling, engine.pooling)
        answers = Answers(hold.loaded.service, 1, request.scope.get(OWNER, ""), desk.post())
        try:
            vectors = await unless_gone(request, _gathered(answers, prompts, pooling, asked))
        finally:
            answers.cancel()
            if SPEND in request.scope:
                request.scope[SPEND](answers.tokens)
        notes = [NOT_MADE] if engine.pooling is None else []
        if cut:
            texts = "1 text was" if len(cut) == 1 else f"{len(cut)} texts were"
            notes.append(f"{texts} cut to the context of {plan.context} tokens, of up to {max(cut)}")
        return Vectors(hold.loaded.name, vectors, sum(map(len, prompts)), "; ".join(notes) or None)
    finally:
        hold.end()


async def _gathered(answers: Answers, prompts: Sequence[Ids], pooling: Pooling, asked: AskedVectors) -> list[Vector]:
    """The vectors in the order of the prompts. Where the queue is full of others, those that are under way go on."""
    vectors: dict[int, Vector] = {}
    begun = 0

    def begin() -> int:
        """Submits as many prompts as may be under way. Raises QueueFull if none is under way then."""
        number = begun
        while number < len(prompts) and number - len(vectors) < _AT_ONCE:
            try:
                answers.submit(prompts[number], pooling, asked.priority)
            except QueueFull:
                if number == len(vectors):
                    raise
                break
            number += 1
        return number

    begun = begin()
    async for index, piece in answers.pieces():
        if isinstance(piece, Generation):
            assert piece.embedding is not None
            whole, count = piece.embedding, asked.dimensions
            vectors[index] = unit(whole, count) if asked.normalize else whole[:count]
            begun = begin()
    return [vectors[i] for i in range(len(prompts))]


def numbers(vector: Vector) -> str:
    """A vector as JSON. Nine digits tell a float32 from all others."""
    return "[" + ",".join(map("{:.9g}".format, vector.tolist())) + "]"


def as_base64(vector: Vector) -> str:
    """A vector as OpenAI's clients ask for it: little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def openai_body(answer: Vectors, encoded: bool) -> dict[str, Any]:
    """The whole object of /v1/embeddings. For servers that have many vectors `openai_response` takes less memory."""
    data = [
        {"object": "embedding", "index": i, "embedding": as_base64(each) if encoded else json.loads(numbers(each))}
        for i, each in enumerate(answer.vectors)
    ]
    return {"object": "list", "data": data, **answer.about, "usage": _usage(answer)}


def openai_response(answer: Vectors, encoded: bool) -> Response:
    """As `openai_body`, vector by vector."""

    def pieces() -> Iterator[str]:
        yield '{"object": "list", "data": ['
        for i, each in enumerate(answer.vectors):
            written = f'"{as_base64(each)}"' if encoded else numbers(each)
            yield f'{", " if i else ""}{{"object": "embedding", "index": {i}, "embedding": {written}}}'
        yield "], " + json.dumps({**answer.about, "usage": _usage(answer)})[1:]

    return StreamingResponse(pieces(), media_type="application/json")


def _usage(answer: Vectors) -> dict[str, int]:
    return {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
