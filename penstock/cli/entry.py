"""The entry of the console script. It imports so little that even Ctrl-C during imports ends in one line and 130."""

from __future__ import annotations

import sys

from penstock.cli.interrupts import Interrupts
from penstock.elsewhere import why_not


def main() -> int:
    """Runs one command and returns its exit code."""
    if (why := why_not(sys.platform)) is not None:
        print(f"penstock: {why}", file=sys.stderr)
        return 2
    with Interrupts() as interrupts:
        try:
            from penstock.cli.main import main as run

            return run(interrupts=interrupts)
        except KeyboardInterrupt:
            print("penstock: stopped", file=sys.stderr)
            return 130
