"""`penstock bench`: speed with its physical bound."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from penstock.cli.options import Json, Machine, Weights, as_path
from penstock.cli.output import print_json, progress
from penstock.errors import BadRequest


def bench(
    what: Annotated[str, Argument(metavar="WHAT", help="ops: every op of a layer, alone.")],
    config: Annotated[str, Argument(metavar="CONFIG", help="A model's config.json, its folder, or a packed model.")],
    machine: Machine,
    weights: Weights = None,
    kv: Annotated[str, Option("--kv", metavar="FORMAT", help="float16, bfloat16 or float32.")] = "float16",
    rows: Annotated[str, Option("--rows", metavar="N,N,…", help="Rows of a pass, one setting each.")] = "1,4,64,512",
    context: Annotated[int, Option("--context", metavar="N", min=1, help="Positions that the last row sees.")] = 1024,
    as_json: Json = False,
) -> None:
    """Speed with its physical bound.

    `ops` times every op of the table on layers of that shape with random weights, beside what memory and processor
    deliver at most, measured in the same run.
    """
    machine.prepare()
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

    spec, fmt = describe(as_path(config), parse_format(weights) if weights else None)
    kept = parse_format(kv)
    if kept.is_quantised:
        raise BadRequest(f"a KV cache in {kv} is not in this version")
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
