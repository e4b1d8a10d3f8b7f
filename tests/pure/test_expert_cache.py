"""Caches for experts: who leaves, what is loaded, and that tasks are a function of plan, passes and answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, InternalError
from penstock.graph import ops, passes
from penstock.graph.cache import HALF_LIFE, POLICIES, ExpertCache
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Task
from penstock.graph.verify import verify
from penstock.planner.predict import predict
from penstock.planner.routing import Replay, RouterTrace, stated
from penstock.spec.ask import Ask
from penstock.spec.plan import Plan
from tests.plans import device_plans, random_plans
from tests.pure.expert_caches import FORMAT, SPEC, Said, cached_plan, device_plan, drawn, lowered, one, worst
from tests.pure.machine import MACHINE

asked = st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=5).map(sorted), max_size=60)


@given(st.integers(1, 12), asked)
def test_lru_lets_the_longest_unused_go(slots: int, passes_of: list[list[int]]) -> None:
    cache, order = ExpertCache(slots, "lru"), OrderedDict[int, None]()
    for wanted in passes_of:
        cache.ask(wanted)
        for expert in wanted:
            assert (cache.slot(expert) is not None) == (expert in order)
        for expert in [e for e in wanted if e in order]:
            order.move_to_end(expert)
        for expert in [e for e in wanted if e not in order]:
            if cache.admit(expert, wanted) is None:  # all slots hold what this pass wants
                assert len(order) == slots and set(order) <= set(wanted)
                continue
            if len(order) == slots:
                # Those of one pass were used at one time: the lowest slot goes, so any of the oldest may.
                gone = next(e for e in order if cache.slot(e) is None)
                assert gone not in wanted
                del order[gone]
            order[expert] = None
        assert sorted(e for e in cache.held if e is not None) == sorted(order)


@given(st.integers(1, 12), asked, st.sampled_from(POLICIES))
def test_a_slot_holds_one_expert(slots: int, passes_of: list[list[int]], policy: str) -> None:
    cache = ExpertCache(slots, policy)
    for wanted in passes_of:
        cache.ask(wanted)
        for expert in wanted:
            if cache.slot(expert) is None:
                slot = cache.admit(expert, wanted)
                assert slot is None or cache.held[slot] == expert
        held = [e for e in cache.held if e is not None]
        assert len(set(held)) == len(held) and all(cache.held[cache.slot(e) or 0] == e for e in held)


def test_lfu_keeps_what_is_used_often_and_forgets() -> None:
    cache = ExpertCache(2, "lfu")
    for _ in range(5):
        cache.ask([1])
        if cache.slot(1) is None:
            cache.admit(1, [1])
    cache.ask([2])
    cache.admit(2, [2])
    cache.ask([3])
    slot = cache.admit(3, [3])
    assert slot is not None and cache.held[slot] == 3 and cache.slot(1) is not None and cache.slot(2) is None
    for _ in range(int(8 * HALF_LIFE)):
        cache.ask([3])
    cache.ask([4])
    cache.admit(4, [4])
    assert cache.slot(1) is None and cache.slot(3) is not None


@pytest.mark.thinned(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("seqs", "guesses"), [(1, 0), (4, 0), (1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("of", [worst, one, drawn])
def test_any_answers_make_tasks_that_hold(
    of: Callable[[Plan], Said], slots: int, seqs: int, guesses: int, policy: str
) -> None:
    """Guesses are what these say too: of `worst` all are wrong, of `one` all are right."""
    plan = cached_plan(slots, policy, guesses, batch_seqs=seqs)
    check_plan(plan, SPEC, FORMAT)
    tasks = lowered(plan, of(plan))
    assert verify(tasks, plan.arenas, plan.units) == len(tasks)
    assert tasks == lowered(plan, of(plan))  # a function of plan, passes and answers
    loads = [call for task in tasks for call in task.calls if isinstance(call.operands, ops.Load)]
    if of is one and slots >= 3:
        assert len([c for c in loads if c.operands.target.arena == "host.cache"]) == 3 * len(SPEC.layers)


@pytest.mark.fuzz
@given(st.data())
def test_any_plan_with_caches(data: st.DataObject) -> None:
    plan = data.draw(random_plans(SPEC, FORMAT, cached=True, batch_seqs=data.draw(st.integers(1, 3))))
    of = data.draw(st.sampled_from([worst, one, drawn]))
    tasks = lowered(plan, of(plan), 3)
    assert verify(tasks, plan.arenas, plan.units) == len(tasks)


@pytest.mark.fuzz
@given(st.data())
def test_any_plan_beside_a_device(data: st.DataObject) -> None:
    """With routers, experts and caches anywhere: what a plan from a file may be."""
    fields = {"batch_seqs": data.draw(st.integers(1, 2)), "batches_per_pass": data.draw(st.integers(1, 2))}
    plan = data.draw(device_plans(SPEC, FORMAT, cached=True, **fields))
    check_plan(plan, SPEC, FORMAT)
    tasks = lowered(plan, data.draw(st.sampled_from([worst, one, drawn]))(plan), 3)
    assert verify(tasks, plan.arenas, plan.units) == len(tasks)


@pytest.mark.parametrize("slots", [1, 4, 9])
def test_a_long_prompt_reads_what_no_cache_holds(slots: int) -> None:
    plan = cached_plan(slots)
    lowering = Lowering(plan)
    answer = drawn(plan)
    for position in range(12):
        list(lowering.step(passes.decode(plan, (0,), (position,), passes.DECODE), answer))
    (p,) = passes.prompts(plan, (0,), (30,), None)
    tasks = list(lowering.step(p, answer))
    part = plan.parts["0.experts"]
    read = sum(task.bytes for task in tasks if isinstance(task.calls[0].operands, ops.Load))
    assert read == len(SPEC.layers) * (9 - slots) * part.least_bytes


def test_a_call_that_takes_another_expert_is_found() -> None:
    plan = cached_plan(3)
    tasks = lowered(plan, worst(plan))
    number, task, call = next(
        (i, t, c)
        for i, t in enumerate(tasks)
        for c in t.calls
        if isinstance(c.operands, ops.Experts) and c.operands.outputs
    )
    assert isinstance(call.operands, ops.Experts)
    other = tuple((expert + 1) % 9 for expert in call.operands.first_experts)
    wrong = call._replace(operands=call.operands._replace(first_experts=other))
    tasks[number] = task._replace(calls=[wrong if each is call else each for each in task.calls])
    with pytest.raises(InternalError, match="which holds"):
        verify(tasks, plan.arenas, plan.units)


def test_a_load_that_does_not_wait_for_a_guess_in_its_slot_is_found() -> None:
    """A disk's loads end in any order, so a wrong guess may still be loading when its slot goes to another expert."""
    plan = cached_plan(3, guesses=3)
    tasks = lowered(plan, worst(plan))
    number, task = next((i, t) for i, t in enumerate(tasks) if t.lanes == ("disk0",) and _of_disk(t.after, tasks))
    rest = tuple(other for other in task.after if other not in _of_disk(task.after, tasks))
    tasks[number] = task._replace(after=rest)
    with pytest.raises(InternalError, match="in no order"):
        verify(tasks, plan.arenas, plan.units)


