"""Bytes of temporaries of the native kernels: the arithmetic of csrc/scratch.h, repeated here because plans are also
made where nothing native runs. A test holds the two to each other. csrc/scratch.h explains each term; this file does
not repeat that.

`rows`: the most rows of a call.
"""

from __future__ import annotations

from penstock.spec.blocks import GROUP
from penstock.spec.format import Format
from penstock.spec.model import Attention
from penstock.spec.parts import Block, Part
from penstock.units import KIB, round_up

_ALIGN = 64
_THREADS = 8  # attention has temporaries for so many threads
_FOURS = 16  # fours of an FFN's granules that are summed at a time
_FEW_ROWS, _HIDDEN_ROWS, _QUERY_ROWS, _QUERIES, _CHOOSING_QUERIES = 8, 48, 8, 64, 8
_SUM_COLUMNS, _VALUE_GRANULES = 512, 16
_PART_TOKENS, _BLOCK_TOKENS = 32, 256
_CHUNK_BYTES = 512 * KIB


def project_bytes(block: Block, rows: int) -> int:
    """Of a projection, or of the head, granule by granule."""
    return _input_bytes(block, 1, rows)


def out_bytes(block: Block, granules: int, rows: int) -> int:
    """Of a product with `granules` granules of the block, summed over them."""
    return _input_bytes(block, granules, rows)


def ffn_bytes(part: Part, granules: int, rows: int) -> int:
    """Of an FFN of so many granules."""
    if part.by_neurons:
        return _neurons_bytes(part, granules, rows)
    up, down = part.block("up"), part.block("down")
    few, fours = min(rows, _FEW_ROWS), min(_FOURS, -(-granules // part.sum_granules))
    sums = round_up(4 * fours * few * down.rows, _ALIGN)
    need = 0
    for exact in (True, False):
        chunk = _chunk_rows(up, 1, rows, exact)
        need = max(need, _prepared_bytes(up, 1, chunk, exact) + _prepared_bytes(down, 1, chunk, exact))
        need = max(need, _prepared_bytes(up, 1, few, exact) + _prepared_bytes(down, fours, few, exact) + sums)
    return need


def _neurons_bytes(part: Part, granules: int, rows: int) -> int:
    """Of an FFN that lies neuron by neuron."""
    first, neurons = part.blocks[0], part.granule_rows
    few, fours = min(rows, _FEW_ROWS), min(_FOURS, -(-granules // part.sum_granules))
    sums, need = round_up(4 * fours * few * part.width, _ALIGN), 0
    for exact in (True, False):
        chunk = _chunk_rows(first, 1, rows, exact)
        values = min(granules, _VALUE_GRANULES) * (
            2 * round_up(4 * neurons * chunk, _ALIGN) + round_up(4 * neurons, _ALIGN)
        )
        own = round_up(4 * _THREADS * chunk * _SUM_COLUMNS, _ALIGN)
        need = max(need, _prepared_bytes(first, 1, few, exact) + sums)
        need = max(need, _prepared_bytes(first, 1, chunk, exact) + own + values)
    return need


def predict_bytes(part: Part, rows: int) -> int:
    hidden, neurons = part.block("hidden"), part.block("neurons")
    return round_up(4 * rows * hidden.rows, _ALIGN) + max(_input_bytes(b, 1, rows) for b in (hidden, neurons))


def route_bytes(part: Part, rows: int) -> int:
    scores = part.block("scores")
    score_bytes = round_up(4 * scores.rows * rows, _ALIGN) + round_up(4 * scores.rows, _ALIGN)
    return score_bytes + _input_bytes(scores, 1, rows)


def experts_bytes(part: Part, active: int, rows: int) -> int:
    """Of experts, of which each row goes to `active`."""
    up, down, few = part.block("up"), part.block("down"), min(rows, _FEW_ROWS)
    gathered = round_up(4 * rows * up.cols, _ALIGN) + round_up(4 * rows * down.rows, _ALIGN)
    need = gathered + ffn_bytes(part, part.expert_granules, rows)
    four = min(part.expert_granules, part.sum_granules)
    for exact in (True, False):
        chunk = _chunk_rows(up, 1, rows, exact)
        need = max(need, gathered + _prepared_bytes(up, 1, chunk, exact) + _prepared_bytes(down, four, chunk, exact))
        row_bytes = _prepared_bytes(up, 1, 1, exact) + _prepared_bytes(down, part.expert_granules, 1, exact)
        pair_bytes = round_up((4 * row_bytes + 2) // 3, _ALIGN) + 2 * round_up(4 * down.rows, _ALIGN)
        need = max(need, few * active * pair_bytes)
    return need


def qkv_bytes(part: Part, a: Attention, kv_heads: int, rows: int) -> int:
    return _input_bytes(part.block("q"), 1, rows) + round_up(8 * rows * kv_heads * a.head_dim, _ALIGN)


def attend_bytes(a: Attention, kv: Format, rows: int, chosen: int) -> int:
    """`chosen`: the most positions of a sequence, where only a share of them counts; else 0."""
    group = a.heads_per_kv
    most = max(1, _CHOOSING_QUERIES // group) if chosen else max(_QUERY_ROWS, _QUERIES // group)
    queries, width = group * min(rows, most), round_up(a.head_dim, 32 if kv.kind == "int4" else 16)
    scores = round_up(max(chosen, 1), _BLOCK_TOKENS)
    floats = (2 * queries + _PART_TOKENS) * width + 2 * round_up(width, 32) + queries * (scores + 2)
    return _THREADS * round_up(4 * floats, _ALIGN)


def merge_bytes(d_model: int, rows: int) -> int:
    return round_up(4 * rows * d_model, _ALIGN)


def _chunk_rows(block: Block, granules: int, rows: int, exact: bool) -> int:
    item_bytes = 1 if block.format.is_quantised and not exact else 4
    chunk = _CHUNK_BYTES // (block.cols * granules * item_bytes)
    return min(rows, max(1, chunk // _HIDDEN_ROWS) * _HIDDEN_ROWS)


def _prepared_bytes(block: Block, granules: int, rows: int, exact: bool) -> int:
    rows = rows if rows == 1 else round_up(rows, 2)  # the last panel may have a row of zeros
    if not block.format.is_quantised:
        return round_up(4 * rows * granules * block.cols, _ALIGN)
    groups = rows * granules * block.format.groups(block.cols)
    numbers, group_bytes = groups * block.format.group, round_up(4 * groups, _ALIGN)
    if exact:
        return round_up(4 * numbers, _ALIGN) + group_bytes
    return round_up(numbers, _ALIGN) + (3 if block.format.group == GROUP else 2) * group_bytes


def _input_bytes(block: Block, granules: int, rows: int) -> int:
    return max(
        _prepared_bytes(block, granules, _chunk_rows(block, granules, rows, exact), exact) for exact in (True, False)
    )
