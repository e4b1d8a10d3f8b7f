"""The op table. The definition of an op says what its operands are, which of them it reads and writes, how far
implementations may differ, and what it costs.

`runtime/bind.py` binds the numpy reference to each op. The reference is the oracle of every other binding. The lowering
derives edges from the operands' modes (`operand`).
"""

from typing import Any, NamedTuple

from penstock.graph.ops.cost import (
    active_cost,
    attend_cost,
    block_bytes,
    block_weights,
    experts_cost,
    fired_cost,
    matrix_cost,
    rows_cost,
)
from penstock.graph.ops.definitions import (
    FFN_BLOCKS,
    OUT_BLOCKS,
    PREDICTOR_BLOCKS,
    PRODUCTS,
    QKV_BLOCKS,
    ROUTER_BLOCKS,
    TOLERANCES,
    VOCAB_BLOCKS,
    Append,
    Attend,
    Combine,
    Copy,
    Embed,
    Experts,
    Fetch,
    Ffn,
    Fire,
    Gate,
    Gather,
    Head,
    KvLoad,
    KvSave,
    Lift,
    Load,
    Merge,
    Norm,
    Order,
    Out,
    Pick,
    Predict,
    Qkv,
    Recall,
    Route,
    Sync,
)  # fmt: skip
from penstock.graph.ops.operand import Operand, Slot, operands_of

__all__ = [
    "FFN_BLOCKS", "NAMES", "OPS", "OUT_BLOCKS", "PREDICTOR_BLOCKS", "PRODUCTS", "QKV_BLOCKS", "ROUTER_BLOCKS",
    "VOCAB_BLOCKS",
    "Append", "Attend", "Combine", "Copy", "Embed", "Experts", "Fetch", "Ffn", "Fire", "Gate", "Gather", "Head",
    "KvLoad", "KvMove", "KvSave", "LayerOp", "Lift", "Load", "Merge", "Norm", "Op", "Operands", "Order", "Out",
    "Pick", "Predict", "Qkv", "Recall", "Route", "Slot", "Sync", "WithUnit", "active_cost", "attend_cost",
    "block_bytes", "block_weights", "experts_cost", "fired_cost", "matrix_cost", "rows_cost", "slots_of",
]  # fmt: skip

LayerOp = Qkv | Attend | Append | Out | Ffn | Fire | Route | Experts | Combine | Gate | Merge | Order
KvMove = KvLoad | KvSave
WithUnit = Qkv | Out | Ffn | Fire | Experts | Head  # they multiply with a unit's weights
Operands = (
    Gather | Fetch | Embed | Norm | Order | Qkv | Attend | Append | Out | Ffn | Fire | Route | Experts | Combine | Gate
    | Predict | Merge | Head | Copy | Load | Pick | Recall | Lift | KvLoad | KvSave | Sync
)  # fmt: skip


class Op(NamedTuple):
    """A row of the table. `tolerance`: how far an implementation may be from the reference, as a share of the largest
    number in a row."""

    name: str
    definition: type[Any]
    operands: tuple[Operand, ...]
    tolerance: float


def _op(definition: type[Any], tolerance: float) -> Op:
    name = definition.__name__.replace("Kv", "Kv_").lower()
    return Op(name, definition, operands_of(definition), tolerance)


_TABLE = [_op(*pair) for pair in TOLERANCES.items()]
OPS = {op.name: op for op in _TABLE}
NAMES: dict[type[Any], str] = {op.definition: op.name for op in _TABLE}


def slots_of(operands: Operands) -> list[tuple[Operand, Slot]]:
    """The slots of an op's operands, in the order of its definition. For checks and tests, not for hot loops."""
    slots: list[tuple[Operand, Slot]] = []
    for operand in OPS[NAMES[type(operands)]].operands:
        value: Any = operands[operand.field]
        slots += [(operand, slot) for slot in (value if operand.many else (value,))]
    return slots
