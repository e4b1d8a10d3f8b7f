"""Plans beside a device: they fit to the byte, use what there is, and are right whatever the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import DoesNotFit
from penstock.graph.check_plan import check_plan
from penstock.models import spec_from_config
from penstock.planner.candidate import Candidate
from penstock.planner.predict import predict
from penstock.planner.solve import candidates, settle_context, solve
from penstock.planner.solve.ours import device
from penstock.planner.solve.problem import Problem
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.model import ModelSpec
from penstock.units import GIB, MIB, format_bytes
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model
from tests.pure.real_models import TINY

INT4, BF16 = parse_format("int4"), Format("bfloat16")
MACHINES = Path(penstock.__file__).parent / "machines"


def with_memory(device_bytes: int, host_bytes: int = 16 * GIB) -> MachineSpec:
    tiers = (Capacity("host", host_bytes), WITH_DEVICE.tier("disk0"), Capacity("gpu0", device_bytes))
    return replace(WITH_DEVICE, tiers=tiers)


def placements(candidate: Candidate) -> set[str]:
    return {unit.placement for unit in candidate.plan.units if unit.part.endswith((".ffn", ".attn"))}


def test_what_fits_is_all_there() -> None:
    solved = solve(Ask(context=512), LLAMA_1B, INT4, WITH_DEVICE)
    assert solved.strategy == device.WHOLE
    assert {unit.home for unit in solved.plan.units} == {"gpu0"} and not solved.plan.ring_bytes
    assert solved.prediction.bound_by == "gpu0"
    assert solved.plan.tier_bytes()["gpu0"] == solved.prediction.peak_device_bytes <= 8 * GIB


def test_a_model_that_is_all_there_without_its_kv_does_not_end_the_search() -> None:
    """Attention of the device to KV in RAM, and a few weights in RAM beside KV on the device, are compared with it."""
    small = solve(Ask(context=16384), LLAMA_1B, INT4, with_memory(8 * GIB))
    assert small.strategy == device.WHOLE
    least = small.plan.tier_bytes()["gpu0"]
    solved = solve(Ask(context=16384), LLAMA_1B, INT4, with_memory(least - 200 * MIB))
    names = [each.candidate.strategy for each in solved.compared]
    assert device.WHOLE not in names
    assert any(name.startswith(f"{device.WHOLE}, KV in RAM") for name in names)
    assert any(name.startswith((f"{device.WHOLE}, link", "PIPO")) for name in names)


def test_the_embedding_of_an_untied_model_stays_in_ram() -> None:
    """It is looked up there; on the disk only where RAM has no room."""
    spec = replace(LLAMA_1B, tied=False)
    for host_bytes, home in ((16 * GIB, "host"), (700 * MIB, "disk0")):
        solved = solve(Ask(context=512), spec, INT4, with_memory(4 * GIB, host_bytes))
        assert solved.strategy == device.WHOLE
        assert {unit.home for unit in solved.plan.units if unit.part == "embed"} == {home}


@pytest.mark.parametrize("mib", [700, 1000, 1500, 2000, 3000])
def test_a_limit_is_used_and_kept(mib: int) -> None:
    """The device's memory is filled to within a granule or two and a huge page an arena."""
    ask = settle_context(Ask(context=512, device_memory_bytes=mib * MIB), LLAMA_1B)
    found = list(device.candidates(Problem(ask, LLAMA_1B, BF16, WITH_DEVICE)))
    assert found
    for plan in (each.plan for each in found):
        check_plan(plan, LLAMA_1B, BF16)
        used = plan.tier_bytes()["gpu0"]
        assert mib * MIB - 40 * MIB < used <= mib * MIB or not plan.ring_bytes


def test_the_candidates_cover_all_placements() -> None:
    ask = settle_context(Ask(context=512, device_memory_bytes=GIB, host_memory_bytes=2 * GIB), LLAMA_1B)
    names = {c.strategy: placements(c) for c in device.candidates(Problem(ask, LLAMA_1B, BF16, WITH_DEVICE))}
    assert {"GG", "CG", "CC", "DC", "DG"} <= set.union(*names.values())
    assert all(
        "CC" not in found and "DC" not in found for name, found in names.items() if name == "device memory, link"
    )


