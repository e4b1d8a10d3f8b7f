"""Which neurons count is recorded as what routers say is: plans go by it, tasks come again from it, and a run that is
given it says the same."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.graph import ops, passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Task
from penstock.graph.verify import verify
from penstock.planner.recorded_sets import trace_of
from penstock.planner.routing import Replay, RouterTrace
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.recording import recording
from penstock.serve.session import Running, Session
from penstock.spec import answers
from penstock.spec.answers import RouterAnswers
from penstock.spec.ask import Ask
from penstock.spec.live_sets import numbers
from penstock.spec.plan import Plan, Predictor
from penstock.spec.profile import loads as load_profile
from penstock.store.packed import Packed, open_packed
from penstock.store.predictors import with_predictors
from penstock.store.profile_file import FILE
from penstock.store.reorder import reorder
from tests.cpu.commands import MACHINE, refused
from tests.cpu.commands import Call as Command
from tests.cpu.engines import GREEDY, load
from tests.cpu.test_asked import asking
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_predict import give_predictors

PROMPT = [3, 1, 4, 1, 5]


def recorded(engine: Engine, outputs: int = 4) -> RouterAnswers:
    with recording(engine) as recorder:
        said = engine.generate([PROMPT], replace(GREEDY, max_tokens=outputs))[0]
    assert len(said.token_ids) == outputs
    found = recorder.answers()
    found.check(engine.packed.spec, "here")
    return answers.loads(answers.dumps(found), "here")


def sets(found: RouterAnswers) -> list[list[list[int]]]:
    return [[list(numbers(row)) for row in layer.rows()] for layer in found.live]


@pytest.mark.parametrize("weights", ["float32", "float32-neurons", "int4-neurons"])
def test_a_record_has_all_that_fires_wherever_it_lies(tmp_path: Path, weights: str) -> None:
    """Of the prompt and of all answers but the last: in RAM, and where a disk is asked for it."""
    folder = relu_model(tmp_path, "opt", weights)
    with load(folder, context=64, kv="float32") as engine:
        found = recorded(engine)
        heard: list[list[list[int]]] = [[] for _ in engine.packed.spec.layers]
        with engine.session.hearing.neurons(
            lambda layer, _, fired: heard[layer].extend(np.flatnonzero(row).tolist() for row in fired)
        ):
            engine.generate([PROMPT], replace(GREEDY, max_tokens=4))
    assert not found.foretold and sets(found) == heard and len(heard[0]) == len(PROMPT) + 3
    if weights == "float32":
        return
    packed = open_packed(folder)
    loading = Loading(machine=MACHINE, plan=asking(packed, (1,), context=64))
    with closing(Engine.load(folder, Ask(context=64), loading)) as engine:
        assert sets(recorded(engine)) == heard


@pytest.mark.parametrize("weights", ["float32", "float32-records"])
def test_a_record_has_whom_predictors_call_active(tmp_path: Path, weights: str) -> None:
    folder = relu_model(tmp_path, "opt", weights)
    give_predictors(folder, -0.3, ahead=1)
    with load(folder, context=64, kv="float32", sparsity="predict") as engine:
        found, plan = recorded(engine), engine.plan
    assert found.foretold and len(sets(found)[0]) > 0
    share = np.mean([len(row) for layer in sets(found) for row in layer]) / found.live[0].neurons
    assert 0 < share < 1
    if weights == "float32":
        return
    asked = asking(open_packed(folder), (1,), predictors=plan.predictors, context=64)
    with closing(Engine.load(folder, Ask(context=64), Loading(machine=MACHINE, plan=asked))) as engine:
        assert sets(recorded(engine)) == sets(found)


def heard_of(packed: Packed, plan: Plan, tokens: Sequence[int]) -> tuple[list[np.ndarray], list[Task], RouterTrace]:
    """Logits, tasks, and a trace of what a run's tasks depended on: of single tokens after a prompt of one pass."""
    live: list[list[list[int]]] = [[] for _ in packed.spec.layers]
    ran: list[Task] = []

    def hear(call: Call, said: list[list[int]]) -> None:
        assert isinstance(call.operands, ops.Fire | ops.Predict)
        rows, first = live[call.operands.layer], isinstance(call.operands, ops.Predict)
        first = first or plan.units[call.unit].lo == min(
            unit.lo for unit in plan.units if unit.asked and unit.part == plan.units[call.unit].part
        )
        if first:
            rows.extend(said)
        else:
            rows[-1] = rows[-1] + said[0]

    session = Session(packed, plan)
    session._open_runner = None  # so that all passes are tasks
    session._counted = lambda p: (ran.append(task) or task for task in Session._counted(session, p))  # type: ignore[method-assign]
    with session.hearing.answers(hear):
        logits = stepped(session, plan, tokens)
    session.close()
    sets_of = tuple(tuple(array("I", row).tobytes() for row in layer) for layer in live)
    return logits, ran, RouterTrace(((),) * len(live), "here", live=sets_of)


def stepped(session: Session, plan: Plan, tokens: Sequence[int]) -> list[np.ndarray]:
    found = []
    for i, token in enumerate(tokens):
        p = passes.decode(plan, (0,), (i,), passes.DECODE)
        found.append(session.step(p, [np.array([token], np.int32)])[0].copy())
    return found