def _of_disk(ids: Sequence[int], tasks: Sequence[Task]) -> list[int]:
    return [task.id for task in tasks if task.id in ids and task.lanes == ("disk0",)]


def test_a_wrong_guess_leaves_first() -> None:
    cache = ExpertCache(3, "lru")
    cache.ask([1, 2])
    slots = [cache.admit(expert, [1, 2]) for expert in (1, 2)]
    assert cache.guess(5, [5]) == 2 and cache.guess(6, [5, 6]) == slots[0]  # of what is there the longest unused
    cache.ask([2, 5])
    assert (cache.slot(2), cache.slot(5), cache.slot(1)) == (slots[1], 2, None)
    assert cache.admit(9, [2, 5, 9]) == slots[0] and cache.slot(6) is None
    cache.ask([1])
    assert cache.admit(1, [1]) == slots[1]  # 2 and 5 were asked for in one pass: that with the lowest number


@pytest.mark.parametrize("policy", POLICIES)
def test_some_leave_before_all_others(policy: str) -> None:
    cache = ExpertCache(3, policy)
    for wanted in ([1], [2, 3], [3]):
        cache.ask(wanted)
        for expert in wanted:
            if cache.slot(expert) is None:
                cache.admit(expert, wanted)
    cache.ask([4, 5, 6])
    assert cache.held == (1, 2, 3) and cache.admit(4, [4, 5, 6], first=[3, 7, None]) == 2
    assert cache.admit(5, [4, 5, 6], first=[4]) == 0  # that is to be kept: of the others the least used
    assert cache.admit(6, [4, 5, 6]) == 1 and cache.admit(7, [4, 5, 6], first=[4]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executor": "host"}, "have a cache, but are not all at home on a disk"),
        ({"executor": "gpu1"}, "lru, lfu on host, gpu0"),
        ({"slots": 0}, "has 0 slots of 9 experts"),
        ({"slots": 10}, "has 10 slots of 9 experts"),
        ({"lifted_rows": 0}, "has lifted_rows 0"),
        ({"guesses": 1}, "has 1 guesses for a row; at most 0 here"),
        ({"policy": "random"}, "'random' on 'gpu0'"),
        ({"layer": 1}, "caches are of the layers"),
    ],
)
def test_each_wrong_cache_is_one_line(change: dict[str, int | str], message: str) -> None:
    plan = device_plan()
    caches = (replace(plan.caches[0], **change), *plan.caches[1:])  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=message):
        check_plan(replace(plan, caches=caches), SPEC, FORMAT)


