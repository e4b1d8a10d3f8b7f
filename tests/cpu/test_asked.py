"""Neurons whose records lie on a disk until they fire: whole models, plans, geometry, real files with direct reads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import ops, passes
from penstock.graph.arenas import with_arenas
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.records import Records
from penstock.graph.verify import verify
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.parts import PAGE_BYTES
from penstock.spec.plan import Plan, Unit
from penstock.store.packed import Packed, open_packed
from tests.cpu.commands import MACHINE
from tests.cpu.engines import GREEDY, load
from tests.cpu.test_neurons import ffn_part, relu_model
from tests.plans import make_plan


def asking(packed: Packed, cuts: tuple[int, ...] = (), hole_bytes: int = 0, **fields: Any) -> Plan:
    """FFNs in units that begin at granules `cuts`: of each part the first stays, of the others the first streams if
    there are three, and the rest is asked for. All else stays."""
    units = []
    for part in packed.parts.values():
        edges = (0, *(cut for cut in cuts if cut < part.granules), part.granules) if part.kind == "ffn" else (0, part.granules)
        for i, (lo, hi) in enumerate(zip(edges, edges[1:], strict=False)):
            away = part.kind == "ffn" and (i > 0 or len(edges) == 2)
            asked = away and not (i == 1 and len(edges) > 3)
            units.append(Unit(part.key, lo, hi, "disk0" if away else "host", "host", "host", asked=asked))
    largest = max((u.hi - u.lo) * packed.parts[u.part].granule_bytes for u in units if u.home == "disk0")
    plan = make_plan(packed.spec, packed.weights, units, ring_bytes={"host": 2 * largest}, **fields)
    return with_arenas(replace(plan, sparsity="exact", hole_bytes=hole_bytes))


@pytest.mark.parametrize("name", ["opt", "llama", "falcon"])
@pytest.mark.parametrize("weights", ["float32-neurons", "int4-neurons", "bfloat16-neurons"])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_what_fires_is_read_and_no_bit_differs(tmp_path: Path, name: str, weights: str, cuts: tuple[int, ...]) -> None:
    folder = relu_model(tmp_path, name, weights)
    packed = open_packed(folder)
    prompts = [[3, 1, 4, 1, 5] * 6, [9, 2]]
    with load(folder, batch=2, context=64, kv="float32", sparsity="off") as engine:
        want = [a.token_ids for a in engine.generate(prompts, GREEDY)]
    plan = asking(packed, cuts, batch_seqs=2, context=64)
    check_plan(plan, packed.spec, packed.weights)
    for how in ({}, {"serial": True}, {"poisoned": True}):
        loading = Loading(machine=MACHINE, plan=plan, **how)
        with closing(Engine.load(folder, Ask(context=64, batch=2), loading)) as engine:
            assert [a.token_ids for a in engine.generate(prompts, GREEDY)] == want
