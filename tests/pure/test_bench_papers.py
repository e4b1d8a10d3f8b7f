"""The planner beside the papers' tables: shape of the report, direction of physics, explained outliers, the median.

The whole comparison takes many minutes, so these tests read what `make bench-papers` kept of it, and predict a few rows
anew. `make fuzz` predicts all.
"""

from __future__ import annotations

import json
import os
import random
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.papers import __main__ as reporting
from bench.papers import compare as comparing
from bench.papers import kept
from bench.papers.__main__ import PREDICTORS, main
from bench.papers.compare import (
    MEDIAN,
    SMALLER_IS_BETTER,
    SPEEDS,
    LeftOut,
    Predicted,
    Row,
    compare,
    is_beyond,
    memory_ratio_median,
    model_of,
    not_reproducible,
    once,
    respects,
    speed_ratio_median,
    untested_causes,
)
from bench.papers.pipo import NOT_PREDICTED, bound, policy_of, simulated, together
from bench.papers.published import CAUSES, CONTRADICTIONS, FIGURES, METRICS, SEVERAL, Published, cause_of
from bench.papers.report import page, plot, text
from bench.papers.stand_ins import STAND_INS, dense, sparing, wanted
from bench.papers.traits import HOW, KINDS, TRAITS, Traits, applied, drawn_tables, fitting_tables, of_system
from penstock.errors import DoesNotFit
from penstock.planner.predict import predict
from penstock.planner.programs.pipo_memory import Configuration
from penstock.planner.solve import pipo
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.parts import parts
from tests.pure.machine import LLAMA_1B, WITH_DEVICE

# Far-off rows whose cause is told, but whose undoing does not bring them within 1.5: docs/PAPERS.md says which.
UNTESTED = {"PIPO": 4, "FlexGen": 7, "ScheInfer": 3, "PowerInfer": 10}

# Rows that are predicted anew, of each paper: those of one plan or few.
ANEW = 2
QUICK = {
    "PIPO": ("Table 1", "Table 2", "Table 3", "Table 4", "Table 5"),
    "FlexGen": ("throughput (Table 2)", "Table 3"),
    "ScheInfer": ("section V-E3", "section V-E4"),
    "PowerInfer": ("Table 4", "Table 8"),
}


@cache
def compared() -> tuple[tuple[Row, ...], tuple[LeftOut, ...]]:
    return kept.read()


def rows() -> tuple[Row, ...]:
    return compared()[0]


def is_quick(figure: Published) -> bool:
    small = figure.paper != "FlexGen" or figure.model == "opt-6.7b"  # others search seconds for a policy
    return small and figure.model != SEVERAL and figure.table in QUICK[figure.paper]


def pipos(table: str, metric: str = "throughput", system: str = "PIPO") -> dict[str, Row]:
    wanted = ("PIPO", table, metric, system)
    return {
        row.figure.setting if table != "Table 3" else str(row.figure.prompt): row
        for row in rows()
        if (row.figure.paper, row.figure.table, row.figure.metric, row.figure.system) == wanted
    }


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_better_than_physics(metric: str) -> None:
    """A time is better where it is smaller; two hundredths are rounding."""
    better, worse = (0.9, 1.1) if metric in SMALLER_IS_BETTER else (1.1, 0.9)
    assert not respects(metric, better * 5, 5) and respects(metric, worse * 5, 5)
    assert respects(metric, 5 * (1 + (better - 1) / 10), 5)
    assert respects(metric, 1e-9, None) and respects(metric, 1e9, None)


def test_figures_that_break_physics_are_not_in_the_median() -> None:
    figures = [replace(FIGURES[0], setting=str(i), value=float(i)) for i in (1, 3, 10)]

    def predictor(row: Published, traits: Traits) -> Predicted | None:
        return None if row.value == 10 else Predicted(3.0 if traits else 4.0, 1.5)

    found, left_out = compare([*figures, replace(FIGURES[-1])], {"PIPO": predictor}, TRAITS)
    assert [row.respects_physics for row in found] == [True, False] and left_out == (LeftOut(figures[2], ""),)
    assert (speed_ratio_median(found, built=True), speed_ratio_median(found, built=False)) == (3.0, 4.0)
    assert [row.far_off for row in found] == [True, False]
    judging = "–" if found[0].figure.table in fitting_tables("PIPO") else "3.00"
    assert f"| PIPO | 1 | 3.00 | {judging} | 4.00 | – | 1 | {untested_causes(found)} | 0 | 1 |" in page(
        found, left_out, (), ()
    )
    assert "**!** bound 1.5" in page(found, left_out, (), ())


