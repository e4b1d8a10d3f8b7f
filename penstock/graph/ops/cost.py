"""The cost of an op: how many bytes it reads, and how many flops it does."""

from __future__ import annotations

from penstock.graph.batch import Batch
from penstock.spec.model import Attention, ModelSpec, Routed
from penstock.spec.parts import Part


def block_weights(part: Part, lo: int, hi: int, names: tuple[str, ...]) -> int:
    """How many weights the named blocks have in granules lo..hi, without padding."""
    per_granule = sum(b.rows * b.cols for b in part.blocks if b.name in names)
    return per_granule * part.rows_of(lo, hi) // part.granule_rows


def block_bytes(part: Part, lo: int, hi: int, names: tuple[str, ...]) -> int:
    """Bytes of the named blocks in granules lo..hi, with padding."""
    return (hi - lo) * sum(b.nbytes for b in part.blocks if b.name in names)


def matrix_cost(part: Part, lo: int, hi: int, names: tuple[str, ...], rows: int) -> tuple[int, int]:
    """(bytes read, flops) of multiplying `rows` rows with the named blocks of granules lo..hi."""
    return block_bytes(part, lo, hi, names), 2 * rows * block_weights(part, lo, hi, names)


def experts_cost(
    part: Part, routed: Routed, lo: int, hi: int, names: tuple[str, ...], rows: int
) -> tuple[int, int, int]:
    """(bytes read, flops, rows per expert that has any) of the experts in granules lo..hi for `rows` rows. These are
    expected values where every expert is as likely as any other. Experts that no row goes to are not read."""
    share = (hi - lo) // part.expert_granules / routed.experts
    wanted = share * (1 - (1 - routed.active / routed.experts) ** rows) * routed.experts  # experts with some row
    pairs = share * rows * routed.active  # of a row and one of its experts
    nbytes, flops = matrix_cost(part, 0, part.expert_granules, names, 1)
    return max(1, round(wanted * nbytes)), max(1, round(pairs * flops)), max(1, round(pairs / wanted))


def active_cost(cost: tuple[int, int], active: float) -> tuple[int, int]:
    """(bytes read, flops) of a product in which only a share `active` of the neurons is read and computed. A layout
    where each neuron's numbers lie together allows that."""
    return max(1, round(cost[0] * active)), max(1, round(cost[1] * active))


def fired_cost(whole: tuple[int, int], activated: tuple[int, int], active: float) -> tuple[int, int]:
    """(bytes read, flops) of an FFN of cost `whole` in which the activations are computed in full, at the cost
    `activated`, and of the rest only a share `active`: that of the neurons that fire."""
    nbytes, flops = (full + active * (all_ - full) for full, all_ in zip(activated, whole, strict=True))
    return max(1, round(nbytes)), max(1, round(flops))


def attend_cost(
    a: Attention, kv_heads: int, batch: Batch, kv_bytes_each: int, value_share: float = 1.0
) -> tuple[int, int]:  # fmt: skip
    """(KV bytes read, flops) of attention of `kv_heads` KV heads. Flops per element: 2 for scores, 2 for values.
    `kv_bytes_each`: bytes of a token in one head, K or V. `value_share`: below 1, of the positions that a query sees,
    the share whose values it reads. Then rows go one by one, and each reads the keys anew. The G queries of a KV head
    are taken to choose by chance, so together they read a share 1 - (1 - value_share)^G of the values."""
    read_share = 1 - (1 - value_share) ** a.heads_per_kv
    kv_bytes = flops = 0
    for (start, rows), seqs in batch.spans.items():
        seen = start + rows if not a.window else min(start + rows, a.window + rows - 1)
        kv_bytes += seqs * 2 * seen * kv_heads * kv_bytes_each if value_share == 1 else 0
        # A row at position p sees p + 1 positions, or the window.
        pairs = rows * start + rows * (rows + 1) // 2 if not a.window else rows * min(start + rows, a.window)
        head_pairs = seqs * pairs * kv_heads
        if value_share == 1:
            flops += 4 * head_pairs * a.heads_per_kv * a.head_dim
        else:
            kv_bytes += round(head_pairs * (1 + read_share) * kv_bytes_each)
            flops += round((2 + 2 * value_share) * head_pairs * a.heads_per_kv * a.head_dim)
    return kv_bytes, flops


def rows_cost(model: ModelSpec, rows: int, passes: int) -> tuple[int, int]:
    """(bytes, flops) of an op that walks `passes` times over float32 [rows, D]: norm, merge, embed."""
    return 4 * rows * model.d_model * passes, rows * model.d_model * passes
