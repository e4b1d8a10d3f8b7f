"""What a text asked of a model's experts: counts, how soon they are asked for again, and the first tokens' own answers.

Experts have the checkpoint's numbers. A profile is kept beside the packed model that it was made with.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.answers import all_possible
from penstock.spec.model import ModelSpec

SCHEMA, VERSION = "penstock.profile", 1
TRACED_TOKENS = 512  # whose answers are kept: more than a prediction asks for


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Of a layer's router. `counts`: tokens that went to each expert. `distances[d]`: how often an expert was asked for
    when so many others had been asked for since its last time; what was asked for the first time is in none, so a cache
    of n slots that lets the longest unused go would have had the sum of the first n. `trace`: the experts of the first
    tokens, upwards."""

    layer: int
    counts: tuple[int, ...]
    distances: tuple[int, ...]
    trace: tuple[tuple[int, ...], ...]

    def hit_rate(self, slots: int) -> float:
        """Of a cache of so many slots that lets the longest unused go."""
        return sum(self.distances[:slots]) / max(1, sum(self.counts))


@dataclass(frozen=True, slots=True)
class Profile:
    """`text_sha256`: of the text, whose first `tokens` tokens were read. `name`: of its file."""

    name: str
    text_sha256: str
    tokens: int
    layers: tuple[LayerProfile, ...]

    @property
    def source(self) -> str:
        return f"by a profile of {self.tokens} tokens of {self.name} (sha256 {self.text_sha256[:12]})"

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raises BadRequest where it is not of such a model."""
        wanted = {i: layer.routed for i, layer in enumerate(spec.layers) if layer.routed is not None}
        if [each.layer for each in self.layers] != list(wanted):
            raise BadRequest(f"{where} is the profile of another model: its layers with experts differ")
        for each in self.layers:
            routed = wanted[each.layer]
            assert routed is not None
            numbers = (*each.counts, *each.distances)
            fits = len(each.counts) == len(each.distances) == routed.experts and min(numbers) >= 0
            fits = fits and all_possible(each.trace, routed)
            if not fits or not each.trace or len(each.trace) > TRACED_TOKENS:
                raise BadRequest(
                    f"{where} is the profile of another model, or damaged: layer {each.layer} has {routed.experts}"
                    f" experts, of which a token goes to {routed.active}"
                )


class Counting:
    """Makes the profile of a layer, token by token."""

    def __init__(self, layer: int, experts: int) -> None:
        self._layer = layer
        self._counts, self._distances = [0] * experts, [0] * experts
        self._recent: list[int] = []  # the latest last
        self._trace: list[tuple[int, ...]] = []

    def token(self, experts: tuple[int, ...]) -> None:
        """The experts that a token goes to, upwards."""
        if len(self._trace) < TRACED_TOKENS:
            self._trace.append(experts)
        before = list(self._recent)  # those of one token are asked for at once
        for expert in experts:
            self._counts[expert] += 1
            if expert in before:
                self._distances[len(before) - 1 - before.index(expert)] += 1
                self._recent.remove(expert)
            self._recent.append(expert)

    def found(self) -> LayerProfile:
        return LayerProfile(self._layer, tuple(self._counts), tuple(self._distances), tuple(self._trace))


def hit_rates(profile: Profile) -> list[float]:
    """Of all layers together, with 0, 1, … slots in each."""
    asked = sum(sum(each.counts) for each in profile.layers)
    most = max(len(each.distances) for each in profile.layers)
    hits = [sum(each.distances[d] for each in profile.layers if d < len(each.distances)) for d in range(most)]
    return [0.0, *(total / max(1, asked) for total in accumulate(hits))]


def dumps(profile: Profile) -> str:
    return codec.dumps(profile, SCHEMA, VERSION)


def loads(text: str, where: str) -> Profile:
    """Raises BadRequest."""
    return codec.loads(Profile, text, SCHEMA, VERSION, where)
