"""The probe's rates of products of few rows, on a RAM whose speed swings."""

from __future__ import annotations

import math

import pytest

from penstock.graph.ops import PRODUCTS
from penstock.runtime import probe_ops, probe_stages
from penstock.runtime.native_kernels import native
from penstock.runtime.probe_ops import Layers, Points, by_usual_ram
from penstock.spec.format import DEFAULT_GROUP, Format

GB = 1e9


def test_what_waits_for_the_ram_is_as_on_the_usual_ram() -> None:
    points = [(1 * GB, 0.05), (4 * GB, 0.1)]  # 40 GB/s of a RAM that gave 44
    usual = by_usual_ram(points, 44 * GB, 33 * GB)
    assert [(x, pytest.approx(taken_s * 44 / 33)) for x, taken_s in points] == list(usual)
    assert by_usual_ram([(1 * GB, 0.05), (4 * GB, 0.13)], 33 * GB, 33 * GB) == [(1 * GB, 0.05), (4 * GB, 0.13)]


def test_what_computes_stays() -> None:
    points = [(1 * GB, 0.05), (4 * GB, 0.2)]  # 20 GB/s of 44
    assert by_usual_ram(points, 44 * GB, 33 * GB) == points


def test_no_product_reads_faster_than_the_ram_usually_is() -> None:
    points = [(1 * GB, 0.05), (4 * GB, 0.1)]  # 40 GB/s while the RAM gave 58, so they may have computed as well
    assert by_usual_ram(points, 58 * GB, 33 * GB) == [(1 * GB, 0.05), (4 * GB, pytest.approx(4 / 33))]


def test_what_a_few_rows_take_has_the_swings_of_the_ram_in_it() -> None:
    times = [1.0, 1.0, 1.0, 1.0, 1.5]
    assert probe_ops._mean_of_swings(times) == pytest.approx(1.1)
    assert probe_ops._mean_of_swings([*times, 20.0]) == pytest.approx(1.1)


def test_turns_of_few_rows_in_a_fast_spell_do_not_count_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The RAM is twice as fast in three of five turns of one row, and usual in all other turns."""
    layers = Layers(Format("int4", DEFAULT_GROUP), Format("float16"), native("portable", 1, exact=False), 1 << 20)
    of_one_row_in = [number for number, rows in enumerate(probe_ops._TURNS) if rows == (1,)]
    fast, turn = of_one_row_in[1:4], 0

    def ram(_: Layers) -> float:
        return 10 * GB * (2 if turn in fast else 1)

    def points(_: Layers, ops: tuple[str, ...], rows: tuple[int, ...], over: str) -> dict[str, Points]:
        speed = ram(layers) if over == "bytes" else 10 * GB
        return {op: [(x, x / speed) for x in (1e6, 2e6, 4e6)] for op in ops}

    def between() -> None:
        nonlocal turn
        turn += 1

    monkeypatch.setattr(probe_ops.Layers, "_ram_bytes_per_s", ram)
    monkeypatch.setattr(probe_ops.Layers, "_points", points)
    try:
        rates = layers.rates(lambda _: None, between, math.inf, every_op=False)
    finally:
        layers.close()
    of_one_row = [rate for rate in rates if rate.rows == 1 and rate.op in PRODUCTS]
    assert len(of_one_row) == len(PRODUCTS)
    assert all(1 / rate.s_per_byte == pytest.approx(10 * GB) for rate in of_one_row)


def test_the_ram_of_a_probe_is_that_of_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own readings all fell into a fast spell; those beside the products did not."""
    probe = object.__new__(probe_stages._Probe)
    probe._threads, probe._ram_bytes_per_s = 1, [33 * GB] * 20
    monkeypatch.setattr(probe_stages, "ram_readings", lambda threads, rounds, pause_s: [56 * GB] * rounds)
    (rate,) = probe._ram(0.0).rates
    assert 1 / rate.s_per_byte == pytest.approx(33 * GB)
