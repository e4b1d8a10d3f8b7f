"""The entry of the console script. It imports so little that even Ctrl-C during imports ends in one line and 130."""

from __future__ import annotations

import sys

_NEEDS_LINUX = "penstock reads weights past the page cache and keeps memory limits by means of Linux"
_ELSEWHERE = {
    "win32": f"Windows is not supported: {_NEEDS_LINUX}. It runs inside WSL2 (`wsl --install`)",
    "darwin": f"macOS is not supported: {_NEEDS_LINUX}. A Linux machine, or a virtual one, runs it",
}


def main() -> int:
    """Runs one command and returns its exit code."""
    if (why := _ELSEWHERE.get(sys.platform)) is not None:
        print(f"penstock: {why}", file=sys.stderr)
        return 2
    try:
        from penstock.cli.main import main as run
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130
    return run()
