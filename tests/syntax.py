"""Syntax trees of the package's files, for tests of what its code may say."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """The file's syntax tree.

    The collector of cycles is off meanwhile. CPython before 3.11.8 counts the depth of all trees under construction in
    one place (its issue 106905). A finaliser that formats a traceback parses a line too, and the outer parse fails:
    "AST constructor recursion depth mismatch"; one run of all tests in some dozens failed so."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        if was_on:
            gc.enable()