def test_above_one_is_promised_too_fast_of_times_as_of_speeds() -> None:
    speed, seconds, memory = (
        Row(replace(FIGURES[0], metric=metric, value=2.0), predicted, predicted / 2, None, True, True, None, "")
        for metric, predicted in (("throughput", 3.0), ("ttft_s", 1.0), ("host_gb", 1.0))
    )
    assert [each.speed_ratio(built=False) for each in (speed, seconds, memory)] == [1.5, 2.0, None]
    assert [each.speed_ratio(built=True) for each in (speed, seconds, memory)] == [0.75, 4.0, None]
    again = replace(speed, figure=replace(speed.figure, table="another", setting="told otherwise"))
    broken = replace(seconds, figure=replace(seconds.figure, value=1e-3), respects_physics=False)
    every = (speed, again, seconds, memory, broken)
    assert once(every) == (speed, seconds, memory)
    assert (speed_ratio_median(every, built=False), memory_ratio_median(every)) == (1.75, 0.5)
    assert speed_ratio_median([memory], built=True) is None is memory_ratio_median([speed])
    stands_in = replace(speed, is_policy=False)
    assert speed_ratio_median([stands_in, seconds], built=False) == 2.0
    assert speed_ratio_median([stands_in, seconds], built=True) == pytest.approx(2.375)


# -- what is kept ----------------------------------------------------------------------------------------


def same(rows: tuple[Row, ...], left_out: tuple[LeftOut, ...]) -> None:
    """These, predicted anew, are what is kept of their figures."""
    known = {each.figure: each for each in (*compared()[0], *compared()[1])}
    for row in rows:
        was = known[row.figure]
        assert isinstance(was, Row), row
        for name in (field.name for field in fields(Row)):
            now, then = getattr(row, name), getattr(was, name)
            assert then == (pytest.approx(now, rel=1e-6) if isinstance(now, float) else now), (name, row, STALE)
    assert all(known[each.figure] == each for each in left_out)


STALE = "bench/papers/data/compared.jsonl is of another state: make bench-papers"


def test_what_is_kept_is_of_these_figures() -> None:
    assert kept.stale() == {}, STALE


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    kept.write(compared(), {"PIPO": kept.inputs("PIPO")}, file)
    assert kept.read(file) == compared()
    assert set(kept.stale(file)) == set(PREDICTORS) - {"PIPO"}
    changed = file.read_text().replace(kept.inputs("PIPO")["traits"], "0")
    file.write_text(changed)
    assert kept.stale(file)["PIPO"] == ["traits"]


