"""What a plan has in each tier: bytes of weights, layers with their KV, and whether all lie with a device."""

from __future__ import annotations

from penstock.spec.part_keys import gathered_key
from penstock.spec.places import GPU, Tier, is_disk
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


def all_there(plan: Plan) -> bool:
    """Whether all weights are at home on the device, but for the embedding, of which single rows are looked up."""
    return all(unit.home == GPU.executor or unit.part == gathered_key(plan.target.spec) for unit in plan.units)


def reads_weights(plan: Plan) -> bool:
    """Whether some weights are at home on a disk, but for an embedding of which single rows are looked up."""
    return any(is_disk(unit.home) and unit.part != gathered_key(plan.target.spec) for unit in plan.units)
