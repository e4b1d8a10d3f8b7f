"""What users take for granted of plans. Each check yields a line for what does not hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from penstock.errors import DoesNotFit
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.verify import verify
from penstock.planner.bound import score_s
from penstock.planner.families import FAMILIES, plan_of
from penstock.planner.predict import Prediction
from penstock.planner.shorten import quick
from penstock.planner.solve import Solved, settle_context
from penstock.planner.solve.problem import Problem
from penstock.planner.what_if import what_if
from penstock.spec import plan as plans
from penstock.spec.places import CPU, GPU, HOST, Lane, is_disk, is_link
from penstock.units import GIB
from tests.promises.draws import Setting

# A factor of seconds. Of plans within 1.05 of the best the one that reads least from disks is taken (`ranking`), and a
# plan is not simulated that could be 1.025 times as fast at best.
WORSE = 1.05 * 1.025
_MOST_VERIFIED = 1500  # units. Lowering a pass of more of them takes seconds


def score(of: Setting, solved: Solved) -> float:
    return score_s(solved.prediction, solved.plan, settle_context(of.ask, of.spec))


def problem_of(of: Setting) -> Problem:
    return Problem(settle_context(of.ask, of.spec), of.spec, of.weights, of.machine, of.trace, of.firing)


def figures(prediction: Prediction) -> Iterator[tuple[str, float]]:
    """Every number that is promised, by its place."""

    def of(at: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield from of(f"{at}.{key}", each)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield at, value

    yield from of("", json.loads(json.dumps(prediction.to_json())))


def is_sane(of: Setting, solved: Solved) -> Iterator[str]:
    """Finite figures, speeds above zero, bytes within limits; the plan is valid, and JSON keeps it."""
    problem, prediction, plan = problem_of(of), solved.prediction, solved.plan
    for at, value in figures(prediction):
        if not math.isfinite(value) or value < 0:
            yield f"{at} is {value}"
    if not (prediction.decode_tokens_per_s > 0 and prediction.ttft_s > 0 and prediction.total_s > 0):
        yield f"no speed: {prediction}"
    for tier, nbytes in plan.tier_bytes().items():
        if tier in (HOST, GPU.executor) and nbytes > problem.limit_bytes(tier):
            yield f"{tier} takes {nbytes}, and may take {problem.limit_bytes(tier)}"
    if plans.loads(plans.dumps(plan), "a plan") != plan:
        yield "JSON changes the plan"
    check_plan(plan, of.spec, of.weights)
    if len(plan.units) <= _MOST_VERIFIED and not plan.asks:
        verified(solved)


def verified(solved: Solved) -> None:
    """Raises where tasks of a prompt and of a token break a rule."""
    plan = solved.plan
    lowering, seqs = Lowering(plan), tuple(range(min(2, plan.batch_seqs * plan.batches_per_pass)))
    tasks = []
    for seq in seqs:
        for p in islice(passes.prefill(plan, seq, min(20, plan.context - 1), None), 2):
            tasks += lowering.step(p)
    tasks += lowering.step(passes.decode(plan, seqs, (min(20, plan.context - 1),) * len(seqs), passes.DECODE))
    verify(tasks, plan.arenas)


def compared(what: str, of: Setting, before: Solved, after: Setting) -> Iterator[str]:
    """What should be no slower is not: neither what the ask brings down, nor both speed and first token."""
    try:
        solved = after.solve()
    except DoesNotFit as error:
        yield f"{what}: does not fit any more: {error.message}"
        return
    yield from worse(what, score(of, before), score(after, solved), before, solved)


def worse(what: str, before_s: float, after_s: float, before: Solved, after: Solved) -> Iterator[str]:
    if after_s > WORSE * before_s:
        a, b = before.prediction, after.prediction
        yield (
            f"{what}: {after_s / before_s - 1:+.1%} of seconds; {a.decode_tokens_per_s:.4g} → "
            f"{b.decode_tokens_per_s:.4g} tokens/s, first {a.ttft_s:.4g} → {b.ttft_s:.4g} s; {before.strategy!r} → "
            f"{after.strategy!r}"
        )


def more_is_no_worse(of: Setting, solved: Solved, times: float) -> Iterator[str]:
    """More memory, and faster lanes."""
    problem = problem_of(of)
    yield from compared(
        f"RAM × {times:.3f}", of, solved, of.asking(host_memory_bytes=int(problem.host_bytes * times))
    )  # fmt: skip
    if problem.has_device:
        nbytes = int(problem.device_bytes * times)
        tiers = tuple(replace(t, bytes=nbytes) if t.name == GPU.executor else t for t in of.machine.tiers)
        yield from compared(
            f"device × {times:.3f}", of, solved, replace(of, machine=replace(of.machine, tiers=tiers))
        )  # fmt: skip
    lanes: dict[str, Callable[[Lane], bool]] = {"disk": is_disk, "link": is_link, "CPU": lambda lane: lane == CPU}
    for name, which in lanes.items():
        if name != "link" or problem.has_device:
            faster = replace(of, machine=of.machine.faster(which, times))
            yield from compared(f"{name} × {times:.3f}", of, solved, faster)


def longer_is_no_faster(of: Setting, solved: Solved) -> Iterator[str]:
    """A longer context, a longer prompt."""
    ask = settle_context(of.ask, of.spec)
    assert ask.context is not None
    settled = of.asking(context=ask.context)
    longer = [
        ("context", of.asking(context=min(of.spec.max_positions, ask.context * 3 // 2))),
        ("prompt", of.asking(context=ask.context, prompt_tokens=ask.prompt_tokens * 3 // 2 + 1)),
    ]
    for what, after in longer:
        if after.ask.prompt_tokens >= ask.context or after.ask == settled.ask:
            continue
        if ask.kv_tokens is not None and after.ask.context is not None and ask.kv_tokens < after.ask.context:
            continue  # pools have room for one whole context at least: more tokens than were asked for
        try:
            then = after.solve()
        except DoesNotFit:
            continue
        now_s, then_s = score(settled, solved), score(after, then)
        yield from worse(f"shorter {what} ({after.ask.context} → {ask.context})", then_s, now_s, then, solved)


def no_family_is_faster(of: Setting, solved: Solved) -> Iterator[str]:
    problem = problem_of(of)
    if not problem.has_device:
        return
    for name in FAMILIES:
        plan = plan_of(name, problem)
        if plan is None or not problem.fits(plan):
            continue
        prediction = quick(plan, problem.ask, of.machine, False, of.trace)
        other = replace(solved, plan=plan, prediction=prediction, strategy=name)
        yield from worse(f"family {name}", score(of, other), score(of, solved), other, solved)


def advice_holds(of: Setting, solved: Solved) -> Iterator[str]:
    """What `what_if` promises is what the plan of that ask promises, or less."""
    told = what_if(solved, of.ask, of.machine, of.trace, of.firing)
    problem = problem_of(of)
    then: list[tuple[str, Prediction, Setting]] = []
    if told.one_more_gib:
        then.append(("RAM + 1 GiB", told.one_more_gib, of.asking(host_memory_bytes=problem.host_bytes + GIB)))
    if told.one_more_device_gib:
        more = problem.device_bytes + GIB
        tiers = tuple(replace(t, bytes=more) if t.name == GPU.executor else t for t in of.machine.tiers)
        grown = replace(of.asking(device_memory_bytes=more), machine=replace(of.machine, tiers=tiers))
        then.append(("device + 1 GiB", told.one_more_device_gib, grown))
    for what, faster, which in (("disk", told.faster_disk, is_disk), ("link", told.faster_link, is_link)):
        if faster:
            then.append((f"{what} × 2", faster, replace(of, machine=of.machine.faster(which, 2))))
    then += [(f"in {fmt.name}", other, replace(of, weights=fmt)) for fmt, other in told.other_formats]
    for what, promised, after in then:
        try:
            found = after.solve()
        except DoesNotFit as error:
            yield f"advice, {what}: does not fit: {error.message}"
            continue
        as_told = replace(found, prediction=promised, strategy="as told")
        rounds = score(after, found) / found.prediction.total_s  # the told plan may take others at once
        told_s = promised.total_s * rounds
        if score(after, found) > 1.05 * told_s:
            yield from worse(f"advice, {what}", told_s, score(after, found), as_told, found)
        now = solved.prediction.decode_tokens_per_s
        gain, told_gain = found.prediction.decode_tokens_per_s / now, promised.decode_tokens_per_s / now
        if told_gain < 0.97 and gain >= 1 and not what.startswith("in "):
            yield f"advice, {what}: said to be {told_gain:.3f} times as fast, and is {gain:.3f}"


def refusal_holds(of: Setting, error: DoesNotFit) -> Iterator[str]:
    """The least that an error names is enough, and a twentieth less is not. (Beside a device it is
    that of a plan without weights in either memory. With some in the device's it took 2 % less of RAM.)"""
    least, tier = int(error.numbers["minimum_bytes"]), str(error.numbers["tier"])
    limit = "host_memory_bytes" if tier == HOST else "device_memory_bytes"
    for nbytes, is_enough in ((least, True), (least * 19 // 20, False)):
        after = of.asking(**{limit: nbytes})
        if tier == GPU.executor and is_enough:
            tiers = tuple(
                replace(t, bytes=max(t.bytes, nbytes)) if t.name == GPU.executor else t for t in of.machine.tiers
            )  # fmt: skip
            after = replace(after, machine=replace(of.machine, tiers=tiers))
        try:
            after.solve()
        except DoesNotFit as again:
            if is_enough and again.numbers["tier"] == tier:
                yield f"said to need {least}, then: {again.message}"
        else:
            if not is_enough:
                yield f"said to need {least}, and works with {nbytes}"
