"""What each paper's system does in its own way, as figures that take the place of a machine's (`data/traits.tsv`).

A prediction "as penstock would run it" has penstock's kernels and transfers. One "as they built it" is of the same plan
on the same machine with these figures. A trait is stated where a paper prints its number. It is fitted where a paper
only says what its system does: then half of the paper's tables choose the number (`drawn_tables`). It is by hand where
somebody chose it who looked at tables that it names. All tables that chose a number fit (`fitting_tables`), and the
others judge.
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
HOW = ("stated", "fitted", "by hand")
_HALF = "float16"
_PACKED = ("int4", "int8")
_NORMS = 2  # of a layer
MANY_ROWS = 16  # from so many on PIPO unpacks weights before their product (section 3.5)


class Trait(NamedTuple):
    """`value`: in the unit of its kind (KINDS). `how`: of HOW. `tables`: those that a number by hand was chosen by.
    `source`: what says so, and where."""

    paper: str
    system: str
    kind: str
    value: float
    how: str
    tables: tuple[str, ...]
    source: str

    @property
    def fitted(self) -> bool:
        """Whether the paper's drawn tables choose the number."""
        return self.how == "fitted"


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


def _few_rows(machine: MachineSpec, flops_per_s: float) -> MachineSpec:
    """Packed weights are multiplied with fewer than MANY_ROWS rows by a kernel for one row, again and again."""
    for name in _PACKED:
        rate = machine.rate(GPU.kernels, "*", name, MANY_ROWS - 1)
        few = replace(rate, op="*", format=name, rows=MANY_ROWS - 1, s_per_flop=1 / flops_per_s)
        machine = _with(machine, few)
    return machine


def _layers(machine: MachineSpec, seconds: float) -> MachineSpec:
    """The device waits so long in each layer for its next kernels. It stands with the norms."""
    norm = machine.rate(GPU.kernels, "norm", "*")
    return _with(machine, replace(norm, op="norm", format="*", alpha_s=norm.alpha_s + seconds / _NORMS))


def _unpacking(machine: MachineSpec, copies: float) -> MachineSpec:
    """Packed numbers cross the device's memory so many times more, in half precision: before products and attention."""
    for name in _PACKED:
        widened = parse_format(_HALF).bits / parse_format(name).bits
        for op in ("*", "attend"):
            rate = machine.rate(GPU.kernels, op, name, MANY_ROWS)
            half = machine.rate(GPU.kernels, "*", _HALF)
            seconds = rate.s_per_byte + copies * widened * half.s_per_byte
            machine = _with(machine, replace(rate, op=op, format=name, s_per_byte=seconds))
    return machine


def _cpu_rows(machine: MachineSpec, times: float) -> MachineSpec:
    """Each row of a prompt takes the CPU as long as reading the weights for it, `times` over: ScheInfer's Eq. 3 has one
    line for any number of tokens."""
    rates = []
    for rate in machine.rates:
        if rate.lane == CPU and rate.op == "*" and rate.format in (_HALF, "bfloat16", *_PACKED):
            a_weight_s = rate.s_per_byte * parse_format(rate.format).bits / 8
            rate = replace(rate, s_per_flop=max(rate.s_per_flop, times * a_weight_s / 2))  # two operations a weight
        rates.append(rate)
    return replace(machine, rates=tuple(rates))


def _with(machine: MachineSpec, rate: Rate) -> MachineSpec:
    """With that rate, instead of another one for the same lane, op, format and rows."""
    key = (rate.lane, rate.op, rate.format, rate.rows)
    return replace(machine, rates=(*(r for r in machine.rates if (r.lane, r.op, r.format, r.rows) != key), rate))


# Kind → the machine with a trait's value, which is in the unit that the kind names.
KINDS: dict[str, Change] = {
    "disk reads, bytes/s": _lanes(DISK.reads),
    "disk writes, bytes/s": _lanes(DISK.writes),
    "copies of what was read, bytes/s": _copies,
    "link, bytes/s": _lanes(GPU.to_device, GPU.to_host),
    "attention on the CPU, bytes/s": _cpu_attention,
    "products, operations/s": _products,
    "launches of a layer, s": _layers,
    "products of few rows, operations/s": _few_rows,
    "unpacking, copies in half precision": _unpacking,
    "rows of the CPU, each as long as so many of the first": _cpu_rows,
}

TRAITS: Traits = tuple(
    Trait(
        c["paper"],
        c["system"],
        c["kind"],
        float(c["value"]),
        c["how"],
        tuple(filter(None, c["tables"].split("; "))),
        c["source"],
    )
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
    """The paper's tables that had a say in a number: those drawn, and those that were looked at for one by hand. All
    others judge."""
    by_hand = (table for trait in TRAITS if trait.paper == paper for table in trait.tables)
    return drawn_tables(paper).union(by_hand)


def drawn_tables(paper: str) -> frozenset[str]:
    """Half of the paper's tables, drawn with SEED: numbers are fitted by these. None where no number of the paper's
    systems is fitted."""
    if not any(trait.paper == paper and trait.fitted for trait in TRAITS):
        return frozenset()
    tables = list(dict.fromkeys(figure.table for figure in FIGURES if figure.paper == paper))
    return frozenset(random.Random(SEED).sample(tables, (len(tables) + 1) // 2))