@pytest.mark.parametrize("as_slow_as_the_cpu", [True, False])
def test_the_ring_of_the_cpu_is_larger_where_the_disk_would_wait(as_slow_as_the_cpu: bool) -> None:
    """If computing takes nearly as long as reading, the disk waits for room in the ring. A disk that is busy all the
    time gains nothing from a larger ring, which takes room from weights."""
    spec, _ = describe(Path("mistral-7b-v0.3"), BF16)
    machine = machines.loads((MACHINES / "pc-rtx4060ti-16gb.json").read_text(encoding="utf-8"), "machine")
    if as_slow_as_the_cpu:
        others = [_times(rate, 4 if rate.lane == "host" else 1) for rate in machine.rates if rate.lane != "gpu0"]
        kernels = [replace(rate, lane="gpu0") for rate in others if rate.lane == "host" and rate.op != "pass"]
        machine = replace(machine, rates=(*others, *kernels))
    ask = Ask(
        prompt_tokens=16, output_tokens=1, context=2048, host_memory_bytes=6 * GIB, device_memory_bytes=1680 * MIB,
        use_device=True,
    )  # fmt: skip
    solved = solve(ask, spec, BF16, machine)
    usual = 64 * MIB
    assert solved.plan.ring_bytes["host"] == (2 * usual if as_slow_as_the_cpu else usual)
    if as_slow_as_the_cpu:
        with_usual = [each for each in solved.compared if each.candidate.plan.ring_bytes.get("host") == usual]
        assert solved.prediction.total_s < 0.98 * min(each.prediction.total_s for each in with_usual)


def test_more_device_memory_is_not_slower() -> None:
    speeds = [
        solve(Ask(context=512, device_memory_bytes=mib * MIB), LLAMA_1B, BF16, WITH_DEVICE).prediction
        for mib in (600, 1000, 1500, 2000, 3000, 4000)
    ]
    for less, more in pairwise(speeds):
        assert more.decode_tokens_per_s >= 0.97 * less.decode_tokens_per_s


@pytest.mark.parametrize(
    ("link_gb_per_s", "launch_us", "most_mib", "why"),
    [
        (25, 50, 31, "5% of"),
        (6, 50, 8, "5% of"),
        (6, 5, 3, "5% of"),
        (50, 50, 32.5, "a ring of 130 MiB should hold four"),
    ],
)
def test_lifts_are_as_large_as_they_cost(link_gb_per_s: int, launch_us: int, most_mib: float, why: str) -> None:
    """Their fixed cost takes a twentieth of their copy, as far as the ring lets them grow, and the reason says so."""
    rates = [rate for rate in WITH_DEVICE.rates if rate.lane != "h2d0"]
    rates += [Rate("h2d0", "*", "*", 5e-6, 1e-9 / link_gb_per_s), Rate("gpu0", "task", "*", launch_us * 1e-6, 0.0)]
    machine = replace(WITH_DEVICE, rates=tuple(rates))
    ask = settle_context(Ask(context=512, device_memory_bytes=GIB), LLAMA_1B)
    for found in device.candidates(Problem(ask, LLAMA_1B, BF16, machine)):
        plan = found.plan
        lifted = [plan.unit_bytes(u) for u in plan.units if u.placement == "CG" and u.part.endswith((".ffn", ".attn"))]
        assert not lifted or 0.6 * most_mib * MIB < max(lifted) <= most_mib * MIB
        said = [
            reason for reason in found.reasons if f"in units of at most {format_bytes(int(most_mib * MIB))}" in reason
        ]
        assert bool(lifted) == bool(said) and all(why in reason for reason in said)


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("home", ["memory", "disk"])
def test_kv_has_the_home_that_is_asked_for(kind: str, home: str) -> None:
    """Beside a device too, of every candidate, whether or not the device has room for all."""
    dense = kind == "dense"
    spec = LLAMA_1B if dense else spec_from_config(TINY["qwen3_moe"], "qwen3_moe")
    for device_bytes in (400 * MIB, GIB, 8 * GIB) if dense else (330 * MIB, 600 * MIB):
        ask = Ask(context=96, kv_home=home, device_memory_bytes=device_bytes, use_device=True)
        found = list(candidates(Problem(settle_context(ask, spec), spec, INT4, WITH_DEVICE), every=True))
        assert found
        for each in found:
            assert {kv.home.startswith("disk") for kv in each.plan.kv} == {home == "disk"}, each.strategy
            check_plan(each.plan, spec, INT4)


