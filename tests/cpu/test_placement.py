"""Placement does not change the answer: any cut, resident set, ring and block size gives the same logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import passes
from penstock.graph.verify import verify
from penstock.kernels import cpu
from penstock.runtime.movers import DiskLoad
from penstock.serve.session import Running, Session
from penstock.spec.parts import FFNS
from penstock.spec.plan import Plan
from penstock.store.packed import Packed
from tests.cpu.placements import FORMATS, KV_FORMATS, NEAR, PROMPTS, Logits, Models, near, run
from tests.plans import page_orders, random_plans, resident_plan


@pytest.mark.fuzz
@given(st.data())
def test_any_placement_gives_the_same_bits(models: Models, oracle: Logits, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed = models[name]
    kv = data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(random_plans(packed.spec, packed.weights, cached=True, batch_seqs=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    assert np.isfinite(oracle[name, kv]).all()
    overlapped = run(packed, plan, order=order, poisoned=True)
    assert np.array_equal(overlapped, oracle[name, kv])


@pytest.mark.fuzz
@given(st.data())
def test_batches_share_a_pass(models: Models, oracle: Logits, data: st.DataObject) -> None:
    """Zig-zag: two batches of one sequence each go through every layer together. Other shapes, so not the
    same bits with a general BLAS, but the same numbers."""
    name = data.draw(st.sampled_from(sorted(models)))
    packed = models[name]
    kv = data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(random_plans(packed.spec, packed.weights, cached=True, batch_seqs=1, batches_per_pass=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    assert np.abs(run(packed, plan, order=order, poisoned=True) - oracle[name, kv]).max() <= near(name, kv)


@pytest.mark.fuzz
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 32), st.sampled_from(KV_FORMATS))
def test_chunks_do_not_matter(models: Models, oracle: Logits, name: str, chunk_rows: int, kv: str) -> None:
    packed, expected = models[name], oracle[name, kv]
    found = run(packed, resident_plan(packed.spec, packed.weights, batch_seqs=2, chunk_rows=chunk_rows, kv=kv))
    assert np.abs(found - expected).max() <= near(name, kv)
    decided = np.sort(expected, axis=1)[:, -1] - np.sort(expected, axis=1)[:, -2] > 10 * near(name, kv)
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[decided].all()


@pytest.mark.parametrize("kernels", [*cpu.available(), "reference"])
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("kv", KV_FORMATS)
def test_every_family_of_kernels(models: Models, kv: str, name: str, kernels: str) -> None:
    """Streamed and overlapped, one unit a granule: the same bits as resident and serial; and near the best family's."""
    packed = models[name]
    resident = resident_plan(packed.spec, packed.weights, batch_seqs=2, kv=kv)
    expected = run(packed, resident, serial=True, kernels=kernels, exact=True, threads=1)
    assert np.array_equal(run(packed, _streaming(packed, kv), poisoned=True, kernels=kernels, exact=True), expected)
    assert np.abs(expected - run(packed, resident, exact=True)).max() <= NEAR[kv]


def test_a_missing_edge_is_seen(models: Models, oracle: Logits) -> None:
    """The poison works: a run that ignores what it should wait for gives NaN or other numbers."""
    packed = models["llama"]
    plan = _streaming(packed)

    class Hasty(Session):
        def _counted(self, p: passes.Pass) -> Iterator[object]:  # type: ignore[override]
            return (task._replace(after=()) for task in super()._counted(p))

    hasty = Hasty(packed, plan, Running(poisoned=True))
    true_start = hasty.reader.start

    class Late:
        """A load that the disk begins 50 ms after it was asked."""

        def __init__(self, *where: object) -> None:
            self._found: list[DiskLoad] = []
            self._timer = threading.Timer(0.05, lambda: self._found.append(true_start(*where)))  # type: ignore[arg-type]
            self._timer.start()

        def _load(self) -> DiskLoad:
            self._timer.join()
            return self._found[0]

        done = property(lambda self: bool(self._found) and self._found[0].done)
        complete = property(lambda self: bool(self._found) and self._found[0].complete)
        span_s = property(lambda self: self._load().span_s)

        def wait(self) -> int:
            return self._load().wait()

    hasty.reader.start = Late  # type: ignore[method-assign,assignment]
    batchless = run(packed, plan, poisoned=True)
    ids = np.random.default_rng(0).integers(0, packed.spec.vocab, PROMPTS[0]).astype(np.int32)
    (p,) = passes.prefill(plan, 0, len(ids), None, score=True)
    assert not np.array_equal(hasty.step(p, [ids])[0], batchless[: len(ids)])
    hasty.close()


def test_the_lists_that_run_are_verified(models: Models) -> None:
    """What the engine runs for a streaming plan passes the independent checker, arenas to the byte."""
    from penstock.graph.lower import Lowering

    plan = _streaming(models["llama"])
    lowering = Lowering(plan)
    tasks = [t for p in passes.prefill(plan, 0, 40, passes.DECODE) for t in lowering.step(p)]
    for at in range(40, 44):
        tasks += lowering.step(passes.decode(plan, (0,), (at,), passes.DECODE))
    assert verify(tasks, plan.arenas) == len(tasks)


def _streaming(packed: Packed, kv: str = "float32") -> Plan:
    from penstock.spec.plan import Unit
    from tests.plans import make_plan

    units = [
        Unit(p.key, lo, lo + p.least_granules, "disk0" if p.kind in ("attn", *FFNS) else "host", "host", "host")
        for p in packed.parts.values()
        for lo in range(0, p.granules, p.least_granules)
    ]
    ring = 3 * max(p.least_bytes for p in packed.parts.values())
    return make_plan(packed.spec, packed.weights, units, ring_bytes={"host": ring}, batch_seqs=2, kv=kv)
