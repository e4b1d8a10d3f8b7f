"""`python -m bench.papers.fit`: the numbers of traits that are fitted, by half of each paper's tables.

Each fitted trait takes the value, of a grid, with the least sum of |log(promised speed / printed speed)| over the rows
of the drawn tables that are its system's or against it: one trait after the other, in turns until nothing changes.
Rows of other tables are not looked at, and numbers by hand stay. It prints the lines of `data/traits.tsv`; nothing is
written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bench.papers import flexgen, pipo
from bench.papers.compare import Predictor, compare, once, speed_ratio
from bench.papers.published import FIGURES, Published
from bench.papers.traits import TRAITS, Trait, Traits, drawn_tables

PREDICTORS: dict[str, Predictor] = {"PIPO": pipo.predicted, "FlexGen": flexgen.predicted}
STEPS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 3.3)  # of a number, in a turn
TURNS = 4


def error(traits: Traits, figures: Iterable[Published]) -> float:
    """Sum of |log| of the speed ratios."""
    total = 0.0
    for figure in figures:
        found = PREDICTORS[figure.paper](figure, traits)
        ratio = speed_ratio(figure, found.value) if found else None
        total += abs(math.log(ratio)) if ratio else 0.0
    return total


def rows_of(paper: str) -> list[Published]:
    """Rows that fit the paper's traits: once each, and none that no machine of their kind can reach."""
    tables = drawn_tables(paper)
    rows, _ = compare([f for f in FIGURES if f.paper == paper and f.table in tables], PREDICTORS, ())
    return [row.figure for row in once(rows)]


def fitted(traits: Traits, paper: str) -> Traits:
    """With the numbers of the paper's fitted traits chosen."""
    mine = rows_of(paper)
    found = list(traits)
    for _ in range(TURNS):
        before = tuple(found)
        for i, trait in enumerate(found):
            if trait.paper == paper and trait.fitted:
                rows = [f for f in mine if trait.system in (f.system.removesuffix(" (c)"), f.against)]
                tries = [trait._replace(value=rounded(trait.value * step)) for step in STEPS]
                errors = [error((*found[:i], tried, *found[i + 1 :]), rows) for tried in tries]
                found[i] = tries[errors.index(min(errors))]
        print(paper, *(f"{trait.value:g}" for trait in found if trait.paper == paper), flush=True)
        if tuple(found) == before:
            break
    return tuple(found)


def rounded(value: float) -> float:
    return float(f"{value:.2g}")


def line(trait: Trait) -> str:
    tables = "; ".join(trait.tables)
    return "\t".join((trait.paper, trait.system, trait.kind, f"{trait.value:g}", trait.how, tables, trait.source))


def main() -> None:
    traits = TRAITS
    for paper in PREDICTORS:
        traits = fitted(traits, paper)
    print("\n".join(map(line, traits)))


if __name__ == "__main__":
    main()
