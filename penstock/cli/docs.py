"""Writes docs/cli.md from the commands themselves: `python -m penstock.cli.docs [--check]`.

It reads the parameters and not the printed help, so neither the terminal's width nor typer's layout matters.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from penstock.cli.main import app
from penstock.cli.options import Machine, Sampling, Workload

FILE = Path("docs/cli.md")
_GROUPS = (Machine, Workload, Sampling)
_INTRO = """# The command line

Made by `python -m penstock.cli.docs` from the commands; `--check` fails where this page is stale.

Sizes are written 6GiB, 1500MiB or 12GB. Exit codes: 0 done, 2 what you can mend (one line says why), 1 a fault of
ours (`PENSTOCK_DEBUG=1` shows where), 130 on Ctrl-C. With `--json` the last line of stdout is one JSON object, on
failure `{"error": {"type", "message", …}}`; all else goes to stderr.
"""


def page() -> str:
    """The whole page, docs/cli.md."""
    group: Any = typer.main.get_command(app())
    sections = [_INTRO]
    for name, command in group.commands.items():
        sections.append(_command(name, command))
    sections.append("## Groups of flags\n\nEvery command that names a group has all of its flags.\n")
    for kind in _GROUPS:
        fields = {f.name for f in dataclasses.fields(kind)}
        owner = next(c for c in group.commands.values() if fields <= {p.name for p in c.params})
        about = " ".join((kind.__doc__ or "").split())
        sections.append(f"### {kind.__name__}\n\n{about}\n\n{_table(p for p in owner.params if p.name in fields)}")
    return "\n".join(sections)


def _command(name: str, command: Any) -> str:
    shared: dict[str, list[str]] = {kind.__name__: [f.name for f in dataclasses.fields(kind)] for kind in _GROUPS}
    names = {p.name for p in command.params}
    groups = [title for title, fields in shared.items() if set(fields) <= names]
    inside = {field for title in groups for field in shared[title]}
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([f"penstock {name}", *(_argument(p) for p in arguments)])
    lines = [f"## {name}\n", f"```\n{usage}\n```\n", _paragraphs(command.callback.__doc__ or "")]
    lines.append(_table(p for p in command.params if p.name not in inside))
    if groups:
        lines.append("Also the flags of " + ", ".join(f"[{title}](#{title.lower()})" for title in groups) + ".\n")
    return "\n".join(lines)


def _table(params: Iterable[Any]) -> str:
    rows = ["| | |", "|---|---|"]
    for p in params:
        if getattr(p, "hidden", False):
            continue
        name = _argument(p) if p.param_type_name == "argument" else _flag(p)
        shown = f"; default {p.default}" if isinstance(p.default, str | int) and p.default not in (False, "") else ""
        text = (p.help or "").rstrip(".") + shown + "."
        rows.append(f"| `{name}` | {text} |".replace("[PROMPT]", "PROMPT"))
    return "\n".join(rows) + "\n"


def _argument(p: Any) -> str:
    return p.metavar if p.required else f"[{p.metavar}]"


def _flag(p: Any) -> str:
    names = ", ".join([*p.opts, *p.secondary_opts])
    return names if p.is_flag else f"{names} {p.metavar}"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n")) + "\n"


def main(argv: list[str]) -> int:
    """Writes the page, or with --check compares it and returns 1 where it differs."""
    if argv not in ([], ["--check"]):
        print("usage: python -m penstock.cli.docs [--check]", file=sys.stderr)
        return 2
    text = page()
    if argv:
        if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{FILE} is stale: run `python -m penstock.cli.docs`", file=sys.stderr)
        return 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
