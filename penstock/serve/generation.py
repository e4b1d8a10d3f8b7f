"""A finished answer and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.planner.predict import Prediction


@dataclass
class Generation:
    """`finish_reason`: stop (end of text or a stop string) or length. `context_full`: the length was the context's, not
    the one asked for. `ttft_s`: from the request to its first token. `inter_token_s`: seconds between its tokens. Byte
    counts are of the whole batch it ran in."""

    prompt_tokens: int
    batch: int
    context: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    context_full: bool = False
    ttft_s: float = 0.0
    batch_ttft_s: float = 0.0  # of the last sequence of its batch to get one
    inter_token_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0
    decode_tokens: int = 0  # of the whole batch, in `decode_s`
    decode_steps: int = 0  # passes, in `decode_s`
    decode_disk_bytes: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the batch; 0 where a single token came."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def disk_bytes_per_token(self) -> float:
        return self.decode_disk_bytes / self.decode_tokens if self.decode_tokens else 0.0

    def answer(self) -> dict[str, Any]:
        """What was answered, and why it ends there."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "context_full": self.context_full,
        }

    def report(self, prediction: Prediction, share_of_bound: float | None = None) -> dict[str, Any]:
        """The fields of `run --json`: the answer, and what it and its batch took. `share_of_bound`: of what disk and
        RAM allowed in this run's own minute (`serve.run_bound`); None where nobody measured that."""
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
    """`run --json` of prompts that were answered together: the first one's fields, and `answers` with every one."""
    return {**answers[0].report(prediction, share_of_bound), "answers": [each.answer() for each in answers]}


def percentiles(gaps: list[float]) -> dict[str, float]:
    """p50, p95 and p99 of seconds between tokens; 0 where there are none."""
    ordered = sorted(gaps)
    return {f"p{p}": ordered[min(len(gaps) - 1, len(gaps) * p // 100)] if gaps else 0.0 for p in (50, 95, 99)}
