"""What the user wants. None means "choose for me"; a Plan has no None left."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BadRequest

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Ask:
    """Limits are bytes of the whole process (`host_memory_bytes`) and of the device.

    `resident_bytes`: at most so many bytes of weights stay in memory. `context`: KV room in tokens, per
    sequence. `score`: logits of every prompt row are wanted (evaluation), not of the last alone.
    """

    prompt_tokens: int = 64
    output_tokens: int = 64
    batch: int = 1
    context: int | None = None
    objective: str = "latency"
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    resident_bytes: int | None = None
    kv: str | None = None
    score: bool = False

    def __post_init__(self) -> None:
        if self.objective not in ("latency", "throughput"):
            raise BadRequest(f"objective {self.objective!r} should be latency or throughput")
        for name in ("prompt_tokens", "output_tokens", "batch"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; it should be at least 1")
        if self.context is not None and self.context < 1:
            raise BadRequest(f"context is {self.context}; it should be at least 1 token")
