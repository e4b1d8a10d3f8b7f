"""The comparison as it is kept (`data/compared.jsonl`): `python -m bench.papers` writes it, and the page and the tests
read it, since all of it takes many minutes of a processor.

First a line for each paper with hashes of what its predictions rest on, as data: its figures, traits and causes, and
the machines and shapes that the figures name. Where one has changed, `stale` says so. Code is not among them: tests
predict some rows anew, and `make fuzz` all. Then a line for each figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

import penstock
from bench.papers.compare import LeftOut, Row
from bench.papers.published import DATA, FIGURES, PAPERS, UNSUPPORTED, Published, cells_of
from bench.papers.traits import TRAITS

FILE = DATA / "compared.jsonl"
_SHOWN = ("paper", "table", "setting", "system", "against", "model", "machine", "metric", "value")  # of a figure
_NUMBERS = tuple(field.name for field in fields(Row) if field.name != "figure")
_DIGITS = 9

# What was found, in the order of FIGURES.
Compared = tuple[tuple[Row, ...], tuple[LeftOut, ...]]


def inputs(paper: str) -> dict[str, str]:
    """What → a hash of it, in hexadecimal."""
    figures = [figure for figure in FIGURES if figure.paper == paper]
    package = Path(penstock.__file__).parent
    found = {
        "figures": repr(figures),
        "traits": repr([trait for trait in TRAITS if trait.paper == paper]),
        "causes": repr([cells for cells in cells_of("causes") if cells["paper"] == paper]),
        "unsupported": repr(UNSUPPORTED),
        "machines": _texts(package / "machines", (figure.machine for figure in figures)),
        "shapes": _texts(package / "shapes", (figure.model for figure in figures)),
    }
    return {name: sha256(text.encode()).hexdigest()[:16] for name, text in found.items()}


def _texts(folder: Path, names: Iterable[str]) -> str:
    """Of the files with these names that are there."""
    files = (folder / f"{name}.json" for name in sorted(set(names)))
    return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def write(compared: Compared, hashes: Mapping[str, Mapping[str, str]], file: Path = FILE) -> None:
    """`hashes`: paper → inputs that its predictions rest on."""
    rows, left_out = compared
    found: dict[Published, dict[str, object]] = {
        row.figure: {name: _short(getattr(row, name)) for name in _NUMBERS} for row in rows
    }
    found |= {each.figure: {"left_out": each.cause} for each in left_out}
    lines: list[dict[str, object]] = [{"paper": paper, "inputs": dict(each)} for paper, each in hashes.items()]
    for figure in FIGURES:
        if figure in found:
            lines.append({name: getattr(figure, name) for name in _SHOWN} | found[figure])
    file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines), encoding="utf-8")


def read(file: Path = FILE) -> Compared:
    """What was written, of the figures of now: those that have changed since are not there."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    known: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for line in lines:
        if "inputs" not in line:
            known.setdefault(tuple(line[name] for name in _SHOWN), []).append(line)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for figure in FIGURES:
        # Figures alike in what is shown come in the same order.
        same = known.get(tuple(getattr(figure, name) for name in _SHOWN))
        if not same:
            continue
        line = same.pop(0)
        if "left_out" in line:
            left_out.append(LeftOut(figure, str(line["left_out"])))
        else:
            rows.append(Row(figure, **{name: line[name] for name in _NUMBERS}))  # type: ignore[arg-type]
    return tuple(rows), tuple(left_out)


def kept_inputs(file: Path = FILE) -> dict[str, dict[str, str]]:
    """Paper → what its kept predictions rest on."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {line["paper"]: line["inputs"] for line in lines if "inputs" in line}


def stale(file: Path = FILE) -> dict[str, list[str]]:
    """Paper → the inputs that have changed since its rows were predicted, or that the file says nothing of."""
    known = kept_inputs(file)
    found = {
        paper: [name for name, text in inputs(paper).items() if known.get(paper, {}).get(name) != text]
        for paper in PAPERS
    }
    return {paper: names for paper, names in found.items() if names}


def _short(value: object) -> object:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
