"""Lines and tokens of Python code, file by file: comments, docstrings and blank lines are not counted.

python -m tools.code_size penstock/planner/solve [FOLDER OR FILE ...]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_size(text: str) -> tuple[int, int]:
    """(lines, tokens) of a module's code."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            prose.update(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE and token.start[0] not in prose:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines), tokens


def main() -> None:
    roots = [Path(name) for name in sys.argv[1:]]
    files = sorted({file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))})
    sizes = {file: code_size(file.read_text()) for file in files}
    for file, (lines, tokens) in sizes.items():
        print(f"{lines:7,} lines {tokens:9,} tokens  {file}")
    print(f"{sum(n for n, _ in sizes.values()):7,} lines {sum(n for _, n in sizes.values()):9,} tokens  in all")


if __name__ == "__main__":
    main()
