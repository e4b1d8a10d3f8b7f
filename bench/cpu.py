"""`python -m bench.cpu`: decode, prefill and long attention beside llama.cpp and beside what the machine can do.

Models of two shapes, random weights of 4.5 bits: int4 in groups of 64 here, Q4_0 there. Both engines are there at once,
each in a process of its own (`bench/peers`), and take turns; ceilings are measured between the turns. The machine
drifts, so `…_vs_…`, `…_share_…` and `…_gain` are medians of what each round gives, not quotients of medians. The last
line is one JSON object, which comes whatever fails (`bench.report`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cpu_families import attention, families
from bench.peers import Answer, Worker
from bench.peers.random_gguf import bytes_per_token, load_config, write
from bench.report import Report, last_line, model_folder
from penstock import _native
from penstock.runtime import host
from penstock.runtime.this_machine import cpu_name
from penstock.spec.format import parse_format
from penstock.store.synth import synth
from penstock.units import GIB, format_bytes

SHAPES = Path(__file__).parent / "shapes"
DEFAULT_SHAPES = {"1b": SHAPES / "llama-3.2-1b.json", "8b": SHAPES / "llama-3.1-8b.json"}
LEAST_ROUNDS = 5
CONTEXT, PREFILL_TOKENS, LONG_TOKENS = 1024, 512, 8192
DECODE_BYTES, MOST_DECODE_TOKENS = 54e9, 32  # of weights, about a second's worth
CEILING_BYTES, CEILING_REPEATS = 3 * GIB // 2, 5
SPARE_BYTES = 4 * GIB  # beside two models: the ceiling's memory, a long context's KV, both processes
LOUD_SHARE = 0.02  # of the processors' time: from here on others disturbed what was measured
RATIOS = {
    "decode_vs_llamacpp": ("decode_tokens_per_s", "llamacpp_decode_tokens_per_s"),
    "prefill_vs_llamacpp": ("prefill_tokens_per_s", "llamacpp_prefill_tokens_per_s"),
    "four_sequences_gain": ("four_sequences_tokens_per_s", "decode_tokens_per_s"),
}

Figures = dict[str, float]


class Ceilings:
    """What the machine can do, read again and again; every reading is kept."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = _native.Memory(CEILING_BYTES, True)
        self._memory.populate()
        self.readings: dict[str, list[float]] = {"ram_read_bytes_per_s": []}

    def ram(self) -> float:
        seconds = _native.ram_read_s(self._memory.address, CEILING_BYTES, self.threads, CEILING_REPEATS)
        self.readings["ram_read_bytes_per_s"].append(CEILING_BYTES / seconds)
        return CEILING_BYTES / seconds

    def peak(self, name: str, kind: str, isa: str | None = None) -> float:
        """Operations per second in registers, a multiplication and an addition counting as two."""
        found = _native.peak_per_s(kind, self.threads, isa)
        self.readings.setdefault(name, []).append(found)
        return found


