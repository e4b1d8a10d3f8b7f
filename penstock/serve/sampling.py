"""Chooses tokens from logits: parameters by their usual names, one sampler per sequence.

The order is that of transformers, so a model's own generation_config.json means here what it means there. What OpenAI's
API adds comes around the repetition penalty, as in vLLM:

    logit bias → repetition penalty → frequency and presence penalties → JSON schema → temperature → top-k → top-p
    → min-p → draw

Every step works on the ids that the step before left, with their probabilities renormalised. A sampler depends on its
own sequence only, never on other sequences of the same pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.schemas import Rule, checked_grammar, checked_schema, grammar_rule

Floats = NDArray[np.float32]
Choice = NDArray[np.bool_] | NDArray[np.int64]

# top-p alone looks at the best few tokens first. To sort all of 128k entries costs 10 ms a token, to pick out 512 costs
# 1 ms, and these hold 0.95 of the probability in nearly every step of a trained model.
_FIRST_LOOK = 512
_MINUS_INFINITY = np.uint32(0xFF800000)  # the bits of float32's

_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "temperature": (int, float),
    "n": (int,),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
}
MAX_LOGPROBS, MAX_BIASES, MAX_ANSWERS = 20, 1024, 128
# The fields of a generation_config.json that are about sampling.
_CONFIG_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, by vLLM's names. The defaults are greedy. Raises BadRequest for values out of range.

    `temperature`: 0 is greedy, where the lowest id wins a tie. `top_k`: 0 or -1 is off. `stop`: the answer ends before
    the first of these strings. `seed`: None draws a fresh one. `ignore_eos`: goes on to `max_tokens`.
    `frequency_penalty` is taken from a token's logit once for each time that the answer has it, `presence_penalty`
    once.
    `logit_bias`: ids and what is added to their logits; a mapping is taken too. `logprobs`: keep the log probability of
    each token, and so many of the likeliest beside it; they are the model's own, before all that is above.
    `prompt_logprobs`: the same of the prompt's tokens after its first (`serve.scores`). `max_tokens` may then be 0.
    `json_schema`: the answer is JSON that follows this schema, a string or a mapping (`serve.guides`). `grammar`: it
    follows this one, in llguidance's Lark or in GBNF. `skip_special_tokens`: special tokens have no text.
    `thinking_tokens`: after so many tokens of thought their end is put into the answer, of models that mark it;
    `thinking_begun`: the prompt ends with the beginning of thoughts.
    `n`: so many answers to each prompt of `LLM.generate` and `LLM.chat`, which is read once. Who answers a single
    request does not look at it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    skip_special_tokens: bool = True
    thinking_tokens: int | None = None
    thinking_begun: bool = False
    n: int = 1

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
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", checked_schema(self.json_schema))
        if self.grammar is not None:
            checked_grammar(self.grammar)
            if self.json_schema is not None:
                raise BadRequest("an answer follows a JSON schema or a grammar, not both")
        if self.rule is not None and self.ignore_eos:
            raise BadRequest("ignore_eos does not go with a JSON schema or grammar, which says where an answer ends")
        for good, name, should in (
            (self.max_tokens >= (self.prompt_logprobs is None), "max_tokens", "at least 1"),
            (1 <= self.n <= MAX_ANSWERS, "n", f"from 1 to {MAX_ANSWERS}"),
            (0 <= self.temperature <= 1e6, "temperature", "0 (greedy) or more, at most 1e6"),
            (self.top_k >= -1, "top_k", "at least 1, or 0 for off"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
            (1e-6 <= self.repetition_penalty <= 1e6, "repetition_penalty", "from 1e-6 to 1e6"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2"),
            (all(isinstance(s, str) and s for s in stop), "stop", "strings that are not empty"),
        ):
            if not good:
                raise BadRequest(f"{name} is {getattr(self, name)}; it should be {should}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0):
            raise BadRequest(f"seed is {self.seed!r}; it should be a whole number, 0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            whole = isinstance(count, int) and not isinstance(count, bool)
            if count is not None and not (whole and 0 <= count <= MAX_LOGPROBS):
                raise BadRequest(f"{name} is {count!r}; it should be from 0 to {MAX_LOGPROBS}")

    def nth(self, i: int) -> SamplingParams:
        """For the i-th of several answers to one prompt. With a seed each has one of its own, or all would be the
        same."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + i)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop`, as `__post_init__` left it."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, as `__post_init__` left it."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @property
    def rule(self) -> Rule | None:
        """What the answer has to follow."""
        if self.json_schema is not None:
            return Rule("schema", cast(str, self.json_schema))
        return None if self.grammar is None else grammar_rule(self.grammar)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.biases)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as pairs. Raises BadRequest."""
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    biases = []
    for token, bias in pairs:
        numbers = isinstance(token, int) and isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (numbers and token >= 0 and -100 <= bias <= 100):
            raise BadRequest(f"logit_bias has {token!r}: {bias!r}; it should be an id and a number from -100 to 100")
        biases.append((int(token), float(bias)))
    if len(biases) > MAX_BIASES:
        raise BadRequest(f"logit_bias has {len(biases)} tokens; it should have at most {MAX_BIASES}")
    return tuple(biases)


def with_model_defaults(config: Mapping[str, Any], *, several: bool = False, **named: Any) -> SamplingParams:
    """The values that the user `named`; for others those of the model's generation_config.json, `config`; else the
    defaults, which are greedy.

    As in transformers, the file's temperature counts only beside `"do_sample": true`. A user who names top_k, top_p or
    min_p, or wants `several` answers to a prompt, wants to sample: the temperature is then 1 where neither gives one.
    Raises BadRequest for values of the user's that are out of range, BrokenModel for such values of the file.
    """
    values = {key: value for key, value in named.items() if value is not None}
    from_file = _of_config(config)
    if "temperature" not in from_file:
        wants = several or config.get("do_sample") or any(key in values for key in ("top_k", "top_p", "min_p"))
        from_file |= {"temperature": 1.0} if wants else {}
    try:
        SamplingParams(**from_file)
    except BadRequest as error:
        raise BrokenModel(f"generation_config.json: {error.message}") from None
    return SamplingParams(**{**from_file, **values})


def from_model(config: Mapping[str, Any], **named: Any) -> list[str]:
    """The names of the values that `with_model_defaults` takes from the model's generation_config.json."""
    return [key for key in _of_config(config) if named.get(key) is None]


