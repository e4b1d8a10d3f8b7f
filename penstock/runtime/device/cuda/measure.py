"""Adds a GPU's figures to a machine's, in a process of its own.

    python -m penstock.runtime.device.cuda.measure < machine.json > machine-with-device.json

The machine comes on standard input, and goes to standard output with the device's tier and lanes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

from penstock.errors import DeviceFailed, PenstockError
from penstock.runtime import child, host
from penstock.runtime.ceilings import RAM_BYTES, ram_read_bytes_per_s
from penstock.runtime.device.cuda.card import Card, find
from penstock.runtime.device.cuda.device import GRAPHS_BYTES, WORKSPACE_BYTES
from penstock.runtime.device.cuda.probe import DeviceFigures, probe_device
from penstock.spec import machine as machines
from penstock.spec.machine import PROCESS_BYTES, Capacity, MachineSpec, Sharing
from penstock.spec.places import CPU, GPU
from penstock.units import MIB, round_up

_HOLD = "hold"


def measure(machine: MachineSpec) -> MachineSpec:
    """The machine with the figures of its GPU, measured now. Raises DeviceFailed."""
    card = find()
    if isinstance(card, str):
        raise DeviceFailed(card)
    threads = host.usable_cpus()
    figures = probe_device(
        card.device, lambda: RAM_BYTES / ram_read_bytes_per_s(threads), lambda text: print(text, file=sys.stderr)
    )
    context_bytes, process_bytes = _context(card)
    return with_device(machine, card, figures, context_bytes, process_bytes)


def with_device(
    machine: MachineSpec, card: Card, figures: DeviceFigures, context_bytes: int, process_bytes: int
) -> MachineSpec:
    """The machine with these figures of its GPU. `context_bytes`: device memory that the context of a process takes.
    `process_bytes`: the peak RAM of a process that drives the device."""
    lanes = {rate.lane for rate in figures.rates}
    sharing = (Sharing(CPU, GPU.to_device, figures.beside_copies), Sharing(CPU, GPU.to_host, figures.beside_copies))
    return replace(
        machine,
        tiers=(
            *(t for t in machine.tiers if t.name != GPU.executor),
            Capacity(GPU.executor, card.free_bytes, card.name),
        ),
        rates=(*(rate for rate in machine.rates if rate.lane not in lanes), *figures.rates),
        sharing=(*(s for s in machine.sharing if s.beside not in lanes), *sharing),
        context_bytes=round_up(context_bytes + WORKSPACE_BYTES + GRAPHS_BYTES, MIB),
        device_process_bytes=max(0, round_up(process_bytes - PROCESS_BYTES, MIB)),
    )


def _context(card: Card) -> tuple[int, int]:
    """(device memory that the context of one more process takes, that process's peak RAM), in bytes."""
    module = torch.get_device_module(card.device)
    free_before, _ = module.mem_get_info(card.device)
    with child.start("penstock.runtime.device.cuda.measure", _HOLD) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        answer = holder.stdout.readline().split()
        free_after, _ = module.mem_get_info(card.device)
        holder.stdin.close()
    reserved_bytes, peak_bytes = (int(word) for word in answer) if len(answer) == 2 else (0, 0)
    return max(0, free_before - free_after - reserved_bytes), peak_bytes


def _hold() -> None:
    """Holds a context of the device, after one product of matrices. Prints the bytes that torch reserved and the peak
    RAM of this process, then waits until standard input is closed."""
    card = find()
    if isinstance(card, str):
        raise DeviceFailed(card)
    x = torch.ones(256, 256, device=card.device)
    float((x @ x).sum().item())
    module = torch.get_device_module(card.device)
    print(module.memory_reserved(card.device), host.peak_rss_bytes(), flush=True)
    sys.stdin.read()
    time.sleep(0)


if __name__ == "__main__":
    try:
        if sys.argv[1:] == [_HOLD]:
            _hold()
        else:
            print(machines.dumps(measure(machines.loads(sys.stdin.read(), "standard input"))))
    except PenstockError as failure:
        sys.exit(failure.message)
