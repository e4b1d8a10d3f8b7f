"""The order in which the lines of a batch are answered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.batch.survey import Todo, ordered

LINES = st.builds(Todo, st.just(0), st.integers(1, 4), st.integers(1, 500), st.integers(1, 500), st.integers(-1, 3))


@given(st.lists(LINES, max_size=40).map(lambda found: [each._replace(number=i) for i, each in enumerate(found)]))
def test_alike_ones_follow_each_other_and_the_longest_come_first(todo: list[Todo]) -> None:
    found = ordered(todo)
    assert sorted(each.number for each in found) == list(range(len(todo)))
    beginnings = [each.beginning for each in found]
    runs = [a for a, b in zip(beginnings, [None, *beginnings], strict=False) if a != b]
    assert len(runs) == len(set(runs))
    lengths = [each.prompt_tokens + each.answers * each.output_tokens for each in found]
    for beginning in runs:
        own = [length for length, each in zip(lengths, found, strict=True) if each.beginning == beginning]
        assert own == sorted(own, reverse=True)
    assert not lengths or lengths[0] == max(lengths)
