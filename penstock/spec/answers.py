"""What routers said in a run, so that its tasks can be derived again: they are a function of plan, passes and answers.

Experts have the checkpoint's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.model import ModelSpec, Routed

SCHEMA, VERSION = "penstock.answers", 1
BEGINS = f'{{\n "schema": "{SCHEMA}/'  # a file of them; whatever begins otherwise is not replaced
MOST_TOKENS = 16384  # of a layer: 48 layers of 8 experts a token take 40 MB of JSON

Token = tuple[int, ...]  # the experts that it goes to, upwards


@dataclass(frozen=True, slots=True)
class Answers:
    """`layers`: of each layer the tokens that its router was asked about, in the order in which they came; none of
    layers that are dense, or whose router nobody asked."""

    model: str
    layers: tuple[tuple[Token, ...], ...]

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raises BadRequest where they are not of such a model, or none."""
        if len(self.layers) != len(spec.layers):
            raise BadRequest(f"{where} has answers for {len(self.layers)} layers; this model has {len(spec.layers)}")
        for i, (tokens, layer) in enumerate(zip(self.layers, spec.layers, strict=True)):
            if tokens and (layer.routed is None or not all_possible(tokens, layer.routed)):
                raise BadRequest(f"{where} is of another model, or damaged: layer {i} says other experts than it has")
            if layer.routed is not None and not tokens:
                raise BadRequest(f"{where} has no answers for layer {i}: nobody asked its router")


class Recorder:
    """Keeps what routers say, up to MOST_TOKENS tokens of each layer."""

    def __init__(self, spec: ModelSpec, model: str) -> None:
        self._model = model
        self._layers: list[list[Token]] = [[] for _ in spec.layers]

    def hear(self, layer: int, tokens: list[list[int]]) -> None:
        kept = self._layers[layer]
        kept += [tuple(token) for token in tokens[: MOST_TOKENS - len(kept)]]

    def answers(self) -> Answers:
        return Answers(self._model, tuple(tuple(tokens) for tokens in self._layers))


def all_possible(tokens: tuple[Token, ...], routed: Routed) -> bool:
    """Whether each goes to as many different experts of the layer as it has to, upwards."""
    experts = range(routed.experts)
    return all(
        len(token) == routed.active and list(token) == sorted(set(token)) and all(expert in experts for expert in token)
        for token in tokens
    )


def dumps(answers: Answers) -> str:
    return codec.dumps(answers, SCHEMA, VERSION)


def loads(text: str, where: str) -> Answers:
    """Raises BadRequest."""
    return codec.loads(Answers, text, SCHEMA, VERSION, where)
