"""`python -m bench.sparsity`: what is gained where neurons that do not fire are left out (PowerInfer), on this CPU.

    ops    4096 × 4096 weights that a share of zeros multiplies, as rows of neurons, beside the dense kernel (Figure 16)
    ram    OPT-6.7B's shape in int4, all in memory, 3 % of the neurons firing: exact beside off, batches 1 to 32
           (Figure 14), and beside the bound that the bytes set; and predict beside off, with predictors of 7 % of the
           parameters (Table 6) that call 5 % of the neurons active. They are stated (`bench.stated_predictors`)
    disk   the same shape within 2.4 GB, the rest on the disk, by `bench.sparsity_disk`: off, exact, predict
    nemotron  a Nemotron with OPT-6.7B's layers beside llama.cpp, dense, by `bench.sparsity_nemotron`
    placement  hot and cold neurons beside an emulated device, by `bench.sparsity_placement`
    predict  tale-opt and tale-relu with predictors that are trained for them: sizes, recall, and what they cost on text
           that neither has seen, by `penstock eval`
    tale   which neurons of the trained models fire (Figures 4 and 5), by `bench.tale_sparsity`

Models are random, with rates of firing as PowerInfer's Figure 4 has them (`penstock synth --activation-rate`). Both
layouts and `off` take turns in processes of their own. The last line is one JSON object.
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

from bench import sparsity_page
from bench.peers import Worker
from bench.peers.ours import BATCHES
from bench.sparsity_disk import hot_to_cold, with_rates, within_disk
from bench.sparsity_nemotron import beside_llamacpp
from bench.sparsity_peers import milliseconds
from bench.sparsity_placement import placements
from bench.stated_predictors import state
from bench.tale_sparsity import BOOKS, MODELS
from penstock import _native
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.this_machine import cpu_name
from penstock.spec.format import parse_format
from penstock.spec.model import Attention, Ffn, Layer, ModelSpec, Norm
from penstock.spec.parts import Part, parts
from penstock.store.packed import open_packed
from penstock.store.predictors import FILE as PREDICTORS
from penstock.store.predictors import with_predictors
from penstock.store.quantize import encode, encode_rows
from tools.reference_text import read_books

SHAPE, STEEPNESS = "opt-6.7b", 1.03
RATES = f"zipf:{STEEPNESS}"
ZEROS = (90, 50, 10)  # percent
FORMATS = ("int4", "float16")
SIZE, COPIES = 4096, 8  # of the operator's matrix; so many of them are larger than any cache
CONTEXT, TOKENS, PROMPT_TOKENS = 128, 24, 96
LAYOUTS = {
    "off": ("int4", "off"), "granules": ("int4", "exact"), "exact": ("int4-neurons", "exact"),
    "predict": ("int4-records", "predict"),
}  # fmt: skip
STATED_ACTIVE, STATED_SHARE = 0.05, 0.07  # of the neurons, and of the parameters
RECALL = 0.98

PARTS = ("ops", "ram", "disk", "nemotron", "placement", "predict", "tale")

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
            active=0, active_stride=0, level=0.0, values=0, biases=0,
            bias_stride=0,
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
        """Time at so many percent of zeros over the dense kernel's, and that in milliseconds."""
        dense_s = self._time(self._tiles)
        self._fires(0)
        first_s = self._time(self._sparse)
        found = {}
        for zeros in ZEROS:
            self._fires(1 - zeros / 100)
            found[str(zeros)] = (self._time(self._sparse) - first_s) / dense_s
        return {**found, "dense_ms": 1e3 * dense_s}


# ---- a model in memory --------------------------------------------------------------------------------------------


def make(folder: Path, weights: str, shape: str = SHAPE) -> Path:
    """A model of a shape (a name, or a config's file) in `folder`, with rates or with stated predictors."""
    target = folder / f"{Path(shape).stem if shape.endswith('.json') else shape}-{weights}"
    if not target.exists():
        print(f"writing {target.name}", flush=True)
        rates = [] if weights.endswith("records") else ["--activation-rate", RATES]  # predictors decide, not rates
        command = ["synth", shape, target, "--weights", weights, *rates]
        subprocess.run([sys.executable, "-m", "penstock.cli", *map(str, command)], check=True)
    if weights.endswith("records") and not (target / PREDICTORS).exists():
        print(f"stating predictors of {target.name}", flush=True)
        state(target, STATED_ACTIVE, STATED_SHARE)
    return target


