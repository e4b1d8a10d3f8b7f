"""`python -m bench.startup [--beside PYTHON]`: wall time of `penstock --help`, `run` and `plan`.

`run` is for one token of the bundled model, `plan` for 80 layers, without a device and beside one. Beside all of them,
the time of a bare interpreter.

`--beside`: the interpreter of another installation of penstock, say of the version before; the same commands of it take
turns with these, so that whatever else the machine does meets all. Each installation has a cache of its own, in which a
first `run`, uncounted, packs the model and measures the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 11
LIMIT_S = 0.3
# What opening tokenizers in a process of their own may add to `run`, or a tenth of loading where that is more.
MOST_ADDED_S = 0.050


def commands(python: str, cache: Path) -> dict[str, list[str]]:
    """Name → what is measured, of the installation that `python` belongs to."""
    where = subprocess.run([python, "-c", "import penstock; print(penstock.__file__)"], capture_output=True, text=True)
    model = Path(where.stdout.strip()).parent / "assets" / "tale-llama"
    run = ["run", str(model), "Once upon a time", "--max-tokens", "1", "--temperature", "0", "--cache", str(cache)]
    plan = ["plan", "llama-3.1-70b", "--weights", "int4", "--machine"]
    found = {"help": ["--help"], "run": run, "plan": [*plan, "pc-32gb-nvme"], "plan gpu": [*plan, "pc-rtx4090-64gb"]}
    return {name: [python, "-m", "penstock.cli", *words] for name, words in found.items()}


def measure(measured: dict[str, list[str]], runs: int = RUNS) -> dict[str, list[dict[str, float]]]:
    """Name → of each run the wall seconds from start to exit, and processor seconds, those of its children included.
    One run of each goes first, uncounted, for the file cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
    for i in range(runs + 1):
        for name, command in measured.items():
            before, start_s = os.times(), time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
            wall_s, after = time.perf_counter() - start_s, os.times()
            cpu_s = sum(after[2:4]) - sum(before[2:4])
            if i > 0:
                found[name].append({"wall_s": wall_s, "cpu_s": cpu_s})
    return found


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Median and spread of the wall seconds, median of the processor's."""
    wall_s = [each["wall_s"] for each in runs]
    cpu_s = statistics.median(each["cpu_s"] for each in runs)
    return {"median_s": statistics.median(wall_s), "min_s": min(wall_s), "max_s": max(wall_s), "cpu_s": cpu_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", metavar="PYTHON", help="the interpreter of another installation")
    parser.add_argument("--runs", type=int, default=RUNS)
    how = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-startup-") as folder:
        measured = {"python": [sys.executable, "-c", "pass"], **commands(sys.executable, Path(folder, "cache"))}
        if how.beside:
            others = commands(how.beside, Path(folder, "beside"))
            measured |= {f"{name} beside": command for name, command in others.items()}
        found = {name: summary(runs) for name, runs in measure(measured, how.runs).items()}
    for name, taken in found.items():
        spread = f"{taken['min_s']:.3f} to {taken['max_s']:.3f}, {how.runs} runs"
        print(f"{name:<16}{taken['median_s']:.3f} s  ({spread}; processor {taken['cpu_s']:.3f} s)")
    report: dict[str, Any] = {"bench": "startup", "runs": how.runs, **found, "limit_s": LIMIT_S}
    report["within_limit"] = found["help"]["median_s"] < LIMIT_S
    if how.beside:
        report["run_added_s"] = found["run"]["median_s"] - found["run beside"]["median_s"]
        report["most_added_s"] = MOST_ADDED_S
    print(json.dumps(report))


if __name__ == "__main__":
    main()
