"""FlexGen's policy search: the program against brute force, its cost against simulation, the plans that come of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product
from math import exp, log
from pathlib import Path

import pytest

from bench.papers.predict_flexgen import memory_example
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.planner.predict import predict
from penstock.planner.solve import policy_lp, settle_context
from penstock.planner.solve.limits import fits
from penstock.planner.solve.policy_cost import Terms, kv_bytes, modes, weight_bytes
from penstock.planner.solve.policy_lp import BATCH_STEP, MOST_BATCHES, Found, blocks, candidates, plan_of, search
from penstock.planner.solve.policy_plan import ATTENDS, Shape, kv_layers, split_granules, whole_layers
from penstock.planner.solve.policy_program import (
    COMPUTE,
    KINDS,
    LANES,
    READ,
    TO_DEVICE,
    TO_HOST,
    WRITE,
    Line,
    Policy,
    Program,
    Shares,
    evaluate,
    lanes,
    settled,
    solve,
)
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec, Rate, Sharing, Tier
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import DEVICE, Plan
from penstock.units import GIB, MIB, TIB
from tests.pure.machine import model

FP16 = Format("float16")
FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
MACHINES, CASES = (200, 1000) if FUZZ else (100, 100)  # `make fuzz` takes them all; a machine takes 0.3 s
STEPS = {
    steps: [(a / steps, b / steps, (steps - a - b) / steps) for a in range(steps + 1) for b in range(steps + 1 - a)]
    for steps in (3, 6)
}
ONE: Shares = (1.0, 0.0, 0.0)

Case = tuple[Ask, ModelSpec, Format, MachineSpec]


def between(r: random.Random, low: float, high: float) -> float:
    """Log-uniform."""
    return exp(r.uniform(log(low), log(high)))


def random_machine(r: random.Random, weights: float, kv: float, device: bool) -> MachineSpec:
    """Any rates from a slow laptop's to a server's. RAM has room for 0.1 to 1 of weights and 0 to 1 of KV, the device
    for 0 to 0.7 of each: so that there is something to place."""

    def rate(lane: str, op: str, bytes_per_s: float, flops_per_s: float = 0.0, alpha_s: float = 3e-6) -> Rate:
        s_per_flop = 1 / flops_per_s if flops_per_s else 0.0
        return Rate(lane, op, "*", alpha_s * between(r, 1 / 3, 3), 1 / bytes_per_s, s_per_flop)

    def processor(lane: str, bytes_per_s: tuple[float, float], flops_per_s: tuple[float, float]) -> list[Rate]:
        overhead = Rate(lane, "task", "*", between(r, 1e-6, 2e-5), 0.0)
        ops = (rate(lane, op, between(r, *bytes_per_s), between(r, *flops_per_s)) for op in ("*", "attend"))
        return [*ops, overhead]

    rates = [
        *processor("host", (5e9, 200e9), (5e10, 5e12)),
        Rate("host", "call", "*", between(r, 1e-6, 1e-5), 0.0),
        Rate("host", "pass", "*", between(r, 1e-5, 3e-4), 0.0),
        rate("disk0", "*", between(r, 0.3e9, 10e9), alpha_s=5e-5),
        rate("disk_write0", "*", between(r, 0.3e9, 5e9), alpha_s=5e-5),
    ]
    base = 150 * MIB
    tiers = [Tier("host", int(base + weights * r.uniform(0.1, 1) + kv * r.uniform(0, 1))), Tier("disk0", TIB)]
    if device:
        rates += processor(DEVICE, (50e9, 2000e9), (2e12, 100e12))
        rates += [rate(lane, "*", between(r, 2e9, 60e9)) for lane in ("h2d0", "d2h0")]
        tiers.append(Tier(DEVICE, int(base + weights * r.uniform(0, 0.7) + kv * r.uniform(0, 0.7))))
    shared = [Sharing("host", lane, r.uniform(1, 1.5)) for lane in ("disk0", "h2d0", "d2h0")]
    return MachineSpec(
        "random",
        tuple(tiers),
        tuple(rates),
        8,
        process_bytes=64 * MIB,
        sharing=tuple(shared if r.random() < 0.5 else ()),
    )


def random_case(seed: int, **fields: bool) -> Case:
    """A small model, but not a tiny one: where a layer's bytes take no longer than a move's fixed part, cutting it into
    units is what costs, and plans of this solver are none that anybody needs."""
    r = random.Random(seed)
    d = r.choice((1024, 2048, 3072))
    heads = d // 128
    kv_heads = r.choice((heads, max(1, heads // 4)))
    spec = model(
        r.choice((12, 16, 24)), d, heads, kv_heads, 4 * d, dtype="float16", max_positions=4096,
        vocab=r.choice((2048, 8192)),
    )  # fmt: skip
    fmt = r.choice((FP16, parse_format("int4")))
    prompt, output, batch = r.choice((32, 64, 128, 256)), r.choice((16, 32, 64)), r.choice((4, 8, 12, 16, 24))
    ask = Ask(prompt, output, batch, prompt + output, "throughput")
    kv = kv_bytes(spec, FP16, batch, prompt + output)
    device = fields.get("device", r.random() < 0.7)
    return ask, spec, fmt, random_machine(r, weight_bytes(spec, fmt), kv, device)


def simulated_s(found: Found, plan: Plan) -> float:
    """What FlexGen's T counts: the prompts, and a step for every token but the first."""
    ask = found.shape.ask
    prediction = predict(plan, ask, found.shape.machine, spread=False)
    seqs = min(ask.batch, found.shape.block)
    return prediction.ttft_s + (ask.output_tokens - 1) * seqs / prediction.decode_tokens_per_s


