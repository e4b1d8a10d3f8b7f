"""Turns arrays over the neurons of a packed model, which go by place, into the checkpoint's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.bind import OnFired


def by_number(heard: OnFired, orders: Mapping[int, Sequence[int]]) -> OnFired:
    """A listener that calls `heard` with each layer's neurons in the checkpoint's order. `orders`: layer → the order in
    which they lie (`spec.order`); layers without one lie as in the checkpoint."""
    places = {layer: np.argsort(np.asarray(order)) for layer, order in orders.items()}

    def hear(layer: int, h: NDArray[np.float32], fired: NDArray[np.uint8]) -> None:
        heard(layer, h, fired[:, places[layer]] if layer in places else fired)

    return hear
