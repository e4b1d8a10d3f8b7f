"""`python -m bench.first_words [WHEEL]`: seconds from `penstock run` to the first word, as a new user has it.

A new environment gets the wheel and what it needs (by default the wheel in dist/ for this Python), and the bundled
model is run at a terminal. `first`: on a machine that penstock does not know yet, so it measures it, and packs the
model. `next`: again. `first, busy`: as `first`, while other processes keep every core. Each is the median of some runs;
an uncounted one goes first, for the file cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROMPT = "Once upon a time"
LIMITS_S = {"first": 6.0, "next": 1.0, "first, busy": 15.0}
ROOT = Path(__file__).parents[1]


def installed(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel: its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    flags = ("-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
    subprocess.run([folder / "bin/pip", "install", *flags, wheel], check=True)
    return folder / "bin"


def first_word_s(programs: Path, model: Path, cache: Path) -> float:
    """From the start of `penstock run` to the first word after the prompt, at a terminal of our own."""
    ours, theirs = os.openpty()
    words = ["run", str(model), PROMPT, "--max-tokens", "8", "--temperature", "0", "--cache", str(cache)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": str(programs)}
    start_s = time.perf_counter()
    process = subprocess.Popen(
        [programs / "penstock", *words], stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd="/",
        env=env,
    )  # fmt: skip
    os.close(theirs)
    said, taken_s = b"", None
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # EIO: the other end is closed
            break
        said += more
        words_said = said.removeprefix(PROMPT.encode()).strip()  # the prompt is shown before the answer, at once
        if taken_s is None and words_said and not PROMPT.encode().startswith(words_said):
            taken_s = time.perf_counter() - start_s
        if not more:
            break
    os.close(ours)
    if process.wait() != 0 or taken_s is None:
        sys.exit(f"penstock run failed: {said.decode(errors='replace')}")
    return taken_s


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that does nothing but compute."""
    spinning = "while True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spinning]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(programs: Path, model: Path, folder: Path, runs: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in LIMITS_S}
    for i in range(runs + 1):
        times_s = {"first": first_word_s(programs, model, folder / f"cache-{i}")}
        times_s["next"] = first_word_s(programs, model, folder / f"cache-{i}")
        with busy_cores():
            times_s["first, busy"] = first_word_s(programs, model, folder / f"busy-{i}")
        if i > 0:
            for name, taken_s in times_s.items():
                found[name].append(taken_s)
    return found


def wheel_here() -> Path:
    """The wheel in dist/ for this Python and processor. Ends the program where there is none."""
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    wheels = sorted(ROOT.glob(f"dist/*-{tag}-*_{platform.machine()}.whl"))
    if not wheels:
        sys.exit("no wheel for this Python is in dist/: `make wheel` builds it")
    return wheels[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    how = parser.parse_args()
    wheel = how.wheel or wheel_here()
    with tempfile.TemporaryDirectory(prefix="penstock-words-") as made:
        folder = Path(made).resolve()
        programs = installed(wheel, folder / "venv")
        (model,) = (folder / "venv").glob("lib/python*/site-packages/penstock/assets/tale-llama")
        found = measure(programs, model, folder, how.runs)
    report: dict[str, object] = {"bench": "first_words", "wheel": wheel.name, "runs": how.runs}
    for name, times_s in found.items():
        median_s = statistics.median(times_s)
        print(f"{name:<12}{median_s:6.2f} s  ({min(times_s):.2f} to {max(times_s):.2f}; limit {LIMITS_S[name]:.0f} s)")
        report[name] = {"median_s": median_s, "min_s": min(times_s), "max_s": max(times_s), "limit_s": LIMITS_S[name]}
    report["within_limits"] = all(statistics.median(taken_s) < LIMITS_S[name] for name, taken_s in found.items())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
