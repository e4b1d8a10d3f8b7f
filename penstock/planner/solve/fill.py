"""Makes a complete `Plan` of a solver's decisions: where granules and KV live, and which rings weights stream through.

A solver says in which runs the granules of each part lie. `planner/cutting` cuts the runs to units. `filled` makes the
plan of these, with every field set and all arenas sized. No other module of the planner makes a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.graph.arenas import Layout, with_arenas
from penstock.planner.sizes import page_tokens, shared_tokens
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.machine import USUAL_READS
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.places import GPU, HOST, Executor, Tier
from penstock.spec.plan import ActHome, Cache, KvHome, Plan, PlanModel, Predictor, Unit
from penstock.units import MIB, round_up

# (lo, hi, home, executor of attention) of the KV of layers lo..hi.
KvRun = tuple[int, int, Tier, Executor]


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