class Shape:
    """Both engines with one shape loaded, and what a round of turns gives."""

    def __init__(self, config_file: Path, folder: Path, ceilings: Ceilings) -> None:
        config = load_config(config_file)
        model, gguf = folder / f"{config_file.stem}-int4", folder / f"{config_file.stem}-q4_0.gguf"
        write_models(config_file, model, gguf)
        need = sum(file.stat().st_size for file in (*model.iterdir(), gguf)) + SPARE_BYTES
        if need > host.available_bytes():
            sys.exit(f"{config_file.stem} needs {format_bytes(need)} of free memory; see --shapes for fewer or smaller")
        context = min(CONTEXT, config["max_position_embeddings"])
        same = ("--threads", ceilings.threads, "--context", context)
        self.ours = Worker("bench.peers.ours", model, *same)
        self.peer = Worker("bench.peers.llamacpp", gguf, "--config", config_file, *same)
        self._ceilings = ceilings
        self._decode_tokens = int(max(4, min(MOST_DECODE_TOKENS, DECODE_BYTES // bytes_per_token(config))))
        self.bytes_per_token: dict[str, float] = {}
        for worker, *commands in ((self.ours, "decode", "decode_four"), (self.peer, "decode")):
            worker.ask("prefill", 64)  # not counted
            for command in commands:
                worker.ask(command, 2)
        self.ours.ask("attend", LONG_TOKENS)
        self.ours.idle_cpu_s = self.peer.idle_cpu_s = 0.0

    def round(self, backwards: bool) -> Figures:
        """Our decode stands between the others, right beside all that it is compared with."""
        turns: list[Callable[[Figures], None]] = [self._four, self._decode, self._peer_decode]
        turns += [self._prefill, self._peer_prefill, self._attend]
        figures: Figures = {}
        for turn in reversed(turns) if backwards else turns:
            turn(figures)
        return figures | {name: figures[above] / figures[below] for name, (above, below) in RATIOS.items()}

    def close(self) -> None:
        self.ours.close()
        self.peer.close()

    def others_cpu_s(self) -> float:
        """Processor time that everything but this bench has had so far. Only differences mean something."""
        return busy_s() - time.process_time() - self.ours.cpu_s - self.peer.cpu_s

    def facts(self) -> dict[str, Any]:
        """What was compared, and the processor time that each worker took while it should have slept."""
        workers = {"penstock": self.ours, "llamacpp": self.peer}
        return {
            name: {**worker.facts, "bytes_per_token": self.bytes_per_token[name], "idle_cpu_s": worker.idle_cpu_s}
            for name, worker in workers.items()
        }

    def _decode(self, figures: Figures) -> None:
        found, ram = self._below_ram(lambda: self.ours.ask("decode", self._decode_tokens))
        figures["decode_tokens_per_s"] = self._decode_tokens / found["seconds"]
        figures["decode_share_of_ram_bandwidth"] = found["bytes"] / found["seconds"] / ram
        figures["decode_ram_bytes_per_s"] = ram
        self.bytes_per_token["penstock"] = found["bytes"] / self._decode_tokens

    def _peer_decode(self, figures: Figures) -> None:
        found = self.peer.ask("decode", self._decode_tokens)
        figures["llamacpp_decode_tokens_per_s"] = self._decode_tokens / found["seconds"]
        self.bytes_per_token["llamacpp"] = found["bytes"] / self._decode_tokens

    def _four(self, figures: Figures) -> None:
        found = self.ours.ask("decode_four", self._decode_tokens)
        figures["four_sequences_tokens_per_s"] = 4 * self._decode_tokens / found["seconds"]

    def _prefill(self, figures: Figures) -> None:
        found = self.ours.ask("prefill", PREFILL_TOKENS)
        figures["prefill_tokens_per_s"] = PREFILL_TOKENS / found["seconds"]
        peak = self._ceilings.peak("int8_ops_per_s", "int8")
        self._ceilings.peak("float32_flops_per_s", "float32")
        figures["prefill_share_of_int8_peak"] = found["flops"] / found["seconds"] / peak

    def _peer_prefill(self, figures: Figures) -> None:
        found = self.peer.ask("prefill", PREFILL_TOKENS)
        figures["llamacpp_prefill_tokens_per_s"] = PREFILL_TOKENS / found["seconds"]

    def _attend(self, figures: Figures) -> None:
        found, ram = self._below_ram(lambda: self.ours.ask("attend", LONG_TOKENS))
        figures["attention_8k_share_of_ram_bandwidth"] = found["bytes"] / found["seconds"] / ram

    def _below_ram(self, turn: Callable[[], Answer]) -> tuple[Answer, float]:
        """(the turn's answer, the mean of the RAM bandwidths right before and right after it)."""
        before = self._ceilings.ram()
        found = turn()
        return found, (before + self._ceilings.ram()) / 2


def write_models(config_file: Path, model: Path, gguf: Path) -> None:
    """Both models, unless they are there; then waits for the disk, which would otherwise write while we measure."""
    if not (model / "penstock.json").exists():
        print(f"writing {model.name}", flush=True)
        synth(config_file, model, parse_format("int4"))
    if not gguf.exists():
        print(f"writing {gguf.name}", flush=True)
        write(config_file, gguf)
    os.sync()


def busy_s() -> float:
    """Processor time of all processes of the machine since its start, with what a hypervisor gave to others."""
    user, nice, system, _idle, _iowait, *more = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *more))) / os.sysconf("SC_CLK_TCK")


def spread(column: list[float]) -> Figures:
    return {"median": statistics.median(column), "min": min(column), "max": max(column)}