def test_other_papers_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of papers that are not asked for."""
    file = tmp_path / "some.jsonl"
    kept.write(compared(), {paper: {"figures": "0"} for paper in PREDICTORS}, file)
    monkeypatch.setattr(reporting, "ProcessPoolExecutor", lambda _: nullcontext(SimpleNamespace(map=map)))
    monkeypatch.setattr(reporting, "_compared", lambda paper: ((), ()))
    reporting.keep(["PIPO"], 1, file)
    found, left_out = kept.read(file)
    assert found == tuple(row for row in rows() if row.figure.paper != "PIPO")
    assert left_out == tuple(each for each in compared()[1] if each.figure.paper != "PIPO")
    assert kept.kept_inputs(file)["PIPO"] == kept.inputs("PIPO")
    assert kept.kept_inputs(file)["FlexGen"] == {"figures": "0"}


@pytest.mark.parametrize("paper", QUICK)
def test_some_rows_predicted_anew(paper: str) -> None:
    mine = [figure for figure in FIGURES if figure.paper == paper and is_quick(figure)]
    same(*compare(random.Random(0).sample(mine, ANEW), PREDICTORS, TRAITS))


@pytest.mark.fuzz
@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "fuzz", reason="make fuzz predicts all rows anew")
@pytest.mark.parametrize("paper", PREDICTORS)
def test_all_rows_predicted_anew(paper: str) -> None:
    same(*compare([figure for figure in FIGURES if figure.paper == paper], PREDICTORS, TRAITS))


def test_the_page_is_of_what_is_kept() -> None:
    shown = (Path(reporting.__file__).parents[2] / "docs" / "PAPERS.md").read_text(encoding="utf-8")
    assert shown == reporting.the_page(), STALE


# -- rows ------------------------------------------------------------------------------------------------


def test_every_outlier_is_explained() -> None:
    assert [row.figure for row in rows() if row.far_off and not row.note] == []


def test_every_figure_is_there_or_left_out() -> None:
    found, left_out = compared()
    assert len(found) + len(left_out) == sum(figure.paper in PREDICTORS for figure in FIGURES)
    for figure, cause in ((each.figure, each.cause) for each in left_out):
        assert "experts" not in cause, figure
        if figure.paper == "PIPO":
            assert figure.setting in NOT_PREDICTED
    assert all(figure.model not in STAND_INS or figure.metric not in SPEEDS for figure in absent_of(left_out))


# -- models with experts --------------------------------------------------------------------------------


def absent_of(left_out: tuple[LeftOut, ...]) -> list[Published]:
    """Figures without a prediction, but for spreads over tokens and what runs on another machine."""
    return [
        each.figure
        for each in left_out
        if "percentile" not in each.figure.setting and "A100" not in each.figure.against
    ]


def mixtral() -> Published:
    (row,) = [row for row in FIGURES if row.paper == "PIPO" and row.model == "mixtral-8x7b"]
    return row


def test_what_the_planner_refuses_is_left_out_with_its_words() -> None:
    def predictor(row: Published, traits: Traits) -> Predicted | None:
        raise DoesNotFit("too little", tier="gpu0", need_bytes=2, have_bytes=1, minimum_bytes=2)

    (found,) = compare([mixtral()], {"PIPO": predictor}, TRAITS)[1]
    assert found == LeftOut(mixtral(), "too little")
    assert found.to_json()["predicted"] is None and found.to_json()["cause"] == "too little"
    shown = page((Row(FIGURES[0], 1.0, 1.0, None, True, True, None, ""),), (found,), (), ())
    assert "Not predicted: appendix C.4, weights on disk, KV on the device (mixtral-8x7b: too little)." in shown


def test_a_dense_model_stands_for_the_experts_that_rows_go_to() -> None:
    """Mixtral: one row reads 2 of 8 experts, many rows all of them, and each row is multiplied by 2."""
    spec = model_of("mixtral-8x7b")[0]
    assert [dense(spec, rows).layers[0].ffns[0].neurons / 14336 for rows in (1, 1024, 0)] == [2, 8, 8]
    routed = spec.layers[0].routed
    assert routed is not None and wanted(routed, 2) == pytest.approx(2 + 2 * 6 / 8)
    machine = comparing.machine_of("laptop-rtx3060-6gb")
    for rows, share in ((1, 1.0), (1024, 0.25)):
        there = sparing(machine, spec, rows)
        for lane in ("gpu0", "host"):
            before, after = (each.rate(lane, "ffn", "int4", rows) for each in (machine, there))
            assert after.s_per_flop == pytest.approx(share * before.s_per_flop)
            assert after.s_per_byte == before.s_per_byte
            assert there.rate(lane, "qkv", "int4", rows) == machine.rate(lane, "qkv", "int4", rows)


def test_stand_ins_have_the_weights_that_are_published() -> None:
    published = {"deepseek-r1-671b": 671.0, "bamboo-7b": 7.25, "falcon-relu-40b": 41.3}
    assert set(published) == set(STAND_INS)
    for name, thousands_of_millions in published.items():
        spec, _ = model_of(name)
        weights = sum(part.weights_of(0, part.granules) for part in parts(spec, parse_format("int8")))
        assert weights / 1e9 == pytest.approx(thousands_of_millions, rel=0.002), name
        assert spec.fires == (name != "deepseek-r1-671b")


def test_the_two_models_of_the_largest_figure_are_predicted() -> None:
    """PIPO's appendix C.4 states no batch: its note says which is assumed, and within its bound no figure breaks
    physics."""
    found = {
        row.figure.model: row for row in rows() if (row.figure.paper, row.figure.table) == ("PIPO", "appendix C.4")
    }
    assert set(found) == {"mixtral-8x7b", "deepseek-r1-671b"}
    for model, batch in (("mixtral-8x7b", 32), ("deepseek-r1-671b", 1)):
        row = found[model]
        assert 0 < row.as_built <= row.predicted and row.bound is not None
        assert row.predicted < row.bound and row.respects_physics
        assert f"batch {batch} assumed" in row.note and "experts" in row.note


def test_a_bound_counts_the_experts_of_a_token() -> None:
    """2 of Mixtral's 8: 12.75e9 weights but the embedding's, in 4 bits 6.37 GB over a disk's 7.88 GB/s."""
    row = mixtral()
    assert model_of("mixtral-8x7b")[0].layers[0].active == 2
    alone = bound(row, policy_of(row, ()), 1)
    assert alone == pytest.approx(7.88e9 / (12.75e9 / 2), rel=0.005)
    assert not respects("throughput", row.value, alone)  # so its batch was larger


