"""Calls that were never lowered, for tests that look at what calls say and run none."""

from __future__ import annotations

from typing import Any

from penstock.graph import ops
from penstock.graph.tasks import Slot


def operands(name: str, **others: Any) -> ops.Operands:
    """An op's operands: a slot each, and what else it needs from `others`, or 0 or no name."""
    op = ops.OPS[name]
    slots = {o.name: (Slot("a", 0, 1),) if o.many else Slot("a", i, i + 1) for i, o in enumerate(op.operands)}
    nothing = {field: "" if kind is str else 0 for field, kind in op.definition.__annotations__.items()}
    return op.definition(**nothing | slots | others)
