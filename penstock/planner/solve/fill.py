"""Makes a complete `Plan` of a solver's decisions: where granules and KV live, and which rings weights stream through.

A solver says in which runs the granules of each part lie (`Run`). `units` cuts the runs to units. `filled` makes the
plan of these, with every field set and all arenas sized. No other module of the planner makes a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from penstock.graph.arenas import Layout, with_arenas
from penstock.planner.sizes import page_tokens, shared_tokens
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.machine import USUAL_READS
from penstock.spec.parts import FFNS, PAGE_BYTES, Part
from penstock.spec.places import GPU, HOST, Executor, Tier
from penstock.spec.plan import ActHome, Cache, KvHome, Plan, PlanModel, Predictor, Unit
from penstock.units import MIB, round_up

# (lo, hi, home, executor of decode, executor of prefill, the most bytes of a unit) of granules lo..hi of a part.
Run = tuple[int, int, Tier, Executor, Executor, int]
# (lo, hi, home, executor of attention) of the KV of layers lo..hi.
KvRun = tuple[int, int, Tier, Executor]


def units(every: Iterable[Part], runs: Callable[[Part], Iterable[Run]], fired: float = 1.0) -> list[Unit]:
    """The units of some parts. `runs`: the runs of a part. A run of no granules gives no units. `fired`: the share of
    neurons that are expected to fire (`Unit.active`), in parts that lie by neurons. `filled` sets it too, in a
    unit after the other: with 23,000 of them, OPT-175B in whole records, that is four fifths of making a plan."""
    cut: list[Unit] = []
    for part in every:
        active = fired if part.by_neurons else 1.0
        for lo, hi, home, decode, prefill, unit_bytes in runs(part):
            if lo < hi:
                cut += _cut(part.key, lo, hi, home, decode, prefill, *_steps(part, unit_bytes), active)
    return cut


@lru_cache(maxsize=8192)  # solvers try many plans, and most runs of a plan are in another one too
def _cut(
    key: str, lo: int, hi: int, home: Tier, decode: Executor, prefill: Executor, per_unit: int, step: int, active: float
) -> list[Unit]:
    """The units of one run. `per_unit`, `step`: as `_steps` gives them."""
    return [Unit(key, *edges, home, decode, prefill, active) for edges in _even(lo, hi, per_unit, step)]


def filled(
    problem: Problem, units: Sequence[Unit], kv: Iterable[KvRun], *, chunk_rows: int, rings: Mapping[Executor, int],
    order: str, main: Executor = HOST, stage_bytes: int = 0, batch_seqs: int | None = None, batches: int = 1,
    page: int | None = None, predictors: tuple[Predictor, ...] = (), caches: tuple[Cache, ...] = (),
) -> Plan:  # fmt: skip
    """The complete plan.

    kv              empty ranges of layers are left out
    chunk_rows      the most rows of a batch in a prefill pass
    rings           executor → bytes of its ring; rings of 0 bytes are left out
    order           one of `spec.plan.ORDERS`
    main            the executor that holds activations
    batch_seqs      sequences of a batch; None: all that were asked for
    batches         batches of a pass
    page            tokens of a KV page; None: `page_tokens` of the context

    Reads of the disk are the usual ones, which `reads.with_reads` replaces.
    """
    ask, spec, machine = problem.ask, problem.spec, problem.machine
    seqs = ask.batch if batch_seqs is None else batch_seqs
    block, fmt = (0, seqs * batches), problem.kv
    with_device, process_bytes = main == GPU.executor, machine.process_bytes + spec.tokenizer_bytes
    predictors = predictors or tuple(replace(each, home=main) for each in problem.predictors)
    there = (each.part(spec).nbytes for each in predictors if each.home == GPU.executor)
    plan = Plan(
        models=(PlanModel(spec, problem.weights),),
        units=_firing(problem, units, seqs),
        kv=tuple(KvHome((lo, hi), block, home, fmt, attend) for lo, hi, home, attend in kv if lo < hi),
        acts=(ActHome((0, len(spec.layers)), block, main),),
        arenas=(),
        batches_per_pass=batches,
        batch_seqs=seqs,
        chunk_rows=chunk_rows,
        logits_rows=max(seqs, chunk_rows if ask.score else min(chunk_rows, ask.score_rows)),
        context=problem.context,
        page_tokens=page or page_tokens(problem.context),
        ring_bytes={tier: nbytes for tier, nbytes in rings.items() if nbytes},
        stage_bytes=max(stage_bytes, round_up(max(there, default=0), PAGE_BYTES)),
        order=order,
        io_block_bytes=USUAL_READS.block_bytes,
        io_depth=USUAL_READS.depth,
        io_engine=USUAL_READS.engine,
        process_bytes=round_up(process_bytes + with_device * machine.device_process_bytes, MIB),
        context_bytes=with_device * machine.context_bytes,
        predictors=predictors,
        caches=caches,
        # Published activity is of no model that is here, and its plans are not run.
        sparsity="off" if predictors and problem.sparsity != "predict" else problem.sparsity,
        levels=problem.levels,
        value_share=ask.value_share,
    )
    return with_arenas(plan if ask.kv_tokens is None else _shared(plan, ask))


def _firing(problem: Problem, units: Sequence[Unit], rows: int) -> tuple[Unit, ...]:
    """The units with the share of neurons that `rows` rows are expected to fire (`Unit.active`), where a plan leaves
    out the others."""
    share = problem.fired_share(rows)
    if share >= 1:
        return tuple(units)
    by_neurons = {key for key, part in problem.parts.items() if part.by_neurons}
    return tuple(
        replace(unit, active=share) if unit.active != share and unit.part in by_neurons else unit for unit in units
    )


def _shared(plan: Plan, ask: Ask) -> Plan:
    """The plan with pools whose pages sequences share, for the tokens that were asked for: of as many of the batch's
    sequences as the plan has at once."""
    layout, seqs = Layout(plan), plan.sequences
    if ask.kv_tokens is not None and seqs < ask.batch:
        ask = replace(ask, batch=seqs, kv_tokens=max(1, ask.kv_tokens * seqs // ask.batch))
    tokens = shared_tokens(ask, plan.page_tokens * layout.kv.page_group)
    pages = max(layout.kv.pages_per_seq, tokens // plan.page_tokens)
    return replace(plan, kv_pages=pages if pages < layout.kv.pages else 0)


def _steps(part: Part, unit_bytes: int) -> tuple[int, int]:
    """(the most granules of a unit, the step): units begin at multiples of the step."""
    least = part.least_granules
    per_unit = max(1, unit_bytes // part.least_bytes) * least
    if least > 1:
        return per_unit, least
    return per_unit, part.sum_granules if part.kind in FFNS and per_unit >= 4 * part.sum_granules else 1


@lru_cache(maxsize=1024)  # the layers of a model are alike, and so are many of its plans
def _even(lo: int, hi: int, per_unit: int, step: int) -> tuple[tuple[int, int], ...]:
    """Ranges lo..hi of at most `per_unit` granules that begin at multiples of `step`."""
    count = 1 if per_unit >= hi - lo else -(-(hi - lo) // (per_unit - step + 1))
    inner = ((lo + (hi - lo) * i // count) // step * step for i in range(1, count))
    return tuple(pairwise([lo, *(edge for edge in dict.fromkeys(inner) if edge > lo), hi]))
