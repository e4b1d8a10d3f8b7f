"""`python -m bench.sparsity`: what is gained where neurons that do not fire are left out (PowerInfer), on this CPU.

    ops    4096 × 4096 weights that a share of zeros multiplies, as rows of neurons, beside the dense kernel (Figure 16)
    ram    OPT-6.7B's shape in int4, all in memory, 3 % of the neurons firing: exact beside off, batches 1 to 32
           (Figure 14), and beside the bound that the bytes set
    disk   the same shape within 2.4 GB, the rest on the disk, by `bench.sparsity_disk`
    tale   which neurons of the trained models fire (Figures 4 and 5), by `bench.tale_sparsity`

Models are random, with rates of firing as PowerInfer's Figure 4 has them (`penstock synth --activation-rate`). Both
layouts and `off` take turns in processes of their own. Predictors do not run yet: they are null. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Worker
from bench.peers.ours import BATCHES
from bench.sparsity_disk import within_disk
from penstock import _native
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.probe import cpu_name
from penstock.spec.format import parse_format
from penstock.spec.model import Attention, Ffn, Layer, ModelSpec, Norm
from penstock.spec.parts import Part, parts
from penstock.store.quantize import encode, encode_rows

SHAPE, RATES = "opt-6.7b", "zipf:1.03"
ZEROS = (90, 50, 10)  # percent
FORMATS = ("int4", "float16")
SIZE, COPIES = 4096, 8  # of the operator's matrix; so many of them are larger than any cache
CONTEXT, TOKENS, PROMPT_TOKENS = 128, 24, 96
LAYOUTS = {"off": ("int4", "off"), "granules": ("int4", "exact"), "exact": ("int4-neurons", "exact")}

PARTS = ("ops", "ram", "disk", "tale")

Figures = dict[str, float]


def median_of(columns: Sequence[Figures]) -> Figures:
    return {name: statistics.median(column[name] for column in columns) for name in columns[0]}


# ---- operators ----------------------------------------------------------------------------------------------------


class Operator:
    """The second matrix of FFNs without a gate, [SIZE, SIZE], in rows of neurons of which a share fires. What the first
    matrix takes is measured with no neuron firing, and taken away."""

    def __init__(self, name: str, threads: int) -> None:
        self._compute = _native.Compute(cpu.best_isa()[0], threads)
        self._ffn = Ffn(SIZE, "relu", False, True, False)
        layer = Layer(Attention(1, 1, 64, 1.0), self._ffn)
        spec = ModelSpec("opt", "float32", 64, SIZE, SIZE, 64, (layer,), Norm("layer", 1e-5), True, True)
        self._part = next(p for p in parts(spec, parse_format(f"{name}-neurons")) if p.kind == "ffn")
        self._tiled = next(p for p in parts(spec, parse_format(name)) if p.kind == "ffn")
        self._rng = np.random.default_rng(0)
        self._neurons, self._dense = (
            [self._weights(part) for _ in range(COPIES)] for part in (self._part, self._tiled)
        )
        self._h = self._rng.normal(size=(1, SIZE)).astype(np.float32)
        self._out = np.zeros((2, 1, SIZE), np.float32)
        shape = cpu.ffn_shape(self._part, self._ffn)
        self._scratch = np.empty(8 << 20, np.uint8)
        assert _native.ffn_scratch(shape, self._part.granules, 1) <= self._scratch.nbytes

    def _weights(self, part: Part) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """One random granule, again and again."""
        granule = np.zeros(part.granule_bytes, np.uint8)
        for block in part.blocks[:2]:
            values = self._rng.normal(size=(block.rows, block.cols)).astype(np.float32) * SIZE**-0.5
            if block.stride:
                encode_rows(values, block, granule)
            else:
                granule[block.offset : block.offset + block.nbytes] = encode(values, block.format)
        return np.tile(granule, (part.granules, 1))

    def _fires(self, share: float) -> None:
        """Sets biases so that this share of the neurons fires, whatever the input."""
        at = self._part.block("up_bias").offset
        for weights in self._neurons:
            fires = self._rng.random((self._part.granules, self._part.granule_rows)) < share
            weights[:, at : at + 4 * fires.shape[1]] = np.where(fires, 10, -10).astype(np.float32).view(np.uint8)

    def _time(self, call: Callable[[int], None]) -> float:
        start_s = time.perf_counter()
        for i in range(COPIES):
            call(i)
        return (time.perf_counter() - start_s) / COPIES

    def _sparse(self, i: int) -> None:
        partial, pending = (at.ctypes.data for at in self._out)
        self._compute.ffn(
            weights=self._neurons[i].ctypes.data, count=self._part.granules, stride=self._part.granule_bytes,
            shape=cpu.ffn_shape(self._part, self._ffn), h=self._h.ctypes.data, t=1, partial=partial, pending=pending,
            granule=0, starts_sum=True, continues_four=False, leaves_four=False, skips=True, fired=0, fired_stride=0,
            active=0, active_stride=0, values=0,
            exact=False, scratch=self._scratch.ctypes.data, scratch_bytes=self._scratch.nbytes,
        )  # fmt: skip

    def _tiles(self, i: int) -> None:
        up = self._tiled.block("up")
        self._compute.project(
            weights=self._dense[i].ctypes.data, count=self._tiled.granules, stride=self._tiled.granule_bytes,
            matrix=cpu.matrix(up), x=self._h.ctypes.data, x_stride=SIZE, t=1, out=self._out.ctypes.data,
            out_stride=SIZE, out_cols=SIZE, exact=False, scratch=self._scratch.ctypes.data,
            scratch_bytes=self._scratch.nbytes,
        )  # fmt: skip

    def round(self) -> Figures:
        """Time at so many percent of zeros over the dense kernel's."""
        dense_s = self._time(self._tiles)
        self._fires(0)
        first_s = self._time(self._sparse)
        found = {}
        for zeros in ZEROS:
            self._fires(1 - zeros / 100)
            found[str(zeros)] = (self._time(self._sparse) - first_s) / dense_s
        return found


