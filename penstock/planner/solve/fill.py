"""The one place that makes a plan of what a solver decided: where granules live, where KV does, through which rings.

A solver says of each part in which runs its granules lie (`Run`); `units` cuts them, `filled` adds the rest, with the
arenas to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from penstock.graph.arenas import with_arenas
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.machine import USUAL_READS
from penstock.spec.parts import FFNS, SUM_GRANULES, Part
from penstock.spec.places import GPU, HOST, Executor, Tier
from penstock.spec.plan import ActHome, Cache, KvHome, Plan, PlanModel, Predictor, Unit
from penstock.units import MIB, round_up

# A direct read of 4 MiB and more runs at the disk's full rate; below, each halving costs (docs/LOG.md).
UNIT_BYTES = 16 * MIB
CHUNK_ROWS = 512  # weights are read once a chunk; beyond, arithmetic hides the reading anyway
MIN_CHUNK_ROWS = 16

Resident = dict[str, int]  # part key → granules that stay


# Granules lo..hi of a part, their home, executors of decode and prefill, and the most bytes of a unit.
Run = tuple[int, int, Tier, Executor, Executor, int]


class Kv(NamedTuple):
    """KV of layers lo..hi: where it lives, and who attends to it."""

    lo: int
    hi: int
    home: Tier
    attend: Executor


def units(every: Iterable[Part], runs: Callable[[Part], Iterable[Run]]) -> list[Unit]:
    """The units of all parts; runs of no granules have none."""
    found: list[Unit] = []
    for part in every:
        for lo, hi, home, decode, prefill, unit_bytes in runs(part):
            if lo < hi:
                found += _cut(part.key, lo, hi, home, decode, prefill, *_steps(part, unit_bytes))
    return found


@lru_cache(maxsize=8192)  # most runs of a plan are those of another one that was tried
def _cut(
    key: str, lo: int, hi: int, home: Tier, decode: Executor, prefill: Executor, per_unit: int, step: int
) -> list[Unit]:
    return [Unit(key, *edges, home, decode, prefill) for edges in _even(lo, hi, per_unit, step)]


def filled(
    problem: Problem, units: Sequence[Unit], kv: Iterable[Kv], *, chunk_rows: int, rings: Mapping[Executor, int],
    order: str, main: Executor = HOST, stage_bytes: int = 0, batch_seqs: int | None = None, batches: int = 1,
    page: int | None = None, predictors: tuple[Predictor, ...] = (), caches: tuple[Cache, ...] = (),
) -> Plan:  # fmt: skip
    """The plan, complete. KV homes and rings of nothing are left out. Reads are the usual ones until `with_reads` knows
    better. `main`: who holds activations. `batch_seqs`, `page` (tokens): the whole batch, and what suits the context,
    unless given."""
    ask, spec, machine = problem.ask, problem.spec, problem.machine
    assert ask.context is not None, "settle_context came first"
    seqs = ask.batch if batch_seqs is None else batch_seqs
    block, fmt = (0, seqs * batches), problem.kv
    device_bytes, context_bytes = (
        (machine.device_process_bytes, machine.context_bytes) if main == GPU.executor else (0, 0)
    )
    plan = Plan(
        models=(PlanModel(spec, problem.weights),),
        units=tuple(units),
        kv=tuple(KvHome((lo, hi), block, home, fmt, attend) for lo, hi, home, attend in kv if lo < hi),
        acts=(ActHome((0, len(spec.layers)), block, main),),
        arenas=(),
        batches_per_pass=batches,
        batch_seqs=seqs,
        chunk_rows=chunk_rows,
        logits_rows=max(seqs, chunk_rows if ask.score else 0),
        context=ask.context,
        page_tokens=page or page_tokens(ask.context),
        ring_bytes={tier: nbytes for tier, nbytes in rings.items() if nbytes},
        stage_bytes=stage_bytes,
        order=order,
        io_block_bytes=USUAL_READS.block_bytes,
        io_depth=USUAL_READS.depth,
        io_engine=USUAL_READS.engine,
        process_bytes=round_up(machine.process_bytes + device_bytes + spec.tokenizer_bytes, MIB),
        context_bytes=context_bytes,
        predictors=predictors,
        caches=caches,
    )
    return with_arenas(plan)


def page_tokens(context: int) -> int:
    """Long contexts take long pages (less book-keeping), short ones short pages (less rounding)."""
    return 256 if context >= 1024 else 64


def chunk_options(ask: Ask) -> list[int]:
    """Rows of a prompt's chunk to try, most first. Long prompts may take longer ones: each reads all that streams."""
    most = max(MIN_CHUNK_ROWS, min(CHUNK_ROWS, ask.context or CHUNK_ROWS))
    longer = [rows for rows in (2048, 1024) if rows <= min(ask.prompt_tokens, ask.context or 0) and rows > most]
    return [*longer, most, *(rows for rows in (128, 32, MIN_CHUNK_ROWS) if rows < most)]


