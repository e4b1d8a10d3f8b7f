"""Trains the predictor of one layer: which neurons fire for an FFN's input (PowerInfer §5.1). Pure numpy.

    active = neurons · relu(hidden · h + hidden_bias) + neurons_bias > 0

Shapes: n tokens, D d_model, R rank, N neurons. Training minimises the binary cross-entropy of each neuron by Adam. A
layer's threshold is then moved into `neurons_bias`, so that the wanted share of what fires is called active: a higher
recall costs more false alarms. The matrices are rounded to int8 before that, so the threshold fits them as they run.
Adding up in one thread and one order, the same seed gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.spec.parts import Part
from penstock.store.quantize import decode, encode

EPOCHS, BATCH = 6, 256
LEAST_STEPS = 1000  # a short text is read more than EPOCHS times
_RATE, _WARM_SHARE = 2e-3, 0.1  # of Adam; the rate rises for that share of the steps, and falls to 0 as a cosine
_MEAN, _SQUARE = 0.9, 0.99
_RAREST = 1e-4  # a neuron that never fired is taken to fire this often
_MOST_SCORE = 30.0  # e^30 is far from overflow, and a probability of 1e-13 as good as 0
_NEVER = np.float32(-1e30)  # the bias of neurons that are there for whole granules alone

Float32 = NDArray[np.float32]
Uint8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard of a layer: its FFN's input `h` float16 [n, D], and who fired, packed bits uint8 [n, ⌈N / 8⌉]."""

    h: NDArray[np.float16]
    fired: Uint8
    neurons: int

    def rows(self, chosen: NDArray[np.intp] | slice) -> tuple[Float32, Uint8]:
        """(h float32 [rows, D], who fired uint8 [rows, N])."""
        fired = np.unpackbits(self.fired[chosen], axis=1, count=self.neurons)
        return self.h[chosen].astype(np.float32), fired


@dataclass(frozen=True, slots=True)
class Fitted:
    """hidden [D, R], hidden_bias [R], neurons [R, N], neurons_bias [N]."""

    hidden: Float32
    hidden_bias: Float32
    neurons: Float32
    neurons_bias: Float32

    def scores(self, h: Float32) -> Float32:
        """float32 [rows, N] of h float32 [rows, D]: a neuron is called active above 0."""
        kept: Float32 = np.maximum(h @ self.hidden + self.hidden_bias, 0)
        return kept @ self.neurons + self.neurons_bias


