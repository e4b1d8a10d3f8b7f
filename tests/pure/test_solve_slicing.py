"""ScheInfer's closed forms against brute force, and the plans that come of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.published import FIGURES, TABLE_I
from bench.papers.scheinfer import predicted
from penstock.graph.check_plan import check_plan
from penstock.graph.passes import one_batch
from penstock.planner.cost import Cost
from penstock.planner.predict import predict
from penstock.planner.programs.slicing import (
    FfnBlock,
    Lanes,
    Option,
    SliceTime,
    assign,
    best_n_g,
    best_r_cg,
    finish_s,
)
from penstock.planner.solve import scheinfer, settle_context
from penstock.planner.solve.ours import device
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer import FREE, PAPER, plan_of
from penstock.planner.solve.scheinfer.layer_work import Estimate, LayerWork, Shares
from penstock.planner.solve.scheinfer.rows import with_rows
from penstock.planner.solve.skeleton import Skeleton, device_skeleton
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec, Rate, Sharing
from penstock.spec.places import GPU
from penstock.units import GIB, MIB
from tests.pure.machine import LLAMA_1B, WITH_DEVICE

BF16 = Format("bfloat16")

STEPS = 2000  # of the grid that r_CG is searched on

seconds = st.floats(0, 1e-2)
some_seconds = st.floats(1e-6, 1e-2)
factors = st.sampled_from([1.0, 1.0, 1.2, 1.5, 2.0, 4.0])
shares = st.sampled_from([0.0, 0.0, 0.1, 0.37, 0.8, 1.0])
lanes = st.builds(
    Lanes, cpu_factor=factors, link_factor=factors, ahead_s=st.sampled_from([0.0]) | seconds,
    ring_s=st.sampled_from([inf, 1e-4, 2e-3]), link_also_s=st.sampled_from([0.0, 0.0, 1e-3]),
    cpu_also_s=st.sampled_from([0.0, 0.0, 1e-3]),
)  # fmt: skip
lines = st.builds(SliceTime, fixed_s=st.sampled_from([0.0, 1e-5, 1e-3]), whole_s=some_seconds)
blocks = st.builds(FfnBlock, lanes=lanes, cpu=lines, link=lines, gpu=lines)


@given(blocks, shares)
def test_r_cg_is_as_good_as_brute_force(block: FfnBlock, r_gg: float) -> None:
    r_cg, found = best_r_cg(block, r_gg)
    most = 1 - r_gg
    assert 0 <= r_cg <= most
    assert found == finish_s(block.lanes, block.times(r_cg, r_gg))
    grid = min(finish_s(block.lanes, block.times(most * i / STEPS, r_gg)) for i in range(STEPS + 1))
    assert found <= grid * (1 + 1e-9)
    # And it is no better than what a grid can find: within a step of the steepest line.
    slopes = block.cpu.whole_s + block.link.whole_s + block.gpu.whole_s
    fixed_s = 0.0 if 0 < r_cg < most else 4 * (block.cpu.fixed_s + block.link.fixed_s + block.gpu.fixed_s + 1e-3)
    assert found >= grid - 8 * slopes * most / STEPS - fixed_s


@given(st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), factors, factors)
def test_cpu_and_link_alone_have_a_formula(cpu_s: float, link_s: float, c: float, k: float) -> None:
    """As derived in the module: one of them alone, or both, ending together."""
    block = FfnBlock(Lanes(cpu_factor=c, link_factor=k), SliceTime(0, cpu_s), SliceTime(0, link_s), SliceTime(0, 1e-12))
    r_cg, found = best_r_cg(block)
    together = c * cpu_s / (c * cpu_s + k * link_s)
    at_once = together * k * link_s
    assert found == pytest.approx(min(cpu_s, link_s, at_once), rel=1e-6)
    if at_once < 0.999 * min(cpu_s, link_s):
        assert r_cg == pytest.approx(together, rel=1e-6)
    if k == 1 and abs(link_s * (1 - 1 / c) / cpu_s - 1) > 1e-3:
        assert (r_cg == 0) == (link_s * (1 - 1 / c) > cpu_s)


def test_table_i_gives_029_not_018() -> None:
    """The paper's own fits of bed A and LLaMA-2-70B in its own closed form, where 0.18 is published (section V-E2)."""
    fit = {(f.what, f.weights): f for f in TABLE_I if f.machine == "server-a6000-48gb"}
    work, nbytes = 8192 * 28672, 8192 * 28672 / 2  # one product, 4 bits a weight
    cpu, gpu, link = (fit[key] for key in (("cpu", "int4"), ("gpu", "int4"), ("link", "")))
    block = FfnBlock(
        Lanes(),
        SliceTime(cpu.alpha_s, work * cpu.beta_s), SliceTime(link.alpha_s, nbytes * link.beta_s),
        SliceTime(gpu.alpha_s, work * gpu.beta_s),
    )  # fmt: skip
    r_cg, _ = best_r_cg(block)
    assert r_cg == pytest.approx(0.29, abs=0.03)


