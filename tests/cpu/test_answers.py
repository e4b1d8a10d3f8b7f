"""Whatever routers say, a cache of any size gives the bits of the run that has all experts in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.graph import ops, passes
from penstock.graph.cache import POLICIES
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Task
from penstock.planner.routing import Replay, replayed
from penstock.runtime.device import uses_device
from penstock.runtime.device.emulated import EmulatedDevice
from penstock.serve.session import Running, Session
from penstock.spec.answers import Recorder, dumps, loads
from penstock.spec.format import parse_format
from penstock.spec.parts import Part
from penstock.spec.plan import Cache, Plan, Unit
from penstock.store.packed import Packed, open_packed
from penstock.store.synth import synth
from tests.cpu.configs import TINY_CONFIGS
from tests.plans import make_plan, resident_plan

EXPERTS, ACTIVE = 7, 3
Said = Callable[[Call], Sequence[Sequence[int]]]


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Every layer has experts, so each can be guessed by the one before."""
    folder = tmp_path_factory.mktemp("neighbours")
    config = {**json.loads(TINY_CONFIGS["qwen2_moe"]), "num_hidden_layers": 3, "decoder_sparse_step": 1}
    (folder / "config.json").write_text(json.dumps(config | {"mlp_only_layers": []}))
    return open_packed(synth(folder / "config.json", folder / "packed", parse_format("int4")))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("answers")
    config = {**json.loads(TINY_CONFIGS["qwen2_moe"]), "num_hidden_layers": 3}
    assert (config["num_experts"], config["num_experts_per_tok"]) == (EXPERTS, ACTIVE)
    (folder / "config.json").write_text(json.dumps(config))
    return open_packed(synth(folder / "config.json", folder / "packed", parse_format("int4")))


def rows_of(call: Call) -> list[int]:
    """The position of each row, and where it is among its batch's: answers are a function of them."""
    assert call.batch is not None
    return [start + i for start, n in zip(call.batch.start, call.batch.rows, strict=True) for i in range(n)]


def layer_of(call: Call) -> int:
    assert isinstance(call.operands, ops.Route)
    return call.operands.layer


def worst(call: Call) -> list[list[int]]:
    """Always those that were wanted longest ago."""
    return [sorted((ACTIVE * row + i + layer_of(call)) % EXPERTS for i in range(ACTIVE)) for row in rows_of(call)]


def one(call: Call) -> list[list[int]]:
    return [[1, 4, 6] for _ in rows_of(call)]


def each_once(call: Call) -> list[list[int]]:
    """So many different ones as rows can want."""
    return [sorted((ACTIVE * i + j) % EXPERTS for j in range(ACTIVE)) for i, _ in enumerate(rows_of(call))]


def caching(packed: Packed, slots: int, policy: str, seqs: int, guesses: int = 0) -> Plan:
    parts = packed.parts.values()
    units = [
        Unit(p.key, lo, lo + p.least_granules, "disk0" if p.kind == "experts" else "host", "host", "host")  # type: ignore[arg-type]
        for p in parts
        for lo in range(0, p.granules, p.least_granules)
    ]
    caches = tuple(Cache(p.layer, "host", slots, policy, guesses=guesses) for p in parts if p.kind == "experts")  # type: ignore[arg-type]
    ring = 2 * max(p.least_bytes for p in parts if p.kind == "experts")
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={"host": ring}, caches=caches, batch_seqs=seqs, context=64
    )