# -- the program --------------------------------------------------------------------------------------------


def random_line(r: random.Random) -> Line:
    def shares() -> Shares:
        return r.random(), r.random(), r.random()

    return Line(r.random(), shares(), shares(), shares())


def random_program(r: random.Random) -> Program:
    names = (READ, WRITE, TO_DEVICE, TO_HOST, "gpu0", "host")
    prefill, decode = ({name: random_line(r) for name in names} for _ in range(2))
    memory = {tier: random_line(r) for tier in ("device", "host", "disk")}
    return Program(
        layers=r.randint(1, 100),
        steps=r.randint(0, 100),
        block=4 * r.randint(1, 30),
        prefill=prefill,
        decode=decode,
        memory=memory,
        capacity={tier: r.uniform(1.0, 3.5) for tier in memory},
        allowed=dict.fromkeys(KINDS, (True, True, True)),
    )


def grid(program: Program, steps: int) -> list[Policy]:
    """Policies that fit, of shares in steps."""
    options = (
        [
            share
            for share in STEPS[steps]
            if all(free or not x for x, free in zip(share, program.allowed[kind], strict=True))
        ]
        for kind in KINDS
    )
    return [policy for shares in product(*options) if program.fits(policy := Policy(*shares), 1e-9)]


def test_the_program_is_never_worse_than_a_grid() -> None:
    """Any lines at all: the optimum satisfies every constraint and no grid point beats it."""
    infeasible = 0
    for seed in range(CASES):
        program = random_program(random.Random(seed))
        found, points = solve(program), grid(program, 3)
        if found is None:
            assert not points
            infeasible += 1
            continue
        assert program.fits(found.policy, 1e-6)
        for kind in KINDS:
            assert sum(getattr(found.policy, kind)) == pytest.approx(1)
        assert found.seconds <= min(map(program.seconds, points), default=float("inf")) * (1 + 1e-6)
        assert found.seconds >= program.least_s * (1 - 1e-9)
    assert 0 < infeasible < CASES / 2


def test_real_programs_are_never_worse_than_a_grid() -> None:
    """Programs of random machines and models, in every mode."""
    checked = 0
    for seed in range(CASES):
        ask, spec, fmt, machine = random_case(seed)
        machine = replace(machine, sharing=())
        shape = random.Random(seed).choice(list(policy_lp.shapes(ask, spec, fmt, machine)))
        terms = Terms(shape)
        for mode in modes(shape):
            program = terms.program(mode)
            found, points = solve(program), grid(program, 6)
            if found is None:
                assert not points
                continue
            checked += 1
            assert program.fits(found.policy, 1e-6)
            assert found.seconds <= min(map(program.seconds, points), default=float("inf")) * (1 + 1e-6)
    assert checked > CASES


def test_kv_in_whole_layers_is_the_best_of_all_counts() -> None:
    """Seconds are convex in a share, so of two tiers the best number of layers lies beside the program's."""
    checked = 0
    for seed in range(CASES):
        ask, spec, fmt, machine = random_case(seed)
        machine = replace(machine, sharing=())
        shape = random.Random(seed).choice(list(policy_lp.shapes(ask, spec, fmt, machine)))
        terms, layers = Terms(shape), len(spec.layers)
        for mode in modes(shape):
            program = terms.program(mode)
            relaxed = solve(program) if sum(mode.kv) == 2 and mode.kv[shape.moved_tier] else None
            if relaxed is None:
                continue
            near = [solve(program, kv) for kv in whole_layers(layers, relaxed.policy.kv, shape.moved_tier)]
            other, every = 0 if mode.kv[0] else 1, []
            for moved in range(0, layers + 1, 2):
                kv = [0.0, 0.0, 0.0]
                kv[shape.moved_tier], kv[other] = moved / layers, (layers - moved) / layers
                every.append(solve(program, (kv[0], kv[1], kv[2])))
            best, found = (min((x.seconds for x in those if x is not None), default=None) for those in (every, near))
            assert (found is None) == (best is None)
            if found is not None and best is not None:
                assert found <= best * (1 + 1e-6)
                checked += 1
    assert checked > CASES / 10


