"""Solves one linear or integer program with HiGHS, for `flexgen` and `powerinfer`.

No other module imports HiGHS. It is imported when a program is solved: with numpy that takes 0.1 s, and most plans need
no program.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from penstock.errors import InternalError

_PRIMAL = 4  # HiGHS's number for the primal simplex


class Row(NamedTuple):
    """A constraint: least ≤ Σ value · column ≤ most. `columns`: indices; `values`: a coefficient for each."""

    least: float
    most: float
    columns: Sequence[int]
    values: Sequence[float]


class Optimum(NamedTuple):
    """HiGHS's answer. `values`: of the columns, or None if HiGHS has no feasible ones. `bound`: of an integer program,
    the objective that HiGHS proved nothing to be better than; inf of others. `status`: HiGHS's word for how it
    ended."""

    values: list[float] | None
    bound: float
    status: str


def solve(
    costs: Sequence[float], lower: Sequence[float], upper: Sequence[float], rows: Sequence[Row], *,
    maximise: bool = False, whole: bool = False, start: Sequence[float] | None = None, **options: object,
) -> Optimum:  # fmt: skip
    """The columns between `lower` and `upper` that keep all rows and minimise Σ cost · column.

    maximise        maximise it instead
    whole           columns are whole numbers
    start           a feasible solution to begin with
    options         options of HiGHS, by its names

    Raises InternalError if HiGHS refuses the program, or ends for a reason other than its time limit.
    """
    import highspy as typed_in_parts

    highspy: Any = typed_in_parts
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(rows)
    lp.sense_ = highspy.ObjSense.kMaximize if maximise else highspy.ObjSense.kMinimize
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = costs, lower, upper
    lp.integrality_ = [highspy.HighsVarType.kInteger] * len(costs) if whole else []
    lp.row_lower_, lp.row_upper_ = [row.least for row in rows], [row.most for row in rows]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = [0, *accumulate(len(row.columns) for row in rows)]
    lp.a_matrix_.index_ = [column for row in rows for column in row.columns]
    lp.a_matrix_.value_ = [value for row in rows for value in row.values]
    highs = highspy.Highs()
    for option, value in {"output_flag": False, "threads": 1, **options}.items():
        highs.setOptionValue(option, value)
    if highs.passModel(lp) == highspy.HighsStatus.kError:
        raise InternalError("HiGHS refuses a program")
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = start
        highs.setSolution(solution)
    failed = highs.run() == highspy.HighsStatus.kError
    if highs.getModelStatus() == highspy.HighsModelStatus.kUnknown:
        # So ended the dual simplex in one of 300 random programs, and the primal one in none.
        highs.clearSolver()
        highs.setOptionValue("simplex_strategy", _PRIMAL)
        failed = highs.run() == highspy.HighsStatus.kError
    status, known, info = highs.getModelStatus(), highspy.HighsModelStatus, highs.getInfo()
    text = str(highs.modelStatusToString(status))
    none = status in (known.kInfeasible, known.kUnboundedOrInfeasible)
    if failed or not (none or status in (known.kOptimal, known.kTimeLimit, known.kInterrupt)):
        raise InternalError(f"HiGHS ended as {text}")
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = float(info.mip_dual_bound) if whole and not none else inf
    return Optimum(list(highs.getSolution().col_value) if feasible and not none else None, bound, text)
