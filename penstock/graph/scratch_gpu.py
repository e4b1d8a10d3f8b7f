"""Bytes of temporaries of the GPU kernels, and the rules by which the kernels cut their work. The rules are here, and
not beside the kernels, so that an arena can be sized where no torch is installed.

Many rows are multiplied by widened weights: a piece of a unit as float32, at most WIDE_BYTES of it at a time. Few rows
are multiplied straight from the packed weights and need next to no temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from penstock.spec.format import TILE_ROWS, Format, tiles
from penstock.spec.model import Attention, ModelSpec
from penstock.spec.part_keys import parts_by_key
from penstock.spec.parts import Block, Part
from penstock.spec.plan import Plan
from penstock.units import MIB, round_up

ALIGN = 256  # bytes, of every temporary: it suits a GPU's memory transactions and its matrix products
# Up to so many rows are multiplied straight from packed weights, four at a time. Four rows take some eight operations a
# weight, and a card of 4.8 TB/s does 30e12 a second. Widening writes and reads each weight as float32 once: 8 bytes,
# however many rows there are. By these figures both take the same time near 26 rows. `bench/gpu_kernels.py` measures
# it. MOST_FEW_ROWS: that a device may be told to multiply so.
FEW_ROWS, MOST_FEW_ROWS = 24, 64

# 4096 x 2048 float32: half of a large card's cache (40 to 96 MiB), so that the product may find the widened weights
# there. Not measured yet.
WIDE_BYTES = 32 * MIB
PREDICTED_ROWS = 128  # rows whose neurons are predicted at once: 8 MiB of scores of 16,384 neurons
SUM_PARTS = 4  # partials that one merge reads; further ones are summed before

# Attention: a program has up to ATTEND_ROWS queries of one KV head. The KV is split until there are ATTEND_PROGRAMS
# programs: four for each of the 130 or so processors of a large card. A split has at least ATTEND_BLOCK positions, and
# there are at most MOST_SPLITS.
ATTEND_BLOCK, ATTEND_ROWS, ATTEND_PROGRAMS, MOST_SPLITS = 64, 64, 512, 64

# A sum over granules is split where there are so few tiles that their programs would leave a card idle: into at most
# MOST_SUM_SPLITS parts, until there are about SUM_PROGRAMS programs, four for each of some 130 processors.
SUM_PROGRAMS, MOST_SUM_SPLITS = 512, 16
# Programs of a sum over neurons, of one warp each: 8 for each of the 130 or so processors of a large card.
NEURON_PROGRAMS = 1024


class WeightPiece(NamedTuple):
    """Rows `row_lo`..`row_hi` of a block in granules `lo`..`hi` (counted from the unit's first)."""

    lo: int
    hi: int
    row_lo: int
    row_hi: int


def pieces(granules: int, block: Block) -> Iterator[WeightPiece]:
    """Cuts a unit's block into pieces that take at most WIDE_BYTES as float32. A piece is whole granules, or where one
    granule is larger than that, whole tiles of it."""
    float_bytes = 4 * block.rows * block.cols
    if float_bytes <= WIDE_BYTES:
        step = WIDE_BYTES // float_bytes
        for lo in range(0, granules, step):
            yield WeightPiece(lo, min(lo + step, granules), 0, block.rows)
        return
    rows = max(1, WIDE_BYTES // (4 * block.cols * TILE_ROWS)) * TILE_ROWS
    for lo in range(granules):
        for row in range(0, block.rows, rows):
            yield WeightPiece(lo, lo + 1, row, min(row + rows, block.rows))


def wide_bytes(granules: int, block: Block) -> int:
    """Bytes of the largest of `pieces` as float32, which is the first one."""
    p = next(pieces(granules, block), WeightPiece(0, 0, 0, 0))
    return _floats((p.hi - p.lo) * (p.row_hi - p.row_lo) * block.cols)


def sum_splits(rows: int) -> int:
    """The most parts that the sum over a unit's granules is split into, for a result of `rows` columns: the rows of the
    block."""
    return min(max(1, SUM_PROGRAMS // tiles(rows)), MOST_SUM_SPLITS)


def spread_bytes(granules: int, blocks: tuple[Block, ...]) -> int:
    """Bytes for products of the same activations with blocks of every granule."""
    return max(wide_bytes(granules, block) for block in blocks)


def add_up_bytes(granules: int, block: Block, rows: int) -> int:
    """Bytes for a product that is summed over granules."""
    splits, few = sum_splits(block.rows), min(rows, MOST_FEW_ROWS)  # sums of more rows are not split
    return max(wide_bytes(granules, block), _floats(splits * few * block.rows) if splits > 1 else 0)


def qkv_bytes(part: Part, a: Attention, granules: int, rows: int) -> int:
    """Bytes of q, k and v before rope, and for the products that give them."""
    kv_heads = granules * part.granule_rows
    projected = _floats(rows * kv_heads * a.heads_per_kv * a.head_dim) + 2 * _floats(rows * kv_heads * a.head_dim)
    return projected + spread_bytes(granules, (part.block("q"), part.block("k"), part.block("v")))


def out_bytes(part: Part, granules: int, rows: int) -> int:
    return add_up_bytes(granules, part.block("o"), rows)


def ffn_granules(part: Part, rows: int) -> int:
    """Granules whose hidden activations are held at once: WIDE_BYTES of them."""
    return max(1, WIDE_BYTES // (4 * rows * part.granule_rows))


def ffn_bytes(part: Part, granules: int, rows: int) -> int:
    """Bytes of hidden activations (gate and up), and for the products."""
    if part.by_neurons:
        return _neurons_bytes(part, granules, rows)
    blocks = tuple(part.block(name) for name in ("gate", "up") if part.has(name))
    hidden = 2 * round_up(min(4 * rows * granules * part.granule_rows, WIDE_BYTES), ALIGN)
    return hidden + max(spread_bytes(granules, blocks), add_up_bytes(granules, part.block("down"), rows))


def neuron_splits(part: Part, granules: int, rows: int) -> int:
    """How many parts the sum over neurons is split into: as many programs as sums over tiles have, at least a granule
    for each part, and WIDE_BYTES of results."""
    down = part.block("down")
    programs = -(-down.format.codes_bytes(down.cols) // 128)  # a warp takes 128 bytes of a row
    return max(1, min(NEURON_PROGRAMS // programs, granules, WIDE_BYTES // (4 * rows * down.cols)))


def _neurons_bytes(part: Part, granules: int, rows: int) -> int:
    """Bytes of an FFN that lies neuron by neuron: hidden activations, and either lists of live neurons and parts of the
    sum, or widened pieces and a product with one."""
    step = min(granules, ffn_granules(part, rows))
    first, down, width = part.blocks[0], part.block("down"), part.granule_rows
    hidden = _floats(rows * step * width)
    few = _floats(step * width) + _floats(step) + _floats(neuron_splits(part, step, rows) * rows * down.cols)
    piece = next(pieces(step, down))
    product = _floats(rows * (piece.hi - piece.lo) * (piece.row_hi - piece.row_lo))
    return hidden + max(spread_bytes(step, (first,)), few, wide_bytes(step, down) + product)


def route_bytes(part: Part, rows: int) -> int:
    """Bytes of a router's products, and of what gives them."""
    scores = part.block("scores")
    blocks = (scores, part.block("shared_gate")) if part.has("shared_gate") else (scores,)
    return _floats(rows * scores.rows) + _floats(rows) + spread_bytes(1, blocks)


def expert_rows(part: Part, active: int, rows: int) -> int:
    """Rows whose experts are computed at once: WIDE_BYTES of hidden activations and of outputs."""
    return max(1, min(rows, WIDE_BYTES // (4 * active * (_hidden(part) + part.block("down").rows))))


def experts_bytes(part: Part, active: int, rows: int) -> int:
    """Bytes of hidden activations and outputs of pairs. Or, without Triton, of an expert's rows and outputs, and of its
    FFN."""
    width, d = _hidden(part), part.block("down").rows
    pairs = expert_rows(part, active, rows) * active
    by_torch = 2 * _floats(rows * d) + ffn_bytes(part, part.expert_granules, rows)
    return max(_floats(pairs * width) + _floats(pairs * d), by_torch)


def _hidden(part: Part) -> int:
    """Neurons of an expert as its granules hold them."""
    return part.expert_granules * part.granule_rows


def attend_tile_rows(a: Attention, longest: int) -> int:
    """Batch rows that one program of attention takes. `longest`: the most rows of a sequence. With wide heads they are
    fewer, since they would outgrow the memory that a processor of a small card has."""
    most = ATTEND_ROWS if a.head_dim <= 128 else ATTEND_ROWS // 2 if a.head_dim <= 256 else ATTEND_ROWS // 4
    return max(1, min(most // a.heads_per_kv, longest))


def attend_splits(programs: int, context: int) -> int:
    """How many parts the KV of each row is split into. It is a function of shapes and of the room for context alone, so
    that a recorded graph holds at any position."""
    return min(-(-ATTEND_PROGRAMS // programs), MOST_SPLITS, -(-context // ATTEND_BLOCK))


def attend_bytes(a: Attention, kv_heads: int, rows: int) -> int:
    """Bytes of the parts of attention before they are merged, for up to `rows` rows: an output [E] and two numbers for
    each part, float32. Splits times rows is largest where tiles of ATTEND_ROWS just fail to be ATTEND_PROGRAMS."""
    most = 2 * ATTEND_PROGRAMS * attend_tile_rows(a, rows) // kv_heads + 2
    parts = min(MOST_SPLITS * rows, most) * kv_heads * a.heads_per_kv
    return _floats(parts * a.head_dim) + _floats(parts * 2)


def embed_bytes(edges: Part, spec: ModelSpec, rows: int) -> int:
    projection = edges.block("project_in") if edges.has("project_in") else None
    return _floats(rows * spec.d_embed) + spread_bytes(1, (projection,)) if projection else 0


def norm_bytes(edges: Part, spec: ModelSpec, rows: int) -> int:
    """Bytes for the final norm of a model that projects its output."""
    projection = edges.block("project_out") if edges.has("project_out") else None
    return _floats(rows * spec.d_model) + spread_bytes(1, (projection,)) if projection else 0


def merge_bytes(spec: ModelSpec, rows: int) -> int:
    return _floats(rows * spec.d_model)


def head_bytes(part: Part, granules: int) -> int:
    return spread_bytes(granules, (part.block("rows"),))


@lru_cache(maxsize=64)  # a planner asks for thousands of plans of a model
def _kinds(spec: ModelSpec, weights: Format) -> dict[str, tuple[str, int, int]]:
    """Part key → what is equal for all parts whose units of a size need as much scratch."""
    parts = parts_by_key(spec, weights).items()
    return {key: (part.kind, id(spec.layers[part.layer]), part.granule_bytes) for key, part in parts}


def predict_bytes(part: Part, rows: int) -> int:
    """Bytes of a predictor's hidden values and scores of PREDICTED_ROWS rows, and of its products."""
    blocks = tuple(part.block(name) for name in ("hidden", "neurons"))
    some = min(rows, PREDICTED_ROWS)
    return sum(_floats(some * block.rows) for block in blocks) + spread_bytes(1, blocks)


def scratch_bytes(plan: Plan, tier: str) -> int:
    """Bytes of the scratch arena of a device `tier` (`gpu0`): the largest need of any op on any unit that it executes
    in some pass. The main executor's edges, norms and merges are counted for every device, since they are small."""
    spec, parts = plan.target.spec, plan.parts
    rows = max(plan.chunk_rows, plan.batch_seqs)
    edges = parts["edges"]
    need = max(embed_bytes(edges, spec, rows), norm_bytes(edges, spec, rows), merge_bytes(spec, rows))
    # A large model has thousands of units, of few sizes and kinds of layer.
    like = _kinds(spec, plan.target.weights)
    cached = {f"{cache.layer}.experts" for cache in plan.caches if cache.executor == tier}
    sizes = {
        (like[u.part], u.hi - u.lo): u.part
        for u in plan.units
        if u.decode == tier or u.prefill == tier or u.part in cached
    }
    for (_, n), key in sizes.items():
        part = parts[key]
        if part.kind == "attn":
            a = spec.layers[part.layer].attention
            need = max(
                need,
                qkv_bytes(part, a, n, rows),
                out_bytes(part, n, rows),
                attend_bytes(a, n * part.granule_rows, rows),
            )
        elif part.kind in ("ffn", "shared"):
            need = max(need, ffn_bytes(part, n, rows))
        elif part.kind == "experts":
            need = max(need, experts_bytes(part, spec.layers[part.layer].active, rows))
        elif part.kind == "router":
            need = max(need, route_bytes(part, rows))
        elif part.kind in ("embed", "head"):
            need = max(need, head_bytes(part, n))
    return round_up(need, 4096)


def _floats(count: int) -> int:
    return round_up(4 * count, ALIGN)