def test_the_medians() -> None:
    """As they were built, speeds of each paper are right at the median; in the tables that had no say in it too."""
    assert set(PREDICTORS) == {figure.paper for figure in FIGURES}
    for paper in PREDICTORS:
        mine = [row for row in rows() if row.figure.paper == paper]
        for judged in (mine, [row for row in mine if row.judges]):
            found = speed_ratio_median(judged, built=True)
            assert found is not None and MEDIAN[0] <= found <= MEDIAN[1], (paper, found)


def test_pipos_outliers_have_a_cause() -> None:
    """Not an assumption alone. Figures that no policy can reproduce have theirs wherever the prediction lies."""
    assert any(row.far_off for row in rows() if row.figure.paper == "PIPO")
    for row in rows():
        if row.figure.paper == "PIPO":
            told = any(cause.text in row.note for cause in CAUSES if cause.paper == "PIPO")
            assert told == (row.far_off or is_beyond(row.figure)), row


# -- traits ----------------------------------------------------------------------------------------------


def test_traits_are_of_kinds_and_have_sources() -> None:
    assert {trait.kind for trait in TRAITS} <= set(KINDS)
    assert all(trait.value > 0 and len(trait.source) > 20 for trait in TRAITS)
    assert {trait.how for trait in TRAITS} == set(HOW)
    for trait in TRAITS:
        assert (trait.how == "by hand") == bool(trait.tables), trait
        assert set(trait.tables) <= {f.table for f in FIGURES if f.paper == trait.paper}, trait
    assert len({(t.paper, t.system, t.kind) for t in TRAITS}) == len(TRAITS)
    systems = {(f.paper, f.system.removesuffix(" (c)")) for f in FIGURES}
    assert {(trait.paper, trait.system) for trait in TRAITS} <= systems
    for cause in CAUSES:
        assert cause.kinds <= set(KINDS), cause


def test_half_of_the_tables_fit() -> None:
    """And those that somebody looked at for a number by hand. The others judge."""
    for paper in ("PIPO", "FlexGen"):
        tables = {figure.table for figure in FIGURES if figure.paper == paper}
        assert fitting_tables(paper) < tables and len(drawn_tables(paper)) == (len(tables) + 1) // 2
    for paper in ("ScheInfer", "PowerInfer"):
        assert drawn_tables(paper) == frozenset()  # no number is fitted there
    for paper in PREDICTORS:
        looked_at = {table for trait in TRAITS if trait.paper == paper for table in trait.tables}
        assert fitting_tables(paper) == drawn_tables(paper) | looked_at
    assert fitting_tables("ScheInfer") == {"section V-E4"} and fitting_tables("PowerInfer") == frozenset()
    assert not any(row.judges for row in rows() if row.figure.table == "section V-E4")


