"""Solvers: an ask, a model and a machine in, a plan with its reasons out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.errors import BadRequest, DoesNotFit
from penstock.planner.predict import Prediction
from penstock.planner.shorten import quick, streamed
from penstock.planner.solve import device, residency
from penstock.planner.solve.candidate import Candidate, Compared
from penstock.planner.solve.reads import on_disks, with_reads
from penstock.spec.ask import DEFAULT_CONTEXT, Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.plan import Plan


@dataclass(frozen=True)
class Solved:
    """The best plan, what it will do, the runner-up, and a sentence per choice. `compared`: every candidate that was
    simulated, the best first."""

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    runner_up: Prediction | None = None
    strategy: str = "as given"
    cannot_run: str = ""
    compared: tuple[Compared, ...] = ()


_EQUAL, _SURELY_EQUAL = 1.05, 1.04  # the difference: loads that ran ahead before the simulated passes


def _score_s(prediction: Prediction, ask: Ask) -> float:
    """Seconds to bring down: of the whole answer, or of a decoded token."""
    return prediction.total_s if ask.objective == "latency" else 1 / prediction.decode_tokens_per_s


def _settles(prediction: Prediction, other: Plan, ask: Ask, machine: MachineSpec) -> bool:
    """Whether a plan that was predicted beats another one that was not: that one reads as much from the disk or more,
    and the disk's rate alone makes it at best an equal."""
    seqs = min(ask.batch, other.batch_seqs * other.batches_per_pass)
    read = sum(streamed(other, from_disk=True).values())
    if read < prediction.disk_bytes_per_token * seqs:
        return False
    read_s = read * machine.rate("disk0", "load", other.target.weights.kind).s_per_byte
    read_s /= max(1, len({unit.home for unit in other.units if unit.home.startswith("disk")}))
    least_s = read_s * ask.output_tokens if ask.objective == "latency" else read_s / seqs
    return _score_s(prediction, ask) <= least_s * _SURELY_EQUAL


def settle_context(ask: Ask, spec: ModelSpec) -> Ask:
    """The ask with its context decided: the model's maximum, at most 4096, unless the prompt and output
    need more. Raises BadRequest where the model cannot hold what was asked for."""
    wanted = ask.prompt_tokens + ask.output_tokens
    context = ask.context or min(spec.max_positions, max(DEFAULT_CONTEXT, wanted))
    if context > spec.max_positions:
        raise BadRequest(f"context {context} is more than the model's {spec.max_positions} positions")
    return replace(ask, context=context)


def candidates(ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec) -> Iterator[Candidate]:
    """Of every solver that applies, those with a device first. A model that a device has room for needs no others."""
    found = False
    if device.has_device(machine, ask):
        device.require_minimum(ask, spec, weights, machine)
        for candidate in device.candidates(ask, spec, weights, machine):
            yield candidate
            found = True
            if candidate.strategy == device.WHOLE:
                return
        if ask.use_device:
            if not found:
                device.refuse(ask, spec, weights, machine)
            return
    try:
        yield from residency.candidates(ask, spec, weights, machine)
    except DoesNotFit:
        if not found:
            raise


def solve(
    ask: Ask, spec: ModelSpec, weights: Format, machine: MachineSpec, disks: Mapping[str, str] | None = None
) -> Solved:
    """Lowers and simulates every candidate that may win and takes the fastest for the ask's objective.

    `disks`: the disk of each part of the model, where it lies on more than one.

    Raises DoesNotFit with the minimum that would do, and BadRequest for what no machine could do.
    """
    ask = settle_context(ask, spec)
    found: list[tuple[Prediction, Candidate]] = []
    for candidate in candidates(ask, spec, weights, machine):
        plan = on_disks(candidate.plan, disks or {})
        if not any(_settles(prediction, plan, ask, machine) for prediction, _ in found):
            found.append((quick(plan, ask, machine, spread=False), candidate._replace(plan=plan)))
    best_s = min(_score_s(prediction, ask) for prediction, _ in found)
    # Among equals the plan that reads least: predictions are not that sharp, and the disk may be shared.
    found.sort(key=lambda entry: (_score_s(entry[0], ask) > best_s * _EQUAL, entry[0].disk_bytes_per_token))
    strategy, plan, reasons, cannot_run = found[0][1]
    prediction = quick(plan, ask, machine)
    plan, how = with_reads(plan, machine)  # which changes nothing that was predicted: rates hold for these reads
    reasons += (how,) if any(streamed(plan, from_disk=True).values()) else ()
    reasons += (f"{prediction.bound_by} is busiest while decoding: {prediction.lane_share[prediction.bound_by]:.0%}",)
    compared = tuple(Compared(candidate, each) for each, candidate in found)
    return Solved(plan, prediction, reasons, found[1][0] if len(found) > 1 else None, strategy, cannot_run, compared)
