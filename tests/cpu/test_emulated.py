"""Any placement on an emulated device gives what one task after the other gives, and what all in memory gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, DoesNotFit, StorageFailed
from penstock.graph import passes
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.ops import Route
from penstock.graph.tasks import Call, Task, fetched_bytes, streamed_bytes
from penstock.planner.solve import settle_context
from penstock.planner.solve.ours import experts
from penstock.planner.solve.problem import Problem
from penstock.runtime.device.choose import choose
from penstock.runtime.device.emulated import EmulatedDevice
from penstock.serve.session import Running, Session
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import DeviceRows, Plan, Unit
from penstock.store.packed import Packed, open_packed
from penstock.store.synth import synth
from penstock.units import MIB
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import MACHINE
from tests.cpu.placements import DENSE, FORMATS, KV_FORMATS, NEAR, Logits, Models, require_near, run
from tests.plans import device_plans, make_plan, page_orders

ROOMY, FAST = 1 << 30, 1e12


def on_device(packed: Packed, plan: Plan, seed: int = 0, jitter_s: float = 0.0, **how: object) -> np.ndarray:
    device = EmulatedDevice(ROOMY, FAST, jitter_s, seed)
    return run(packed, plan, device=device, poisoned=True, **how)


@pytest.mark.fuzz
@given(st.data())
def test_any_placement(models: Models, oracle: Logits, data: st.DataObject) -> None:
    """Two executors add their shares up in one order whatever ran first: the bits of the serial run. Against all in
    memory on one executor the sums have another order."""
    name = data.draw(st.sampled_from(sorted(models)))
    packed, kv = models[name], data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(device_plans(packed.spec, packed.weights, cached=True, batch_seqs=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    check_plan(plan, packed.spec, packed.weights)
    jitter_s = data.draw(st.sampled_from([0.0, 0.0, 0.002]))
    found = on_device(packed, plan, data.draw(st.integers(0, 1000)), jitter_s, order=order)
    assert np.array_equal(found, on_device(packed, plan, order=order, serial=True))
    expected, near = oracle[name, kv], NEAR[kv]
    assert np.abs(found - expected).max() <= near
    ordered = np.sort(expected, axis=1)
    decided = ordered[:, -1] - ordered[:, -2] > 2 * near
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[decided].all()


@pytest.mark.fuzz
@given(st.data())
def test_batches_share_a_pass(models: Models, oracle: Logits, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(models)))
    packed, kv = models[name], data.draw(st.sampled_from(KV_FORMATS))
    plan = data.draw(device_plans(packed.spec, packed.weights, cached=True, batch_seqs=1, batches_per_pass=2, kv=kv))
    plan, order = data.draw(page_orders(plan))
    assert np.abs(on_device(packed, plan, order=order) - oracle[name, kv]).max() <= NEAR[kv]


@pytest.mark.parametrize("device_mib", [1024, 9])
@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(DENSE)))
def test_what_the_planner_proposes_for_experts_runs(models: Models, oracle: Logits, name: str, device_mib: int) -> None:
    """Each kind of plan: experts with the CPU, some layers' or all on the device, caches in either memory."""
    packed, chosen = models[name], choose("emulated", MACHINE, device_mib * MIB)
    ask = Ask(context=128, batch=2, kv="float32", score=True, device_memory_bytes=device_mib * MIB)
    ask = settle_context(ask, packed.spec)
    found = list(experts.candidates(Problem(ask, packed.spec, packed.weights, chosen.machine)))
    assert found and not any(each.cannot_run for each in found)
    for plan in (each.plan for each in found):
        check_plan(plan, packed.spec, packed.weights)
        logits = on_device(packed, plan)
        assert np.array_equal(logits, on_device(packed, plan, serial=True))
        assert np.abs(logits - oracle[name, "float32"]).max() <= NEAR["float32"]