def test_the_page_tells_how_a_number_was_chosen() -> None:
    shown = page((), (), (), TRAITS)
    assert shown.count("| stated |") == sum(trait.how == "stated" for trait in TRAITS)
    assert shown.count("| fitted |") == sum(trait.fitted for trait in TRAITS)
    assert "| 0.65 | by hand by section V-E4 |" in shown and "| 1.3e+11 | by hand by Table 1 and Table 5 |" in shown


def test_each_kind_changes_what_it_names() -> None:
    machine = comparing.machine_of("cloud-t4-208gb")
    (reads,) = [t for t in of_system(TRAITS, "FlexGen", "FlexGen (c)") if t.kind == "disk reads, bytes/s"]
    slow = applied(machine, (reads._replace(value=1e9),))
    changed = [a.lane for a, b in zip(machine.rates, slow.rates, strict=True) if a != b]
    assert changed == ["disk0"] and slow.rate("disk0", "load", "*").s_per_byte == 1e-9
    for kind in KINDS:
        other = applied(machine, (reads._replace(kind=kind, value=3.0),))
        assert other != machine and other.tiers == machine.tiers
    unpacked = applied(machine, (reads._replace(kind="unpacking, copies in half precision", value=2.0),))
    half = machine.rate("gpu0", "ffn", "float16").s_per_byte
    more = unpacked.rate("gpu0", "ffn", "int4").s_per_byte - machine.rate("gpu0", "ffn", "int4").s_per_byte
    assert more == pytest.approx(2 * 16 / 4 * half)
    assert unpacked.rate("gpu0", "ffn", "float16") == machine.rate("gpu0", "ffn", "float16")


def test_an_ablation_has_a_prediction_of_each_part() -> None:
    """PIPO's Figure 9: as penstock would run it there is one policy. As it was built the pipeline alone is quicker than
    FlexGen, and its transfers add to that. Its kernels change nothing that is seen, within 5 %: a pass from the disk
    hides them, as the traits have them, where the paper has a tenth more."""
    parts = [row for row in rows() if row.figure.table.startswith("Figure 9")]
    assert [row.is_policy for row in parts] == [False, False, True]
    built = [row.as_built for row in parts]
    assert 1 < built[0] < built[1] and len({row.predicted for row in parts}) == 1
    assert built[2] == pytest.approx(built[1], rel=0.05)


def test_a_cause_that_is_told_is_undone() -> None:
    """Traits that a cause names, and what it reads where the paper does not say it, bring the row near, or it counts
    as untested. Predicted here again for some rows, with the cells of the cause's own row alone."""
    told = [row for row in rows() if row.undone is not None]
    assert any(row.cause_tested for row in told) and not all(row.cause_tested for row in told)
    quick = [row for row in told if is_quick(row.figure)]
    for row in random.Random(0).sample(quick, 4):
        why = cause_of(row.figure)
        assert why is not None and row.far_off
        cells: dict[str, Any] = {name: int(cell) if cell.isdecimal() else cell for name, cell in why.reading.items()}
        named = tuple(trait for trait in TRAITS if trait.kind in why.kinds)
        undone = PREDICTORS[row.figure.paper](replace(row.figure, **cells), named)
        assert undone is not None and row.undone == pytest.approx(undone.value), row
        assert row.cause_tested == (2 / 3 <= undone.value / row.figure.value <= 1.5), row
    nameless = [
        row for row in rows() if row.far_off and ((why := cause_of(row.figure)) is None or not why.can_be_undone)
    ]
    assert nameless and not any(row.cause_tested or row.undone is not None for row in nameless)
    wanted = [row for row in once(nameless) if not is_beyond(row.figure)]
    assert untested_causes(rows()) >= len(wanted) > 0


