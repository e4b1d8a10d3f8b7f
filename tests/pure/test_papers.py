"""The papers' figures: each names a machine and a shape that are there, and the most quoted ones stand as printed."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from bench.papers.published import (
    CONTRADICTIONS,
    FIGURES,
    METRICS,
    SEVERAL,
    TABLE_I,
    UNSUPPORTED,
    UNSUPPORTED_MACHINES,
    Published,
)
from bench.papers.stand_ins import STAND_INS
from penstock.serve import shapes
from penstock.spec import machine as machines
from penstock.units import GIB

MACHINES = Path(penstock.__file__).parent / "machines"
PAPERS = ("PIPO", "FlexGen", "ScheInfer", "PowerInfer")


def find(paper: str, table: str, **facts: object) -> list[Published]:
    found = [f for f in FIGURES if f.paper == paper and table in f.table]
    return [f for f in found if all(getattr(f, name) == value for name, value in facts.items())]


def one(paper: str, table: str, **facts: object) -> float:
    (figure,) = find(paper, table, **facts)
    return figure.value


def test_every_paper_has_its_figures() -> None:
    assert {figure.paper for figure in FIGURES} == set(PAPERS)
    counts = {(paper, table): len(find(paper, f"Table {table}")) for paper, table in (("PIPO", 6), ("FlexGen", 8))}
    # 12 rows of 3 figures; 9 parts of the time (KV is not read in prefill) and 2 shares.
    assert counts == {("PIPO", 6): 36, ("FlexGen", 8): 11}
    assert len(find("PIPO", "Table 1")) == 6 and len(find("PIPO", "Table 2")) == 4
    assert len(find("PIPO", "Table 3")) == 16
    assert len(find("PIPO", "Table 4")) == 12 and len(find("PIPO", "Table 5")) == 8
    assert len(find("FlexGen", "(Table 2)")) == 5 * 6 - 1 and len(find("FlexGen", "Table 3")) == 18
    assert len(find("FlexGen", "Table 4")) == 11  # without a disk 175B does not fit
    assert [len(find("ScheInfer", f"V-E{i}")) for i in (1, 2, 3, 4)] == [8, 8, 6, 6]
    assert [len(find("PowerInfer", f"Table {i}")) for i in (4, 8, 9)] == [9, 9, 3]


def test_a_figure_names_a_machine_and_a_shape() -> None:
    known = {path.stem for path in MACHINES.glob("*.json")}
    assert not known & set(UNSUPPORTED_MACHINES)
    assert not set(shapes.names()) & {*UNSUPPORTED, *STAND_INS}
    for figure in FIGURES:
        assert figure.machine in known or figure.machine in (SEVERAL, *UNSUPPORTED_MACHINES), figure
        assert figure.model in shapes.names() or figure.model in (SEVERAL, *UNSUPPORTED, *STAND_INS), figure


def test_what_is_not_supported_is_told_where_shapes_are_listed() -> None:
    text = (MACHINES.parent / "shapes" / "SOURCES.md").read_text(encoding="utf-8").lower()
    listed = {"falcon-relu-40b": "falcon(relu)-40b", "deepseek-r1-671b": "deepseek-r1 671b"}
    assert all(listed.get(name, name) in text for name in (*UNSUPPORTED, *STAND_INS))


def test_figures_are_sound() -> None:
    for figure in FIGURES:
        assert figure.metric in METRICS and figure.value > 0, figure
        assert figure.table and figure.setting and figure.system, figure
        assert bool(figure.against) == (figure.metric in ("speedup", "slowdown")), figure
        if figure.metric in ("share", "sparsity", "slowdown"):
            assert figure.value < 1, figure
        assert figure.weights in (None, "float16", "int4") and figure.kv in (None, "float16", "int4"), figure
        for count in (figure.prompt, figure.output, figure.batch, figure.device_memory_bytes, figure.host_memory_bytes):
            assert count is None or count > 0, figure


def test_no_figure_comes_twice() -> None:
    keys = [figure.key for figure in FIGURES]
    assert sorted(map(str, {key for key in keys if keys.count(key) > 1})) == []


def test_a_limit_is_within_its_machine() -> None:
    for figure in FIGURES:
        if figure.device_memory_bytes is not None and figure.machine != SEVERAL:
            text = (MACHINES / f"{figure.machine}.json").read_text(encoding="utf-8")
            assert figure.device_memory_bytes <= machines.loads(text, figure.machine).tier("gpu0").bytes + GIB


def test_pipo() -> None:
    laptop = {"machine": "laptop-rtx3060-6gb", "model": "llama-3.1-8b"}
    assert one("PIPO", "Table 3", system="PIPO", metric="decode_s", prompt=512, **laptop) == 0.837
    assert one("PIPO", "Table 3", system="FlexGen", metric="ttft_s", prompt=2048, **laptop) == 3.406
    on_disk = "weights on disk, KV on the device"
    assert one("PIPO", "Table 4", system="PIPO", setting=on_disk) == 16.982
    assert one("PIPO", "Table 6", system="PIPO", setting=on_disk, metric="throughput") == 6.729
    assert one("PIPO", "Table 2", system="PIPO", model="llama-3.1-70b") == 7.718
    # TTFT falls by 42.5% (appendix C.6); 66.4% of device memory for 11.2% of the speed (C.8).
    assert 1 - 1.218 / one("PIPO", "Table 3", system="FlexGen", metric="ttft_s", prompt=512) == pytest.approx(
        0.425, abs=1e-3
    )
    whole, lifted = (
        {f.metric: f.value for f in find("PIPO", "Table 6", system="PIPO", setting=f"weights {home}, KV on the device")}
        for home in ("on the device", "in RAM")
    )
    assert 1 - lifted["device_gb"] / whole["device_gb"] == pytest.approx(0.664, abs=1e-3)
    assert 1 - lifted["throughput"] / whole["throughput"] == pytest.approx(0.112, abs=1e-3)


def test_flexgen() -> None:
    best = {"system": "FlexGen", "model": "opt-175b", "metric": "throughput", "prompt": 512}
    assert one("FlexGen", "(Table 2)", **best) == 0.69
    assert one("FlexGen", "(Table 2)", **(best | {"system": "FlexGen (c)"})) == 1.12
    assert one("FlexGen", "Table 3", setting="a pipeline of 4 devices", **best) == 2.33
    (policy,) = find("FlexGen", "Table 4", setting="all optimisations", model="opt-30b")
    assert (policy.value, policy.batch) == (7.32, 144)
    seconds = {f.setting: f.value for f in find("FlexGen", "Table 8", metric="seconds")}
    assert seconds["prefill, compute"] / seconds["prefill, total"] == pytest.approx(0.82, abs=5e-3)
    assert seconds["decode, compute"] / seconds["decode, total"] == pytest.approx(0.13, abs=5e-3)
    # Not 0.69: one of the contradictions.
    assert 256 * 32 / (seconds["prefill, total"] + seconds["decode, total"]) == pytest.approx(0.58, abs=5e-3)


def test_scheinfer() -> None:
    assert one("ScheInfer", "abstract", setting="decode, most") == 1.80
    assert one("ScheInfer", "V-D", setting="decode, most") == 1.87
    assert one("ScheInfer", "V-E3", model="llama-2-70b", device_memory_bytes=32 * GIB) == 1.12
    assert one("ScheInfer", "V-E4", model="llama-2-70b", prompt=1024) == 45.6
    assert one("ScheInfer", "V-E2", metric="share", setting="best r_CG in decode, 16 threads") == 0.18
    fit = {(f.what, f.weights): f for f in TABLE_I if f.machine == "server-a6000-48gb"}
    cpu, link = fit["cpu", "int4"].beta_s, fit["link", ""].beta_s / 2
    assert cpu / (cpu + link) == pytest.approx(0.29, abs=5e-3)
    assert len(TABLE_I) == 18 and all(1 / f.beta_s > 15.75e9 for f in TABLE_I if f.what == "link")


def test_powerinfer() -> None:
    for model in ("relullama-13b", "falcon-relu-40b", "relullama-70b"):
        rows = find("PowerInfer", "Table 4", model=model)
        value = {(f.system, f.metric): f.value for f in rows}
        ratio = value["llama.cpp", "latency_s"] / value["PowerInfer", "latency_s"]
        assert value["PowerInfer", "speedup"] == pytest.approx(ratio, abs=0.01)
    assert one("PowerInfer", "Table 4", model="falcon-relu-40b", system="PowerInfer", metric="latency_s") == 56.48
    assert one("PowerInfer", "Figure 10", setting="most", metric="speedup") == 11.69
    assert one("PowerInfer", "Table 8", model="opt-30b", system="PowerInfer", metric="throughput") == 12.0
    assert one("PowerInfer", "Table 9", system="PowerInfer") == pytest.approx(0.01185)


def test_contradictions_say_what_is_taken() -> None:
    assert {c.paper for c in CONTRADICTIONS} == set(PAPERS)
    assert all(c.where and c.says and c.but for c in CONTRADICTIONS)
    assert len({(c.paper, c.where) for c in CONTRADICTIONS}) == len(CONTRADICTIONS)
