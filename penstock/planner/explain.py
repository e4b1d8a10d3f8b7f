"""A plan as a table that a person reads: what lies where, what it will do, and why."""

from __future__ import annotations

from penstock.planner.solve import Solved
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_seconds

_KINDS = {
    "attn": "attention",
    "ffn": "FFN",
    "embed": "embedding",
    "head": "head",
    "norms": "norms",
    "edges": "norms",
}
_ARENAS = {
    "weights": "weights that stay",
    "ring": "ring that weights stream through",
    "kv": "KV cache",
    "act": "activations, logits",
    "scratch": "scratch",
    "staging": "embedding rows in flight",
}


def table(solved: Solved) -> str:
    """Lines without a newline at the end."""
    return "\n".join([*_weights(solved.plan), "", *_memory(solved.plan), "", *_speed(solved), "", *_reasons(solved)])


def _weights(plan: Plan) -> list[str]:
    """Bytes per kind of part and home."""
    homes = list(dict.fromkeys(unit.home for unit in plan.units))
    rows: dict[str, dict[str, int]] = {}
    for unit in plan.units:
        row = rows.setdefault(_KINDS[plan.parts[unit.part].kind], dict.fromkeys(homes, 0))
        row[unit.home] += plan.unit_bytes(unit)
    name = plan.target.weights.name
    lines = [f"{'weights (' + name + ')':38}" + "".join(f"{_home(home):>14}" for home in homes)]
    for kind, row in rows.items():
        lines.append(f"  {kind:36}" + "".join(f"{format_bytes(row[home]) if row[home] else '–':>14}" for home in homes))
    totals = {home: sum(row[home] for row in rows.values()) for home in homes}
    lines.append(f"  {'together':36}" + "".join(f"{format_bytes(totals[home]):>14}" for home in homes))
    return lines


def _memory(plan: Plan) -> list[str]:
    used = plan.tier_bytes()
    lines = []
    for tier, total in used.items():
        lines.append(f"{'memory of ' + _home(tier):38}{format_bytes(total):>14}")
        entries = [(_ARENAS[a.name.split(".")[1]], a.bytes) for a in plan.arenas if a.tier == tier]
        if tier == "host":
            entries.append(("the process itself", plan.process_bytes))
        lines += [f"  {what:36}{format_bytes(nbytes):>14}" for what, nbytes in entries]
    lines.append(f"context {plan.context} tokens × {plan.batch_seqs} sequences, KV in {plan.kv[0].format.name}")
    return lines


def _speed(solved: Solved) -> list[str]:
    p = solved.prediction
    shares = ", ".join(f"{lane} {share:.0%}" for lane, share in sorted(p.lane_share.items()))
    lines = [
        f"predicted: first token after {format_seconds(p.ttft_s)}, then {p.decode_tokens_per_s:.2f} tokens/s",
        f"bound by {p.bound_by} (busy: {shares})",
    ]
    if p.disk_bytes_per_token:
        lines.append(f"read from disk per token: {format_bytes(p.disk_bytes_per_token)}")
    if solved.runner_up is not None:
        lines.append(f"next best plan: {solved.runner_up.decode_tokens_per_s:.2f} tokens/s")
    return lines


def _reasons(solved: Solved) -> list[str]:
    return [f"· {reason}" for reason in solved.reasons]


def _home(name: str) -> str:
    return {"host": "RAM", "disk0": "disk", "gpu0": "device"}.get(name, name)