def measure(name: str, config_file: Path, folder: Path, rounds: int, ceilings: Ceilings) -> dict[str, Any]:
    """Medians by name; under `ranges` the least and the most of each, under `ratios_of_medians` what the name says."""
    shape = Shape(config_file, folder, ceilings)
    start_s, others_from_s = time.perf_counter(), shape.others_cpu_s()
    found = []
    for i in range(rounds):
        found.append(shape.round(backwards=i % 2 == 1))
        print(f"{name}: round {i + 1} of {rounds}, {time.perf_counter() - start_s:.0f} s", flush=True)
    took_s = time.perf_counter() - start_s
    others_share = (shape.others_cpu_s() - others_from_s) / took_s / ceilings.threads
    shape.close()
    if others_share > LOUD_SHARE:
        print(f"{name}: other processes took {others_share:.1%} of the processors: measure again when it is quiet")
    spreads = {figure: spread([figures[figure] for figures in found]) for figure in found[0]}
    for i, figures in enumerate(found):
        names = ("decode_share_of_ram_bandwidth", "decode_vs_llamacpp", "four_sequences_gain")
        shown = ", ".join(f"{figure} {figures[figure]:.2f}" for figure in names)
        print(f"{name}  round {i + 1}: RAM {figures['decode_ram_bytes_per_s'] / 1e9:.0f} GB/s, {shown}", flush=True)
    for figure, s in spreads.items():
        print(f"{name}  {figure:36} {s['median']:9.3f}  ({s['min']:.3f} to {s['max']:.3f})", flush=True)
    return {
        **{figure: s["median"] for figure, s in spreads.items()},
        "by_round": found,
        "ranges": {figure: {"min": s["min"], "max": s["max"]} for figure, s in spreads.items()},
        "ratios_of_medians": {r: spreads[a]["median"] / spreads[b]["median"] for r, (a, b) in RATIOS.items()},
        **shape.facts(),
        "others_cpu_share": others_share,
        "took_s": took_s,
    }


def measure_last(
    name: str, config_file: Path, folder: Path, wanted: argparse.Namespace, ceilings: Ceilings, report: Report,
    results: dict[str, Any],
) -> None:  # fmt: skip
    """Families of kernels, and attention by the cache's format, of the last shape that was asked for."""
    config = load_config(config_file)
    model, gguf = folder / f"{config_file.stem}-int4", folder / f"{config_file.stem}-q4_0.gguf"
    context, rounds = min(CONTEXT, config["max_position_embeddings"]), wanted.rounds
    results["isa_shape"] = name
    if "isa" in wanted.only:
        with report.part("isa"):
            write_models(config_file, model, gguf)
            tokens = int(max(4, min(MOST_DECODE_TOKENS, DECODE_BYTES // bytes_per_token(config))))
            results["isa"] = families(model, gguf, config_file, context, tokens, rounds, ceilings)
    for tokens in (LONG_TOKENS, 4 * LONG_TOKENS) if "attention" in wanted.only else ():
        with report.part(f"attention_{tokens // 1024}k"):
            write_models(config_file, model, gguf)
            results[f"attention_{tokens // 1024}k"] = attention(model, tokens, context, rounds, ceilings)


def named_shape(text: str) -> tuple[str, Path]:
    """(name, config.json) of "1b", "8b", or NAME=CONFIG.JSON, for a flag. Raises argparse.ArgumentTypeError."""
    name, _, path = text.partition("=")
    if not path and name not in DEFAULT_SHAPES:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(DEFAULT_SHAPES)} nor NAME=CONFIG.JSON")
    return name, Path(path) if path else DEFAULT_SHAPES[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (11 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--threads", type=int, default=host.usable_cpus())
    parser.add_argument(
        "--only", choices=("engines", "isa", "attention"), nargs="+", default=["engines", "isa", "attention"]
    )
    parser.add_argument("--shapes", type=named_shape, nargs="+", metavar="NAME[=CONFIG.JSON]", help="default 1b 8b")
    wanted = parser.parse_args()
    if wanted.rounds < LEAST_ROUNDS:
        print(f"{wanted.rounds} rounds are fewer than {LEAST_ROUNDS}: good for a look, not for a figure")
    ceilings = Ceilings(wanted.threads)
    results: dict[str, Any] = {}

    def line() -> dict[str, Any]:
        machine = {"cpu": cpu_name(), "threads": wanted.threads, "memory_bytes": host.physical_bytes()}
        bounds = {name: spread(readings) for name, readings in ceilings.readings.items() if readings}
        for name, bound in bounds.items():
            print(f"{name}: {bound['median']:.4g} ({bound['min']:.4g} to {bound['max']:.4g})")
        return {"bench": "cpu", "rounds": wanted.rounds, "machine": machine, "ceilings": bounds, **results}

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        shapes = dict(wanted.shapes or DEFAULT_SHAPES)
        for name, config_file in shapes.items() if "engines" in wanted.only else ():
            with report.part(name):
                results[name] = measure(name, config_file, folder, wanted.rounds, ceilings)
        measure_last(*list(shapes.items())[-1], folder, wanted, ceilings, report, results)


if __name__ == "__main__":
    main()