def beside(
    packed: Packed, slots: int, policy: str, seqs: int, lifted_rows: int, beneath: int = 0, prompts: str = "gpu0"
) -> Plan:
    """All but routers and experts on a device, which has a cache for the experts in RAM, and computes them all
    (`prompts`) where a prompt is long. `beneath`: they are on the disk, and RAM has a cache of so many slots."""
    parts = packed.parts.values()
    home = "disk0" if beneath else "host"

    def unit(p: Part, lo: int, hi: int) -> Unit:
        at = {"experts": (home, "host", prompts), "router": ("host",) * 3}.get(p.kind, ("gpu0",) * 3)
        return Unit(p.key, lo, hi, *at)  # type: ignore[arg-type]

    units = [unit(p, lo, lo + p.least_granules) for p in parts for lo in range(0, p.granules, p.least_granules)]
    ram, caches, other = [Cache(0, "host", beneath, policy)] * bool(beneath), list[Cache](), POLICIES[policy == "lru"]  # type: ignore[arg-type]
    for layer in (p.layer for p in parts if p.kind == "experts"):
        caches += [*(replace(cache, layer=layer) for cache in ram), Cache(layer, "gpu0", slots, other, lifted_rows)]  # type: ignore[arg-type]
    ring = 2 * max(p.least_bytes for p in parts if p.kind == "experts")
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={"gpu0": ring, "host": ring}, caches=tuple(caches),
        batch_seqs=seqs, context=64, main="gpu0", kv_homes=[("gpu0", "gpu0")] * len(packed.spec.layers),
        stage_bytes=2 * max(p.least_bytes for p in parts),
    )  # fmt: skip


def run(packed: Packed, plan: Plan, said: Said, jitter_s: float = 0.0, **how: bool) -> np.ndarray:
    """Logits of two prompts, one of few rows, and of some steps."""
    device = EmulatedDevice(1 << 30, 1e12, jitter_s) if uses_device(plan) else None
    session, found = Session(packed, plan, Running(**how), device=device), []
    seqs = tuple(range(plan.batch_seqs))
    with session.hearing.answered_by(said):
        for length in (2, 21):
            for p in passes.prompts(plan, seqs, (length,) * len(seqs), passes.DECODE):
                ids = [np.arange(b.total_rows, dtype=np.int32) % 250 for b in p.batches]
                found += [logits.copy() for logits in session.step(p, ids)]
            for position in range(length, length + 4):
                p = passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE)
                found += [logits.copy() for logits in session.step(p, [np.full(len(seqs), position, np.int32)])]
    session.close()
    return np.concatenate(found)


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("said", [worst, one, each_once])
def test_any_answers_give_the_resident_bits(packed: Packed, said: Said, seqs: int) -> None:
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=seqs, context=64)
    expected = run(packed, resident, said, serial=True)
    assert np.isfinite(expected).all()
    for slots in range(1, EXPERTS + 1):
        for policy in POLICIES:
            plan = caching(packed, slots, policy, seqs)
            assert np.array_equal(run(packed, plan, said, poisoned=True), expected), (slots, policy)


def wrong(said: Said) -> Said:
    """The same answers, and guesses of other experts."""

    def answer(call: Call) -> list[list[int]]:
        experts = [list(row) for row in said(call)]
        assert isinstance(call.operands, ops.Route)
        others = [[expert for expert in range(EXPERTS) if expert not in row] for row in experts]
        return [row[:ACTIVE] for row in others] if call.operands.guesses else experts

    return answer


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("said", [worst, one, wrong(worst), wrong(one)])
def test_any_guesses_give_the_resident_bits(neighbours: Packed, said: Said, seqs: int) -> None:
    """Right ones (what is said is also guessed) and wrong ones, which leave for what is wanted while they load."""
    packed = neighbours
    expected = run(packed, resident_plan(packed.spec, packed.weights, batch_seqs=seqs, context=64), said, serial=True)
    for slots, policy in zip((1, 2, 3, 5, EXPERTS), (*POLICIES, *POLICIES, "lru"), strict=True):
        plan = caching(packed, slots, policy, seqs, guesses=2)
        check_plan(plan, packed.spec, packed.weights)
        assert np.array_equal(run(packed, plan, said, poisoned=True), expected), (slots, policy)


