"""Tells of a profile that counted neurons how few of them make most activations, and how alike two texts' hottest are.

PowerInfer's Figure 4 is the first, of a layer and of the whole model, and its Figure 5 the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from penstock.spec.profile import Profile

MADE = (0.5, 0.8, 0.9, 0.99)  # shares of all activations
FIFTH = 0.2  # of a layer's neurons, the hottest first


def hottest_share(counts: Sequence[int], share: float) -> float:
    """The share of the neurons that makes `share` of all activations, if they are the hottest. `counts`: for how many
    tokens each neuron fired."""
    wanted, sums = share * sum(counts), accumulate(sorted(counts, reverse=True))
    return sum(1 for total in sums if total < wanted) / max(1, len(counts)) + 1 / max(1, len(counts))


def made_by(counts: Sequence[int]) -> tuple[float, ...]:
    """For each share of MADE the share of the neurons that makes it, the hottest first."""
    return tuple(hottest_share(counts, share) for share in MADE)


def made_by_all(profile: Profile) -> tuple[float, ...]:
    """The same with the hottest neurons of the whole model, whichever layers they are of."""
    return made_by([count for layer in profile.neurons for count in layer.counted()])


def hottest(counts: Sequence[int], share: float = FIFTH) -> frozenset[int]:
    """The numbers of the neurons that fired for most tokens, a `share` of all, one at least. Of equals the first."""
    count = max(1, round(share * len(counts)))
    return frozenset(sorted(range(len(counts)), key=lambda neuron: -counts[neuron])[:count])


def same_hottest(one: Profile, other: Profile) -> tuple[float, ...]:
    """For each layer: of its hottest fifth of neurons in one profile, the share that is in its hottest fifth in the
    other. Two texts that have nothing in common share a fifth. Both profiles are of one model."""
    found = []
    for layer, beside in zip(one.neurons, other.neurons, strict=True):
        first, second = (hottest(each.counted()) for each in (layer, beside))
        found.append(len(first & second) / len(first))
    return tuple(found)
