"""`python -m bench.experts`: Qwen3-30B-A3B's shape in 4.5 bits, in RAM and within budgets, beside llama.cpp.

Both engines read the same text of random tokens, each alone in a cgroup of the budget, in turns, with an empty page
cache before; routers have the same rows. Our plans go by a profile of other random tokens. Tables: `uniform`, rows of
routers as they are drawn, so experts are asked for about alike; `skewed`, their norms fall as rank^-0.5; `local`,
injected answers (each token keeps each of its experts with probability 0.5, else draws by rank^-0.5), which llama.cpp
cannot follow and nobody guesses. Both engines are warmed by the same few tokens; ours is measured once more after many,
for its predictions are of caches in their steady state. Ceilings are read right after what is measured, and before the
last few tokens that warm. Two bounds of a token: max(missed bytes / disk, active bytes / RAM), and the chain of layers,
whose experts are known one layer at a time: of each layer what is not an expert / RAM + max(missed bytes / disk at
reads of one expert, active experts' bytes / RAM). The chain is told twice: by reads that go to the same few places
again and again, which a processor's cache holds, and by reads that go all over a GiB, as experts go to their slots. GB
are 10^9 bytes. `--config` takes another shape in its place, to try the bench out: budgets shrink with its weights.

The whole takes hours. With `--rows FILE` each engine's turn is kept as it ends, and `--resume` counts those that are
there. So parts can be run one by one (`--only`, `--tables`, `--rounds`, `--turns`), each within minutes, after `--only
models` has written what they read and `--only ready` has probed the machine; `--tokens` makes the turns of a budget
shorter. A file holds turns of one build, machine, shape and number of tokens: others end the bench. The last line is
one JSON object of all rounds of which every turn is there (of a budget, ours alone where the peer had none, with null
beside it). It names the parts that are missing and the turns that have fewer rounds than others of their part, and
says when each turn was measured and of how many builds of the package they are. A part that fails is told there, and
the others go on (`bench.report`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from bench.experts_engines import TABLES, WEIGHTS, Engines
from bench.experts_rounds import PEERS, Part, Tokens, budget, medians, prefill, resident, without_facts
from bench.offload_engines import tell
from bench.report import last_line, model_folder
from bench.rounds import Figures, Rounds, checksum, this_machine

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


def left(rounds: Rounds, name: str, part: Part, wanted: int, only: Collection[str]) -> list[tuple[int, str]]:
    """What is missing of so many rounds of a part, as (round, turn) in their order; of the engines `only` alone, if any
    are named."""
    return [
        (nth, turn)
        for nth in range(wanted)
        for turn in (part.turns if nth % 2 == 0 else reversed(part.turns))
        if (not only or turn in only) and len(rounds.turns(f"{name} {turn}")) <= nth
    ]


def measure(rounds: Rounds, name: str, part: Part, due: Sequence[tuple[int, str]]) -> None:
    for nth, turn in due:
        called = f"{name} {turn}"
        rounds.measure(called, part.turns[turn])
        tell(f"{called}, round {nth + 1}: {json.dumps(without_facts(rounds.turns(called)[nth]))}")


def found(rounds: Rounds, name: str, part: Part) -> tuple[Figures | None, list[str]]:
    """The medians of the rounds of which all turns are there but optional ones, None where there is none; and what is
    missing: the whole part then, else the turns that have fewer rounds than others."""
    there = {turn: rounds.turns(f"{name} {turn}") for turn in (*part.turns, *part.optional)}
    most = max(map(len, there.values()))
    whole = min(len(of) for turn, of in there.items() if turn not in part.optional)
    if not whole:
        return None, [name]
    each = [part.together({turn: of[nth] for turn, of in there.items() if nth < len(of)}) for nth in range(whole)]
    return medians(each), [f"{name} {turn}" for turn, of in there.items() if len(of) < most]


def about_of(engines: Engines, tokens: Tokens | None) -> Figures:
    """What all turns of a file have in common."""
    return {
        "bench": "experts",
        "shape": engines.name,
        "config": checksum(engines.config),
        "weights": WEIGHTS,
        "limits": {gb: engines.limit(gb) for gb in BUDGETS_GB},
        "tokens": {gb: list(tokens or TOKENS[gb]) for gb in BUDGETS_GB},
        **this_machine(),
    }


def table_of(tables: Collection[str]) -> str:
    """The first whose models are written: two do not fit on a common disk. Injected answers need the uniform one's."""
    models = {"uniform" if table == "local" else table for table in tables}
    return next(table for table in TABLES if table in models)


