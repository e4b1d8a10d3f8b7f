"""The console script's entry: so light that Ctrl-C during its imports already ends in one line and 130."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from penstock.cli.main import main as run
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130
    return run()
