"""`python -m bench.offload`: models beyond memory, beside llama.cpp with mmap and beside accelerate's disk offload.

Each engine has a memory cgroup of the limit to itself, the whole process from its first instruction on. They take
turns with an empty page cache; ceilings (RAM, direct reads into huge pages) are read right before and right after. The
bound of a token is max(streamed bytes / disk rate, bytes of weights / RAM rate). Shares and quotients are medians of
what each round gives. GB are 10^9 bytes. The last line is one JSON object, which comes whatever fails
(`bench.report`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings, Reading
from bench.cgroup import Cgroup
from bench.cpu import busy_s, spread
from bench.offload_engines import Engines, add_shapes, tell
from bench.peers import Answer, Worker, WorkerEnded
from bench.report import last_line, model_folder
from bench.rounds import this_machine
from bench.throughput_engines import absent

LIMITS_GB = {"8b": (3.99, 2.86, 1.73), "1b_bf16": (2.0, 1.6)}
PEERS = {"8b": "llamacpp", "1b_bf16": "accelerate"}
PREFILL_GB, PREFILL_TOKENS = 2.86, 512
DECODE_S, LEAST_TOKENS, MOST_TOKENS = 6.0, 4, 48
WARM_TOKENS = 2
# After a prompt, whose pass reads all weights too and is not counted. llama.cpp takes up to 10 s a token.
PEER_TOKENS, TRY_TOKENS = {"llamacpp": 3, "accelerate": 6}, 3
# What accelerate keeps in memory, tried in turn: (share of the limit, bytes beside it, a copy or mapped). The first
# leaves all but the norms to the disk. The fastest that is as accelerate loads it, mapped, is the peer of the rounds. A
# copy of what stays in memory is our own tuning of it, which its users cannot ask for: it is told beside.
SPLITS = ((0.15, 0.0, False), (0.8, 0.0, False), (1.0, 0.9e9, True), (1.0, 0.6e9, True), (1.0, 0.45e9, True))

Figures = dict[str, Any]


class Setting:
    """One shape within one limit: our turns, the peer's, and what each round gives."""

    def __init__(self, engines: Engines, shape: str, gb: float, ceilings: Ceilings) -> None:
        self.engines, self.shape, self.gb, self.ceilings = engines, shape, gb, ceilings
        self.limit, self.peer = engines.limit(shape, gb), PEERS.get(shape, "llamacpp")
        self.facts: Figures = {}
        self.split: tuple[int, bool] | None = None  # bytes that accelerate keeps in memory, and whether as a copy
        self.tuned = 0.0  # tokens/s of accelerate with the memory's weights copied, the best of some tries
        self.tried: list[Figures] = []

    def measure(self, rounds: int) -> Figures:
        if self.peer == "accelerate":
            self._choose_split()
        found = []
        for i in range(rounds):
            turns: list[Callable[[Figures], None]] = [self._ours, self._peers]
            figures: Figures = {}
            for turn in turns if i % 2 == 0 else reversed(turns):
                turn(figures)
            theirs = figures[f"{self.peer}_tokens_per_s"]
            figures[f"vs_{self.peer}"] = figures["tokens_per_s"] / theirs if theirs else None
            found.append(figures)
            tell(f"{self.shape} {self.gb} GB, round {i + 1} of {rounds}: {_line(figures, self.peer)}")
        return self._summary(found)

    def _ours(self, figures: Figures) -> None:
        with self.engines.ours(self.shape, self.limit) as (worker, cgroup):
            tokens = max(LEAST_TOKENS, min(MOST_TOKENS, int(DECODE_S * worker.facts["predicted_tokens_per_s"])))
            worker.ask("decode", WARM_TOKENS)
            answer, readings = self._between(worker, tokens)
            peak = cgroup.peak_bytes() if cgroup else 0
            self.facts["penstock"] = worker.facts
        disk = statistics.mean(r.disk_read_bytes_per_s for r in readings)
        ram = statistics.mean(r.ram_read_bytes_per_s for r in readings)
        bound_s = max(worker.facts["streamed_bytes"] / disk, worker.facts["weight_bytes"] / ram)
        figures |= {
            "tokens": tokens,
            "tokens_per_s": tokens / answer["seconds"],
            "bound_tokens_per_s": 1 / bound_s,
            "share_of_bound": bound_s * tokens / answer["seconds"],
            "disk_bytes_per_token": answer["disk_bytes_per_token"],
            "disk_bytes_exact": bool(answer["exact"]),
            "peak_host_bytes": answer["peak_host_bytes"],
            "peak_cgroup_bytes": peak,
            "others_cpu_share": answer["others_cpu_share"],
            "disk_read_bytes_per_s": disk,
            "ram_read_bytes_per_s": ram,
            "ceilings": [asdict(reading) for reading in readings],
        }

    def _peers(self, figures: Figures) -> None:
        """The peer's figures; None where it does not live within the limit, which leaves ours all the same."""
        figures |= {f"{self.peer}_tokens_per_s": None, f"{self.peer}_peak_cgroup_bytes": None}
        if self.peer == "accelerate" and self.split is None:
            return
        try:
            start = self.engines.llamacpp(self.limit) if self.split is None else self._accelerate(*self.split)
            with start as (worker, cgroup):
                answer, readings = self._between(worker, PEER_TOKENS[self.peer])
                figures[f"{self.peer}_peak_cgroup_bytes"] = cgroup.peak_bytes() if cgroup else 0
                self.facts[self.peer] = worker.facts
        except WorkerEnded as ended:
            figures[f"{self.peer}_ended"] = str(ended)
            tell(f"{self.shape} {self.gb} GB, {self.peer}: {ended}")
            return
        figures[f"{self.peer}_tokens_per_s"] = PEER_TOKENS[self.peer] / answer["seconds"]
        figures[f"{self.peer}_ceilings"] = [asdict(reading) for reading in readings]

    def _accelerate(self, cpu_bytes: int, copied: bool) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        return self.engines.accelerate(self.limit, cpu_bytes, copied)

    def _choose_split(self) -> None:
        """The fastest that the limit lets live, of weights in memory and weights on disk."""
        best = self.tuned = 0.0
        for share, beside, copied in SPLITS:
            cpu_bytes = max(0, int(share * self.limit - beside))
            row: Figures = {"cpu_bytes": cpu_bytes, "copied": copied, "tokens_per_s": 0.0}
            try:
                with self._accelerate(cpu_bytes, copied) as (worker, _):
                    row |= worker.facts
                    row["tokens_per_s"] = TRY_TOKENS / worker.ask("decode", TRY_TOKENS)["seconds"]
            except WorkerEnded as ended:
                row["ended"] = str(ended)
            self.tried.append({name: value for name, value in row.items() if name != "versions"})
            tell(f"{self.shape} {self.gb} GB, accelerate: {self.tried[-1]}")
            if copied:
                self.tuned = max(self.tuned, row["tokens_per_s"])
            elif row["tokens_per_s"] > best:
                best, self.split = row["tokens_per_s"], (cpu_bytes, copied)
        if not best:
            tell(f"{self.shape} {self.gb} GB: accelerate lives with no split of the weights, its figures are null")

    def _between(self, worker: Worker, tokens: int) -> tuple[Answer, list[Reading]]:
        """A decode between two readings of the ceilings. `others_cpu_share`: of the processors' time, what neither this
        bench nor the worker took, once the worker has told its own."""
        before = self.ceilings.read()
        start_s, others_s = time.perf_counter(), busy_s() - time.process_time() - worker.cpu_s
        answer = worker.ask("decode", tokens)
        took_s = time.perf_counter() - start_s
        others_s = busy_s() - time.process_time() - worker.cpu_s - others_s
        answer["others_cpu_share"] = max(0.0, others_s / took_s / self.engines.threads)
        return answer, [before, self.ceilings.read()]

    def _summary(self, found: list[Figures]) -> Figures:
        """Medians; the disk's bytes are the same in every round or exact says so; the largest peak."""
        names = ["tokens_per_s", "share_of_bound", f"vs_{self.peer}", f"{self.peer}_tokens_per_s"]
        names += ["bound_tokens_per_s", "disk_read_bytes_per_s", "ram_read_bytes_per_s", "others_cpu_share"]
        columns = {name: [f[name] for f in found if f[name] is not None] for name in names}
        spreads = {name: spread(column) for name, column in columns.items() if column}
        peaks = ("peak_host_bytes", "peak_cgroup_bytes", f"{self.peer}_peak_cgroup_bytes")
        return {
            **{name: spreads[name]["median"] if name in spreads else None for name in names},
            "disk_bytes_per_token": statistics.median(figures["disk_bytes_per_token"] for figures in found),
            "disk_bytes_exact": all(figures["disk_bytes_exact"] for figures in found),
            **{name: max((f[name] for f in found if f[name] is not None), default=None) for name in peaks},
            "limit_bytes": self.limit,
            "ranges": {name: {"min": s["min"], "max": s["max"]} for name, s in spreads.items()},
            "by_round": found,
            **self._beside(spreads["tokens_per_s"]["median"]),
            **self.facts,
        }

    def _beside(self, tokens_per_s: float) -> Figures:
        if not self.tried:
            return {}
        return {
            "accelerate_tried": self.tried,
            "vs_accelerate_copied": tokens_per_s / self.tuned if self.tuned else None,
        }


