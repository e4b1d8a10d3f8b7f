"""Plans that leave out neurons which do not fire: what they count on, and that no bound is above a prediction."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import BadRequest, DoesNotFit
from penstock.graph import ops
from penstock.graph.lower import Lowering
from penstock.graph.passes import decode
from penstock.graph.scratch_gpu import FEW_ROWS
from penstock.planner.bound import least_score_s, score_s
from penstock.planner.cost import Cost
from penstock.planner.firing import Firing, Foretold, expected, measured
from penstock.planner.routing import stated_firing
from penstock.planner.solve import solve
from penstock.planner.solve.refusal import require_minimum
from penstock.planner.what_if import what_if
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.model import FfnSpec
from penstock.spec.parts import parts
from penstock.spec.places import HOST
from penstock.spec.plan import Plan, Predictor
from penstock.spec.predictors import FORMAT
from penstock.spec.profile import FIRED_TOGETHER, FiringCounts, Profile
from tests.pure.machine import MACHINE, WITH_DEVICE, model

NEURONS, TILES = parse_format("int4-neurons"), parse_format("int4")
OPT, _ = describe(Path("opt-1.3b"), to_plan=True)
LLAMA, _ = describe(Path("llama-3.2-1b"), to_plan=True)
RARELY = Firing((0.02, 0.04, 0.08, 0.1, 0.2, 0.3), "by a test")


def ffn_bytes(plan: Plan) -> int:
    """Of a decode pass."""
    tasks = Lowering(plan).step(decode(plan, (0,), (8,), None))
    return sum(call.bytes for task in tasks for call in task.calls if isinstance(call.operands, ops.Ffn))


@pytest.mark.parametrize("limit", [None, 600 << 20])
def test_a_plan_counts_on_what_fires(limit: int | None) -> None:
    ask = Ask(context=128, host_memory_bytes=limit)
    exact = solve(ask, OPT, NEURONS, MACHINE, firing=RARELY)
    off = solve(replace(ask, sparsity="off"), OPT, NEURONS, MACHINE, firing=RARELY)
    assert (exact.plan.sparsity, off.plan.sparsity) == ("exact", "off")
    shares = {unit.active for unit in exact.plan.units if unit.part.endswith(".ffn")}
    assert shares == {0.02} and all(unit.active == 1 for unit in off.plan.units)
    assert any("2.0% are taken to fire, by a test" in reason for reason in exact.reasons)
    assert any("--sparsity off" in reason for reason in off.reasons)
    # Half of an OPT's FFN is activated in full, and of the other half 2 % is read.
    assert ffn_bytes(exact.plan) / ffn_bytes(off.plan) == pytest.approx((1 + 0.02) / 2, rel=0.01)
    assert exact.prediction.decode_tokens_per_s > off.prediction.decode_tokens_per_s
    for solved in (exact, off):
        assert least_score_s(solved.plan, ask, Cost(MACHINE)) <= score_s(solved.prediction, solved.plan, ask) * 1.001


def test_tiles_are_taken_to_have_no_still_granules() -> None:
    solved = solve(Ask(context=128), OPT, TILES, MACHINE, firing=RARELY)
    assert solved.plan.sparsity == "exact" and all(unit.active == 1 for unit in solved.plan.units)
    assert any("64 neurons that lie together" in reason for reason in solved.reasons)


def test_rows_one_by_one_are_slower_than_tiles_of_many() -> None:
    """A pass of many rows takes as long as its products of neurons' rows; of one row, as its bytes. `plan` says so."""
    solved = {batch: solve(Ask(context=128, batch=batch), OPT, NEURONS, MACHINE, firing=RARELY) for batch in (1, 32)}
    tiles = {batch: solve(Ask(context=128, batch=batch, sparsity="off"), OPT, TILES, MACHINE) for batch in (1, 32)}
    gain = {b: solved[b].prediction.decode_tokens_per_s / tiles[b].prediction.decode_tokens_per_s for b in (1, 32)}
    assert gain[1] > 1.2 and gain[32] < 1
    for batch, each in solved.items():
        found = dict(what_if(each, Ask(context=128, batch=batch), MACHINE, None, RARELY).other_formats)
        assert found[TILES].decode_tokens_per_s == pytest.approx(tiles[batch].prediction.decode_tokens_per_s, rel=0.02)
        plan = each.plan
        calls = [call for task in Lowering(plan).step(decode(plan, tuple(range(batch)), (8,) * batch, None))
                 for call in task.calls if isinstance(call.operands, ops.Ffn)]  # fmt: skip
        assert all(0 < call.operands.row_flops < call.flops for call in calls)  # type: ignore[union-attr]
        assert least_score_s(plan, Ask(context=128, batch=batch), Cost(MACHINE)) <= score_s(
            each.prediction, plan, Ask(context=128, batch=batch)
        )


