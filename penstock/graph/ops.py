"""The op table: operands, what is read and written, tolerance, and what an op costs in bytes and flops.

`runtime/bind.py` binds the reference to each name, the oracle of every other binding; the lowering takes edges from
the operands' modes: r read, w written, + added to (read and written), s scratch (private to the lane, no edge).

Shapes (T rows of the batch, D d_model, H heads, K KV heads, E head_dim, P page_tokens, V vocab):
tokens int32 [T] · rows float32 [T, d_embed] · x, h, partial float32 [T, D] · q, a float32 [T, H, E] ·
keys, values [pages, K, P, E] in the KV format, laid out as spec/format.py says · logits float32 [n, V].
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph.tasks import Batch
from penstock.spec.model import Attention, ModelSpec
from penstock.spec.parts import Part

# A sum of thousands of float32 products in another order differs by some 1e-6 of its terms' size; exponentials and
# what they are divided by add a few more.
_SUMS, _EXPONENTIALS, _BYTES = 1e-5, 5e-5, 0.0

_SIGNATURES = {
    # rows = the embedding rows of the batch's tokens, out of resident weights or out of the disk.
    "gather": ("weights:r tokens:r rows:w", 1e-6),
    "fetch": ("tokens:r rows:w staging:w", 1e-6),
    # x = rows · embed_scale (projected, plus learned positions).
    "embed": ("rows:r edges:r x:w scratch:s", _SUMS),
    # h = norm(x); args: which norm. The final norm takes the rows whose logits are wanted.
    "norm": ("norms:r x:r h:w scratch:s", _SUMS),
    # q, k, v of the unit's KV heads, with bias, q/k norm and rope; k and v go into the cache.
    "qkv": ("weights:r norms:r h:r q:w keys:w values:w scratch:s", _EXPONENTIALS),
    "attend": ("q:r keys:r values:r a:w scratch:s", _EXPONENTIALS),
    # partial (+)= a · o over the unit's heads; args: 1 where it starts the sum.
    "out": ("weights:r a:r partial:+ scratch:s", _SUMS),
    # partial (+)= FFN over the unit's neurons, SUM_GRANULES of its layer's granules at a time; pending: the sum of such
    # a four that units cut. args: 1 where it starts the sum; where it begins, where it ends within a four that the unit
    # before has begun, the next one goes on with. With `active` it computes only the neurons that are.
    "ffn": ("weights:r h:r partial:+ pending:+ scratch:s active:r", _EXPONENTIALS),
    # active [T, N], a byte each: whether a row needs a neuron of the layer's FFN. Only planned so far.
    "predict": ("weights:r h:r active:w scratch:s", _SUMS),
    # x += norm_out(sum of partials + bias), then norm_after. More partials may follow the first.
    "merge": ("norms:r x:+ scratch:s partial:r", _SUMS),
    # best [n]: the most likely token of each row so far, float32 logit and int32 id; args: 1 where it starts.
    "head": ("weights:r h:r logits:w best:+ scratch:s", _SUMS),
    # Bytes from one tier to another; a load fills a ring slot with a unit. Of KV that lives elsewhere, the pages before
    # a batch's rows come into a window, and those with its rows go back (args: layer, in how many ranges).
    # `copy` is of activations, tokens and logits (args: which), by the device's own lane; `lift` brings a unit from
    # memory into a device's ring.
    "copy": ("source:r target:w", _BYTES),
    "load": ("target:w", _BYTES),
    "lift": ("source:r target:w", _BYTES),
    "kv_load": ("stored_keys:r stored_values:r keys:w values:w", _BYTES),
    "kv_save": ("keys:r values:r stored_keys:w stored_values:w", _BYTES),
    # Nothing but an edge: what was loaded is there, and no load to come has begun.
    "sync": ("loaded:w", _BYTES),
}


@dataclass(frozen=True, slots=True)
class Op:
    """`tolerance`: how far an implementation may be from the reference, of the largest number in a row."""

    name: str
    operands: tuple[str, ...]
    modes: tuple[str, ...]
    tolerance: float

    def mode(self, i: int) -> str:
        """The mode of operand i; the last operand's repeats (merge takes several partials)."""
        return self.modes[min(i, len(self.modes) - 1)]


def _parse(name: str, signature: str, tolerance: float) -> Op:
    pairs = [operand.split(":") for operand in signature.split()]
    return Op(name, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs), tolerance)


OPS = {name: _parse(name, *found) for name, found in _SIGNATURES.items()}
PLANNED = ("predict",)  # what planning knows and no kernel does yet


def block_weights(part: Part, lo: int, hi: int, names: tuple[str, ...]) -> int:
    """Weights of the named blocks in granules lo..hi; the tail counts as it is."""
    per_granule = sum(b.rows * b.cols for b in part.blocks if b.name in names)
    return per_granule * part.rows_of(lo, hi) // part.granule_rows


def block_bytes(part: Part, lo: int, hi: int, names: tuple[str, ...]) -> int:
    return (hi - lo) * sum(b.nbytes for b in part.blocks if b.name in names)


QKV_BLOCKS = ("q", "k", "v", "q_bias", "k_bias", "v_bias")
OUT_BLOCKS = ("o",)
FFN_BLOCKS = ("gate", "up", "down", "gate_bias", "up_bias")
VOCAB_BLOCKS = ("rows",)
PREDICTOR_BLOCKS = ("hidden", "neurons")


def matrix_cost(part: Part, lo: int, hi: int, names: tuple[str, ...], rows: int) -> tuple[int, int]:
    """(bytes read, flops) of multiplying `rows` rows with the named blocks of granules lo..hi."""
    return block_bytes(part, lo, hi, names), 2 * rows * block_weights(part, lo, hi, names)


def active_cost(cost: tuple[int, int], active: float) -> tuple[int, int]:
    """(bytes read, flops) of a product where a share `active` of the neurons is computed and the others are neither
    read nor computed: as the neuron layout allows, where a neuron's numbers lie together."""
    return max(1, round(cost[0] * active)), max(1, round(cost[1] * active))


def attend_cost(a: Attention, kv_heads: int, batch: Batch, kv_bytes_each: int) -> tuple[int, int]:
    """(KV bytes read, flops) of attention of `kv_heads` heads: 2 for scores, 2 for values, per element.
    `kv_bytes_each`: of a token in one head, K or V."""
    kv_bytes = flops = 0
    for (start, rows), seqs in batch.spans.items():
        seen = start + rows if not a.window else min(start + rows, a.window + rows - 1)
        kv_bytes += seqs * 2 * seen * kv_heads * kv_bytes_each
        # A row at position p sees p + 1 positions, or the window.
        pairs = rows * start + rows * (rows + 1) // 2 if not a.window else rows * min(start + rows, a.window)
        flops += seqs * 4 * pairs * kv_heads * a.heads_per_kv * a.head_dim
    return kv_bytes, flops


def rows_cost(model: ModelSpec, rows: int, passes: int) -> tuple[int, int]:
    """(bytes, flops) of an op that walks `passes` times over float32 [rows, D]: norm, merge, embed."""
    return 4 * rows * model.d_model * passes, rows * model.d_model * passes