# ---- a model in memory --------------------------------------------------------------------------------------------


def make(folder: Path, weights: str) -> Path:
    target = folder / f"{SHAPE}-{weights}"
    if not target.exists():
        print(f"writing {target.name}", flush=True)
        command = ["synth", SHAPE, target, "--weights", weights, "--activation-rate", RATES]
        subprocess.run([sys.executable, "-m", "penstock.cli", *map(str, command)], check=True)
    return target


def in_ram(folder: Path, rounds: int, threads: int) -> dict[str, Any]:
    same = ("--threads", threads, "--context", CONTEXT, "--sequences", BATCHES[-1])
    workers = {
        name: Worker("bench.peers.ours", make(folder, weights), *same, "--sparsity", sparsity)
        for name, (weights, sparsity) in LAYOUTS.items()
    }
    shares = {n: workers["exact"].ask(f"fired_{n}", 8)["share"] for n in BATCHES}
    found: list[Figures] = []
    for worker in workers.values():
        worker.ask("decode", 2)
    for i in range(rounds):
        figures: Figures = {}
        for name in sorted(workers, reverse=i % 2 == 1):
            for n in BATCHES:
                answer = workers[name].ask(f"decode_{n}", TOKENS if n < 8 else TOKENS // 4)
                figures[f"{name}_{n}"] = n * (TOKENS if n < 8 else TOKENS // 4) / answer["seconds"]
                figures[f"{name}_{n}_bytes"] = answer["bytes"] / (TOKENS if n < 8 else TOKENS // 4)
            answer = workers[name].ask("prefill", PROMPT_TOKENS)
            figures[f"{name}_prefill"] = PROMPT_TOKENS / answer["seconds"]
        found.append(figures)
        print(f"round {i + 1}: { ({k: round(v, 2) for k, v in figures.items() if 'bytes' not in k}) }", flush=True)
    for worker in workers.values():
        worker.close()
    gains = {
        f"{name}_{n}": statistics.median(f[f"{name}_{n}"] / f[f"off_{n}"] for f in found)
        for name in ("granules", "exact")
        for n in (*BATCHES, "prefill")
    }
    # Both layouts have as many bytes. What fires is read twice a neuron's row less than what does not.
    off_bytes = found[0]["off_1_bytes"]
    ffn_bytes = sum(p.granules * p.block("down").nbytes for p in _ffns())
    bound = {n: off_bytes / (off_bytes - (1 - share) * ffn_bytes) for n, share in shares.items()}
    return {
        "exact_vs_off": gains["exact_1"],
        "predict_vs_off": None,
        "share_of_bound": gains["exact_1"] / bound[1],
        "fired": shares,
        "bounds": bound,
        "gains": gains,
        "by_round": found,
    }


def _ffns() -> list[Part]:
    from penstock.serve.planning import describe

    spec, fmt = describe(Path(SHAPE), parse_format("int4"))
    return [part for part in parts(spec, fmt) if part.kind == "ffn"]


def trained(plot: Path | None, table: Path | None) -> dict[str, Any]:
    """What `bench.tale_sparsity` says of the trained models."""
    command = [sys.executable, "-m", "bench.tale_sparsity"]
    command += ["--plot", str(plot)] * (plot is not None) + ["--table", str(table)] * (table is not None)
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(said, flush=True)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (7.2 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=host.usable_cpus())
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", type=Path, help="of the trained models, an SVG")
    parser.add_argument("--table", type=Path, help="of the trained models, a page")
    wanted = parser.parse_args()
    result: dict[str, Any] = {"ops": None, "ram": None, "disk_2.4": None, "tale_opt": None, "cuda": None}
    if "ops" in wanted.only:
        result["ops_by_format"] = {}
        for name in FORMATS:
            operator = Operator(name, wanted.threads)
            operator.round()  # not counted
            rounds = [operator.round() for _ in range(4 * wanted.rounds)]
            result["ops_by_format"][name] = median_of(rounds)
            print(f"{name}: {result['ops_by_format'][name]}", flush=True)
        result["ops"] = result["ops_by_format"]["int4"]
    if "ram" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result["ram"] = in_ram(folder, wanted.rounds, wanted.threads)
        shown = {k: v for k, v in result["ram"].items() if k != "by_round"}
        print(json.dumps(shown, indent=1))
    if "disk" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result["disk_2.4"] = within_disk(make(folder, "int4-neurons"), wanted.rounds)
        print(json.dumps(result["disk_2.4"], indent=1))
    if "tale" in wanted.only:
        result["tale"] = trained(wanted.plot, wanted.table)
    machine = {"cpu": cpu_name(), "threads": wanted.threads, "memory_bytes": host.physical_bytes()}
    print(json.dumps({"bench": "sparsity", "rounds": wanted.rounds, "machine": machine, **result}))


if __name__ == "__main__":
    main()
