"""Draws requests that meet each other in one service: beginnings shared to a page and a token beside it, every choice
of how tokens are taken, and when each comes and goes."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.serve.pooling import Pooling
from penstock.serve.sampling import SamplingParams
from tests.at_size.draws import VOCABULARY

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 9},
    {"enum": ["one", "two", "three"]},
)


@dataclass(frozen=True)
class Request:
    """`comes`: at so many passes after the first. `leaves`: it is cancelled when it has so many tokens, or with
    `leaves_at_pass` when so many passes have run since it came. `owner`: whose pages it may share."""

    ids: tuple[int, ...]
    params: SamplingParams | Pooling
    comes: int
    leaves: int | None
    leaves_at_pass: int | None
    priority: int
    owner: str

    @property
    def cancelled(self) -> bool:
        return self.leaves is not None or self.leaves_at_pass is not None


def requests(rng: random.Random, count: int, context: int, page: int, guided: bool) -> list[Request]:
    """Some requests of a round. `page`: tokens that share a page. `guided`: some answers follow a schema."""
    drawn: list[Request] = []
    for _ in range(count):
        ids = _prompt(rng, [each.ids for each in drawn], context, page)
        owner, priority, comes = (
            rng.choice(("", "", "", "other")),
            rng.choice((0, 0, 0, 1, -1)),
            rng.choice((0, 0, rng.randrange(24))),
        )
        if rng.random() < 0.06:
            drawn.append(Request(ids, Pooling(rng.choice(("last", "mean"))), comes, None, None, priority, owner))
            continue
        params = _params(rng, context - len(ids) + 1, guided)
        leaves = rng.randint(1, 9) if rng.random() < 0.1 else None
        leaves_at = rng.randint(0, 6) if leaves is None and rng.random() < 0.1 else None
        drawn += [Request(ids, params.nth(i), comes, leaves, leaves_at, priority, owner) for i in range(params.n)]
    return drawn


def _prompt(rng: random.Random, before: Sequence[tuple[int, ...]], context: int, page: int) -> tuple[int, ...]:
    """A prompt that may begin as an earlier one does: as all of it, or up to a page and at most a token beside."""
    pages = max(1, context // page)
    near = max(1, min(context, rng.randint(1, pages) * page + rng.randint(-1, 1)))
    length = rng.choice((near, near, rng.randint(1, min(40, context)), rng.randint(1, context)))
    begins: tuple[int, ...] = ()
    if before and rng.random() < 0.7:
        whole = rng.choice(before)
        if rng.random() < 0.2:
            return whole
        edge = rng.randint(0, len(whole) // page) * page + rng.randint(-1, 1)
        begins = whole[: max(0, rng.choice((edge, rng.randint(0, len(whole)))))][:length]
    return (*begins, *(rng.randrange(VOCABULARY) for _ in range(length - len(begins))))


def _params(rng: random.Random, room: int, guided: bool) -> SamplingParams:
    """How an answer is chosen, with a context that has `room` for so many tokens of it."""
    scored = rng.random() < 0.15
    most = rng.choice((1, 2, rng.randint(1, 12), rng.randint(1, 90), room, room + 1, max(1, room - 1)))
    given: dict[str, Any] = {"max_tokens": 0 if scored and rng.random() < 0.4 else min(most, 120)}
    if scored:
        given["prompt_logprobs"] = rng.choice((0, 1, 3))
    if rng.random() < 0.4:
        given["logprobs"] = rng.choice((0, 1, 5))
    if rng.random() < 0.5:
        given |= {"temperature": rng.choice((0.3, 1.0, 4.0)), "seed": rng.randrange(1000)}
        given |= rng.choice(({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05, "top_p": 0.9}))
    if rng.random() < 0.3:
        given["stop"] = rng.sample(string.ascii_letters + " .,", rng.randint(1, 4))
    if rng.random() < 0.2:
        given["logit_bias"] = {rng.randrange(258): rng.choice((-100, 3, 7)) for _ in range(rng.randint(1, 6))}
    if rng.random() < 0.3:
        given |= rng.choice(({"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.8}))
    if guided and rng.random() < 0.15:
        given["json_schema"] = rng.choice(SCHEMAS)
    else:
        given["ignore_eos"] = rng.random() < 0.7
    return SamplingParams(n=rng.choice((1, 1, 1, 2, 3)), **given)