def test_a_refusal_of_the_changed_reading_is_no_end() -> None:
    """The planner may refuse the batch that a cause reads: the row stays, and its cause is untested."""
    figure = next(f for f in FIGURES if (f.paper, f.table) == ("PIPO", "Table 1") and f.model == "llama-3.1-70b")
    why = cause_of(figure)
    assert why is not None and why.reading == {"batch": "5"} and figure.batch is None

    def predictor(row: Published, traits: Traits) -> Predicted | None:
        if row.batch == 5:
            raise DoesNotFit("too little", tier="gpu0", need_bytes=2, have_bytes=1, minimum_bytes=2)
        return Predicted(2 * row.value, None)

    (row,), left_out = compare([figure], {"PIPO": predictor}, TRAITS)
    assert left_out == () and row.far_off and row.undone is None and not row.cause_tested
    assert untested_causes([row]) == 1


def test_few_causes_are_untested() -> None:
    found = {paper: untested_causes([row for row in rows() if row.figure.paper == paper]) for paper in PREDICTORS}
    assert all(count <= UNTESTED[paper] for paper, count in found.items()), found
    assert reporting.the_page().count("**cause unknown** |") == sum(map(comparing.is_unknown, rows()))


def test_one_reading_holds_for_a_table() -> None:
    """What a paper does not say is said once for all rows of a table that it is asked for, and they follow."""
    readings: dict[tuple[str, str], set[str]] = {}
    for cause in CAUSES:
        for name, value in cause.reading.items():
            if name in ("batch", "weights") and "model" not in cause.reading:
                readings.setdefault((cause.where["table"], name), set()).add(value)
    assert readings and all(len(values) == 1 for values in readings.values())
    for cause in CAUSES:
        if cause.reading and cause.paper == "PIPO":
            mine = [row for row in rows() if row.far_off and cause_of(row.figure) == cause]
            follow = [row.cause_tested for row in mine]
            assert mine and (all(follow) if "all far-off rows of" in cause.text else any(follow)), cause
    for table in ("Table 1", "Table 2"):
        claimed = [cause for cause in CAUSES if cause.paper == "PIPO" and cause.where["table"] == table]
        assert any("all far-off rows of" in cause.text for cause in claimed)


def test_no_policy_can() -> None:
    """Such rows are marked, are no causes, and are the machine's whole memory, or what is said to be another model.
    They are so by their cause: a prediction that happens to be near is one too, and in no median as penstock."""
    rows_of = [row for row in rows() if (why := cause_of(row.figure)) is not None and why.cannot]
    assert rows_of and not any(row.is_policy or row.cause_tested for row in rows_of)
    assert all(is_beyond(row.figure) and row.note for row in rows_of)
    assert not_reproducible(rows()) == sum(row.far_off for row in once(rows_of))
    for figure in {row.figure for row in rows_of}:
        for times in (1.0, 3.0):
            assert not comparing.explained(figure, times * figure.value, None).is_policy


def test_causes_are_of_rows_whose_prediction_they_can_change() -> None:
    """ScheInfer's trait is of prompts alone, so decode has not it for a cause."""
    for row in (figure for figure in FIGURES if figure.paper == "ScheInfer"):
        why = cause_of(row)
        assert (why is not None) == ("prefill" in row.setting or "prompt and answer" in row.setting), row


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "--table", str(tmp_path / "new" / "PAPERS.md")])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert {"bench", "rows", "papers", "breaking_physics"} <= set(report)
    assert set(report["papers"]) == set(PREDICTORS)
    names = {"rows", "speed_ratio_median", "as_penstock_ratio_median", "memory_ratio_median", "untested_causes"}
    assert all(names <= set(paper) and paper["within"] for paper in report["papers"].values())
    assert len(report["left_out"]) == report["not_predicted"] > 0
    assert all(each["predicted"] is None and each["published"] > 0 for each in report["left_out"])
    wanted = {"paper", "table", "setting", "predicted", "published", "ratio", "respects_physics", "note"}
    for row in report["rows"]:
        assert wanted <= set(row)
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"]) and row["ratio"] > 0
    assert any(line.startswith("PIPO, Table 3") for line in lines)
    written = (tmp_path / "new" / "PAPERS.md").read_text()
    assert "## PIPO" in written and "### Table 6" in written and "Not predicted: " in written
    assert all(each.where in written for each in CONTRADICTIONS)