def in_ram(folder: Path, rounds: int, threads: int, layouts: Sequence[str]) -> dict[str, Any]:
    same = ("--threads", threads, "--context", CONTEXT, "--sequences", BATCHES[-1])
    workers = {
        name: Worker("bench.peers.ours", make(folder, LAYOUTS[name][0]), *same, "--sparsity", LAYOUTS[name][1])
        for name in ("off", *(name for name in LAYOUTS if name in layouts and name != "off"))
    }
    shares = {n: workers["exact"].ask(f"fired_{n}", 8)["share"] for n in BATCHES} if "exact" in workers else {}
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
        if "predict" in workers:  # Figure 17
            alone_s = workers["predict"].ask("predictors", TOKENS)["seconds"] / TOKENS
            figures["predictors_share"] = alone_s * figures["predict_1"]
        found.append(figures)
        print(f"round {i + 1}: { ({k: round(v, 2) for k, v in figures.items() if 'bytes' not in k}) }", flush=True)
    for worker in workers.values():
        worker.close()
    gains = {
        f"{name}_{n}": statistics.median(f[f"{name}_{n}"] / f[f"off_{n}"] for f in found)
        for name in workers
        if name != "off"
        for n in (*BATCHES, "prefill")
    }
    # Both layouts have as many bytes. What fires is read twice a neuron's row less than what does not.
    off_bytes = found[0]["off_1_bytes"]
    ffn_bytes = sum(p.granules * p.block("down").nbytes for p in _ffns())
    bound = {n: off_bytes / (off_bytes - (1 - share) * ffn_bytes) for n, share in shares.items()}
    return {
        "exact_vs_off": gains.get("exact_1"),
        "predict_vs_off": gains.get("predict_1"),
        "share_of_bound": gains["exact_1"] / bound[1] if shares else None,
        "predict_bound": found[0]["off_1_bytes"] / found[0]["predict_1_bytes"] if "predict" in workers else None,
        "predictors_share": statistics.median(f["predictors_share"] for f in found) if "predict" in workers else None,
        "fired": shares,
        "bounds": bound,
        "gains": gains,
        "by_round": found,
    }


def on_disk(folder: Path, rounds: int, layouts: Sequence[str]) -> dict[str, Any]:
    """The keys of `predict` on top, where it was wanted, else of `exact`; all under their names."""
    hot = hot_to_cold(make(folder, "int4-neurons"))
    models = {"off": hot, "exact": hot}
    if "predict" in layouts:
        models["predict"] = with_rates(make(folder, "int4-records"), STATED_ACTIVE, STATED_SHARE, STEEPNESS)
    found = within_disk({name: models[name] for name in models if name == "off" or name in layouts}, rounds)
    keys = ("vs_dense", "share_of_bound", "disk_bytes_per_token")
    return {**{key: found[list(found)[-1]][key] for key in keys}, **found}


def _ffns() -> list[Part]:
    from penstock.serve.planning import describe

    spec, fmt = describe(Path(SHAPE), parse_format("int4"))
    return [part for part in parts(spec, fmt) if part.kind == "ffn"]


def predicted(folder: Path) -> dict[str, Any]:
    """Of each trained model, packed with all of a neuron's weights together: predictors trained on the books that it
    learnt, and their price on the books' held-out ends."""
    books = read_books(BOOKS)
    rng = np.random.default_rng(0)
    starts = [int(rng.integers(0, max(1, len(book.train) - 6000))) for book in books for _ in range(4)]
    pieces = [book.train[at : at + 6000] for book, at in zip([b for b in books for _ in range(4)], starts, strict=True)]
    text, held_out = folder / "train.txt", folder / "held_out.txt"
    text.write_text("\n\n".join(pieces))
    held_out.write_text("\n\n".join(book.held_out[:4000] for book in books))
    return {model.name: _priced(model, folder / model.name, text, held_out) for model in MODELS}


def _priced(model: Path, packed: Path, text: Path, held_out: Path) -> dict[str, Any]:
    def command(*args: object) -> dict[str, Any]:
        run = [sys.executable, "-m", "penstock.cli", *map(str, args)]
        said: dict[str, Any] = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return said

    command("pack", model, packed, "--weights", "float16-records", "--json")
    start_s = time.perf_counter()
    told = command("train-predictors", packed, "--text", text, "--recall", RECALL, "--json")
    seconds = time.perf_counter() - start_s
    opened = with_predictors(open_packed(packed))
    kinds = {kind: [p for p in opened.parts.values() if p.kind == kind] for kind in ("ffn", "predictor")}
    own, ffn = (sum(part.nbytes for part in kinds[kind]) for kind in ("predictor", "ffn"))
    whole = sum(p.weights_of(0, p.granules) for p in opened.parts.values() if p.kind != "predictor")
    width, neurons = opened.spec.d_model, opened.spec.layers[0].ffns[0].neurons
    priced = command("eval", packed, held_out, "--sparsity", "predict", "--against", packed, "--json")
    exact = command("eval", packed, held_out, "--sparsity", "exact", "--json")
    found = {
        "predictor_share": told["weights"] / whole,
        "recall": told["recall"],
        "perplexity_ratio": priced["perplexity"] / exact["perplexity"],
        "skipped_share": 1 - told["active"] - own / ffn,
        "false_alarms": told["false_alarms"],
        "kl": priced["kl"],
        "agree": priced["agree"],
        "seconds": seconds,
        "layers": [
            {**layer, "active": layer["active"][0], "weights": layer["rank"] * (width + neurons)}
            for layer in told["layers"]
        ],
    }
    print(f"{model.name}: { ({k: round(v, 4) for k, v in found.items() if k != 'layers'}) }", flush=True)
    return found


