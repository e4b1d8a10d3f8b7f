"""The names of operands: the native structs, the manual of the extension and the op table say the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
from penstock import _native
from penstock.graph import ops
from penstock.kernels import cpu

MANUAL = ast.parse((Path(penstock.__file__).parent / "_native.pyi").read_text(encoding="utf-8"))
# Operands that cross under another name: norms inside of shapes, or as the address of one of them. A scratch that no
# native kernel needs does not cross at all.
NOT_CROSSING = {
    "embed": {"edges", "scratch"},
    "norm": {"norms", "scratch", "which", "layer", "every"},
    "order": {"norms", "which", "layer"},
    "qkv": {"norms", "layer", "fresh"},
    "attend": {"norms", "layer", "fresh"},
    "out": {"layer"},
    "ffn": {"layer", "row_flops"},
    "fire": {"layer"},
    "predict": {"layer"},
    "route": {"layer", "guesses"},
    "combine": {"layer"},
    "experts": {"layer", "first_experts", "expert_rows"},
    "gate": {"layer"},
    "merge": {"norms", "layer", "block"},
}


def manual(name: str) -> tuple[str, ...]:
    """The parameters that the manual gives an op; none of them may be given by position."""
    (group,) = [node for node in MANUAL.body if isinstance(node, ast.ClassDef) and node.name == "_Ops"]
    (op,) = [node for node in group.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert [arg.arg for arg in op.args.args] == ["self"]
    return tuple(arg.arg for arg in op.args.kwonlyargs)


@pytest.mark.parametrize("name", sorted(_native.op_fields))
def test_the_manual_has_the_fields_in_their_order(name: str) -> None:
    assert manual(name) == _native.op_fields[name]


@pytest.mark.parametrize("name", sorted(set(_native.op_fields) & set(ops.OPS)))
def test_a_definition_has_the_fields_in_their_order(name: str) -> None:
    fields = _native.op_fields[name]
    definition = [f for f in ops.OPS[name].definition._fields if f not in NOT_CROSSING.get(name, set())]
    assert set(definition) <= set(fields)
    slots = [operand.name for operand in ops.OPS[name].operands if operand.name in definition]
    assert slots == [field for field in fields if field in slots]


def test_every_op_that_computes_is_native() -> None:
    assert set(_native.op_fields) - set(ops.OPS) == {"project", "widen"}  # of tests, and of a bench
    moves = {"copy", "load", "pick", "recall", "lift", "kv_load", "kv_save", "sync", "fetch", "append"}
    assert set(ops.OPS) - set(_native.op_fields) == moves


def test_a_position_is_no_name() -> None:
    compute = _native.Compute(cpu.available()[0], 1)
    with pytest.raises(TypeError):
        compute.embed(0, 1.0, 0, 1, 0)  # type: ignore[misc]
    with pytest.raises(TypeError):
        compute.embed(rows=0, embed_scale=1.0, t=0, d=1)  # type: ignore[call-arg]