def test_a_cache_over_a_disk_wants_experts_on_the_disk() -> None:
    both = device_plan(4, 2, 3)
    units = tuple(replace(u, home="host") if u.part == "0.experts" else u for u in both.units)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="experts of layer 0 have a cache, but are not all at home on a disk"):
        check_plan(replace(both, units=units), SPEC, FORMAT)
    twice = (both.caches[0], both.caches[0], *both.caches[1:])
    for caches in (twice, both.caches[1::-1] + both.caches[2:]):
        with pytest.raises(BadRequest, match="at most one in RAM and then one on a device"):
            check_plan(replace(both, caches=caches), SPEC, FORMAT)


@pytest.mark.parametrize(
    ("part", "at", "message"),
    [
        ("0.experts", ("disk0", "host", "host"), "not all at home in RAM, and the CPU's"),
        ("0.experts", ("host", "gpu0", "host"), "not all at home in RAM, and the CPU's"),
        ("0.router", ("gpu0", "gpu0", "gpu0"), "the router of layer 0 is not on host"),
        ("0.router", ("host", "gpu0", "gpu0"), "the router of layer 0 is not on host"),
        ("0.router", ("disk0", "host", "host"), "a router stays with its executor"),
    ],
)
def test_each_wrong_home_is_one_line(part: str, at: tuple[str, str, str], message: str) -> None:
    plan = device_plan()
    home, decode, prefill = at
    fields = {"home": home, "decode": decode, "prefill": prefill}
    units = tuple(replace(u, **fields) if u.part == part else u for u in plan.units)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=message):
        check_plan(replace(plan, units=units), SPEC, FORMAT)


def test_a_replay_guesses_the_tokens_that_come_next() -> None:
    """All that were named, the likeliest first; of tokens that nobody guessed none."""
    plan, said = cached_plan(4, guesses=2), (((0, 1, 2), (3, 4, 5), (6, 7, 8)),) * len(SPEC.layers)
    replay = Replay(plan, RouterTrace(said, "made up", ((), *((((2, 1, 0), (5, 8, 4)),) * (len(SPEC.layers) - 1)))))
    lowering, heard = Lowering(plan), list[tuple[int, int, tuple[int, ...]]]()

    def answer(call: Call) -> Sequence[tuple[int, ...]]:
        assert isinstance(call.operands, ops.Route)
        (row,) = replay.answer(call)
        heard.append((call.operands.layer, call.operands.guesses, row))
        return [row]

    for position in range(3):
        list(lowering.step(passes.decode(plan, (0,), (position,), passes.DECODE), answer))
    of_one = [(guesses, row) for layer, guesses, row in heard if layer == 1]
    assert of_one == [(2, (2, 1, 0)), (0, (0, 1, 2)), (2, (5, 8, 4)), (0, (3, 4, 5)), (2, ()), (0, (6, 7, 8))]
    assert all(guesses == 0 for layer, guesses, _ in heard if layer == 0)


