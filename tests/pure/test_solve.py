"""The residency solver: fits to the byte, uses what it may, refuses with the minimum that then works."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph.arenas import Layout
from penstock.planner.solve import solve
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
    solved = solve(Ask(host_memory_bytes=limit_mib * MIB), LLAMA_1B, BF16, MACHINE)
    used = solved.plan.tier_bytes()["host"]
    assert 0.95 * limit_mib * MIB <= used <= limit_mib * MIB
    assert solved.plan.ring_bytes["host"] <= 256 * MIB
    streamed = sum(solved.plan.unit_bytes(u) for u in solved.plan.units if u.home == "disk0")
    gathered = 0 if Layout(solved.plan).gathers else solved.plan.parts["embed"].granule_bytes
    assert solved.prediction.disk_bytes_per_token == streamed + gathered


@given(
    st.integers(1, 3), st.sampled_from([64, 128, 192]), st.sampled_from([64, 200, 1000]), st.booleans(),
    st.sampled_from(["float32", "bfloat16", "int8", "int4", "int4-g32"]), st.integers(1, 4), st.integers(64, 600),
    st.booleans(),
)  # fmt: skip
def test_the_minimum_is_exact(
    layers: int, d: int, neurons: int, tied: bool, weights: str, batch: int, context: int, score: bool
) -> None:
    spec = model(layers, d, 4, 2, neurons, vocab=1000, tied=tied)
    ask = {"batch": batch, "context": context, "prompt_tokens": 8, "output_tokens": 8, "score": score}
    fmt = parse_format(weights)
    with pytest.raises(DoesNotFit) as refused:
        solve(Ask(host_memory_bytes=1, **ask), spec, fmt, MACHINE)
    minimum = refused.value.numbers["minimum_bytes"]
    with pytest.raises(DoesNotFit) as again:
        solve(Ask(host_memory_bytes=minimum - 1, **ask), spec, fmt, MACHINE)
    assert again.value.numbers["minimum_bytes"] == minimum
    solved = solve(Ask(host_memory_bytes=minimum, **ask), spec, fmt, MACHINE)
    assert solved.plan.tier_bytes()["host"] <= minimum


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
