"""`python -m bench.startup`: wall time of `penstock --help` beside that of a bare interpreter.

The two alternate, so that whatever else the machine does meets both. The last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

RUNS = 11
LIMIT_S = 0.3

COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "help": [sys.executable, "-m", "penstock.cli", "--help"],
}


def wall_s(command: list[str]) -> float:
    """Seconds from start to exit."""
    start_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def measure(runs: int = RUNS) -> dict[str, dict[str, float]]:
    """Name → median, minimum and maximum of its seconds. One run of each goes first, uncounted, for the file cache."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for i in range(runs + 1):
        for name, command in COMMANDS.items():
            took_s = wall_s(command)
            if i > 0:
                seconds[name].append(took_s)
    return {
        name: {"median_s": statistics.median(taken), "min_s": min(taken), "max_s": max(taken)}
        for name, taken in seconds.items()
    }


def main() -> None:
    found = measure()
    for name, taken in found.items():
        print(f"{name:<8}{taken['median_s']:.3f} s  ({taken['min_s']:.3f} to {taken['max_s']:.3f}, {RUNS} runs)")
    within = found["help"]["median_s"] < LIMIT_S
    print(json.dumps({"bench": "startup", "runs": RUNS, **found, "limit_s": LIMIT_S, "within_limit": within}))


if __name__ == "__main__":
    main()
