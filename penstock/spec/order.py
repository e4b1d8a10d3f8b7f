"""The order in which a layer's FFN neurons lie in a packed model, where that is not the checkpoint's.

An order is an array of numbers: neuron `order[i]` of the checkpoint lies at place i. PowerInfer's placement wants hot
neurons beside each other (section 6.1 there), and so do granules that are left out whole: they are still only if
none of their neurons fires.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import BadRequest
from penstock.spec.format import Format
from penstock.spec.parts import GRANULE_ROWS


@dataclass(frozen=True, slots=True)
class NeuronOrder:
    """The order of the neurons of a layer's FFN. `order`: base64 of uint32, little-endian."""

    layer: int
    order: str

    @classmethod
    def of(cls, layer: int, order: Sequence[int]) -> NeuronOrder:
        return cls(layer, b64encode(_little(array("I", order)).tobytes()).decode())

    def numbers(self, neurons: int) -> array[int]:
        """The order as numbers, of a layer with so many neurons. Raises BadRequest where it is no permutation of
        them."""
        try:
            order = array("I", b64decode(self.order, validate=True))
        except ValueError:
            order = array("I")
        order = _little(order)
        if len(order) != neurons or max(order) >= neurons or len(set(order)) < neurons:
            raise BadRequest(f"the order of the neurons of layer {self.layer} is no permutation of {neurons}")
        return order


def _little(numbers: array[int]) -> array[int]:
    """The same numbers, with their bytes swapped where this processor has the highest first."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def moved_together(weights: Format) -> int:
    """How many neurons of a packed model can only move together, if its numbers are to stay as they are. In tiles,
    `down`'s groups run along the neurons of a granule."""
    if weights.neurons or not weights.is_quantised:
        return 1
    return weights.group if GRANULE_ROWS % weights.group == 0 else GRANULE_ROWS


def hot_to_cold(counts: Sequence[int], order: Sequence[int] | None = None, together: int = 1) -> array[int]:
    """A layer's neurons, those first that fired for most tokens. Equals stay as they were.

    `counts[n]`: for how many tokens neuron n of the checkpoint fired. `order`: the order so far, None for the
    checkpoint's. `together`: so many neurons that lie together move together, by the sum of their counts. A rest of
    fewer stays last."""
    now = array("I", range(len(counts)) if order is None else order)
    whole = len(now) // together * together
    runs = [now[lo : lo + together] for lo in range(0, whole, together)]
    runs.sort(key=lambda run: -sum(counts[n] for n in run))
    ordered = array("I")
    for run in runs:
        ordered.extend(run)
    return ordered + now[whole:]
