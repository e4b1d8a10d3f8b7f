"""PIPO's settings and pipelines, as the comparison with its paper reads them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.papers.compare import (
    respects,
)
from bench.papers.pipo import bound, policy_of, simulated, together
from bench.papers.published import FIGURES
from penstock.planner.predict import predict
from penstock.planner.programs.pipo_memory import Configuration
from penstock.planner.solve import pipo
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from tests.pure.machine import LLAMA_1B, WITH_DEVICE
from tests.pure.test_bench_papers import pipos, rows


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
