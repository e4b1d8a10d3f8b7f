"""Which neurons are the hottest, against a count by hand."""

from __future__ import annotations

from array import array
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spec.hottest import MADE, hottest, hottest_share, made_by, made_by_all, same_hottest
from penstock.spec.profile import FIRED_TOGETHER, FiringCounts, Profile

counts_of = st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any)


def profile_of(*layers: list[int]) -> Profile:
    shares = (0.5,) * len(FIRED_TOGETHER)
    counted = (
        FiringCounts(i, len(each), b64encode(array("I", each).tobytes()).decode(), shares)
        for i, each in enumerate(layers)
    )
    return Profile("text", "0" * 64, 50, (), tuple(counted))


@given(counts_of, st.floats(0.01, 0.99))
def test_no_fewer_neurons_make_a_share(counts: list[int], share: float) -> None:
    count = round(hottest_share(counts, share) * len(counts))
    ordered = sorted(counts, reverse=True)
    assert sum(ordered[:count]) >= share * sum(counts) > sum(ordered[: count - 1]) or count == 1


def test_what_the_hottest_make() -> None:
    assert hottest_share([0, 8, 1, 1], 0.8) == 0.25 and hottest_share([5, 5, 0, 0], 0.8) == 0.5
    assert made_by([90, 9, 1, 0]) == (0.25, 0.25, 0.25, 0.5) and len(MADE) == 4
    assert made_by_all(profile_of([90, 9], [1, 0])) == (0.25, 0.25, 0.25, 0.5)


@given(st.permutations(range(20)), st.permutations(range(20)))
def test_the_same_hottest_fifth(one: list[int], other: list[int]) -> None:
    first, second = ({n for n in range(20) if counts[n] >= 16} for counts in (one, other))
    assert hottest(one) == first
    assert same_hottest(profile_of(one, one), profile_of(other, one)) == pytest.approx((len(first & second) / 4, 1.0))


def test_one_neuron_at_least_and_of_equals_the_first() -> None:
    assert hottest([3, 3]) == {0} and hottest([0] * 10) == {0, 1}
