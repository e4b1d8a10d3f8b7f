"""What the four papers publish, as data (`data/`): figures, why predictions of some are far off, and contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.units import GIB

DATA = Path(__file__).parent / "data"
PAPERS = ("PIPO", "FlexGen", "ScheInfer", "PowerInfer")

# Instead of a model or a machine, where a figure sums up several.
SEVERAL = "several"

LAPTOP = "laptop-rtx3060-6gb"  # PIPO, section 4.1
DESKTOP = "pc-rtx4090-64gb"  # PIPO, appendix C.5
T4 = "cloud-t4-208gb"  # FlexGen, Table 1
BED_A, BED_B, BED_C = "server-a6000-48gb", "server-rtx3090-24gb", "server-rtx2080ti-11gb"  # ScheInfer, section V-A
PC_HIGH, PC_LOW = "pc-rtx4090-192gb", "pc-rtx2080ti-64gb"  # PowerInfer, section 8.1

METRICS = {
    "throughput": "tokens generated a second, the prompts' time counted, summed over the batch",
    "decode_tokens_per_s": "tokens generated a second once the prompts are done, summed over the batch",
    "ttft_s": "seconds to the first token",
    "decode_s": "seconds between two tokens of a sequence",
    "latency_s": "seconds for the whole answer",
    "seconds": "seconds of the part that `setting` names",
    "speedup": "times as fast as `against`",
    "slowdown": "share of the speed of `against` that is missing",
    "share": "the fraction that `setting` names",
    "sparsity": "share of the FFN's neurons that are not active, a token",
    "device_gb": "GB of device memory in use, as printed",
    "host_gb": "GB of the host's memory in use, as printed",
    "predictor_weights": "weights of the predictors of active neurons",
}

# Models of the papers that nothing stands for (`stand_ins`), and why; penstock/shapes/SOURCES.md has them too.
UNSUPPORTED = {
    "qwen2-14b": "no dense model of this name was published",
}

# Machines that a figure names, but that are no paper's test bed.
UNSUPPORTED_MACHINES = {"a100-80gb": "a server's GPU that holds the whole model: nothing to place"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One figure as a paper prints it (times in seconds, shares as fractions).

    `system`: whose figure it is; `against`: of a ratio, the other one. `weights` and `kv` are formats. None: the paper
    does not say; memory None: all of the machine's. `note`: what is assumed or contradicts itself.
    """

    paper: str
    table: str
    setting: str
    system: str
    machine: str
    model: str
    metric: str
    value: float
    against: str = ""
    weights: str | None = None
    kv: str | None = None
    prompt: int | None = None
    output: int | None = None
    batch: int | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    note: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """All but value and note: what must differ between two figures."""
        return tuple(getattr(self, name) for name in self.__slots__ if name not in ("value", "note"))


@dataclass(frozen=True, slots=True)
class Contradiction:
    """`says`: what stands at `where`; `but`: what it cannot be reconciled with, and what is taken instead."""

    paper: str
    where: str
    says: str
    but: str


@dataclass(frozen=True, slots=True)
class Fit:
    """t = alpha_s + n · beta_s (ScheInfer's Eq. 3). n: multiply-adds (tokens × width × hidden) of a product, bytes over
    the link. A launch has alpha_s only, and `r2` is its standard deviation in seconds."""

    machine: str
    what: str
    weights: str
    alpha_s: float
    beta_s: float
    r2: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Why predictions are far off. `where`: cell → what a figure's must contain. `text`: in words. What undoes it:

    kinds       the kinds of traits (see traits.py) that the prediction as penstock lacks
    reading     cell → what it would have to be, where the paper does not say it, or prints another row's figure

    `cannot`: nothing does, since no policy can reproduce the figure."""

    paper: str
    where: dict[str, str]
    kinds: frozenset[str]
    reading: dict[str, str]
    cannot: bool
    text: str

    @property
    def can_be_undone(self) -> bool:
        """Whether it can be tested at all."""
        return bool(self.kinds or self.reading)

    def read(self, row: Published) -> Published:
        """The figure as the cause reads it."""
        changed: dict[str, Any] = {
            name: int(value) if name in _COUNTS else value for name, value in self.reading.items()
        }
        return replace(row, **changed)


def device_gb(count: int) -> int:
    """A paper's limit of device memory in bytes. Its GB are read as GiB, as makers of GPUs count."""
    return count * GIB


def cause_of(row: Published) -> Cause | None:
    """Why the prediction of a figure is far off; None where nobody knows."""
    for cause in CAUSES:
        if cause.paper == row.paper and all(part in getattr(row, name) for name, part in cause.where.items()):
            return cause
    return None


def cells_of(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table in `data/`: cells between tabs, their names in the first line that is no comment (#) and no
    note. A line `(3) text` is a note, which cells name."""
    notes: dict[str, str] = {}
    names: list[str] = []
    for line in (DATA / f"{name}.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("("):
            number, _, text = line.partition(" ")
            notes[number] = text
        elif names:
            cells = [*line.split("\t"), *[""] * len(names)]  # empty cells at a line's end may be left out
            yield {name: notes.get(cell, cell) for name, cell in zip(names, cells, strict=False)}
        elif not line.startswith("#"):
            names = line.split("\t")


def _figure(paper: str, cells: dict[str, str]) -> Published:
    def count(name: str) -> int | None:
        return int(cells[name]) if cells[name] else None

    limit = count("device_gib")
    names = ("table", "setting", "system", "machine", "model", "metric", "against")
    texts: dict[str, Any] = {name: cells[name] for name in names}
    return Published(
        paper=paper, **texts, value=float(cells["value"]), weights=cells["weights"] or None, kv=cells["kv"] or None,
        prompt=count("prompt"), output=count("output"), batch=count("batch"),
        device_memory_bytes=None if limit is None else device_gb(limit), note=cells["note"],
    )  # fmt: skip


FIGURES: tuple[Published, ...] = tuple(_figure(paper, cells) for paper in PAPERS for cells in cells_of(paper.lower()))
CONTRADICTIONS = tuple(Contradiction(**cells) for cells in cells_of("contradictions"))
# ScheInfer's fits.
TABLE_I = tuple(
    Fit(c["machine"], c["what"], c["weights"], float(c["alpha_s"]), float(c["beta_s"]), float(c["r2"]))
    for c in cells_of("table_i")
)
_COUNTS = ("prompt", "output", "batch")
_CAUSE_CELLS = ("system", "table", "setting", "model", "machine", "metric")
CAUSES = tuple(
    Cause(
        c["paper"],
        {name: c[name] for name in _CAUSE_CELLS},
        frozenset(filter(None, c["traits"].split("; "))),
        dict(part.split("=", 1) for part in c["reading"].split("; ") if part),
        c["cannot"] == "yes",
        c["cause"],
    )
    for c in cells_of("causes")
)
