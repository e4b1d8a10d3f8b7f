"""Plans for models with ReLU that lie on a disk: of each FFN, a token reads only the neurons that fire.

This is PowerInfer's placement, with a disk where PowerInfer has RAM. The first granules of each FFN stay in RAM whole.
In a model packed with `--profile` these are the hottest. Of the other neurons only the matrix that is activated stays.
It says which of them fire, and a token reads the records of these. With predictors, those stay in place of the matrix,
and a token reads the records of the neurons that they call active.

RAM that is left holds the same share of every other part, and the rest of those parts streams. If they all fit, more
granules stay whole.

A second kind of plan keeps no granule whole. RAM has slots for the records that were asked for most often and lately.
Nobody need know which neurons are hot, and hot ones need not lie together. But a record in a slot has to be copied to
its place, which a granule that stays has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.graph.arenas import with_arenas
from penstock.graph.asked import MOST_ROWS
from penstock.graph.records import Records, may_be_asked
from penstock.planner.shares import Resident
from penstock.planner.solve.ours.filling import fill_memory
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import Skeleton
from penstock.spec.parts import PINNED, Part
from penstock.spec.places import DISK, HOST, is_disk
from penstock.spec.plan import Plan, Unit

# These shares of granules that stay whole are tried. A neuron's record is worth its room if it fires in some 7 % of
# the tokens (docs/LOG.md), and of models like OPT's these are the hottest 7 %.
HOT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
# These shares of records that have slots are tried, where no granule stays whole.
RECENT_SHARES = (0.05, 0.1, 0.2, 0.4)
# The process holds so much for each neuron of units with slots, while it plans and runs (measured: 11 MB for 524,288).
_SLOTS_NEURON_BYTES = 24
_HOTTEST, _ORDERED = 0.1, 0.9


def may_ask(problem: Problem) -> bool:
    """Whether such plans make sense: a profile tells which neurons fire, or predictors tell which are active, and the
    rows are so few that they want few neurons."""
    trace = problem.trace
    if trace is None or not any(trace.fires) or problem.ask.batch > MOST_ROWS:
        return False
    return all(may_be_asked(part, problem.sparsity) for part in problem.of_kind("ffn"))


def scattered(problem: Problem) -> bool:
    """Whether hot neurons lie here and there: the first tenth of a layer's neurons fires much less often than its
    hottest tenth. If they lie in front, granules that stay hold the records that slots would hold, and need no
    copies."""
    fires = problem.trace.fires if problem.trace is not None else ()
    rates = memoryview(fires[len(fires) // 2]).cast("f").tolist() if fires else []
    tenth = round(_HOTTEST * len(rates))
    return sum(rates[:tenth]) < _ORDERED * sum(sorted(rates)[len(rates) - tenth :])


def asking(skeleton: Skeleton, hot: float, recent: float = 0.0) -> Plan | None:
    """The plan in which a share `hot` of each FFN's granules stays whole, and slots hold the records of a share
    `recent` of the others. None if it does not fit."""
    problem, ffns = skeleton.problem, skeleton.problem.of_kind("ffn")
    hottest: Resident = {part.key: int(part.granules * hot) for part in ffns}

    def plan_of(hottest: Resident, rest: Resident, recent: float) -> Plan:
        return _asked(skeleton.plan({}, hottest | rest), problem, recent)

    spare = problem.room_bytes(plan_of(hottest, {}, recent), HOST)
    if spare is None or skeleton.order != "overlapped":
        return None
    if problem.may_stay is not None:
        spare = min(spare, problem.may_stay - _staying_bytes(ffns, hottest, recent))
    if spare < 0:
        return None
    rest = fill_memory(problem, {}, spare, without=("ffn",))
    plan, left = plan_of(hottest, rest, recent), spare - problem.bytes_of(rest)
    if not problem.fits(plan, HOST):
        return None
    others = (part for part in problem.parts.values() if part.kind not in ("ffn", *PINNED))
    if any(rest[part.key] < part.granules for part in others if part.key != problem.gathered):
        return plan
    if recent:
        every = sum(part.rows * Records.of(part).stride for part in ffns)
        fuller = plan_of(hottest, rest, min(1.0, recent + left / every))
    else:
        # What a granule keeps in memory while it is asked for is counted already.
        each = sum(part.granule_bytes - Records.of(part).kept_bytes for part in ffns)
        hotter = {part.key: min(part.granules, hottest[part.key] + left // each) for part in ffns}
        fuller = plan_of(hotter, rest, recent)
    return fuller if problem.fits(fuller, HOST) else plan


def _staying_bytes(ffns: Sequence[Part], hottest: Resident, recent: float) -> int:
    """Bytes of FFNs that stay: of granules, of what a neuron that is asked for keeps in memory, and of slots."""
    stays = 0
    for part in ffns:
        hot, records = hottest[part.key], Records.of(part)
        stays += hot * part.granule_bytes + (part.granules - hot) * records.kept_bytes
        stays += int(recent * (part.rows - part.rows_of(0, hot))) * records.stride
    return stays


def _asked(plan: Plan, problem: Problem, recent: float) -> Plan:
    """The plan with every FFN unit on the disk asked for, with slots for the share `recent` of its records."""
    ffns = {part.key for part in problem.of_kind("ffn")}

    def changed(unit: Unit) -> Unit:
        lo, hi = plan.unit_rows(unit)
        return replace(unit, asked=True, recent_slots=int(recent * (hi - lo)))

    if recent:
        neurons = sum(part.rows for part in problem.of_kind("ffn"))
        plan = replace(plan, process_bytes=plan.process_bytes + _SLOTS_NEURON_BYTES * neurons)
    units = tuple(changed(u) if is_disk(u.home) and u.part in ffns else u for u in plan.units)
    hole_bytes = problem.cost.hole_bytes(DISK.reads, problem.weights.kind)
    return with_arenas(replace(plan, units=units, hole_bytes=hole_bytes))
