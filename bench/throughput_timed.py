"""Rivals as plans, run where every task is a wait (`bench/timed`): does the executor keep the schedules that
`simulate` foretells, and is any family of plans faster than the chosen one.

Machines and models are those of `penstock/machines` and `penstock/shapes`. A plan is shortened to a few layers of each
kind, and two decode passes and a chunk of a prompt are timed. Waits are the planner's seconds, without what lanes that
work at once take from each other, times so much that the shortest is LEAST_S. A seeded disturbance makes each up to a
tenth longer or shorter. Several runs wait at once, since waiting takes no processor.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import penstock
from bench.timed import Timed
from penstock.graph import passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass, Stream, Task
from penstock.planner.bound import score_s, sequences
from penstock.planner.cost import Cost
from penstock.planner.families import FAMILIES, plan_of
from penstock.planner.routing import Replay
from penstock.planner.shorten import quick, short
from penstock.planner.simulate import Simulator
from penstock.planner.solve import settle_context, solve
from penstock.planner.solve.problem import Problem
from penstock.runtime.execute import Executor
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.machine import loads as machine_of
from penstock.spec.plan import Plan

LEAST_S, DISTURBANCE, SEED = 2e-3, 0.1, 20251125
WARM, TIMED = 2, 2  # decode passes
AT_ONCE = 6
# machine, shape, weights, tokens of a prompt
CASES = (
    ("pc-rtx4090-64gb", "llama-3.1-70b", "int4", 512),
    ("laptop-rtx3060-6gb", "llama-2-13b", "int4", 128),
    ("pc-rtx2080ti-64gb", "opt-30b", "int4", 512),
    ("pc-rtx4090-64gb", "mixtral-8x7b", "int4", 256),
)


@dataclass(frozen=True)
class Run:
    """One family, or the chosen plan, in one case."""

    case: str
    family: str
    plan: Plan
    ask: Ask
    machine: MachineSpec
    score_s: float


def runs(cases: Sequence[tuple[str, str, str, int]] = CASES) -> Iterator[Run]:
    for machine_name, shape, weights, prompt in cases:
        folder = Path(penstock.__file__).parent / "machines"
        file = folder / f"{machine_name}.json"
        machine, fmt = machine_of(file.read_text(), str(file)), parse_format(weights)
        spec, _ = describe(Path(shape), fmt, to_plan=True)
        ask = settle_context(Ask(prompt_tokens=prompt, output_tokens=64, context=prompt + 64), spec)
        problem = Problem(ask, spec, fmt, machine)
        plans = {"chosen": solve(ask, spec, fmt, machine).plan}
        plans |= {name: plan for name in FAMILIES if (plan := plan_of(name, problem)) is not None}
        for family, plan in plans.items():
            foretold = quick(plan, ask, machine, spread=False)
            case = f"{shape} {weights} on {machine_name}, prompt {prompt}"
            yield Run(case, family, plan, ask, machine, score_s(foretold, plan, ask))


def steps(plan: Plan, ask: Ask) -> list[Pass]:
    """Decode passes of all sequences, WARM of them and TIMED, and then a chunk of a prompt."""
    seqs = range(sequences(plan, ask))
    at = [min(ask.prompt_tokens + i, plan.context - 1) for i in range(WARM + TIMED)]
    decode = [passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE) for position in at]
    chunk = list(passes.prefill(plan, 0, min(ask.prompt_tokens, plan.chunk_rows), Stream("prefill", True)))[:1]
    return [*decode, *chunk]


def waits(plan: Plan, wanted: Sequence[Pass], cost: Cost) -> float:
    """By how much all seconds are multiplied, so that the shortest task takes LEAST_S."""
    lowering, replay = Lowering(plan), Replay(plan)
    return LEAST_S / min(cost.seconds(task) for p in wanted for task in lowering.step(p, replay.answer))


def timed(run: Run) -> dict[str, Any]:
    """The pass times of a run's shortened plan, simulated and waited for, in seconds that are not scaled."""
    plan = short(run.plan)
    layers = len(plan.target.spec.layers)
    cost = Cost(replace(run.machine, sharing=()))
    wanted = steps(plan, run.ask)
    scale = waits(plan, wanted, cost)
    simulated, measured = _simulated(plan, wanted, cost), _measured(plan, wanted, cost, scale)
    rows = {"decode": (WARM, WARM + TIMED), "prompt": (WARM + TIMED, len(wanted))}
    return {
        "case": run.case,
        "family": run.family,
        "score_s": run.score_s,
        "scale": scale,
        **{
            f"{name}_layer_s": {
                "simulated": statistics.mean(simulated[lo:hi]) / layers,
                "measured": statistics.mean(measured[lo:hi]) / scale / layers,
            }
            for name, (lo, hi) in rows.items()
        },
    }


def _simulated(plan: Plan, wanted: Sequence[Pass], cost: Cost) -> list[float]:
    lowering, replay, simulator, found = Lowering(plan), Replay(plan), Simulator(cost), []
    for p in wanted:
        start_s = simulator.now_s
        simulator.busy_s(lowering.step(p, replay.answer))
        found.append(simulator.now_s - start_s)
    return found


def _measured(plan: Plan, wanted: Sequence[Pass], cost: Cost, scale: float) -> list[float]:
    def seconds(task: Task) -> float:
        return scale * cost.seconds(task)

    lowering, replay, work = Lowering(plan), Replay(plan), Timed(seconds, DISTURBANCE, SEED)
    executor = Executor(work, plan.units)
    found = []
    for p in wanted:
        timeline = executor.run(lowering.step(p, replay.answer))
        found.append(timeline.end_s - timeline.start_s)
    executor.close()
    work.forget()
    return found


def all_timed(wanted: Sequence[Run]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(timed, wanted))


def measure() -> dict[str, Any]:
    """What the bench's last line says of rivals, and every row."""
    rows = all_timed(list(runs()))
    errors = [
        abs(row[name]["measured"] / row[name]["simulated"] - 1)
        for row in rows
        for name in ("decode_layer_s", "prompt_layer_s")
    ]
    regret = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        scores = {row["family"]: row["score_s"] for row in rows if row["case"] == case}
        regret[case] = scores["chosen"] / min(scores.values()) - 1
    return {
        "settings": len(rows),
        "error_median": statistics.median(errors),
        "error_worst": max(errors),
        "regret_worst": max(regret.values()),
        "regret": regret,
        "rows": rows,
    }
