"""Measuring in turns: the machine drifts, so ratios are taken within a round, and all is told with its spread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench.cpu import spread

Figures = dict[str, float]
Turn = Callable[[], Figures]
Row = dict[str, Any]
Columns = dict[str, tuple[str, float]]  # by a row's key: heading, and what its figure is divided by


def in_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Figures]]:
    """What each gave, round by round; every other round goes backwards."""
    found: dict[str, list[Figures]] = {name: [] for name in turns}
    for i in range(rounds):
        for name in reversed(list(turns)) if i % 2 else turns:
            found[name].append(turns[name]())
    return found


def rows_of(
    found: Mapping[str, list[Figures]], against: Mapping[str, str | None], facts: Mapping[str, Row] | None = None
) -> list[Row]:
    """A row per name: of each figure median, least and most; of those that are rates (…_per_s) also `…_vs`: the median,
    least and most of what each round gives against the row that `against` names (None: against none). `facts`: what
    else is known of a row."""
    rows = []
    for name, figures in found.items():
        row: Row = {"name": name, **(facts or {}).get(name, {})}
        row |= {key: spread([f[key] for f in figures]) for key in figures[0]}
        row["by_round"] = figures
        base = against.get(name)
        if base is not None:
            row["against"] = base
            for key in figures[0]:
                if key.endswith("_per_s"):
                    row[f"{key}_vs"] = gains({"by_round": found[base]}, row, key)
        rows.append(row)
    return rows


def against_first(names: Mapping[str, object]) -> dict[str, str | None]:
    first = next(iter(names))
    return {name: None if name == first else first for name in names}


def show(title: str, rows: list[Row], columns: Columns) -> None:
    """An aligned table; spreads are shown as median (least–most)."""
    cells = [["", *(heading for heading, _ in columns.values())]]
    for row in rows:
        cells.append([row["name"], *(_cell(row.get(key), unit) for key, (_, unit) in columns.items())])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    print(f"\n{title}", file=sys.stderr)
    for line in cells:
        first, *others = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        others = [cell.strip().rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first, *others]), file=sys.stderr, flush=True)


def gains(before: Row, after: Row, key: str) -> Figures:
    """Of a figure over that of another row, round by round."""
    pairs = zip(after["by_round"], before["by_round"], strict=True)
    return spread([a[key] / b[key] for a, b in pairs])


def median_of(row: Row, key: str) -> float:
    return float(row[key]["median"])


def _cell(value: Any, unit: float) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict):
        return f"{_number(value['median'] / unit)} ({_number(value['min'] / unit)}–{_number(value['max'] / unit)})"
    return _number(value / unit) if isinstance(value, (int, float)) else str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
