"""The list of all plans that were compared."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from penstock.cli.output import fits, fitted
from penstock.planner.bound import score_s
from penstock.planner.candidate import Compared, distinct
from penstock.planner.compare import bytes_per_tier, comparison, listed, to_json
from penstock.planner.explain import rate
from penstock.planner.homes import weights_bytes
from penstock.planner.shorten import quick
from penstock.planner.solve import Solved, pipo, settle_context, solve
from penstock.planner.solve.ours import device
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE

BF16, GIB = Format("bfloat16"), 1 << 30
BESIDE = Ask(device_memory_bytes=GIB, host_memory_bytes=2 * GIB, context=512)


@cache
def beside_a_device() -> Solved:
    """What `solve` would give if it simulated every plan of two solvers."""
    found = (
        *pipo.candidates(Problem(BESIDE, LLAMA_1B, BF16, WITH_DEVICE)),
        *device.candidates(Problem(BESIDE, LLAMA_1B, BF16, WITH_DEVICE)),
    )
    compared = [Compared(c, quick(c.plan, BESIDE, WITH_DEVICE, spread=False)) for c in found]
    best = max(compared, key=lambda each: each.prediction.decode_tokens_per_s)
    rest = tuple(each for each in compared if each is not best)
    strategy, plan, reasons, *_ = best.candidate
    return Solved(plan, best.prediction, reasons, strategy, (best, *rest))


def test_a_line_for_each_the_chosen_one_first() -> None:
    solved = beside_a_device()
    assert len(solved.compared) > 4
    header, *lines = comparison(solved).splitlines()
    assert len(lines) == len(solved.compared)
    assert header.split()[-5:] == ["device", "RAM", "disk", "bound", "by"]
    for line, each in zip(lines, solved.compared, strict=True):
        assert line.startswith(each.candidate.strategy) and f" {rate(each.prediction.decode_tokens_per_s)} " in line
    assert lines[0].startswith(solved.strategy)
    assert len({len(line.split("  the ")[0]) for line in lines}) == 1  # columns are straight
    assert max(map(len, lines)) <= 140


def test_a_narrow_terminal_has_each_figure_with_its_name() -> None:
    solved = beside_a_device()
    assert fits(comparison(solved), 140) and not fits(comparison(solved), 50)
    shown = fitted(listed(solved), 50).splitlines()
    assert max(map(len, shown)) <= 50
    told = " ".join(" ".join(shown).split())
    for each in solved.compared:
        assert f"{rate(each.prediction.decode_tokens_per_s)} tokens/s, first token" in told
    assert sum(line.strip().endswith("MiB") or "GiB" in line for line in shown) >= len(solved.compared)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_chosen_one_then_the_best(objective: str) -> None:
    """Equals, within 5 %, by what they read; the others by the ask's objective."""
    ask = settle_context(replace(BESIDE, objective=objective), LLAMA_1B)
    solved = solve(ask, LLAMA_1B, BF16, WITH_DEVICE, every=True)
    scores = [score_s(each.prediction, each.candidate.plan, ask) for each in solved.compared]
    assert len(scores) > 3 and solved.compared[0].candidate.strategy == solved.strategy
    behind = [score for score in scores if score > 1.05 * min(scores)]
    assert scores[len(scores) - len(behind) :] == behind == sorted(behind)


def test_plans_of_one_strategy_are_told_apart() -> None:
    ask = Ask(host_memory_bytes=GIB, context=512)
    rates = tuple(replace(r, s_per_byte=r.s_per_byte * (40 if r.lane == "host" else 1)) for r in MACHINE.rates)
    solved = solve(ask, LLAMA_1B, BF16, replace(MACHINE, rates=rates), every=True)
    lines = comparison(solved).splitlines()[1:]
    assert len(lines) > 1
    assert len({line.split("  ")[0] for line in lines}) == len(lines) and "ring " in lines[0]


def test_each_plan_once() -> None:
    """FlexGen's modes often come to the same policy, and strategies to the same plan: one row then, with all names."""
    first, second, *_ = (each.candidate for each in beside_a_device().compared)
    found = [first, second, first._replace(reasons=()), second._replace(strategy="other"), second]
    assert distinct(found) == [first, second._replace(also=("other",))]
    refused = first._replace(cannot_run="not yet")
    assert distinct([first, refused]) == [first, refused]
    shown = comparison(replace(beside_a_device(), compared=tuple(
        each._replace(candidate=each.candidate._replace(also=("other", "third")))
        for each in beside_a_device().compared[:1]
    )))  # fmt: skip
    assert f"{first.strategy} (so too: other; third)" in shown
    ask = settle_context(replace(BESIDE, objective="throughput", batch=32, context=256, prompt_tokens=64), LLAMA_1B)
    plans = [each.candidate.plan for each in solve(ask, LLAMA_1B, BF16, WITH_DEVICE, every=True).compared]
    assert len(plans) > 6 and all(a != b for a, b in combinations(plans, 2))


def test_what_is_only_planned_says_why() -> None:
    solved = beside_a_device()
    first, *rest = solved.compared
    marked = Compared(first.candidate._replace(cannot_run="no sparse kernels yet"), first.prediction)
    shown = comparison(replace(solved, compared=(marked, *rest))).splitlines()
    assert shown[2] == "  planned only: no sparse kernels yet"
    report = to_json((marked, *rest))
    assert [each["cannot_run"] for each in report][:2] == ["no sparse kernels yet", ""]


def test_bytes_of_tiers() -> None:
    """Memory as planned, of the disk what lives there; weights by home sum to all of them."""
    for each in beside_a_device().compared:
        plan = each.candidate.plan
        weights, used = weights_bytes(plan), bytes_per_tier(plan)
        assert sum(weights.values()) == sum(part.nbytes for part in plan.parts.values())
        assert used["host"] == each.prediction.peak_host_bytes
        assert used.get("gpu0", 0) == each.prediction.peak_device_bytes
        assert used.get("disk0", 0) == weights.get("disk0", 0)


def test_kv_on_the_disk_counts_there() -> None:
    ask = Ask(host_memory_bytes=GIB, context=512, kv_home="disk")
    solved = solve(ask, LLAMA_1B, BF16, MACHINE)
    plan = solved.plan
    assert bytes_per_tier(plan)["disk0"] == weights_bytes(plan)["disk0"] + plan.tier_bytes()["disk0"]


def test_nothing_compared_is_just_a_header() -> None:
    solved = replace(beside_a_device(), compared=())
    assert len(comparison(solved).splitlines()) == 1 and to_json(solved.compared) == []
