"""Token assignment (ScheInfer Eq. 15): how many rows of a prompt's chunk a device had best compute with the CPU's
weights, for each layer and length of a chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, takewhile

from penstock.graph.passes import one_batch
from penstock.graph.tasks import Pass
from penstock.planner.programs.slicing import best_n_g
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer.layer_work import LayerWork, Shares
from penstock.spec.model import Layer
from penstock.spec.places import GPU
from penstock.spec.plan import DeviceRows, Plan, Unit

Sliced = tuple[Layer, bool, float, float]  # a layer, whether the device attends, and of its FFN r_GG and r_CG


def with_rows(problem: Problem, plan: Plan, share: bool) -> Plan | None:
    """The plan with a table for each layer: length of a chunk → n_g, the rows that the device computes. It is the best
    n_g, or without `share` the better of all rows and none. None if there is nothing to share: no layer has units in
    RAM that the CPU computes in decode and the device in prompts. None too if the tables make no difference."""
    work = LayerWork(problem, plan.ring_bytes.get(GPU.executor, 0))
    known: dict[Sliced, tuple[tuple[int, int], ...]] = {}
    tables = []
    for i, sliced in _sliced(problem, plan):
        if sliced not in known:
            known[sliced] = tuple(_table(work, sliced, plan.chunk_rows, share))
        tables.append((i, known[sliced]))
    if not tables or not all(table for _, table in tables):
        return None  # some layer's rows are all the CPU's at any length, which no pass that reads prompts does
    if not any(cpu or (rows > 1 and not share) for _, table in tables for rows, cpu in table):
        return None
    rows = tuple(DeviceRows(i, *map(tuple, zip(*table, strict=True))) for i, table in tables)
    return replace(plan, device_rows=rows)


def with_short_prompts(problem: Problem, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan, in which prompts below the break-even length are the CPU's where that is faster, and the sentence that
    says so. Plans that ask for weights, that have predictors, or whose passes have several batches stay as they are.

    Asked of the chosen plan alone: asked of each of ten candidates, it took a third of all planning."""
    known = plan.device_rows or plan.asks or plan.predictors or plan.batches_per_pass > 1
    settled = None if known else with_rows(problem, plan, share=False)
    if settled is None or settled.least_device_rows <= 1:  # then no pass would be the CPU's
        return plan, ()
    least = settled.least_device_rows
    return settled, (f"passes with fewer than {least} rows of prompts leave the CPU's share of FFNs to the CPU",)


def best_rows(work: LayerWork, sliced: Sliced, step: Pass) -> int:
    """The best n_g of a pass."""
    return best_n_g(_finish(work, sliced, step), step.total_rows)[0]


def _finish(work: LayerWork, sliced: Sliced, step: Pass) -> Callable[[int], float]:
    """n_g → the layer's period in seconds."""
    layer, attends, r_gg, r_cg = sliced
    return work.prompt_s(layer, step, Shares(r_gg, attends=attends), r_cg)


def _sliced(problem: Problem, plan: Plan) -> Iterator[tuple[int, Sliced]]:
    """(layer, how its FFN is sliced) of layers whose rows can be shared."""
    by_part: dict[str, list[Unit]] = {}
    for unit in plan.units:
        by_part.setdefault(unit.part, []).append(unit)
    attends = {i for home in plan.kv if home.attend == GPU.executor for i in range(*home.layers)}
    for part in problem.of_kind("ffn"):
        granules: Counter[str] = Counter()
        for unit in by_part[part.key]:
            granules[unit.placement] += unit.hi - unit.lo
        in_prefill = {unit.prefill for unit in by_part[part.key]}
        if granules["CC"] and in_prefill == {GPU.executor} and not granules["DC"]:
            lifted = granules["CG"] + granules["DG"]
            shares = granules["GG"] / part.granules, lifted / part.granules
            yield part.layer, (problem.spec.layers[part.layer], part.layer in attends, *shares)


def _table(work: LayerWork, sliced: Sliced, chunk_rows: int, share: bool) -> Iterator[tuple[int, int]]:
    """(rows of a chunk, those of them that the CPU had best take), for lengths from the least at which the device had
    best take any, each twice the one before, up to whole chunks. Without `share` the least length alone at which it is
    faster with all rows than with none."""

    def step(rows: int) -> Pass:
        return one_batch("prefill", 1, rows, max(0, (work.problem.ask.prompt_tokens - rows) // 2))

    def takes_any(rows: int) -> bool:
        if share:
            return best_rows(work, sliced, step(rows)) > 0
        finish_s = _finish(work, sliced, step(rows))
        return finish_s(rows) < finish_s(0)

    least = bisect_left(range(1, chunk_rows + 1), True, key=takes_any) + 1
    if least > chunk_rows:
        return
    if not share:
        yield least, 0
        return
    doubled = takewhile(lambda rows: rows < chunk_rows, (least << power for power in count()))
    for rows in (*doubled, chunk_rows):
        yield rows, rows - max(1, best_rows(work, sliced, step(rows)))
