"""Plans whose neurons are asked for, within the user's limit of weights that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph.arenas import Layout
from penstock.graph.check_plan import check_plan
from penstock.models import spec_from_config
from penstock.planner.routing import stated_firing
from penstock.planner.solve import settle_context, solve
from penstock.planner.solve.ours import ram
from penstock.planner.solve.problem import Problem
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import Rate
from penstock.spec.parts import PAGE_BYTES, PINNED
from tests.pure.machine import MACHINE

OPT = {
    "model_type": "opt", "vocab_size": 300, "hidden_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "num_attention_heads": 8, "ffn_dim": 8192, "word_embed_proj_dim": 512, "activation_function": "relu",
}  # fmt: skip
READS = tuple(Rate("disk0", op, "*", 1e-5, 4e-10) for op in ("kv_load", "pick"))


@pytest.mark.parametrize("name", ["float32-neurons", "int4-neurons"])
def test_what_stays_of_asked_neurons_counts(name: str) -> None:
    """Granules, the matrix that tells who fires, and slots keep the limit together. Where it is less than what has to
    stay of neurons, none are asked for; where it is more, they are, and that is faster."""
    spec, weights = spec_from_config(OPT, "test"), parse_format(name)
    machine, trace = replace(MACHINE, rates=(*MACHINE.rates, *READS)), stated_firing(spec)
    whole = Problem(settle_context(Ask(context=128), spec), spec, weights, machine, trace)
    pinned = sum(part.nbytes for part in whole.parts.values() if part.kind in PINNED)
    found = list[bool]()
    for share in (0.0, 0.2, 0.6, 0.9):
        problem = whole.asking(resident_bytes=int(share * whole.total_bytes))
        plans = [each.plan for each in ram.candidates(problem)]
        for plan in plans:
            check_plan(plan, spec, weights)
            layout = Layout(plan)
            slots = [unit.recent_slots for unit in plan.units if unit.recent_slots]
            stays = layout.filled_bytes("host.weights") + (layout.filled_bytes("host.recent") if slots else 0)
            assert stays <= max(pinned, int(share * whole.total_bytes)) + PAGE_BYTES * len(slots)  # slots fill pages
        asked = any(unit.asked for plan in plans for unit in plan.units)
        if asked:
            solved, dense = (solve(problem.ask, spec, weights, machine, trace=of) for of in (trace, None))
            assert any(unit.asked for unit in solved.plan.units)
            assert solved.prediction.decode_tokens_per_s > 2 * dense.prediction.decode_tokens_per_s
        found.append(asked)
    assert found == [False, False, True, True]
