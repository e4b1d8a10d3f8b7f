"""Several answers to one prompt: what is predicted for them is what the scheduler does, pass by pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.graph.arenas import with_arenas
from penstock.planner.predict import predict, with_prompts
from penstock.serve.foretold import first_passes
from penstock.serve.pages import Ids
from penstock.serve.scheduler import Scheduler, all_rows
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from tests.plans import make_plan, resident_plan
from tests.pure.machine import MACHINE, model

SPEC, WEIGHTS = model(layers=2), parse_format("float32")


def plan(seqs: int, batches: int, chunk: int, on_disk: bool = False) -> Plan:
    sizes = {"batch_seqs": seqs, "batches_per_pass": batches, "chunk_rows": chunk, "logits_rows": seqs, "context": 256}
    made = resident_plan(SPEC, WEIGHTS, **sizes)
    if on_disk:
        made = make_plan(SPEC, WEIGHTS, list(made.units), ring_bytes={}, kv_spilled=frozenset({0}), **sizes)  # type: ignore[arg-type]
    return with_arenas(replace(made, page_tokens=64))


def taken(made: Plan, answers: int, tokens: int, output: int) -> list[passes.Pass]:
    """The scheduler's passes for so many answers to one prompt."""
    prompt = np.arange(tokens, dtype=np.int32)

    def ids(_: int, start: int, count: int) -> Ids:
        return np.concatenate([prompt, np.full(max(0, start + count - tokens), 7, np.int32)])[start : start + count]

    scheduler = Scheduler(made, all_rows(made), answers, ids, mixed="prefill")
    for i in range(answers):
        scheduler.submit(i, prompt, 0, 0.0, most=output)
    found, said = [], dict.fromkeys(range(answers), 0)
    while (step := scheduler.next(0.0)) is not None:
        found.append(step.taken)
        for rows in step.rows:
            for each in rows:
                said[each.request] += each.says
        scheduler.end([i for i, tokens in said.items() if tokens == output])
    assert set(said.values()) == {output}
    return found


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([8, 16, 64]), st.integers(1, 256), st.booleans())
def test_the_passes_of_the_prompt_are_those_that_run(
    seqs: int, batches: int, chunk: int, tokens: int, on_disk: bool
) -> None:
    made, answers = plan(seqs, batches, chunk, on_disk), seqs * batches
    predicted = first_passes(made, np.arange(tokens, dtype=np.int32), answers, 8)
    found = taken(made, answers, tokens, min(8, 257 - tokens))
    assert predicted == found[: len(predicted)]
    assert not any(p.purpose == "prefill" for p in found[len(predicted) :])
    whole = (tokens - 1) // 64 * 64
    read = sum(batch.total_rows for p in predicted for batch in p.batches)
    if whole:  # read once
        assert read <= whole + answers * (tokens - whole + len(predicted))


def test_no_pass_is_expected_after_the_last_one() -> None:
    """So that nothing is loaded for it. In front of each other pass that one is told which comes."""
    for answers, tokens in ((1, 10), (1, 100), (4, 10), (4, 100), (6, 100)):  # six: two wait for a place
        found = taken(plan(4, 1, 16), answers, tokens, output=3)
        assert found[-1].then is None
        assert all(p.then == after.stream for p, after in pairwise(found)), (answers, tokens)


def test_a_shared_prompt_is_predicted_to_take_the_time_of_one() -> None:
    made = plan(8, 1, 64)
    ask = Ask(batch=8, prompt_tokens=200, output_tokens=8, context=256)
    apart, alone = predict(made, ask, MACHINE), predict(made, replace(ask, batch=1), MACHINE)
    shared = with_prompts(apart, first_passes(made, np.arange(200, dtype=np.int32), 8, 8), made, MACHINE)
    assert alone.ttft_s < shared.ttft_s < 1.5 * alone.ttft_s < apart.ttft_s / 3
    assert shared.decode_tokens_per_s == apart.decode_tokens_per_s
    assert shared.total_s == pytest.approx(apart.total_s - apart.ttft_s + shared.ttft_s)
    same = with_prompts(apart, list(passes.prompts(made, range(8), [200] * 8, passes.DECODE)), made, MACHINE)
    assert same == replace(apart, total_s=same.total_s) and same.total_s == pytest.approx(apart.total_s)
