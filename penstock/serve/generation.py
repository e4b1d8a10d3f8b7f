"""Holds an answer with its times and bytes, and reports it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.planner.predict import Prediction
from penstock.serve.log_probabilities import Likely
from penstock.serve.scores import Scores


class Used(NamedTuple):
    """Tokens of prompts and of answers to them. `cached`: those tokens of the prompts that an earlier prompt had been
    read with. `wait_s`: seconds until the first of the answers had a sequence."""

    prompt: int
    output: int
    cached: int
    wait_s: float


@dataclass
class Generation:
    """An answer to a prompt. Byte counts are of the whole batch that it ran in.

    `finish_reason`: stop (end of text or a stop string) or length. `context_full`: the answer ends because the context
    is full, before the length that was asked for. `wait_s`: seconds from the request until it had a sequence; above 0
    where other requests were before it. `ttft_s`: seconds from the request to its first token. `read_ahead`: its
    prompt was begun before the request, while the weights were loaded. `inter_token_s`: seconds between its tokens."""

    prompt_tokens: int
    batch: int
    context: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompt, whose keys and values were there from an earlier one
    logprobs: list[Likely] = field(default_factory=list)  # of each token, where they were asked for
    prompt_scores: Scores | None = None  # where they were asked for
    embedding: NDArray[np.float32] | None = None  # [D], where one was asked for in place of a text
    finish_reason: str = ""
    stopped_by: str | None = None  # the stop string, where one ended it
    context_full: bool = False
    wait_s: float = 0.0
    ttft_s: float = 0.0
    read_ahead: bool = False
    batch_ttft_s: float = 0.0  # until every sequence of the batch had its first token
    inter_token_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0  # of all decode passes
    decode_tokens: int = 0  # of the whole batch, in `decode_s`
    decode_steps: int = 0  # passes, in `decode_s`
    decode_disk_bytes: int = 0  # that these passes took from slower tiers
    bytes_moved: dict[str, int] = field(default_factory=dict)  # by lane
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the whole batch; 0 where each answer has a single token."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def disk_bytes_per_token(self) -> float:
        return self.decode_disk_bytes / self.decode_tokens if self.decode_tokens else 0.0

    def answer(self) -> dict[str, Any]:
        """The JSON fields of the answer itself: its text, its length, and why it ends there. `cached_tokens`: tokens of
        the prompt that had been read for an earlier answer."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "context_full": self.context_full,
        }

    def report(self, prediction: Prediction, share_of_bound: float | None = None) -> dict[str, Any]:
        """The fields of `run --json`: the answer, and the times and bytes of it and its batch. `share_of_bound`: how
        much of the speed that disk and RAM allowed in this run's own minute was reached (`serve.run_bound`); None where
        it is not known."""
        return {
            **self.answer(),
            "ttft_s": self.batch_ttft_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "predicted": {
                "ttft_s": prediction.ttft_s,
                "decode_tokens_per_s": prediction.decode_tokens_per_s,
            },
            "bytes_moved": self.bytes_moved,
            "disk_bytes_per_token": self.disk_bytes_per_token,
            "inter_token_s": percentiles(self.inter_token_s),
            "batch": self.batch,
            "context": self.context,
            "bound_by": prediction.bound_by,
            "share_of_bound": share_of_bound,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
        }


def report_all(answers: Sequence[Generation], prediction: Prediction, share_of_bound: float | None) -> dict[str, Any]:
    """`run --json` of prompts that were answered together: the first one's fields, and all of them in `answers`."""
    return {**answers[0].report(prediction, share_of_bound), "answers": [answer.answer() for answer in answers]}


def percentiles(gaps: list[float]) -> dict[str, float]:
    """p50, p95 and p99 of the seconds between tokens; 0 where there are none."""
    ordered = sorted(gaps)
    return {f"p{p}": ordered[min(len(gaps) - 1, len(gaps) * p // 100)] if gaps else 0.0 for p in (50, 95, 99)}


def used(prompt_tokens: int, answers: Sequence[Generation], n: int) -> Used:
    """The tokens of whole answers, of which each prompt has `n`, one after the other. A prompt counts once. `cached` is
    what its first answer found."""
    said = sum(answer.output_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[::n])
    return Used(prompt_tokens, said, cached, min((answer.wait_s for answer in answers), default=0.0))
