"""Finds what a long context costs in speed, and the longest context that costs nothing.

KV takes memory from weights, which stream then. So the speed falls by steps, and solving says where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.errors import DoesNotFit
from penstock.planner.explain import rate
from penstock.planner.solve import Solved, settle_context
from penstock.spec.ask import DEFAULT_CONTEXT, Ask
from penstock.spec.model import ModelSpec
from penstock.units import format_bytes

_FREE = 0.98  # of the speed: a context that leaves so much of it costs nothing
_HALVINGS = 3  # between the longest context that is known to be free and the next one that is not

Solve = Callable[[Ask], Solved]


def grown(ask: Ask, spec: ModelSpec, solve: Solve) -> tuple[Ask, Solved, str]:
    """The ask with the longest context that costs no speed, its plan, and a sentence about both. Begins with the
    context of `settle_context`, and doubles it. Raises as `solve`."""
    ask = settle_context(replace(ask, context=None, grow_context=False), spec)
    first = best = solve(ask)
    context, beyond, dear = _context(ask), spec.max_positions, None
    while context < spec.max_positions:
        longer = min(2 * context, spec.max_positions)
        tried = _within(solve, ask, longer)
        if tried is None or _costs(tried, first):
            beyond, dear = longer, tried
            break
        best, context = tried, longer
    for _ in range(_HALVINGS if context < beyond else 0):
        middle = (context + beyond) // 2
        tried = _within(solve, ask, middle)
        if tried is None or _costs(tried, first):
            beyond, dear = middle, tried
        else:
            best, context = tried, middle
    if context == spec.max_positions:
        why = "the model's longest"
    elif dear is None:
        why = f"{beyond} do not fit"
    else:
        why = f"with {beyond} it would be {_speed(dear)} tokens/s, not {_speed(first)}"
    return replace(ask, context=context), best, f"context of {context} tokens, {_kv(best)} of KV: {why}"


def cost_of_context(ask: Ask, spec: ModelSpec, solved: Solved, solve: Solve) -> str | None:
    """A sentence about what a context costs that the user named; None for one that is no longer than usual. Raises as
    `solve`."""
    usual = _context(settle_context(replace(ask, context=None), spec))
    if ask.context is None or ask.context <= usual:
        return None
    less = _within(solve, ask, usual)
    if less is None or not _costs(solved, less):
        return f"context of {ask.context} tokens, {_kv(solved)} of KV: costs no speed"
    return (
        f"context of {ask.context} tokens, {_kv(solved)} of KV: {_speed(solved)} tokens/s, where {usual} would give"
        f" {_speed(less)}"
    )


def _within(solve: Solve, ask: Ask, context: int) -> Solved | None:
    try:
        return solve(replace(ask, context=context))
    except DoesNotFit:
        return None


def _costs(longer: Solved, shorter: Solved) -> bool:
    return longer.prediction.decode_tokens_per_s < _FREE * shorter.prediction.decode_tokens_per_s


def _context(ask: Ask) -> int:
    return ask.context or DEFAULT_CONTEXT


def _kv(solved: Solved) -> str:
    return format_bytes(sum(arena.bytes for arena in solved.plan.arenas if arena.name.endswith(".kv")))


def _speed(solved: Solved) -> str:
    return rate(solved.prediction.decode_tokens_per_s)
