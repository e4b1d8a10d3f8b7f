"""The entry of the console script. It imports so little that even Ctrl-C during imports ends in one line and 130."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs one command and returns its exit code."""
    try:
        from penstock.cli.main import main as run
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130
    return run()
