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

A peer that cannot be imported is named before anything is measured, and its figures are null. The last line is one
JSON object, which comes whatever fails (`bench.report`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from bench import throughput_timed
from bench.ceilings import Ceilings
from bench.cpu import spread
from bench.offload_engines import add_shapes, tell
from bench.peers import WorkerEnded
from bench.report import Report, last_line, model_folder
from bench.rounds import this_machine
from bench.throughput_engines import BlockEngines, Figures, absent, answered, line
from bench.throughput_policies import Policies, Policy, distinct
from penstock.runtime.probe import load_or_probe
from penstock.spec.ask import Ask
from penstock.store.packed import open_packed

# shape, limit in GB, what is asked
SETTINGS = {
    "8b_2.86": ("8b", 2.86, Ask(prompt_tokens=256, output_tokens=32, batch=64, context=288, kv="int4")),
    "1b_0.6": ("1b", 0.6, Ask(prompt_tokens=512, output_tokens=32, batch=24, context=544, kv="int4")),
    "1b_bf16_1.6": ("1b_bf16", 1.6, Ask(prompt_tokens=512, output_tokens=32, batch=24, context=544, kv="int4")),
}
# The peers of each setting, in the order of their turns.
PEERS = {"8b_2.86": ("single_stream", "llamacpp"), "1b_0.6": ("row_by_row",), "1b_bf16_1.6": ("accelerate",)}
SINGLE_TOKENS, LLAMACPP_STEPS, ACCELERATE_STEPS = 6, 2, 3
ROW_BY_ROW = 2  # of the sizes that are predicted best
SHARES = (0.8, 0.5, 0.15)  # of the limit, that accelerate keeps of the weights: whatever lives, the fastest counts


class Setting:
    """One shape within one limit, and what each round gives. `without`: peers that cannot run here."""

    def __init__(self, engines: BlockEngines, name: str, steps: int = 0, without: Collection[str] = ()) -> None:
        self.engines, self.name, self.steps, self._without = engines, name, steps, without
        self.shape, gb, ask = SETTINGS[name]
        self.limit = engines.limit(self.shape, gb)
        self.ask = Ask(**{**_fields(ask), "host_memory_bytes": self.limit, "objective": "throughput"})
        self.ceilings: Ceilings = engines.ceilings(self.shape)
        self.policies = Policies(open_packed(engines.packed(self.shape)), self.ask, _figures(engines))
        self.chosen = self.policies.chosen()
        self.errors: list[float] = []
        self._rounds: list[Figures] = []
        self._seconds: dict[str, list[float]] = {}  # a token, of each policy
        self._size: tuple[int, int] | None = None  # sequences of the peer; bytes of weights that it keeps
        self._tried: dict[tuple[int, int], Figures] = {}  # of this turn, by size

    def measure(self, rounds: int) -> None:
        """All turns of so many rounds. `figures` has what was measured, at any time."""
        turns: dict[str, Callable[[], Figures]] = {
            "single_stream": self._single,
            "llamacpp": self._llamacpp,
            "row_by_row": self._rows,
            "accelerate": self._accelerate,
        }
        peers = [peer for peer in PEERS[self.name] if peer not in self._without]
        for i in range(rounds):
            row: Figures = {"peers": dict.fromkeys(PEERS[self.name])}
            self._rounds.append(row)
            for name in ("ours", *peers) if i % 2 == 0 else reversed(("ours", *peers)):
                if name == "ours":
                    row |= self.ours()
                else:
                    self._peer(row["peers"], name, turns[name])
            for name in PEERS[self.name]:
                row[f"vs_{name}"] = vs = beside(row, name)
                if vs is not None:
                    rate = row["peers"][name]["decode_tokens_per_s"]
                    tell(f"{self.name} beside {name}: {vs:.2f} × {rate:.3f}")

    def figures(self) -> Figures:
        """Medians of the rounds in which ours has run; what is not there is None."""
        whole = [row for row in self._rounds if "decode_tokens_per_s" in row]
        if not whole:
            return {"by_round": self._rounds}
        found = [{**row, **{f"vs_{name}": beside(row, name) for name in PEERS[self.name]}} for row in whole]
        return {**medians(found), "by_round": self._rounds}

    def _peer(self, peers: dict[str, Figures | None], name: str, turn: Callable[[], Figures]) -> None:
        """A peer's turn. Where it ended before it answered ours is told all the same; where the bench is stopped, the
        best of the sizes that were tried counts."""
        self._tried = {}
        try:
            peers[name] = turn()
        except WorkerEnded as ended:
            tell(f"{self.name}, {name}: {ended}")
        except BaseException:
            peers[name] = max(self._tried.values(), key=lambda tried: tried["decode_tokens_per_s"], default=None)
            raise

    def ours(self) -> Figures:
        return self._run(self.chosen)

    def regret(self, rounds: int, most: int | None) -> None:
        """All policies, in turns, the chosen one among them. `regrets` has what was measured, at any time."""
        policies = [self.chosen, *self.policies.others(), *self.policies.row_by_row(1), *self.policies.compared()]
        policies = distinct(policies)[:most]
        for i in range(rounds):
            for policy in policies if i % 2 == 0 else reversed(policies):
                try:
                    seconds = self._run(policy)["s_per_token"]
                except WorkerEnded as ended:
                    tell(f"{self.name}, {policy.name}: {ended}")
                else:
                    self._seconds.setdefault(policy.name, []).append(seconds)

    def regrets(self) -> Figures:
        """Of the policies that have run."""
        by_name = {name: statistics.median(column) for name, column in self._seconds.items()}
        if "chosen" not in by_name:
            return {"policies": by_name}
        fastest = min(by_name, key=lambda name: by_name[name])
        return {
            "policies": by_name,
            "policy_regret": by_name["chosen"] / by_name[fastest] - 1,
            "fastest": fastest,
            "table_4": {name: by_name["chosen"] / by_name[name] for name in by_name if name.startswith("without")},
        }

    def _run(self, policy: Policy) -> Figures:
        figures = answered(self.engines, self.ceilings, self.shape, self.limit, policy.ask, policy.plan, self.steps)
        self.errors += figures["errors"].values()
        tell(f"{self.name}, {policy.name}: {line(figures)}")
        return figures

    def _single(self) -> Figures:
        """One stream by the best plan for it, with KV room for an answer of the ask, as each of the block's has."""
        with self.engines.ours(self.shape, self.limit, "--context", self.ask.context) as (worker, _):
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
        tried = self._tried
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
            raise WorkerEnded("the peer lives with no size within the limit")
        self._size = max(tried, key=lambda size: tried[size]["decode_tokens_per_s"])
        return tried[self._size]


def _fields(ask: Ask) -> dict[str, Any]:
    return {name: getattr(ask, name) for name in ask.__dataclass_fields__}


def _figures(engines: BlockEngines) -> Any:
    return load_or_probe(engines.cache, disk_folder=engines.folder, whole=True)


def beside(row: Figures, peer: str) -> float | None:
    """How many times as fast ours decodes. None where one of them has not run."""
    theirs = row["peers"].get(peer)
    if theirs is None or "decode_tokens_per_s" not in row:
        return None
    return float(row["decode_tokens_per_s"] / theirs["decode_tokens_per_s"])


def medians(found: Sequence[Figures]) -> Figures:
    """Of all plain figures, over the rounds that have them; whether all rounds were exact."""
    names = {name: None for row in found for name, value in row.items() if value is None or isinstance(value, float)}
    columns = {name: [row[name] for row in found if row.get(name) is not None] for name in names}
    spreads = {name: spread(column) for name, column in columns.items() if column}
    return {
        **{name: spreads[name]["median"] if name in spreads else None for name in names},
        **{name: all(row[name] for row in found) for name in ("weights_once", "peak_exact")},
        "ranges": {name: {"min": s["min"], "max": s["max"]} for name, s in spreads.items()},
    }


def kv_ratio(characters: int) -> float:
    """Perplexity with KV in int4 over that with KV in float16, of the bundled model over the beginning of a text."""
    from bench.quality import MODEL, TEXT, compared, load
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack

    with model_folder(None) as folder:
        pack(MODEL, folder / "float32", parse_format("float32"))
        caches = {kv: load(folder, "float32", True, kv) for kv in ("float16", "int4")}
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
    add_shapes(parser)
    parser.add_argument("--characters", type=int, default=100_000, help="of the text for `kv`")
    wanted = parser.parse_args()
    start_s, results = time.perf_counter(), dict[str, Any]()
    without = absent(peer for name, peers in PEERS.items() if name in wanted.only for peer in peers)
    for peer, why in without.items():
        tell(f"{peer} cannot be run here, its figures are null: {why}")

    def line() -> Figures:
        took_s = time.perf_counter() - start_s
        about = {"rounds": wanted.rounds, "machine": this_machine(), "took_s": took_s, "absent": without}
        return {"bench": "throughput", **about, **results}

    with last_line(line) as report:
        measure(wanted, without, report, results)


def measure(wanted: argparse.Namespace, without: Collection[str], report: Report, results: Figures) -> None:
    """All parts into `results`, which has what was measured of a part that fails too."""
    errors: list[float] = []
    with model_folder(wanted.folder) as folder:
        engines = BlockEngines(folder, wanted.large, wanted.small)
        names = [name for name in SETTINGS if name in wanted.only or (name == "1b_0.6" and "policies" in wanted.only)]
        for name in names:
            with report.part(name):
                engines.write(SETTINGS[name][0])
                setting = Setting(engines, name, wanted.steps, without)
                try:
                    if name in wanted.only:
                        setting.measure(wanted.rounds)
                    if name == "1b_0.6" and "policies" in wanted.only:
                        setting.regret(wanted.rounds, wanted.policies)
                finally:
                    setting.ceilings.close()
                    errors += setting.errors
                    if name in wanted.only:
                        results[name] = setting.figures()
                    if name == "1b_0.6" and "policies" in wanted.only:
                        results |= setting.regrets()
                    if errors:
                        median = statistics.median(errors)
                        results |= {"prediction_error_median": median, "prediction_error_worst": max(errors)}
    if "kv" in wanted.only:
        with report.part("kv"):
            results["kv_int4_perplexity_ratio"] = kv_ratio(wanted.characters)
    if "timed" in wanted.only:
        with report.part("timed"):
            results["timed"] = throughput_timed.measure()


if __name__ == "__main__":
    main()
