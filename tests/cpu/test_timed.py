"""Schedules that run as waits, and plans of rivals: the executor keeps the order of tasks that compute nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.timed import Timed
from penstock.cli import bench
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.planner.cost import Cost
from penstock.planner.families import FAMILIES, plan_of
from penstock.planner.solve import settle_context
from penstock.planner.solve.problem import Problem
from penstock.runtime.execute import Executor
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import Capacity
from penstock.spec.places import CPU
from penstock.spec.plan import Plan
from penstock.units import MIB
from tests.pure.machine import MACHINE, WITH_DEVICE, model

SPEC, INT4 = model(layers=6, d=512, neurons=4096), parse_format("int4")


def problem(device_bytes: int = 24 * MIB, host_bytes: int = 8 << 30) -> Problem:
    tiers = (Capacity("host", host_bytes), WITH_DEVICE.tier("disk0"), Capacity("gpu0", device_bytes))
    machine = replace(WITH_DEVICE, tiers=tiers, device_process_bytes=0, context_bytes=0)
    return Problem(settle_context(Ask(prompt_tokens=20, output_tokens=4, context=64), SPEC), SPEC, INT4, machine)


def test_the_command_names_the_families() -> None:
    assert re.split(", | or ", bench._FAMILIES) == list(FAMILIES)


DENSE = [name for name in FAMILIES if name != "experts-cpu"]


@pytest.mark.parametrize("family", DENSE)
def test_families_are_plans_that_the_runtime_takes(family: str) -> None:
    given = problem()
    plan = plan_of(family, given)
    assert plan is not None and given.fits(plan)
    check_plan(plan, SPEC, INT4)
    rest = [u for u in plan.units if plan.parts[u.part].kind == "ffn" and u.home != "gpu0"]
    lifted = sum(plan.unit_bytes(u) for u in rest if u.decode == "gpu0") / sum(map(plan.unit_bytes, rest))
    wanted = {"layer-split": 0.0, "all-cg": 1.0, "r-cg-0.25": 0.25, "r-cg-0.5": 0.5, "r-cg-0.75": 0.75}[family]
    assert lifted == pytest.approx(wanted, abs=0.06)
    assert all(u.home != "disk0" for u in rest)


def test_families_without_a_plan() -> None:
    assert plan_of("experts-cpu", problem()) is None  # a model without experts
    assert all(plan_of(name, replace(problem(), machine=MACHINE)) is None for name in FAMILIES)
    assert all(plan_of(name, problem(device_bytes=1 << 30)) is None for name in FAMILIES)  # all fits there


def waited(plan: Plan, given: Problem) -> None:
    """Runs some passes as waits of the planner's seconds times some, and compares the order with the tasks' edges."""
    cost, lowering = Cost(given.machine), Lowering(plan)
    work = Timed(lambda task: min(2e-3, 20 * cost.seconds(task)), 0.5, seed=3)
    executor = Executor(work, plan.units)
    tasks, spans = [], []
    wanted = [
        *passes.prefill(plan, 0, 20, passes.DECODE),
        *(passes.decode(plan, (0,), (20 + i,), passes.DECODE) for i in range(3)),
    ]
    for p in wanted:
        taken = list(lowering.step(p))
        tasks += taken
        spans += executor.run(taken).spans
    spans += executor.drain().spans
    executor.close()
    lanes = {task.lanes[0] for task in tasks if CPU not in task.lanes}
    assert len(tasks) > 2 * len(lanes)
    at = {each.task: each for each in spans}
    assert set(at) == {task.id for task in tasks}
    for task in tasks:
        assert all(at[other].end_s <= at[task.id].start_s for other in task.after if other in at)
    for lane in {lane for task in tasks for lane in task.lanes}:
        mine = [at[task.id] for task in tasks if lane in task.lanes]
        assert all(a.end_s <= b.start_s for a, b in pairwise(mine))


@pytest.mark.parametrize("family", DENSE)
def test_waits_keep_the_order_of_tasks(family: str) -> None:
    given = problem()
    plan = plan_of(family, given)
    assert plan is not None
    waited(plan, given)


def test_waits_of_a_plan_that_streams() -> None:
    from penstock.planner.solve import solve

    machine = replace(problem().machine, tiers=WITH_DEVICE.tiers[:2])
    ask = Ask(prompt_tokens=20, output_tokens=4, context=64, resident_bytes=2 * MIB)
    waited(solve(ask, SPEC, INT4, machine).plan, replace(problem(), machine=machine))
