"""What a long context costs, and how long one may be before it costs anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.errors import BadRequest, DoesNotFit
from penstock.planner.room import cost_of_context, grown
from penstock.planner.solve import Solved, solve
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.units import GIB, MIB

FILE = Path(penstock.__file__).parent / "machines/pc-16gb-sata.json"
MACHINE = machines.loads(FILE.read_text(), "machine")
SPEC, WEIGHTS = describe(Path("llama-3.2-1b"), parse_format("int4"), to_plan=True)  # 0.66 GiB, 32 KiB of KV a token
SMALL = replace(SPEC, max_positions=40_000)


def solving(ask: Ask) -> Solved:
    return solve(ask, SMALL, WEIGHTS, MACHINE)


def test_it_grows_while_that_costs_nothing() -> None:
    ask, solved, told = grown(Ask(host_memory_bytes=8 * GIB, grow_context=True), SMALL, solving)
    assert ask.context == solved.plan.context == 40_000 and not ask.grow_context
    assert told == "context of 40000 tokens, 1.23 GiB of KV: the model's longest"
    ask, solved, told = grown(Ask(host_memory_bytes=1350 * MIB, grow_context=True), SMALL, solving)
    assert ask.context is not None and 4096 < ask.context < 40_000 and solved.plan.context == ask.context
    assert told.startswith(f"context of {ask.context} tokens, ") and "it would be" in told
    longer = solving(replace(ask, context=ask.context * 5 // 4)).prediction.decode_tokens_per_s
    assert longer < 0.98 * solved.prediction.decode_tokens_per_s
    assert solved.prediction.disk_bytes_per_token < 1e6


def test_a_full_memory_stays_at_the_usual_context() -> None:
    ask, _, told = grown(Ask(host_memory_bytes=500 * MIB, grow_context=True), SMALL, solving)
    assert ask.context is not None and ask.context <= 8192 and "it would be" in told


def test_what_does_not_fit_is_told() -> None:
    def only_short(ask: Ask) -> Solved:
        if ask.context is not None and ask.context > 9000:
            raise DoesNotFit("no", tier="host", need_bytes=1, have_bytes=1, minimum_bytes=1)
        return solving(ask)

    ask, _, told = grown(Ask(grow_context=True), SMALL, only_short)
    assert ask.context == 8192 and told.endswith(": 9216 do not fit")


def test_what_a_named_context_costs() -> None:
    ask = Ask(host_memory_bytes=900 * MIB, context=32_768)
    told = cost_of_context(ask, SMALL, solving(ask), solving)
    assert told is not None and "where 4096 would give" in told and "1.00 GiB of KV" in told
    roomy = replace(ask, host_memory_bytes=8 * GIB)
    assert (cost_of_context(roomy, SMALL, solving(roomy), solving) or "").endswith("costs no speed")
    assert cost_of_context(replace(ask, context=4096), SMALL, solving(ask), solving) is None
    with pytest.raises(BadRequest):
        Ask(context=5, grow_context=True)