def test_guesses_are_what_the_next_router_says_to_this_layers_input(neighbours: Packed) -> None:
    """As `Session.guess` works them out with numpy; and none of them decides what is computed."""
    packed, heard = neighbours, dict[tuple[int, bool], list[list[int]]]()
    plan = caching(packed, EXPERTS, "lru", 1, guesses=2)

    def hear(call: Call, said: list[list[int]]) -> None:
        assert isinstance(call.operands, ops.Route)
        heard[call.operands.layer, bool(call.operands.guesses)] = said

    p = passes.decode(plan, (0,), (0,), None)
    session, other = Session(packed, plan), Session(packed, resident_plan(packed.spec, packed.weights, context=64))
    with session.hearing.answers(hear):
        logits = session.step(p, [np.array([7], np.int32)])[0].copy()
    guessed, said = dict[int, list[list[int]]](), dict[int, list[list[int]]]()

    def listen(call: Call, experts: list[list[int]]) -> None:
        said[layer_of(call)] = experts
        guessed[layer_of(call) + 1] = other.hearing.guess(call) or []

    with other.hearing.routers(listen):
        assert np.array_equal(other.step(p, [np.array([7], np.int32)])[0], logits)
    assert {layer: experts for (layer, guess), experts in heard.items() if not guess} == said
    assert {layer: rows for (layer, guess), rows in heard.items() if guess} == {
        layer: guessed[layer] for layer in (1, 2)
    }
    assert guessed[3] == [] and all(len(row) == ACTIVE for layer in (1, 2) for row in guessed[layer])
    session.close()
    other.close()


@pytest.mark.parametrize("lifted_rows", [1, 2, 9])
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("said", [worst, one, each_once])
def test_a_cache_of_any_size_on_a_device_gives_the_resident_bits(
    packed: Packed, said: Said, seqs: int, lifted_rows: int
) -> None:
    """Whether what is missing is lifted, computed by the CPU, or some of each: outputs are added in one order."""
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=seqs, context=64)
    expected = run(packed, resident, said, serial=True)
    for slots, policy in zip((1, 2, 4, EXPERTS), (*POLICIES, *POLICIES), strict=True):
        plan = beside(packed, slots, policy, seqs, lifted_rows)
        check_plan(plan, packed.spec, packed.weights)
        assert np.array_equal(run(packed, plan, said, 0.001 * (slots == 2), poisoned=True), expected), (slots, policy)
    assert np.array_equal(run(packed, plan, said, serial=True), expected)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("lifted_rows", [1, 2, 9])
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("said", [worst, one, each_once])
def test_a_cache_in_ram_beneath_a_devices_gives_the_resident_bits(
    packed: Packed, said: Said, seqs: int, lifted_rows: int
) -> None:
    """Whatever is on the device, in RAM, or on the disk alone, and however few slots either cache has. Where the CPU
    has the experts of long prompts, two executors add up there: the bits are those of the plan's serial run."""
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=seqs, context=64)
    expected = run(packed, resident, said, serial=True)
    sizes = zip((1, 1, 2, 4, EXPERTS), (1, 3, 1, 2, 1), (*POLICIES, *POLICIES, "lru"), strict=True)
    for i, (slots, beneath, policy) in enumerate(sizes):
        plan = beside(packed, slots, policy, seqs, lifted_rows, beneath, ("host", "gpu0")[i % 2])
        check_plan(plan, packed.spec, packed.weights)
        found, wanted = run(packed, plan, said, 0.001 * (slots == 2), poisoned=True), expected
        if i % 2 == 0:
            wanted = run(packed, plan, said, serial=True)
            assert np.abs(wanted - expected).max() < 1e-4
        assert np.array_equal(found, wanted), (slots, beneath)


