"""Attention to a query's best positions alone (`--attention top-k:SHARE`): what it adds up, that nothing depends on how
a plan cuts its work, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.graph.arenas import with_arenas
from penstock.graph.batch import Batch
from penstock.graph.check_plan import check_plan
from penstock.graph.ops import attend_cost
from penstock.planner.solve import solve
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask, value_share
from penstock.spec.model import Attention
from penstock.store.packed import Packed, open_packed
from penstock.units import MIB
from tests.cpu.attention_case import HEAD_DIM, Case
from tests.cpu.commands import MACHINE
from tests.cpu.engines import load, make_model, streaming

SAYS = SamplingParams(max_tokens=20, ignore_eos=True)


@given(
    st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(0, 300), st.integers(1, 5), st.sampled_from([0, 1, 70]),
    st.sampled_from([0.01, 0.1, 0.5, 0.99]), st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=30)
def test_the_best_positions_alone_count(
    heads: tuple[int, int], start: int, rows: int, window: int, share: float, seed: int
) -> None:
    case = Case(Attention(*heads, HEAD_DIM, 0.3, window=window), start, rows, seed)
    assert np.allclose(case.attend(share), case.naive(share), atol=1e-5)


@pytest.mark.parametrize("start", [0, 5, 63, 64, 300])
def test_all_positions_give_the_bits_of_no_choice(start: int) -> None:
    """So near to 1 that the share of the positions is all of them, a row by itself."""
    case = Case(Attention(4, 2, HEAD_DIM, 0.3), start, 1, start)
    assert np.array_equal(case.attend(0.9999), case.attend(1.0))


def test_of_equal_scores_the_earlier_positions_count() -> None:
    case = Case(Attention(1, 1, HEAD_DIM, 0.3), 9, 1, 1)
    case.q[:] = 0
    assert np.allclose(case.attend(0.3)[0, 0], case.v[:3, 0].mean(axis=0), atol=1e-6)


def test_a_nan_stays_one() -> None:
    case = Case(Attention(1, 1, HEAD_DIM, 0.3), 9, 1, 1)
    case.pools[0].store(int(case.table[0]), 0, 4, np.full((1, HEAD_DIM), np.nan, np.float32))
    with np.errstate(invalid="ignore"):
        assert np.isnan(case.attend(0.3)).all()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return open_packed(make_model(tmp_path_factory.mktemp("model"), "llama", "float32"))


IDS = [int(i) for i in np.random.default_rng(1).integers(1, 60, 90)]


def said(packed: Packed, plan: Any = None, **ask: Any) -> list[int]:
    with load(packed.folder, plan, context=128, **ask) as engine:
        return list(engine.generate([IDS], SAYS)[0].token_ids)


def test_text_does_not_depend_on_where_work_is_cut(packed: Packed) -> None:
    """In chunks of a prompt, from a ring, in several sequences: the same choice. And it is one: others say other
    things."""
    full, chosen = said(packed), said(packed, attention="top-k:0.1")
    assert said(packed, attention="top-k:1") == full != chosen
    for rows in (1, 7, 64):
        plan = with_arenas(replace(streaming(packed, chunk_rows=rows, context=128), value_share=0.1))
        check_plan(plan, packed.spec, packed.weights)
        assert said(packed, plan) == chosen
    with load(packed.folder, context=128, batch=2, attention="top-k:0.1") as engine:
        assert list(engine.generate([IDS, IDS[:40]], SAYS)[0].token_ids) == chosen


def test_beside_an_emulated_device_it_is_the_same(packed: Packed) -> None:
    ask = Ask(context=128, device_memory_bytes=64 * MIB, use_device=True, attention="top-k:0.1")
    engine = Engine.load(packed.folder, ask, Loading(machine=MACHINE, device="emulated"))
    try:
        assert engine.plan.value_share == 0.1 and engine.plan.kv[0].attend == "gpu0"
        assert list(engine.generate([IDS], SAYS)[0].token_ids) == said(packed, attention="top-k:0.1")
    finally:
        engine.close()


def test_bytes_and_operations_are_counted() -> None:
    a, batch = Attention(8, 2, 64, 1.0), Batch(0, (0, 1), (999, 999), (1, 1), ())
    whole, flops = attend_cost(a, 2, batch, 128)
    nbytes, fewer = attend_cost(a, 2, batch, 128, 0.1)
    # All keys, and of the values what four queries read that choose by chance.
    assert (nbytes, fewer) == (round(whole / 2 * (2 - 0.9**4)), round(flops * 0.55))
    assert attend_cost(a, 2, batch, 128, 1.0) == (whole, flops)


def test_a_plan_for_fewer_values_keeps_kv_in_memory(packed: Packed) -> None:
    """Where whole contexts would not fit, KV does not go to the disk."""
    ask = Ask(context=256, batch=4, attention="top-k:0.5")
    found = solve(ask, packed.spec, packed.weights, MACHINE)
    assert found.plan.value_share == 0.5 and all(home.home == home.attend for home in found.plan.kv)
    assert any("values of its best 0.5" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    "attention", ["", "top-k", "top-k:", "top-k:0", "top-k:1.5", "top-k:nan", "top-k:x", "all:0.1"]
)
def test_other_words_are_refused(attention: str) -> None:
    with pytest.raises(BadRequest, match="should be full, or top-k"):
        Ask(attention=attention)
    assert value_share("top-k:1") == value_share("full") == 1.0


def test_where_it_cannot_run_it_is_refused_by_name(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"attention top-k:0\.1 reads single values where attention runs"):
        Ask(attention="top-k:0.1", kv_home="disk")
    plan = solve(Ask(context=128, kv_home="disk"), packed.spec, packed.weights, MACHINE).plan
    with pytest.raises(BadRequest, match="KV does not live where attention runs"):
        check_plan(replace(plan, value_share=0.5), packed.spec, packed.weights)
    with pytest.raises(BadRequest, match="value_share is 0"):
        check_plan(replace(plan, value_share=0.0), packed.spec, packed.weights)
