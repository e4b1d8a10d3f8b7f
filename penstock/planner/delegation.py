"""Says from which context on the CPU is faster at attention to KV in RAM than a device, to which KV would have to
cross (FlexGen's computation delegation).

KV grows with the context. If the CPU attends, q and the new keys and values cross instead, and the result crosses back:
these do not grow. If the CPU reads RAM faster than the link does, it is faster from some context on. If the link is
faster, the CPU is faster up to some context, because its calls begin sooner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.planner.cost import Cost
from penstock.spec.places import CPU, GPU, HOST, is_device
from penstock.spec.plan import KvHome, Plan
from penstock.units import format_seconds


class Crossing(NamedTuple):
    """Of one layer, one batch and one decode pass at position `tokens`. link_s: KV crosses, and the device attends.
    ram_s: q and fresh rows cross, the CPU attends, and the result crosses back. `least_tokens`, `most_tokens`: the
    contexts from and up to which `ram_s` is less, within the plan's context; None where it never is."""

    seqs: int
    tokens: int
    link_s: float
    ram_s: float
    least_tokens: int | None
    most_tokens: int | None


def crossing(plan: Plan, home: KvHome, cost: Cost, tokens: int) -> Crossing:
    """Both ways for the first layer of a home in RAM, with the plan's batches and formats."""
    layout = Layout(plan)

    def ram_gains(position: int) -> bool:
        link_s, ram_s = _seconds(layout, home, cost, position)
        return ram_s < link_s

    gains = _where(ram_gains, range(1, plan.context))
    least, most = (gains[0], gains[-1]) if gains else (None, None)
    return Crossing(plan.batch_seqs, tokens, *_seconds(layout, home, cost, tokens), least, most)


def _where(ram_gains: Callable[[int], bool], positions: range) -> range:
    """Those positions at which RAM's way takes less. The difference rises or falls with the context, but for the
    rounding to pages: so they are all, none, or one end."""
    if not positions:
        return positions
    first, last = ram_gains(positions[0]), ram_gains(positions[-1])
    if first == last:
        return positions if first else positions[:0]
    split = bisect_left(positions, True, key=lambda position: ram_gains(position) == last)
    return positions[split:] if last else positions[:split]


def _seconds(layout: Layout, home: KvHome, cost: Cost, position: int) -> tuple[float, float]:
    """(the link's way, RAM's way) at one position, if no other lane is busy."""
    plan, layer = layout.plan, home.layers[0]
    seqs = tuple(range(plan.batch_seqs))
    a, kind = plan.target.spec.layers[layer].attention, home.format.kind
    batch = Batch(0, seqs, (position,) * len(seqs), (1,) * len(seqs), ())
    nbytes, flops = ops.attend_cost(a, a.kv_heads, batch, home.format.kv_bytes(a.head_dim), plan.value_share)
    moved, ranges = layout.kv.moved(layer, batch, save=False)
    fresh, heads = layout.kv.fresh_bytes(layer, batch), 4 * len(seqs) * a.heads * a.head_dim
    link_s = cost.call_s(GPU.to_device, "kv_load", kind, nbytes=2 * moved)
    link_s += (2 * ranges - 1) * cost.call_s(GPU.to_device, "kv_load", kind)  # each range begins by itself
    link_s += cost.call_s(GPU.kernels, "attend", kind, 1, nbytes, flops)
    ram_s = cost.call_s(CPU, "attend", kind, 1, nbytes, flops) + cost.call_s(CPU, "append", kind, nbytes=4 * fresh)
    ram_s += sum(cost.call_s(GPU.to_host, "copy", "*", nbytes=each) for each in (heads, fresh, fresh))
    return link_s, ram_s + cost.call_s(GPU.to_device, "copy", "*", nbytes=heads)


def sentences(plan: Plan, cost: Cost, tokens: int) -> tuple[str, ...]:
    """Why attention to KV in RAM is where it is; nothing where the plan has no such KV whose projections a device
    computes. `tokens`: the position of a decode pass half-way through the output."""
    projected = {int(unit.part.partition(".")[0]) for unit in plan.units if unit.part.endswith(".attn")
                 and is_device(unit.decode)}  # fmt: skip
    home = next((home for home in plan.kv if home.home == HOST and home.layers[0] in projected), None)
    if home is None:
        return ()
    crossed = crossing(plan, home, cost, tokens)
    ram, link = format_seconds(crossed.ram_s), format_seconds(crossed.link_s)
    where = "the CPU, where KV is" if home.attend == HOST else "the device, to which KV crosses"
    if crossed.least_tokens is None:
        when = f"the link is faster up to a context of {plan.context} tokens"
    elif crossed.least_tokens > 1:
        when = f"the CPU is faster from a context of {crossed.least_tokens} tokens"
    elif crossed.most_tokens is not None and crossed.most_tokens < plan.context - 1:
        when = f"the CPU is faster up to a context of {crossed.most_tokens} tokens"
    else:
        when = "the CPU is faster at any context"
    seqs = f"{crossed.seqs} sequence{'s' if crossed.seqs > 1 else ''}"
    return (
        f"attention's scores on {where}: at {tokens} tokens of {seqs} a layer takes {ram} with q and the result"
        f" crossing, {link} with KV crossing; {when}, by each alone",
    )
