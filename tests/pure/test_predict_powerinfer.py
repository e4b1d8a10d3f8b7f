"""PowerInfer's figures as the planner predicts them: the cheap ones; `make bench-papers` has them all."""

from __future__ import annotations

import pytest

from bench.papers.powerinfer import predicted, why_not
from bench.papers.published import FIGURES, PC_LOW, Published

OF_POWERINFER = [row for row in FIGURES if row.paper == "PowerInfer"]


def rows(table: str, **facts: object) -> list[Published]:
    found = [row for row in OF_POWERINFER if row.table == table]
    return [row for row in found if all(getattr(row, name) == value for name, value in facts.items())]


def test_a_row_without_a_prediction_has_a_reason() -> None:
    without = [row for row in OF_POWERINFER if why_not(row)]
    assert 0 < len(without) < len(OF_POWERINFER)
    assert all(predicted(row) is None for row in without)
    assert {row.metric for row in OF_POWERINFER if not why_not(row)} == {
        "throughput", "speedup", "latency_s", "decode_s", "share",
    }  # fmt: skip


@pytest.mark.parametrize("row", rows("Table 8", machine=PC_LOW) + rows("Table 9", model="qwen1.5-4b"))
def test_a_small_model_is_within_a_factor_of_two(row: Published) -> None:
    found = predicted(row)
    assert found is not None and 0.5 < found.value / row.value < 2
    if found.bound is not None:
        lower_is_better = row.metric in ("latency_s", "decode_s")
        assert found.value >= found.bound if lower_is_better else found.value <= found.bound