def test_the_page_holds_every_row() -> None:
    shown = page(rows(), (), (), ())
    assert sum(line.startswith("| ") for line in shown.splitlines()) >= len(rows())
    assert all(f"### {row.figure.table}" in shown for row in rows())
    assert len(text(rows()).splitlines()) > len(rows())


def test_a_picture_of_the_same_rows_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot(rows()[::8], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# -- PIPO ---------------------------------------------------------------------------------------------


def test_policies_of_settings() -> None:
    of = {
        row.setting: policy_of(row, ())
        for row in FIGURES
        if row.paper == "PIPO" and row.table in ("Table 2", "Table 5")
    }
    partly = of["weights 40% on the device, 60% in RAM"]
    assert (partly.home, partly.share, partly.kv_home, partly.batch) == ("host", 0.4, "host", 4)
    disk = of["weights on disk, KV on the device"]
    assert (disk.home, disk.share, disk.kv_home) == ("disk0", 0.0, "gpu0")
    assert {policy.order for policy in of.values()} == {"overlapped"}  # PIPO's rows come after FlexGen's


def test_the_orders_of_the_papers_tables() -> None:
    """Nearer homes are faster, PIPO is at least as fast as FlexGen, FlexGen loses most from the disk."""
    for table in ("Table 4", "Table 5", "Table 6"):
        pipo_rows, flexgen = pipos(table), pipos(table, system="FlexGen")
        speeds = [row.predicted for row in pipo_rows.values()]
        assert all(far <= 1.0001 * near for near, far in pairwise(speeds))
        gains = {setting: row.predicted / flexgen[setting].predicted for setting, row in pipo_rows.items()}
        assert min(gains.values()) > 0.999
        assert max(gains, key=lambda setting: gains[setting]).startswith("weights on disk")


def test_a_prompt_takes_longer_the_longer_it_is() -> None:
    for system in ("PIPO", "FlexGen"):
        first = [row.predicted for row in pipos("Table 3", "ttft_s", system).values()]
        assert first == sorted(first)


def test_bounds_by_hand() -> None:
    """Weights of LLaMA-3.1-8B but the embedding: 7.504e9; in 4 bits 3.752 GB over a disk's 7.88 GB/s. PCIe 4.0 x16 lets
    one token of LLaMA-3.1-70B pass in 1.1 s, 60% of it in 0.66."""
    (decode,) = [row for row in FIGURES if row.table == "Table 3" and row.metric == "decode_s"][1:2]
    assert decode.system == "PIPO"
    assert bound(decode, policy_of(decode, ()), 1) == pytest.approx(3.752e9 / 7.88e9, rel=2e-3)
    partly = next(row for row in FIGURES if row.table == "Table 2" and row.system == "PIPO")
    alone = bound(partly, policy_of(partly, ()), 1)
    assert alone == pytest.approx(1 / 0.66, rel=0.01) and not respects("throughput", partly.value, alone)


def test_a_share_that_does_not_fit_is_less() -> None:
    """45% of OPT-30B in FP16 is 27 GB: more than an RTX 4090 has."""
    row = next(row for row in rows() if row.figure.model == "opt-30b" and "45%" in row.figure.setting)
    speeds, share = simulated(policy_of(row.figure, ()))
    assert share < 0.45 and f"{share:.0%} there" in row.note
    assert speeds.tier_bytes["gpu0"] <= 24 << 30


def test_together_is_what_predict_says() -> None:
    for batch in (1, 4):
        ask = Ask(prompt_tokens=128, output_tokens=32, batch=batch, context=160)
        problem = Problem(ask, LLAMA_1B, parse_format("int4"), WITH_DEVICE)
        plan = pipo.plan(problem, Configuration("host", "overlapped"), "host", 128 * batch)
        found, expected = together(plan, ask, WITH_DEVICE), predict(plan, ask, WITH_DEVICE, spread=False)
        assert found.step_s == pytest.approx(batch / expected.decode_tokens_per_s, rel=0.01)
        assert found.ttft_s == pytest.approx(expected.ttft_s, rel=0.01)
        assert 0 < found.device_share(32) < 1
