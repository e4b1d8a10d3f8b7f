"""Profiles: what caches of every size would have held, against caches of every size; files of other models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.graph.cache import ExpertCache
from penstock.models import spec_from_config
from penstock.planner.routing import recorded
from penstock.spec import profile as profiles
from penstock.spec.profile import Counting, Profile, hit_rates
from tests.pure.real_models import TINY

SPEC = spec_from_config(TINY["qwen3_moe"] | {"num_experts_per_tok": 3}, "tiny")  # 9 experts
tokens = st.lists(st.sets(st.integers(0, 8), min_size=3, max_size=3).map(lambda s: tuple(sorted(s))), min_size=1)


def profile_of(asked: list[tuple[int, ...]]) -> Profile:
    counting = [Counting(i, 9) for i in range(len(SPEC.layers))]
    for each in counting:
        for token in asked:
            each.token(token)
            each.guess(token[::-1])
    return Profile("text", "0" * 64, len(asked), tuple(each.found() for each in counting))


@given(tokens)
def test_hit_rates_are_those_of_caches(asked: list[tuple[int, ...]]) -> None:
    profile = profile_of(asked)
    (layer, *_) = profile.layers
    assert sum(layer.counts) == 3 * len(asked) and sum(layer.distances) <= sum(layer.counts)
    for slots in range(3, 10):  # with fewer, a token's own experts push each other out
        cache, hits = ExpertCache(slots, "lru"), 0
        for token in asked:
            missing = [expert for expert in token if cache.slot(expert) is None]
            hits += 3 - len(missing)
            cache.ask(token)
            for expert in missing:
                cache.admit(expert, token)
        assert layer.hit_rate(slots) * 3 * len(asked) == pytest.approx(hits)
    assert hit_rates(profile) == sorted(hit_rates(profile)) and len(hit_rates(profile)) == 10
    assert hit_rates(profile)[9] == pytest.approx(layer.hit_rate(9))


def test_a_profile_survives_its_file() -> None:
    profile = profile_of([(0, 1, 2), (0, 4, 8), (0, 1, 4)])
    assert profiles.loads(profiles.dumps(profile), "here") == profile
    profile.check(SPEC, "here")
    trace = recorded(profile, SPEC)
    assert (
        trace.layers == ((((0, 1, 2), (0, 4, 8), (0, 1, 4)),) * len(SPEC.layers)) and "3 tokens of text" in trace.source
    )
    assert trace.guesses == ((((2, 1, 0), (8, 4, 0), (4, 1, 0)),) * len(SPEC.layers))


Spoil = Callable[[Profile], Profile]


def layer(**changes: object) -> Spoil:
    return lambda p: replace(p, layers=(replace(p.layers[0], **changes), *p.layers[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoil",
    [
        layer(trace=((0, 1, 9),)), layer(trace=((1, 0, 2),)), layer(trace=((0, 1),)), layer(trace=()),
        layer(trace=((0, 1, 1),)), layer(trace=((-1, 0, 1),)), layer(counts=(1, 2)), layer(distances=(1,)),
        layer(guesses=((0, 9),)), layer(guesses=((1, 1),)), layer(guesses=((0, 1, 2, 3),)), layer(guesses=((),) * 600),
        layer(layer=7), layer(trace=((0, 1, 2),) * 600), lambda p: replace(p, layers=p.layers[:1]),
        lambda p: replace(p, layers=()),
    ],
)  # fmt: skip
def test_a_profile_of_another_model_is_refused(spoil: Spoil) -> None:
    with pytest.raises(BadRequest, match="here is the profile of another model"):
        spoil(profile_of([(0, 1, 2)])).check(SPEC, "here")
