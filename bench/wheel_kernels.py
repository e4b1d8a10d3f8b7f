"""`python -m bench.wheel_kernels [WHEEL]`: the kernels of a wheel, which zig's clang compiles, beside those of this
installation, which the system's compiler does.

A new environment gets the wheel (by default the one in dist/ for this Python). Both run `penstock bench ops` in turns,
on one thread, since two threads of a shared machine may have one core between them. What each op takes in the wheel
over what it takes here is told by its least time in all turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.first_words import installed, wheel_here

SHAPE = "llama-3.2-1b"
# Weights, KV, rows, context: products of each kind of kernel, then attention over each kind of KV.
ASKED = (
    ("int4", "float16", "1,4,14,64", 256), ("int8", "float16", "1,4,64", 256), ("q4_0", "float16", "1,14,64", 256),
    ("q4_k", "float16", "1,14,64", 256), ("q6_k", "float16", "1,14,64", 256), ("bfloat16", "float16", "1,64", 256),
    ("int4", "float16", "1,64", 4096), ("int4", "int8", "1,64", 4096), ("int4", "int4", "1,64", 4096),
)  # fmt: skip
LONG = 1024  # with such a context attention alone counts
LIMIT = 1.03  # of the median op

Key = tuple[str, str, int, str]  # weights or KV, the kernels' family, rows, op


def ops(command: list[str], asked: tuple[str, str, str, int], isa: str) -> dict[Key, float]:
    """Seconds of each op, by an installation's `penstock bench ops`."""
    weights, kv, rows, context = asked
    flags = ["--weights", weights, "--kv", kv, "--rows", rows, "--context", str(context), "--isa", isa, "--json"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "bench", "ops", SHAPE, "--threads", "1", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, cwd="/", env=env,
    )  # fmt: skip
    told: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["ops"]
    long = context >= LONG
    return {
        (kv if long else weights, isa, each["rows"], each["op"]): each["seconds"]
        for each in told
        if (each["op"] == "attend") == long and (long or each["op"] in ("qkv", "out", "ffn"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", nargs="+", default=["avx512", "avx2"], help="families that this processor has")
    wanted = parser.parse_args()
    wheel = wanted.wheel or wheel_here()
    least: dict[str, dict[Key, float]] = {"wheel": {}, "here": {}}
    with tempfile.TemporaryDirectory(prefix="penstock-kernels-") as made:
        programs = installed(wheel, Path(made).resolve() / "venv")
        commands = {"wheel": [str(programs / "penstock")], "here": [str(Path(sys.executable).parent / "penstock")]}
        for i in range(wanted.rounds):
            for isa in wanted.isa:
                for asked in ASKED:
                    for name in list(commands)[:: 1 if i % 2 == 0 else -1]:
                        for key, seconds in ops(commands[name], asked, isa).items():
                            least[name][key] = min(seconds, least[name].get(key, seconds))
    ratios = {key: least["wheel"][key] / least["here"][key] for key in least["here"]}
    for (kind, isa, rows, op), ratio in ratios.items():
        print(f"{isa:<8} {kind:<9} {rows:>3} rows  {op:<7} {ratio:5.2f}")
    ordered = sorted(ratios.values())
    report = {
        "bench": "wheel_kernels", "wheel": wheel.name, "rounds": wanted.rounds, "median": ordered[len(ordered) // 2],
        "worst": ordered[-1], "within_limit": ordered[len(ordered) // 2] <= LIMIT,
        "ratios": {" ".join(map(str, key)): ratio for key, ratio in ratios.items()},
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
