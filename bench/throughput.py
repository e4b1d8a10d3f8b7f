"""`python -m bench.throughput`: what a block of many answers gives beyond memory, beside the ways to do without one.

Each engine has a memory cgroup of the limit to itself, as in `bench.offload`: the whole process from its first
instruction on, with an empty page cache. They take turns; ceilings (RAM, direct reads, dot products in registers) are
read right before a block decodes and right after. Prompts are random ids. Where a plan answers fewer prompts at once
than there are, one block is run; the others are alike. Decoding is what is compared with peers; `generation` counts the
prompts too. Shares and quotients are medians of what each round gives. GB are 10^9 bytes.

`8b_2.86`      64 prompts of 256 tokens, 32 out, KV in int4; beside one stream of ours, and llama.cpp with KV in q4_0
               and as many sequences as it can hold
`1b_0.6`       24 prompts of 512, 32 out, KV in int4; beside batch after batch with KV of 16 bits in RAM
`1b_bf16_1.6`  the same prompts in bfloat16, KV in int4; beside accelerate's disk offload, KV in bfloat16, at its best
               batch
`policies`     every other policy of `1b_0.6`; `policy_regret`: the chosen one's seconds a token over the fastest one's,
               less 1; `table_4`: FlexGen's, as shares of the chosen policy's speed
`timed`        rivals as plans, where every task is a wait (`bench.throughput_timed`)
`kv`           the bundled model's perplexity with KV in int4 over that with KV in float16

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import throughput_timed
from bench.ceilings import Ceilings
from bench.cgroup import whole_pages
from bench.cpu import spread
from bench.offload_engines import tell
from bench.peers import WorkerEnded
from bench.throughput_engines import BlockEngines, Figures, answered, line
from bench.throughput_policies import Policies, Policy, distinct
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.runtime.this_machine import cpu_name
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed

# shape, limit in GB, what is asked
SETTINGS = {
    "8b_2.86": ("8b", 2.86, Ask(prompt_tokens=256, output_tokens=32, batch=64, context=288, kv="int4")),
    "1b_0.6": ("1b", 0.6, Ask(prompt_tokens=512, output_tokens=32, batch=24, context=544, kv="int4")),
    "1b_bf16_1.6": ("1b_bf16", 1.6, Ask(prompt_tokens=512, output_tokens=32, batch=24, context=544, kv="int4")),
}
SINGLE_TOKENS, LLAMACPP_STEPS, ACCELERATE_STEPS = 6, 2, 3
ROW_BY_ROW = 2  # of the sizes that are predicted best
SHARES = (0.8, 0.5, 0.15)  # of the limit, that accelerate keeps of the weights: whatever lives, the fastest counts


class Setting:
    """One shape within one limit, and what each round gives. `peers`: turns beside ours, by name."""

    def __init__(self, engines: BlockEngines, name: str, steps: int = 0) -> None:
        self.engines, self.name, self.steps = engines, name, steps
        self.shape, gb, ask = SETTINGS[name]
        self.limit = whole_pages(round(gb * 1e9))
        self.ask = Ask(**{**_fields(ask), "host_memory_bytes": self.limit, "objective": "throughput"})
        self.ceilings: Ceilings = engines.ceilings(self.shape)
        self.policies = Policies(open_packed(engines.packed(self.shape)), self.ask, _figures(engines))
        self.chosen = self.policies.chosen()
        self.errors: list[float] = []
        self.facts: Figures = {}
        self._size: tuple[int, int] | None = None  # sequences of the peer; bytes of weights that it keeps

    def measure(self, rounds: int) -> Figures:
        peers: dict[str, Callable[[], Figures]] = {
            "8b_2.86": {"single_stream": self._single, "llamacpp": self._llamacpp},
            "1b_0.6": {"row_by_row": self._rows},
            "1b_bf16_1.6": {"accelerate": self._accelerate},
        }[self.name]
        found = []
        for i in range(rounds):
            turns: list[tuple[str, Callable[[], Figures]]] = [("ours", self.ours), *peers.items()]
            taken = {name: turn() for name, turn in (turns if i % 2 == 0 else reversed(turns))}
            row = {**taken.pop("ours"), "peers": taken}
            for name, figures in taken.items():
                row[f"vs_{name}"] = row["decode_tokens_per_s"] / figures["decode_tokens_per_s"]
                tell(f"{self.name} beside {name}: {row[f'vs_{name}']:.2f} × {figures['decode_tokens_per_s']:.3f}")
            found.append(row)
        return {**_medians(found), **self.facts, "by_round": found}

    def ours(self) -> Figures:
        return self._run(self.chosen)

    def regret(self, rounds: int, most: int | None) -> Figures:
        """All policies, in turns, the chosen one among them."""
        policies = [self.chosen, *self.policies.others(), *self.policies.row_by_row(1), *self.policies.compared()]
        policies = distinct(policies)[:most]
        seconds: dict[str, list[float]] = {policy.name: [] for policy in policies}
        for i in range(rounds):
            for policy in policies if i % 2 == 0 else reversed(policies):
                seconds[policy.name].append(self._run(policy)["s_per_token"])
        medians = {name: statistics.median(column) for name, column in seconds.items()}
        fastest = min(medians, key=lambda name: medians[name])
        return {
            "policies": medians,
            "policy_regret": medians["chosen"] / medians[fastest] - 1,
            "fastest": fastest,
            "table_4": {name: medians["chosen"] / medians[name] for name in medians if name.startswith("without")},
        }

    def _run(self, policy: Policy) -> Figures:
        figures = answered(self.engines, self.ceilings, self.shape, self.limit, policy.ask, policy.plan, self.steps)
        self.errors += figures["errors"].values()
        tell(f"{self.name}, {policy.name}: {line(figures)}")
        return figures

    def _single(self) -> Figures:
        with self.engines.ours(self.shape, self.limit) as (worker, _):
            worker.ask("decode", 2)
            answer = worker.ask("decode", SINGLE_TOKENS)
        return {"decode_tokens_per_s": SINGLE_TOKENS / answer["seconds"]}

    def _rows(self) -> Figures:
        found = [(policy.name, self._run(policy)) for policy in self.policies.row_by_row(ROW_BY_ROW)]
        name, best = max(found, key=lambda each: each[1]["decode_tokens_per_s"])
        return {"policy": name, **best}

    def _llamacpp(self) -> Figures:
        """With all sequences, or half of them, and so on: as many as live within the limit."""

        def turn(size: tuple[int, int]) -> Figures:
            with self.engines.llamacpp_block(self.limit, self.ask, size[0]) as (worker, _):
                return {**worker.ask("decode_block", LLAMACPP_STEPS), "facts": worker.facts}

        return self._of_size(turn, [(self.ask.batch >> i, 0) for i in range(self.ask.batch.bit_length())], first=True)

    def _accelerate(self) -> Figures:
        def turn(size: tuple[int, int]) -> Figures:
            with self.engines.accelerate_block(self.limit, self.ask, *size) as (worker, _):
                return {**worker.ask("decode_block", ACCELERATE_STEPS), "facts": worker.facts}

        batches = (self.ask.batch, self.ask.batch // 2, self.ask.batch // 4)
        return self._of_size(turn, [(n, int(share * self.limit)) for n in batches for share in SHARES], first=False)

    def _of_size(
        self, turn: Callable[[tuple[int, int]], Figures], sizes: Sequence[tuple[int, int]], first: bool
    ) -> Figures:
        """A peer's turn, of its best size, or of the `first` that lives; sizes are tried once, in the first round."""
        tried: dict[tuple[int, int], Figures] = {}
        for size in sizes if self._size is None else (self._size,):
            try:
                found = turn(size)
            except WorkerEnded as ended:
                tell(f"{self.name}, a peer with {size[0]} sequences and {size[1] / 1e9:.2f} GB of weights: {ended}")
                continue
            rate = found["tokens"] / found["seconds"]
            tell(f"{self.name}, a peer with {size[0]} sequences and {size[1] / 1e9:.2f} GB of weights: {rate:.3f}")
            tried[size] = {**found, "sequences": size[0], "kept_bytes": size[1], "decode_tokens_per_s": rate}
            if first:
                break
        if not tried:
            sys.exit(f"{self.name}: the peer lives with no size within the limit")
        self._size = max(tried, key=lambda size: tried[size]["decode_tokens_per_s"])
        return tried[self._size]


