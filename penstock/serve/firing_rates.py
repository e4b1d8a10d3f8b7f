"""Makes neurons of random ReLU models fire at given rates, and measures how often they do, for `penstock synth`.

Random tokens go through one layer after the other, by the kernels that compute answers. A neuron's value before its
ReLU is a sum of many independent terms. So over the tokens it is nearly normal, with a mean and a standard deviation.
This shift of the value makes the neuron fire at the rate r:

    shift = deviation · z(r) - mean        z: the quantile function of the standard normal distribution

If the neuron has no bias, the shift is added to all weights of its row. It is then multiplied by the sum of the FFN's
input. So mean and deviation are taken of the neuron's values divided by that sum.

Half of the windows of tokens give the shifts. The rates are measured in the other half. If a model has learned
positions, a token of the first half has any position, and a window of the second half begins at any position.

Shapes: T rows (tokens), D d_model, N neurons of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph import ops, passes
from penstock.graph.lower import Lowering
from penstock.graph.resident import resident_plan
from penstock.planner.activity import HOT_SHARE, Curve, of_mean
from penstock.runtime import host
from penstock.runtime.arena import Arenas
from penstock.runtime.bind_native import NativeBinding, native
from penstock.runtime.host import Progress
from penstock.spec.format import FLOAT32, Format
from penstock.spec.model import ModelSpec
from penstock.spec.places import HOST
from penstock.spec.plan import Plan
from penstock.store.files import read_text
from penstock.store.quantize import decode, decode_block
from penstock.store.synth import RandomWeights, Rated
from penstock.units import format_bytes

Float32 = NDArray[np.float32]

ACTIVE = 0.03  # the share of neurons that a token needs in OPT models: PowerInfer, Table 3
ZIPF = "zipf:"
# Rates beyond these are as if they were these: what a few hundred tokens could not tell from never or always.
LEAST, MOST = 1e-5, 1 - 1e-5
_MAX_FILE_BYTES = 64 << 20
_MOST_STEEP = 4.0
_WINDOWS, _WINDOW_TOKENS = 8, 64
_BYTES = 256  # tokens are drawn from those of the byte tokenizer


@dataclass(frozen=True)
class FiringRates:
    """How often neurons fire, in no order: float64 [N] for all layers, or one for each. `said`: as the user said it."""

    layers: tuple[NDArray[np.float64], ...]
    said: str

    def of(self, layer: int, seed: int) -> NDArray[np.float64]:
        """float64 [N]: the rate of each neuron of a layer. They are shuffled, in each layer differently."""
        rates = self.layers[layer % len(self.layers)]
        return np.random.default_rng([seed, layer, 4]).permutation(rates).clip(LEAST, MOST)


@dataclass(frozen=True)
class HowFired:
    """How the neurons of a layer fired, as measured, or the means of several layers.

    active  the share of neurons that fire for a token
    hot     the share of neurons whose rates are meant to make 80 % of all activations
    made    the share of all activations that these hot neurons made
    alike   the share of a token's live neurons that were live for the token before it too
    """

    active: float
    hot: float
    made: float
    alike: float


def parse_rates(said: str, spec: ModelSpec) -> FiringRates:
    """`said`: "zipf:S", the rate of the neuron at rank r falling as r^-S, at most 1, with a mean of 3 %; or a file with
    a rate between 0 and 1 on each line, for the neurons of a layer or for those of all layers.

    Raises BadRequest; BrokenModel and StorageFailed where the file cannot be read.
    """
    Rated.of(spec)
    neurons = {layer.ffns[0].neurons for layer in spec.layers}
    if said.startswith(ZIPF):
        steepness = _number(said.removeprefix(ZIPF))
        if steepness is None or not 0 <= steepness <= _MOST_STEEP:
            raise BadRequest(f"{said!r}: after {ZIPF} comes the steepness, a number from 0 to {_MOST_STEEP:g}")
        by_size = {n: _zipf(n, steepness) for n in neurons}
        return FiringRates(tuple(by_size[layer.ffns[0].neurons] for layer in spec.layers), said)
    file = Path(said)
    if not file.exists():
        raise BadRequest(f"{said} is neither {ZIPF}S nor a file")
    lines = read_text(file, _MAX_FILE_BYTES).split()
    total = sum(layer.ffns[0].neurons for layer in spec.layers)
    if len(lines) != total and neurons != {len(lines)}:
        per_layer = f"{min(neurons)} of a layer or " if len(neurons) == 1 else ""
        raise BadRequest(f"{said} has {len(lines)} rates; this model needs {per_layer}{total} of all layers")
    rates = np.empty(len(lines))
    for i, line in enumerate(lines):
        rate = _number(line)
        if rate is None or not 0 <= rate <= 1:
            raise BadRequest(f"{said}: rate {i + 1} is {line[:20]!r}, not a number from 0 to 1")
        rates[i] = rate
    if len(lines) != total:
        return FiringRates((rates,), said)
    edges = accumulate((layer.ffns[0].neurons for layer in spec.layers), initial=0)
    return FiringRates(tuple(rates[lo:hi] for lo, hi in pairwise(edges)), said)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _zipf(neurons: int, steepness: float) -> NDArray[np.float64]:
    curve: Curve = of_mean(ACTIVE, steepness)
    return np.array([curve.mean(i / neurons, (i + 1) / neurons) for i in range(neurons)])


def find_shifts(
    spec: ModelSpec, weights: Format, seed: int, rates: FiringRates, on_progress: Progress | None = None
) -> tuple[dict[int, Float32], tuple[HowFired, ...]]:
    """The shifts of each layer's neurons, [N] float32, for `store.synth`, and what was measured in each layer. No more
    than a layer's weights are in memory. Raises DoesNotFit, StorageFailed where the system refuses memory, and
    BadRequest where an FFN's inputs have nothing in common."""
    shifts: dict[int, Float32] = {}
    maker = RandomWeights(spec, seed, shifts=shifts)
    tokens = np.random.default_rng([seed, 5]).integers(0, min(_BYTES, spec.vocab), (_WINDOWS, _width(spec)), np.int32)
    fired: list[HowFired] = []
    x: Float32 | None = None
    layer = _OneLayer(spec, weights, maker, 0)
    try:
        for i in range(len(spec.layers)):
            if on_progress:
                on_progress("measuring the neurons of layers", i, len(spec.layers))
            if spec.layers[i] != spec.layers[max(0, i - 1)]:
                layer.close()
                layer = _OneLayer(spec, weights, maker, i)
            x, measured = layer.run(i, tokens, x, rates.of(i, seed), shifts)
            fired.append(measured)
    finally:
        layer.close()
    return shifts, tuple(fired)


