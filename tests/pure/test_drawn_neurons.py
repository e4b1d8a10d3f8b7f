"""Neurons that are drawn by their rates: each at its own, however hot its granule is."""

from __future__ import annotations

from array import array

import pytest

from penstock.planner.routing import _live


@pytest.mark.parametrize("hottest", [0.05, 0.3, 1.0])
def test_each_neuron_fires_at_its_rate(hottest: float) -> None:
    """Granules whose hottest neuron is skipped to, and granules of which each is drawn; rates of 0 and 1."""
    rates = [hottest if n % 64 == 5 else 0.02 if n % 2 else 0.0 for n in range(160)]
    packed, count = array("f", rates).tobytes(), 3000
    fired = [0] * len(rates)
    for seed in range(count):
        live = _live(packed, seed)
        assert list(live) == sorted(set(live))
        for n in live:
            fired[n] += 1
    for rate, times in zip(rates, fired, strict=True):
        assert times / count == pytest.approx(rate, abs=5 * (rate * (1 - rate) / count) ** 0.5)
    assert _live(packed, 7) == _live(packed, 7)