def asked(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="keeps the models here (35 GB, without the peer 17); default a temporary folder"
    )
    parser.add_argument("--config", type=Path, help="config.json of another shape")
    parser.add_argument("--only", nargs="+", choices=("models", "ready", "resident", "prefill", *BUDGETS_GB))
    parser.add_argument("--tables", nargs="+", choices=(*TABLES, "local"), default=(*TABLES, "local"))
    parser.add_argument("--rounds", type=int, help="default 3, of the smallest budget 2")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        metavar=("WARM", "MEASURED"),
        help="of each budget's rounds; the same in all calls of one --rows",
    )
    parser.add_argument("--turns", nargs="+", default=(), help="of each part these alone: ours, peer, repacked, …")
    parser.add_argument("--alone", action="store_true", help="leave llama.cpp out, but where everything is in memory")
    parser.add_argument("--rows", type=Path, help="keeps every round here as it ends, a JSON object a line")
    parser.add_argument("--resume", action="store_true", help="the rounds that are there already count")
    wanted = parser.parse_args(argv)
    if wanted.resume and not wanted.rows:
        parser.error("--resume needs --rows")
    if wanted.rows and wanted.rows.exists() and not wanted.resume:
        parser.error(f"{wanted.rows} is there already; --resume counts its rounds")
    only = set(wanted.only or ())
    if only & {"models", "ready"} and only - {"models", "ready"}:
        parser.error("--only models and --only ready measure nothing, and go with no other part")
    if only & {"resident", "prefill"} and "uniform" not in wanted.tables:
        parser.error("--only resident and --only prefill are of the table uniform, which --tables leaves out")
    return wanted


def main() -> None:
    wanted = asked()
    with model_folder(wanted.folder) as folder:
        engines = Engines(folder, wanted.config)
        if {"models", "ready"} & set(wanted.only or ()):
            engines.make(table_of(wanted.tables), not wanted.alone)
            if "ready" in wanted.only:
                engines.ready()
            return
        tokens = Tokens(*wanted.tokens) if wanted.tokens else None
        rounds = Rounds(wanted.rows, about_of(engines, tokens))
        parts = parts_of(engines, tokens, not wanted.alone)
        with last_line(lambda: line(rounds, parts)) as report:
            for name, (only, table, part) in parts.items():
                if only not in (wanted.only or (only,)) or table not in wanted.tables:
                    continue
                with report.part(name):
                    due = left(rounds, name, part, wanted.rounds or ROUNDS.get(only, 3), wanted.turns)
                    if due:
                        engines.make(table_of([table]), any(turn in PEERS for _, turn in due))
                        engines.ready()
                        measure(rounds, name, part, due)


def line(rounds: Rounds, parts: dict[str, tuple[str, str, Part]]) -> Figures:
    """All rounds of all parts of which every turn is there, and what is missing."""
    results: Figures = {}
    missing: list[str] = []
    for name, (only, table, part) in parts.items():
        figures, lacking = found(rounds, name, part)
        missing += lacking
        if figures is not None:
            at = results.setdefault(only, {})
            at |= figures if table == "uniform" else {table: figures}
    return {"bench": "experts", "machine": this_machine(), **rounds.facts(), "missing": missing, **results}


if __name__ == "__main__":
    main()
