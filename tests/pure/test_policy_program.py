"""FlexGen's linear program against brute force, and the figures that FlexGen gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bench.papers.flexgen import kv_bytes, weight_bytes
from penstock.planner.programs.block_sizes import BATCH_STEP, MOST_BATCHES, blocks
from penstock.planner.programs.policy import (
    COMPUTE,
    KINDS,
    LANES,
    READ,
    TO_DEVICE,
    TO_HOST,
    WRITE,
    Line,
    Policy,
    PolicyProgram,
    Shares,
    evaluate,
    solve,
)
from penstock.planner.programs.whole_layers import whole_layers
from penstock.planner.solve import flexgen
from penstock.planner.solve.flexgen import search
from penstock.planner.solve.flexgen.shape import ATTENDS, BlockShape
from penstock.planner.solve.flexgen.terms import Mode, Terms, modes
from penstock.planner.solve.problem import Problem
from penstock.serve.planning import describe
from penstock.spec.places import GPU
from penstock.units import GIB, TIB
from tests.pure.policy_cases import CASES, FP16, random_case

STEPS = {
    steps: [(a / steps, b / steps, (steps - a - b) / steps) for a in range(steps + 1) for b in range(steps + 1 - a)]
    for steps in (3, 6)
}
ONE: Shares = (1.0, 0.0, 0.0)


def random_line(r: random.Random) -> Line:
    def shares() -> Shares:
        return r.random(), r.random(), r.random()

    return Line(r.random(), shares(), shares(), shares())


def random_program(r: random.Random) -> PolicyProgram:
    prefill, decode = ({lane: random_line(r) for lane in LANES} for _ in range(2))
    memory = {tier: random_line(r) for tier in ("device", "host", "disk")}
    return PolicyProgram(
        layers=r.randint(1, 100),
        steps=r.randint(0, 100),
        prefill=prefill,
        decode=decode,
        memory={tier: (line, r.uniform(1.0, 3.5)) for tier, line in memory.items()},
        allowed=dict.fromkeys(KINDS, (True, True, True)),
    )


def fits(program: PolicyProgram, policy: Policy, tolerance: float) -> bool:
    """Whether a policy keeps every row of the program."""
    inside = (line.at(policy) <= capacity * (1 + tolerance) + tolerance for line, capacity in program.memory.values())
    shares = zip(policy.vector, (free for kind in KINDS for free in program.allowed[kind]), strict=True)
    return all(inside) and all(share <= tolerance or free for share, free in shares)


def grid(program: PolicyProgram, steps: int) -> list[Policy]:
    """Policies that fit, of shares in steps."""
    options = (
        [
            share
            for share in STEPS[steps]
            if all(free or not x for x, free in zip(share, program.allowed[kind], strict=True))
        ]
        for kind in KINDS
    )
    return [policy for shares in product(*options) if fits(program, policy := Policy(*shares), 1e-9)]


def least(program: PolicyProgram, policies: list[Policy]) -> float:
    return min((evaluate(program, policy).seconds for policy in policies), default=float("inf"))


@pytest.mark.fuzz
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
        assert fits(program, found.policy, 1e-6)
        for kind in KINDS:
            assert sum(getattr(found.policy, kind)) == pytest.approx(1)
        assert found.seconds <= least(program, points) * (1 + 1e-6)
        assert found.seconds >= program.least_s * (1 - 1e-9)
    assert 0 < infeasible < CASES / 2


def shapes(problem: Problem) -> Iterator[BlockShape]:
    """All that a search may try."""
    ask, main = problem.ask, GPU.executor if problem.device_bytes else "host"
    for gpu_batch, batches in blocks(ask.batch, ask.objective == "latency"):
        for chunk_rows in flexgen.chunk_options(problem, gpu_batch):
            for attends in ATTENDS if main == GPU.executor else ("device",):
                yield BlockShape(problem, main, gpu_batch, batches, chunk_rows, attends)


@pytest.mark.parametrize("seed", [1, 3])
def test_of_many_sizes_a_few_tell_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, spec, fmt, machine = random_case(seed)
    ask = replace(ask, batch=5000, objective="throughput")
    some = search(Problem(ask, spec, fmt, machine))
    monkeypatch.setattr(flexgen, "_MANY_SIZES", 1000)
    every = search(Problem(ask, spec, fmt, machine))
    assert some.keys() == every.keys()
    for way in ATTENDS:
        few_s, every_s = (
            min((policy.seconds_a_sequence for (attends, *_), policy in found.items() if attends == way), default=0.0)
            for found in (some, every)
        )
        assert few_s <= every_s * 1.02


def real_programs() -> Iterator[tuple[BlockShape, Mode, PolicyProgram]]:
    """Of random machines and models, in every mode."""
    for seed in range(CASES):
        ask, spec, fmt, machine = random_case(seed)
        shape = random.Random(seed).choice(list(shapes(Problem(ask, spec, fmt, machine))))
        terms = Terms(shape)
        for mode in modes(shape):
            yield shape, mode, terms.program(mode)


@pytest.mark.fuzz
def test_real_programs_are_never_worse_than_a_grid() -> None:
    """Programs of random machines and models, in every mode."""
    checked = 0
    for _, _, program in real_programs():
        found, points = solve(program), grid(program, 6)
        if found is None:
            assert not points
            continue
        checked += 1
        assert fits(program, found.policy, 1e-6)
        assert found.seconds <= least(program, points) * (1 + 1e-6)
    assert checked > CASES


@pytest.mark.fuzz
def test_kv_in_whole_layers_is_the_best_of_all_counts() -> None:
    """Seconds are convex in a share, so of two tiers the best number of layers lies beside the program's."""
    checked = 0
    for shape, mode, program in real_programs():
        layers = program.layers
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
        stage = {lane: Line(2.0 if lane == slow else 1.0) for lane in LANES}
        program = replace(random_program(random.Random(1)), layers=10, steps=31, prefill=stage, decode=stage)
        found = evaluate(program, policy)
        assert found.prefill == found.decode == (slow, 2.0)
        assert found.seconds == pytest.approx(2.0 * 10 + 2.0 * 31 * 10)


def test_the_memory_of_opt_175b() -> None:
    """l · (8·h1² + 4·h1·h2) bytes of weights, 4·b·l·h1·(s + n) of KV."""
    spec, layers, h1, h2 = describe(Path("opt-175b"))[0], 96, 12288, 49152
    assert weight_bytes(spec, FP16) == layers * (8 * h1**2 + 4 * h1 * h2) == 324 * GIB
    assert kv_bytes(spec, FP16, 512, 512 + 32) == 4 * 512 * layers * h1 * (512 + 32)
    assert kv_bytes(spec, FP16, 512, 512 + 32) == 1.1953125 * TIB


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