def measure_prefill(engines: Engines, gb: float, rounds: int) -> Figures:
    """Of one prompt, within the limit and with everything in memory, in turns. Both stay loaded: direct reads leave
    the page cache alone."""
    limit = engines.limit("8b", gb)
    prompt = ("--prompt", PREFILL_TOKENS)
    found: list[Figures] = []
    with engines.ours("8b", limit, *prompt) as (small, _), engines.ours("8b", None, *prompt) as (whole, _):
        workers = {"limited": small, "resident": whole}
        for worker in workers.values():
            worker.ask("prefill", PREFILL_TOKENS)  # not counted
        for i in range(rounds):
            figures: Figures = {}
            for name, worker in workers.items() if i % 2 == 0 else reversed(workers.items()):
                answer = worker.ask("prefill", PREFILL_TOKENS)
                figures[f"{name}_tokens_per_s"] = PREFILL_TOKENS / answer["seconds"]
                figures[f"{name}_peak_host_bytes"] = answer["peak_host_bytes"]
            found.append(figures)
            tell(f"prefill of {PREFILL_TOKENS}, {gb} GB, round {i + 1} of {rounds}: {figures}")
        facts = {name: worker.facts for name, worker in workers.items()}
    rates = {name: spread([figures[f"{name}_tokens_per_s"] for figures in found]) for name in workers}
    ratio = rates["limited"]["median"] / rates["resident"]["median"]
    return {"limited_vs_resident": ratio, "limit_bytes": limit, **rates, "by_round": found, "facts": facts}


