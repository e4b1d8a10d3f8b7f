"""Chooses tokens from logits: parameters by their usual names, one sampler per sequence.

The order is that of transformers, so a model's own generation_config.json means here what it means there:

    repetition penalty → temperature → top-k → top-p → min-p → draw

Every step works on the ids that the step before left, with their probabilities renormalised. A sampler depends on its
own sequence only, never on other sequences of the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel

Floats = NDArray[np.float32]

# top-p alone looks at the best few tokens first. To sort all of 128k entries costs 10 ms a token, to pick out 512 costs
# 1 ms, and these hold 0.95 of the probability in nearly every step of a trained model.
_FIRST_LOOK = 512

_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
}
# The fields of a generation_config.json that are about sampling.
_CONFIG_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, by vLLM's names. The defaults are greedy. Raises BadRequest for values out of range.

    `temperature`: 0 is greedy, where the lowest id wins a tie. `top_k`: 0 or -1 is off. `stop`: the answer ends before
    the first of these strings. `seed`: None draws a fresh one. `ignore_eos`: goes on to `max_tokens`.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, types) or isinstance(value, bool):
                kind = "a whole number" if types == (int,) else "a number"
                raise BadRequest(f"{name} is {value!r}; it should be {kind}")
        # People write `stop="a"` and `stop=["a"]`. A lone string must not become its letters.
        given: Any = self.stop
        stop = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
        object.__setattr__(self, "stop", stop)
        for good, name, should in (
            (self.max_tokens >= 1, "max_tokens", "at least 1"),
            (0 <= self.temperature <= 1e6, "temperature", "0 (greedy) or more, at most 1e6"),
            (self.top_k >= -1, "top_k", "at least 1, or 0 for off"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
            (1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "from 1e-6 to 1e6"),
            (all(isinstance(s, str) and s for s in stop), "stop", "strings that are not empty"),
        ):
            if not good:
                raise BadRequest(f"{name} is {getattr(self, name)}; it should be {should}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0):
            raise BadRequest(f"seed is {self.seed!r}; it should be a whole number, 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def with_model_defaults(config: Mapping[str, Any], **named: Any) -> SamplingParams:
    """The values that the user `named`; for others those of the model's generation_config.json, `config`; else the
    defaults, which are greedy.

    As in transformers, the file's temperature counts only beside `"do_sample": true`. A user who names top_k, top_p or
    min_p wants to sample: the temperature is then 1 where neither gives one. Raises BadRequest for values of the user's
    that are out of range, BrokenModel for such values of the file.
    """
    values = {key: value for key, value in named.items() if value is not None}
    from_file = {key: config[key] for key in _CONFIG_FIELDS if config.get(key) is not None}
    if not config.get("do_sample"):
        from_file.pop("temperature", None)
        if any(key in values for key in ("top_k", "top_p", "min_p")):
            from_file["temperature"] = 1.0
    elif from_file.get("temperature") is None:
        from_file["temperature"] = 1.0
    try:
        SamplingParams(**from_file)
    except BadRequest as error:
        raise BrokenModel(f"generation_config.json: {error.message}") from None
    return SamplingParams(**{**from_file, **values})


class Sampler:
    """Chooses the tokens of one sequence. Its state is the ids that it has seen, and its random generator (PCG64)."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self.params = params
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._rng = np.random.Generator(np.random.PCG64(params.seed))

    def next(self, logits: Floats, best: tuple[float, int] | None = None) -> int:
        """The next token's id. `logits`, float32 [V], is never written to: it may be the engine's own slot. `best`: the
        largest logit and its id, where the head has found them already. Raises BrokenModel for logits that are not
        finite."""
        if self.params.greedy and best is not None and self.params.repetition_penalty == 1:
            _check_best(best[0])
            return best[1]
        _check(logits)
        logits = self._penalise(logits)
        if self.params.greedy:
            chosen = int(np.argmax(logits))
        else:
            ids, probabilities = _kept(logits, self.params)
            bounds = np.cumsum(probabilities)
            # `side="right"` never lands on an entry of probability 0.
            place = int(np.searchsorted(bounds, self._rng.random() * bounds[-1], side="right"))
            chosen = int(ids[min(place, len(ids) - 1)])
        if self.params.repetition_penalty != 1:
            self._seen.add(chosen)
        return chosen

    def distribution(self, logits: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids that `next` would draw from, int64 [n], and their probabilities, float64 [n]. Draws nothing. Raises
        as `next`."""
        _check(logits)
        logits = self._penalise(logits)
        if self.params.greedy:
            return np.array([np.argmax(logits)], np.int64), np.ones(1)
        return _kept(logits, self.params)

    def _penalise(self, logits: Floats) -> Floats:
        """CTRL's repetition penalty on logits float32 [V]: the logit of a seen token becomes smaller, on either side
        of 0."""
        ids = np.array([i for i in self._seen if 0 <= i < len(logits)], np.int64)
        if not len(ids):
            return logits
        penalty = np.float32(self.params.repetition_penalty)
        logits, seen = logits.copy(), logits[ids]
        most = np.finfo(np.float32).max  # beyond it lies infinity, and the difference of two infinities is NaN
        with np.errstate(over="ignore"):
            logits[ids] = np.clip(np.where(seen < 0, seen * penalty, seen / penalty), -most, most)
        return logits


def _check(logits: Floats) -> None:
    # max() is NaN where any logit is, so one pass without memory tells.
    _check_best(float(np.max(logits)))


def _check_best(best: float) -> None:
    if not math.isfinite(best):
        raise BrokenModel(
            f"the model computed {'NaN' if math.isnan(best) else best}: its weights may be damaged; "
            "run `penstock pack --verify` on the packed model"
        )


def _kept(logits: Floats, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids left after top-k, top-p and min-p, int64 [n], and their probabilities, float64 [n].

    The ids ascend, unless top-p sorted them: then their probabilities descend. Beside one float32 [V] this allocates
    only arrays of the ids that are left, so float64 or int64 of size V only where nothing is cut.
    """
    # The maximum is subtracted before the division, so that a temperature near 0 drives all others to -inf, not to NaN.
    with np.errstate(over="ignore"):
        scaled = (logits - np.max(logits)) / np.float32(max(params.temperature, 1e-30))
    ids: NDArray[np.int64] | None = None
    if 0 < params.top_k < len(scaled):
        # Ties with the k-th best stay, as in transformers.
        ids = np.flatnonzero(scaled >= np.partition(scaled, len(scaled) - params.top_k)[-params.top_k])
        scaled = scaled[ids]
    if params.top_p < 1:
        order = _nucleus(scaled, params.top_p)
        ids, scaled = order if ids is None else ids[order], scaled[order]
    if params.min_p > 0:
        # p >= min_p · p_best, in logarithms.
        left = np.flatnonzero(scaled >= math.log(params.min_p))
        ids, scaled = left if ids is None else ids[left], scaled[left]
    if ids is None:
        ids = np.arange(len(scaled))
    weights = np.exp(scaled, dtype=np.float64)
    return ids, weights / weights.sum()


def _nucleus(scaled: Floats, top_p: float) -> NDArray[np.int64]:
    """Indices, int64 [n], of the fewest best entries whose probabilities reach `top_p` together: the best first, equal
    ones in ascending order. `scaled`: logits float32 [V], the largest 0."""
    total = float(np.exp(scaled).sum(dtype=np.float64))
    look = _FIRST_LOOK
    while True:
        if look < len(scaled):
            # All entries that equal the last one are taken too, for the partition leaves equal entries in any order.
            places = np.flatnonzero(scaled >= np.partition(scaled, len(scaled) - look)[-look])
        else:
            places = np.arange(len(scaled))
        order = places[np.argsort(-scaled[places], kind="stable")]
        mass = np.cumsum(np.exp(scaled[order], dtype=np.float64)) / total
        if mass[-1] >= top_p or len(places) == len(scaled):
            # An entry stays if the probability of all before it is below top_p. The first one always stays.
            return order[: int(np.searchsorted(mass, top_p, side="left")) + 1]
        look *= 8


def log_softmax(logits: Floats) -> Floats:
    """log p over the last axis: float32 [V] or [T, V], of the shape of the logits. The sum is taken in float64."""
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: Floats = shifted - np.log(total).astype(np.float32)
    return result