def trained(plot: Path | None, table: Path | None) -> dict[str, Any]:
    """What `bench.tale_sparsity` says of the trained models."""
    command = [sys.executable, "-m", "bench.tale_sparsity"]
    command += ["--plot", str(plot)] * (plot is not None) + ["--table", str(table)] * (table is not None)
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(said, flush=True)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _with_skew(priced: dict[str, Any] | None, fired: dict[str, Any] | None) -> None:
    """Gives each layer of a model with predictors how few of its neurons make 80 % of its activations."""
    if not priced or not fired:
        return
    for layer, row in zip(priced["layers"], fired["rows"], strict=False):  # the last row is of all layers
        layer["makes"] = row["makes"]["0.8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the models here (11.4 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=host.usable_cpus())
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="of the parts ram and disk"
    )
    parser.add_argument("--plot", type=Path, help="of the trained models, an SVG")
    parser.add_argument("--table", type=Path, help="of the trained models, a page")
    parser.add_argument("--results", type=Path, help="keeps results here, and takes parts that are not run from it")
    wanted = parser.parse_args()
    result: dict[str, Any] = {"ops": None, "ram": None, "disk_2.4": None, "tale_opt": None, "cuda": None}
    if wanted.results and wanted.results.exists():
        result |= json.loads(wanted.results.read_text())
    if "ops" in wanted.only:
        result["ops_by_format"] = {}
        for name in FORMATS:
            operator = Operator(name, wanted.threads)
            operator.round()  # not counted
            rounds = [operator.round() for _ in range(4 * wanted.rounds)]
            result["ops_by_format"][name] = median_of(rounds)
            print(f"{name}: {result['ops_by_format'][name]}", flush=True)
        result["ops"] = {str(zeros): result["ops_by_format"]["int4"][str(zeros)] for zeros in ZEROS}
        result["ops_peers"] = milliseconds(SIZE, COPIES // 2, ZEROS, wanted.threads, wanted.rounds)
        print(json.dumps(result["ops_peers"], indent=1))
    if "ram" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result["ram"] = in_ram(folder, wanted.rounds, wanted.threads, wanted.layouts)
        shown = {k: v for k, v in result["ram"].items() if k != "by_round"}
        print(json.dumps(shown, indent=1))
    if "disk" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result["disk_2.4"] = on_disk(folder, wanted.rounds, wanted.layouts)
        print(json.dumps(result["disk_2.4"], indent=1))
    if "nemotron" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            some = {name: LAYOUTS[name] for name in ("off", "exact", "predict") if name in wanted.layouts}
            result["nemotron"] = beside_llamacpp(make, folder, wanted.rounds, wanted.threads, some)
        print(json.dumps(result["nemotron"], indent=1))
    if "placement" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            folder = wanted.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            result["placement"] = placements(folder, wanted.rounds, STATED_ACTIVE, STATED_SHARE, STEEPNESS)
    if "predict" in wanted.only:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
            by_model = predicted(Path(temporary))
        result |= {"tale_opt": by_model["tale-opt"], "tale_relu": by_model["tale-relu"]}
    if "tale" in wanted.only:
        result["tale"] = trained(wanted.plot, wanted.table)
    for key in ("tale_opt", "tale_relu"):
        fired = {each["model"]: each for each in (result.get("tale") or {}).get("models", ())}
        _with_skew(result.get(key), fired.get(key.replace("_", "-")))
    if wanted.results:
        wanted.results.write_text(json.dumps(result))
    if wanted.table and wanted.table.exists():
        page, picture = wanted.table.read_text(), wanted.table.parent / "predictors.svg"
        wanted.table.write_text(page.split(sparsity_page.BEGINS)[0] + sparsity_page.tables(result, picture.name))
        sparsity_page.draw(result, picture)
    machine = {"cpu": cpu_name(), "threads": wanted.threads, "memory_bytes": host.physical_bytes()}
    print(json.dumps({"bench": "sparsity", "rounds": wanted.rounds, "machine": machine, **result}))


if __name__ == "__main__":
    main()