def test_a_stage_takes_as_long_as_its_busiest_lane() -> None:
    """T_pre and T_gen are the maximum over five lanes, disk writes one of them; T = T_pre · l + T_gen · (n - 1) · l."""
    assert set(LANES) == {READ, WRITE, TO_DEVICE, TO_HOST, COMPUTE} and len(LANES) == 5
    policy = Policy(ONE, ONE, ONE)
    for slow in LANES:
        stage = {lane: Line(2.0 if lane == slow else 1.0) for lane in (*LANES[:4], "gpu0")}
        if slow == COMPUTE:
            stage |= {"gpu0": Line(0.5), "host": Line(1.5)}  # one lane: inside a layer one waits for the other
        program = replace(random_program(random.Random(1)), layers=10, steps=31, prefill=stage, decode=stage)
        found = evaluate(program, policy)
        assert set(lanes(stage, policy)) == set(LANES)
        assert (found.t_pre_s, found.t_gen_s, found.busiest) == (2.0, 2.0, (slow, slow))
        assert found.seconds == pytest.approx(2.0 * 10 + 2.0 * 31 * 10)


def test_lanes_that_share_ram_slow_each_other() -> None:
    program = replace(random_program(random.Random(5)), sharing=(Sharing("host", READ, 1.5),))
    policy = Policy(ONE, ONE, ONE)
    alone, together = evaluate(program, policy), settled(program, policy)
    assert alone.seconds <= together.seconds <= 1.5 * alone.seconds


# -- FlexGen's own figures ----------------------------------------------------------------------------------


def test_the_memory_of_opt_175b() -> None:
    """l · (8·h1² + 4·h1·h2) bytes of weights, 4·b·l·h1·(s + n) of KV."""
    spec, layers, h1, h2 = describe(Path("opt-175b"))[0], 96, 12288, 49152
    assert weight_bytes(spec, FP16) == layers * (8 * h1**2 + 4 * h1 * h2) == 324 * GIB
    assert kv_bytes(spec, FP16, 512, 512 + 32) == 4 * 512 * layers * h1 * (512 + 32)
    assert kv_bytes(spec, FP16, 512, 512 + 32) / TIB == pytest.approx(1.195, abs=5e-4)
    found = memory_example()
    assert (found["weights_gib"], found["kv_tib"]) == (324, 1.1953125)


@pytest.mark.parametrize("batch", [4, 5, 31, 64, 256, 1000])
@pytest.mark.parametrize("whole", [True, False])
def test_blocks(batch: int, whole: bool) -> None:
    """A batch on the device is a multiple of 4, and a block has fewer than 20."""
    found = blocks(batch, whole)
    assert found and len(found) < 150
    for gpu_batch, batches in found:
        assert gpu_batch % BATCH_STEP == 0 and 1 <= batches <= MOST_BATCHES < 20
        assert (batches - 1) * gpu_batch < batch
        assert not whole or gpu_batch * batches >= batch


# -- rounding -----------------------------------------------------------------------------------------------


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
    assert kv_layers(6, (0.5, 0.5, 0.0)) == [0, 1] * 3
    assert kv_layers(4, (0.0, 0.0, 1.0)) == [2] * 4
    assert kv_layers(7, (3 / 7, 0.0, 4 / 7))[-1] == 2
    for layers in (5, 6, 12):
        for raw in product(range(5), repeat=3):
            if sum(raw):
                shares = tuple(x / sum(raw) for x in raw)
                for moved in (1, 2):
                    for found in whole_layers(layers, shares, moved):  # type: ignore[arg-type]
                        counts = [round(share * layers) for share in found]
                        assert sum(counts) == layers and (counts[moved] % 2 == 0 or counts[moved] == layers)
                        assert [kv_layers(layers, found).count(tier) for tier in range(3)] == counts


