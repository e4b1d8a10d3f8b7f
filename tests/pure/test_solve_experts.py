"""Plans beside a device for models with experts: they fit, they run, and they say why the CPU has the experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import DoesNotFit
from penstock.graph.check_plan import check_plan
from penstock.models import spec_from_config
from penstock.planner.explain import table
from penstock.planner.predict import predict
from penstock.planner.routing import stated
from penstock.planner.solve import Solved, settle_context, solve
from penstock.planner.solve.ours import device, experts, ram
from penstock.planner.solve.problem import Problem
from penstock.planner.what_if import what_if
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.parts import PINNED
from penstock.spec.plan import Plan
from penstock.units import GIB, MIB
from tests.pure.machine import MACHINE, WITH_DEVICE
from tests.pure.real_models import TINY

MACHINES = Path(penstock.__file__).parent / "machines"
INT4 = parse_format("int4")
KINDS = ("glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
# A device whose kernels for experts have a rate of their own.
ABLE = replace(WITH_DEVICE, rates=(*WITH_DEVICE.rates, Rate("gpu0", "experts", "*", 1e-5, 1 / 400e9, 1 / 20e12)))


def executors(plan: Plan, kind: str) -> set[str]:
    return {unit.decode for unit in plan.units if plan.parts[unit.part].kind == kind}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("machine", ["pc-rtx4090-64gb", "server-rtx3090-24gb", "laptop-rtx3060-6gb"])
def test_published_models_on_published_machines(name: str, machine: str) -> None:
    """A plan with a device, no slower than without. Most experts do not fit there: the CPU computes them, or what a
    cache there misses."""
    spec, figures = (
        describe(Path(name))[0],
        machines.loads((MACHINES / f"{machine}.json").read_text(encoding="utf-8"), machine),
    )
    ask = Ask(prompt_tokens=32, output_tokens=32, use_device=True)
    solved = solve(ask, spec, INT4, figures, may_plan=True)
    alone = solve(replace(ask, use_device=False, device_memory_bytes=0), spec, INT4, figures)
    check_plan(solved.plan, spec, INT4)
    assert solved.strategy.startswith(experts.NAME) or solved.strategy == device.WHOLE
    assert solved.prediction.decode_tokens_per_s >= 0.95 * alone.prediction.decode_tokens_per_s
    assert solved.strategy == device.WHOLE or any("the CPU computes the" in reason for reason in solved.reasons)
    assert not any(each.candidate.cannot_run for each in solved.not_yet)
    more = what_if(solved, ask, figures).one_more_device_gib
    assert (more is None) == (solved.strategy == device.WHOLE)


def test_a_device_has_the_experts_of_some_or_all_layers() -> None:
    spec = describe(Path("olmoe-1b-7b"))[0]
    solved = solve(Ask(context=512, device_memory_bytes=3 * GIB), spec, INT4, ABLE, every=True)
    assert not solved.not_yet and all(not c.candidate.cannot_run for c in solved.compared)
    name = f"{experts.NAME}, those of some layers on the device"
    some = next(c.candidate.plan for c in solved.compared if c.candidate.strategy == name)
    there = {unit.part for unit in some.units if unit.decode == "gpu0" and unit.part.endswith(".experts")}
    assert 0 < len(there) < len(spec.layers)
    routers = {unit.part for unit in some.units if unit.decode == "gpu0" and unit.part.endswith(".router")}
    assert routers == {part.replace("experts", "router") for part in there}
    assert solve(Ask(context=512), spec, INT4, ABLE).strategy == device.WHOLE


def test_asked_for_it_is_used_or_refused() -> None:
    spec = spec_from_config(TINY["qwen3_moe"], "tiny")
    slow = replace(
        WITH_DEVICE,
        rates=tuple(replace(r, alpha_s=1000 * r.alpha_s) if r.lane == "gpu0" else r for r in MACHINE.rates),
    )
    ask = Ask(context=512, device_memory_bytes=400 * MIB)
    assert "gpu0" not in solve(ask, spec, INT4, slow).plan.tier_bytes()
    assert "gpu0" in solve(replace(ask, use_device=True), spec, INT4, slow).plan.tier_bytes()
    with pytest.raises(DoesNotFit, match="--device none") as caught:
        solve(replace(ask, use_device=True, device_memory_bytes=MIB), spec, INT4, WITH_DEVICE)
    least = caught.value.numbers["minimum_bytes"]
    assert caught.value.numbers["tier"] == "gpu0"
    solve(replace(ask, use_device=True, device_memory_bytes=least), spec, INT4, WITH_DEVICE)


@pytest.mark.parametrize("model", ["qwen3_moe", "llama"])
def test_the_least_ram_is_named_where_kv_has_no_room_on_the_device(model: str) -> None:
    spec = spec_from_config({**TINY[model], "max_position_embeddings": 4096}, "tiny")
    ask = Ask(context=4096, batch=64, kv="float32", use_device=True, device_memory_bytes=320 * MIB)
    with pytest.raises(DoesNotFit, match="beside a device") as caught:
        solve(replace(ask, host_memory_bytes=80 * MIB), spec, INT4, WITH_DEVICE)
    numbers = caught.value.numbers
    assert numbers["tier"] == "host" and numbers["minimum_bytes"] > numbers["have_bytes"]
    solve(replace(ask, host_memory_bytes=numbers["minimum_bytes"]), spec, INT4, WITH_DEVICE)


@pytest.mark.parametrize(("link_gb_per_s", "rows"), [(1000, 1), (20, 32), (0.001, 1 << 12)])
def test_what_is_lifted_follows_the_link(link_gb_per_s: float, rows: int) -> None:
    """The rows from which a missing expert is lifted, in a cache on the device that takes what its memory has left."""
    spec = describe(Path("olmoe-1b-7b"))[0]
    link = Rate("h2d0", "*", "*", 1e-5, 1e-9 / link_gb_per_s)
    machine = replace(ABLE, rates=(*(r for r in ABLE.rates if r.lane != "h2d0"), link))
    ask = settle_context(Ask(context=512, device_memory_bytes=3 * GIB), spec)
    found = {c.strategy: c.plan for c in experts.candidates(Problem(ask, spec, INT4, machine))}
    plan = found[f"{experts.NAME}, in caches on the device"]
    assert {cache.executor for cache in plan.caches} == {"gpu0"} and len(plan.caches) == len(spec.layers)
    assert {cache.lifted_rows for cache in plan.caches} == {rows}
    assert 3 * GIB - 40 * MIB < plan.tier_bytes()["gpu0"] <= 3 * GIB


def test_where_ram_has_not_all_experts_it_has_a_cache_beneath_the_devices() -> None:
    spec = describe(Path("olmoe-1b-7b"))[0]
    ask = Ask(context=512, device_memory_bytes=2 * GIB, host_memory_bytes=3 * GIB)
    found = {
        c.strategy: c for c in experts.candidates(Problem(settle_context(ask, spec), spec, INT4, ABLE))
    }  # fmt: skip
    candidate = found[f"{experts.NAME}, in caches on the device and in RAM"]
    plan, layers = candidate.plan, range(len(spec.layers))
    check_plan(plan, spec, INT4)
    assert [(cache.layer, cache.executor) for cache in plan.caches] == [
        (i, at) for i in layers for at in ("host", "gpu0")
    ]
    used = plan.tier_bytes()
    assert 2 * GIB - 40 * MIB < used["gpu0"] <= 2 * GIB and 3 * GIB - 80 * MIB < used["host"] <= 3 * GIB
    assert any("caches in device memory" in reason for reason in candidate.reasons)
    assert any(reason.startswith("beneath these in RAM caches for") for reason in candidate.reasons)
    prediction = predict(plan, settle_context(ask, spec), ABLE)
    beneath = prediction.experts and prediction.experts.hit_rate_beneath
    assert beneath is not None and 0 < beneath < 1
    row_bytes = plan.parts["embed"].granule_bytes  # of the embedding a token reads one granule
    assert prediction.disk_bytes_per_token == prediction.experts.loaded_bytes + row_bytes  # type: ignore[union-attr]
    lines = table(Solved(plan, prediction, candidate.reasons))
    assert "that a token wants are not on the device, " in lines and "of these are not in RAM either, " in lines
    assert f"{beneath:.0%} are there" in lines


@pytest.mark.fuzz
@settings(deadline=None)
@given(st.data())
def test_any_candidate_is_a_plan_that_runs(data: st.DataObject) -> None:
    """Checked as a plan from a file would be, within both limits, lowered and simulated."""
    name = data.draw(st.sampled_from(KINDS))
    spec = spec_from_config(TINY[name], name)
    fmt = data.draw(st.sampled_from([Format("float32"), INT4]))
    ask = Ask(
        prompt_tokens=data.draw(st.sampled_from([1, 40, 300])), output_tokens=4, batch=data.draw(st.integers(1, 3)),
        context=310, kv=data.draw(st.sampled_from([None, "int8"])),
        resident_bytes=data.draw(st.none() | st.integers(0, 8 * MIB)), score=data.draw(st.booleans()),
        host_memory_bytes=data.draw(st.none() | st.integers(590 * MIB, 640 * MIB)),
        device_memory_bytes=data.draw(st.integers(300 * MIB, 360 * MIB)),
    )  # fmt: skip
    machine: MachineSpec = data.draw(st.sampled_from([WITH_DEVICE, ABLE]))
    try:
        settled = settle_context(ask, spec)
        found = list(experts.candidates(Problem(settled, spec, fmt, machine)))
    except DoesNotFit:
        return
    for _, plan, reasons, cannot_run, *_ in found:
        check_plan(plan, spec, fmt)
        used = plan.tier_bytes()
        assert used["gpu0"] <= (ask.device_memory_bytes or 0)
        assert used["host"] <= (ask.host_memory_bytes or 16 * GIB)
        stays = sum(plan.unit_bytes(u) for u in plan.units if not u.home.startswith("disk"))
        held = {p.layer: p.least_bytes for p in plan.parts.values() if p.kind == "experts"}
        stays += sum(cache.slots * held[cache.layer] for cache in plan.caches if cache.executor == "host")
        pinned = sum(p.nbytes for p in plan.parts.values() if p.kind in ("norms", "edges", "router"))
        assert ask.resident_bytes is None or stays <= ask.resident_bytes + pinned
        assert not cannot_run
        assert reasons and predict(plan, settled, machine).decode_tokens_per_s > 0


@pytest.mark.parametrize("name", KINDS)
def test_slots_count_as_weights_that_stay(name: str) -> None:
    """A limit of weights that stay, in steps of one expert: streaming without slots where there is not one a layer, and
    then caches that keep the limit. With more, never fewer slots."""
    spec = spec_from_config(TINY[name], name)
    whole = Problem(settle_context(Ask(context=96), spec), spec, INT4, MACHINE)
    routed = whole.of_kind("experts")
    pinned = sum(part.nbytes for part in whole.parts.values() if part.kind in PINNED)
    least = sum(part.least_bytes for part in routed)
    slots = [0] * len(routed)
    for stays in range(0, whole.total_bytes, routed[0].least_bytes):
        problem = whole.asking(resident_bytes=stays)
        plans = [c.plan for c in ram.candidates(problem) if c.plan.caches]
        assert bool(plans) == (stays >= pinned + least)
        for plan in plans:
            check_plan(plan, spec, INT4)
            there = [cache.slots for cache in plan.caches]
            held = sum(count * part.least_bytes for count, part in zip(there, routed, strict=True))
            stay = sum(plan.unit_bytes(u) for u in plan.units if not u.home.startswith("disk"))
            assert stay + held <= stays
        there = [cache.slots for cache in plans[0].caches] if plans else slots
        assert all(now >= before for now, before in zip(there, slots, strict=True))
        slots = there
    assert min(slots) >= min(part.experts for part in routed) - 1


def test_guesses_are_made_where_they_gain_time() -> None:
    """Right ones keep the disk busy while attention is computed. Wrong ones cost their reads. What nobody has asked
    routers about is not guessed."""
    spec = describe(Path("qwen3-30b-a3b"))[0]
    ask = Ask(prompt_tokens=16, output_tokens=256, context=512, host_memory_bytes=int(9.2e9))
    trace = stated(spec)
    # The first are those that a token goes to, the second ones that it does not go to.
    right, wrong = trace.layers, tuple(tuple(_others(token) for token in layer) for layer in trace.layers)

    def planned(guesses: tuple[tuple[tuple[int, ...], ...], ...]) -> Solved:
        return solve(ask, spec, INT4, MACHINE, trace=replace(trace, guesses=guesses))

    none, good, bad = planned(()), planned(right), planned(wrong)
    check_plan(good.plan, spec, INT4)
    assert [cache.guesses for cache in good.plan.caches] in [[0, *[guesses] * 47] for guesses in (1, 2, 4)]
    assert any("guessed a layer ahead" in reason for reason in good.reasons)
    assert good.prediction.decode_tokens_per_s > 1.05 * none.prediction.decode_tokens_per_s
    assert none.plan == bad.plan and not any(cache.guesses for cache in none.plan.caches)


def _others(token: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(expert for expert in range(128) if expert not in token)[: len(token)]
