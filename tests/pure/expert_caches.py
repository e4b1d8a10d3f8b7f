"""Plans with caches for experts, and what their routers say: what the tests of these caches share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.graph import ops, passes
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Call, Task
from penstock.models import spec_from_config
from penstock.spec.format import Format
from penstock.spec.parts import parts
from penstock.spec.plan import Cache, Plan, Unit
from tests.plans import make_plan
from tests.pure.real_models import TINY

SPEC = spec_from_config(TINY["qwen3_moe"] | {"num_experts_per_tok": 3}, "tiny")  # 9 experts


FORMAT = Format("float32")


def cached_plan(slots: int, policy: str = "lru", guesses: int = 0, **fields: int) -> Plan:
    units = [
        Unit(p.key, 0, p.granules, "disk0" if p.kind == "experts" else "host", "host", "host")  # type: ignore[arg-type]
        for p in parts(SPEC, FORMAT)
    ]
    layers = range(len(SPEC.layers))
    caches = tuple(Cache(i, "host", slots, policy, guesses=guesses) for i in layers)  # type: ignore[arg-type]
    largest = max(p.nbytes for p in parts(SPEC, FORMAT) if p.kind == "experts")
    return make_plan(SPEC, FORMAT, units, ring_bytes={"host": largest}, caches=caches, **fields)  # type: ignore[arg-type]


Said = Callable[[Call], Sequence[Sequence[int]]]


def worst(plan: Plan) -> Said:
    """Always those that were wanted longest ago."""
    at = [0] * len(SPEC.layers)

    def answer(call: Call) -> list[list[int]]:
        assert isinstance(call.operands, ops.Route) and call.batch is not None
        layer, found = call.operands.layer, []
        for _ in range(call.batch.total_rows):
            found.append(sorted((at[layer] + i) % 9 for i in range(3)))
            at[layer] += 3
        return found

    return answer


def one(plan: Plan) -> Said:
    """All rows to the same."""
    return lambda call: [[0, 4, 8]] * (call.batch.total_rows if call.batch else 0)


def drawn(plan: Plan) -> Said:
    draw = random.Random(5)
    return lambda call: [sorted(draw.sample(range(9), 3)) for _ in range(call.batch.total_rows if call.batch else 0)]


def lowered(plan: Plan, answer: Said, steps: int = 6) -> list[Task]:
    lowering, tasks = Lowering(plan), list[Task]()
    seqs = tuple(range(plan.batch_seqs))
    for prompt in (2, 20, 45):  # few rows ask, many read all but what lies in caches
        for p in passes.prompts(plan, seqs, (prompt,) * len(seqs), passes.DECODE):
            tasks += lowering.step(p, answer)
        for position in range(prompt, prompt + steps):
            tasks += lowering.step(passes.decode(plan, seqs, (position,) * len(seqs), passes.DECODE), answer)
    return tasks


def device_plan(slots: int = 4, lifted_rows: int = 2, beneath: int = 0, **fields: int) -> Plan:
    """A cache in a device's memory for every layer, over experts in RAM. `beneath`: over caches in RAM of so many
    slots, over the disk."""
    units, ring = [], 0
    for p in parts(SPEC, FORMAT):
        at = {"experts": "host", "router": "host"}.get(p.kind, "gpu0")
        home = "disk0" if p.kind == "experts" and beneath else at
        ring = max(ring, p.nbytes if home == "disk0" else 0)
        units.append(Unit(p.key, 0, p.granules, home, at, at))  # type: ignore[arg-type]
    layers = range(len(SPEC.layers))
    caches = [Cache(i, "gpu0", slots, "lru", lifted_rows) for i in layers]  # type: ignore[arg-type]
    caches += [Cache(i, "host", beneath, "lfu") for i in layers if beneath]  # type: ignore[arg-type]
    return make_plan(
        SPEC, FORMAT, units, ring_bytes={"host": ring} if ring else {}, main="gpu0",
        caches=tuple(sorted(caches, key=lambda cache: (cache.layer, cache.executor == "gpu0"))),
        kv_homes=[("gpu0", "gpu0")] * len(layers),
        stage_bytes=max(p.granule_bytes for p in parts(SPEC, FORMAT)), **fields,
    )  # fmt: skip
