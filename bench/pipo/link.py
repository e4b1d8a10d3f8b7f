"""PIPO's tables 4 to 6 with the leg over the link, which this machine has not: plans of the papers' page on PIPO's own
laptop, where every task is a wait (`bench.throughput_timed`). What is waited for shows the executor's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from bench.papers import pipo
from bench.papers.published import FIGURES, LAPTOP, Published
from bench.pipo.rounds import Row, show
from bench.throughput_timed import Run, all_timed
from penstock.planner.shorten import shortened

TABLES = ("Table 4", "Table 5", "Table 6")
LAYERS = 6  # so that all rows wait two minutes together


def link() -> list[Row]:
    """A row for each policy: a decode step's seconds a layer, simulated and waited for, and how many times as long
    FlexGen's order takes, beside what the paper has of whole answers."""
    figures = {(row.table, row.setting, row.system): row for row in _wanted()}
    runs = {key: _run(row) for key, row in figures.items()}
    found = dict(zip(runs, all_timed(list(runs.values())), strict=True))
    rows: list[Row] = []
    for (table, setting, system), timed in found.items():
        layer = timed["decode_layer_s"]
        row: Row = {"name": f"{table}, {setting}, {system}", **{f"{name}_layer_s": s for name, s in layer.items()}}
        row["off"] = layer["measured"] / layer["simulated"] - 1
        other = found.get((table, setting, "FlexGen"))
        if system == "PIPO" and other is not None:
            row["vs_flexgen"] = other["decode_layer_s"]["measured"] / layer["measured"]
            row["published_vs_flexgen"] = (
                figures[table, setting, system].value / figures[table, setting, "FlexGen"].value
            )
        rows.append(row)
    columns = {
        "simulated_layer_s": ("a layer, ms", 1e-3),
        "measured_layer_s": ("waited", 1e-3),
        "off": ("off, %", 0.01),
        "vs_flexgen": ("× FlexGen's order", 1.0),
        "published_vs_flexgen": ("published, whole answers", 1.0),
    }
    show("weights' and KV's homes over a link (tables 4 to 6), waits", rows, columns)
    return rows


def _wanted() -> Iterator[Published]:
    for row in FIGURES:
        if row.paper == "PIPO" and row.table in TABLES and row.metric == "throughput" and row.machine == LAPTOP:
            yield row


def _run(row: Published) -> Run:
    plan, ask, machine, _ = pipo.planned(pipo.policy_of(row, ()))
    few = shortened(plan, range(min(LAYERS, len(plan.target.spec.layers))))  # all are alike
    return Run(f"{row.table}, {row.setting}", row.system, few, ask, machine, 0.0)
