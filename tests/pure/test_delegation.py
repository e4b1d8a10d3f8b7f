"""Where attention to KV in RAM is faster: the figures are those of the lowered tasks, and the crossing point is where
they cross."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.planner.cost import Cost
from penstock.planner.delegation import crossing, sentences
from penstock.spec.format import PAGE_TOKENS, Format
from penstock.spec.parts import parts
from penstock.spec.plan import Plan, Unit
from tests.plans import make_plan
from tests.pure.machine import WITH_DEVICE, model

SPEC = model(layers=1, d=256, heads=8, kv_heads=4, neurons=512, vocab=128, max_positions=1 << 20)
F16 = Format("float16")
MOVED = {"kv_load", "attend", "append"}


def plan(attend: str, seqs: int = 4, kv: str = "int4") -> Plan:
    units = [Unit(p.key, 0, p.granules, "gpu0", "gpu0", "gpu0") for p in parts(SPEC, F16)]
    stage = max(part.granule_bytes for part in parts(SPEC, F16))
    return make_plan(
        SPEC, F16, units, ring_bytes={}, stage_bytes=stage, main="gpu0", kv_homes=[("host", attend)], batch_seqs=seqs,
        kv=kv, context=1 << 15, order="saving",
    )  # fmt: skip


def lowered_s(made: Plan, cost: Cost, position: int) -> float:
    """Seconds of a decode pass's calls that move KV, or q and what goes with it, and attend."""
    tasks = Lowering(made).step(passes.decode(made, range(made.batch_seqs), (position,) * made.batch_seqs, None))
    return sum(
        sum(cost.call_parts_s(task.lanes[0], call))
        for task in tasks for call in task.calls
        if call.op in MOVED or (call.op == "copy" and call.operands.what in ("q", "k", "v", "a"))  # type: ignore[union-attr]
    )  # fmt: skip


@pytest.mark.parametrize("kv", ["float16", "int4"])
@pytest.mark.parametrize("seqs", [1, 4])
def test_the_seconds_are_those_of_the_tasks(seqs: int, kv: str) -> None:
    cost = Cost(WITH_DEVICE)
    for position in (100, 5000):
        found = crossing(plan("host", seqs, kv), plan("host", seqs, kv).kv[0], cost, position)
        assert found.ram_s == pytest.approx(lowered_s(plan("host", seqs, kv), cost, position), rel=0.1)
        assert found.link_s == pytest.approx(lowered_s(plan("gpu0", seqs, kv), cost, position), rel=0.1)


def test_they_cross_where_it_says() -> None:
    """Whoever is faster before the crossing point is slower behind it."""
    made, slow = plan("host"), WITH_DEVICE.faster(lambda lane: lane == "h2d0", 0.05)
    late = replace(slow, rates=tuple(replace(r, alpha_s=2e-3) if r.lane == "host" else r for r in slow.rates))
    for machine in (WITH_DEVICE, slow, late):
        cost, home = Cost(machine), made.kv[0]
        least = crossing(made, home, cost, 1000).least_tokens
        assert least is not None
        for position in (64, 640, 6400, 25600):
            at = crossing(made, home, cost, position)
            assert (at.ram_s < at.link_s) == (position >= least)
    assert least > 100
    weak = Cost(WITH_DEVICE.longer(lambda figure: figure.lane == "host", 1000.0))
    assert crossing(made, made.kv[0], weak, 64).least_tokens is None


def test_a_link_that_is_faster_than_ram() -> None:
    """Its calls take longer to begin: the CPU is faster up to a context, and the sentence says so."""

    made = plan("gpu0", seqs=16)
    rates = tuple(
        replace(rate, alpha_s=1e-5, s_per_byte=1 / 60e9) if rate.lane == "h2d0"
        else replace(rate, alpha_s=1e-6, s_per_byte=1 / 10e9) if rate.lane in ("host", "d2h0") else rate
        for rate in WITH_DEVICE.rates
    )  # fmt: skip
    cost = Cost(replace(WITH_DEVICE, rates=rates))
    found = crossing(made, made.kv[0], cost, 4000)
    assert found.least_tokens == 1 and found.most_tokens is not None and 64 < found.most_tokens < 4000
    for position in (64, found.most_tokens, found.most_tokens + 2 * PAGE_TOKENS, 4000):
        at = crossing(made, made.kv[0], cost, position)
        assert (at.ram_s < at.link_s) == (position <= found.most_tokens)
    (said,) = sentences(made, cost, 4000)
    assert f"the CPU is faster up to a context of {found.most_tokens} tokens" in said


def test_the_reason_names_both() -> None:
    cost = Cost(WITH_DEVICE)
    (cpu,), (link,) = sentences(plan("host"), cost, 5000), sentences(plan("gpu0"), cost, 5000)
    assert "on the CPU, where KV is: at 5000 tokens of 4 sequences" in cpu and "to which KV crosses" in link
