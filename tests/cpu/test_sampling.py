"""The sampler against transformers' logits processors, and its own promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.log_probabilities import likely, log_softmax
from penstock.serve.sampling import Sampler, SamplingParams, with_model_defaults

# Multiples of 1/4 make ties common; distances of less than a float32 rounding step would test rounding.
LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=2, max_size=60)


def oracle(params: SamplingParams, prompt: list[int], logits: np.ndarray) -> np.ndarray:
    """Probabilities [V] by transformers."""
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as lp

    steps = [
        lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        lp.TemperatureLogitsWarper(params.temperature),
    ]
    if params.top_k > 0:
        steps.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(lp.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(lp.MinPLogitsWarper(params.min_p))
    scores = torch.tensor(logits)[None]
    for step in steps:
        scores = step(torch.tensor([prompt], dtype=torch.long), scores)
    return torch.softmax(scores[0].double(), -1).numpy()


@given(
    values=LOGITS,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.5]),
    data=st.data(),
)
def test_distribution_is_that_of_transformers(values, temperature, top_k, top_p, min_p, penalty, data):
    logits = np.array(values, np.float32)
    prompt = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=8))
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, seed=0
    )
    before = logits.copy()
    ids, probabilities = Sampler(params, prompt).distribution(logits)
    assert np.array_equal(logits, before)
    mine = np.zeros(len(values))
    mine[ids] = probabilities
    theirs = oracle(params, prompt, logits)
    # A cut through equal logits takes any of them, so compare the sorted probabilities; and a cut whose mass
    # meets top_p to the last bit may fall either way.
    if top_p < 1:
        whole = SamplingParams(temperature=temperature, top_k=top_k, repetition_penalty=penalty)
        cumulative = np.cumsum(np.sort(oracle(whole, prompt, logits))[::-1])
        assume(np.min(np.abs(cumulative - top_p)) > 1e-5)
    np.testing.assert_allclose(np.sort(mine), np.sort(theirs), atol=1e-5)
    for i in np.flatnonzero(mine):
        assert theirs[i] > 0 or np.isclose(mine[i], mine[ids].min())


@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])  # few, some and nearly all entries are kept
def test_top_p_over_a_large_vocabulary(temperature):
    logits = np.random.default_rng(1).normal(size=128_256).astype(np.float32) * 3
    params = SamplingParams(temperature=temperature, top_p=0.9)
    ids, probabilities = Sampler(params, []).distribution(logits)
    theirs = oracle(params, [0], logits)
    assert abs(len(ids) - np.count_nonzero(theirs)) <= max(2, 0.001 * len(ids))
    assert len(set(ids.tolist())) == len(ids)
    np.testing.assert_allclose(probabilities, theirs[ids], atol=2e-6, rtol=2e-3)


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = np.array([0, 3, 1, 3, 3], np.float32)
    assert Sampler(SamplingParams(), []).next(logits) == 1
    assert Sampler(SamplingParams(repetition_penalty=2.0), [1]).next(logits) == 3


def test_repetition_penalty_counts_what_was_generated():
    logits = np.array([2.0, 1.9, 1.8, -5.0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), [99])  # an id beyond the logits is nothing
    assert [sampler.next(logits) for _ in range(3)] == [0, 1, 2]


def test_seed_repeats_and_no_seed_does_not():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)

    def draw(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.next(logits) for _ in range(20)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_draws_follow_the_probabilities():
    logits = np.log(np.array([0.5, 0.3, 0.2, 0.0001], np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=3, seed=1), [])
    counts = np.bincount([sampler.next(logits) for _ in range(20_000)], minlength=4)
    # Four standard deviations of a binomial of 20000 draws.
    np.testing.assert_allclose(counts / 20_000, [0.5, 0.3, 0.2, 0.0], atol=4 * 0.5 / 20_000**0.5)


def test_a_temperature_near_zero_is_the_best_token():
    logits = np.array([-1e30, 2.0, 1.9999, -np.inf], np.float32)
    for temperature in (1e-6, 1e-300):
        assert Sampler(SamplingParams(temperature=temperature, top_p=0.9), []).next(logits) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_named(bad, temperature):
    logits = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(BrokenModel, match=r"computed (NaN|inf).*penstock pack --verify"):
        Sampler(SamplingParams(temperature=temperature), []).next(logits)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -2},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"stop": ("",)},
        {"stop": 5},
        {"seed": -1},
        {"seed": "7"},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(BadRequest, match=rf"^{next(iter(wrong))} is .*it should be"):
        SamplingParams(**wrong)


def test_stop_as_people_write_it():
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)


def test_model_defaults():
    advice = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": 2}
    params = with_model_defaults(advice, max_tokens=5, top_p=None)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 0, 5)
    assert with_model_defaults(advice, temperature=0.0).greedy
    assert with_model_defaults({"temperature": 0.6}).greedy
    assert with_model_defaults({}).greedy
    assert with_model_defaults({}, several=True).temperature == 1.0
    assert with_model_defaults({}, several=True, temperature=0.0).greedy
    assert with_model_defaults({"do_sample": True, "temperature": 0.6}, several=True).temperature == 0.6
    assert with_model_defaults({"do_sample": True}).temperature == 1.0
    assert with_model_defaults({}, top_p=0.5).temperature == 1.0
    with pytest.raises(BrokenModel, match=r"generation_config\.json: top_p"):
        with_model_defaults({"top_p": 7})
    with pytest.raises(BadRequest, match="top_p"):
        with_model_defaults(advice, top_p=7.0)


def test_log_softmax():
    logits = np.array([[1000.0, 1001.0, 990.0], [0.0, -np.inf, 0.0]], np.float32)
    found = log_softmax(logits)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.exp(found).sum(-1), [1, 1], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-np.log(2), -np.inf, -np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(log_softmax(logits[0]), found[0])


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_strongest_penalties_leave_something_to_draw_from(penalty: float) -> None:
    """Also where a penalised logit would be infinite: the fuzzer found that none was left."""
    logits = np.array([3e38, -3e38, 1.0, 0.0], np.float32)
    sampler = Sampler(
        SamplingParams(temperature=1.0, top_k=3, min_p=0.05, repetition_penalty=penalty, seed=1), [0, 1, 3]
    )
    assert all(0 <= sampler.next(logits) < 4 for _ in range(4))


@pytest.mark.parametrize("penalty", [0, 1e-300, 1e7, float("nan")])
def test_penalties_that_float32_cannot_hold_are_refused(penalty: float) -> None:
    with pytest.raises(BadRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=penalty)


@given(values=LOGITS, data=st.data())
def test_biases_and_penalties_change_logits_as_they_say(values, data):
    vocab = len(values)
    token = st.integers(0, vocab - 1)
    bias = data.draw(st.dictionaries(token, st.floats(-100, 100, width=16), max_size=4))
    presence, frequency = data.draw(st.sampled_from([0, 0.5, -2])), data.draw(st.sampled_from([0, 0.25, 2]))
    repetition = data.draw(st.sampled_from([1.0, 1.5]))
    prompt = data.draw(st.lists(token, min_size=1, max_size=4))
    params = SamplingParams(
        logit_bias=bias, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    sampler, said = Sampler(params, prompt), []
    logits = np.array(values, np.float32)
    for _ in range(4):
        expected = logits.astype(np.float64)
        for i, by in bias.items():
            expected[i] += by
        for i in {*prompt, *said}:
            if repetition != 1:
                expected[i] = expected[i] * repetition if expected[i] < 0 else expected[i] / repetition
        for i in set(said):
            expected[i] -= presence + frequency * said.count(i)
        chosen = sampler.next(logits, (float(logits.max()), int(logits.argmax())))
        assert expected[chosen] == pytest.approx(expected.max(), abs=1e-4)
        said.append(chosen)


@given(values=LOGITS, count=st.integers(0, 20), data=st.data())
def test_log_probabilities_are_the_models_own(values, count, data):
    logits = np.array(values, np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    found = likely(logits, token, count)
    expected = log_softmax(logits)
    assert found.token == token and found.logprob == pytest.approx(float(expected[token]))
    assert [p for _, p in found.best] == sorted(expected.tolist(), reverse=True)[:count]
    assert all(expected[i] == np.float32(p) for i, p in found.best)


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 3), ("frequency_penalty", -2.5), ("logprobs", 21), ("logprobs", True), ("logprobs", -1),
     ("logit_bias", {0: 101}), ("logit_bias", {-1: 0}), ("logit_bias", {"0": 1}), ("logit_bias", {0: float("nan")}),
     ("logit_bias", dict.fromkeys(range(1025), 1))],
)  # fmt: skip
def test_what_is_beyond_its_range_is_refused(field, value):
    with pytest.raises(BadRequest, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("count", [1, 3, 40, 90])
def test_few_ids_are_chosen_among_as_a_mask_does(count: int) -> None:
    """As ids, as bools of which few are set, and where most are: always what the whole array gives."""
    rng = np.random.default_rng(count)
    for seed in range(40):
        logits = rng.normal(size=100).astype(np.float32) * 3
        ids = np.sort(rng.choice(100, count, replace=False))
        mask = np.zeros(100, np.bool_)
        mask[ids] = True
        params = SamplingParams(
            temperature=seed % 3 / 2, top_k=seed % 4 * 5, top_p=1 - 0.1 * (seed % 2), min_p=0.01 * (seed % 3), seed=seed
        )
        masked = np.where(mask, logits, np.float32(-np.inf))
        best = (float(logits.max()), int(logits.argmax()))
        chosen = {Sampler(params, []).next(logits, best, allowed) for allowed in (mask, ids)}
        assert len(chosen) == 1 and mask[chosen.pop()]
        if params.greedy:
            assert Sampler(params, []).next(logits, best, ids) == int(masked.argmax())
