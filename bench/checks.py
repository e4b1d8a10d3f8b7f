"""`python -m bench.checks`: what it costs to compare a model's bytes with their checksums, on loading and afterwards.

Llama-3.2-1B's shape in bfloat16 (2.5 GB, random weights), all in memory, and all but norms streamed, by a plan that is
the same on every machine. Each round loads it with and without checks, in turns that swap places, with the page cache
dropped before each (as root). A streamed model then decodes: the first pass reads everything for the first time, later
ones read it again. Ratios are of the two in one round; `cpu` is the process's own time, which other processes' hardly
touches. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from penstock import _native
from penstock.graph import passes
from penstock.kernels import cpu
from penstock.serve import engine as engine_module
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.session import Session
from penstock.spec.ask import Ask
from penstock.spec.machine import Capacity, MachineSpec, Rate
from penstock.spec.places import CPU, DISK, HOST
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from penstock.units import MIB

CONFIG = Path(__file__).parent / "shapes" / "llama-3.2-1b.json"
ROUNDS, LATER_PASSES = 9, 3
LIMIT = 1.02
# Made up, so that no probe is needed and the plan is the same everywhere.
RATES = (Rate(CPU, "*", "*", 1e-5, 1e-10, 1e-11), Rate(DISK.reads, "*", "*", 1e-4, 5e-10))
MACHINE = MachineSpec("any", (Capacity(HOST, 1 << 34), Capacity(DISK.tier, 1 << 40)), RATES, 2)

Times = dict[str, float]


class Timed(Session):
    """Notes how long its weights took to come."""

    loading_s = 0.0

    def _load_weights(self, *args: object) -> None:
        start_s = time.perf_counter()
        super()._load_weights(*args)  # type: ignore[arg-type]
        self.loading_s = time.perf_counter() - start_s


def drop_caches() -> None:
    with suppress(OSError):  # not root: reads are direct, so little is there
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def load(model: Path, resident: int | None, verify: bool) -> tuple[Engine, Times]:
    drop_caches()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    engine = Engine.load(
        model, Ask(context=128, resident_bytes=resident), Loading(machine=MACHINE, device="none", verify=verify)
    )
    assert isinstance(engine.session, Timed)
    took_s, took_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return engine, {"load_s": took_s, "weights_s": engine.session.loading_s, "load_cpu_s": took_cpu_s}


def resident(model: Path, verify: bool) -> Times:
    engine, found = load(model, None, verify)
    engine.close()
    return found


def streamed(model: Path, verify: bool) -> Times:
    engine, found = load(model, 0, verify)
    pass_s, cpu_s = [], []
    for position in range(1 + LATER_PASSES):
        drop_caches()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        engine.session.step(passes.decode(engine.plan, (0,), (position,), None), [np.array([position], np.int32)])
        pass_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.process_time() - start_cpu_s)
    engine.close()
    return {
        **found,
        "first_pass_s": pass_s[0],
        "first_pass_cpu_s": cpu_s[0],
        "later_pass_s": statistics.median(pass_s[1:]),
        "later_pass_cpu_s": statistics.median(cpu_s[1:]),
    }


def compared(measure: Callable[[bool], Times], rounds: int) -> dict[str, dict[str, float]]:
    """Of each time: medians with and without checks, and the median, least and largest ratio of a round."""
    taken: list[tuple[Times, Times]] = []
    measure(True)  # uncounted: what is imported and set up once
    for i in range(rounds):
        order = (True, False) if i % 2 else (False, True)
        found = {verify: measure(verify) for verify in order}
        taken.append((found[True], found[False]))
    report = {}
    for name in taken[0][0]:
        ratios = [checked[name] / unchecked[name] for checked, unchecked in taken]
        report[name] = {
            "checked_s": statistics.median(checked[name] for checked, _ in taken),
            "unchecked_s": statistics.median(unchecked[name] for _, unchecked in taken),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return report


def hash_bytes_per_s(isa: str | None) -> float:
    """One thread, granules of 1 MiB in memory that no cache holds, by its own time; the best of 5."""
    nbytes = 512 * MIB
    memory = _native.Memory(nbytes, True)
    memory.populate()
    took = []
    for _ in range(5):
        start_s = time.process_time()
        _native.granule_sums(memory.address, nbytes // MIB, MIB, isa)
        took.append(time.process_time() - start_s)
    return nbytes / min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the model is, or will be made and kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        model = Path(args.folder or scratch) / "llama-3.2-1b-bfloat16"
        if not model.exists():
            print(f"writing {CONFIG.stem} with random weights to {model}")
            synth(CONFIG, model)
        engine_module.Session = Timed  # type: ignore[attr-defined]
        report: dict[str, object] = {"bench": "checks", "rounds": args.rounds}
        report["hash_bytes_per_s"] = {isa: hash_bytes_per_s(isa) for isa in cpu.available()}
        for isa, speed in report["hash_bytes_per_s"].items():  # type: ignore[attr-defined]
            print(f"hash, {isa}: {speed / 1e9:.1f} GB/s on one core")
        print(f"{open_packed(model).total_bytes / 1e9:.2f} GB")
        for name, measure in (("resident", resident), ("streamed", streamed)):
            found = compared(lambda verify, m=measure: m(model, verify), args.rounds)  # type: ignore[misc]
            report[name] = found
            for what, each in found.items():
                print(
                    f"{name:<9}{what:<14}{each['checked_s']:8.3f} s with checks,{each['unchecked_s']:8.3f} s without: "
                    f"{each['ratio']:.3f} ({each['least']:.3f} to {each['most']:.3f})"
                )
        report["within_limit"] = all(report[name]["load_s"]["ratio"] <= LIMIT for name in ("resident", "streamed"))  # type: ignore[index]
        print(json.dumps(report))


if __name__ == "__main__":
    main()
