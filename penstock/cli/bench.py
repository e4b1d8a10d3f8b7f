"""`penstock bench`: measures speed beside its physical bound; corrects the machine's figures by past runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.cli.bench_model import table
from penstock.cli.flags import flag
from penstock.cli.loading import loaded, packed_model, tracing
from penstock.cli.options import (
    GROWING,
    MODEL_HELP,
    CacheLimit,
    Json,
    Machine,
    PlanFile,
    TraceName,
    Weights,
    Workload,
    as_path,
    given_plan,
)
from penstock.cli.output import fitted, print_json, progress
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.serve.bench_result import Result
    from penstock.serve.trace_file import TraceFile
    from penstock.spec.ask import Ask
    from penstock.spec.plan import Plan

_FAMILIES = "layer-split, all-cg, r-cg-0.25, r-cg-0.5, r-cg-0.75 or experts-cpu"
_ROWS, _CONTEXT = "1,4,64,512", 1024  # for `bench ops`


@dataclass(frozen=True)
class Measuring:
    """Which plan of a model is measured, and for how long."""

    family: str | None = flag(
        "--family", "NAME", f"Beside a device, plan as other systems do, whatever the figures say: {_FAMILIES}."
    )
    repeats: int = flag("--repeats", "N", "Answers to measure, at most.", 5, min=1)
    seconds: float = flag("--seconds", "S", "About so long (20); one answer at least.", 20.0, min=0.1)

    def check(self, plan: Plan | None) -> None:
        """Raises BadRequest for what is no family of plans, or beside a plan that is given whole."""
        from penstock.planner.families import FAMILIES

        if self.family is not None and (self.family not in FAMILIES or plan is not None):
            raise BadRequest(f"--family {self.family} should be {_FAMILIES}, and goes without --plan")


def bench(
    machine: Machine,
    work: Workload,
    target: Annotated[str | None, Argument(metavar="MODEL", help=f"{MODEL_HELP}; or the word ops.")] = None,
    config: Annotated[
        str | None,
        Argument(metavar="CONFIG", help="For ops: a model's config.json or its folder, or a bundled shape."),
    ] = None,
    calibrate: Annotated[
        bool, Option("--calibrate", help="Correct this machine's figures by what runs showed, and say how.")
    ] = False,
    undo: Annotated[bool, Option("--undo", help="Undo --calibrate: the probe's own figures again.")] = False,
    weights: Weights = None,
    plan_file: PlanFile = None,
    measuring: Measuring = Measuring(),
    trace: TraceName = None,
    cache_limit: CacheLimit = None,
    rows: Annotated[
        str | None,
        Option("--rows", metavar="N,N,…", help=f"For ops: rows of a pass, one setting each ({_ROWS})."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Speed with its physical bound.

    MODEL: answers random prompts within the limits, after a warm-up: --prompt-tokens and --output-tokens, 64 and 64 or
    fewer where that takes long. Measured beside predicted, what each lane did, and the share of what the disk and the
    RAM allow, both measured right before and right after.

    `ops CONFIG` times every op of the table on layers of that shape with random weights (of --weights, with --kv, at
    --context), beside what memory and processor deliver at most, measured in the same run.
    """
    machine.prepare()
    if calibrate or undo:
        if target is not None:
            raise BadRequest("--calibrate goes alone: it uses the runs that there were")
        _calibrate(machine, undo, as_json)
    elif target is None or (target == "ops" and config is None):
        raise BadRequest("say what to measure: penstock bench MODEL, penstock bench ops CONFIG, or --calibrate")
    elif target == "ops":
        if trace or plan_file or measuring.family or cache_limit or work != Workload(kv=work.kv, context=work.context):
            raise BadRequest("ops takes --weights, --kv, --context, --rows and --isa; the rest is for a MODEL")
        assert config is not None
        _ops(config, machine, work, weights, rows or _ROWS, as_json)
    else:
        if config is not None or rows is not None:
            raise BadRequest(f"--rows and a second argument are for `penstock bench ops CONFIG`, not for {target}")
        plan = given_plan(plan_file, machine, work)
        measuring.check(plan)
        if work.output_tokens == 1:
            raise BadRequest("decoding cannot be measured with a single token: --output-tokens should be 2 or more")
        ask = work.ask(machine)
        with tracing(trace, f"penstock bench {target}") as record:
            result = _measured(target, machine, work, ask, measuring, plan, record, weights, cache_limit)
            print(fitted(table(result)))
        if as_json:
            print_json(result.to_json())


