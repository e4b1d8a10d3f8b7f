"""`python -m bench.experts`: Qwen3-30B-A3B's shape in 4.5 bits, in RAM and within budgets, beside llama.cpp.

Both engines read the same text of random tokens, each alone in a cgroup of the budget, in turns, with an empty page
cache before; routers have the same rows. Our plans go by a profile of other random tokens. Tables: `uniform`, rows of
routers as they are drawn, so experts are asked for about alike; `skewed`, their norms fall as rank^-0.5; `local`,
injected answers (each token keeps each of its experts with probability 0.5, else draws by rank^-0.5), which llama.cpp
cannot follow and nobody guesses. Both engines are warmed by the same few tokens; ours is measured once more after many,
for its predictions are of caches in their steady state. Ceilings are read right before and right after what is
measured. Two bounds of a token: max(missed bytes / disk, active bytes / RAM), and the chain of layers, whose experts
are known one layer at a time: of each layer what is not an expert / RAM + max(missed bytes / disk at reads of one
expert, active experts' bytes / RAM). GB are 10^9 bytes. `--config` takes another shape in its place, to try the bench
out: budgets shrink with its weights.

The whole takes hours. With `--rows FILE` each engine's turn is kept as it ends, and `--resume` counts those that are
there. So parts can be run one by one (`--only`, `--tables`, `--rounds`, `--turns`), each within minutes, after `--only
models` has written what they read and `--only ready` has probed the machine; `--tokens` makes the turns of a budget
shorter. The last line is one JSON object of all rounds of which every turn is there (of a budget, ours alone where the
peer had none). It names the parts that are missing, and says when each turn was measured and of how many builds of the
package they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from bench.experts_engines import TABLES, WEIGHTS, Engines
from bench.experts_rounds import Part, Tokens, budget, medians, prefill, resident, without_facts
from bench.offload_engines import tell
from bench.rounds import Figures, Rounds
from penstock.runtime import host
from penstock.runtime.this_machine import cpu_name

BUDGETS_GB = ("13.5", "9.2", "4.9")
# The peer takes some 10 s a token where least fits.
TOKENS = {"13.5": Tokens(64, 32), "9.2": Tokens(64, 32), "4.9": Tokens(16, 16)}
ROUNDS = {"4.9": 2}  # of the other parts 3


def parts_of(engines: Engines, tokens: Tokens | None, beside: bool) -> dict[str, tuple[str, str, Part]]:
    """Each part by its name, with what `--only` and `--tables` call it."""
    parts = {
        "resident": ("resident", "uniform", resident(engines)),
        "prefill": ("prefill", "uniform", prefill(engines)),
    }
    for table in ("uniform", "local", "skewed"):
        for gb in BUDGETS_GB:
            parts[f"{gb} {table}"] = (gb, table, budget(engines, gb, table, tokens or TOKENS[gb], beside))
    return parts


def measure(rounds: Rounds, name: str, part: Part, wanted: int, only: Collection[str]) -> None:
    """The turns that are missing of so many rounds of a part; of the engines `only` alone, if any are named."""
    for nth in range(wanted):
        for turn in part.turns if nth % 2 == 0 else reversed(part.turns):
            called = f"{name} {turn}"
            if (not only or turn in only) and len(rounds.turns(called)) <= nth:
                rounds.measure(called, part.turns[turn])
                tell(f"{called}, round {nth + 1}: {json.dumps(without_facts(rounds.turns(called)[nth]))}")


def found(rounds: Rounds, name: str, part: Part) -> Figures | None:
    """The medians of the rounds of which all turns are there; None where there is none."""
    there = {turn: rounds.turns(f"{name} {turn}") for turn in part.turns}
    needed = {turn: of for turn, of in there.items() if of or turn not in part.optional}
    whole = [part.together(dict(zip(needed, each, strict=True))) for each in zip(*needed.values(), strict=False)]
    return medians(whole) if whole else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (35 GB); default a temporary folder")
    parser.add_argument("--config", type=Path, help="config.json of another shape")
    parser.add_argument("--only", nargs="+", choices=("models", "ready", "resident", "prefill", *BUDGETS_GB))
    parser.add_argument("--tables", nargs="+", choices=(*TABLES, "local"), default=(*TABLES, "local"))
    parser.add_argument("--rounds", type=int, help="default 3, of the smallest budget 2")
    parser.add_argument("--tokens", type=int, nargs=2, metavar=("WARM", "MEASURED"), help="of each budget's rounds")
    parser.add_argument("--turns", nargs="+", default=(), help="of each part these alone: ours, peer, repacked, …")
    parser.add_argument("--alone", action="store_true", help="leave llama.cpp out, but where everything is in memory")
    parser.add_argument("--rows", type=Path, help="keeps every round here as it ends, a JSON object a line")
    parser.add_argument("--resume", action="store_true", help="the rounds that are there already count")
    wanted = parser.parse_args()
    if wanted.resume and not wanted.rows:
        parser.error("--resume needs --rows")
    if wanted.rows and wanted.rows.exists() and not wanted.resume:
        parser.error(f"{wanted.rows} is there already; --resume counts its rounds")
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        engines = Engines((wanted.folder or Path(temporary)).resolve(), wanted.config)
        engines.folder.mkdir(parents=True, exist_ok=True)
        rounds = Rounds(wanted.rows, {"bench": "experts", "shape": engines.name, "weights": WEIGHTS, **machine})
        tokens = Tokens(*wanted.tokens) if wanted.tokens else None
        if wanted.only in (["models"], ["ready"]):
            engines.make(next(table for table in TABLES if table in wanted.tables))
            if wanted.only == ["ready"]:
                engines.ready()
            return
        results: Figures = {}
        missing = []
        for name, (only, table, part) in parts_of(engines, tokens, not wanted.alone).items():
            if only in (wanted.only or (only,)) and table in wanted.tables:
                engines.make("uniform" if table == "local" else table)
                engines.ready()
                measure(rounds, name, part, wanted.rounds or ROUNDS.get(only, 3), wanted.turns)
            figures = found(rounds, name, part)
            if figures is None:
                missing.append(name)
                continue
            at = results.setdefault(only, {})
            at |= figures if table == "uniform" else {table: figures}
    print(json.dumps({"bench": "experts", "machine": machine, **rounds.facts(), "missing": missing, **results}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
