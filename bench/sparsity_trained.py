"""The parts `predict` and `tale` of `bench.sparsity`: the models that were trained here, whose zeros are real."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.sparsity_models import tell
from bench.tale_sparsity import BOOKS, MODELS
from penstock.store.packed import open_packed
from penstock.store.predictors import with_predictors
from tools.reference_text import read_books

RECALL = 0.98


def predicted(folder: Path, characters: int) -> Iterator[dict[str, Any]]:
    """Of each trained model, packed with all of a neuron's weights together: predictors trained on the books that it
    learnt, and their price on the books' held-out ends. `characters`: of each of four pieces of a book; the ends are
    two thirds as long."""
    books = read_books(BOOKS)
    rng = np.random.default_rng(0)
    starts = [int(rng.integers(0, max(1, len(book.train) - characters))) for book in books for _ in range(4)]
    pieces = [
        book.train[at : at + characters] for book, at in zip([b for b in books for _ in range(4)], starts, strict=True)
    ]
    text, held_out = folder / "train.txt", folder / "held_out.txt"
    text.write_text("\n\n".join(pieces))
    held_out.write_text("\n\n".join(book.held_out[: characters * 2 // 3] for book in books))
    for model in MODELS:
        yield {model.name.replace("-", "_"): _priced(model, folder / model.name, text, held_out)}


def _priced(model: Path, packed: Path, text: Path, held_out: Path) -> dict[str, Any]:
    """The figures of predictors that hear their own layer, and under `ahead` of those that hear the layer before."""
    _command("pack", model, packed, "--weights", "float16-records", "--json")
    exact = _command("eval", packed, held_out, "--sparsity", "exact", "--json")
    found, ahead = (_trained(packed, text, held_out, exact, more) for more in ((), ("--ahead",)))
    for name, each in ((model.name, found), (f"{model.name}, one layer ahead", ahead)):
        tell(f"{name}: { ({k: round(v, 4) for k, v in each.items() if k != 'layers'}) }")
    return {**found, "ahead": ahead}


def _trained(
    packed: Path, text: Path, held_out: Path, exact: dict[str, Any], more: tuple[str, ...]
) -> dict[str, Any]:  # fmt: skip
    start_s = time.perf_counter()
    told = _command("train-predictors", packed, "--text", text, "--recall", RECALL, *more, "--json")
    seconds = time.perf_counter() - start_s
    opened = with_predictors(open_packed(packed))
    kinds = {kind: [p for p in opened.parts.values() if p.kind == kind] for kind in ("ffn", "predictor")}
    own, ffn = (sum(part.nbytes for part in kinds[kind]) for kind in ("predictor", "ffn"))
    whole = sum(p.weights_of(0, p.granules) for p in opened.parts.values() if p.kind != "predictor")
    width, neurons = opened.spec.d_model, opened.spec.layers[0].ffns[0].neurons
    priced = _command("eval", packed, held_out, "--sparsity", "predict", "--against", packed, "--json")
    return {
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


def _command(*args: object) -> dict[str, Any]:
    run = [sys.executable, "-m", "penstock.cli", *map(str, args)]
    said: dict[str, Any] = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return said


def trained(plot: Path | None, table: Path | None) -> dict[str, Any]:
    """What `bench.tale_sparsity` says of the trained models: the key `tale`."""
    command = [sys.executable, "-m", "bench.tale_sparsity"]
    command += ["--plot", str(plot)] * (plot is not None) + ["--table", str(table)] * (table is not None)
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    tell(said)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found