def together(fired: Sequence[HowFired]) -> HowFired:
    """The means over the layers."""
    return HowFired(*(sum(values) / len(fired) for values in zip(*map(astuple, fired), strict=True)))


def _width(spec: ModelSpec) -> int:
    return min(_WINDOW_TOKENS, spec.max_positions)


class _OneLayer:
    """One layer of a model at a time, in RAM, with the weights that the whole model will have there. The layers are all
    like the one at `index`."""

    def __init__(self, spec: ModelSpec, weights: Format, maker: RandomWeights, index: int) -> None:
        self._maker, self._rated = maker, Rated.of(spec)
        alone = replace(spec, layers=(spec.layers[index],), vocab=min(spec.vocab, _BYTES), tied=True)
        rows = _WINDOWS * _width(spec)
        self._plan = resident_plan(
            alone, weights, kv=FLOAT32, context=_width(spec), rows=rows, seqs=_WINDOWS, logits_rows=_WINDOWS
        )
        _require_room(self._plan, alone)
        self._lowering, self._arenas = Lowering(self._plan), Arenas(self._plan)
        self._slots = {self._plan.units[i].part: slot for i, slot in self._lowering.layout.weights.items()}
        self._fill(index, "embed", "edges")
        self._binding = NativeBinding(
            self._plan, self._arenas, None, native(None, host.usable_threads(None), exact=False)
        )

    def close(self) -> None:
        self._arenas.close()

    def _fill(self, index: int, *kinds: str) -> None:
        """Writes the weights of parts of these kinds, as the whole model has them in its layer `index`."""
        for part in self._plan.parts.values():
            if part.kind in kinds:
                there = part if part.layer < 0 else replace(part, key=f"{index}.{part.kind}", layer=index)
                self._maker.fill(there, 0, part.granules, self._arenas.view(self._slots[part.key]))

    def run(
        self, index: int, tokens: NDArray[np.int32], x: Float32 | None, rates: NDArray[np.float64],
        shifts: dict[int, Float32],
    ) -> tuple[Float32, HowFired]:  # fmt: skip
        """Finds the shifts of layer `index`, and puts them into `shifts`. tokens int32 [windows, tokens]. `x` float32
        [T, D]: what the layer before has left; None for the first. Returns what this one leaves, and what was
        measured."""
        self._fill(index, "norms", "attn", "ffn")
        (p,) = passes.prompts(self._plan, range(len(tokens)), [tokens.shape[1]] * len(tokens), None)
        layout, shape = self._lowering.layout, (tokens.size, self._plan.target.spec.d_model)
        ids = layout.act(HOST, p.batches[0].id, "tokens", 4 * tokens.size)
        self._arenas.view(ids).view(np.int32)[...] = tokens.reshape(-1)
        self._binding.begin()
        measured: HowFired | None = None
        for call in (call for task in self._lowering.step(p) for call in task.calls):
            if isinstance(call.operands, ops.Ffn):
                h = self._arenas.array(call.operands.h, np.float32, shape)
                shifts[index], measured = self._find(h, tokens.shape, rates)
                self._fill(index, "ffn")
            self._binding.call(call)
            if isinstance(call.operands, ops.Embed):
                embedded = self._arenas.array(call.operands.x, np.float32, shape)
                if x is None:
                    self._move(embedded, tokens.shape)
                else:
                    embedded[...] = x
            if isinstance(call.operands, ops.Merge):
                left = call.operands.x
        assert measured is not None
        return self._arenas.array(left, np.float32, shape).copy(), measured

    def _move(self, x: Float32, windows: tuple[int, ...]) -> None:
        """Gives tokens other learned positions, if the model has any. x float32 [T, D]: embedded at the first ones."""
        spec = self._plan.target.spec
        if not spec.position_rows:
            return
        block, edges = self._plan.parts["edges"].block("positions"), self._arenas.view(self._slots["edges"])
        packed = edges[block.offset : block.offset + block.nbytes]
        table = decode(packed, block.rows, block.cols, block.format, tiled=False)[spec.position_offset :]
        rng, (count, width) = np.random.default_rng([self._maker.seed, 6]), windows
        at = np.tile(np.arange(width), (count, 1))  # [windows, tokens]
        moved = at + rng.integers(0, spec.max_positions - width + 1, (count, 1))
        moved[: count // 2] = rng.integers(0, spec.max_positions, (count // 2, width))
        x += table[moved.reshape(-1)] - table[at.reshape(-1)]

    def _find(self, h: Float32, windows: tuple[int, ...], rates: NDArray[np.float64]) -> tuple[Float32, HowFired]:
        """The shifts [N] for inputs h float32 [T, D], and what was measured."""
        part = self._plan.parts["0.ffn"]
        weights = self._arenas.view(self._slots["0.ffn"]).reshape(part.granules, part.granule_bytes)
        block, count, n = part.block(self._rated.matrix), math.prod(windows), part.granule_rows
        scale = np.ones((count, 1), np.float32) if self._rated.bias else h.sum(1, keepdims=True)  # [T, 1]
        if not (scale > 0).all():
            raise BadRequest("inputs of an FFN have nothing in common: this model's neurons cannot be given rates")
        halves, normal = count // 2, NormalDist()
        z = np.array([normal.inv_cdf(rate) for rate in rates], np.float32)  # [N]
        biases, measured = np.empty(part.rows, np.float32), _Counts(part.rows, windows)
        for g, granule in enumerate(weights):
            rows = slice(g * n, min((g + 1) * n, part.rows))
            matrix = decode_block(granule, block)
            before = h @ matrix[: rows.stop - rows.start].T / scale  # [T, rows]
            fitted = before[:halves]
            biases[rows] = fitted.std(0) * z[rows] - fitted.mean(0)
            measured.add(rows, (before + biases[rows] > 0)[halves:])
        return biases, measured.found(rates)


def _require_room(plan: Plan, spec: ModelSpec) -> None:
    """Raises DoesNotFit where this machine has no room for a layer, and for learned positions as they are made."""
    need, have = plan.tier_bytes()[HOST] + 4 * spec.position_rows * spec.d_model, host.available_bytes()
    if need > have:
        text = f"measuring neurons takes {format_bytes(need)}, a layer of the model by itself"
        raise DoesNotFit(
            f"{text}; {format_bytes(have)} is free", tier=HOST, need_bytes=need, have_bytes=have, minimum_bytes=need
        )


class _Counts:
    """How often neurons fired in the second half of the windows, [windows, tokens] in all."""

    def __init__(self, neurons: int, windows: tuple[int, ...]) -> None:
        self._windows, self._fired = windows, np.zeros(neurons, np.int64)
        self._both = self._after = 0

    def add(self, rows: slice, fires: NDArray[np.bool_]) -> None:
        """fires [T / 2, rows]."""
        self._fired[rows] += fires.sum(0)
        by_window = fires.reshape(-1, self._windows[1], fires.shape[1])  # [windows / 2, tokens, rows]
        self._both += int((by_window[:, 1:] & by_window[:, :-1]).sum())
        self._after += int(by_window[:, 1:].sum())

    def found(self, rates: NDArray[np.float64]) -> HowFired:
        """`rates` [N]: those that the neurons were given."""
        total, tokens, order = int(self._fired.sum()), math.prod(self._windows) // 2, np.argsort(-rates)
        hot = int(np.searchsorted(rates[order].cumsum(), HOT_SHARE * rates.sum())) + 1
        made = self._fired[order[:hot]].sum() / max(1, total)
        return HowFired(total / tokens / len(rates), hot / len(rates), float(made), self._both / max(1, self._after))
