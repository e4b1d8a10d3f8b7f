"""What docstrings of public functions have to say, by the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import tree_of

ROOT = Path(__file__).parents[2] / "penstock"
FILES = sorted(ROOT.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """The public functions of a module, and the public methods of its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside of it."""
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):  # type: ignore[attr-defined]
            left += ast.iter_child_nodes(node)


class Module:
    """The functions of a module and the methods of its classes, by (class or None, name)."""

    def __init__(self, path: Path) -> None:
        body = tree_of(path).body
        self.classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        tables = [(None, body), *((name, node.body) for name, node in self.classes.items())]
        self.functions: dict[tuple[str | None, str], Function] = {
            (name, node.name): node for name, nodes in tables for node in nodes if isinstance(node, Function)
        }

    def raises(self, owner: str | None, function: Function, seen: frozenset[str] = frozenset()) -> bool:
        """Whether the function raises an error, by itself or in a private function of its module or class that it calls
        where nobody catches it. One that lets another's error pass on (a bare `raise`) does not."""
        caught = {
            id(inside)
            for node in own_nodes(function)
            if isinstance(node, ast.Try) and node.handlers
            for statement in node.body
            for inside in ast.walk(statement)
        }
        for node in own_nodes(function):
            if isinstance(node, ast.Raise) and node.exc is not None:
                return True
            if isinstance(node, ast.Call) and id(node) not in caught:
                key = called(owner, node.func)
                inner = self.functions.get(key) if key else None
                if inner is not None and inner.name not in seen and self.raises(owner, inner, seen | {inner.name}):
                    return True
        return False


def called(owner: str | None, function: ast.expr) -> tuple[str | None, str] | None:
    """The private function that an expression names: of the module, or of `self`."""
    if isinstance(function, ast.Name) and function.id.startswith("_"):
        return None, function.id
    if isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("self", "cls"):
        return (owner, function.attr) if function.attr.startswith("_") else None
    return None


def is_command(path: Path, function: Function) -> bool:
    """Whether it is a command of the program, whose docstring is its help."""
    return path.parent.name == "cli" and function.name.rstrip("_") == path.stem.rstrip("_")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_say_what_they_raise(path: Path) -> None:
    module = Module(path)
    for (owner, name), function in module.functions.items():
        hidden = name.startswith("_") or (owner or "").startswith("_")
        if not hidden and module.raises(owner, function) and not is_command(path, function):
            said = ast.get_docstring(function) or ""
            assert "aises" in said, f"{path}:{function.lineno}: {name} raises, and does not say so"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_classes_say_what_making_one_raises(path: Path) -> None:
    module = Module(path)
    for (owner, name), function in module.functions.items():
        if owner and not owner.startswith("_") and name in ("__init__", "__post_init__", "__new__"):
            said = (ast.get_docstring(module.classes[owner]) or "") + (ast.get_docstring(function) or "")
            assert "aises" in said or not module.raises(owner, function), f"{path}: {owner} raises, and does not say so"


ARRAYS = re.compile(r"\b(NDArray|ndarray|Array|Float32|Floats|Uint8|Tensor)\b")
OF_TENSORS = re.compile(r"TensorInfo|Mapping|dict")  # tables of a file's tensors, which are no arrays
DTYPE = re.compile(r"float(16|32|64)|u?int(8|16|32|64|p)|bool|dtype")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrays_have_shapes_and_dtypes(path: Path) -> None:
    """A public function that takes or gives an array draws its shape and names what it is of: "x float32 [T, D]"."""
    for function in public_functions(tree_of(path).body):
        said = ast.get_docstring(function) or ""
        given = (argument.annotation for argument in (*function.args.args, *function.args.kwonlyargs))
        kinds = [ast.unparse(kind) for kind in (*given, function.returns) if kind is not None]
        if any(ARRAYS.search(kind) and not OF_TENSORS.search(kind) for kind in kinds):
            assert re.search(r"\[[^\]]+\]", said), f"{path}:{function.lineno}: {function.name} has no shape"
            assert DTYPE.search(said), f"{path}:{function.lineno}: {function.name} has no dtype"
