"""Profiles of a text: how often it asked for each expert of a model, how soon it asked again, and the routers' answers
for its first tokens; or how often each neuron of a model with ReLU fired.

Experts and neurons have the checkpoint's numbers. A profile is kept beside the packed model that it was made with.
"""

from __future__ import annotations

import re
import sys
from array import array
from base64 import b64decode
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.answers import all_guessable, all_possible, neurons_of_all
from penstock.spec.model import ModelSpec

SCHEMA, VERSION = "penstock.profile", 1
BEGINS = re.compile(rf'\s*\{{\s*"schema"\s*:\s*"{re.escape(SCHEMA)}/')  # how a profile's file begins
MOST_NAME = 1024  # characters of a text's name; file systems allow 255 bytes
FIRED_TOGETHER = (1, 2, 4, 8, 16, 32)  # tokens of which a profile says how many neurons they fire together
MOST_LEVEL = 1e30  # no activation is beyond it
TRACED_TOKENS = 512  # tokens whose answers are kept: more than a prediction asks for


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The profile of a layer's router. `counts[x]`: how many tokens went to expert x. `distances[d]`: how often an
    expert was asked for when exactly d others had been asked for since its last time. An expert's first time counts in
    none of them. So a cache of n slots that lets the longest unused expert go would have held the sum of the first n.
    `trace`: the experts of each of the first tokens, in rising order. `guesses`: what the router says to the input of
    the FFN one layer before, for the same tokens, the likeliest expert first; empty where that layer has no router."""

    layer: int
    counts: tuple[int, ...]
    distances: tuple[int, ...]
    trace: tuple[tuple[int, ...], ...]
    guesses: tuple[tuple[int, ...], ...] = ()

    def hit_rate(self, slots: int) -> float:
        """The share of requests that a cache of so many slots would hold, if it lets the longest unused expert go."""
        return sum(self.distances[:slots]) / max(1, sum(self.counts))


@dataclass(frozen=True, slots=True)
class FiringCounts:
    """How often the `neurons` neurons of a layer's FFN fired, whose activation is a ReLU. `counts`: for how many tokens
    each neuron did, base64 of uint32, little-endian. `fired[i]`: the share of the neurons that at least one of
    FIRED_TOGETHER[i] successive tokens fired, in the mean."""

    layer: int
    neurons: int
    counts: str
    fired: tuple[float, ...]

    def counted(self) -> array[int]:
        """`counts` as numbers. Raises ValueError where they are none."""
        numbers = array("I", b64decode(self.counts, validate=True))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers


@dataclass(frozen=True, slots=True)
class LayerLevel:
    """What counts as zero in a layer whose activation has no zeros of its own (`--sparsity threshold`): values whose
    magnitude is below `level`. `kept[i]`: the share of its neurons that are not below it for at least one of
    FIRED_TOGETHER[i] successive tokens, in the mean."""

    layer: int
    level: float
    kept: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a text's first `tokens` tokens. `name`: of the text's file. `text_sha256`: of the whole text.
    `layers`: of those with routers. `neurons`: of all layers of a model with a ReLU. `levels`: of all layers of a model
    without, where somebody asked for them."""

    name: str
    text_sha256: str
    tokens: int
    layers: tuple[LayerProfile, ...]
    neurons: tuple[FiringCounts, ...] = ()
    levels: tuple[LayerLevel, ...] = ()

    @property
    def source(self) -> str:
        return f"by a profile of {self.tokens} tokens of {self.name} (sha256 {self.text_sha256[:12]})"

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raises BadRequest if the profile is damaged, or of a model with other experts or neurons."""
        check_name(self.name, where)
        self._check_neurons(spec, where)
        self._check_levels(spec, where)
        wanted = {i: layer.routed for i, layer in enumerate(spec.layers) if layer.routed is not None}
        if [router.layer for router in self.layers] != list(wanted):
            raise BadRequest(f"{where} is the profile of another model: its layers with experts differ")
        for router in self.layers:
            routed = wanted[router.layer]
            assert routed is not None
            numbers = (*router.counts, *router.distances)
            fits = len(router.counts) == len(router.distances) == routed.experts and min(numbers) >= 0
            fits = fits and all_possible(router.trace, routed) and all_guessable(router.guesses, routed)
            if not fits or not router.trace or max(len(router.trace), len(router.guesses)) > TRACED_TOKENS:
                raise BadRequest(
                    f"{where} is the profile of another model, or damaged: layer {router.layer} has {routed.experts}"
                    f" experts, of which a token goes to {routed.active}"
                )

    def _check_levels(self, spec: ModelSpec, where: str) -> None:
        if self.levels and (
            [each.layer for each in self.levels] != list(range(len(spec.layers))) or not spec.has_levels
        ):
            raise BadRequest(f"{where} is the profile of another model: its levels are of other layers")
        for each in self.levels:
            rising = len(each.kept) == len(FIRED_TOGETHER) and all(
                0 <= a <= b <= 1 for a, b in pairwise((0, *each.kept))
            )
            if not 0 <= each.level <= MOST_LEVEL or not rising:
                raise BadRequest(f"{where} is damaged: its level of layer {each.layer} makes no sense")

    def _check_neurons(self, spec: ModelSpec, where: str) -> None:
        if [(each.layer, each.neurons) for each in self.neurons] != list(enumerate(neurons_of_all(spec))):
            raise BadRequest(f"{where} is the profile of another model: its neurons differ")
        for each in self.neurons:
            try:
                counts = each.counted()
            except ValueError:
                counts = array("I")
            shares = each.fired
            fits = len(counts) == each.neurons and max(counts) <= self.tokens and len(shares) == len(FIRED_TOGETHER)
            if not fits or not all(0 <= a <= b <= 1 for a, b in pairwise((0.0, *shares))):
                raise BadRequest(f"{where} is damaged: its counts of the neurons of layer {each.layer} make no sense")


def check_name(name: str, where: str) -> None:
    """Raises BadRequest for the name of a text that could not be shown in a line."""
    if len(name) > MOST_NAME or not name.isprintable():
        raise BadRequest(f"{where} is damaged: the name of its text cannot be shown")


class Counting:
    """Makes the profile of a layer, token by token."""

    def __init__(self, layer: int, experts: int) -> None:
        self._layer = layer
        self._counts, self._distances = [0] * experts, [0] * experts
        self._recent: list[int] = []  # experts asked for so far, the latest last
        self._trace: list[tuple[int, ...]] = []
        self._guesses: list[tuple[int, ...]] = []

    def guess(self, experts: tuple[int, ...]) -> None:
        """Keeps what is guessed of a token, the likeliest expert first. Tokens come in the same order as to `token`."""
        if len(self._guesses) < TRACED_TOKENS:
            self._guesses.append(experts)

    def token(self, experts: tuple[int, ...]) -> None:
        """Counts the experts that the next token goes to, in rising order."""
        if len(self._trace) < TRACED_TOKENS:
            self._trace.append(experts)
        before = list(self._recent)  # as it was before this token, which asks for all its experts at once
        for expert in experts:
            self._counts[expert] += 1
            if expert in before:
                self._distances[len(before) - 1 - before.index(expert)] += 1
                self._recent.remove(expert)
            self._recent.append(expert)

    def found(self) -> LayerProfile:
        counted = (tuple(self._counts), tuple(self._distances))
        return LayerProfile(self._layer, *counted, tuple(self._trace), tuple(self._guesses))


def hit_rates(profile: Profile) -> list[float]:
    """The hit rate of all layers together, for 0, 1, … slots in each layer."""
    asked = sum(sum(router.counts) for router in profile.layers)
    most = max(len(router.distances) for router in profile.layers)
    hits = [sum(router.distances[d] for router in profile.layers if d < len(router.distances)) for d in range(most)]
    return [0.0, *(total / max(1, asked) for total in accumulate(hits))]


def dumps(profile: Profile) -> str:
    return codec.dumps(profile, SCHEMA, VERSION)


def loads(text: str, where: str) -> Profile:
    """The profile of a profile file's text. `where` names the file in errors. Raises BadRequest."""
    return codec.loads(Profile, text, SCHEMA, VERSION, where)
