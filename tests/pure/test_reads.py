"""How loads are read: what a machine says, and what plans take of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import BadRequest
from penstock.graph.lower import Lowering
from penstock.graph.ops import Pick
from penstock.graph.passes import decode
from penstock.graph.tasks import Call, Slot
from penstock.models import spec_from_config
from penstock.planner.cost import Cost
from penstock.planner.reads import on_disks, with_reads
from penstock.planner.solve import solve
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import PICKS_IN_FLIGHT, USUAL_READS, Rate, Reads, experts_in_flight
from penstock.spec.places import DISK
from penstock.units import KIB, MIB
from tests.pure.machine import LLAMA_1B, MACHINE
from tests.pure.real_models import BY_NAME

SMALL = Reads("disk0", 64 * KIB, 4, "io_uring", 1.5e9, "measured: small", MIB)
LARGE = Reads("disk0", 4 * MIB, 2, "threads", 2.9e9, "measured: large")
MEASURED = replace(MACHINE, reads=(SMALL, LARGE))
ASK = Ask(host_memory_bytes=500 << 20)


def test_loads_are_read_by_the_entry_for_their_size() -> None:
    assert [MEASURED.reads_of("disk0", nbytes) for nbytes in (4096, MIB, MIB + 1, 1 << 40)] == [
        SMALL,
        SMALL,
        LARGE,
        LARGE,
    ]
    assert MACHINE.reads_of("disk0", MIB) == USUAL_READS == MEASURED.reads_of("disk7", MIB)
    assert machines.loads(machines.dumps(MEASURED), "x") == MEASURED


def test_plans_take_them_with_the_reason() -> None:
    solved = solve(ASK, LLAMA_1B, Format("int4", 64), MEASURED)
    plan = solved.plan
    assert (plan.io_block_bytes, plan.io_depth, plan.io_engine) == (4 * MIB, 2, "threads")
    assert any("measured: large (2.90 GB/s)" in reason for reason in solved.reasons)
    unknown = solve(ASK, LLAMA_1B, Format("int4", 64), MACHINE)
    assert (unknown.plan.io_block_bytes, unknown.plan.io_depth) == (USUAL_READS.block_bytes, USUAL_READS.depth)
    assert any("not measured" in reason for reason in unknown.reasons)
    tiny = replace(plan, units=tuple(replace(u, hi=u.lo + 1) for u in plan.units if u.home == "disk0"))
    assert max(map(tiny.unit_bytes, tiny.units)) <= MIB
    assert with_reads(tiny, MEASURED)[0].io_engine == "io_uring"


def test_experts_of_a_layer_come_one_after_the_other() -> None:
    """A layer waits for a few experts. Eight blocks of 2 MiB would be all of them, and they would end together."""
    experts = spec_from_config(BY_NAME["Qwen3-30B-A3B"], "x")
    deep = replace(LARGE, block_bytes=2 * MIB, depth=8)
    for reads, depth in ((deep, 4), (replace(deep, block_bytes=8 * MIB), 2), (LARGE, 2)):
        solved = solve(Ask(host_memory_bytes=9 << 30), experts, Format("int4", 64), replace(MACHINE, reads=(reads,)))
        assert solved.plan.caches and solved.plan.io_depth == depth
        assert any("few experts in flight" in reason for reason in solved.reasons) == (depth < reads.depth)
        asked = f"asks for come by an io_uring where there is one, {depth} blocks in flight"
        assert any(asked in reason for reason in solved.reasons)


def test_as_many_small_experts_are_in_flight_as_keep_a_disk_busy() -> None:
    assert [experts_in_flight(KIB * size, 2 * MIB) for size in (64, 1024, 2048, 2592, 5000)] == [64, 4, 2, 4, 6]


@pytest.mark.parametrize(
    "wrong",
    [{"block_bytes": 0}, {"block_bytes": 5000}, {"depth": 0}, {"depth": 257}, {"engine": "aio"}, {"bytes_per_s": -1.0}],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        replace(LARGE, **wrong)  # type: ignore[arg-type]


def test_a_second_disk_has_a_lane_and_the_rates_of_the_first() -> None:
    plan = solve(ASK, LLAMA_1B, Format("int4", 64), MACHINE).plan
    disks = {part: f"disk{i % 2}" for i, part in enumerate(plan.parts)}
    two = on_disks(plan, disks)
    assert on_disks(plan, {}) == plan
    assert {u.home for u in two.units} == {"host", "disk0", "disk1"}
    loads = [task for task in Lowering(two).step(decode(two, (0,), (5,), None)) if task.calls[0].op == "load"]
    assert {task.lanes for task in loads} == {("disk0",), ("disk1",)}
    cost = Cost(MACHINE)
    by_lane = {task.lanes[0]: cost.seconds(task) / task.bytes for task in loads}
    assert by_lane["disk1"] == pytest.approx(by_lane["disk0"], rel=0.2)
    one = solve(ASK, LLAMA_1B, Format("int4", 64), MACHINE).prediction.decode_tokens_per_s
    both = solve(ASK, LLAMA_1B, Format("int4", 64), MACHINE, disks).prediction.decode_tokens_per_s
    assert 1.3 * one < both < 2.1 * one


def test_a_second_disk_slows_the_processor_as_the_first_does() -> None:
    shared = replace(MACHINE, sharing=(machines.Sharing("host", "disk0", 1.5), machines.Sharing("disk0", "host", 1.2)))
    cost = Cost(shared)
    assert cost.factor("host", frozenset({"disk1"})) == 1.5 == cost.factor("host", frozenset({"disk0", "disk1"}))
    assert cost.factor("disk1", frozenset({"host"})) == 1.2


@pytest.mark.parametrize("runs", [1, 64, 128, 320])
def test_reads_of_records_that_follow_others_take_their_share_of_a_round(runs: int) -> None:
    """Of PICKS_IN_FLIGHT reads that share one alpha_s. Reads that find the disk idle take one at least."""
    machine = replace(MACHINE, rates=(*MACHINE.rates, Rate("disk0", "pick", "*", 1e-3, 1e-9)))
    cost, other_s = Cost(machine), machine.overhead_s(DISK.reads, "call")
    for follows, least in ((True, 0), (False, 1)):
        pick = Pick(Slot("host.asked", 0, 1 << 30), ((0, 4096),) * runs, (), follows)
        fixed_s, bytes_s = cost.call_parts_s(DISK.reads, Call(pick, 0, None, "int4", 4096 * runs, 0))
        assert fixed_s == pytest.approx(max(least, runs / PICKS_IN_FLIGHT) * 1e-3 + other_s)
        assert bytes_s == pytest.approx(4096 * runs * 1e-9)
