"""Sums over a plan's homes: the bytes of weights in each tier, and the layers whose KV a tier has."""

from __future__ import annotations

from penstock.spec.places import Tier
from penstock.spec.plan import Plan


def weights_bytes(plan: Plan) -> dict[Tier, int]:
    """Tier → bytes of the weights that are at home there."""
    parts, by_home = plan.parts, dict[Tier, int]()
    for unit in plan.units:
        by_home[unit.home] = by_home.get(unit.home, 0) + (unit.hi - unit.lo) * parts[unit.part].granule_bytes
    return by_home


def kv_layers(plan: Plan, home: Tier) -> int:
    """The number of layers whose KV is at home in a tier."""
    return sum(kv.layers[1] - kv.layers[0] for kv in plan.kv if kv.home == home)