@pytest.mark.parametrize(("named", "guesses", "loaded"), [
    ((2, 5, 7), 1, [5]),  # the likeliest is there, the next one is missing
    ((2, 5, 7), 2, [5, 7]),
    ((2, 1, 0), 3, []),  # all are there
    ((2,), 2, []),
    ((7, 2, 5), 1, [7]),
])  # fmt: skip
def test_a_guess_loads_the_likeliest_that_are_missing(
    named: tuple[int, ...], guesses: int, loaded: list[int]
) -> None:  # fmt: skip
    """At most as many as the cache has guesses, of all that are named. 0, 1 and 2 are there, and asked for."""
    plan = cached_plan(5, guesses=guesses)
    lowering, sizes = Lowering(plan), plan.parts["1.experts"].expert_granules
    for position, likely in enumerate(((), named)):

        def answer(call: Call, likely: tuple[int, ...] = likely) -> list[tuple[int, ...]]:
            assert isinstance(call.operands, ops.Route)
            return [likely if call.operands.guesses else (0, 1, 2)]

        tasks = list(lowering.step(passes.decode(plan, (0,), (position,), passes.DECODE), answer))
    loads = [(call.operands, call.unit) for task in tasks for call in task.calls if isinstance(call.operands, ops.Load)]
    assert [load.lo // sizes for load, u in loads if plan.units[u].part == "1.experts"] == loaded


def test_a_prediction_counts_right_and_wrong_guesses() -> None:
    """Two tokens in turns that share no expert, with slots for one of them: all are missing. Of two guesses a layer,
    one is right."""
    plan, layers = cached_plan(3, guesses=2), len(SPEC.layers)
    guesses = ((0, 8), (4, 8))
    trace = RouterTrace((((0, 1, 2), (3, 4, 5)),) * layers, "made up", (guesses,) * layers)
    use = predict(plan, Ask(prompt_tokens=4, output_tokens=4, context=64), MACHINE, trace=trace).experts
    assert use is not None and (use.wanted, use.missed) == (3 * layers, 3 * layers)
    assert (use.guessed, use.wrong) == (layers - 1, layers - 1)
    assert use.loaded_bytes == (use.missed + use.wrong) * plan.parts["0.experts"].least_bytes


def test_nobody_answers() -> None:
    plan = cached_plan(3)
    with pytest.raises(InternalError, match="has to be answered"):
        list(Lowering(plan).step(passes.decode(plan, (0,), (1,), None)))


def test_a_stated_trace_favours_some_and_leaves_out_none() -> None:
    trace = stated(SPEC)
    for tokens in trace.layers:
        assert all(len(set(token)) == 3 == len(token) and list(token) == sorted(token) for token in tokens)
        counts = sorted((sum(e in token for token in tokens) for e in range(9)), reverse=True)
        assert counts[0] > 1.5 * counts[-1] > 0
    assert trace == stated(SPEC) and "r^-0.5" in trace.source


def test_a_replay_goes_round() -> None:
    plan = cached_plan(2)
    replay, tokens = Replay(plan), stated(SPEC).layers[1]
    call = next(c for t in lowered(plan, one(plan)) for c in t.calls if isinstance(c.operands, ops.Route))
    call = call._replace(operands=call.operands._replace(layer=1))  # type: ignore[union-attr]
    rows = call.batch.total_rows if call.batch else 0
    found = [token for _ in range(len(tokens)) for token in replay.answer(call)]
    assert found == list(tokens) * rows
