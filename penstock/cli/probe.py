"""`penstock probe`: measures this machine once and keeps the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.options import Json, Machine
from penstock.cli.output import print_json, progress
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.spec.machine import MachineSpec

_BUSY = 0.5  # a load, over the last minute, beyond this share of all CPUs is told


def probe(
    machine: Machine,
    again: Annotated[bool, Option("--again", help="Measure even if this machine was measured before.")] = False,
    as_json: Json = False,
) -> None:
    """Measures this machine once and keeps the figures.

    They stand in the cache folder; planning uses them.
    """
    machine.prepare()
    import json

    from penstock.runtime.device.choose import choose
    from penstock.runtime.probe import load_or_probe, machine_file
    from penstock.spec import machine as machines

    folder = machine.cache_folder
    if again:
        machine_file(folder).unlink(missing_ok=True)
    with progress() as tell:
        figures = load_or_probe(folder, tell, detailed=True, whole=True)
        chosen = choose(machine.device, figures, None, folder, tell)
    figures = chosen.machine
    if as_json:
        print_json(json.loads(machines.dumps(figures)))
        return
    print("\n".join([*fit_lines(figures), *here_lines(), f"  {chosen.reason}"]))


def fit_lines(machine: MachineSpec) -> list[str]:
    """The machine as lines of text: its tiers, and the rates of each lane. A task takes alpha, and then the longer one
    of its bytes and its flops."""
    lines = [f"{machine.name}: {machine.cpu or 'unknown processor'}, {machine.threads} threads ({machine.source})"]
    lines += [f"  {tier.name:<8}{format_bytes(tier.bytes)}" for tier in machine.tiers]
    lines.append(
        f"  {'lane':<13}{'op':<8}{'format':<10}{'rows':>6}{'alpha':>9}  {'bytes':>11}  {'flops':>13}  {'r²':>6}"
    )
    for rate in machine.rates:
        read = format_rate(1 / rate.s_per_byte) if rate.s_per_byte else "-"
        flops = f"{1e-9 / rate.s_per_flop:.0f} GFLOP/s" if rate.s_per_flop else "-"
        rows, alpha = f"≤ {rate.rows}" if rate.rows else "any", format_seconds(rate.alpha_s)
        heading = f"  {rate.lane:<13}{rate.op:<8}{rate.format:<10}{rows:>6}"
        lines.append(f"{heading}{alpha:>9}  {read:>11}  {flops:>13}  {rate.r2:>6.3f}")
    lines += [
        f"  {r.lane} {f'up to {format_bytes(r.most_bytes)}' if r.most_bytes else 'loads'} {r.reason}"
        for r in machine.reads
    ]
    lines += [f"  {s.lane} beside {s.beside}: takes {s.factor:.2f} times as long" for s in machine.sharing]
    return lines


def here_lines() -> list[str]:
    """Lines about the memory and the processors that are free on this machine just now."""
    from penstock.runtime import host

    load, cpus = host.load(), host.usable_cpus()
    limit, physical = host.memory_limit_bytes(), host.physical_bytes()
    lines = [
        f"  free now: {format_bytes(host.available_bytes())} of {format_bytes(limit)} of memory"
        + (f" (a cgroup's limit; the machine has {format_bytes(physical)})" if limit < physical else "")
        + f", {cpus} of {host.all_cpus()} CPUs"
    ]
    if load > _BUSY * cpus:
        lines.append(f"  load {load:.1f}: other processes are busy, and measurements made now show it")
    return lines