options = st.lists(st.tuples(st.integers(1, 6), st.floats(0, 1)), max_size=3).map(
    lambda steps: [Option(0, 1.0), *(Option(nbytes, s) for nbytes, s in steps)]
)


@given(st.lists(options, min_size=1, max_size=4), st.integers(0, 16))
def test_greedy_is_within_one_step_of_the_best_assignment(items: list[list[Option]], budget: int) -> None:
    """Any sizes: what is missing is less than one step saves, the largest there is."""
    chosen = assign(items, budget)
    assert sum(item[i].nbytes for item, i in zip(items, chosen, strict=True)) <= budget
    found = sum(item[i].seconds for item, i in zip(items, chosen, strict=True))
    best = min(sum(o.seconds for o in picked) for picked in product(*items) if sum(o.nbytes for o in picked) <= budget)
    step = max(1.0 - o.seconds for item in items for o in item)
    assert best <= found + 1e-12 and found <= best + step + 1e-12


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 12),
    st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_greedy_is_exact_up_to_a_granule(gains: list[list[float]], budget: int, other: int, alike: bool) -> None:
    """Granules that save less and less: exact where they have one size; else a granule's saving at most is missing."""
    items = []
    for i, each in enumerate(gains):
        size = other if i % 2 and not alike else 1
        left_s = 5.0
        item = [Option(0, left_s)]
        for n, saved in enumerate(sorted(each, reverse=True), 1):
            left_s -= saved
            item.append(Option(n * size, left_s))
        items.append(item)
    chosen = assign(items, budget)
    found = sum(item[i].seconds for item, i in zip(items, chosen, strict=True))
    best = min(sum(o.seconds for o in picked) for picked in product(*items) if sum(o.nbytes for o in picked) <= budget)
    granule = 0.0 if alike else max(max(each) for each in gains)
    assert best - 1e-9 <= found <= best + granule + 1e-9


@given(st.lists(some_seconds, min_size=1, max_size=90))
def test_n_g_is_the_best_of_all(each: list[float]) -> None:
    n_g, found = best_n_g(each.__getitem__, len(each) - 1)
    assert found == min(each) and n_g == each.index(found)


# -- plans ----------------------------------------------------------------------------------------------

SHARED = replace(WITH_DEVICE, sharing=(Sharing("host", "h2d0", 1.5), Sharing("h2d0", "host", 1.2)))


def slower(machine: MachineSpec, lane: str, factor: float) -> MachineSpec:
    rates = tuple(
        replace(r, s_per_byte=r.s_per_byte * factor, s_per_flop=r.s_per_flop * factor) if r.lane == lane else r
        for r in machine.rates
    )
    return replace(machine, rates=rates)


def decode_s(skeleton: Skeleton, lifted: float) -> float:
    """Simulated, with all FFNs in RAM and the rest on the device."""
    plan = replace(skeleton, lifted=(lifted,) * skeleton.problem.layers)
    spec = skeleton.problem.spec
    there = {f"{i}.attn": spec.layers[i].attention.kv_heads for i in range(len(spec.layers))}
    every = {part.key: part.granules for part in plan.plan({}, {}).parts.values() if part.kind in ("ffn", "embed")}
    there["embed"] = every.pop("embed")
    return (
        1 / predict(plan.plan(there, every), skeleton.problem.ask, skeleton.problem.machine, False).decode_tokens_per_s
    )