def test_the_planner_puts_caches_in_ram_beneath_the_devices(tmp_path: Path) -> None:
    """Where RAM has no room for all experts. Such a plan runs, and reads what its tasks say, to the byte."""
    more = {"num_experts": 64, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(TINY_CONFIGS["qwen2_moe"]), **more}))
    packed = open_packed(synth(tmp_path / "config.json", tmp_path / "packed", parse_format("float32")))
    chosen, ask = choose("emulated", MACHINE, 12 * MIB), Ask(context=64, device_memory_bytes=12 * MIB)

    def proposed(ask: Ask) -> dict[str, Plan]:
        settled = settle_context(ask, packed.spec)
        found = experts.candidates(Problem(settled, packed.spec, packed.weights, chosen.machine))
        return {each.strategy: each.plan for each in found}

    name = f"{experts.NAME}, in caches on the device"
    limit = proposed(ask)[name].tier_bytes()["host"] - 32 * MIB  # too little for the usual rings
    limit = proposed(replace(ask, host_memory_bytes=limit))[name].tier_bytes()["host"] - 6 * MIB
    plan = proposed(replace(ask, host_memory_bytes=limit))[f"{name} and in RAM"]
    check_plan(plan, packed.spec, packed.weights)
    assert {cache.executor for cache in plan.caches} == {"host", "gpu0"} and plan.tier_bytes()["host"] <= limit
    wanted = [passes.decode(plan, (0,), (position,), passes.DECODE) for position in range(12)]

    def said(call: Call) -> list[list[int]]:
        """Some of 12 experts."""
        assert isinstance(call.operands, Route) and call.batch is not None
        first = 5 * call.batch.start[0] + call.operands.layer
        return [sorted((first + i) % 12 for i in (0, 3, 7))]

    def steps(**how: bool) -> tuple[list[np.ndarray], int]:
        """The logits, and the bytes that were read."""
        session = Session(packed, plan, Running(**how), device=EmulatedDevice(ROOMY, FAST))
        before = session.bytes_moved()["disk0"]
        with session.hearing.answered_by(said):
            logits = [session.step(p, [np.array([3], np.int32)])[0].copy() for p in wanted]
        session.drain()
        read = session.bytes_moved()["disk0"] - before
        session.close()
        return logits, read

    (logits, read), (serial, _) = steps(poisoned=True), steps(serial=True)
    assert np.array_equal(logits, serial)
    lowering = Lowering(plan)
    tasks = [task for p in wanted for task in lowering.step(p, said)]
    assert read == sum(streamed_bytes(task, plan.units) + fetched_bytes(task) for task in tasks) > 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_all_on_the_device_has_the_bits_of_the_host(models: Models, oracle: Logits, name: str) -> None:
    packed = models[name]
    assert np.array_equal(on_device(packed, all_on_device(packed)), oracle[name, "float32"])


@pytest.mark.parametrize("name", DENSE)
def test_a_prompt_in_chunks_whose_rows_are_shared(models: Models, oracle: Logits, name: str) -> None:
    """Chunks come again, and with them tasks of which some have a part of the rows."""
    packed = models[name]
    layers = range(len(packed.spec.layers))
    units = [
        Unit(p.key, 0, p.granules, *(("host", "host") if p.kind == "ffn" else ("gpu0", "gpu0")), "gpu0")
        for p in packed.parts.values()
    ]
    largest = max(p.nbytes for p in packed.parts.values() if p.kind == "ffn")
    stage = max(p.granule_bytes for p in packed.parts.values())
    plan = make_plan(
        packed.spec, packed.weights, units, ring_bytes={"gpu0": 2 * largest}, stage_bytes=stage, main="gpu0",
        kv_homes=[("gpu0", "gpu0")] * len(layers), batch_seqs=2, chunk_rows=5,
        device_rows=tuple(DeviceRows(i, (4,), (3,)) for i in layers),
    )  # fmt: skip
    check_plan(plan, packed.spec, packed.weights)
    require_near(on_device(packed, plan), oracle[name, "float32"], NEAR["float32"])


def test_a_missing_edge_is_seen(models: Models) -> None:
    """The poison works: a run whose compute does not wait for the link gives other numbers."""
    packed = models["llama"]
    plan = lifting(packed)

    class Hasty(Session):
        def _counted(self, p: passes.Pass) -> Iterator[Task]:
            for task in super()._counted(p):
                yield task if task.lanes[0] != "gpu0" else task._replace(after=())

    ids = np.random.default_rng(0).integers(0, packed.spec.vocab, 23).astype(np.int32)
    (p,) = passes.prefill(plan, 0, len(ids), None, score=True)
    slow = EmulatedDevice(ROOMY, link_bytes_per_s=2e6)
    hasty = Hasty(packed, plan, Running(poisoned=True), device=slow)
    with np.errstate(all="ignore"):
        wrong = hasty.step(p, [ids])[0].copy()
    hasty.close()
    assert not np.array_equal(wrong, run(packed, plan, device=EmulatedDevice(ROOMY, FAST))[: len(ids)])


