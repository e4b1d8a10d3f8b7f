"""The parts of the whole probe: their names, about how long each takes, and what it finds out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph.ops import PRODUCTS
from penstock.runtime.probe_ops import ROW_OPS
from penstock.spec.machine import Rate, Reads, Sharing
from penstock.spec.places import is_disk, reads_disk

READS, TASKS, SMALL, SHARED, LOADS, RAM = (
    "how the disk is best read", "scheduling", "small reads and writes", "the disk beside computing",
    "loads from the disk", "reading RAM",
)  # fmt: skip
_OVERHEADS = ("task", "call", "pass")


@dataclass(frozen=True)
class ProbePart:
    """`weight_s`: its share of the time, as seconds on a machine with nothing else to do."""

    name: str
    weight_s: float


@dataclass(frozen=True)
class ProbeFindings:
    """What a part found out. Rates that it had no time for are missing."""

    rates: tuple[Rate, ...] = ()
    sharing: tuple[Sharing, ...] = ()
    reads: tuple[Reads, ...] = ()


def parts(formats: Sequence[str], kv_formats: Sequence[str]) -> tuple[ProbePart, ...]:
    """In the order in which they are measured."""
    return (
        ProbePart(READS, 4.0),
        *(ProbePart(products(kind), 8.0) for kind in formats),
        *(ProbePart(attention(kv), 1.2) for kv in kv_formats),
        ProbePart(TASKS, 0.7),
        ProbePart(SMALL, 0.5),
        ProbePart(SHARED, 5.0),
        ProbePart(LOADS, 0.5),
        ProbePart(RAM, 1.3),
    )


def products(kind: str) -> str:
    return f"{kind} products"


def attention(kv: str) -> str:
    return f"attention over {kv}"


def part_of(rate: Rate, formats: Sequence[str]) -> str:
    """The name of the part that measures a rate of the processor or the disk. `formats`: those that are measured. Ops
    that do not depend on the format are measured with the first."""
    if rate.op in _OVERHEADS:
        return TASKS
    if is_disk(rate.lane):
        return SMALL if rate.op == "fetch" or not reads_disk(rate.lane) else LOADS
    if rate.op in PRODUCTS:
        return products(rate.format)
    if rate.op == "attend":
        return attention(rate.format)
    return products(formats[0]) if rate.op in ROW_OPS else RAM


def key(rate: Rate) -> tuple[str, str, str, int]:
    """What no two rates of a machine share."""
    return (rate.lane, rate.op, rate.format, rate.rows)
