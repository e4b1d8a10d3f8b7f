"""Whole layers on the device and the others on the CPU: how llama.cpp and most other programs split a model (`-ngl`).

This solver is a baseline: all other solvers split finer. The device has the head, and as many of the first layers as
fit, with their KV. The CPU computes the other layers from RAM. There is no plan if RAM does not hold them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from penstock.planner.candidate import Candidate
from penstock.planner.homes import kv_layers
from penstock.planner.shares import all_of
from penstock.planner.sizes import usual_chunks
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import device_skeleton
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

NAME = "whole layers (llama.cpp)"


def candidates(problem: Problem) -> Iterator[Candidate]:
    """At most one candidate: the plan of `plan_of`."""
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
    """The plan with as many layers on the device as fit. Where a prompt is read, the device computes the CPU's FFNs
    too. None if not one layer fits, or if RAM does not hold the rest."""
    for chunk_rows in usual_chunks(problem.ask):
        plan_of_layers = cache(partial(_plan, problem, chunk_rows))
        layers = problem.most_on_device(problem.layers, plan_of_layers)
        if layers and problem.fits(plan_of_layers(layers)):
            return plan_of_layers(layers)
    return None


def _plan(problem: Problem, chunk_rows: int, layers: int) -> Plan:
    """The plan with the head and the first `layers` layers on the device."""
    there = all_of(part for part in problem.parts.values() if part.kind in ("attn", "ffn") and part.layer < layers)
    return device_skeleton(problem, chunk_rows, layers, lifted=0.0).plan(there | all_of([problem.head]))
