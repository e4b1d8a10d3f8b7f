"""Whole layers on the device, the others on the CPU: how llama.cpp and most others split a model (`-ngl`).

Here to be compared with: every other solver splits finer. The head goes with the first layers that fit; a layer takes
its KV with it. What the CPU computes lies in RAM; what does not fit there is on the disk, and streams.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.device import device_skeleton, has_device
from penstock.planner.solve.device_plan import Split, vocabulary
from penstock.planner.solve.limits import fits
from penstock.planner.solve.skeleton import CHUNK_ROWS, PINNED, chunk_options
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import DEVICE, Plan

NAME = "whole layers (llama.cpp)"


def candidates(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> Iterator[Candidate]:
    """At most one: where there is a device, it holds a layer, and RAM holds the rest."""
    plan = plan_of(ask, spec, weights, machine)
    if plan is None:
        return
    count = sum(home.layers[1] - home.layers[0] for home in plan.kv if home.attend == DEVICE)
    yield Candidate(
        NAME, plan,
        (f"{count} of {len(spec.layers)} layers in device memory with their KV, the CPU computes the others",
         "where a prompt is read, the device computes the CPU's FFNs too"),
    )  # fmt: skip


def plan_of(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, prompts: bool = True) -> Plan | None:
    """With as many layers on the device as fit; None without a device, where not one does, or where RAM does not hold
    the rest. `prompts`: the device computes the CPU's FFNs where a prompt is read."""
    if not has_device(machine, ask):
        return None
    for chunk_rows in (rows for rows in chunk_options(ask) if rows <= CHUNK_ROWS):
        lo, hi = 0, len(spec.layers)
        while lo < hi:  # the most that fit
            middle = (lo + hi + 1) // 2
            there = _plan(ask, spec, weights, machine, middle, chunk_rows, prompts)
            lo, hi = (middle, hi) if fits(there, ask, machine) else (lo, middle - 1)
        found = _plan(ask, spec, weights, machine, lo, chunk_rows, prompts)
        if lo and fits(found, ask, machine):
            return found
    return None


def _plan(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, layers: int, chunk_rows: int, prompts: bool
) -> Plan:
    split = Split("CPU", 0.0, layers, DEVICE, prompts)
    beside = device_skeleton(ask, spec, weights, machine, split, chunk_rows)
    head = vocabulary(spec, weights)
    every = {part.key: part for part in parts(spec, weights) if part.kind not in PINNED}
    there = {part.key: part.granules for part in every.values() if part.kind in ("attn", "ffn") and part.layer < layers}
    there[head.key] = head.granules
    return beside.plan(there, {key: part.granules - there.get(key, 0) for key, part in every.items()})
