"""What `plan` puts first, on machines that are not here: always a plan that the runtime takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import penstock
from penstock.graph.check_plan import check_plan
from penstock.planner.bound import score_s
from penstock.planner.compare import comparison
from penstock.planner.explain import rate, table
from penstock.planner.solve import Solved, powerinfer, solve
from penstock.serve.planning import describe
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.places import GPU
from penstock.units import GIB

MACHINES = Path(penstock.__file__).parent / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))
# With plans that cannot run yet, of skipped neurons (ReLU), and without them.
SHAPES = (("relullama-13b", "float16"), ("llama-3.1-8b", "int4"))
ASKS = {
    "latency": Ask(prompt_tokens=128, output_tokens=32, context=256),
    "throughput": Ask(prompt_tokens=128, output_tokens=32, context=2048, batch=32, objective="throughput"),
}


@cache
def machine(name: str) -> MachineSpec:
    return machines.loads((MACHINES / f"{name}.json").read_text(encoding="utf-8"), name)


@cache
def short(shape: str, weights: str) -> tuple[ModelSpec, Format]:
    """Two layers of a shape: planned in a second, and with as much to choose."""
    spec, fmt = describe(Path(shape), parse_format(weights))
    return replace(spec, layers=spec.layers[:2]), fmt


@cache
def planned(name: str, shape: str, weights: str, objective: str) -> Solved:
    """As `plan --machine` does, with device memory for six tenths of the weights where there is a device."""
    spec, fmt = short(shape, weights)
    there = {tier.name: tier.bytes for tier in machine(name).tiers}
    wanted = int(0.6 * sum(part.nbytes for part in parts(spec, fmt))) + GIB
    ask = replace(
        ASKS[objective], device_memory_bytes=min(wanted, there[GPU.executor]) if GPU.executor in there else None
    )
    return solve(ask, spec, fmt, machine(name), may_plan=True)


@pytest.mark.parametrize("objective", sorted(ASKS))
@pytest.mark.parametrize(("shape", "weights"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_headline_is_a_plan_that_runs(name: str, shape: str, weights: str, objective: str) -> None:
    solved = planned(name, shape, weights, objective)
    chosen = solved.compared[0].candidate
    assert not chosen.cannot_run and not chosen.lossy and chosen.strategy == solved.strategy
    check_plan(solved.plan, *short(shape, weights))
    assert all(each.candidate.cannot_run for each in solved.not_yet)


def test_what_cannot_run_yet_stands_apart() -> None:
    """PowerInfer's neurons would be faster for one sequence."""
    solved = planned("pc-rtx4090-64gb", *SHAPES[0], "latency")
    best, says = solved.not_yet[0], powerinfer.CANNOT_RUN
    assert best.candidate.cannot_run == says
    both = [score_s(p, c.plan, ASKS["latency"]) for c, p in (best, solved.compared[0])]
    assert both[0] < both[1]
    speed = f"would give {rate(best.prediction.decode_tokens_per_s)} tokens/s"
    (line, *_) = [line for line in table(solved).splitlines() if line.startswith("not yet run by this version")]
    assert best.candidate.strategy in line and speed in line and says in line
    assert says in comparison(solved)


def test_without_them_the_same_plan() -> None:
    """`plan --machine FILE`, `run` and `penstock.plan` agree: what is only planned changes nothing of the choice."""
    spec, fmt = short(*SHAPES[0])
    ask = replace(ASKS["latency"], device_memory_bytes=GIB)
    both = [solve(ask, spec, fmt, machine("pc-rtx4090-64gb"), may_plan=may_plan) for may_plan in (True, False)]
    assert both[0].plan == both[1].plan and both[0].prediction == both[1].prediction
    assert both[0].not_yet and not both[1].not_yet
