"""What of a plan lies where."""

from __future__ import annotations

from penstock.spec.places import Tier
from penstock.spec.plan import Plan


def weights_bytes(plan: Plan) -> dict[Tier, int]:
    """Bytes of weights by home."""
    parts, found = plan.parts, dict[Tier, int]()
    for unit in plan.units:
        found[unit.home] = found.get(unit.home, 0) + (unit.hi - unit.lo) * parts[unit.part].granule_bytes
    return found


def kv_layers(plan: Plan, home: Tier) -> int:
    """Layers whose KV lives there."""
    return sum(kv.layers[1] - kv.layers[0] for kv in plan.kv if kv.home == home)
