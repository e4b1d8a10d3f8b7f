"""What a call takes to begin, by its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.cost import Cost
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.places import CPU
from tests.pure.machine import MACHINE

ALPHA_S = 1e-3


def with_lines(lane: str, op: str) -> MachineSpec:
    """A machine whose lines for one, up to 64 and more rows have a begin and take a nanosecond a flop."""
    lines = tuple(Rate(lane, op, "int4", ALPHA_S, 1e-11, 1e-9, 1.0, rows) for rows in (1, 64, 0))
    return replace(MACHINE, rates=(*lines, *MACHINE.rates))


@pytest.mark.parametrize("op", ["qkv", "out", "ffn", "head"])
def test_products_of_many_rows_begin_by_their_rows(op: str) -> None:
    cost = Cost(with_lines(CPU, op))
    for rows, times in ((1, 1), (20, 0.5), (40, 1), (64, 1.6), (96, 0.25), (384, 1), (1536, 4)):
        assert cost.call_s(CPU, op, "int4", rows) == pytest.approx(times * ALPHA_S)


@pytest.mark.parametrize(("lane", "op"), [(CPU, "attend"), ("gpu0", "ffn")])
def test_others_begin_alike(lane: str, op: str) -> None:
    cost = Cost(with_lines(lane, op))
    assert {cost.call_s(lane, op, "int4", rows) for rows in (1, 20, 64, 96, 1536)} == {ALPHA_S}
