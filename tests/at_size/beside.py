"""Draws how a case of `tests.at_size.beside_device` runs: plans for an emulated device, and the passes through them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.arenas import Layout, with_arenas
from penstock.graph.batch import Batch
from penstock.graph.tasks import Pass
from penstock.planner.families import FAMILIES, plan_of
from penstock.planner.solve import settle_context, solve
from penstock.planner.solve.problem import Problem
from penstock.runtime.device import uses_device
from penstock.runtime.device.choose import choose
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.parts import parts
from penstock.spec.places import is_disk
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from tests.at_size.draws import VOCABULARY, Case, schedule
from tests.cpu.commands import MACHINE
from tests.cpu.configs import TINY_CONFIGS
from tests.plans import device_plans, resident_plan, with_pages

T = TypeVar("T")
KV = ("float32", "bf16", "int8", "int4", "int4-g32")
FORMATS = ("int4", "int8", "bf16", "float16", "float32", "int4-g32")
NEURONS = ("int4-neurons", "float32-neurons", "int8-neurons", "bfloat16-neurons")
LONGEST = 300  # tokens of a context
MOST_STREAMED = 1 << 30  # bytes of a run
MOST_STEPS = 7  # of decoding, behind prompts; from the fourth on they may be views (`graph.recurring`)
_TRIED = 4  # draws of a strategy, whose first ones are the simplest


def drawn(strategy: st.SearchStrategy[T], number: int) -> T:
    """An example of a strategy, the same for the same number."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=_TRIED, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def note(value: T) -> None:
        found.append(value)

    note()
    return found[-1]


def fitted(case: Case, rng: random.Random) -> Case:
    """The case as it can run beside a device: in formats that devices have kernels for, and with few experts."""
    config, weights = dict(case.config), case.weights
    if config["hidden_size"] == 64 and rng.random() < 0.7:  # narrow: of any family
        config = json.loads(TINY_CONFIGS[rng.choice(sorted(TINY_CONFIGS))]) | {"vocab_size": VOCABULARY}
        config["max_position_embeddings"] = max(config["max_position_embeddings"], LONGEST)
    for name in ("num_experts", "num_local_experts"):
        if name in config:
            config[name] = min(config[name], max(4, 2 * config.get("num_experts_per_tok", 2), rng.randint(4, 20)))
    if parse_format(weights).for_cpu:
        weights = rng.choice(FORMATS)
    relu = config["model_type"] == "opt" or "relu" in case.shape
    if relu and rng.random() < 0.6:
        weights = rng.choice(NEURONS)
    return replace(case, config=config, weights=weights, kv=rng.choice(KV))


def lessen(config: dict[str, Any]) -> bool:
    """Takes a layer from a config, or experts where one layer is left. False where nothing can be taken."""
    if config["num_hidden_layers"] > 1:
        config["num_hidden_layers"] -= 1
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
        return True
    for name in ("num_experts", "num_local_experts"):
        if config.get(name, 0) > config.get("num_experts_per_tok", 2) + 1:
            config[name] -= 1
            return True
    return False


@dataclass(frozen=True)
class Setting:
    """`by`: who made the plan. `order`: of KV pages, as `with_pages` takes it. `prompts`: prompts are read by passes of
    their own, and then answered; else rows of all kinds go through together."""

    by: str
    plan: Plan
    order: tuple[int, ...]
    prompts: bool
    jitter_s: float
    link_bytes_per_s: float

    def __str__(self) -> str:
        plan = self.plan
        homes = sorted({f"{unit.part.rpartition('.')[2]} {unit.placement}" for unit in plan.units})
        kv = sorted({f"{home.home} by {home.attend}" for home in plan.kv})
        return (
            f"plan {self.by}, {', '.join(homes)}, main {plan.main}, KV {', '.join(kv)}, {plan.batches_per_pass} x"
            f" {plan.batch_seqs} sequences, {plan.chunk_rows} rows, {plan.order}, sparsity {plan.sparsity},"
            f" {len(plan.caches)} caches, {len(plan.device_rows)} shared, values {plan.value_share:g},"
            f" {'prompts' if self.prompts else 'mixed'}"
        )


