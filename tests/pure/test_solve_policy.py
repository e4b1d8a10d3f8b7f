"""FlexGen's policy search: the plans that come of it, and its cost against simulation."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from penstock.errors import DoesNotFit
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.planner.bound import score_s
from penstock.planner.programs.block_sizes import BATCH_STEP, blocks
from penstock.planner.programs.policy import Shares
from penstock.planner.programs.whole_layers import spread_layers, whole_layers
from penstock.planner.shares import split_granules
from penstock.planner.shorten import quick
from penstock.planner.solve import settle_context, solve
from penstock.planner.solve.flexgen import candidates, plan_of, search
from penstock.planner.solve.flexgen.shape import ATTENDS, BlockShape, chunk_options
from penstock.planner.solve.flexgen.terms import modes
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import Capacity, MachineSpec
from penstock.spec.parts import parts
from penstock.spec.places import GPU
from penstock.spec.plan import Plan
from penstock.units import GIB, MIB, TIB
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model
from tests.pure.policy_cases import CASES, FP16, FUZZ, Case, random_case

MACHINES = 400 if FUZZ else 40  # a machine takes half a second
DRAWN = 6  # policies that are drawn for a machine
ONE: Shares = (1.0, 0.0, 0.0)


def simulated_s(plan: Plan, problem: Problem) -> float:
    """Seconds of a token of a sequence, as `solve` ranks plans for throughput."""
    return score_s(quick(plan, problem.ask, problem.machine, spread=False), plan, problem.ask)


# -- rounding -----------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_granules_go_in_even_shares() -> None:
    r = random.Random(3)
    for _ in range(CASES):
        spec = model(r.randint(1, 12), 128, 4, r.choice((1, 2, 4)), 64 * r.randint(1, 40), dtype="float16")
        placed = [part for part in parts(spec, FP16) if part.kind in ("attn", "ffn")]
        raw = [r.random() * r.choice((0, 1)) for _ in range(3)]
        shares = tuple(x / sum(raw) for x in raw) if sum(raw) else ONE
        found = split_granules(placed, shares)  # type: ignore[arg-type]
        total, largest = sum(part.nbytes for part in placed), max(part.granule_bytes for part in placed)
        near = sum(found[part.key][0] * part.granule_bytes for part in placed)
        ram = sum((found[part.key][1] - found[part.key][0]) * part.granule_bytes for part in placed)
        assert shares[0] * total - largest <= near <= shares[0] * total + 1e-3 * largest
        assert abs(ram - shares[1] * total) <= 2 * largest
        assert shares[2] or near + ram == total


def test_layers_of_kv() -> None:
    """Even shares; the first layers have theirs at home; an even number moves, or all."""
    assert spread_layers(6, (0.5, 0.5, 0.0)) == [0, 1] * 3
    assert spread_layers(4, (0.0, 0.0, 1.0)) == [2] * 4
    assert spread_layers(7, (3 / 7, 0.0, 4 / 7))[-1] == 2
    for layers in (5, 6, 12):
        for raw in product(range(5), repeat=3):
            if sum(raw):
                shares = tuple(x / sum(raw) for x in raw)
                for moved in (1, 2):
                    for found in whole_layers(layers, shares, moved):  # type: ignore[arg-type]
                        counts = [round(share * layers) for share in found]
                        assert sum(counts) == layers and (counts[moved] % 2 == 0 or counts[moved] == layers)
                        assert [spread_layers(layers, found).count(tier) for tier in range(3)] == counts


@pytest.mark.thinned(5)
@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(10))
def test_nothing_drawn_at_random_is_faster(part: int) -> None:
    """On random machines, the best candidate by simulation, and policies of any block, mode and shares that fit: the
    program places what no draw places better, though it knows nothing of lanes that wait for each other."""
    tried = 0
    for seed in range(part * MACHINES // 10, (part + 1) * MACHINES // 10):
        ask, spec, fmt, machine = random_case(seed)
        problem, r = Problem(ask, spec, fmt, machine), random.Random(seed)
        plans = [plan_of(best) for best in search(problem).values()]
        assert all(plan is None or problem.fits(plan) for plan in plans)
        best_s = min((simulated_s(plan, problem) for plan in plans if plan is not None), default=float("inf"))
        for plan in drawn(r, problem):
            tried += 1
            assert best_s <= simulated_s(plan, problem) * 1.05, f"machine {seed}"
    assert tried > DRAWN


def drawn(r: random.Random, problem: Problem) -> list[Plan]:
    """Some plans that fit, of random blocks, ways, modes and shares. Half of the shares are all or nothing."""
    plans, main = [], GPU.executor if problem.device_bytes else "host"
    for _ in range(8 * DRAWN):
        gpu_batch, batches = r.choice(blocks(problem.ask.batch, whole=False))
        attends = r.choice(ATTENDS[:2]) if problem.device_bytes else "device"
        shape = BlockShape(problem, main, gpu_batch, batches, r.choice(chunk_options(problem, gpu_batch)), attends)
        weights, kv = (random_shares(r, free) for free in r.choice(list(modes(shape))))
        kv = r.choice(whole_layers(problem.layers, kv, shape.moved_tier) or [kv])
        plan = shape.plan(weights, kv)
        plans += [plan] if problem.fits(plan) else []
    return plans[:DRAWN]


# -- candidates ---------------------------------------------------------------------------------------------


def small_case(seed: int, device: bool) -> Case:
    """Few layers and a short prompt, so that `verify`, which is quadratic, has little to do."""
    ask, spec, fmt, machine = random_case(seed, device=device)
    ask = settle_context(replace(ask, prompt_tokens=24, output_tokens=4, batch=8, context=64), spec)
    return ask, replace(spec, layers=spec.layers[:4]), fmt, machine


def test_candidates_are_plans_that_fit_and_lower() -> None:
    """Within the limits, accepted where the runtime can run them, and in an order that holds."""
    seen: set[str] = set()
    for seed in range(16):
        ask, spec, fmt, machine = small_case(seed, device=seed % 4 != 0)
        for candidate in candidates(Problem(ask, spec, fmt, machine)):
            assert Problem(ask, spec, fmt, machine).fits(candidate.plan) and 3 <= len(candidate.reasons) <= 4
            assert candidate.plan.batch_seqs % BATCH_STEP == 0 and candidate.plan.batches_per_pass < 20
            assert not candidate.cannot_run
            check_plan(candidate.plan, spec, fmt)
            verified(candidate.plan)
            seen |= {where for reason in candidate.reasons[3:] for where in ("the CPU, where", "the device, to which")
                     if where in reason}  # fmt: skip
    assert len(seen) == 2


@pytest.mark.parametrize("attends", ATTENDS)
@pytest.mark.parametrize("device", [False, True])
def test_any_shares_are_a_plan(device: bool, attends: str) -> None:
    """Whatever a mode allows becomes a plan that the runtime accepts, in a right order."""
    if not device and attends != "device":
        return
    r = random.Random(9)
    for seed in range(10):
        ask, spec, fmt, machine = small_case(seed, device)
        batches = r.choice((1, 2))
        main = GPU.executor if device else "host"
        shape = BlockShape(
            Problem(ask, spec, fmt, machine), main, 8 // batches, batches, 24 * r.choice((1, 2, 4)), attends
        )
        for mode in modes(shape):
            weights, kv = (random_shares(r, free) for free in mode)
            plan = shape.plan(weights, kv)
            check_plan(plan, spec, fmt)
            verified(plan)


def random_shares(r: random.Random, free: tuple[bool, bool, bool]) -> Shares:
    raw = [r.random() * may for may in free]
    return raw[0] / sum(raw), raw[1] / sum(raw), raw[2] / sum(raw)


def verified(plan: Plan) -> None:
    lowering, seqs = Lowering(plan), range(plan.batch_seqs * plan.batches_per_pass)
    wanted = [*passes.prompts(plan, seqs, (24,) * len(seqs), passes.DECODE)]
    wanted += [passes.decode(plan, seqs, (24 + i,) * len(seqs), passes.DECODE) for i in range(2)]
    assert verify((task for p in wanted for task in lowering.step(p)), plan.arenas)


def test_attention_on_the_cpu_leaves_kv_where_it_is() -> None:
    """With its projections on the device: q goes down and the result comes up, K and V are saved once, nothing is
    loaded; where the prompt begins the device attends by itself."""
    ask, spec, fmt, machine = random_case(1, device=True)
    shape = BlockShape(Problem(ask, spec, fmt, machine), GPU.executor, 4, 2, 4 * ask.prompt_tokens, "cpu scores")
    plan = shape.plan(ONE, (0.0, 1.0, 0.0))
    lowering, seqs = Lowering(plan), range(8)
    prompt = [c for p in passes.prompts(plan, seqs, (ask.prompt_tokens,) * 8, passes.DECODE)
              for task in lowering.step(p) for c in [(task.lanes[0], call) for call in task.calls]]  # fmt: skip
    step = [(task.lanes[0], call) for task in lowering.step(passes.decode(plan, seqs, (40,) * 8, passes.DECODE))
            for call in task.calls]  # fmt: skip
    assert {lane for lane, call in prompt if call.op == "attend"} == {GPU.executor}
    assert {lane for lane, call in step if call.op == "attend"} == {"host"}
    assert not any(call.op == "kv_load" for _, call in prompt + step)
    a, layers = spec.layers[0].attention, len(spec.layers)
    new = 8 * 2 * a.kv_heads * a.head_dim * 2
    assert not any(call.op == "kv_save" for _, call in step)
    crossed = [call for _, call in step if call.op == "copy"]
    assert sum(call.bytes for call in crossed if call.operands.what in ("k", "v")) == layers * new
    assert [c.operands.what for c in crossed].count("q") == [c.operands.what for c in crossed].count("a") == 2 * layers


def test_none_where_it_does_not_apply() -> None:
    ask, spec, fmt, machine = random_case(2)
    for other in (replace(ask, batch=1), replace(ask, resident_bytes=MIB), replace(ask, score=True)):
        assert not Problem(replace(other, objective="throughput"), spec, fmt, machine).wants_blocks
    tiny = replace(machine, tiers=tuple(replace(tier, bytes=65 * MIB) for tier in machine.tiers))
    assert not list(candidates(Problem(ask, spec, fmt, tiny)))


@pytest.mark.parametrize("weights", ["q5_1", "q4_k"])
def test_a_device_that_cannot_read_the_weights_has_no_plan(weights: str) -> None:
    """Formats of GGUF files are the CPU's. Without its memory there is no plan beside the device either."""
    ask = settle_context(Ask(batch=8, objective="throughput"), LLAMA_1B)
    problem = Problem(ask, LLAMA_1B, parse_format(weights), WITH_DEVICE)
    assert not problem.has_device and problem.device_bytes == 0
    for candidate in candidates(problem):
        check_plan(candidate.plan, LLAMA_1B, problem.weights)
    check_plan(solve(ask, LLAMA_1B, problem.weights, WITH_DEVICE).plan, LLAMA_1B, problem.weights)