def test_a_device_computes_all_neurons_of_many_rows() -> None:
    """Its kernels leave out what does not fire for few rows alone, and so does what they are taken to cost."""
    part = next(part for part in parts(OPT, NEURONS) if part.kind == "ffn")
    for batch, less in ((FEW_ROWS, True), (FEW_ROWS + 1, False)):
        plan = solve(Ask(context=128, batch=batch, use_device=True), OPT, NEURONS, WITH_DEVICE, firing=RARELY).plan
        calls = [call for task in Lowering(plan).step(decode(plan, tuple(range(batch)), (8,) * batch, None))
                 for call in task.calls if isinstance(call.operands, ops.Ffn) and task.lanes == ("gpu0",)]  # fmt: skip
        assert calls
        for call in calls:
            unit = plan.units[call.unit]
            whole = ops.matrix_cost(part, unit.lo, unit.hi, ops.FFN_BLOCKS, batch)
            assert ((call.bytes, call.flops) != whole) == less


def test_models_without_zeros() -> None:
    solved = solve(Ask(context=128), LLAMA, TILES, MACHINE)
    assert solved.plan.sparsity == "off" and not any("fire" in reason for reason in solved.reasons)
    with pytest.raises(BadRequest, match="no ReLU"):
        solve(Ask(context=128, sparsity="exact"), LLAMA, TILES, MACHINE)
    by_neurons = solve(Ask(context=128), LLAMA, NEURONS, MACHINE).plan
    assert by_neurons.sparsity == "off" and all(unit.active == 1 for unit in by_neurons.units)
    with pytest.raises(BadRequest, match="should be one of auto, off, exact"):
        Ask(sparsity="most")
    assert expected(LLAMA).share(1) == 1.0 and expected(OPT).share(1) == pytest.approx(0.03, rel=0.1)


def test_the_least_memory_goes_by_the_predictors_there_are() -> None:
    """Those that are published are larger: what is refused by them would run."""
    known = expected(OPT)
    small = tuple(Predictor(i, 32, HOST, FORMAT) for i in range(len(OPT.layers)))
    needed = []
    for firing in (replace(known, foretold=Foretold(small, known.shares, None, "these")), None):
        with pytest.raises(DoesNotFit) as raised:
            require_minimum(Ask(context=64, sparsity="predict"), OPT, NEURONS, 1, 1, firing)
        needed.append(raised.value.numbers["minimum_bytes"])
    assert needed[0] < needed[1]


def test_shares_between_those_measured() -> None:
    assert [RARELY.share(n) for n in (1, 3, 32, 64)] == pytest.approx([0.02, 0.06, 0.3, 0.3])
    counts = b64encode(bytes(8)).decode()
    layers = (FiringCounts(0, 2, counts, (0.1,) * 6), FiringCounts(1, 2, counts, (0.3,) * 6))
    firing = measured(Profile("text", "0" * 64, 1, (), layers))
    assert firing is not None and firing.shares == pytest.approx((0.2,) * len(FIRED_TOGETHER))
    assert measured(None) is None and measured(Profile("text", "0" * 64, 1, ())) is None


@pytest.mark.parametrize("neurons", [1, 63, 64, 65])
def test_stated_rates_of_any_number_of_neurons(neurons: int) -> None:
    spec = model(neurons=neurons)
    layers = tuple(replace(layer, ffn=FfnSpec(neurons, "relu", gated=False)) for layer in spec.layers)
    stated = stated_firing(replace(spec, layers=layers))
    assert stated is not None and [len(rates) for rates in stated.fires] == [4 * neurons] * len(layers)