def setting(rng: random.Random, case: Case, packed: Packed) -> Setting:
    """Raises BadRequest or DoesNotFit where a solver has no plan."""
    by = rng.choice(("drawn", "drawn", "solved", "family"))
    plan = _drawn_plan(rng, case, packed) if by == "drawn" else None
    if plan is None:
        by, plan = _solved_plan(rng, case, packed, by == "family")
    if packed.spec.fires and plan.sparsity == "off" and not plan.caches and rng.random() < 0.6:
        plan = replace(plan, sparsity="exact")
    if not any(home.home != home.attend for home in plan.kv) and rng.random() < 0.3:
        plan = replace(plan, value_share=rng.choice((0.05, 0.3, ALL_VALUES, ALL_VALUES)))
    order: tuple[int, ...] = ()
    plan = with_arenas(plan)
    if rng.random() < 0.5 and not plan.kv_pages:
        kv = Layout(plan).kv
        plan = with_arenas(replace(plan, kv_pages=kv.pages + kv.page_group * rng.randrange(3)))
    if plan.kv_pages or rng.random() < 0.5:
        kv = Layout(plan).kv
        order = tuple(rng.sample(range(groups := kv.pages // kv.page_group), groups))
    return Setting(
        by, plan, order, prompts=rng.random() < 0.5, jitter_s=rng.choice((0.0, 0.0, 0.002)),
        link_bytes_per_s=rng.choice((1e12, 6e9)),
    )  # fmt: skip


ALL_VALUES = 1 - 2.0**-30  # a share of any context that leaves nothing out, by the way that chooses


def _drawn_plan(rng: random.Random, case: Case, packed: Packed) -> Plan:
    chunk = rng.choice((7, 32, 64, 200, 512))
    seqs = rng.choice((1, 2, 3, 5))
    fields: dict[str, Any] = {
        "batch_seqs": seqs, "batches_per_pass": rng.choice((1, 1, 2, 3)), "chunk_rows": chunk,
        "logits_rows": max(seqs, rng.choice((8, 32))), "context": rng.choice((70, 128, LONGEST)), "kv": case.kv,
        "io_block_bytes": 4096 * rng.choice((63, 256, 1024)), "io_depth": rng.choice((1, 4)),
        "io_engine": rng.choice(("threads", "io_uring")),
    }  # fmt: skip
    strategy = device_plans(packed.spec, packed.weights, cached=rng.random() < 0.7, **fields)
    return drawn(strategy, rng.randrange(1 << 30))


def _solved_plan(rng: random.Random, case: Case, packed: Packed, family: bool) -> tuple[str, Plan]:
    """A candidate of any solver, for random limits and rates, or the plan of another system."""
    weight_bytes = sum(part.granules * part.granule_bytes for part in parts(packed.spec, packed.weights))
    limit = int(weight_bytes * rng.choice((0.2, 0.5, 0.8, 1.5))) + (rng.choice((8, 64)) << 20)
    rates = tuple(
        replace(rate, s_per_byte=rate.s_per_byte * rng.choice((0.1, 1, 1, 10))) for rate in MACHINE.rates
    )  # fmt: skip
    chosen = choose("emulated", replace(MACHINE, rates=rates), limit)
    ask = Ask(
        prompt_tokens=rng.choice((16, 64, 200)), output_tokens=8, batch=rng.choice((1, 2, 4, 9)), context=LONGEST,
        kv=case.kv, kv_home=case.kv_home, objective=case.objective, device_memory_bytes=limit, use_device=True,
        resident_bytes=None if case.share == 1 else int(case.share * weight_bytes),
        kv_tokens=None if rng.random() < 0.7 else 2 * LONGEST,
    )  # fmt: skip
    ask = settle_context(ask, packed.spec)
    if family:
        problem = Problem(ask, packed.spec, packed.weights, chosen.machine)
        found = {name: plan for name in FAMILIES if (plan := plan_of(name, problem)) is not None}
        if not found:
            raise BadRequest("no family has a plan")
        name = rng.choice(sorted(found))
        return name, found[name]
    solved = solve(ask, packed.spec, packed.weights, chosen.machine, every=True)
    some = [each.candidate for each in solved.compared if not each.candidate.cannot_run]
    if not (some := [each for each in some if uses_device(each.plan)]):
        raise BadRequest("no plan uses the device")
    one = rng.choice(some)
    return one.strategy, one.plan


Ids = np.ndarray[Any, np.dtype[np.int32]]
# Of a pass: it, the ids of its batches, and of each row of logits its sequence and position.
Planned = tuple[Pass, list[Ids], list[tuple[int, int]]]


def company(rng: random.Random, how: Setting, ids: Ids) -> list[Planned]:
    """Passes over all sequences. `ids`: int32 [sequences, context]."""
    plan, (seqs, context) = how.plan, ids.shape
    if how.prompts:
        longest = min(context - MOST_STEPS, max(1, passes_in_time(plan) * plan.chunk_rows // plan.batch_seqs))
        lengths = [rng.choice((1, rng.randint(1, min(40, longest)), rng.randint(1, longest))) for _ in range(seqs)]
        return _answered(rng, how, range(seqs), lengths, ids)
    wanted, made = rng.randint(50, 500), list[Pass]()
    most = min(plan.chunk_rows, max(plan.batch_seqs, rng.choice((16, 64, 512))))
    for rows in schedule(rng, seqs, most, wanted):
        kept = [each for each in rows if each.start + each.rows <= context]
        if len(kept) < len(rows):
            break
        if len(made) >= passes_in_time(plan):
            break
        by_batch: dict[int, list[Any]] = {}
        for each in kept:
            by_batch.setdefault(each.seq // plan.batch_seqs, []).append(each)
        made.append(_mixed(plan, by_batch))
    return [_placed(how, p, ids) for p in _chained(rng, made)]


def alone(rng: random.Random, how: Setting, seq: int, places: list[int], ids: Ids, prompt: int) -> list[Planned]:
    """Passes of one sequence by itself, in other chunks, with logits at these positions. `prompt`: tokens of its prompt
    where prompts are read by passes of their own."""
    if how.prompts:
        fewest = min(how.plan.chunk_rows, -(-prompt // passes_in_time(how.plan)))
        shorter = replace(how, plan=replace(how.plan, chunk_rows=rng.randint(fewest, how.plan.chunk_rows)))
        return _answered(rng, shorter, [seq], [prompt], ids, max(places) + 1 - prompt)
    made, reached = list[Pass](), 0
    fewest = min(how.plan.chunk_rows, -(-max(places) // passes_in_time(how.plan)) or 1)
    batch = seq // how.plan.batch_seqs
    for at in sorted(places):
        while reached <= at:
            rows = 1 if reached == at else min(at - reached, rng.randint(fewest, how.plan.chunk_rows))
            purpose = "decode" if rows == 1 and not how.plan.predictors else passes.MIXED
            made.append(Pass(purpose, (Batch(batch, (seq,), (reached,), (rows,), (rows - 1,)),), None))
            reached += rows
    return [_placed(how, p, ids) for p in _chained(rng, made)]


def _answered(
    rng: random.Random, how: Setting, seqs: Any, lengths: list[int], ids: Ids, steps: int = MOST_STEPS
) -> list[Planned]:
    plan = how.plan
    made = list(passes.prompts(plan, list(seqs), lengths, passes.DECODE if steps else None))
    if len(seqs) == 1:  # `prompts` has it in the first batch
        number = seqs[0] // plan.batch_seqs
        made = [p._replace(batches=tuple(b._replace(id=number) for b in p.batches)) for p in made]
    for step in range(steps):
        positions = [length + step for length in lengths]
        if len(seqs) == 1:
            batch = Batch(seqs[0] // plan.batch_seqs, (seqs[0],), (positions[0],), (1,), (0,))
            made.append(Pass("decode", (batch,), None))
        else:
            made.append(passes.decode(plan, list(seqs), positions, None))
    return [_placed(how, p, ids) for p in _chained(rng, made)]


def _mixed(plan: Plan, by_batch: dict[int, list[Any]]) -> Pass:
    batches = []
    for number, rows in sorted(by_batch.items()):
        seqs, start, counts = zip(*sorted(rows), strict=True)
        ends = np.cumsum(counts)
        batches.append(Batch(number, seqs, start, counts, tuple(int(end) - 1 for end in ends)))
    most = max(batch.total_rows for batch in batches)
    decodes = all(batch.most_rows == 1 for batch in batches)
    return Pass("decode" if decodes else passes.MIXED, tuple(batches), None, not decodes and most <= plan.asking_rows)


def _chained(rng: random.Random, made: list[Pass]) -> list[Pass]:
    """Each pass says what the next one reads, or nothing, or something else."""
    after = [*(p.stream for p in made[1:]), None]
    return [
        p._replace(then=rng.choice((following, following, following, None, rng.choice(after))))
        for p, following in zip(made, after, strict=True)
    ]


def _placed(how: Setting, p: Pass, ids: Ids) -> Planned:
    tokens, rows = list[Ids](), list[tuple[int, int]]()
    for batch in p.batches:
        spans = list(zip(batch.seqs, batch.start, batch.rows, strict=True))
        tokens.append(np.concatenate([ids[seq, start : start + n] for seq, start, n in spans]))
        flat = [(seq, start + i) for seq, start, n in spans for i in range(n)]
        rows += [flat[row] for row in batch.logits]
    return with_pages(how.plan, how.order, p), tokens, rows


def on_cpu(plan: Plan, packed: Packed) -> Plan:
    """The same passes with everything in RAM and by the CPU."""
    plain = resident_plan(
        packed.spec, packed.weights, batch_seqs=plan.batch_seqs, batches_per_pass=plan.batches_per_pass,
        chunk_rows=plan.chunk_rows, logits_rows=plan.logits_rows, context=plan.context,
    )  # fmt: skip
    kv = tuple(replace(home, format=plan.kv[0].format) for home in plain.kv)
    return with_arenas(
        replace(
            plain, kv=kv, page_tokens=plan.page_tokens, kv_pages=Layout(plan).kv.pages, value_share=plan.value_share
        )
    )


def sequences(plan: Plan) -> int:
    """How many sequences have room for their whole context."""
    kv = Layout(plan).kv
    return min(plan.batch_seqs * plan.batches_per_pass, kv.pages // kv.pages_per_seq)


def ids_of(case: Case, plan: Plan) -> Ids:
    """Random ids, int32 [sequences, context]."""
    shape = (sequences(plan), plan.context)
    return np.random.default_rng(case.number).integers(0, VOCABULARY, shape).astype(np.int32)


def passes_in_time(plan: Plan) -> int:
    """How many passes read few enough bytes of the disk."""
    nbytes = sum(plan.unit_bytes(unit) for unit in plan.units if is_disk(unit.home))
    return max(4, min(20, MOST_STREAMED // max(1, nbytes)))