def _measured(
    model: str, machine: Machine, work: Workload, ask: Ask, measuring: Measuring, plan: Plan | None,
    record: TraceFile | None, weights: str | None, cache_limit: str | None,
) -> Result:  # fmt: skip
    """`penstock bench MODEL`: what answers of this model took. Raises BadRequest, and as `packed_model` and
    `loaded`."""
    sparsity = work.sparsity_of(plan)
    source = packed_model(model, weights, machine, cache_limit, sparsity=sparsity, plan=plan)
    from penstock.serve.bench import WantedRun, bench

    wanted = WantedRun(work.prompt_tokens, work.output_tokens, measuring.repeats, measuring.seconds)
    with loaded(source, ask, machine, plan, record, family=measuring.family) as engine, progress() as tell:
        return bench(engine, wanted, machine.usable_threads, tell)


def _ops(config: str, machine: Machine, work: Workload, weights: str | None, rows: str, as_json: bool) -> None:
    """`penstock bench ops`: prints a line per op and number of rows. Raises BadRequest for wrong --rows."""
    if work.context == GROWING:
        raise BadRequest("ops times attention at one --context: -1 names none")
    context = work.named_context or _CONTEXT
    try:
        wanted = [int(n) for n in rows.split(",")]
    except ValueError:
        wanted = []
    if not wanted or min(wanted) < 1 or max(wanted) > context:
        raise BadRequest(f"--rows {rows} should be whole numbers from 1 to --context ({context}), with commas")
    from penstock.kernels.cpu import available
    from penstock.runtime.bench_ops import bench_ops
    from penstock.runtime.ceilings import ceilings
    from penstock.serve.planning import describe
    from penstock.spec.format import parse_format

    isa = machine.isa
    spec, fmt = describe(as_path(config), parse_format(weights) if weights else None, not machine.no_verify)
    kv = parse_format(work.kv or "float16")
    kv.check_kv()
    threads = machine.usable_threads
    limits = ceilings(threads, isa=isa)
    line = "{:>5}  {:<8}{:<10}{:>10}{:>10}{:>12}{:>9}"
    print(
        f"ceilings on {threads} threads, {isa or available()[0]}: RAM {limits.ram_read_bytes_per_s / 1e9:.1f} GB/s, "
        f"int8 dot products "
        f"{limits.int8_ops_per_s / 1e9:.0f} GOP/s, float32 {limits.float32_flops_per_s / 1e9:.0f} GFLOP/s"
    )
    print(line.format("rows", "op", "format", "time", "GB/s", "GFLOP/s", "share"))
    times = []
    with progress() as tell:
        for t in bench_ops(spec, fmt, kv, wanted, context, threads, isa, machine.exact, on_progress=tell):
            times.append(t)
            time_us = f"{t.seconds * 1e6:.0f} µs"
            speed = (f"{t.bytes / t.seconds / 1e9:.1f}", f"{t.flops / t.seconds / 1e9:.1f}", f"{t.share_of_bound:.2f}")
            print(line.format(t.rows, t.op, t.format, time_us, *speed))
    if as_json:
        names = ("ram_read_bytes_per_s", "int8_ops_per_s", "float32_flops_per_s")
        print_json(
            {
                "threads": threads,
                "isa": isa or available()[0],
                "context": context,
                "ceilings": {name: getattr(limits, name) for name in names},
                "ops": [t.to_json() for t in times],
            }
        )


def _calibrate(machine: Machine, undo: bool, as_json: bool) -> None:
    """Corrects the machine's file by past runs, or undoes that, and prints every change. Raises BadRequest where the
    file cannot be written."""
    from penstock.runtime import calibrated as files
    from penstock.runtime.probe import load_or_probe, machine_file
    from penstock.serve import calibration
    from penstock.serve.history import runs

    file = machine_file(machine.cache_folder, machine.isa)
    with progress() as tell:
        now = load_or_probe(machine.cache_folder, tell, isa=machine.isa)
    seen, probed = runs(file, now), files.probed(file, now)
    try:
        if undo:
            changes, last = calibration.undone(now, probed), f"{file} is as the probe wrote it"
            files.undo(file)
        else:
            after, corrections = calibration.calibrated(now, probed, seen)
            changes = [str(correction) for correction in corrections]
            last = f"written to {file}; penstock bench --undo gives the probe's own figures back"
            if changes:
                files.write(file, after)
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
    if as_json:
        print_json({"runs": len(seen), "changes": changes, "machine_file": str(file) if changes else None})
    elif changes:
        print("\n".join([*changes, last]))
    elif undo:
        print("nothing to undo: the figures are the probe's own")
    else:
        counted = sum(map(calibration.counts, seen))
        print(
            f"{len(seen)} runs with these figures, {counted} of them of {calibration.LEAST_STEPS} decode steps and "
            f"{calibration.LEAST_S:g} s or more: too few, too mixed, or as predicted; nothing is corrected"
        )
