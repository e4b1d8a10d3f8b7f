"""Prompts in hundreds of chunks: a few of them tell the time of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner import predict as predicting
from penstock.planner.predict import predict
from penstock.planner.solve import settle_context, solve
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.units import MIB
from tests.pure.machine import LLAMA_1B, MACHINE


@pytest.mark.parametrize("limit_mib", [350, 700, 3000])
@pytest.mark.parametrize(("prompt", "batch"), [(700, 1), (330, 4)])
def test_sampled_chunks_tell_the_sum(limit_mib: int, prompt: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Ask(prompt_tokens=prompt, batch=batch, context=1024, host_memory_bytes=limit_mib * MIB, kv="int4")
    ask = settle_context(ask, LLAMA_1B)
    plan = replace(solve(ask, LLAMA_1B, parse_format("int4"), MACHINE).plan, chunk_rows=16)
    found = predict(plan, ask, MACHINE, spread=False)
    monkeypatch.setattr(predicting, "_SAMPLED_PASSES", 10**6)
    assert found.ttft_s == pytest.approx(predict(plan, ask, MACHINE, spread=False).ttft_s, rel=0.02)


def test_every_pass_is_counted_once() -> None:
    for count in range(1, 80):
        wanted = list(predicting._sampled(list(range(count))))  # type: ignore[arg-type]
        assert sum(n for _, n in wanted) == count and len(wanted) <= 4 + 16
        assert [p for p, _ in wanted] == sorted({p for p, _ in wanted})  # type: ignore[type-var]
