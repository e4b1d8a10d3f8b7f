"""Decode passes in one native program that asks routers and reads experts by itself: the bits, loads, answers, errors
and times of the same passes as tasks."""

from __future__ import annotations

import errno
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import DamagedModel, StorageFailed
from penstock.graph import ops, passes
from penstock.graph.arenas import with_arenas
from penstock.graph.cache import POLICIES, ExpertCache
from penstock.graph.lower import Lowering
from penstock.graph.open_passes import Action
from penstock.graph.tasks import Call
from penstock.graph.timeline import Timeline
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.open_passes import OpenPassRunner
from penstock.serve.session import Running, Session
from penstock.spec.places import CPU, DISK
from penstock.spec.plan import Plan
from penstock.store.packed import Packed, open_packed
from tests.cpu.test_answers import (
    ACTIVE,
    EXPERTS,
    caching,
    layer_of,
    neighbours,
    one,
    packed,
    rows_of,
    worst,
    wrong,
)
from tests.plans import resident_plan

__all__ = ["neighbours", "packed"]  # fixtures
Said = Callable[[Call], Sequence[Sequence[int]]]


# -- the cache ---------------------------------------------------------------------------------------------------------

experts = st.integers(0, 11)
few = st.lists(experts, max_size=5, unique=True)
steps = st.lists(st.tuples(few, few, st.lists(st.one_of(experts, st.none()), max_size=4)), max_size=80)


@given(st.integers(1, 12), st.sampled_from(POLICIES), steps)
def test_native_caches_decide_as_those_of_the_graph(slots: int, policy: str, passes_of: list[Any]) -> None:
    one, other = ExpertCache(slots, policy), _native.ExpertCache(slots, policy)
    assert (other.slots, other.policy) == (slots, policy)
    for guessed, wanted, first in passes_of:
        for expert in guessed:
            assert one.slot(expert) == other.slot(expert)
            if one.slot(expert) is None:
                assert one.guess(expert, guessed) == other.guess(expert, guessed)
        one.ask(wanted)
        other.ask(wanted)
        assert one.missing(wanted) == other.missing(wanted)
        for expert in one.missing(sorted(wanted)):
            assert one.admit(expert, wanted, first) == other.admit(expert, set(wanted), first)
        assert one.held == other.held


def test_native_caches_refuse_what_is_no_expert() -> None:
    cache = _native.ExpertCache(2, "lru")
    for bad in (lambda: cache.ask([-1]), lambda: cache.slot(1 << 16), lambda: _native.ExpertCache(0, "lru"),
                lambda: _native.ExpertCache(1, "fifo")):  # fmt: skip
        with pytest.raises(ValueError, match=r"expert|slots|policy"):
            bad()


# -- passes ------------------------------------------------------------------------------------------------------------


class Ran:
    """What a session did in some passes."""

    def __init__(self, packed: Packed, plan: Plan, said: Said | None, open_passes: bool, **how: Any) -> None:
        self.logits: list[np.ndarray] = []
        self.heard: list[tuple[int, int, list[list[int]]]] = []
        self.consumed: list[int] = []
        self.opened = 0
        session = Session(packed, plan, Running(**how))
        if not open_passes:
            session._open_runner = None
        elif session._open_runner is not None:
            session._open_runner = Counting(session._open_runner, self)  # type: ignore[assignment]
        seqs = tuple(range(plan.batch_seqs))
        wanted = [*passes.prompts(plan, seqs, (2,) * len(seqs), passes.DECODE)]
        wanted += [passes.decode(plan, seqs, (at,) * len(seqs), passes.DECODE) for at in range(2, 9)]
        wanted += [*passes.prompts(plan, seqs, (21,) * len(seqs), passes.DECODE)]
        wanted += [passes.decode(plan, seqs, (at,) * len(seqs), passes.DECODE) for at in range(21, 27)]

        def hear(call: Call, rows: list[list[int]]) -> None:
            assert isinstance(call.operands, ops.Route) and call.batch is not None
            self.heard.append((call.operands.layer, call.operands.guesses, [call.batch.start, *rows]))

        answers = session.hearing.answered_by(said, every_pass=False) if said else session.hearing.answers(hear)
        with answers, session.hearing.answers(hear):
            for p in wanted:
                ids = [np.arange(b.total_rows, dtype=np.int32) % 250 + b.start[0] for b in p.batches]
                self.logits += [logits.copy() for logits in session.step(p, ids)]
                self.consumed.append(session.consumed_bytes)
        session.drain()
        self.held = {key: cache.held for key, cache in session.lowering.caches.items()}
        self.read_bytes = session.reader.bytes_read
        session.close()