def test_what_many_rows_miss_is_lifted_and_what_few_miss_is_the_cpus(packed: Packed) -> None:
    """And it is in the cache in the next pass."""

    def ops_of(lifted_rows: int) -> list[list[str]]:
        plan = beside(packed, EXPERTS, "lru", 1, lifted_rows)
        lowering, found = Lowering(plan), []
        for position in (1, 2):
            p = passes.decode(plan, (0,), (position,), None)
            calls = [call for task in lowering.step(p, one) for call in task.calls]
            there = {"host.weights": "cpu", "gpu0.cache": "device"}
            found.append(
                ["lift" for call in calls if isinstance(call.operands, ops.Lift)]
                + [there[c.operands.weights[0].arena] for c in calls if isinstance(c.operands, ops.Experts)]
            )
        return found

    layers = sum(part.kind == "experts" for part in packed.parts.values())
    lifts = ["lift"] * ACTIVE * layers
    assert ops_of(1) == [lifts + ["device"] * ACTIVE * layers, ["device"] * layers]
    assert ops_of(2) == [lifts + ["cpu"] * layers, ["device"] * layers]


def test_answers_change_results(packed: Packed) -> None:
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=1, context=64)
    assert not np.array_equal(run(packed, resident, one), run(packed, resident, worst))


def test_what_was_said_is_heard(packed: Packed, tmp_path: Path) -> None:
    """Of a plan in memory, whose passes are one program otherwise, and the router's own again afterwards."""
    plan = resident_plan(packed.spec, packed.weights, batch_seqs=1, context=64)
    session, heard = Session(packed, plan), list[tuple[int, list[list[int]]]]()
    (p,) = passes.prompts(plan, (0,), (5,), None)
    own = session.step(p, [np.arange(5, dtype=np.int32)])[0].copy()
    with session.hearing.routers(lambda call, said: heard.append((layer_of(call), said))):
        session.step(p, [np.arange(5, dtype=np.int32)])
    assert [layer for layer, _ in heard] == [0, 2] and all(len(said) == 5 for _, said in heard)
    with session.hearing.answered_by(one):
        other = session.step(p, [np.arange(5, dtype=np.int32)])[0].copy()
    assert not np.array_equal(own, other)
    assert np.array_equal(session.step(p, [np.arange(5, dtype=np.int32)])[0], own)
    session.close()


@pytest.mark.parametrize(("slots", "guesses"), [(1, 0), (4, 0), (2, 1), (4, 3)])
def test_tasks_come_again_from_a_runs_answers(neighbours: Packed, slots: int, guesses: int) -> None:
    """They are a function of the plan, the passes, and what routers said; and so are the bits of a run that is given
    these answers."""
    packed = neighbours
    plan = caching(packed, slots, "lru", 1, guesses)
    wanted = [*passes.prompts(plan, (0,), (3,), passes.DECODE)]
    wanted += [passes.decode(plan, (0,), (position,), passes.DECODE) for position in range(3, 9)]
    recorder = Recorder(packed.spec, "m")

    def stepped(session: Session) -> list[np.ndarray]:
        tokens = [np.arange(p.batches[0].total_rows, dtype=np.int32) for p in wanted]
        return [session.step(p, [ids])[0].copy() for p, ids in zip(wanted, tokens, strict=True)]

    def hear(call: Call, said: list[list[int]]) -> None:
        assert isinstance(call.operands, ops.Route)
        (recorder.guess if call.operands.guesses else recorder.hear)(layer_of(call), said)

    session, ran = Session(packed, plan), list[Task]()
    session._open_runner = None  # so that all passes are tasks
    session._counted = lambda p: (ran.append(task) or task for task in Session._counted(session, p))  # type: ignore[method-assign]
    with session.hearing.answers(hear):
        logits = stepped(session)
    session.close()
    trace = replayed(loads(dumps(recorder.answers()), "answers"), "answers")
    lowering, replay = Lowering(plan), Replay(plan, trace)
    assert [task for p in wanted for task in lowering.step(p, replay.answer)] == ran
    again, replay = Session(packed, plan, Running(serial=True, poisoned=True)), Replay(plan, trace)
    with again.hearing.answered_by(replay.answer, every_pass=False):
        assert all(np.array_equal(a, b) for a, b in zip(logits, stepped(again), strict=True))
    again.close()
