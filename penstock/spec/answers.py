"""Records of a run's answers: the experts that routers chose for each token, or the neurons that fired for it.

A run's tasks are a function of its plan, its passes and these answers, so a record lets them be derived again. Experts
and neurons have the checkpoint's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.live_sets import LiveSets, most_tokens
from penstock.spec.model import FfnSpec, ModelSpec, Routed

SCHEMA, VERSION = "penstock.answers", 1
BEGINS = f'{{\n "schema": "{SCHEMA}/'  # how a file of answers begins; a file that begins otherwise is not replaced
MOST_FILE_BYTES = 64 << 20
MOST_TOKENS = 16384  # the most tokens of a layer: 48 layers of 8 experts a token take 40 MB of JSON

Token = tuple[int, ...]  # the experts that a token goes to, in rising order


@dataclass(frozen=True, slots=True)
class RouterAnswers:
    """`layers`: for each layer, the tokens that its router was asked about, in the order in which they came. A layer
    has none if it is dense, or if nobody asked its router. `model`: the name of the packed model's folder. `guesses`:
    for each layer, what was guessed of the same tokens, the likeliest expert first. Tokens at the end of which nothing
    was guessed are left out. `live`: of a model with ReLU, for each layer the neurons that fired for each token;
    `foretold`: or those that predictors called active."""

    model: str
    layers: tuple[tuple[Token, ...], ...]
    guesses: tuple[tuple[Token, ...], ...] = ()
    live: tuple[LiveSets, ...] = ()
    foretold: bool = False

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raises BadRequest if the answers are damaged, of another model, or missing for a layer with experts."""
        if len(self.layers) != len(spec.layers):
            raise BadRequest(f"{where} has answers for {len(self.layers)} layers; this model has {len(spec.layers)}")
        if len(self.guesses) not in (0, len(spec.layers)):
            raise BadRequest(f"{where} has guesses for {len(self.guesses)} layers; this model has {len(spec.layers)}")
        for i, (guesses, layer) in enumerate(zip(self.guesses, spec.layers, strict=False)):
            if guesses and (layer.routed is None or not all_guessable(guesses, layer.routed)):
                raise BadRequest(f"{where} is of another model, or damaged: layer {i} guesses experts that it has not")
        for i, (tokens, layer) in enumerate(zip(self.layers, spec.layers, strict=True)):
            if tokens and (layer.routed is None or not all_possible(tokens, layer.routed)):
                raise BadRequest(f"{where} is of another model, or damaged: layer {i} says other experts than it has")
            if layer.routed is not None and not tokens:
                raise BadRequest(f"{where} has no answers for layer {i}: nobody asked its router")
        self._check_live(spec, where)

    def _check_live(self, spec: ModelSpec, where: str) -> None:
        wanted = neurons_of_all(spec)
        if [(each.layer, each.neurons) for each in self.live] != list(enumerate(wanted)):
            raise BadRequest(f"{where} is of another model: its neurons differ")
        for each in self.live:
            if not 1 <= each.tokens <= most_tokens(wanted) or each.tokens != self.live[0].tokens:
                raise BadRequest(f"{where} is damaged: it has {each.tokens} tokens of layer {each.layer}")
            each.rows()


def neurons_of_all(spec: ModelSpec) -> list[int]:
    """How many neurons each layer of a model with ReLU has; empty for other models."""
    return [layer.ffn.neurons for layer in spec.layers if isinstance(layer.ffn, FfnSpec)] if spec.fires else []


class Recorder:
    """Keeps the answers of routers, up to MOST_TOKENS tokens of each layer, and which neurons count, up to
    `live_sets.MOST_BYTES` of all layers. `foretold`: the latter are those that predictors call active."""

    def __init__(self, spec: ModelSpec, model: str, foretold: bool = False) -> None:
        self._model, self._foretold = model, foretold
        self._neurons = neurons_of_all(spec)
        self._most_live = min(MOST_TOKENS, most_tokens(self._neurons))
        self._live: list[list[bytes]] = [[] for _ in self._neurons]
        self._layers: list[list[Token]] = [[] for _ in spec.layers]
        self._guesses: list[list[Token]] = [[] for _ in spec.layers]

    def hear(self, layer: int, tokens: list[list[int]]) -> None:
        """Adds a router's answer: the experts of each token, in rising order."""
        kept = self._layers[layer]
        kept += [tuple(token) for token in tokens[: MOST_TOKENS - len(kept)]]

    def guess(self, layer: int, tokens: list[list[int]]) -> None:
        """Adds a guess about the tokens that come next: the experts of each, the likeliest first. Tokens before them
        of which nothing was guessed count as guesses of no expert."""
        kept, at = self._guesses[layer], len(self._layers[layer])
        kept += [()] * (at - len(kept))
        kept += [tuple(token) for token in tokens[: MOST_TOKENS - len(kept)]]

    def live(self, layer: int, rows: Sequence[bytes]) -> None:
        """Adds which neurons of a layer count for the next tokens, as bits (`live_sets`)."""
        kept = self._live[layer]
        kept += rows[: self._most_live - len(kept)]

    def answers(self) -> RouterAnswers:
        """What was heard. Of a pass that broke off some layers have more tokens than others: these are left out."""
        layers, guesses = (tuple(tuple(tokens) for tokens in each) for each in (self._layers, self._guesses))
        tokens = min(map(len, self._live), default=0)
        counted = zip(self._neurons, self._live, strict=True)
        live = tuple(LiveSets.of(i, neurons, rows[:tokens]) for i, (neurons, rows) in enumerate(counted))
        return RouterAnswers(self._model, layers, guesses if any(guesses) else (), live, self._foretold)


def all_possible(tokens: tuple[Token, ...], routed: Routed) -> bool:
    """Whether each token goes to exactly `routed.active` different experts of the layer, in rising order."""
    experts = range(routed.experts)
    return all(
        len(token) == routed.active and list(token) == sorted(set(token)) and all(expert in experts for expert in token)
        for token in tokens
    )


def all_guessable(tokens: tuple[Token, ...], routed: Routed) -> bool:
    """Whether each guess names at most `routed.active` different experts of the layer."""
    experts = range(routed.experts)
    return all(
        len(token) <= routed.active and len(set(token)) == len(token) and all(expert in experts for expert in token)
        for token in tokens
    )


def dumps(answers: RouterAnswers) -> str:
    """The answers as the text of a file."""
    return codec.dumps(answers, SCHEMA, VERSION)


def loads(text: str, where: str) -> RouterAnswers:
    """The answers of a file's text. `where` names the file in errors. Raises BadRequest."""
    return codec.loads(RouterAnswers, text, SCHEMA, VERSION, where)