def _line(figures: Figures, peer: str) -> str:
    beside = f"without {peer}"
    if figures[f"vs_{peer}"] is not None:
        beside = f"{figures[f'vs_{peer}']:.2f} × {peer}'s {figures[f'{peer}_tokens_per_s']:.3f}"
    return (
        f"{figures['tokens_per_s']:.2f} tokens/s, {figures['share_of_bound']:.1%} of the bound, {beside}; "
        f"disk {figures['disk_read_bytes_per_s'] / 1e9:.2f}, RAM {figures['ram_read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"others {figures['others_cpu_share']:.0%} of the processors, peak {figures['peak_host_bytes'] / 1e9:.3f} GB, "
        f"bytes exact: {figures['disk_bytes_exact']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (14 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=(*LIMITS_GB, "prefill"), default=(*LIMITS_GB, "prefill"))
    add_shapes(parser)
    parser.add_argument("--limits", type=float, nargs="+", metavar="GB", help="of the decode settings; default all")
    wanted = parser.parse_args()
    results: Figures = {}
    start_s = time.perf_counter()
    without = absent(PEERS[shape] for shape in wanted.only if shape in PEERS)
    for peer, why in without.items():
        tell(f"{peer} cannot be run here, its figures are null: {why}")

    def line() -> Figures:
        took_s = time.perf_counter() - start_s
        about = {"rounds": wanted.rounds, "machine": this_machine(), "took_s": took_s, "absent": without}
        return {"bench": "offload", **about, **results}

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        engines = Engines(folder, wanted.large, wanted.small)
        for shape in LIMITS_GB:
            if shape in wanted.only or (shape == "8b" and "prefill" in wanted.only):
                engines.write(shape)
        engines.probe()
        for shape, limits in LIMITS_GB.items():
            if shape in wanted.only:
                ceilings = engines.ceilings(shape)
                results[shape] = {}
                for gb in (gb for gb in limits if wanted.limits is None or gb in wanted.limits):
                    with report.part(f"{shape} {gb}"):
                        results[shape][str(gb)] = Setting(engines, shape, gb, ceilings).measure(wanted.rounds)
                ceilings.close()
        if "prefill" in wanted.only:
            with report.part("prefill"):
                results["prefill"] = measure_prefill(engines, PREFILL_GB, wanted.rounds)
                results[f"prefill_{PREFILL_GB}_vs_resident"] = results["prefill"]["limited_vs_resident"]


if __name__ == "__main__":
    main()
