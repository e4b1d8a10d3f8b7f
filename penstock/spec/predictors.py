"""What is known of a model's predictors (PowerInfer §5.1): how large each is, and how well it foretells who fires.

They are trained for one packed model, and kept beside it (`store.predictors`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import BadRequest
from penstock.spec import codec
from penstock.spec.format import Format
from penstock.spec.model import FfnSpec, ModelSpec
from penstock.spec.parts import Part, predictor_part
from penstock.spec.profile import FIRED_TOGETHER, check_name

SCHEMA, VERSION = "penstock.predictors", 1
TRAIN = "train them: penstock train-predictors MODEL --text FILE"  # what to do where there are none
FORMAT = Format("int8", 32)  # of their matrices
MOST_RANK = 1 << 14
MOST_AHEAD = 1  # layers
RANK_STEP = 32  # hidden neurons come in whole groups of FORMAT


@dataclass(frozen=True, slots=True)
class LayerPredictor:
    """The predictor of a layer, as measured on text that it was not trained on. `recall`: of the neurons that fire, the
    share that it calls active. `false_alarms`: of those that it calls active, the share that does not fire. `fires`:
    the share of the neurons that fires for a token. `active[i]`: the share that it calls active for at least one of
    FIRED_TOGETHER[i] successive tokens, in the mean."""

    layer: int
    rank: int
    recall: float
    false_alarms: float
    fires: float
    active: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Predictors:
    """`model_sha256`: of the penstock.json of the packed model that they are for. `name`, `text_sha256`: of the text's
    file, and of the text. `tokens`: that they were trained on. `seed`, `recall`: as asked for. `sums`: of each layer's
    granule the XXH3 checksum, in hexadecimal. `ahead`: 0, or 1 if they hear the FFN's input of the layer before their
    own (`plan.Predictor`)."""

    model_sha256: str
    name: str
    text_sha256: str
    tokens: int
    seed: int
    recall: float
    layers: tuple[LayerPredictor, ...]
    sums: tuple[str, ...]
    ahead: int = 0

    @property
    def source(self) -> str:
        before = ", one layer ahead" if self.ahead else ""
        return f"by predictors trained on {self.tokens} tokens of {self.name}{before}"

    def mean(self, spec: ModelSpec) -> LayerPredictor:
        """All layers together, by how many neurons they have, or how many fire. Its rank is the mean, rounded."""
        neurons = [spec.layers[each.layer].ffns[0].neurons for each in self.layers]
        whole = sum(neurons)
        fires = sum(each.fires * n for each, n in zip(self.layers, neurons, strict=True))
        named = sum(each.recall * each.fires * n for each, n in zip(self.layers, neurons, strict=True))
        columns = zip(*(each.active for each in self.layers), strict=True)
        active = tuple(sum(a * n for a, n in zip(at, neurons, strict=True)) / whole for at in columns)
        rank = round(sum(each.rank for each in self.layers) / len(self.layers))
        alarms = 1 - named / (active[0] * whole) if active[0] else 0.0
        return LayerPredictor(-1, rank, named / fires if fires else 1.0, max(0.0, alarms), fires / whole, active)

    def weights(self, spec: ModelSpec) -> int:
        """How many weights they have, without padding and biases."""
        return sum(each.rank * (spec.d_model + spec.layers[each.layer].ffns[0].neurons) for each in self.layers)

    def check(self, spec: ModelSpec, where: str) -> None:
        """Raises BadRequest if this is damaged, or of a model with other layers."""
        check_name(self.name, where)
        if [each.layer for each in self.layers] != predicted_layers(spec) or len(self.sums) != len(self.layers):
            raise BadRequest(f"{where} has the predictors of another model: its layers differ")
        if self.ahead not in range(MOST_AHEAD + 1):
            raise BadRequest(f"{where} is damaged: its predictors hear a layer {self.ahead} before their own")
        for each in self.layers:
            shares = (each.recall, each.false_alarms, each.fires, *each.active)
            fits = 1 <= each.rank <= MOST_RANK and each.rank % RANK_STEP == 0 and all(0 <= x <= 1 for x in shares)
            fits = fits and len(each.active) == len(FIRED_TOGETHER)
            if not fits or not all(a <= b for a, b in pairwise(each.active)):
                raise BadRequest(f"{where} is damaged: its predictor of layer {each.layer} makes no sense")
        if not all(len(each) == 16 and set(each) <= set("0123456789abcdef") for each in self.sums):
            raise BadRequest(f"{where} is damaged: its checksums make no sense")

    def parts(self, spec: ModelSpec) -> tuple[Part, ...]:
        """The part of each layer's predictor."""
        return tuple(part_of(spec, each.layer, each.rank) for each in self.layers)


def predicted_layers(spec: ModelSpec) -> list[int]:
    """The layers that predictors can be for: those with a dense FFN."""
    return [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, FfnSpec)]


def part_of(spec: ModelSpec, layer: int, rank: int) -> Part:
    return predictor_part(layer, spec.d_model, rank, spec.layers[layer].ffns[0].neurons, FORMAT)


def dumps(predictors: Predictors) -> str:
    text = codec.dumps(predictors, SCHEMA, VERSION)
    if predictors.ahead:
        return text
    # A file is compared with what is written of it, and files from before this field have none.
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "ahead"}, indent=1)


def loads(text: str, where: str) -> Predictors:
    """Raises BadRequest."""
    return codec.loads(Predictors, text, SCHEMA, VERSION, where)
