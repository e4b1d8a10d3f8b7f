"""Lines through measurements, which the probe stands on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.fit import Fit, fit, fit_well, middle, steady

AMOUNTS = st.lists(st.integers(1, 10**9), min_size=2, max_size=9, unique=True)


@given(AMOUNTS, st.floats(1e-7, 1e-2), st.floats(1e-13, 1e-8))
def test_a_line_is_found(amounts: list[int], alpha_s: float, slope_s: float) -> None:
    points = [(float(x), alpha_s + x * slope_s) for x in amounts]
    found = fit(points)
    assert all(math.isclose(found.alpha_s + x * found.slope_s, t, rel_tol=1e-4) for x, t in points)
    assert found.r2 > 0.999 or max(t for _, t in points) < 1.01 * min(t for _, t in points)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=9))
def test_no_figure_is_below_nothing(points: list[tuple[float, float]]) -> None:
    found = fit(points)
    assert found.alpha_s >= 0 and found.slope_s >= 0 and -1 <= found.r2 <= 1
    assert math.isfinite(found.alpha_s) and math.isfinite(found.slope_s)


def test_small_times_count_as_much_as_large_ones() -> None:
    found = fit([(1.0, 2e-6), (1e6, 1.0), (2e6, 2.2)])
    assert found.alpha_s + found.slope_s == pytest.approx(2e-6, rel=0.3)


def test_a_bad_fit_is_measured_again_and_said() -> None:
    answers = iter([[(1.0, 5.0), (2.0, 1.0), (3.0, 6.0)], [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]])
    said: list[str] = []
    found = fit_well(lambda: next(answers), "ffn", said.append)
    assert found.r2 > 0.99
    assert len(said) == 1 and said[0].startswith("ffn: measured again, r² ")


def test_a_disturbed_measurement_does_not_count() -> None:
    calm, close, disturbed = Fit(1e-6, 1e-9, 0.99), Fit(3e-6, 1.1e-9, 0.98), Fit(1e-6, 2e-9, 1.0)
    assert steady(calm, disturbed) == steady(disturbed, calm) == calm
    between = steady(calm, close)
    assert (between.alpha_s, between.slope_s, between.r2) == (pytest.approx(2e-6), pytest.approx(1.05e-9), 0.98)


def test_of_several_moments_the_middle_one_counts() -> None:
    fits = [Fit(1e-6 * i, slope, 0.99) for i, slope in enumerate((2e-9, 1e-9, 5e-9, 1.1e-9, 1.2e-9))]
    assert middle(fits) == fits[4]
    assert middle(fits[:1]) == fits[0]
