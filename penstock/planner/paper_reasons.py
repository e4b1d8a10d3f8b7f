"""Sentences about plans of the papers' strategies, from the plan and from what the paper's formulas say of it."""

from __future__ import annotations

from collections.abc import Collection

from penstock.planner.programs.pipo_memory import PIPELINES, Configuration, MachineLimits, Sizes, equation_1, peak_bytes
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_rate

_PLACES: dict[Tier, str] = {GPU.executor: "in device memory", HOST: "in RAM", DISK.tier: "on the disk"}


def by_equation_1(s: Sizes, batch: int, tokens: int, limits: MachineLimits) -> str:
    """What PIPO's Eq. 1 chooses, with the bytes and the rates that it goes by. `tokens`: of a prompt and its answer."""
    published = equation_1(s, batch, tokens, limits)
    need, kv = peak_bytes(s, batch, tokens, "overlapped"), s.kv_total_bytes(batch, tokens)
    return (
        f"PIPO Eq. 1: W {format_bytes(s.weights_bytes)} and M {format_bytes(need)} against "
        f"{format_bytes(limits.device_bytes)} of the device, W and C {format_bytes(kv)} against "
        f"{format_bytes(limits.host_bytes)} of RAM, link {format_rate(limits.link_bytes_per_s)}, disk "
        f"{format_rate(limits.disk_bytes_per_s)}: weights {_PLACES[published.home]}, {PIPELINES[published.pipeline]}"
    )


def in_pipeline(plan: Plan, choice: Configuration) -> tuple[str, ...]:
    """Sentences about where a plan of PIPO's has its weights, about its ring, and about KV."""
    where = f"all weights {_PLACES[choice.home]}"
    if choice.home != GPU.executor:
        where += ": each token lifts all of them"
        if choice.on_device:
            where = f"{choice.on_device:.0%} of the weights in device memory, the rest {_PLACES[choice.home]}"
    lines = [where]
    if ring := plan.ring_bytes.get(GPU.executor):
        how = "two blocks: one comes while the other computes" if choice.pipeline == "overlapped" else "one block"
        lines.append(f"a ring of {format_bytes(ring)}, for {how}")
    home = plan.kv[0].home
    lines.append(f"KV in {plan.kv[0].format.name} {_PLACES[home]}" + (", an attention ahead" if home == HOST else ""))
    return tuple(lines)


def in_blocks(plan: Plan, asked: int, placed: Collection[str], kv_bytes: int) -> tuple[str, str]:
    """Two sentences about a plan of FlexGen's: how many blocks there are, and which shares of their bytes are where.
    `asked`: sequences; `placed`: the keys of the parts that the policy places; `kv_bytes`: of a block."""
    parts, layers = plan.parts, len(plan.target.spec.layers)
    nbytes = {unit: plan.unit_bytes(unit) for unit in plan.units if unit.part in placed}
    tiers = (plan.main, HOST, DISK.tier) if plan.main != HOST else (HOST, DISK.tier)
    shares = {
        ("weights", tier): sum(n for unit, n in nbytes.items() if unit.home == tier) / sum(nbytes.values())
        for tier in tiers
    } | {
        ("KV", tier): sum(kv.layers[1] - kv.layers[0] for kv in plan.kv if kv.home == tier) / layers for tier in tiers
    }  # fmt: skip
    where = " · ".join(f"{what} {share:.0%} {_PLACES[tier]}" for (what, tier), share in shares.items() if share > 0)
    block = plan.batch_seqs * plan.batches_per_pass
    rounds, placed_bytes = -(-asked // block), sum(parts[key].nbytes for key in placed)
    return (
        f"{asked} sequences in {rounds} block{'s' if rounds > 1 else ''} of {plan.batches_per_pass} batches of"
        f" {plan.batch_seqs}: what streams crosses once a block and token",
        f"{where} of {format_bytes(placed_bytes)} and {format_bytes(kv_bytes)}",
    )