@pytest.mark.parametrize(("layout", "ahead"), [("neurons", 0), ("records", 0), ("records", 1)])
@pytest.mark.parametrize(("cuts", "slots"), [((1,), 0), ((1, 2), 7)])
def test_tasks_come_again_from_who_counted(
    tmp_path: Path, layout: str, ahead: int, cuts: tuple[int, ...], slots: int
) -> None:
    """So do the bits, of a run that is given these neurons and does one task at a time."""
    folder = relu_model(tmp_path, "opt", f"float32-{layout}")
    packed, predictors = open_packed(folder), tuple[Predictor, ...]()
    if layout == "records":
        give_predictors(folder, -0.3, ahead=ahead)
        packed = with_predictors(packed)
        with load(folder, context=64, sparsity="predict") as engine:
            predictors = engine.plan.predictors
    plain = open_packed(folder)
    plan = asking(plain, cuts, predictors=predictors, recent_slots=slots, context=64)
    logits, ran, trace = heard_of(packed, plan, PROMPT)
    replay, lowering = Replay(plan, trace), Lowering(plan)
    wanted = [passes.decode(plan, (0,), (i,), passes.DECODE) for i in range(len(PROMPT))]
    again = [task for p in wanted for task in lowering.step(p, replay.answer)]
    assert again == ran
    verify(again, plan.arenas, plan.units)
    session, replay = Session(packed, plan, Running(serial=True, poisoned=True)), Replay(plan, trace)
    with session.hearing.answered_by(replay.answer, every_pass=False):
        assert all(np.array_equal(a, b) for a, b in zip(logits, stepped(session, plan, PROMPT), strict=True))
    session.close()


@pytest.mark.parametrize("kernels", [None, "reference"])
@pytest.mark.parametrize("layout", ["neurons", "records"])
def test_whoever_is_given_counts(tmp_path: Path, layout: str, kernels: str | None) -> None:
    """Of any neurons that are given a disk is asked for their records, and nothing else is added up: as where all lie
    in RAM and predictors call these active; and one neuron more or less changes what is said."""
    folder = relu_model(tmp_path, "opt", f"float32-{layout}")
    packed, predictors = open_packed(folder), tuple[Predictor, ...]()
    if layout == "records":
        give_predictors(folder, -0.3)
        packed = with_predictors(packed)
        with load(folder, context=64, kv="float32", sparsity="predict") as engine:
            predictors, resident = engine.plan.predictors, engine.plan
    plan = asking(open_packed(folder), (1,), predictors=predictors, context=64)

    def given(every: int) -> Any:
        def answer(call: Call) -> list[list[int]]:
            lo, hi = (
                (0, packed.spec.layers[0].ffns[0].neurons) if call.unit < 0 else plan.unit_rows(plan.units[call.unit])
            )
            return [list(range(lo, hi, every))]

        return answer

    found = dict[int, np.ndarray]()
    for every in (1, 2, 3):
        for how in ({}, {"serial": True, "poisoned": True}):
            session = Session(packed, plan, Running(kernels=kernels, **how))
            with session.hearing.answered_by(given(every), every_pass=False):
                logits = np.concatenate(stepped(session, plan, PROMPT))
            session.close()
            assert np.array_equal(found.setdefault(every, logits), logits)
        if layout == "records":
            session = Session(packed, resident, Running(kernels=kernels))
            with session.hearing.answered_by(given(every)):
                beside = np.concatenate(stepped(session, resident, PROMPT))
            session.close()
            np.testing.assert_allclose(found[every], beside, atol=1e-5)
    assert not np.array_equal(found[1], found[2]) and not np.array_equal(found[2], found[3])


def test_what_a_run_recorded_is_replayed(call: Command, tmp_path: Path) -> None:
    folder, file = relu_model(tmp_path, "opt", "float32-neurons"), tmp_path / "answers.json"
    run = call("run", folder, "abc", "--max-tokens", "5", "--ignore-eos", "--record", file)
    assert run.code == 0, run
    kept = answers.loads(file.read_text(), "answers")
    kept.check(open_packed(folder).spec, "answers")
    assert all(each.tokens >= 5 for each in kept.live)
    planned = call("plan", folder, "--context", "64", "--answers", file).report
    assert any(f"as recorded in {file}" in reason for reason in planned["reasons"]), planned["reasons"]
    refused(call("plan", folder, "--sparsity", "predict", "--answers", file), "says which neurons fired")
    text = file.read_text()
    file.write_text(text.replace('"neurons": ', '"neurons": 1'))
    refused(call("plan", folder, "--answers", file), "its neurons differ")


def test_numbers_are_the_checkpoints(call: Command, tmp_path: Path) -> None:
    """A packed model whose neurons lie otherwise has the same record, and a plan finds its places."""
    folder = relu_model(tmp_path, "opt", "float32-neurons")
    (tmp_path / "text.txt").write_text("abcdefg hijk " * 30)
    call("profile", folder, tmp_path / "text.txt")
    spec = open_packed(folder).spec
    ordered = reorder(folder, tmp_path / "ordered", load_profile((folder / FILE).read_text(), "here"))
    found = []
    for each in (folder, ordered):
        with load(each, context=64) as engine:
            found.append(recorded(engine))
    assert sets(found[0]) == sets(found[1])
    orders = open_packed(ordered).orders
    trace = trace_of(found[0], orders, "here")
    for layer, of in enumerate(found[0].live):
        for row, places in zip(of.rows(), trace.live[layer], strict=True):
            at = array("I", places)
            assert sorted(orders[layer][i] for i in at) == list(numbers(row)) and list(at) == sorted(at)
    assert len(trace.live) == len(spec.layers)