def usual_chunks(ask: Ask) -> Iterator[int]:
    """Without the long ones, which save reading from a disk alone."""
    return (rows for rows in chunk_options(ask) if rows <= CHUNK_ROWS)


def even_units(part: Part, lo: int, hi: int, unit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Granules lo..hi in even ranges of at most `unit_bytes`, or of one granule (one expert). An FFN's begin at whole
    fours, which are summed together: one that is cut costs another pass over its rows."""
    return _even(lo, hi, *_steps(part, unit_bytes)) if lo < hi else ()


def _steps(part: Part, unit_bytes: int) -> tuple[int, int]:
    """(granules of a unit at most, of which it begins at a multiple)."""
    least = part.least_granules
    per_unit = max(1, unit_bytes // part.least_bytes) * least
    if least > 1:
        return per_unit, least
    return per_unit, SUM_GRANULES if part.kind in FFNS and per_unit >= 4 * SUM_GRANULES else 1


@lru_cache(maxsize=1024)  # the layers of a model are alike, and so are many of its plans
def _even(lo: int, hi: int, per_unit: int, step: int) -> tuple[tuple[int, int], ...]:
    count = 1 if per_unit >= hi - lo else -(-(hi - lo) // (per_unit - step + 1))
    inner = ((lo + (hi - lo) * i // count) // step * step for i in range(1, count))
    return tuple(pairwise([lo, *(edge for edge in dict.fromkeys(inner) if edge > lo), hi]))


def share_out(wanted: Sequence[Part], rest: Mapping[str, int], budget: int, found: Resident) -> int:
    """Adds even shares of `rest` (granules, part by part) to `found`; returns the bytes that they take."""
    total = sum(rest[part.key] * part.granule_bytes for part in wanted)
    share, taken = min(1.0, max(0, budget) / total) if total else 0.0, 0
    for part in wanted:
        found[part.key] = int(rest[part.key] * share) // part.least_granules * part.least_granules
        taken += found[part.key] * part.granule_bytes
    for part in wanted:  # the rest, a granule at a time
        if taken + part.least_bytes <= budget and found[part.key] < rest[part.key]:
            found[part.key] += part.least_granules
            taken += part.least_bytes
    return taken


def share_slots(experts: Sequence[Part], budget: int) -> list[int]:
    """Slots of the cache of each of these parts: one, and even shares of what `budget` bytes hold beside."""
    each = [part.least_bytes for part in experts]
    slots = [1 + max(0, min(budget // sum(each), part.experts - 1)) for part in experts]
    budget -= sum((n - 1) * nbytes for n, nbytes in zip(slots, each, strict=True))
    for i, part in enumerate(experts):
        if each[i] <= budget and slots[i] < part.experts:
            slots[i], budget = slots[i] + 1, budget - each[i]
    return slots


def bytes_of(parts: Mapping[str, Part], granules: Mapping[str, int]) -> int:
    """Of so many granules of each part."""
    return sum(count * parts[key].granule_bytes for key, count in granules.items())