def test_the_least_device_memory_with_kv_on_the_disk_is_enough() -> None:
    ask = Ask(context=512, kv_home="disk", use_device=True, device_memory_bytes=MIB)
    with pytest.raises(DoesNotFit) as refused:
        solve(ask, LLAMA_1B, INT4, WITH_DEVICE)
    least = refused.value.numbers["minimum_bytes"]
    plan = solve(replace(ask, device_memory_bytes=least), LLAMA_1B, INT4, WITH_DEVICE).plan
    assert plan.tier_bytes()["gpu0"] <= least and {kv.home for kv in plan.kv} == {"disk0"}


def test_who_computes_follows_the_machine() -> None:
    """A slow CPU leaves the FFNs to the link, a slow link to the CPU."""
    ask = Ask(context=512, device_memory_bytes=2 * GIB)
    slow_cpu = replace(
        WITH_DEVICE, rates=tuple(_times(rate, 50 if rate.lane == "host" else 1) for rate in MACHINE.rates)
    )
    plan = solve(ask, LLAMA_1B, BF16, slow_cpu).plan
    by_cpu = sum(plan.unit_bytes(unit) for unit in plan.units if unit.placement == "CC")
    assert by_cpu < 0.1 * sum(plan.unit_bytes(unit) for unit in plan.units if unit.placement == "CG")
    slow_link = replace(
        WITH_DEVICE, rates=tuple(_times(rate, 20 if rate.lane == "h2d0" else 1) for rate in MACHINE.rates)
    )
    plan = solve(ask, LLAMA_1B, BF16, slow_link).plan
    lifted = sum(plan.unit_bytes(unit) for unit in plan.units if unit.placement == "CG")
    assert lifted < 0.1 * sum(plan.unit_bytes(unit) for unit in plan.units if unit.placement == "CC")


def _times(rate, factor):  # type: ignore[no-untyped-def]
    return replace(rate, s_per_byte=rate.s_per_byte * factor, s_per_flop=rate.s_per_flop * factor)


@pytest.mark.parametrize("context", [64, 2048])
@pytest.mark.parametrize("fmt", [INT4, BF16], ids=["int4", "bfloat16"])
def test_the_minimum_is_exact(context: int, fmt: Format) -> None:
    ask = settle_context(Ask(context=context, prompt_tokens=16, output_tokens=8), LLAMA_1B)
    with pytest.raises(DoesNotFit) as caught:
        solve(replace(ask, device_memory_bytes=1), LLAMA_1B, fmt, WITH_DEVICE)
    least = caught.value.numbers["minimum_bytes"]
    assert caught.value.numbers["tier"] == "gpu0"
    exactly = replace(ask, device_memory_bytes=least)
    solve(exactly, LLAMA_1B, fmt, WITH_DEVICE)  # which may find the CPU as fast
    found = [c.plan for c in device.candidates(Problem(exactly, LLAMA_1B, fmt, WITH_DEVICE))]
    assert found and all(plan.tier_bytes()["gpu0"] <= least for plan in found)
    with pytest.raises(DoesNotFit):
        solve(replace(ask, device_memory_bytes=least - 1), LLAMA_1B, fmt, WITH_DEVICE)