class Counting:
    def __init__(self, runner: OpenPassRunner, ran: Ran) -> None:
        self._runner, self._ran = runner, ran

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, *arguments: Any) -> None:
        self._ran.opened += 1
        self._runner.run(*arguments)


def drawn(call: Call) -> list[list[int]]:
    """Any experts, the same whenever a row is asked about."""
    assert isinstance(call.operands, ops.Route)
    rngs = [random.Random(f"{layer_of(call)} {call.operands.guesses} {row}") for row in rows_of(call)]
    if call.operands.guesses:
        return [rng.sample(range(EXPERTS), ACTIVE) for rng in rngs]
    return [sorted(rng.sample(range(EXPERTS), ACTIVE)) for rng in rngs]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("seqs", [1, 2])
@pytest.mark.parametrize("said", [None, worst, one, wrong(worst), drawn])
def test_open_passes_do_what_their_tasks_do(neighbours: Packed, said: Said | None, seqs: int, guesses: int) -> None:
    """The same bits, loads, places and answers, at any number of slots, whoever guesses what."""
    for slots in (ACTIVE, ACTIVE + 1, EXPERTS):
        for policy in POLICIES:
            plan = caching(neighbours, slots, policy, seqs, guesses)
            found = Ran(neighbours, plan, said, True, poisoned=True)
            # Where rows may want more experts than there are slots, a pass goes in waves, as tasks.
            decodes = 7 + 6 - 1  # the first of its shape is lowered
            assert found.opened >= (decodes if seqs * ACTIVE <= slots else 0), (found.opened, slots)
            for open_passes, how in ((False, {}), (False, {"serial": True})):
                expected = Ran(neighbours, plan, said, open_passes, **how)
                assert all(np.array_equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
                assert (found.held, found.heard) == (expected.held, expected.heard)
                assert (found.read_bytes, found.consumed) == (expected.read_bytes, expected.consumed)


@pytest.mark.parametrize("guesses", [0, 2])
@pytest.mark.parametrize("place", [0, 1])
def test_layers_without_a_cache_are_not_asked(neighbours: Packed, place: int, guesses: int) -> None:
    """One layer's experts come from the disk, the others' are in RAM."""
    plan = caching(neighbours, ACTIVE, "lru", 1, guesses)
    cache = plan.caches[place]
    units = tuple(
        replace(u, home="host") if u.home == "disk0" and u.part != f"{cache.layer}.experts" else u for u in plan.units
    )
    plan = with_arenas(replace(plan, units=units, caches=(cache,)))
    found = Ran(neighbours, plan, None, True, poisoned=True)
    expected = Ran(neighbours, plan, None, False, serial=True)
    assert found.opened and {layer for layer, *_ in found.heard} == {cache.layer}
    assert all(np.array_equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
    assert (found.held, found.heard, found.consumed) == (expected.held, expected.heard, expected.consumed)


@pytest.mark.parametrize("isa", [*cpu.available(), "reference"])
def test_open_passes_give_the_resident_bits_on_every_instruction_set(packed: Packed, isa: str | None) -> None:
    """A shared expert, a dense layer between, several threads or one."""
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=1, context=64)
    plan = caching(packed, ACTIVE, "lfu", 1)
    expected = Ran(packed, resident, None, True, kernels=isa)
    for threads in (1, 2):
        found = Ran(packed, plan, None, True, kernels=isa, threads=threads, poisoned=True)
        assert all(np.array_equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
        assert (found.opened > 0) == (isa != "reference")


@pytest.mark.parametrize("seed", range(4))
def test_bits_do_not_depend_on_which_expert_comes_first(neighbours: Packed, seed: int) -> None:
    """Reads in blocks of any size, so many in flight, come in any order; so do experts."""
    rng = random.Random(seed)
    plan = caching(neighbours, ACTIVE + seed % 2, "lfu", 1, guesses=seed // 2)
    expected = Ran(neighbours, plan, drawn, False, serial=True)
    block_bytes, depth = rng.choice((4096, 16384, 1 << 20)), rng.randint(1, 9)
    plan = replace(plan, io_block_bytes=block_bytes, io_depth=depth)
    found = Ran(neighbours, plan, drawn, True, poisoned=True, threads=rng.randint(1, 2))
    assert found.opened
    assert all(np.array_equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))
    assert (found.held, found.heard, found.read_bytes) == (expected.held, expected.heard, expected.read_bytes)


def test_marks_are_where_routers_answer_and_where_outputs_are_added_up(packed: Packed) -> None:
    plan = caching(packed, EXPERTS, "lru", 1)
    lowering = Lowering(plan)
    first = passes.decode(plan, (0,), (0,), passes.DECODE)
    assert lowering.open_pass(first) is None  # it was not lowered yet
    for _ in lowering.step(first, one):
        pass
    found = lowering.open_pass(passes.decode(plan, (0,), (5,), passes.DECODE))
    assert found is not None
    layers = [part.layer for part in packed.parts.values() if part.kind == "experts"]
    assert [(mark.action, mark.layer) for mark in found.marks] == [
        (action, layer) for layer in layers for action in (Action.ASK, Action.COMPUTE)
    ]
    for mark in found.marks:
        if mark.action is Action.ASK:
            assert found.calls[mark.at - 1] == mark.call
        else:
            assert isinstance(found.calls[mark.at].operands, ops.Combine)
    assert not any(isinstance(call.operands, ops.Load | ops.Experts) for call in found.calls)
    assert lowering.open_pass(passes.decode(plan, (0,), (5,), passes.decode(plan, (0,), (6,), None).stream)) is not None


# -- errors, times -----------------------------------------------------------------------------------------------------


def stepper(packed: Packed, plan: Plan, open_passes: bool) -> tuple[Session, Callable[[int], np.ndarray]]:
    session = Session(packed, plan)
    if not open_passes:
        session._open_runner = None

    def step(at: int) -> np.ndarray:
        return session.step(passes.decode(plan, (0,), (at,), passes.DECODE), [np.array([at], np.int32)])[0].copy()

    return session, step


@pytest.mark.parametrize("fault", [{"error": errno.EIO}, {"most_bytes": 0}])
def test_a_failed_read_is_told_and_the_next_pass_is_right(packed: Packed, fault: dict[str, int]) -> None:
    """In one line, with its file, and the same whether passes are open or tasks."""
    plan, told = caching(packed, ACTIVE, "lru", 1), list[str]()
    for open_passes in (True, False):
        session, step = stepper(packed, plan, open_passes)
        with session.hearing.answered_by(worst, every_pass=False):
            expected = [step(at) for at in range(4)]
            (reader,) = (session.reader._askers if open_passes else session.reader._readers).values()
            reader.inject(at=2, **fault)
            with pytest.raises(StorageFailed) as raised:
                step(4)
            told.append(str(raised.value))
            reader.inject(at=0)
            assert all(np.array_equal(step(at), expected[at]) for at in range(4))
        session.close()
    assert len({line.split(" at ")[0] for line in told}) == 1, told


def test_any_read_of_a_pass_may_fail_while_others_are_under_way(neighbours: Packed) -> None:
    plan = caching(neighbours, 2 * ACTIVE, "lfu", 2)
    session = Session(neighbours, plan)

    def step(at: int) -> np.ndarray:
        p = passes.decode(plan, (0, 1), (at, at), passes.DECODE)
        return session.step(p, [np.array([at, at + 1], np.int32)])[0].copy()

    with session.hearing.answered_by(drawn, every_pass=False):
        expected = [step(at) for at in range(3)]
        (reader,) = session.reader._askers.values()
        for number in range(1, 9):
            step(0)
            reader.inject(at=number, error=errno.EIO)
            with pytest.raises(StorageFailed):
                for at in range(1, 30):
                    step(at)
            reader.inject(at=0)
            assert all(np.array_equal(step(at), expected[at]) for at in range(3))
    session.close()


def test_an_interrupted_pass_leaves_nothing_behind(packed: Packed) -> None:
    """Whenever the signal comes, the passes after it are right."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    session, step = stepper(packed, caching(packed, ACTIVE, "lru", 1), True)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with session.hearing.answered_by(worst, every_pass=False):
            expected = [step(at) for at in range(4)]
            for after_s in (0.001, 0.002, 0.005):
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, after_s)
                    while True:
                        step(4)
                assert all(np.array_equal(step(at), expected[at]) for at in range(4))
    finally:
        signal.signal(signal.SIGALRM, before)
        session.close()


def test_damage_is_found_by_the_first_read(neighbours: Packed, tmp_path: Path) -> None:
    """A byte of an expert is wrong."""
    folder = tmp_path / "damaged"
    shutil.copytree(neighbours.folder, folder)
    damaged = open_packed(folder)
    path, offset, nbytes = damaged.locate("1.experts", 0, damaged.parts["1.experts"].granules)
    with path.open("r+b") as file:
        file.seek(offset + nbytes - 100)
        file.write(b"\x55" * 8)
    plan, told = caching(damaged, ACTIVE, "lru", 1), list[str]()
    for open_passes in (True, False):
        session, step = stepper(damaged, plan, open_passes)
        with session.hearing.answered_by(worst, every_pass=False), pytest.raises(DamagedModel) as raised:
            for at in range(9):
                step(at)
        told.append(str(raised.value))
        session.close()
    assert told[0] == told[1]


def test_demands_refuse_what_does_not_fit(packed: Packed) -> None:
    plan = caching(packed, ACTIVE, "lru", 1)
    session, step = stepper(packed, plan, True)
    with session.hearing.answered_by(worst, every_pass=False):
        step(0)
        step(1)
    runner = session._open_runner
    assert runner is not None
    (bound,) = (bound for bound in runner._bound.values() if bound is not None)
    demand = next(iter(bound.demands.values()))
    for rows in ([[0, 1]], [[0, 1, EXPERTS]], [[-1, 0, 1]], [[0, 1, 2]] * 2):
        with pytest.raises(ValueError, match="expert"):
            demand.give(rows)
    with pytest.raises(ValueError, match="expert"):
        demand.give_guess([[EXPERTS]])
    with pytest.raises(ValueError, match="guesses"):
        bound.program.guess(demand, 4096, 0)
    cache, program = _native.ExpertCache(ACTIVE, "lru"), session._binding.new_program()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="computes no experts"):
        _native.Demand(0, cache, program, [0] * ACTIVE, [], None, [], False)
    session.close()


def test_weights_are_read_ahead_as_far_as_a_cache_keeps_them(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    session, step = stepper(packed, caching(packed, ACTIVE, "lru", 1), True)
    step(0)
    open_pass = session.lowering.open_pass(passes.decode(session.plan, (0,), (1,), passes.DECODE))
    runner = session._open_runner
    assert open_pass is not None and runner is not None
    weights = [call.operands.weights for call in open_pass.calls if isinstance(call.operands, ops.Qkv | ops.Out)]
    for cache_bytes in (0, 1 << 14, 1 << 40):
        monkeypatch.setattr(host, "last_level_cache_bytes", lambda nbytes=cache_bytes: nbytes)
        ahead = runner._ahead(open_pass.calls)
        assert sum(nbytes for _, nbytes in ahead) <= cache_bytes // 2
        if cache_bytes == 1 << 40:
            assert {(session._arenas.address(slot), slot.nbytes) for slot in weights} <= set(ahead)
        else:
            assert bool(ahead) == bool(cache_bytes)
    session.close()


def test_times_are_told_of_what_was_done(packed: Packed) -> None:
    """As many bytes on each lane as the tasks have, and nothing outside of the pass."""
    plan, sums = caching(packed, ACTIVE + 1, "lru", 1), list[list[dict[str, int]]]()
    for open_passes in (True, False):
        session, step = stepper(packed, plan, open_passes)
        timelines: list[Timeline] = []
        session.watchers.append(lambda timeline, _, kept=timelines: kept.append(timeline))
        with session.hearing.answered_by(worst, every_pass=False):
            for at in range(6):
                step(at)
        session.close()
        sums.append([])
        for timeline in timelines:
            by_lane = {CPU: 0, DISK.reads: 0}
            for span in timeline.spans:
                assert timeline.start_s <= span.start_s <= span.end_s <= timeline.end_s
                by_lane[span.lanes[0]] += span.bytes
            sums[-1].append(by_lane)
            assert timeline.busy_s()[CPU] <= timeline.end_s - timeline.start_s
    assert sums[0] == sums[1]


def test_a_pass_with_more_experts_than_slots_is_not_open(packed: Packed) -> None:
    plan = caching(packed, 2 * ACTIVE - 1, "lru", 2)
    lowering = Lowering(plan)
    for start in (0, 1):
        p = passes.decode(plan, (0, 1), (start, start), passes.DECODE)
        assert lowering.open_pass(p) is None
        for _ in lowering.step(p, one):
            pass