@pytest.mark.parametrize("part", range(10))
def test_the_programs_cost_is_that_of_its_plan(part: int) -> None:
    """On 200 random machines (100 in `make test`), the best policy of all: T by the program and by simulating the
    rounded plan differ by less than a tenth (FlexGen's own model drifts from its runtime; this one may not)."""
    for seed in range(part * MACHINES // 10, (part + 1) * MACHINES // 10):
        ask, spec, fmt, machine = random_case(seed)
        best = min(search(ask, spec, fmt, machine).values(), key=lambda f: f.seconds_a_sequence, default=None)
        if best is None:
            continue
        plan = plan_of(best)
        assert plan is not None and fits(plan, ask, machine), f"machine {seed}: {best.shape}"
        by_program = settled(best.program, best.shape.shares_of(plan)).seconds
        assert simulated_s(best, plan) == pytest.approx(by_program, rel=0.1), f"machine {seed}"


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
        for candidate in candidates(ask, spec, fmt, machine):
            assert fits(candidate.plan, ask, machine) and len(candidate.reasons) == 3
            assert candidate.plan.batch_seqs % BATCH_STEP == 0 and candidate.plan.batches_per_pass < 20
            if not candidate.cannot_run:
                check_plan(candidate.plan, spec, fmt)
            verified(candidate.plan)
            seen.add(candidate.cannot_run)
    assert len(seen) == 2


@pytest.mark.parametrize("attends", ATTENDS)
@pytest.mark.parametrize("device", [False, True])
def test_any_shares_are_a_plan(device: bool, attends: str) -> None:
    """Whatever a mode allows becomes a plan that the runtime accepts (but scores on the CPU), in a right order."""
    if not device and attends != "device":
        return
    r = random.Random(9)
    for seed in range(10):
        ask, spec, fmt, machine = small_case(seed, device)
        batches = r.choice((1, 2))
        main = DEVICE if device else "host"
        shape = Shape(ask, spec, fmt, machine, main, 8 // batches, batches, 24 * r.choice((1, 2, 4)), attends)
        for mode in modes(shape):
            weights, kv = (random_shares(r, free) for free in mode)
            plan = shape.plan(weights, kv)
            if attends != "cpu scores" or all(home.attend == DEVICE for home in plan.kv):
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
    shape = Shape(ask, spec, fmt, machine, DEVICE, 4, 2, 4 * ask.prompt_tokens, "cpu scores")
    plan = shape.plan(ONE, (0.0, 1.0, 0.0))
    lowering, seqs = Lowering(plan), range(8)
    prompt = [c for p in passes.prompts(plan, seqs, (ask.prompt_tokens,) * 8, passes.DECODE)
              for task in lowering.step(p) for c in [(task.lanes[0], call) for call in task.calls]]  # fmt: skip
    step = [(task.lanes[0], call) for task in lowering.step(passes.decode(plan, seqs, (40,) * 8, passes.DECODE))
            for call in task.calls]  # fmt: skip
    assert {lane for lane, call in prompt if call.op == "attend"} == {DEVICE}
    assert {lane for lane, call in step if call.op == "attend"} == {"host"}
    assert not any(call.op == "kv_load" for _, call in prompt + step)
    a, layers = spec.layers[0].attention, len(spec.layers)
    new = 8 * 2 * a.kv_heads * a.head_dim * 2
    assert sum(call.bytes for _, call in step if call.op == "kv_save") == layers * new
    crossed = [call.args[0] for _, call in step if call.op == "copy"]
    assert crossed.count("q") == crossed.count("a") == 2 * layers  # of each batch


def test_none_where_it_does_not_apply() -> None:
    ask, spec, fmt, machine = random_case(2)
    for other in (replace(ask, batch=1), replace(ask, resident_bytes=MIB), replace(ask, score=True)):
        assert not list(candidates(other, spec, fmt, machine))
    tiny = replace(machine, tiers=tuple(replace(tier, bytes=65 * MIB) for tier in machine.tiers))
    assert not list(candidates(ask, spec, fmt, tiny))


def test_kv_stays_where_the_user_wants_it() -> None:
    for seed in range(8):
        ask, spec, fmt, machine = random_case(seed, device=False)
        for home, allowed in (("memory", "host"), ("disk", "disk0")):
            for candidate in candidates(replace(ask, kv_home=home), spec, fmt, machine):
                assert {kv.home for kv in candidate.plan.kv} == {allowed}


def test_several_batches_share_what_streams() -> None:
    """A machine that has to stream weights takes a block of several sequences, not one after the other."""
    ask, spec, fmt, machine = random_case(4, device=True)
    machine = replace(machine, tiers=(Tier("host", 16 * GIB), Tier("disk0", TIB), Tier(DEVICE, 300 * MIB)))
    ask = replace(ask, batch=24)
    found = search(ask, spec, fmt, machine)
    assert set(found) == set(ATTENDS)
    best = min(found.values(), key=lambda f: f.seconds_a_sequence)
    assert best.shape.block >= 8


def test_highs_comes_only_with_a_program() -> None:
    code = "import sys; from penstock.planner.solve import policy_lp; print('highspy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
