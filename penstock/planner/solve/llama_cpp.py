"""Whole layers on the device, the others on the CPU: how llama.cpp and most others split a model (`-ngl`).

Here to be compared with: every other solver splits finer. The head goes with the first layers that fit; a layer takes
its KV with it. What the CPU computes lies in RAM; what does not fit there is on the disk, and streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from penstock.planner.homes import kv_layers
from penstock.planner.solve.beside import Split, device_skeleton
from penstock.planner.solve.candidate import Candidate
from penstock.planner.solve.fill import usual_chunks
from penstock.planner.solve.problem import Problem, most
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

NAME = "whole layers (llama.cpp)"


def candidates(problem: Problem) -> Iterator[Candidate]:
    """At most one: where there is a device, it holds a layer, and RAM holds the rest."""
    plan = plan_of(problem)
    if plan is None:
        return
    count = kv_layers(plan, GPU.executor)
    yield Candidate(
        NAME, plan,
        (f"{count} of {problem.layers} layers in device memory with their KV, the CPU computes the others",
         "where a prompt is read, the device computes the CPU's FFNs too"),
    )  # fmt: skip


def plan_of(problem: Problem) -> Plan | None:
    """With as many layers on the device as fit, which computes the CPU's FFNs too where a prompt is read; None without
    a device, where not one layer fits, or where RAM does not hold the rest."""
    if not problem.has_device:
        return None
    for chunk_rows in usual_chunks(problem.ask):
        of = cache(partial(_plan, problem, chunk_rows))
        layers = most(problem.layers, lambda count, of=of: of(count).tier_bytes()[GPU.executor], problem.device_bytes)  # type: ignore[misc]
        if layers and problem.fits(of(layers)):
            return of(layers)
    return None


def _plan(problem: Problem, chunk_rows: int, layers: int) -> Plan:
    skeleton = device_skeleton(problem, Split("CPU", 0.0, layers, GPU.executor, True), chunk_rows)
    there = {key: p.granules for key, p in problem.parts.items() if p.kind in ("attn", "ffn") and p.layer < layers}
    there[problem.head.key] = problem.head.granules
    return skeleton.plan(there)