def _fields(ask: Ask) -> dict[str, Any]:
    return {name: getattr(ask, name) for name in ask.__dataclass_fields__}


def _figures(engines: BlockEngines) -> Any:
    return load_or_probe(engines.cache, disk_folder=engines.folder, whole=True)


def _medians(found: Sequence[Figures]) -> Figures:
    """Of all plain figures; whether all rounds were exact."""
    numbers = [name for name, value in found[0].items() if isinstance(value, float)]
    spreads = {name: spread([row[name] for row in found]) for name in numbers}
    return {
        **{name: s["median"] for name, s in spreads.items()},
        **{name: all(row[name] for row in found) for name in ("weights_once", "peak_exact")},
        "ranges": {name: {"min": s["min"], "max": s["max"]} for name, s in spreads.items()},
    }


def kv_ratio(characters: int) -> float:
    """Perplexity with KV in int4 over that with KV in float16, of the bundled model over the beginning of a text."""
    from bench.quality import MODEL, TEXT, compared, load
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        pack(MODEL, Path(folder) / "float32", parse_format("float32"))
        caches = {kv: load(Path(folder), "float32", True, kv) for kv in ("float16", "int4")}
        rows = compared(caches, TEXT.read_text(encoding="utf-8")[:characters])
    return float(rows["int4"]["perplexity"] / rows["float16"]["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (17 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=2)
    parts = (*SETTINGS, "policies", "kv", "timed")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--policies", type=int, help="run so many at most; default all")
    parser.add_argument(
        "--steps", type=int, default=0, help="a look: only so many decode passes, behind prompts that nobody read"
    )
    parser.add_argument("--characters", type=int, default=100_000, help="of the text for `kv`")
    wanted = parser.parse_args()
    start_s, results, errors = time.perf_counter(), dict[str, Any](), list[float]()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        engines = BlockEngines((wanted.folder or Path(temporary)).resolve())
        engines.folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in SETTINGS if name in wanted.only or (name == "1b_0.6" and "policies" in wanted.only)]
        for shape in dict.fromkeys(SETTINGS[name][0] for name in names):
            engines.write(shape)
        for name in names:
            setting = Setting(engines, name, wanted.steps)
            if name in wanted.only:
                results[name] = setting.measure(wanted.rounds)
            if name == "1b_0.6" and "policies" in wanted.only:
                results |= setting.regret(wanted.rounds, wanted.policies)
            setting.ceilings.close()
            errors += setting.errors
    if "kv" in wanted.only:
        results["kv_int4_perplexity_ratio"] = kv_ratio(wanted.characters)
    if "timed" in wanted.only:
        results["timed"] = throughput_timed.measure()
    if errors:
        results |= {"prediction_error_median": statistics.median(errors), "prediction_error_worst": max(errors)}
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}
    took_s = time.perf_counter() - start_s
    print(json.dumps({"bench": "throughput", "rounds": wanted.rounds, "machine": machine, "took_s": took_s, **results}))


if __name__ == "__main__":
    main()
