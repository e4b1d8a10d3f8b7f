"""Shows all plans that were compared, the chosen one first, as a table and as JSON, for `penstock plan --compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.planner.candidate import Candidate, Compared
from penstock.planner.explain import lane_name, rate, tier_name
from penstock.planner.homes import weights_bytes
from penstock.planner.solve import Solved
from penstock.spec.places import Tier, is_disk, nearness
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_seconds

_LEAST_WIDTH = 28  # of the column of names, in characters


def bytes_per_tier(plan: Plan) -> dict[Tier, int]:
    """Tier → bytes that the plan takes of it. Of a memory that is all bytes, of a disk the weights and KV at home
    there."""
    used = dict(plan.tier_bytes())
    for home, nbytes in weights_bytes(plan).items():
        if is_disk(home):
            used[home] = used.get(home, 0) + nbytes
    return used


def comparison(solved: Solved) -> str:
    """The table: a line for each plan, and a line that says why a plan cannot run. It has no newline at its end."""
    compared = solved.compared
    names = _names([each.candidate for each in compared])
    used = [bytes_per_tier(each.candidate.plan) for each in compared]
    tiers = sorted({tier for each in used for tier in each}, key=nearness)
    width = max([_LEAST_WIDTH, *map(len, names)])
    lines = [
        f"{'compared, the chosen first':{width}}{'tokens/s':>10}{'first token':>13}"
        + "".join(f"{tier_name(tier):>12}" for tier in tiers)
        + "  bound by"
    ]
    for name, each, nbytes in zip(names, compared, used, strict=True):
        p = each.prediction
        sizes = "".join(f"{format_bytes(nbytes[tier]) if nbytes.get(tier) else '–':>12}" for tier in tiers)
        speed = f"{rate(p.decode_tokens_per_s):>10}{format_seconds(p.ttft_s):>13}"
        lines.append(f"{name:{width}}{speed}{sizes}  {lane_name(p.bound_by)} {p.lane_share[p.bound_by]:.0%}")
        lines += _remarks(each.candidate)
    return "\n".join(lines)


def listed(solved: Solved) -> str:
    """What `comparison` shows, for a terminal that is too narrow for the table: some lines for each plan, each figure
    with its name. If the table's lines were broken instead, nobody could tell its columns apart."""
    lines = ["compared, the chosen first:"]
    for name, each in zip(_names([c.candidate for c in solved.compared]), solved.compared, strict=True):
        p, used = each.prediction, bytes_per_tier(each.candidate.plan)
        sizes = [f"{tier_name(tier)} {format_bytes(used[tier])}" for tier in sorted(used, key=nearness) if used[tier]]
        lines += [
            name,
            f"  {rate(p.decode_tokens_per_s)} tokens/s, first token {format_seconds(p.ttft_s)},"
            f" bound by {lane_name(p.bound_by)} {p.lane_share[p.bound_by]:.0%}",
            f"  {', '.join(sizes)}",
            *_remarks(each.candidate),
        ]
    return "\n".join(lines)


def _remarks(candidate: Candidate) -> list[str]:
    """Lines that say why a plan cannot run, and why it is not chosen by itself."""
    remarks = [f"  planned only: {candidate.cannot_run}"] if candidate.cannot_run else []
    return remarks + ([f"  lossy, so not chosen by itself: {candidate.lossy}"] if candidate.lossy else [])


def to_json(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The plans as they stand in `plan --json`, in the given order. `cannot_run` is empty if the runtime can run the
    plan."""
    return [
        {
            "strategy": candidate.strategy,
            "also": candidate.also,
            "decode_tokens_per_s": p.decode_tokens_per_s,
            "ttft_s": p.ttft_s,
            "bound_by": p.bound_by,
            "lane_share": p.lane_share,
            "tier_bytes": bytes_per_tier(candidate.plan),
            "weights_bytes": weights_bytes(candidate.plan),
            "cannot_run": candidate.cannot_run,
            "lossy": candidate.lossy,
            "reasons": candidate.reasons,
        }
        for candidate, p in compared
    ]


def _names(candidates: Sequence[Candidate]) -> list[str]:
    """A name for each candidate: its strategy, and the strategies that came to the same plan. If several plans have the
    same strategy, the details in which these plans differ are added."""
    plans: dict[str, list[Plan]] = {}
    for candidate in candidates:
        plans.setdefault(candidate.strategy, []).append(candidate.plan)
    return [
        candidate.strategy
        + _details(candidate.plan, plans[candidate.strategy])
        + (f" (so too: {'; '.join(candidate.also)})" if candidate.also else "")
        for candidate in candidates
    ]


def _details(plan: Plan, alike: Sequence[Plan]) -> str:
    """The choices of a plan in which the plans of one strategy, `alike`, differ."""
    details = (_ring, _chunks, _kv_on_disk)
    return "".join(detail(plan) for detail in details if len(set(map(detail, alike))) > 1)


def _ring(plan: Plan) -> str:
    return f", ring {format_bytes(sum(plan.ring_bytes.values()))}"


def _chunks(plan: Plan) -> str:
    return f", prompts by {plan.chunk_rows}"


def _kv_on_disk(plan: Plan) -> str:
    layers = sum(kv.layers[1] - kv.layers[0] for kv in plan.kv if is_disk(kv.home))
    return f", KV of {layers} layers on disk" if layers else ""
