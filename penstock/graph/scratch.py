"""How many bytes of temporaries the ops may use beside their operands.

The bound covers every implementation of the op table. The widest user is the numpy reference, which turns weights into
float32 before it multiplies. It does so in slabs of rows, so that a slab of a large model stays in the processor's
cache and the scratch stays small.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from penstock.graph import scratch_gpu, scratch_native
from penstock.spec.format import LINE_COLUMNS, TILE_ROWS, Format, tiles
from penstock.spec.model import ModelSpec
from penstock.spec.parts import FFNS, Block, Part, heads_together, parts
from penstock.spec.places import is_device
from penstock.spec.plan import Plan, Predictor
from penstock.units import round_up

SLAB_BYTES = 1 << 20  # float32 weights at a time: half of a core's L2 cache
PREDICTED_ROWS = 16  # rows whose neurons are predicted at once, by numpy
_ALIGN = 64


def slab_rows(block: Block) -> int:
    """Rows of a block that are widened at once, in whole tiles. It is a function of the shape alone, so that results do
    not depend on where units are cut."""
    return TILE_ROWS * min(tiles(block.rows), max(1, SLAB_BYTES // (4 * block.cols * TILE_ROWS)))


def matmul_bytes(block: Block, rows: int) -> int:
    """Bytes of a slab as float32, of its codes or integers while it is widened, and of the product, float32 [rows,
    slab]."""
    slab = slab_rows(block)
    if block.stride:  # a slab as float32, its codes, and a product that is as wide as the model
        padded = round_up(block.cols, LINE_COLUMNS)
        return round_up(4 * slab * padded, _ALIGN) * 2 + round_up(4 * rows * block.cols, _ALIGN) + 4 * _ALIGN
    padded = block.format.groups(block.cols) * block.format.group or block.cols + block.cols % 2
    return round_up(4 * slab * padded, _ALIGN) * 2 + round_up(4 * rows * slab, _ALIGN) + 4 * _ALIGN


def native_bytes(
    spec: ModelSpec, weights: Format, rows: int, logits_rows: int, kv: frozenset[Format], chosen: int = 0
) -> int:
    """The most bytes that the native kernels want for any op, by `scratch_native`. `chosen`: as for `attend_bytes`."""
    need, layers = 0, spec.layers
    for part in _unlike(spec, weights):
        if part.kind in ("ffn", "shared"):
            need = max(need, scratch_native.ffn_bytes(part, part.granules, rows))
        elif part.kind == "experts":
            need = max(need, scratch_native.experts_bytes(part, layers[part.layer].active, rows))
        elif part.kind == "router":
            need = max(need, scratch_native.route_bytes(part, rows))
        elif part.kind == "attn":
            a = layers[part.layer].attention
            need = max(need, scratch_native.qkv_bytes(part, a, a.kv_heads, rows))
            need = max(need, scratch_native.out_bytes(part.block("o"), part.granules, rows))
            need = max(need, *(scratch_native.attend_bytes(a, fmt, rows, chosen) for fmt in kv))
        elif part.kind in ("embed", "head"):
            need = max(need, scratch_native.project_bytes(part.block("rows"), min(rows, logits_rows)))
    return need


def _unlike(spec: ModelSpec, weights: Format) -> list[Part]:
    """The parts of the model, each kind once. Layers that are one `Layer` object have the same parts but for their
    formats, and only the first of each kind are kept: a large model has hundreds of parts, but few kinds."""
    by_kind: dict[tuple[object, ...], Part] = {}
    for part in parts(spec, weights):
        layer = id(spec.layers[part.layer]) if part.layer >= 0 else -1
        by_kind.setdefault((part.kind, layer, tuple(block.format for block in part.blocks)), part)
    return list(by_kind.values())


def _kv_lanes(kv: frozenset[Format]) -> int:
    """Columns of the KV cache that attention reads at a time."""
    return 32 if any(fmt.kind == "int4" for fmt in kv) else 16


def scratch_bytes(plan: Plan, tier: str) -> int:
    """Bytes of the scratch arena of an executor: the largest need of any op that it may run."""
    target, rows = plan.target, max(plan.chunk_rows, plan.batch_seqs)
    kv = frozenset(home.format for home in plan.kv)
    need = _usual_bytes(target.spec, target.weights, rows, plan.logits_rows, plan.page_tokens, kv, plan.chosen_from)
    for part in dict.fromkeys(_predictor_of(plan, p) for p in plan.predictors):
        need = max(need, scratch_native.predict_bytes(part, rows), _predict_bytes(part))
        need = max(need, scratch_gpu.predict_bytes(part, rows) if is_device(tier) else 0)
    if is_device(tier):  # a GPU's kernels, or the CPU's where the device is emulated
        need = max(need, scratch_gpu.scratch_bytes(plan, tier))
    return round_up(need, 4096)


def _predictor_of(plan: Plan, predictor: Predictor) -> Part:
    """The predictor as a part, with the key of the first layer: layers are alike."""
    return replace(predictor.part(plan.target.spec), key="0.predictor", layer=0)


def _predict_bytes(part: Part) -> int:
    """Hidden values and scores, float32 [PREDICTED_ROWS, …], and what their products take."""
    rows, blocks = PREDICTED_ROWS, [part.block(name) for name in ("hidden", "neurons")]
    kept = sum(round_up(4 * rows * block.rows, _ALIGN) for block in blocks)
    return kept + max(matmul_bytes(block, rows) for block in blocks)


@lru_cache(maxsize=256)  # a planner asks for the same in hundreds of plans
def _usual_bytes(
    spec: ModelSpec, weights: Format, rows: int, logits_rows: int, page: int, kv: frozenset[Format], chosen: int
) -> int:  # fmt: skip
    """Bytes of scratch that are enough for every op except a GPU's kernels. `page`: tokens of a page. `kv`: formats of
    the KV cache. `chosen`: the most positions of a sequence, where attention reads the values of the best alone; else
    0."""
    need = native_bytes(spec, weights, rows, logits_rows, kv, chosen)
    need = max(need, 16 * rows * max(spec.d_model, spec.d_embed))  # norms, merges and embeddings: four [rows, D]
    for part in _unlike(spec, weights):
        if part.kind == "norms":
            continue
        op_rows = min(rows, logits_rows) if part.kind in ("embed", "head") else rows
        product = max((matmul_bytes(b, op_rows) for b in part.blocks if b.tiled or b.stride), default=0)
        if part.kind in FFNS:  # gate and up, float32 [rows, 64] each, and one temporary
            product += 6 * round_up(4 * rows * part.granule_rows, _ALIGN)
            # Rows that go to an expert, its output, and the sum of a four.
            product += 3 * round_up(4 * rows * spec.d_model, _ALIGN) if part.kind == "experts" else 0
        elif part.kind == "router":
            product += round_up(4 * rows * (part.block("scores").rows + 1), _ALIGN)
        elif part.kind == "edges":  # the rows that are projected
            product += round_up(4 * rows * max(spec.d_model, spec.d_embed), _ALIGN)
        elif part.kind in ("embed", "head"):  # a granule's logits
            product += round_up(4 * op_rows * part.granule_rows, _ALIGN)
        need = max(need, product)
    attn = next(p for p in parts(spec, weights) if p.kind == "attn")
    quantised = any(fmt.is_quantised for fmt in kv)
    for layer in dict.fromkeys(spec.layers):  # most are alike
        a = layer.attention
        # KV heads whose q, k and v are projected at once. They are held twice.
        heads = heads_together(layer)
        if layer.ordered:  # rows, before they are brought into an order
            need = max(need, 4 * rows * max(spec.d_model, a.heads * a.head_dim) + _ALIGN)
        projected = 4 * rows * heads * (a.heads_per_kv + 2) * a.head_dim * 2
        need = max(need, projected + max(matmul_bytes(b, rows) for b in attn.blocks if b.tiled) + 8 * rows * a.head_dim)
        query_rows = rows * a.heads_per_kv
        # A page of K and V as float32, scores and their exponentials [query_rows, page], running sums.
        padded = round_up(a.head_dim, _kv_lanes(kv)) if quantised else a.head_dim
        attend = 4 * (3 * page * padded + 3 * query_rows * page + 3 * query_rows * a.head_dim + 4 * query_rows)
        # Scores of all positions, twice while they are ranked, of a row's queries, which go one row at a time.
        attend += 3 * 4 * a.heads_per_kv * round_up(chosen, page)
        need = max(need, attend + 64 * _ALIGN)
    return need
