"""Temporaries of the ops, to the byte: what a kernel may use beside its operands.

The bound covers every implementation of the op table. The widest user is the numpy reference, which turns
weights into float32 before it multiplies; it does so in slabs of rows, so that a slab of a large model
stays in cache and its scratch stays small.
"""

from __future__ import annotations

from penstock.graph import scratch_gpu, scratch_native
from penstock.spec.format import TILE_ROWS, tiles
from penstock.spec.parts import Block, Part
from penstock.spec.plan import DEVICE, Plan
from penstock.units import round_up

SLAB_BYTES = 1 << 20  # float32 weights at a time: half of a core's L2 cache
_ALIGN = 64


def slab_rows(block: Block) -> int:
    """Rows of a block that are widened at once, in whole tiles. A function of the shape alone: results do
    not depend on where units are cut."""
    return TILE_ROWS * min(tiles(block.rows), max(1, SLAB_BYTES // (4 * block.cols * TILE_ROWS)))


def matmul_bytes(block: Block, rows: int) -> int:
    """A slab as float32, its codes or integers while widening, and the product [rows, slab]."""
    slab = slab_rows(block)
    padded = block.format.groups(block.cols) * block.format.group or block.cols + block.cols % 2
    return round_up(4 * slab * padded, _ALIGN) * 2 + round_up(4 * rows * slab, _ALIGN) + 4 * _ALIGN


def native_bytes(plan: Plan, rows: int) -> int:
    """What the native kernels want of any op of the plan, as they say it themselves (`scratch_native`)."""
    layers = plan.target.spec.layers
    need, kv_formats = 0, {home.format for home in plan.kv}
    for part in _unlike(plan):
        if part.kind == "ffn":
            need = max(need, scratch_native.ffn_bytes(part, part.granules, rows))
        elif part.kind == "attn":
            a = layers[part.layer].attention
            need = max(need, scratch_native.qkv_bytes(part, a, a.kv_heads, rows))
            need = max(need, scratch_native.out_bytes(part.block("o"), part.granules, rows))
            need = max(need, *(scratch_native.attend_bytes(a, kv, rows) for kv in kv_formats))
        elif part.kind in ("embed", "head"):
            need = max(need, scratch_native.project_bytes(part.block("rows"), min(rows, plan.logits_rows)))
    return need


def _unlike(plan: Plan) -> list[Part]:
    """The parts, of layers that are one object only those of the first: a large model has hundreds, of few kinds."""
    layers, found = plan.target.spec.layers, dict[tuple[str, int], Part]()
    for part in plan.parts.values():
        found.setdefault((part.kind, id(layers[part.layer]) if part.layer >= 0 else -1), part)
    return list(found.values())


def _kv_lanes(plan: Plan) -> int:
    """Columns of the KV cache that attention reads at a time."""
    return 32 if any(home.format.kind == "int4" for home in plan.kv) else 16


def scratch_bytes(plan: Plan, tier: str) -> int:
    """The scratch arena of an executor: the largest need of any op that it may run."""
    spec = plan.target.spec
    rows = max(plan.chunk_rows, plan.batch_seqs)
    need = native_bytes(plan, rows)
    if tier == DEVICE:  # a GPU's kernels, or the CPU's where the device is emulated
        need = max(need, scratch_gpu.scratch_bytes(plan, tier))
    need = max(need, 16 * rows * max(spec.d_model, spec.d_embed))  # norms, merges and embeddings: four [rows, D]
    for part in _unlike(plan):
        if part.kind == "norms":
            continue
        n = min(rows, plan.logits_rows) if part.kind in ("embed", "head") else rows
        product = max((matmul_bytes(b, n) for b in part.blocks if b.tiled), default=0)
        if part.kind == "ffn":  # gate and up, float32 [rows, 64] each, and one temporary
            product += 6 * round_up(4 * rows * part.granule_rows, _ALIGN)
        elif part.kind == "edges":  # what is projected
            product += round_up(4 * rows * max(spec.d_model, spec.d_embed), _ALIGN)
        elif part.kind in ("embed", "head"):  # a granule's logits
            product += round_up(4 * n * part.granule_rows, _ALIGN)
        need = max(need, product)
    attn = next(p for p in plan.parts.values() if p.kind == "attn")
    quantised = any(home.format.is_quantised for home in plan.kv)
    for layer in dict.fromkeys(spec.layers):  # most are alike
        a, page = layer.attention, plan.page_tokens
        projected = 4 * rows * (a.heads_per_kv + 2) * a.head_dim * 2  # q, k, v of one KV head, twice
        need = max(need, projected + max(matmul_bytes(b, rows) for b in attn.blocks if b.tiled) + 8 * rows * a.head_dim)
        query_rows = rows * a.heads_per_kv
        # A page of K and V as float32, scores and their exponentials [query_rows, page], running sums.
        padded = round_up(a.head_dim, _kv_lanes(plan)) if quantised else a.head_dim
        attend = 4 * (3 * page * padded + 3 * query_rows * page + 3 * query_rows * a.head_dim + 4 * query_rows)
        need = max(need, attend + 64 * _ALIGN)
    return round_up(need, 4096)