def test_the_cap_is_hard(models: Models) -> None:
    packed = models["llama"]
    plan = all_on_device(packed)
    need = plan.tier_bytes()["gpu0"]
    Session(packed, plan, device=EmulatedDevice(need)).close()
    with pytest.raises(DoesNotFit, match="device memory of") as caught:
        Session(packed, plan, device=EmulatedDevice(need - 1))
    assert caught.value.numbers["tier"] == "gpu0"


def test_a_device_is_needed(models: Models) -> None:
    packed = models["llama"]
    with pytest.raises(BadRequest, match="--device"):
        Session(packed, all_on_device(packed))


def test_what_crosses_is_counted(models: Models) -> None:
    """A decode pass of a plan whose layers are lifted moves their bytes once, and the tokens' few."""
    packed = models["llama"]
    plan = lifting(packed)
    session = Session(packed, plan, device=EmulatedDevice(ROOMY, FAST))
    lifted = sum(plan.unit_bytes(u) for u in plan.units if u.home == "host" and u.decode == "gpu0")
    before = session.bytes_moved().get("h2d0", 0)
    session.step(passes.decode(plan, (0,), (0,), None), [np.array([1], np.int32)])
    moved = session.bytes_moved()
    rows = 4 * packed.spec.d_embed
    assert moved["h2d0"] - before == lifted + rows
    assert moved["d2h0"] == 4 * packed.spec.vocab + 8
    session.close()


def all_on_device(packed: Packed) -> Plan:
    units = [Unit(p.key, 0, p.granules, "gpu0", "gpu0", "gpu0") for p in packed.parts.values()]
    stage = max(p.granule_bytes for p in packed.parts.values())
    homes = [("gpu0", "gpu0")] * len(packed.spec.layers)
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={}, stage_bytes=stage, main="gpu0", kv_homes=homes, batch_seqs=2
    )


def lifting(packed: Packed, home: str = "host", stage: int = 1) -> Plan:
    """Layers at home elsewhere, computed by the device; the rest is there. `stage`: in largest granules."""
    units = []
    for p in packed.parts.values():
        at = {"attn": home, "ffn": home, "embed": "host"}.get(p.kind, "gpu0")
        units += [Unit(p.key, lo, lo + 1, at, "gpu0", "gpu0") for lo in range(p.granules)]
    largest = max(p.granule_bytes for p in packed.parts.values())
    homes = [("gpu0", "gpu0")] * len(packed.spec.layers)
    return make_plan(
        packed.spec, packed.weights, units, ring_bytes={"gpu0": 3 * largest}, stage_bytes=stage * largest, main="gpu0",
        kv_homes=homes, batch_seqs=2,
    )  # fmt: skip


@pytest.mark.parametrize(("stage", "load"), [(1, 5), (8, 1), (8, 2), (8, 5)])
def test_after_a_pass_that_broke_off_the_next_one_is_right(models: Models, stage: int, load: int) -> None:
    """A disk that fails under the device's lanes, before or after what follows is handed over: one error, and no lane
    remembers it."""
    packed = models["llama"]
    plan = lifting(packed, "disk0", stage)
    session = Session(packed, plan, Running(poisoned=True), device=EmulatedDevice(ROOMY, FAST))
    ids = np.random.default_rng(0).integers(0, packed.spec.vocab, 23).astype(np.int32)
    (p,) = passes.prefill(plan, 0, len(ids), None, score=True)
    start, begun = session.reader.start, []

    def failing(*where: object) -> object:
        begun.append(where)
        if len(begun) == load:
            raise StorageFailed("the disk is gone")
        return start(*where)  # type: ignore[arg-type]

    session.reader.start = failing  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageFailed, match="the disk is gone"):
        session.step(p, [ids])
    found = session.step(p, [ids])[0].copy()
    session.close()
    assert np.array_equal(found, run(packed, plan, device=EmulatedDevice(ROOMY, FAST))[: len(ids)])
