"""The residency solver: fits to the byte, uses what it may, refuses with the minimum that then works."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph.arenas import Layout
from penstock.planner.shorten import staying
from penstock.planner.solve import settle_context, solve
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import parts
from tests.pure.machine import LLAMA_1B, MACHINE, model

MIB = 1 << 20
BF16 = Format("bfloat16")


def test_everything_stays_where_it_fits() -> None:
    solved = solve(Ask(), LLAMA_1B, BF16, MACHINE)
    assert {u.home for u in solved.plan.units} == {"host"}
    assert solved.prediction.disk_bytes_per_token == 0


@pytest.mark.parametrize("limit_mib", [300, 700, 1500, 2000])
def test_a_limit_is_used_and_kept(limit_mib: int) -> None:
    ask = Ask(host_memory_bytes=limit_mib * MIB)
    solved = solve(ask, LLAMA_1B, BF16, MACHINE)
    used = solved.plan.tier_bytes()["host"]
    assert 0.95 * limit_mib * MIB <= used <= limit_mib * MIB
    assert solved.plan.ring_bytes["host"] <= 256 * MIB
    there = staying(solved.plan, settle_context(ask, LLAMA_1B))  # in KV pages that 96 tokens do not reach
    away = (unit for u, unit in enumerate(solved.plan.units) if unit.home == "disk0" and u not in there)
    streamed = sum(map(solved.plan.unit_bytes, away))
    gathered = 0 if Layout(solved.plan).gathers else solved.plan.parts["embed"].granule_bytes
    assert solved.prediction.disk_bytes_per_token == streamed + gathered


@given(
    st.integers(1, 3), st.sampled_from([64, 128, 192]), st.sampled_from([64, 200, 1000]), st.booleans(),
    st.sampled_from(["float32", "bfloat16", "int8", "int4", "int4-g32"]), st.integers(1, 4), st.integers(64, 600),
    st.booleans(), st.none() | st.integers(1, 2000),
)  # fmt: skip
def test_the_minimum_is_exact(
    layers: int, d: int, neurons: int, tied: bool, weights: str, batch: int, context: int, score: bool,
    kv_tokens: int | None,
) -> None:  # fmt: skip
    spec = model(layers, d, 4, 2, neurons, vocab=1000, tied=tied)
    ask = {"batch": batch, "context": context, "prompt_tokens": 8, "output_tokens": 8, "score": score}
    ask["kv_tokens"] = kv_tokens
    fmt = parse_format(weights)
    with pytest.raises(DoesNotFit) as refused:
        solve(Ask(host_memory_bytes=1, **ask), spec, fmt, MACHINE)
    minimum = refused.value.numbers["minimum_bytes"]
    with pytest.raises(DoesNotFit) as again:
        solve(Ask(host_memory_bytes=minimum - 1, **ask), spec, fmt, MACHINE)
    assert again.value.numbers["minimum_bytes"] == minimum
    solved = solve(Ask(host_memory_bytes=minimum, **ask), spec, fmt, MACHINE)
    assert solved.plan.tier_bytes()["host"] <= minimum


def test_a_longer_context_is_no_faster() -> None:
    """All KV of 32,768 tokens has room in RAM, and of 49,152 it has none. The ask reaches few of them, so weights in
    the place of KV save reading; KV on the disk is tried where it has room, too."""
    spec = model(28, 3072, 24, 8, 8192, vocab=128256, max_positions=131072, dtype="bfloat16")
    ask = Ask(prompt_tokens=200, output_tokens=64, host_memory_bytes=4_300_000_000)
    few, many = (solve(replace(ask, context=n), spec, parse_format("int4"), MACHINE) for n in (32768, 49152))
    assert {home.home for home in many.plan.kv} != {"host"}
    assert few.prediction.total_s <= 1.02 * many.prediction.total_s


def test_room_for_fewer_tokens_leaves_more_weights_in_memory() -> None:
    ask = {"batch": 8, "context": 4096, "prompt_tokens": 128, "output_tokens": 64, "host_memory_bytes": 1500 * MIB}
    whole, shared = (solve(Ask(**ask, kv_tokens=n), LLAMA_1B, BF16, MACHINE) for n in (None, 8 * 192))
    assert whole.plan.kv_pages == 0
    assert shared.plan.kv_pages == 16  # eight of one page would be less than a whole context
    resident = [sum(s.plan.unit_bytes(u) for u in s.plan.units if u.home == "host") for s in (whole, shared)]
    pools = [sum(a.bytes for a in s.plan.arenas if a.name == "host.kv") for s in (whole, shared)]
    assert resident[1] > resident[0] and pools[0] == 8 * pools[1]
    assert shared.prediction.decode_tokens_per_s > whole.prediction.decode_tokens_per_s
    assert any("handed out as they grow" in reason for reason in shared.reasons)
    assert plans.loads(plans.dumps(shared.plan), "plan") == shared.plan


def test_pools_are_no_larger_than_all_contexts_and_hold_one_at_least() -> None:
    ask = {"batch": 3, "context": 200, "prompt_tokens": 8, "output_tokens": 8}
    pages = [solve(Ask(**ask, kv_tokens=n), model(), BF16, MACHINE).plan.kv_pages for n in (1, 400, 600, 10**6)]
    assert pages == [4, 9, 0, 0]  # 0: every sequence has its four


def test_as_many_answers_at_once_as_have_pages() -> None:
    ask = Ask(batch=8, context=1024, prompt_tokens=256, output_tokens=256, kv_tokens=1)
    plan = solve(ask, model(), BF16, MACHINE).plan
    assert plan.kv_pages == 8 and plan.at_once(8, 512) == 4 and plan.at_once(8, 5000) == 2 and plan.at_once(1, 1) == 1


def test_a_plan_file_without_pages_still_loads() -> None:
    plan = solve(Ask(), model(), BF16, MACHINE).plan
    old = json.loads(plans.dumps(plan))
    del old["kv_pages"]
    assert plans.loads(json.dumps(old), "old") == plan


@given(st.integers(0, 3_000_000))
def test_resident_is_a_cap(resident_bytes: int) -> None:
    spec = model(3, 128, 4, 2, 500, vocab=1000)
    solved = solve(Ask(resident_bytes=resident_bytes), spec, BF16, MACHINE)
    pinned = sum(p.nbytes for p in parts(spec, BF16) if p.kind in ("norms", "edges"))
    stays = sum(solved.plan.unit_bytes(u) for u in solved.plan.units if u.home == "host")
    assert stays <= max(resident_bytes, pinned)


def test_units_cover_every_granule_once() -> None:
    solved = solve(Ask(host_memory_bytes=900 * MIB), LLAMA_1B, BF16, MACHINE)
    for part in solved.plan.parts.values():
        at = 0
        for unit in (u for u in solved.plan.units if u.part == part.key):
            assert unit.lo == at
            at = unit.hi
        assert at == part.granules


def test_contexts() -> None:
    assert solve(Ask(), LLAMA_1B, BF16, MACHINE).plan.context == 4096
    assert solve(Ask(prompt_tokens=6000), LLAMA_1B, BF16, MACHINE).plan.context == 6064
    with pytest.raises(BadRequest, match="2048 positions"):
        solve(Ask(context=5000), model(), Format("float32"), MACHINE)


def test_plan_json_round_trip() -> None:
    plan = solve(Ask(host_memory_bytes=1500 * MIB), LLAMA_1B, BF16, MACHINE).plan
    assert plans.loads(plans.dumps(plan), "plan") == plan
