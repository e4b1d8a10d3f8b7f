"""A turn of ours in bench.experts: it reads the tokens that the peer reads, and none that is counted comes right after
the seconds in which ceilings are read."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bench.ceilings import Reading
from bench.experts_rounds import AFTER_PAUSE, STEADY_TOKENS, Tokens, budget, resident

FACTS = {
    "expert_bytes": 4096, "active": 2, "dense_bytes": 100, "routed_layers": 3, "predicted_cold_s": 0.0,
    "planned_host_bytes": 1,
}  # fmt: skip
ANSWER = {
    "seconds": 1.0, "missed": 0, "by_misses": [3], "disk_bytes": 0, "exact": True, "wrong_guesses": 0, "hit_rate": 1.0,
    "peak_host_bytes": 1,
}  # fmt: skip


class _Engines:
    """Notes what the worker is asked, and when ceilings are read."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def limit(self, gb: str) -> int:
        return 1

    def ours(self, *_: object) -> Any:
        def ask(command: str, count: int) -> dict[str, Any]:
            self.said.append((command, count))
            return {"tokens_per_s": 1.0, "today_tokens_per_s": 1.0, **ANSWER}

        return nullcontext((SimpleNamespace(facts=FACTS, ask=ask), None))

    def ceilings(self, *_: object) -> Any:
        def read() -> Reading:
            if self.said[-1] != ("ceilings", 0):
                self.said.append(("ceilings", 0))
            return Reading(1e10, 1e9, 1, 1)

        return SimpleNamespace(read=read, close=lambda: None)


@pytest.mark.parametrize(("warm", "between"), [(64, AFTER_PAUSE), (20, 4), (16, 0)])
def test_within_a_budget(warm: int, between: int) -> None:
    engines: Any = _Engines()
    budget(engines, "4.9", "uniform", Tokens(warm, 5), False).turns["ours"]()
    first = engines.said.index(("ceilings", 0))
    counts = [count for _, count in engines.said]
    assert sum(counts[:first]) + between == warm  # as many as the peer reads
    assert counts[first + 1 : first + 2 + bool(between)] == [*([between] if between else []), 5]
    assert sum(counts) == warm + 5 + STEADY_TOKENS + 5


def test_in_memory() -> None:
    engines: Any = _Engines()
    resident(engines).turns["ours"]()
    assert engines.said == [
        ("follow", 16 - AFTER_PAUSE), ("ceilings", 0), ("follow", AFTER_PAUSE), ("follow", 32), ("ceilings", 0),
        ("prefill", 512),
    ]  # fmt: skip
