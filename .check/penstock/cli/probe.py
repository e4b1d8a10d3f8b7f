"""`penstock probe`: measures this machine once and keeps the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.options import Json, Machine
from penstock.cli.output import print_json, progress
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.spec.machine import MachineSpec


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

    from penstock.runtime.probe import load_or_probe, machine_file
    from penstock.spec import machine as machines

    folder = machine.cache_folder
    if again:
        machine_file(folder).unlink(missing_ok=True)
    with progress() as tell:
        found = load_or_probe(folder, folder, tell)
    if as_json:
        print_json(json.loads(machines.dumps(found)))
        return
    print("\n".join(fit_lines(found)))


def fit_lines(machine: MachineSpec) -> list[str]:
    """The machine as text: its tiers, and what a task costs on each lane."""
    lines = [f"{machine.name}: {machine.cpu or 'unknown processor'}, {machine.threads} threads ({machine.source})"]
    lines += [f"  {tier.name:<8}{format_bytes(tier.bytes)}" for tier in machine.tiers]
    lines.append(f"  {'lane':<8}{'op':<10}{'format':<10}{'a task':>10}  {'bytes':>13}  {'flops':>14}  {'r²':>5}")
    for rate in machine.rates:
        read = format_rate(1 / rate.s_per_byte) if rate.s_per_byte else "-"
        flops = f"{1e-9 / rate.s_per_flop:.1f} GFLOP/s" if rate.s_per_flop else "-"
        alpha = format_seconds(rate.alpha_s)
        lines.append(
            f"  {rate.lane:<8}{rate.op:<10}{rate.format:<10}{alpha:>10}  {read:>13}  {flops:>14}  {rate.r2:>5.3f}"
        )
    return lines