def test_asked_for_it_is_used_or_refused() -> None:
    """Also where the CPU alone would be faster; and where it cannot be, the tier that is too small is named."""
    slow = replace(WITH_DEVICE, rates=tuple(_times(rate, 1000 if rate.lane == "gpu0" else 1) for rate in MACHINE.rates))
    ask = Ask(context=512, device_memory_bytes=GIB)
    assert "gpu0" not in solve(ask, LLAMA_1B, INT4, slow).plan.tier_bytes()
    assert "gpu0" in solve(replace(ask, use_device=True), LLAMA_1B, INT4, slow).plan.tier_bytes()
    with pytest.raises(DoesNotFit, match="--host-memory") as caught:
        solve(replace(ask, use_device=True, host_memory_bytes=100 * MIB), LLAMA_1B, INT4, WITH_DEVICE)
    least = caught.value.numbers["minimum_bytes"]
    assert caught.value.numbers["tier"] == "host"
    solve(replace(ask, use_device=True, host_memory_bytes=least), LLAMA_1B, INT4, WITH_DEVICE)
    with pytest.raises(DoesNotFit, match="--device none"):
        solve(Ask(context=512, use_device=True), LLAMA_1B, INT4, with_memory(64 * MIB))


def test_a_device_too_small_to_help_is_left_alone() -> None:
    """Nobody asked for it: the CPU does it."""
    solved = solve(Ask(context=512), LLAMA_1B, BF16, with_memory(32 * MIB))
    assert "gpu0" not in solved.plan.tier_bytes()
    assert (
        solve(Ask(device_memory_bytes=0), LLAMA_1B, BF16, WITH_DEVICE).plan
        == solve(Ask(), LLAMA_1B, BF16, MACHINE).plan
    )


@pytest.mark.fuzz
@settings(deadline=None)
@given(st.data())
def test_any_candidate_is_a_plan_that_runs(data: st.DataObject) -> None:
    """Checked as a plan from a file would be, within both limits, lowered and simulated."""
    spec: ModelSpec = model(
        data.draw(st.integers(1, 4)), 128, 4, 2, data.draw(st.sampled_from([192, 1000, 4096])),
        vocab=data.draw(st.sampled_from([256, 3000])), tied=data.draw(st.booleans()),
    )  # fmt: skip
    fmt = data.draw(st.sampled_from([Format("float32"), INT4]))
    ask = Ask(
        prompt_tokens=data.draw(st.sampled_from([1, 40, 300])), output_tokens=4, batch=data.draw(st.integers(1, 3)),
        context=data.draw(st.sampled_from([310, 512])), kv=data.draw(st.sampled_from([None, "int8"])),
        resident_bytes=data.draw(st.none() | st.integers(0, 8 * MIB)), score=data.draw(st.booleans()),
        host_memory_bytes=data.draw(st.none() | st.integers(590 * MIB, 640 * MIB)),
        device_memory_bytes=data.draw(st.integers(300 * MIB, 360 * MIB)),
    )  # fmt: skip
    try:
        settled = settle_context(ask, spec)
        found = list(device.candidates(Problem(settled, spec, fmt, WITH_DEVICE)))
    except DoesNotFit:
        return
    for _, plan, reasons, *_ in found:
        check_plan(plan, spec, fmt)
        used = plan.tier_bytes()
        assert used["gpu0"] <= (ask.device_memory_bytes or 0)
        assert used["host"] <= (ask.host_memory_bytes or 16 * GIB)
        stays = sum(plan.unit_bytes(u) for u in plan.units if not u.home.startswith("disk"))
        pinned = sum(part.nbytes for part in plan.parts.values() if part.kind in ("norms", "edges"))
        assert ask.resident_bytes is None or stays <= ask.resident_bytes + pinned
        assert reasons and predict(plan, settled, WITH_DEVICE).decode_tokens_per_s > 0


def test_a_tied_head_that_crosses_the_link_is_not_on_the_device() -> None:
    """The device has room for all layers, but not for a vocabulary that is larger than they are: then other plans are
    compared, and a part of the head stays there."""
    spec = model(8, 640, 4, 1, 2048, dtype="bfloat16", vocab=262144, max_positions=4096, tied=True)
    ask = Ask(context=512, device_memory_bytes=500 << 20, use_device=True)
    solved = solve(ask, spec, parse_format("int8"), WITH_DEVICE)
    assert solved.strategy != "device memory" and len(solved.compared) > 1
    assert {unit.home for unit in solved.plan.units if unit.part == "embed"} == {"gpu0", "host"}
