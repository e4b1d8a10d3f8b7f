"""PIPO: its memory model against the appendix, its configuration against brute force, its plans to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.planner.candidate import Candidate
from penstock.planner.predict import predict
from penstock.planner.programs.pipo_memory import (
    HOMES,
    PIPELINES,
    Configuration,
    MachineLimits,
    Sizes,
    equation_1,
    peak_bytes,
    peaks,
    sizes,
)
from penstock.planner.sizes import chunk_options
from penstock.planner.solve import pipo, settle_context
from penstock.planner.solve.problem import Problem
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import Capacity, MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.places import GPU
from penstock.units import GIB, MIB
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

FLOAT16, INT4 = Format("float16"), parse_format("int4")
SMALL = 800 * MIB  # of device memory, with which a 1B model in int4 is offloaded


def shape(name: str) -> Sizes:
    return sizes(describe(Path(name))[0], FLOAT16, FLOAT16)


def test_weights_and_kv_of_llama_8b() -> None:
    """By hand from section 3.5 and appendix B: l 32, d 4096, d_h 14336, h 32, h_kv 8, V 128256, p 2, b 1, s 544."""
    s = shape("llama-3.1-8b")
    assert s.embed_bytes == 2 * 4096 * 128256 == 1_050_673_152
    assert s.mha_bytes == 8192 * (8192 + 2048 + 1) == 83_894_272
    assert s.mlp_bytes == 8192 * (3 * 14336 + 1) == 352_329_728
    assert s.weights_bytes == 16_060_514_304
    assert s.kv_total_bytes(1, 544) == 2 * 2 * 544 * 32 * 4096 / 4 == 71_303_168


def test_peaks_of_llama_8b() -> None:
    s = shape("llama-3.1-8b")
    blocks, kv_layer = 436_224_000, 2_228_224
    found = peaks(s, 1, 544, "prefill", preloading=True)
    assert found.mha == 2 * 544 * (5 * 4096 + 32 * 544) + blocks + 2 * kv_layer == 481_902_592
    assert found.mlp == 2 * 544 * (3 * 14336 + 2 * 4096) + blocks + kv_layer == 494_157_824
    assert found.embed == 2 * 544 * (128256 + 4096) + 2 * 1_050_673_152 == 2_245_345_280 == found.peak
    found = peaks(s, 1, 544, "decode", preloading=True)
    assert (found.mha, found.mlp, found.embed) == (440_756_224, 438_554_624, 2_101_611_008)
    found = peaks(s, 1, 544, "prefill", preloading=False)
    assert found.mha == 41_222_144 + 83_894_272 + kv_layer
    assert found.mlp == 55_705_600 + 352_329_728
    assert found.embed == 143_998_976 + 1_050_673_152


def test_peaks_of_opt_30b() -> None:
    """Its FFN has two matrices, its head is its embedding: l 48, d 7168, d_h 28672, h 56, V 50272, b 4, s 544."""
    s = shape("opt-30b")
    assert (s.mha_bytes, s.mlp_bytes, s.embed_bytes) == (411_056_128, 822_097_920, 720_699_392)
    assert s.weights_bytes == 59_912_093_696
    assert s.kv_total_bytes(4, 544) == 2_994_733_056
    found = peaks(s, 4, 544, "prefill", preloading=True)
    assert (found.mha, found.mlp, found.embed) == (1_646_489_600, 1_607_495_680, 1_691_377_664)
    found = peaks(s, 4, 544, "decode", preloading=False)
    assert (found.mha, found.mlp, found.embed) == (473_976_832, 822_671_360, 721_158_912)


def test_packed_formats_count_with_their_scales() -> None:
    s = sizes(LLAMA_1B, INT4, parse_format("int8"))
    assert (s.weight_bytes, s.kv_bytes) == (4.5 / 8, 1 + 4 / 64)
    assert s.embeddings == 1


SIZES = st.builds(
    Sizes, layers=st.integers(1, 8), d=st.sampled_from([64, 256, 1024]), attention=st.sampled_from([64, 512]),
    hidden=st.integers(64, 4096), matrices=st.sampled_from([2, 3]), heads=st.just(8), kv_heads=st.sampled_from([1, 8]),
    vocab=st.sampled_from([256, 8000]), embeddings=st.sampled_from([1, 2]), act_bytes=st.sampled_from([2, 4]),
    weight_bytes=st.sampled_from([0.5625, 2, 4]), kv_bytes=st.sampled_from([0.5625, 2]),
)  # fmt: skip
RATES = st.floats(1e-12, 1e-8)
HUNDREDS = settings(max_examples=max(400, settings().max_examples))


Letters = tuple[Sizes, int, int, MachineLimits]  # with the batch and the tokens


def fits(letters: Letters, home: str, pipeline: str) -> bool:
    """By the memory model: M, and all weights or none, on the device; KV (section 3.1.1), and weights there, in RAM."""
    s, batch, tokens, limits = letters
    on_device = peak_bytes(s, batch, tokens, pipeline) + (home == GPU.executor) * s.weights_bytes
    in_ram = s.kv_total_bytes(batch, tokens) + (home == "host") * s.weights_bytes
    return on_device < limits.device_bytes and in_ram < limits.host_bytes


def token_s(letters: Letters, compute_s: float, home: str, pipeline: str) -> float:
    """A decode step as Eq. 1 goes by: loads beside computing, or one after the other. What comes from the disk crosses
    the link too, blockwise, so the slower of the two counts; so does KV (section 3.1.1)."""
    s, batch, tokens, limits = letters
    away = (home != GPU.executor) * s.weights_bytes
    load_s = (away + s.kv_total_bytes(batch, tokens)) / limits.link_bytes_per_s
    if home == "disk0":
        load_s = max(load_s, away / limits.disk_bytes_per_s)
    return max(load_s, compute_s) if pipeline == "overlapped" else load_s + compute_s


@st.composite
def problems(draw: st.DrawFn) -> tuple[Letters, float]:
    """Memories around what the model takes, so that every branch is met; and seconds of computing a step."""
    s, batch, tokens = draw(SIZES), draw(st.integers(1, 8)), draw(st.integers(1, 512))
    need, save = (peak_bytes(s, batch, tokens, pipeline) for pipeline in PIPELINES)
    w, kv = s.weights_bytes, s.kv_total_bytes(batch, tokens)
    device = draw(st.sampled_from([need, save, w + need, w + save, w])) * draw(st.floats(0.8, 1.2))
    host = draw(st.sampled_from([kv, w + kv])) * draw(st.floats(0.8, 1.2))
    limits = MachineLimits(device, host, 1 / draw(RATES), 1 / draw(RATES))
    return (s, batch, tokens, limits), w * draw(RATES)


@HUNDREDS
@given(problems())
def test_equation_1_is_the_best_of_all_but_on_a_nearly_full_device(problem: tuple[Letters, float]) -> None:
    """Brute force over all homes and pipelines, by the memory model and Eq. 1's times. Where all weights fit beside the
    peak without preloading but not with it, Eq. 1 sends them away; and it does not ask whether RAM has room for KV."""
    letters, compute_s = problem
    published = equation_1(*letters)
    if not fits(letters, published.home, published.pipeline):
        return
    every = [(home, pipeline) for home in HOMES for pipeline in PIPELINES if fits(letters, home, pipeline)]
    least_s = min(token_s(letters, compute_s, *each) for each in every)
    found_s = token_s(letters, compute_s, published.home, published.pipeline)
    assert least_s <= found_s
    nearly = fits(letters, GPU.executor, "saving") and published.home != GPU.executor
    if not nearly:
        assert found_s == pytest.approx(least_s, rel=1e-12)


@HUNDREDS
@given(problems())
def test_preloading_takes_memory_and_no_time(problem: tuple[Letters, float]) -> None:
    letters, compute_s = problem
    s, batch, tokens, _ = letters
    for stage in ("prefill", "decode"):
        with_it, without = (peaks(s, batch, tokens, stage, preloading) for preloading in (True, False))
        assert with_it.mha > without.mha and with_it.mlp > without.mlp and with_it.embed > without.embed
    for home in HOMES:
        overlapped_s, saving_s = (token_s(letters, compute_s, home, pipeline) for pipeline in PIPELINES)
        assert overlapped_s <= saving_s


def machine(device_bytes: int, host_bytes: int = 16 * GIB, disk_times: float = 1) -> MachineSpec:
    tiers = (Capacity("host", host_bytes), WITH_DEVICE.tier("disk0"), Capacity("gpu0", device_bytes))
    rates = tuple(
        replace(rate, s_per_byte=rate.s_per_byte / disk_times) if rate.lane == "disk0" else rate
        for rate in WITH_DEVICE.rates
    )
    return replace(WITH_DEVICE, tiers=tiers, rates=rates)


def candidates(spec: ModelSpec, of: MachineSpec, **ask: object) -> dict[str, Candidate]:
    settled = settle_context(Ask(**{"context": 512, **ask}), spec)  # type: ignore[arg-type]
    found = list(pipo.candidates(Problem(settled, spec, INT4, of)))
    assert len({candidate.strategy for candidate in found}) == len(found)
    return {candidate.strategy: candidate for candidate in found}


def homes(candidate: Candidate) -> set[str]:
    return {u.home for u in candidate.plan.units if u.part.endswith((".attn", ".ffn")) or u.part == "head"}


def test_everything_on_the_device_where_it_fits() -> None:
    found = candidates(LLAMA_1B, machine(4 * GIB))
    assert list(found) == ["PIPO, overlapped"]
    plan = found["PIPO, overlapped"].plan
    assert {unit.home for unit in plan.units} == {GPU.executor} == {kv.home for kv in plan.kv} and not plan.ring_bytes


def test_whole_blocks_come_from_ram_and_kv_is_there() -> None:
    found = candidates(LLAMA_1B, machine(SMALL))
    assert set(found) == {
        f"PIPO, {p}{partly}" for p in ("overlapped", "memory-saving") for partly in ("", pipo.PARTIAL)
    }
    whole, saving = found["PIPO, overlapped"], found["PIPO, memory-saving"]
    for candidate in (whole, saving):
        plan = candidate.plan
        assert homes(candidate) == {"host"} and {kv.home for kv in plan.kv} == {"host"}
        assert {unit.decode for unit in plan.units} == {GPU.executor} == {unit.prefill for unit in plan.units}
        blocks = [unit for unit in plan.units if unit.part.endswith((".attn", ".ffn"))]
        assert all((unit.lo, unit.hi) == (0, plan.parts[unit.part].granules) for unit in blocks)
        assert candidate.cannot_run == "" and "PIPO Eq. 1: W " in candidate.reasons[0]
    assert (whole.plan.order, saving.plan.order) == ("overlapped", "saving")
    sizes_of = {part.kind: part.nbytes for part in whole.plan.parts.values()}
    both = sizes_of["attn"] + sizes_of["ffn"]
    assert both <= whole.plan.ring_bytes[GPU.executor] < both + 2 * MIB
    assert sizes_of["ffn"] <= saving.plan.ring_bytes[GPU.executor] < sizes_of["ffn"] + 2 * MIB
    assert saving.plan.tier_bytes()[GPU.executor] < whole.plan.tier_bytes()[GPU.executor]
    partly = found["PIPO, overlapped" + pipo.PARTIAL]
    assert homes(partly) == {GPU.executor, "host"}
    used = partly.plan.tier_bytes()[GPU.executor]
    assert SMALL - 30 * MIB < used <= SMALL


def test_the_disk_where_ram_is_small_or_the_disk_as_fast_as_the_link() -> None:
    assert homes(candidates(LLAMA_1B, machine(SMALL, 1024 * MIB))["PIPO, overlapped"]) == {"disk0"}
    assert homes(candidates(LLAMA_1B, machine(SMALL, disk_times=10))["PIPO, overlapped"]) == {"disk0"}
    assert homes(candidates(LLAMA_1B, machine(SMALL), resident_bytes=0)["PIPO, overlapped"]) == {"disk0"}


def test_no_candidates_where_it_does_not_apply() -> None:
    assert candidates(LLAMA_1B, MACHINE) == {}
    assert candidates(LLAMA_1B, machine(SMALL), device_memory_bytes=0) == {}
    assert candidates(LLAMA_1B, machine(SMALL), kv_home="disk") == {}
    assert candidates(LLAMA_1B, machine(310 * MIB)) == {}


def test_the_memory_saving_pipeline_goes_where_two_blocks_do_not() -> None:
    """And below a block where even one does not."""
    spec = replace(LLAMA_1B, layers=LLAMA_1B.layers[:4])
    found = {mib: candidates(spec, machine(mib * MIB)) for mib in range(310, 400, 6)}
    strategies = [frozenset(name.removesuffix(pipo.PARTIAL) for name in each) for each in found.values()]
    both, saving = frozenset(pipo.NAMES.values()), frozenset({"PIPO, memory-saving"})
    assert list(dict.fromkeys(strategies)) == [frozenset(), saving, both]  # with more memory, in this order
    plan = next(each["PIPO, memory-saving"].plan for each in found.values() if each)
    assert max(plan.unit_bytes(unit) for unit in plan.units if unit.home == "host") < 4 * MIB


def test_preloading_hides_computing() -> None:
    ask = settle_context(Ask(context=512), LLAMA_1B)
    speeds = {
        name: predict(candidate.plan, ask, machine(SMALL)).decode_tokens_per_s
        for name, candidate in candidates(LLAMA_1B, machine(SMALL)).items()
    }
    assert speeds["PIPO, overlapped"] > speeds["PIPO, memory-saving"]
    assert speeds["PIPO, overlapped" + pipo.PARTIAL] > speeds["PIPO, overlapped"]


@pytest.mark.parametrize("device_mib", [500, 700, 800, 2000])
@pytest.mark.parametrize(("host_mib", "disk_times"), [(16 << 10, 1), (1024, 1), (16 << 10, 10)])
def test_no_home_is_faster_than_the_candidates(device_mib: int, host_mib: int, disk_times: float) -> None:
    """Brute force over homes and pipelines, by the bytes of the plans and their simulated speeds."""
    of = machine(device_mib * MIB, host_mib * MIB, disk_times)
    ask = settle_context(Ask(context=512), LLAMA_1B)
    problem = Problem(ask, LLAMA_1B, INT4, of)
    every = []
    for home in HOMES:
        for pipeline in PIPELINES:
            for chunk_rows in chunk_options(ask):
                plan = pipo.plan(
                    problem, Configuration(home, pipeline, float(home == GPU.executor)), "host", chunk_rows
                )
                if problem.fits(plan):
                    every.append(predict(plan, ask, of, spread=False).decode_tokens_per_s)
                    break
    found = [predict(c.plan, ask, of, spread=False).decode_tokens_per_s for c in pipo.candidates(problem)]
    assert every and max(found) >= 0.999 * max(every)


@pytest.mark.fuzz
@given(st.data())
def test_any_candidate_is_a_plan_that_runs(data: st.DataObject) -> None:
    """Checked as a plan from a file would be, within both limits, lowered, verified and simulated."""
    spec = model(
        data.draw(st.integers(1, 3)), 128, 4, 2, data.draw(st.sampled_from([192, 1000, 4096])),
        vocab=data.draw(st.sampled_from([256, 3000])), tied=data.draw(st.booleans()),
    )  # fmt: skip
    fmt = data.draw(st.sampled_from([Format("float32"), INT4]))
    ask = settle_context(
        Ask(
            prompt_tokens=data.draw(st.sampled_from([1, 40, 300])), output_tokens=4, batch=data.draw(st.integers(1, 3)),
            context=data.draw(st.sampled_from([310, 512])), kv=data.draw(st.sampled_from([None, "int8"])),
            resident_bytes=data.draw(st.none() | st.integers(0, 8 * MIB)),
            host_memory_bytes=data.draw(st.none() | st.integers(590 * MIB, 640 * MIB)),
            device_memory_bytes=data.draw(st.integers(300 * MIB, 360 * MIB)),
        ),
        spec,
    )  # fmt: skip
    for candidate in pipo.candidates(Problem(ask, spec, fmt, WITH_DEVICE)):
        plan = candidate.plan
        check_plan(plan, spec, fmt)
        used = plan.tier_bytes()
        assert used["gpu0"] <= (ask.device_memory_bytes or 0)
        assert used["host"] <= (ask.host_memory_bytes or 16 * GIB)
        lowering = Lowering(plan)
        tasks = [task for p in passes.prefill(plan, 0, 3, passes.DECODE) for task in lowering.step(p)]
        tasks += lowering.step(passes.decode(plan, (0,), (3,), None))
        verify(tasks, plan.arenas)
        assert predict(plan, ask, WITH_DEVICE).decode_tokens_per_s > 0
