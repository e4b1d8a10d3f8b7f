"""`python -m bench.sparsity`: what is gained where neurons that do not fire are left out (PowerInfer), on this CPU.

    ops    4096 × 4096 weights that a share of zeros multiplies, as rows of neurons, beside the dense kernel (Figure
           16), by `bench.sparsity_ops`
    ram    OPT-6.7B's shape in int4, all in memory: exact and predict beside off, batches 1 to 32 (Figure 14), and
           beside the bound that the bytes set, by `bench.sparsity_ram`
    disk   the same shape within 2.4 GB, the rest on the disk, by `bench.sparsity_disk`: off, exact, predict, and
           predict by predictors that hear the layer before theirs (ahead)
    nemotron  a Nemotron with OPT-6.7B's layers beside llama.cpp, dense, by `bench.sparsity_nemotron`
    placement  hot and cold neurons beside an emulated device, by `bench.sparsity_placement`
    predict  tale-opt and tale-relu with predictors that are trained for them, to hear their own layer and the one
           before: sizes, recall, and what they cost on text that neither has seen, by `penstock eval`
    tale   which neurons of the trained models fire (Figures 4 and 5), by `bench.tale_sparsity`

What is missing here, and the time and the disk space that it takes, is told first. A part that fails leaves the others.
The last line is one JSON object, which comes whatever fails (`bench.report`). What was not measured is null. After each
part such a line comes too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bench import sparsity_page
from bench.peers.ours import BATCHES
from bench.report import last_line, model_folder
from bench.rounds import this_machine
from bench.sparsity_disk import on_disk
from bench.sparsity_models import Models, tell
from bench.sparsity_nemotron import beside_llamacpp
from bench.sparsity_ops import operators
from bench.sparsity_placement import placements
from bench.sparsity_ram import LAYOUTS, in_ram
from bench.throughput_engines import absent
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.runtime.this_machine import cpu_name
from penstock.units import format_bytes

PARTS = ("ops", "predict", "tale", "ram", "disk", "nemotron", "placement")  # in this order
KEYS = {"ops": "ops", "ram": "ram", "disk": "disk_2.4", "nemotron": "nemotron", "placement": "placement"}
# What parts cannot do without, and what they leave out where it is missing.
NEEDS = {"predict": ("torch", "books"), "tale": ("torch", "books")}
BESIDE = {"ops": ("scipy", "torch"), "nemotron": ("llamacpp",), "tale": ("matplotlib",)}
# Minutes on two cores of an AMD EPYC (Zen 4): once, and for each round.
MINUTES = {
    "ops": (0.2, 0.2), "ram": (7.0, 4.0), "disk": (8.0, 2.5), "nemotron": (3.0, 0.5), "placement": (1.5, 0.3),
    "predict": (14.0, 0.0), "tale": (1.5, 0.0),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (23 GB); default a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=host.usable_cpus())
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="of the parts ram, disk and nemotron"
    )
    parser.add_argument("--layers", type=int, default=0, help="a look: shapes with so many layers; default all")
    parser.add_argument("--characters", type=int, default=6000, help="of each piece of a book for `predict`")
    parser.add_argument("--plot", type=Path, help="of the trained models, an SVG")
    parser.add_argument("--table", type=Path, help="of the trained models, a page")
    parser.add_argument("--results", type=Path, help="keeps results here, and takes parts that are not run from it")
    wanted = parser.parse_args()
    start_s, without = time.perf_counter(), dict[str, str]()
    result: dict[str, Any] = {"ops": None, "ram": None, "disk_2.4": None, "tale_opt": None, "cuda": None}
    if wanted.results and wanted.results.exists():
        result |= json.loads(wanted.results.read_text())

    def line() -> dict[str, Any]:
        about = {"rounds": wanted.rounds, "layers": wanted.layers or None, "absent": without}
        about |= {"machine": {**this_machine(), "threads": wanted.threads}, "took_s": time.perf_counter() - start_s}
        return {"bench": "sparsity", **about, **result}

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        models = Models(folder, wanted.layers)
        without |= _missing(wanted.only)
        _tell_needs(models, wanted)
        for part in (part for part in PARTS if part in wanted.only):
            with report.part(part):
                for some in _measured(part, models, wanted, without):
                    result |= some
                    result["measured"] = {**result.get("measured", {}), part: _how(wanted)}
            print(json.dumps(line()), flush=True)  # what is known so far, should the bench be killed
        _write(result, wanted, without)


def _how(wanted: argparse.Namespace) -> str:
    """How the figures of a part were measured, as the page tells it."""
    rounds = "one round" if wanted.rounds == 1 else f"{wanted.rounds} rounds"
    of_layers = f", {wanted.layers} layers at most" if wanted.layers else ""
    return f"{rounds}{of_layers}, {wanted.threads} threads of an {cpu_name()}"


def _missing(only: Collection[str]) -> dict[str, str]:
    """What cannot be imported here, and why. Tells which figures are null for it."""
    names = {name for part in only for name in (*NEEDS.get(part, ()), *BESIDE.get(part, ()))}
    without = absent(names)
    if "books" in names and "torch" not in without:
        from bench.tale_sparsity import BOOKS

        if not BOOKS.is_dir():
            without["books"] = f"there is no {BOOKS}"
    for name, why in without.items():
        tell(f"{name} cannot be run here, its figures are null: {why}")
    return without


def _tell_needs(models: Models, wanted: argparse.Namespace) -> None:
    minutes = sum(MINUTES[part][0] + wanted.rounds * MINUTES[part][1] for part in wanted.only)
    of_layers = " with all layers" if wanted.layers else ""
    need, free = models.missing_bytes(wanted.only), shutil.disk_usage(models.folder).free
    tell(
        f"about {minutes:.0f} minutes{of_layers} on two cores; {format_bytes(need)} of models to write,"
        f" {format_bytes(free)} are free in {models.folder}"
    )
    if need > free:
        tell("that is not enough: parts whose models do not fit will fail")
    if "ram" in wanted.only:
        need, have = models.pair_bytes(BATCHES[-1]), host.available_bytes()
        tell(f"ram: two processes with {format_bytes(need)} of memory together, {format_bytes(have)} are available")


def _measured(
    part: str, models: Models, wanted: argparse.Namespace, without: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Keys of the JSON line, as they come. What was measured of a part that fails comes before its error."""
    lacks = [name for name in NEEDS.get(part, ()) if name in without]
    if lacks:
        raise FileNotFoundError(f"{', '.join(lacks)} is not here")
    rounds, threads = wanted.rounds, wanted.threads
    if part == "ops":
        yield from operators(rounds, threads, without)
    elif part == "ram":
        for name in LAYOUTS:
            if name in wanted.layouts:
                models.make(LAYOUTS[name][0])
        found = in_ram(models, _machine(models), rounds, threads, wanted.layouts)
        yield from ({KEYS[part]: each} for each in found)
    elif part == "disk":
        models.make("int4-neurons")
        _machine(models)
        yield from ({KEYS[part]: each} for each in on_disk(models, rounds, wanted.layouts))
    elif part == "nemotron":
        found = beside_llamacpp(models, rounds, threads, wanted.layouts, without)
        yield from ({KEYS[part]: each} for each in found)
    elif part == "placement":
        yield from ({KEYS[part]: each} for each in placements(models, _machine(models), rounds))
    elif part == "predict":
        from bench.sparsity_trained import predicted

        with model_folder(None) as folder:
            yield from predicted(folder, wanted.characters)
    else:
        from bench.sparsity_trained import trained

        yield {"tale": trained(None if "matplotlib" in without else wanted.plot, wanted.table)}


def _machine(models: Models) -> Any:
    """This machine's figures, measured once, on a file of the models that are there."""
    return load_or_probe(models.cache, disk_folder=models.folder, whole=True)


def _write(result: dict[str, Any], wanted: argparse.Namespace, without: Collection[str]) -> None:
    """The page and what is kept, where they are wanted."""
    for key in ("tale_opt", "tale_relu"):
        fired = {each["model"]: each for each in (result.get("tale") or {}).get("models", ())}
        sparsity_page.with_skew(result.get(key), fired.get(key.replace("_", "-")))
    if wanted.results:
        wanted.results.write_text(json.dumps(result))
    if wanted.table and wanted.table.exists():
        picture = wanted.table.parent / "predictors.svg"
        wanted.table.write_text(sparsity_page.merged(wanted.table.read_text(), result, picture.name))
        if "matplotlib" not in without:
            sparsity_page.draw(result, picture)


if __name__ == "__main__":
    main()
