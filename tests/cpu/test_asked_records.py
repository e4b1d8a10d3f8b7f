"""Records that are asked for: which bytes hold them, kernels that compute who fires first, and reads of real files."""

from __future__ import annotations

import ctypes
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.graph.asked import MOST_ROWS
from penstock.graph.records import Records, may_be_asked
from penstock.kernels import cpu
from penstock.runtime.movers import new_reader
from penstock.spec.parts import PAGE_BYTES
from tests.cpu.native_neurons import KERNELS, ffn_part, granules, run


@given(st.data())
def test_runs_hold_the_records_and_stated_holes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["float32-neurons", "int4-neurons", "int8-g96-neurons"]))
    neurons, d = data.draw(st.integers(1, 400)), data.draw(st.sampled_from([16, 97, 320, 1500]))
    part, _ = ffn_part(neurons, d, data.draw(st.booleans()), False, name)
    records = Records.of(part)
    live = data.draw(live_sets(neurons))
    hole_bytes = data.draw(st.sampled_from([0, PAGE_BYTES, 4 * PAGE_BYTES, 1 << 20]))
    runs = records.runs(live, part.granule_rows, hole_bytes)
    assert all(lo % PAGE_BYTES == hi % PAGE_BYTES == 0 for lo, hi in runs)
    wanted = set()
    for neuron in live:
        granule, i = divmod(neuron, 64)
        lo = granule * part.granule_bytes + records.lo + i * records.stride
        assert any(a <= lo and lo + records.stride <= b for a, b in runs)
        wanted |= set(range(lo // PAGE_BYTES, -(-(lo + records.stride) // PAGE_BYTES)))
    pages = [page for lo, hi in runs for page in range(lo // PAGE_BYTES, hi // PAGE_BYTES)]
    assert len(set(pages)) == len(pages)
    for (_, end), (begin, _) in pairwise(runs):
        assert begin - end > hole_bytes or begin // part.granule_bytes != (end - 1) // part.granule_bytes
    holes = set(pages) - wanted  # each lies between two pages that are wanted, no further apart than a hole
    for page in holes:
        before, after = max(p for p in wanted if p < page), min(p for p in wanted if p > page)
        assert (after - before - 1) * PAGE_BYTES <= hole_bytes
    assert wanted <= set(pages)
    first = data.draw(st.integers(0, min(runs)[0] // part.granule_bytes)) if runs else 0
    for (lo, hi), placed in zip(runs, records.places(runs, first, 1 << 20), strict=True):
        granule, inside = divmod(lo, part.granule_bytes)
        at = (1 << 20) + (granule - first) * records.page_bytes + inside - records.first
        assert placed == (lo, hi, at)
    # What is kept and what is picked have all bytes of a granule.
    assert records.head + part.granule_bytes - records.tail == records.kept_bytes
    assert records.first <= records.head and records.tail <= records.first + records.page_bytes


@st.composite
def live_sets(draw: st.DrawFn, neurons: int) -> list[int]:
    """Rising numbers of neurons: none, all, one, every second one, or any."""
    kind = draw(st.sampled_from(["none", "all", "one", "alternating", "any"]))
    if kind == "one":
        return [draw(st.integers(0, neurons - 1))]
    if kind == "any":
        return sorted(draw(st.sets(st.integers(0, neurons - 1))))
    return {"none": [], "all": list(range(neurons)), "alternating": list(range(0, neurons, 2))}[kind]


def only(records: Records, weights: np.ndarray, live: list[int]) -> np.ndarray:
    """The pages of records, uint8 [granules, bytes]: those of the neurons `live` of granules uint8 [n, bytes], all
    others NaN."""
    picked = np.full((len(weights), records.page_bytes), 0xFF, np.uint8)
    flat, to = weights.reshape(-1), picked.reshape(-1)
    for lo, hi, at in records.places(records.runs(live, 64, 0), 0, 0):
        to[at : at + hi - lo] = flat[lo:hi]
    return picked


@pytest.mark.parametrize("isa", cpu.available())
@given(st.data(), st.integers(0, 2**32 - 1))
def test_kernels_give_the_same_bits_in_two_steps(isa: str, data: st.DataObject, seed: int) -> None:
    """Activations by themselves, then the records that fire, all others NaN: the bits of the whole FFN."""
    rng = np.random.default_rng(seed)
    name = f"{data.draw(st.sampled_from(['float32', 'bfloat16', 'float16', 'int8', 'int4', 'int4-g32']))}-neurons"
    gated, d = data.draw(st.booleans()), data.draw(st.sampled_from([1, 31, 64, 130, 320]))
    neurons, t = data.draw(st.integers(1, 500)), data.draw(st.integers(1, MOST_ROWS))
    part, ffn = ffn_part(neurons, d, gated, not gated and data.draw(st.booleans()), name)
    assert may_be_asked(part, "exact")
    weights = granules(part, rng, data.draw(st.sampled_from([0.02, 0.2, 1.0])))
    h = np.abs(rng.normal(size=(t, d))).astype(np.float32) * data.draw(st.sampled_from([0.0, 1.0]))
    whole, fired = run(KERNELS[isa, 1], part, ffn, weights, h, (), skips=False)
    records, on = Records.of(part), KERNELS[isa, data.draw(st.sampled_from([1, 3]))]
    kept = np.concatenate([weights[:, : records.head], weights[:, records.tail :]], axis=1)
    values = np.full((part.granules, t, 64), np.nan, np.float32)
    scratch = np.empty(_native.ffn_scratch(cpu.ffn_shape(part, ffn), part.granules, t), np.uint8)
    on.fire(
        weights=kept.ctypes.data, count=part.granules, stride=records.kept_bytes, shape=cpu.kept_shape(part, ffn),
        h=h.ctypes.data, t=t, values=values.ctypes.data, exact=True, scratch=scratch.ctypes.data,
        scratch_bytes=scratch.nbytes,
    )  # fmt: skip
    by_row = values.swapaxes(0, 1).reshape(t, -1)
    np.testing.assert_array_equal(by_row != 0, fired.astype(bool))
    picked = only(records, weights, np.flatnonzero(fired.any(axis=0)).tolist())
    partial, pending = np.full((2, t, d), np.nan, np.float32)
    again = np.zeros_like(fired)
    on.ffn(
        weights=picked.ctypes.data, count=part.granules, stride=records.page_bytes, shape=cpu.picked_shape(part, ffn),
        h=h.ctypes.data, t=t, partial=partial.ctypes.data, pending=pending.ctypes.data, granule=0, starts_sum=True,
        continues_four=False, leaves_four=False, skips=True, fired=again.ctypes.data, fired_stride=again.shape[1],
        exact=True, scratch=scratch.ctypes.data, scratch_bytes=scratch.nbytes, active=0, active_stride=0, level=0.0,
        values=values.ctypes.data, biases=0, bias_stride=0,
    )  # fmt: skip
    np.testing.assert_array_equal(partial, whole)
    np.testing.assert_array_equal(again, fired)


@pytest.mark.parametrize("isa", cpu.available())
@given(st.data(), st.integers(0, 2**32 - 1))
def test_records_give_the_same_bits_apart_from_their_biases(isa: str, data: st.DataObject, seed: int) -> None:
    """Records of active neurons in their pages, all others NaN, biases elsewhere: the bits of whole granules."""
    rng = np.random.default_rng(seed)
    name = f"{data.draw(st.sampled_from(['float32', 'bfloat16', 'float16', 'int8', 'int4', 'int4-g32']))}-records"
    gated, d = data.draw(st.booleans()), data.draw(st.sampled_from([1, 31, 64, 130, 320]))
    neurons, t = data.draw(st.integers(1, 500)), data.draw(st.integers(1, MOST_ROWS))
    part, ffn = ffn_part(neurons, d, gated, data.draw(st.booleans()), name)
    assert may_be_asked(part, "predict") and not may_be_asked(part, "exact")
    weights = granules(part, rng, data.draw(st.sampled_from([0.02, 0.2, 1.0])))
    h = np.abs(rng.normal(size=(t, d))).astype(np.float32)
    active = np.zeros((t, part.granules * 64), np.uint8)
    active[:, :neurons] = rng.random((t, neurons)) < data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    on = KERNELS[isa, data.draw(st.sampled_from([1, 3]))]
    whole, fired = run(on, part, ffn, weights, h, (), skips=True, active=active)
    records = Records.of(part)
    kept = np.concatenate([weights[:, : records.head], weights[:, records.tail :]], axis=1)
    assert kept.shape[1] == records.kept_bytes
    picked = only(records, weights, np.flatnonzero(active.any(axis=0)).tolist())
    shape = cpu.ffn_shape(part, ffn)
    scratch = np.empty(_native.ffn_scratch(shape, part.granules, t), np.uint8)
    partial, pending = np.full((2, t, d), np.nan, np.float32)
    again = np.zeros_like(fired)
    on.ffn(
        weights=picked.ctypes.data, count=part.granules, stride=records.page_bytes, shape=shape, h=h.ctypes.data, t=t,
        partial=partial.ctypes.data, pending=pending.ctypes.data, granule=0, starts_sum=True, continues_four=False,
        leaves_four=False, skips=True, fired=again.ctypes.data, fired_stride=again.shape[1], exact=True,
        scratch=scratch.ctypes.data, scratch_bytes=scratch.nbytes, active=active.ctypes.data,
        active_stride=active.shape[1], level=0.0, values=0,
        biases=kept.ctypes.data - records.tail if records.kept_bytes else 0, bias_stride=records.kept_bytes,
    )  # fmt: skip
    np.testing.assert_array_equal(partial, whole)
    np.testing.assert_array_equal(again, fired)


def test_runs_are_read_by_direct_reads(tmp_path: Path) -> None:
    """Of a real file, by either engine, in blocks smaller than a run; nothing beside them is written, and a fault and a
    file's early end are told."""
    pages, rng = 300, np.random.default_rng(0)
    content = rng.integers(0, 256, pages * PAGE_BYTES).astype(np.uint8)
    file = tmp_path / "file"
    file.write_bytes(content.tobytes())
    fd, _ = _native.open_direct(str(file))
    memory = _native.Memory(pages * PAGE_BYTES)
    target = np.frombuffer((ctypes.c_uint8 * (pages * PAGE_BYTES)).from_address(memory.address), np.uint8)
    for engine in ("threads", "io_uring"):
        for depth, block in ((1, PAGE_BYTES), (8, 1 << 20)):
            reader = new_reader(engine, depth, block)
            for _ in range(5):
                target[:] = 7
                edges = sorted(rng.choice(pages + 1, 40, replace=False).tolist())
                spans = list(zip(edges[::2], edges[1::2], strict=True))
                runs = [(lo * PAGE_BYTES, memory.address + lo * PAGE_BYTES, (hi - lo) * PAGE_BYTES) for lo, hi in spans]
                begun = reader.start_runs(fd, runs)
                assert begun.wait() == sum(n for _, _, n in runs)
                want = np.full_like(content, 7)
                for lo, hi in spans:
                    want[lo * PAGE_BYTES : hi * PAGE_BYTES] = content[lo * PAGE_BYTES : hi * PAGE_BYTES]
                np.testing.assert_array_equal(target, want)
            beyond = [
                (0, memory.address, PAGE_BYTES),
                ((pages - 1) * PAGE_BYTES, memory.address + PAGE_BYTES, 2 * PAGE_BYTES),
            ]
            assert reader.start_runs(fd, beyond).wait() == 2 * PAGE_BYTES
            reader.inject(2, error=5)
            with pytest.raises(OSError):
                reader.start_runs(fd, beyond).wait()
            for bad in ([], [(0, memory.address, 0)], [beyond[0], beyond[0]], [(-1, memory.address, PAGE_BYTES)]):
                with pytest.raises(ValueError):
                    reader.start_runs(fd, bad)
            reader.close()
    os.close(fd)
