"""`python -m bench.pipo`: PIPO's tables for this machine, on the shape of Llama-3.2-1B in int4 with random weights.

What PIPO has between disk and GPU memory is here between disk and RAM: "disk" means that everything streams, "memory"
that everything stays. `link` has GPU memory too, on PIPO's laptop, where all work is waiting. Ceilings (disk reads, RAM
reads, dot products) are read before and after every table. The last line is one JSON object, which comes whatever fails
(`bench.report`): a table that fails leaves the others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cpu import DEFAULT_SHAPES, spread
from bench.offload_engines import tell
from bench.pipo import reads, tables
from bench.pipo.link import link
from bench.pipo.rounds import Row
from bench.pipo.settings import OURS, Workshop, guessed_machine
from bench.predict import Machine
from bench.report import Report, last_line, model_folder
from penstock.runtime import host
from penstock.runtime.ceilings import Ceilings
from penstock.runtime.probe_disk import probe_file
from penstock.runtime.this_machine import cpu_name
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from penstock.store.synth import synth

RUNS: dict[str, Callable[[Workshop, tables.Scale], list[Row]]] = {
    "ablation": tables.ablation,
    "pipelines": tables.pipelines,
    "homes": tables.homes,
    "prompts": tables.prompts,
    "outputs": tables.outputs,
    "batches": tables.batches,
    "overhead": tables.overhead,
}
CEILINGS = ("ram_read_bytes_per_s", "disk_read_bytes_per_s", "int8_ops_per_s")
WAITS: dict[str, Callable[[], list[Row]]] = {"link": link}
READS: dict[str, Callable[[reads.ReadFile, Plan, int], list[Row]]] = {
    "reads_by_size": reads.by_size,
    "reads_by_block": reads.by_block,
}


def measure(
    shop: Workshop, scale: tables.Scale, only: list[str], file_bytes: int, ceilings: Callable[[], Ceilings],
    report: Report, results: dict[str, Any],
) -> None:  # fmt: skip
    """Into `results`, as they come: the tables by name, what the ceilings were, and the seconds that each table took.
    A table that fails is told in `report`."""
    readings, took_s = [ceilings()], dict[str, float]()
    results["table_took_s"] = took_s
    plan = shop.plan(replace(OURS, prompt=scale.prompt, context=scale.context))  # for the reads that it would do
    for name in only:
        start_s = time.perf_counter()
        with report.part(name):
            if name in READS:
                with reads.read_file(shop.folder, file_bytes) as file:
                    results[name] = READS[name](file, plan, scale.rounds)
            elif name in WAITS:
                results[name] = WAITS[name]()
            else:
                results[name] = RUNS[name](shop, scale)
        took_s[name] = time.perf_counter() - start_s
        readings.append(ceilings())
        results["ceilings"] = {each: spread([getattr(reading, each) for reading in readings]) for each in CEILINGS}


def main() -> None:
    names = [*RUNS, *READS, *WAITS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the model here (0.7 GB); default a temporary folder")
    parser.add_argument("--config", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of another shape")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, help=f"default {tables.Scale.rounds}")
    parser.add_argument("--quick", action="store_true", help="few tokens, one round, no probe: to see that it runs")
    wanted = parser.parse_args()
    scale = tables.QUICK if wanted.quick else tables.Scale()
    if wanted.rounds:
        scale = replace(scale, rounds=wanted.rounds)
    start_s, results = time.perf_counter(), dict[str, Any]()

    def line() -> dict[str, Any]:
        took_s = time.perf_counter() - start_s
        if "ceilings" in results:
            ram, disk, int8 = (_giga(found) for found in results["ceilings"].values())
            tell(f"\nceilings: disk {disk} GB/s, RAM {ram} GB/s, int8 {int8} Gop/s; {took_s:.0f} s")
        about = {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}
        took = {"took_s": took_s, "rounds": scale.rounds, "quick": wanted.quick}
        return {"bench": "pipo", "machine": about, **took, **results}

    with last_line(line) as report, model_folder(wanted.folder) as folder:
        model = folder / f"{wanted.config.stem}-int4"
        if not model.exists():
            tell(f"writing {model.name}")
            synth(wanted.config, model, parse_format("int4"))
        os.sync()
        with probe_file(folder) as file, tempfile.TemporaryDirectory(dir=folder, prefix="pipo-") as scratch:
            machine = Machine(folder, file, {"bench": "pipo"})
            figures = guessed_machine() if wanted.quick else machine.figures()
            shop = Workshop(open_packed(model), figures, Path(scratch))
            file_bytes = reads.QUICK_FILE_BYTES if wanted.quick else reads.FILE_BYTES
            measure(shop, scale, wanted.only, file_bytes, machine.ceilings, report, results)


def _giga(found: dict[str, float]) -> str:
    return f"{found['median'] / 1e9:.2f} ({found['min'] / 1e9:.2f}–{found['max'] / 1e9:.2f})"


if __name__ == "__main__":
    main()
