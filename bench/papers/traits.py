"""What each paper's system does in its own way, as figures that take the place of a machine's (`data/traits.tsv`).

A prediction "as penstock would run it" has penstock's kernels and transfers. One "as they built it" is of the same plan
on the same machine with these figures. A trait is stated where a paper prints its number. It is fitted where a paper
only says what its system does: then half of the paper's tables choose the number (`fitting_tables`), and the other half
judges it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from bench.papers.published import FIGURES, cells_of
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.places import CPU, DISK, GPU, Lane

SEED = 0  # of the draw of tables that fit
_HALF = "float16"
_PACKED = ("int4", "int8")
_NORMS = 2  # of a layer


class Trait(NamedTuple):
    """`value`: in the unit of its kind (KINDS). `source`: what says so, and where. `fitted`: the number is chosen by
    the paper's fitting tables."""

    paper: str
    system: str
    kind: str
    value: float
    fitted: bool
    source: str


Traits = tuple[Trait, ...]
Change = Callable[[MachineSpec, float], MachineSpec]


def _lanes(*lanes: Lane) -> Change:
    """All bytes of these lanes at so many a second."""

    def change(machine: MachineSpec, bytes_per_s: float) -> MachineSpec:
        rates = (
            replace(r, s_per_byte=1 / bytes_per_s) if r.lane in lanes and r.s_per_byte else r for r in machine.rates
        )
        return replace(machine, rates=tuple(rates))

    return change


def _copies(machine: MachineSpec, bytes_per_s: float) -> MachineSpec:
    """Each byte is copied after it was read, by the thread that reads."""
    rates = (
        replace(r, s_per_byte=r.s_per_byte + 1 / bytes_per_s) if r.lane == DISK.reads else r for r in machine.rates
    )
    return replace(machine, rates=tuple(rates))


def _cpu_attention(machine: MachineSpec, bytes_per_s: float) -> MachineSpec:
    rates = (replace(r, s_per_byte=1 / bytes_per_s) if (r.lane, r.op) == (CPU, "attend") else r for r in machine.rates)
    return replace(machine, rates=tuple(rates))


def _products(machine: MachineSpec, flops_per_s: float) -> MachineSpec:
    formats = (_HALF, "bfloat16", *_PACKED)
    rates = (
        replace(r, s_per_flop=1 / flops_per_s) if r.lane == GPU.kernels and r.format in formats else r
        for r in machine.rates
    )
    return replace(machine, rates=tuple(rates))


def _layers(machine: MachineSpec, seconds: float) -> MachineSpec:
    """The device waits so long in each layer for its next kernels. It stands with the norms."""
    norm = machine.rate(GPU.kernels, "norm", "*")
    return _with(machine, replace(norm, op="norm", format="*", alpha_s=norm.alpha_s + seconds / _NORMS))


def _unpacking(machine: MachineSpec, copies: float) -> MachineSpec:
    """Packed numbers cross the device's memory so many times more, in half precision: before products and attention."""
    for name in _PACKED:
        widened = parse_format(_HALF).bits / parse_format(name).bits
        for op in ("*", "attend"):
            rate = machine.rate(GPU.kernels, op, name)
            half = machine.rate(GPU.kernels, "*", _HALF)
            seconds = rate.s_per_byte + copies * widened * half.s_per_byte
            machine = _with(machine, replace(rate, op=op, format=name, s_per_byte=seconds))
    return machine


def _with(machine: MachineSpec, rate: Rate) -> MachineSpec:
    """With that rate, instead of another one for the same lane, op and format."""
    key = (rate.lane, rate.op, rate.format)
    return replace(machine, rates=(*(r for r in machine.rates if (r.lane, r.op, r.format) != key), rate))


# Kind → the machine with a trait's value, which is in the unit that the kind names.
KINDS: dict[str, Change] = {
    "disk reads, bytes/s": _lanes(DISK.reads),
    "disk writes, bytes/s": _lanes(DISK.writes),
    "copies of what was read, bytes/s": _copies,
    "link, bytes/s": _lanes(GPU.to_device, GPU.to_host),
    "attention on the CPU, bytes/s": _cpu_attention,
    "products, operations/s": _products,
    "launches of a layer, s": _layers,
    "unpacking, copies in half precision": _unpacking,
}

TRAITS: Traits = tuple(
    Trait(c["paper"], c["system"], c["kind"], float(c["value"]), c["how"] == "fitted", c["source"])
    for c in cells_of("traits")
)


@cache
def applied(machine: MachineSpec, traits: Traits) -> MachineSpec:
    """The machine as a system with these traits uses it. They apply in the order of KINDS."""
    for kind, change in KINDS.items():
        for trait in traits:
            if trait.kind == kind:
                machine = change(machine, trait.value)
    return machine


def of_system(traits: Traits, paper: str, system: str) -> Traits:
    """Those of a paper's system; "FlexGen (c)" is FlexGen, with packed numbers."""
    return tuple(t for t in traits if (t.paper, t.system) == (paper, system.removesuffix(" (c)")))


def fitting_tables(paper: str) -> frozenset[str]:
    """Half of the paper's tables, drawn with SEED: numbers are fitted by these, and judged by all others. None where no
    number of the paper's systems is fitted."""
    if not any(trait.paper == paper and trait.fitted for trait in TRAITS):
        return frozenset()
    tables = list(dict.fromkeys(figure.table for figure in FIGURES if figure.paper == paper))
    return frozenset(random.Random(SEED).sample(tables, (len(tables) + 1) // 2))
