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


def raises(function: Function) -> bool:
    """Whether the function itself raises an error. One that lets another's error pass on (a bare `raise`) does not."""
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, (*Function.__args__, ast.Lambda, ast.ClassDef)):  # type: ignore[attr-defined]
            left += ast.iter_child_nodes(node)
    return False


def is_command(path: Path, function: Function) -> bool:
    """Whether it is a command of the program, whose docstring is its help."""
    return path.parent.name == "cli" and function.name.rstrip("_") == path.stem.rstrip("_")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_say_what_they_raise(path: Path) -> None:
    for function in public_functions(tree_of(path).body):
        if raises(function) and not is_command(path, function):
            said = ast.get_docstring(function) or ""
            assert "aises" in said, f"{path}:{function.lineno}: {function.name} raises, and does not say so"


ARRAYS = re.compile(r"\b(NDArray|ndarray|Float32|Floats|Uint8|Tensor)\b")
OF_TENSORS = re.compile(r"TensorInfo|Mapping|dict")  # tables of a file's tensors, which are no arrays


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrays_have_shapes(path: Path) -> None:
    """A public function that takes an array draws a shape: "x float32 [T, D]"."""
    for function in public_functions(tree_of(path).body):
        said = ast.get_docstring(function) or ""
        for argument in (*function.args.args, *function.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if ARRAYS.search(kind) and not OF_TENSORS.search(kind):
                assert re.search(r"\[[^\]]+\]", said), f"{path}:{function.lineno}: {function.name}: {argument.arg} [?]"
