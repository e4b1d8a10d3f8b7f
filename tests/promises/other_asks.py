"""The same model and machine, asked for something else: other objectives, more sequences, other formats of KV, longer
prompts, a faster device. Each check yields a line for what does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import DoesNotFit
from penstock.planner.solve import Solved, settle_context
from penstock.spec.places import GPU
from tests.promises.checks import WORSE, compared, score, worse
from tests.promises.draws import Setting

# Tokens/s of the whole batch may fall by so much with twice the sequences, whose KV takes memory from weights.
_FEWER = 1.15
# KV of fewer bytes may cost so much: formats of blocks are unpacked where attention reads them.
_UNPACKED = 1.15
_PROMPTS = (16, 64, 256, 1024)
_MOST_SEQUENCES = 16


def holds(of: Setting, solved: Solved, times: float) -> Iterator[str]:
    """All checks of this module. `times`: so much faster is the device."""
    yield from objectives(of)
    yield from more_sequences(of, solved)
    yield from formats_of_kv(of)
    yield from longer_prompts(of)
    if any(tier.name == GPU.executor for tier in of.machine.tiers):
        faster = replace(of, machine=of.machine.faster(lambda lane: lane == GPU.kernels, times))
        yield from compared(f"device's lane × {times:.3f}", of, solved, faster)


def objectives(of: Setting) -> Iterator[str]:
    """The plan for an objective is no slower by it than the plan for the other one."""
    for wanted, other in (("throughput", "latency"), ("latency", "throughput")):
        asked = of.asking(objective=wanted)
        plan, rival = _solved(asked), _solved(of.asking(objective=other))
        if rival is not None and plan is None:
            yield f"for {wanted} nothing fits, and for {other} something does"
        if rival is not None and plan is not None:
            yield from worse(f"{wanted} by {other}'s plan", score(asked, rival), score(asked, plan), rival, plan)


def more_sequences(of: Setting, solved: Solved) -> Iterator[str]:
    """Twice the sequences give as many tokens a second in all, or nearly."""
    if of.ask.batch > _MOST_SEQUENCES or of.ask.kv_tokens is not None:
        return
    twice = _solved(of.asking(batch=2 * of.ask.batch))
    if twice is not None:
        few, many = solved.prediction.decode_tokens_per_s, twice.prediction.decode_tokens_per_s
        if many * _FEWER < few:
            how = f"{solved.strategy!r} → {twice.strategy!r}"
            yield f"{2 * of.ask.batch} sequences: {few:.4g} → {many:.4g} tokens/s; {how}"


def formats_of_kv(of: Setting) -> Iterator[str]:
    """KV of fewer bytes fits where KV of more does, and is hardly slower."""
    before: tuple[Setting, Solved] | None = None
    for kv in ("float16", "int8", "int4"):
        asked = of.asking(kv=kv)
        plan = _solved(asked)
        if before is not None and plan is None:
            yield f"KV in {kv} does not fit, and in {before[0].ask.kv} it does"
        if before is not None and plan is not None:
            most_s = _UNPACKED / WORSE * score(*before)
            yield from worse(f"KV in {kv}, not {before[0].ask.kv}", most_s, score(asked, plan), before[1], plan)
        before = before if plan is None else (asked, plan)


def longer_prompts(of: Setting) -> Iterator[str]:
    """A longer prompt is no faster: neither what the ask brings down, nor the first token."""
    context = settle_context(of.ask, of.spec).context
    before: tuple[Setting, Solved] | None = None
    for prompt in _PROMPTS:
        asked = of.asking(prompt_tokens=prompt, context=context)
        plan = _solved(asked) if context is not None and prompt < context else None
        if before is not None and plan is not None:
            what = f"prompt of {before[0].ask.prompt_tokens}, not {prompt}"
            shorter = before[1]
            yield from worse(what, score(asked, plan), score(*before), plan, shorter)
            if (
                of.ask.objective == "latency" and of.ask.output_tokens == 1
            ):  # more tokens may be worth a later first one
                yield from worse(
                    f"{what}, first token", plan.prediction.ttft_s, shorter.prediction.ttft_s, plan, shorter
                )
        before = before if plan is None else (asked, plan)


def _solved(of: Setting) -> Solved | None:
    try:
        return of.solve()
    except DoesNotFit:
        return None
