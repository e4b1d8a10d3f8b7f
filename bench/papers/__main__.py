"""`python -m bench.papers`: the planner beside the tables of the four papers.

Nothing is run but the planner: each figure's policy is a plan on the paper's machine as data. What it finds is kept
(`kept.py`), and the page and the picture are made of that. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.papers import flexgen, kept, pipo, powerinfer, scheinfer
from bench.papers.compare import (
    MEDIAN,
    Predicted,
    Predictor,
    Row,
    compare,
    memory_ratio_median,
    not_reproducible,
    once,
    speed_ratio_median,
    untested_causes,
)
from bench.papers.published import CONTRADICTIONS, FIGURES, PAPERS, Published, cells_of
from bench.papers.report import page, papers_of, plot, text
from bench.papers.traits import TRAITS, Traits


def _power_infer(row: Published, _: Traits) -> Predicted | None:
    """PowerInfer's systems have no traits."""
    return powerinfer.predicted(row)


PREDICTORS: dict[str, Predictor] = {
    "PIPO": pipo.predicted,
    "FlexGen": flexgen.predicted,
    "ScheInfer": scheinfer.predicted,
    "PowerInfer": _power_infer,
}


def of_paper(rows: list[Row]) -> dict[str, object]:
    """Medians of a paper's rows, turned so that above 1 is promised too fast; `within`: the bar on the first."""
    built = speed_ratio_median(rows, built=True)
    return {
        "rows": len(once(rows)),
        "speed_ratio_median": built,
        "judged_speed_ratio_median": speed_ratio_median([row for row in rows if row.judges], built=True),
        "as_penstock_ratio_median": speed_ratio_median(rows, built=False),
        "memory_ratio_median": memory_ratio_median(rows),
        "untested_causes": untested_causes(rows),
        "not_reproducible": not_reproducible(rows),
        "within": built is not None and MEDIAN[0] <= built <= MEDIAN[1],
    }


def keep(papers: Sequence[str], jobs: int, file: Path = kept.FILE) -> None:
    """Compares all figures of these papers, `jobs` papers at once, and keeps what is found beside what `file` has of
    the others."""
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(_compared, papers))
    known, hashes = (kept.read(file), kept.kept_inputs(file)) if file.exists() else (((), ()), {})
    rows = [row for row in known[0] if row.figure.paper not in papers]
    left_out = [each for each in known[1] if each.figure.paper not in papers]
    for new_rows, new_left_out in found:
        rows, left_out = [*rows, *new_rows], [*left_out, *new_left_out]
    hashes |= {paper: kept.inputs(paper) for paper in papers}
    kept.write((tuple(rows), tuple(left_out)), {paper: hashes[paper] for paper in PAPERS if paper in hashes}, file)


def the_page() -> str:
    """docs/PAPERS.md, of what is kept."""
    return page(*kept.read(), CONTRADICTIONS, TRAITS, list(cells_of("runs")))


def _compared(paper: str) -> kept.Compared:
    return compare([figure for figure in FIGURES if figure.paper == paper], PREDICTORS, TRAITS)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="where the picture goes; default none")
    parser.add_argument("--table", type=Path, help="where the page goes; default none")
    parser.add_argument("--jobs", type=int, default=2, help="papers that are compared at once")
    parser.add_argument("--only", nargs="*", choices=PAPERS, default=PAPERS, help="papers; others' rows stay as kept")
    wanted = parser.parse_args(argv)
    start_s = time.perf_counter()
    if wanted.only:
        keep(wanted.only, wanted.jobs)
    rows, left_out = kept.read()
    print(text(rows))
    for each in CONTRADICTIONS:
        print(f"{each.paper}, {each.where}: {each.says}; but {each.but}")
    if wanted.plot:
        plot(rows, wanted.plot)
    if wanted.table:
        wanted.table.parent.mkdir(parents=True, exist_ok=True)
        wanted.table.write_text(the_page(), encoding="utf-8")
    print(
        json.dumps(
            {
                "bench": "papers",
                "papers": {
                    paper: of_paper([row for row in rows if row.figure.paper == paper]) for paper in papers_of(rows)
                },
                "breaking_physics": sum(not row.respects_physics for row in rows),
                "far_off": sum(row.far_off for row in rows),
                "not_predicted": len(left_out),
                "took_s": time.perf_counter() - start_s,
                "rows": [row.to_json() for row in rows],
                "left_out": [each.to_json() for each in left_out],
            }
        )
    )


if __name__ == "__main__":
    main()
