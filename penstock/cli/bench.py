"""`penstock bench`: speed with its physical bound."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from penstock.cli.options import Json, Machine, Weights, as_path
from penstock.cli.output import print_json, progress
from penstock.errors import BadRequest


def bench(
    machine: Machine,
    what: Annotated[str | None, Argument(metavar="WHAT", help="ops: every op of a layer, alone.")] = None,
    config: Annotated[
        str | None, Argument(metavar="CONFIG", help="A model's config.json, its folder, or a packed model.")
    ] = None,
    calibrate: Annotated[
        bool, Option("--calibrate", help="Correct this machine's figures by what runs showed, and say how.")
    ] = False,
    weights: Weights = None,
    kv: Annotated[str, Option("--kv", metavar="FORMAT", help="float32, bfloat16, float16, int8 or int4.")] = "float16",
    rows: Annotated[str, Option("--rows", metavar="N,N,…", help="Rows of a pass, one setting each.")] = "1,4,64,512",
    context: Annotated[int, Option("--context", metavar="N", min=1, help="Positions that the last row sees.")] = 1024,
    as_json: Json = False,
) -> None:
    """Speed with its physical bound.

    `ops` times every op of the table on layers of that shape with random weights, beside what memory and processor
    deliver at most, measured in the same run.
    """
    machine.prepare()
    if calibrate:
        if what is not None:
            raise BadRequest("--calibrate goes alone: it uses the runs that there were")
        _calibrate(machine, as_json)
        return
    if what is None or (what == "ops" and config is None):
        raise BadRequest("say what to measure: penstock bench ops CONFIG, or --calibrate")
    if what != "ops":
        raise BadRequest(f"{what} cannot be measured; there is ops")
    try:
        wanted = [int(n) for n in rows.split(",")]
    except ValueError:
        wanted = []
    if not wanted or min(wanted) < 1 or max(wanted) > context:
        raise BadRequest(f"--rows {rows} should be whole numbers from 1 to --context ({context}), with commas")
    from penstock.runtime import host
    from penstock.runtime.bench_ops import bench_ops, ceilings
    from penstock.serve.planning import describe
    from penstock.spec.format import parse_format

    assert config is not None
    spec, fmt = describe(as_path(config), parse_format(weights) if weights else None)
    kept = parse_format(kv)
    kept.check_kv()
    threads = min(machine.threads or host.usable_cpus(), host.usable_cpus())
    limits = ceilings(threads)
    line = "{:>5}  {:<8}{:<10}{:>10}{:>10}{:>12}{:>9}"
    print(
        f"ceilings on {threads} threads: RAM {limits.ram_read_bytes_per_s / 1e9:.1f} GB/s, int8 dot products "
        f"{limits.int8_ops_per_s / 1e9:.0f} GOP/s, float32 {limits.float32_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    print(line.format("rows", "op", "format", "time", "GB/s", "GFLOP/s", "share"))
    found = []
    with progress() as tell:
        for m in bench_ops(spec, fmt, kept, wanted, context, threads, None, machine.exact, on_progress=tell):
            found.append(m)
            time_us = f"{m.seconds * 1e6:.0f} µs"
            speed = (f"{m.bytes / m.seconds / 1e9:.1f}", f"{m.flops / m.seconds / 1e9:.1f}", f"{m.share_of_bound:.2f}")
            print(line.format(m.rows, m.op, m.format, time_us, *speed))
    if as_json:
        names = ("ram_read_bytes_per_s", "int8_ops_per_s", "float32_flops_per_s")
        print_json(
            {
                "threads": threads,
                "context": context,
                "ceilings": {name: getattr(limits, name) for name in names},
                "ops": [m.to_json() for m in found],
            }
        )


def _calibrate(machine: Machine, as_json: bool) -> None:
    """Prints every change, then writes the machine's file; the runs that it came from do not count again."""
    from penstock.runtime.probe import keep, load_or_probe, machine_file
    from penstock.serve.history import calibrated, history_file, runs

    file = machine_file(machine.cache_folder)
    seen = runs(file)
    with progress() as tell:
        before = load_or_probe(machine.cache_folder, machine.cache_folder, tell)
    after, changes = calibrated(before, seen)
    if changes:
        keep(file, after)
        history_file(file).unlink(missing_ok=True)
    lines = changes or [f"{len(seen)} runs so far, too few or too mixed to correct anything: run some more"]
    if as_json:
        print_json({"runs": len(seen), "changes": changes, "machine_file": str(file) if changes else None})
        return
    print("\n".join([*lines, *([f"written to {file}"] if changes else [])]))
