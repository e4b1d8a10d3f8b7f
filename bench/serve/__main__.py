"""`python -m bench.serve`: what a server gives whose weights stream: many answers for one read of them.

`streams`   8 and 32 streams within a budget, beside the best plan of one stream in the same cgroup, and beside 32
            streams with all weights in memory, in turns. Contexts of 256 tokens.
`resident`  8 streams with all weights in memory, beside llama.cpp with 8 sequences where llama-cpp-python is installed.
`http`      what HTTP costs: 8 streams of the server beside the same in one process without it.
`prompt`    prompts of 512 tokens that join eight streams, one after the other: the 95th percentile of their gaps beside
            that without a prompt, and its first token beside its time alone (`bench.serve.joins`).
`prefix`    turn 20 of a chat with a prefix of 2,000 tokens: its first token beside the time of its new tokens alone,
            beside the model's own pass, and after a restart (`bench.serve.turns`).
`load`      requests that arrive by chance at three rates: waits for a sequence, first token and tokens/s beside those
            that a scheduler on a virtual clock foretold, and beside what `/v1/plan` said (`bench.serve.load`).
`soak`      64 streams at a time, a tenth cut off, malformed requests between: answers that are not those of the same
            request alone, growth of memory, KV pages and sequences that were not given back.

All servers are processes of their own, in a cgroup where a budget is given. The clients are in this process and take
processor time too. GB are 10^9 bytes. The last line is one JSON object with a figure of each part; what did not run is
null there. The line before it has all figures. Both come whatever fails (`bench.report`), and a part that fails has
what it measured before. llama.cpp is named at the start where it cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.cgroup import whole_pages
from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import tell
from bench.report import Report, last_line, model_folder
from bench.rounds import this_machine
from bench.serve.joins import prompt
from bench.serve.load import load
from bench.serve.models import Bench, Figures
from bench.serve.soak import soak
from bench.serve.streams import http, resident, streams
from bench.serve.turns import prefix
from bench.throughput_engines import absent

PARTS = ("streams", "resident", "http", "prompt", "prefix", "load", "soak")
LIMIT_GB = 2.86
# Of the last line; all figures are in the line before it.
NAMES = ("streams_8_gain", "streams_32_gain", "vs_llamacpp_8", "gap_worst_ratio", "ttft_prefix_ratio",
         "predicted_error_median", "wrong_answers", "pages_leaked")  # fmt: skip


Part = Callable[[], Iterator[Figures]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (11 GB); default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--joins", type=int, default=3, help="prompts that join in each round of `prompt`")
    parser.add_argument("--limit-gb", type=float, default=LIMIT_GB)
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="of load; soak takes 10, or these if they are fewer"
    )
    parser.add_argument("--kv", help="format of the KV of all of ours, as `serve --kv`; default the model's")
    parser.add_argument("--large", type=Path, default=DEFAULT_SHAPES["8b"], help="config.json of the shape for budgets")
    parser.add_argument("--small", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of the shape for loads")
    wanted = parser.parse_args()
    start_s = time.perf_counter()
    without = absent(("llamacpp",)) if "resident" in wanted.only else {}
    for peer, why in without.items():
        tell(f"{peer} cannot be run here, its figures are null: {why}")
    found: dict[str, Figures] = {name: {} for name in PARTS if name in wanted.only}

    def line() -> Figures:
        took_s = time.perf_counter() - start_s
        about = {"bench": "serve", "rounds": wanted.rounds, "limit_gb": wanted.limit_gb, "kv": wanted.kv,
                 "machine": this_machine(), "took_s": took_s, "absent": without, "failed": report.failed}  # fmt: skip
        print(json.dumps({**about, **found}))
        return {name: next((part[name] for part in found.values() if part.get(name) is not None), None)
                for name in NAMES}  # fmt: skip

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        bench = Bench(folder, wanted.large, wanted.small, whole_pages(round(wanted.limit_gb * 1e9)), wanted.kv)
        parts: dict[str, Part] = {
            "streams": lambda: streams(bench, wanted.rounds),
            "resident": lambda: resident(bench, wanted.rounds, "llamacpp" not in without),
            "http": lambda: http(bench, wanted.rounds),
            "prompt": lambda: prompt(bench, wanted.rounds, wanted.joins),
            "prefix": lambda: prefix(bench, wanted.rounds),
            "load": lambda: load(bench, wanted.minutes),
            "soak": lambda: soak(bench, min(10.0, wanted.minutes)),
        }
        run({name: parts[name] for name in found}, found, report)


def run(parts: Mapping[str, Part], found: dict[str, Figures], report: Report) -> None:
    """Runs the parts one after the other. Each yields its figures as they become more. `found` has the latest ones of
    each, at any time. A part in which a turn failed has failed too, and has the figures of the others."""
    for name, part in parts.items():
        with report.part(name):
            for figures in part():
                found[name] = figures
            turns = [each["failed"] for each in found[name].get("by_round", ()) if "failed" in each]
            if turns:
                report.failed[name] = json.dumps(turns)
        shown = {key: value for key, value in found[name].items() if key != "by_round"}
        tell(f"{name}: {json.dumps(shown)}")


if __name__ == "__main__":
    main()