@pytest.mark.parametrize("machine", [MACHINE, WITH_DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize(("weights", "attention"), [("int4", "full"), ("q4_k", "full"), ("bfloat16", "top-k:0.5")])
def test_a_refusal_names_the_least_of_all_solvers(machine: MachineSpec, weights: str, attention: str) -> None:
    """With KV of all 64 sequences in memory the others take 4 GiB of RAM without a device. A block has four of them."""
    spec, fmt = model(4, 2048, 32, 8, 8192, max_positions=2048), parse_format(weights)
    ask = Ask(
        batch=64, objective="throughput", context=2048, kv_home="memory", attention=attention, host_memory_bytes=1
    )
    with pytest.raises(DoesNotFit) as refused:
        solve(ask, spec, fmt, machine)
    least = int(refused.value.numbers["minimum_bytes"])
    assert refused.value.numbers["tier"] == "host" and least < GIB
    solved = solve(replace(ask, host_memory_bytes=least), spec, fmt, machine)
    assert solved.plan.tier_bytes()["host"] <= least
    check_plan(solved.plan, spec, fmt)
    lowering, seqs = Lowering(solved.plan), range(solved.plan.batch_seqs * solved.plan.batches_per_pass)
    tasks = lowering.step(passes.decode(solved.plan, tuple(seqs), (20,) * len(seqs), passes.DECODE))
    verify(tasks, solved.plan.arenas)
    less = least - 1 if machine is MACHINE else 0.98 * least  # beside a device weights on it save a huge page or two
    with pytest.raises(DoesNotFit):
        solve(replace(ask, host_memory_bytes=int(less)), spec, fmt, machine)


def test_kv_stays_where_the_user_wants_it() -> None:
    for seed in range(8):
        ask, spec, fmt, machine = random_case(seed, device=False)
        for home, allowed in (("memory", "host"), ("disk", "disk0")):
            for candidate in candidates(Problem(replace(ask, kv_home=home), spec, fmt, machine)):
                assert {kv.home for kv in candidate.plan.kv} == {allowed}


def test_several_batches_share_what_streams() -> None:
    """A machine that has to stream weights takes a block of several sequences, not one after the other."""
    ask, spec, fmt, machine = random_case(4, device=True)
    machine = replace(
        machine, tiers=(Capacity("host", 16 * GIB), Capacity("disk0", TIB), Capacity(GPU.executor, 300 * MIB))
    )
    ask = replace(ask, batch=24)
    found = search(Problem(ask, spec, fmt, machine))
    assert {way for way, *_ in found} == set(ATTENDS)
    best = min(found.values(), key=lambda f: f.seconds_a_sequence)
    assert best.shape.block >= 8


def test_highs_comes_only_with_a_program() -> None:
    code = "import sys; from penstock.planner.solve import flexgen; print('highspy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