def fit(heard: Heard, chosen: NDArray[np.intp], rank: int, seed: int) -> Fitted:
    """Trains on the tokens with the numbers `chosen`, intp [n], in an order that `seed` gives."""
    rng, d, n = np.random.default_rng([seed, rank]), heard.h.shape[1], len(chosen)
    often = np.zeros(heard.neurons)
    size = 0.0
    for lo in range(0, n, 16 * BATCH):
        h, fired = heard.rows(chosen[lo : lo + 16 * BATCH])
        often += fired.sum(0, dtype=np.float64)
        size += float(np.square(h).sum(dtype=np.float64))
    often /= n
    scale = max(1e-6, (size / (n * d)) ** 0.5)  # h's numbers
    hidden = rng.standard_normal((d, rank), np.float32) * np.float32(d**-0.5 / scale)
    neurons = rng.standard_normal((rank, heard.neurons), np.float32) * np.float32(0.1 * rank**-0.5)
    odds = np.log((often + _RAREST) / (1 - often + _RAREST)).astype(np.float32)
    weights = [hidden, np.zeros(rank, np.float32), neurons, odds]
    per_epoch = max(1, n // BATCH)
    epochs = max(EPOCHS, -(-LEAST_STEPS // per_epoch))
    adam = _Adam(weights, epochs * per_epoch)
    for _ in range(epochs):
        order = chosen[rng.permutation(n)]
        for lo in range(0, per_epoch * BATCH, BATCH):
            adam.step(_gradients(weights, *heard.rows(order[lo : lo + BATCH])))
    return Fitted(*weights)


def _gradients(weights: list[Float32], h: Float32, fired: Uint8) -> list[Float32]:
    """Of the mean cross-entropy of a batch, summed over neurons."""
    hidden, hidden_bias, neurons, neurons_bias = weights
    before = h @ hidden + hidden_bias  # [rows, R]
    kept = np.maximum(before, 0)
    scores = kept @ neurons + neurons_bias  # [rows, N]
    np.clip(scores, -_MOST_SCORE, _MOST_SCORE, out=scores)
    np.negative(scores, out=scores)
    np.exp(scores, out=scores)
    scores += 1
    error = np.divide(1, scores, out=scores)
    error -= fired
    error *= np.float32(1 / len(h))
    back = error @ neurons.T
    back *= before > 0
    return [h.T @ back, back.sum(0), kept.T @ error, error.sum(0)]


class _Adam:
    """Kingma and Ba, Algorithm 1, in place. `steps`: how many there will be."""

    def __init__(self, weights: list[Float32], steps: int) -> None:
        self._weights, self._steps, self._taken = weights, steps, 0
        self._means = [np.zeros_like(w) for w in weights]
        self._squares = [np.zeros_like(w) for w in weights]

    def step(self, gradients: list[Float32]) -> None:
        self._taken += 1
        t = self._taken
        rate = _RATE * min(1.0, t / (_WARM_SHARE * self._steps)) * 0.5 * (1 + np.cos(np.pi * t / self._steps))
        rate *= (1 - _SQUARE**t) ** 0.5 / (1 - _MEAN**t)
        for weight, gradient, mean, square in zip(self._weights, gradients, self._means, self._squares, strict=True):
            mean *= np.float32(_MEAN)
            mean += np.float32(1 - _MEAN) * gradient
            square *= np.float32(_SQUARE)
            np.square(gradient, out=gradient)
            gradient *= np.float32(1 - _SQUARE)
            square += gradient
            step = np.sqrt(square, out=gradient)
            step += np.float32(1e-8)
            np.divide(mean, step, out=step)
            step *= np.float32(rate)
            weight -= step


def rounded(fitted: Fitted, part: Part) -> Fitted:
    """The predictor with its matrices as they are in the format of its part."""
    hidden, neurons = part.block("hidden"), part.block("neurons")
    n = fitted.neurons.shape[1]
    first = decode(encode(fitted.hidden.T, hidden.format), hidden.rows, hidden.cols, hidden.format)
    second = decode(encode(fitted.neurons.T, neurons.format, neurons.rows, neurons.cols), neurons.rows, neurons.cols,
                    neurons.format)  # fmt: skip
    return Fitted(
        np.ascontiguousarray(first.T), fitted.hidden_bias, np.ascontiguousarray(second[:n].T), fitted.neurons_bias
    )


def with_recall(fitted: Fitted, heard: Heard, chosen: NDArray[np.intp], recall: float) -> Fitted:
    """The predictor with its threshold moved so that of what fires in the tokens with the numbers `chosen`, intp [n],
    the share `recall` is called active."""
    above = []
    for lo in range(0, len(chosen), 4 * BATCH):
        h, fired = heard.rows(chosen[lo : lo + 4 * BATCH])
        above.append(fitted.scores(h)[fired != 0])
    scores = np.concatenate(above) if above else np.zeros(0, np.float32)
    if not len(scores):
        return fitted
    # So many of the lowest scores may be missed. The threshold is just below the next one, for a score has to be above
    # it.
    missed = min(len(scores) - 1, int((1 - recall) * len(scores)))
    threshold = np.nextafter(np.partition(scores, missed)[missed], np.float32(-np.inf))
    return Fitted(fitted.hidden, fitted.hidden_bias, fitted.neurons, fitted.neurons_bias - threshold)


def granule_of(fitted: Fitted, part: Part) -> Uint8:
    """The predictor as its part's granule, uint8 [granule_bytes]."""
    granule = np.zeros(part.granule_bytes, np.uint8)
    columns, n = part.block("neurons").rows, len(fitted.neurons_bias)
    bias = np.full(columns, _NEVER, np.float32)
    bias[:n] = fitted.neurons_bias
    values: dict[str, NDArray[Any]] = {
        "hidden": fitted.hidden.T, "neurons": fitted.neurons.T, "hidden_bias": fitted.hidden_bias, "neurons_bias": bias,
    }  # fmt: skip
    for block in part.blocks:
        into = granule[block.offset : block.offset + block.nbytes]
        if block.tiled:
            encode(np.ascontiguousarray(values[block.name]), block.format, block.rows, block.cols, into)
        else:
            into[:] = values[block.name].view(np.uint8)
    return granule
