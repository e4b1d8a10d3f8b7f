"""Rounds shares of KV, as FlexGen's program gives them, to whole layers, and says which layers have theirs in which
tier.

Tiers are numbered: 0 is the main executor's memory, 1 RAM, 2 the disk."""

from __future__ import annotations

from math import ceil, floor

from penstock.planner.programs.policy import Shares


def whole_layers(layers: int, shares: Shares, moved: int) -> list[Shares]:
    """Shares of KV in whole layers, near to `shares`. `moved`: the tier whose KV comes through windows.

    The number of layers in this tier is even, or it is all layers. There are two windows, which layers take by turns.
    With an odd number, the last layer and the first one would have the same window, and the first load of a pass would
    wait for the last save of the pass before."""

    def around(share: float, step: int) -> set[int]:
        return {floor(share * layers / step + 1e-6) * step, ceil(share * layers / step - 1e-6) * step}

    options = set()
    for those in around(shares[moved], 2) | ({layers} if shares[moved] > 1 - 1e-9 else set()):
        other = 1 if moved == 2 else 2
        for beside in around(shares[other], 1) if shares[other] > 0 else {0}:
            counts = [0, 0, 0]
            counts[moved], counts[other], counts[0] = those, beside, layers - those - beside
            if shares[0] == 0 and counts[0] and shares[other] > 0:
                counts[0], counts[other] = 0, layers - those
            if min(counts) >= 0:
                options.add((counts[0] / layers, counts[1] / layers, counts[2] / layers))
    return sorted(options)


def spread_layers(layers: int, shares: Shares) -> list[int]:
    """For each layer, the tier (0, 1 or 2) of its KV, so that the layers of each tier are spread evenly.

    From the last layer to the first, a layer gets the tier that is furthest behind its share. So the first layers have
    their KV at home, and a pass begins before its first load is done."""
    counts, tiers = [0, 0, 0], []
    whole = [int(share * layers + 1e-6) for share in shares]
    slowest = max(tier for tier in range(3) if shares[tier] > 0)  # rounding down leaves layers, which it takes
    whole[slowest] += layers - sum(whole)
    for i in range(layers):
        behind = [whole[t] * (i + 1) / layers - counts[t] if counts[t] < whole[t] else -1.0 for t in range(3)]
        tier = max(range(3), key=lambda t: (behind[t], t))
        counts[tier] += 1
        tiers.append(tier)
    return tiers[::-1]
