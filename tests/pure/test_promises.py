"""What users take for granted of plans: a few cases of `python -m tests.promises`, and what once did not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import DoesNotFit
from penstock.planner.solve.ours import ram
from penstock.planner.what_if import what_if
from penstock.units import MIB
from tests.promises import checks, other_asks
from tests.promises.draws import Case, draw, setting

GLM = Case(0, "glm-4.5-air", "server-a6000-48gb", "int4-g32", None, False, {"host_memory_bytes": 777124878})
BLOCKS = {"output_tokens": 1, "batch": 32, "objective": "throughput", "host_memory_bytes": 3386872575}


@pytest.mark.parametrize("number", [5, 10, 2047])
def test_a_drawn_plan_promises_nothing_absurd(number: int) -> None:
    of = setting(draw(number))
    try:
        solved = of.solve()
    except DoesNotFit as error:
        assert not list(checks.refusal_holds(of, error))
        return
    assert not list(checks.is_sane(of, solved))
    assert not list(checks.more_is_no_worse(of, solved, 1.2))
    assert not list(checks.no_family_is_faster(of, solved))


@pytest.mark.parametrize("number", [5, 2047])
def test_other_asks_promise_nothing_absurd(number: int) -> None:
    """Objectives, more sequences, formats of KV, prompts."""
    of = setting(draw(number))
    assert not list(other_asks.holds(of, of.solve(), 1.3))


def test_a_refusal_names_the_least_ram_beside_a_device() -> None:
    """Its KV has to be in memory, so without a device RAM holds it: 1.83 GB were named where 1.35 do."""
    of = setting(GLM).asking(context=8192, kv="bf16", attention="top-k:0.1")
    with pytest.raises(DoesNotFit) as refused:
        of.solve()
    assert not list(checks.refusal_holds(of, refused.value))


def test_more_memory_is_never_said_to_be_slower() -> None:
    """Of plans with one more GiB one is tried, which was 0.6 times as fast as the plan."""
    of = setting(Case(1, "llama-2-7b", "server-a6000-48gb", "int4", 0, False, BLOCKS))
    solved = of.solve()
    more = what_if(solved, of.ask, of.machine).one_more_gib
    assert more is not None and more.decode_tokens_per_s >= solved.prediction.decode_tokens_per_s


def test_what_checks_find() -> None:
    of = setting(draw(5))
    solved = of.solve()
    slower = replace(solved.prediction, decode_tokens_per_s=float("nan"), total_s=2 * solved.prediction.total_s)
    absurd = replace(solved, prediction=slower)
    assert any("decode_tokens_per_s is nan" in line for line in checks.is_sane(of, absurd))
    assert list(checks.worse("", 1.0, 2.0, solved, absurd))


def test_records_are_not_asked_for_where_streaming_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such plan takes more than that. 410 of them, of 11,000 units, were made before a plan was refused: 67 s."""
    asked = {"context": 1024, "host_memory_bytes": 200 * MIB, "sparsity": "predict"}
    problem = checks.problem_of(setting(Case(0, "opt-13b", "pc-rtx4090-64gb", "int4-records", 0, True, asked)))
    assert ram.may_ask(problem)
    monkeypatch.setattr(ram, "asking", lambda *_: pytest.fail("a plan was made"))
    with pytest.raises(DoesNotFit):
        next(ram.candidates(problem))