@pytest.mark.parametrize("machine", [WITH_DEVICE, SHARED], ids=["RAM to each", "RAM shared"])
@pytest.mark.parametrize(("lane", "factor"), [("host", 1), ("host", 4), ("h2d0", 3)])
def test_r_cg_is_right_where_it_is_simulated(machine: MachineSpec, lane: str, factor: float) -> None:
    """The closed form's share against a grid of simulated plans, and its seconds against the simulated ones."""
    machine = slower(machine, lane, factor)
    ask = settle_context(Ask(context=512), LLAMA_1B)
    skeleton = device_skeleton(Problem(ask, LLAMA_1B, BF16, machine), 64, len(LLAMA_1B.layers), lifted=0.0)
    work = LayerWork(Problem(ask, LLAMA_1B, BF16, machine))
    estimate = Estimate(work, 64, Shares(), len(LLAMA_1B.layers), True)
    lifted = estimate.lifted()
    found = decode_s(skeleton, lifted[0])
    assert found <= 1.04 * min(decode_s(skeleton, i / 8) for i in range(9))
    assert found == pytest.approx(estimate.pass_s(work.decode(), lifted), rel=0.1)


def test_the_link_slows_the_cpu_down() -> None:
    """With RAM shared less is lifted than one that knows nothing of it would have lifted, or the CPU takes it all."""
    ask = settle_context(Ask(context=512), LLAMA_1B)
    crowded = replace(WITH_DEVICE, sharing=(Sharing("host", "h2d0", 3.0),))

    def block(machine: MachineSpec) -> FfnBlock:
        step = one_batch("decode", 1, 1, 100)
        found = LayerWork(Problem(ask, LLAMA_1B, BF16, machine)).ffn(LLAMA_1B.layers[0], step, Shares())
        return replace(found, lanes=replace(found.lanes, ahead_s=0.0))

    assert block(crowded).lanes.cpu_factor == Cost(crowded).factor("host", frozenset({"h2d0"})) == 3.0
    assert best_r_cg(block(WITH_DEVICE))[0] > 0.2
    assert best_r_cg(block(crowded))[0] == 0  # 20 GB/s of lifting would cost 27 of the CPU's 40


@pytest.mark.parametrize(("mib", "prompt"), [(500, 16), (900, 400), (1500, 16), (2300, 400)])
def test_slices_fit_and_are_as_good_as_any_order(mib: int, prompt: int) -> None:
    """Within both limits, a granule or two and a huge page an arena short of the device's; never slower than the best
    of the plans that fill it in a fixed order, to what the solver calls equal."""
    ask = settle_context(
        Ask(context=512, prompt_tokens=prompt, device_memory_bytes=mib * MIB, output_tokens=32), LLAMA_1B
    )
    found, *_ = scheinfer.candidates(Problem(ask, LLAMA_1B, BF16, SHARED))
    check_plan(found.plan, LLAMA_1B, BF16)
    used = found.plan.tier_bytes()
    assert mib * MIB - 40 * MIB < used[GPU.executor] <= mib * MIB and used["host"] <= 16 * GIB
    assert found.strategy == scheinfer.NAME
    lifts = any(unit.placement in ("CG", "DG") and unit.part != "embed" for unit in found.plan.units)
    assert len(found.reasons) == 3 + lifts
    others = [c.plan for c in device.candidates(Problem(ask, LLAMA_1B, BF16, SHARED))]
    best_s = min(predict(plan, ask, SHARED, False).total_s for plan in others)
    assert predict(found.plan, ask, SHARED, False).total_s <= 1.05 * best_s


def test_memory_goes_where_a_byte_saves_most() -> None:
    """Where each crossing to the CPU takes 0.3 ms, attention is the device's, unless KV for a long context makes it
    dear: then FFNs come first. The paper's attention is the device's always."""
    slow = replace(SHARED, rates=(Rate("host", "task", "*", 3e-4, 0.0), *SHARED.rates))
    ask = Ask(context=64, prompt_tokens=16, output_tokens=16, device_memory_bytes=900 * MIB)
    short, long, paper = (
        scheinfer.solve_slices(Problem(settle_context(replace(ask, context=n), LLAMA_1B), LLAMA_1B, BF16, slow), wanted)
        for n, wanted in ((64, FREE), (16384, FREE), (64, PAPER))
    )
    assert short is not None and long is not None and paper is not None
    assert sum(short[1].attends) >= 15 and sum(long[1].attends) <= 1
    assert all(paper[1].attends) and paper[1].on_device["0.attn"] == 8
    # Equal layers keep equal shares, to a step.
    assert max(paper[1].r_gg) - min(paper[1].r_gg) < 1.2 / 16