def _of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a generation_config.json that count."""
    fields = {key: config[key] for key in _CONFIG_FIELDS if config.get(key) is not None}
    if not config.get("do_sample"):
        fields.pop("temperature", None)
    return fields


class Sampler:
    """Chooses the tokens of one sequence. Its state is the ids that it has seen and chosen, and its random generator
    (PCG64)."""

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self.params = params
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._chosen: Counter[int] = Counter()
        # Who always takes the best has none: to import numpy.random takes 10 ms of a run's start.
        self._rng = None if params.greedy else np.random.Generator(np.random.PCG64(params.seed))

    def next(
        self, logits: Floats, best: tuple[float, int] | None = None, allowed: Choice | None = None
    ) -> int:  # fmt: skip
        """The next token's id. `logits`, float32 [V], is never written to: it may be the engine's own slot. `best`: the
        largest logit and its id, where the head has found them already. `allowed`: the ids that may come, at least one,
        as bool [V], or int64 [n], rising; None for all. Raises BrokenModel for logits that are not finite."""
        if self.params.greedy and best is not None and not self.params.adjusts:
            _check_best(best[0])
            if allowed is None or _holds(allowed, best[1]):
                return best[1]
        check_finite(logits)
        logits = self._adjusted(logits)
        few: NDArray[np.int64] | None = None
        if allowed is not None:
            few, logits = _narrowed(allowed, logits, self.params.greedy)
        if self.params.greedy:
            chosen = int(np.argmax(logits))
        else:
            assert self._rng is not None, "only greedy ones have none"
            ids, probabilities = _kept(logits, self.params)
            bounds = np.cumsum(probabilities)
            # `side="right"` never lands on an entry of probability 0.
            place = int(np.searchsorted(bounds, self._rng.random() * bounds[-1], side="right"))
            chosen = int(ids[min(place, len(ids) - 1)])
        return self.force(chosen if few is None else int(few[chosen]))

    def force(self, token: int) -> int:
        """This token comes next, whatever the logits are."""
        if self.params.adjusts:
            self._seen.add(token)
            self._chosen[token] += 1
        return token

    def distribution(self, logits: Floats) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids that `next` would draw from, int64 [n], and their probabilities, float64 [n]. Draws nothing. Raises
        as `next`."""
        check_finite(logits)
        logits = self._adjusted(logits)
        if self.params.greedy:
            return np.array([np.argmax(logits)], np.int64), np.ones(1)
        return _kept(logits, self.params)

    def _adjusted(self, logits: Floats) -> Floats:
        """Logits float32 [V] after bias and penalties. Raises BadRequest for a bias of an id beyond the vocabulary."""
        params = self.params
        if not params.adjusts:
            return logits
        logits = logits.copy()
        most = np.finfo(np.float32).max  # beyond it lies infinity, and the difference of two infinities is NaN
        if params.biases:
            biased, biases = zip(*params.biases, strict=True)
            if max(biased) >= len(logits):
                raise BadRequest(f"logit_bias has id {max(biased)}, outside the vocabulary of {len(logits)}")
            np.add.at(logits, np.array(biased), np.array(biases, np.float32))
        if params.repetition_penalty != 1 and len(
            ids := np.array([i for i in self._seen if 0 <= i < len(logits)], np.int64)
        ):
            # CTRL's: the logit of a seen token becomes smaller, on either side of 0.
            penalty, seen = np.float32(params.repetition_penalty), logits[ids]
            with np.errstate(over="ignore"):
                logits[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if (params.presence_penalty or params.frequency_penalty) and self._chosen:
            ids = np.array(list(self._chosen))
            times = np.array(list(self._chosen.values()), np.float32)
            logits[ids] -= params.presence_penalty + np.float32(params.frequency_penalty) * times
        return np.clip(logits, -most, most)


def _holds(allowed: Choice, token: int) -> bool:
    return bool(allowed[token]) if allowed.dtype == np.bool_ else token in allowed


def _narrowed(allowed: Choice, logits: Floats, greedy: bool) -> tuple[NDArray[np.int64] | None, Floats]:
    """(ids, their logits alone), or (None, logits float32 [V], -inf where they are not allowed). The first is less work
    where less than a quarter is allowed and the logits will be sorted (not `greedy`), or ids are given."""
    if allowed.dtype == np.bool_:
        if greedy or 4 * np.count_nonzero(allowed) > len(allowed):
            return None, _barred(allowed.view(np.bool_)) + logits
        allowed = np.flatnonzero(allowed)
    ids = allowed.astype(np.int64, copy=False)
    return ids, logits[ids]


def _barred(allowed: NDArray[np.bool_]) -> Floats:
    """float32 [V]: 0 where an id is allowed, else -inf. Without a branch for each id: of 128k entries, 70 % of them
    allowed at random, np.where takes 1.0 ms, and this with the sum 0.04."""
    bits = allowed.view(np.uint8).astype(np.uint32)
    bits -= np.uint32(1)  # all ones where it is not allowed
    bits &= _MINUS_INFINITY
    return bits.view(np.float32)


def check_finite(logits: Floats) -> None:
    """Raises BrokenModel for logits float32 [V] that are not all finite."""
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