def test_n_g_stands_in_the_reasons() -> None:
    """Of all rows of a chunk or none, a slow link takes none, a slow CPU all."""
    ask = settle_context(Ask(context=512, prompt_tokens=256, device_memory_bytes=900 * MIB), LLAMA_1B)
    for lane, factor, word in (("h2d0", 30.0, "none"), ("host", 4.0, "all")):
        found, *_ = scheinfer.candidates(Problem(ask, LLAMA_1B, BF16, slower(SHARED, lane, factor)))
        assert f"it takes {word}" in found.reasons[2]
        cpu = [unit for unit in found.plan.units if unit.part.endswith(".ffn") and unit.decode == "host"]
        assert cpu and {unit.prefill for unit in cpu} == {"host" if word == "none" else GPU.executor}


def test_each_length_has_the_best_n_g() -> None:
    """By trying all, and by simulation: prompts below the break-even length come first sooner than with all their rows
    on the device, and the reason names that length."""
    ask = settle_context(Ask(context=512, prompt_tokens=256, device_memory_bytes=900 * MIB), LLAMA_1B)
    problem = Problem(ask, LLAMA_1B, BF16, slower(WITH_DEVICE, "h2d0", 4.0))
    solved = scheinfer.solve_slices(problem)
    assert solved is not None
    skeleton = device_skeleton(problem, solved[0].chunk_rows, attention_layers=0, lifted=0.0)
    plan = with_rows(problem, plan_of(skeleton, replace(solved[1], prompts=True)), share=True)
    assert plan is not None
    check_plan(plan, LLAMA_1B, BF16)
    table, work = plan.device_rows[0], LayerWork(problem, plan.ring_bytes[GPU.executor])
    shares = Shares(solved[1].r_gg[0], attends=solved[1].attends[0])
    for rows in (plan.least_device_rows - 1, *table.rows):
        step = one_batch("prefill", 1, rows, max(0, (256 - rows) // 2))
        seconds = work.prompt_s(LLAMA_1B.layers[0], step, shares, solved[1].r_cg[0])
        n_g = table.on_device(rows) if rows >= plan.least_device_rows else 0
        assert seconds(n_g) == min(map(seconds, range(rows + 1)))
    short = replace(ask, prompt_tokens=plan.least_device_rows // 2)
    all_there = replace(plan, device_rows=())
    ours, theirs = (predict(each, short, problem.machine, False).ttft_s for each in (plan, all_there))
    assert ours < theirs
    reasons = [candidate.reasons[2] for candidate in scheinfer.candidates(problem)]
    assert any(f"none of prompts shorter than {plan.least_device_rows} tokens" in reason for reason in reasons)


def test_no_slices_where_they_do_not_apply() -> None:
    """Without a device, with all of it there, and where the rest would have to come from a disk."""
    some = Ask(context=512, device_memory_bytes=600 * MIB)
    assert list(scheinfer.candidates(Problem(some, LLAMA_1B, BF16, WITH_DEVICE)))
    for ask in (
        replace(some, device_memory_bytes=0), replace(some, device_memory_bytes=8 * GIB),
        replace(some, resident_bytes=GIB), replace(some, host_memory_bytes=GIB),
    ):  # fmt: skip
        assert list(scheinfer.candidates(Problem(ask, LLAMA_1B, BF16, WITH_DEVICE))) == []


# -- the paper's rows -----------------------------------------------------------------------------------


def test_fewer_threads_lift_more() -> None:
    """Section V-E2's optima, 0.18 to 0.71 with 16 to 2 threads, within a third of ours."""
    figures = [f for f in FIGURES if f.paper == "ScheInfer"]
    rows = [f for f in figures if f.metric == "share"]
    shares = [predicted(row, ()).value for row in rows]
    assert len(shares) == len(rows) == 4 and shares == sorted(shares)
    assert all(0.67 < share / row.value < 1.5 for share, row in zip(shares, rows, strict=True))


def test_rows_of_models_with_experts() -> None:
    """Section V-E3 of Mixtral: slices gain over whole layers, as of a dense model, and say what stands for experts."""
    figures = [f for f in FIGURES if f.paper == "ScheInfer" and f.model == "mixtral-8x7b"]
    assert len(figures) == 6
    found = predicted(next(f for f in figures if "V-E3" in f.table), ())
    assert 1 < found.value < 1.5 and "a dense FFN of those that a token goes to" in found.note
