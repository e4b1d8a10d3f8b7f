"""The lowering: goldens of the task lists of plans that run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import ops, passes
from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.graph.check_plan import check_plan
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass, Task
from penstock.graph.verify import verify
from penstock.models import spec_from_config
from penstock.spec.format import Format
from penstock.spec.parts import parts
from penstock.spec.plan import ORDERS, Cache, DeviceRows, Plan, Predictor, Unit
from penstock.spec.predictors import FORMAT
from tests.plans import make_plan, resident_plan
from tests.pure.machine import model
from tests.pure.real_models import TINY
from tests.pure.task_text import dump

F32 = Format("float32")
GOLDEN = Path(__file__).parent / "golden"
SMALL = model(layers=1, d=64, heads=2, kv_heads=2, neurons=192, vocab=128)
WIDE = model(layers=1, d=64, heads=2, kv_heads=2, neurons=320, vocab=128)


def lowered(plan: Plan, *steps: Pass) -> list[Task]:
    lowering = Lowering(plan)
    return [task for step in steps for task in lowering.step(step)]


def check_golden(name: str, text: str, update: bool = False) -> None:
    file = GOLDEN / f"{name}.txt"
    if update or not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"wrote {file.name}: read it, and commit it if it is right")
    assert text == file.read_text()


def stay(part: str, plan_parts: dict, home: str = "host") -> Unit:
    return Unit(part, 0, plan_parts[part].granules, home, "host", "host")


def test_a_resident_model_is_one_task_a_step() -> None:
    plan = resident_plan(model(layers=4), F32)
    tasks = lowered(plan, passes.decode(plan, (0,), (5,), passes.DECODE))
    assert len(tasks) == 1
    assert tasks[0].lanes == ("host",)


def test_golden_streamed_ffn() -> None:
    """Attention stays, the FFN streams in three units through a ring of two: decode twice."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [stay(key, by_key) for key in ("embed", "0.norms", "0.attn", "edges")]
    units += [Unit("0.ffn", i, i + 1, "disk0", "host", "host") for i in range(3)]
    plan = make_plan(SMALL, F32, units, ring_bytes={"host": 2 * by_key["0.ffn"].granule_bytes})
    steps = [passes.decode(plan, (0,), (at,), passes.DECODE if at < 2 else None) for at in (0, 1, 2)]
    tasks = lowered(plan, *steps)
    verify(tasks, plan.arenas)
    check_golden("streamed_ffn", dump(tasks, plan))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("purpose", ["prefill", "decode"])
def test_golden_orders(order: str, purpose: str) -> None:
    """PIPO's four kinds of task, KV on the disk: its two pipelines, and FlexGen's order with a wait after each block.

    Prefill: the second chunk of two, which needs the first one's KV. Decode: two passes."""
    spec = model(layers=2, d=64, heads=2, kv_heads=2, neurons=128, vocab=128)
    by_key = {p.key: p for p in parts(spec, F32)}
    units = [stay(key, by_key) for key in ("embed", "0.norms", "1.norms", "edges")]
    units += [stay(f"{i}.{kind}", by_key, "disk0") for i in (0, 1) for kind in ("attn", "ffn")]
    ring = by_key["0.attn"].nbytes + by_key["0.ffn"].nbytes
    plan = make_plan(
        spec, F32, units, ring_bytes={"host": ring}, kv_spilled=frozenset((0, 1)), order=order, chunk_rows=64,
    )  # fmt: skip
    chunks = list(passes.prefill(plan, 0, 66, passes.DECODE))
    steps = [passes.decode(plan, (0,), (at,), passes.DECODE) for at in (66, 67)]
    before = {"prefill": chunks[:1], "decode": chunks}[purpose]
    shown = {"prefill": chunks[1:], "decode": steps}[purpose]
    lowering = Lowering(plan)
    first = [task for step in before for task in lowering.step(step)]
    tasks = [task for step in shown for task in lowering.step(step)]
    verify([*first, *tasks], plan.arenas)
    check_golden(f"{order}_{purpose}", dump(tasks, plan))


def test_golden_zigzag() -> None:
    """Two batches go through a layer together: each streamed unit serves both before the next (FlexGen)."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [stay(key, by_key) for key in ("embed", "0.norms", "edges")]
    units += [stay("0.attn", by_key, "disk0"), stay("0.ffn", by_key, "disk0")]
    ring = by_key["0.attn"].nbytes + by_key["0.ffn"].nbytes
    plan = make_plan(SMALL, F32, units, ring_bytes={"host": ring}, batch_seqs=2, batches_per_pass=2)
    tasks = lowered(plan, passes.decode(plan, (0, 1, 2, 3), (7, 7, 9, 9), passes.DECODE))
    verify(tasks, plan.arenas)
    check_golden("zigzag", dump(tasks, plan))


def test_golden_three_slices() -> None:
    """One FFN in three slices: CC on the CPU, CG over the link, GG on the device, at once (ScheInfer)."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [stay(key, by_key) for key in ("embed", "0.norms", "0.attn", "edges")]
    units += [
        Unit("0.ffn", 0, 1, "host", "host", "host"),
        Unit("0.ffn", 1, 2, "host", "gpu0", "gpu0"),
        Unit("0.ffn", 2, 3, "gpu0", "gpu0", "gpu0"),
    ]
    plan = make_plan(SMALL, F32, units, ring_bytes={"gpu0": by_key["0.ffn"].granule_bytes})
    assert [u.placement for u in units[-3:]] == ["CC", "CG", "GG"]
    tasks = lowered(plan, passes.decode(plan, (0,), (3,), passes.DECODE))
    verify(tasks, plan.arenas)
    check_golden("three_slices", dump(tasks, plan))


@pytest.mark.parametrize("purpose", ["decode", "prefill"])
def test_golden_device(purpose: str) -> None:
    """The device holds the activations. Attention lifted from RAM, with KV there; of the FFN a slice from each home on
    each executor: GG, CG, CC (whose prompts the device computes), DC and DG, through the stage."""
    by_key = {p.key: p for p in parts(WIDE, F32)}
    pinned = [Unit(key, 0, 1, "gpu0", "gpu0", "gpu0") for key in ("0.norms", "edges")]
    units = [Unit("embed", 0, by_key["embed"].granules, "gpu0", "gpu0", "gpu0"), *pinned]
    units.append(Unit("0.attn", 0, 2, "host", "gpu0", "gpu0"))
    homes = (("gpu0", "gpu0"), ("host", "gpu0"), ("host", "host"), ("disk0", "host"), ("disk0", "gpu0"))
    units += [Unit("0.ffn", i, i + 1, home, at, "gpu0") for i, (home, at) in enumerate(homes)]
    granule = by_key["0.ffn"].granule_bytes
    plan = make_plan(
        WIDE, F32, units, ring_bytes={"host": granule, "gpu0": by_key["0.attn"].nbytes + 2 * granule},
        stage_bytes=2 * granule, main="gpu0", kv_homes=[("host", "gpu0")],
    )  # fmt: skip
    check_plan(plan, WIDE, F32)
    assert [u.placement for u in units[-5:]] == ["GG", "CG", "CC", "DC", "DG"]
    decode = passes.decode(plan, (0,), (8,), passes.DECODE)
    prompt = next(passes.prefill(plan, 0, 8, passes.DECODE))
    tasks = lowered(plan, decode if purpose == "decode" else prompt)
    verify(tasks, plan.arenas)
    check_golden(f"device_{purpose}", dump(tasks, plan))


@pytest.mark.parametrize("purpose", ["decode", "prefill"])
def test_golden_delegated(purpose: str) -> None:
    """Two batches whose KV is in RAM. q and fresh rows of each cross to the CPU, which attends to one batch while the
    device projects the other. Where prompts begin the device attends, and saves its pages meanwhile."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in by_key.values()]
    units = [replace(unit, home="host") if unit.part == "0.attn" else unit for unit in units]
    plan = make_plan(
        SMALL, F32, units, ring_bytes={"gpu0": by_key["0.attn"].nbytes},
        stage_bytes=max(part.granule_bytes for part in by_key.values()), main="gpu0", kv_homes=[("host", "host")],
        batches_per_pass=2,
    )  # fmt: skip
    check_plan(plan, SMALL, F32)
    decode = passes.decode(plan, (0, 1), (8, 70), passes.DECODE)
    tasks = lowered(plan, decode if purpose == "decode" else next(passes.prompts(plan, (0, 1), (8, 9), passes.DECODE)))
    verify(tasks, plan.arenas)
    check_golden(f"delegated_{purpose}", dump(tasks, plan))


def test_golden_kv_from_a_disk() -> None:
    """A device attends to KV on a disk: it comes through a window in RAM, and goes back through it."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in by_key.values()]
    stage = max(part.granule_bytes for part in by_key.values())
    plan = make_plan(
        SMALL, F32, units, ring_bytes={}, stage_bytes=stage, main="gpu0", kv_homes=[("disk0", "gpu0")],
        batches_per_pass=2,
    )  # fmt: skip
    check_plan(plan, SMALL, F32)
    tasks = lowered(plan, passes.decode(plan, (0, 1), (8, 70), passes.DECODE))
    verify(tasks, plan.arenas)
    check_golden("kv_disk", dump(tasks, plan))


def test_golden_token_assignment() -> None:
    """Of a prompt's eight rows the CPU takes the last two, with a unit in RAM that crosses once, for the others
    (ScheInfer's CG'). Five rows of a second batch are the device's. A shorter prompt is the CPU's: nothing crosses."""
    by_key = {p.key: p for p in parts(WIDE, F32)}
    order = list(by_key)
    units = [Unit(part.key, 0, part.granules, "gpu0", "gpu0", "gpu0") for part in by_key.values() if part.kind != "ffn"]
    units += [Unit("0.ffn", 0, 2, "gpu0", "gpu0", "gpu0"), Unit("0.ffn", 2, 5, "host", "host", "gpu0")]
    units.sort(key=lambda unit: order.index(unit.part))
    stage = max(part.granule_bytes for part in by_key.values())
    plan = make_plan(
        WIDE, F32, units, ring_bytes={"gpu0": 3 * by_key["0.ffn"].granule_bytes}, stage_bytes=stage, main="gpu0",
        kv_homes=[("gpu0", "gpu0")], batches_per_pass=2, device_rows=(DeviceRows(0, (5, 7), (0, 2)),),
    )  # fmt: skip
    check_plan(plan, WIDE, F32)
    prompts = [*passes.prompts(plan, (0, 1), (8, 5), passes.DECODE), *passes.prompts(plan, (0,), (4,), passes.DECODE)]
    tasks = lowered(plan, *prompts)
    verify(tasks, plan.arenas)
    check_golden("token_assignment", dump(tasks, plan))


def test_tasks_with_some_rows_of_a_batch_are_alike_only_where_their_batches_are() -> None:
    """A device records a task that comes again: how many sequences attend must not change, though a copy of the CPU's
    rows follows in the same task."""
    by_key = {p.key: p for p in parts(WIDE, F32)}
    units = [
        Unit(part.key, 0, part.granules, *(("host", "host") if part.kind == "ffn" else ("gpu0", "gpu0")), "gpu0")
        for part in by_key.values()
    ]
    plan = make_plan(
        WIDE, F32, units, ring_bytes={"gpu0": by_key["0.ffn"].nbytes}, main="gpu0", batch_seqs=2,
        stage_bytes=max(part.granule_bytes for part in by_key.values()), kv_homes=[("gpu0", "gpu0")],
        device_rows=(DeviceRows(0, (5,), (2,)),),
    )  # fmt: skip
    check_plan(plan, WIDE, F32)
    one = Batch(0, (0,), (0,), (7,), (), pages=((0,),))
    two = Batch(0, (0, 1), (7, 0), (3, 4), (), pages=((0,), (1,)))
    tasks = lowered(plan, *(Pass("prefill", (batch,), None) for batch in (one, two, one, two)))
    by_id, again = {task.id: task for task in tasks}, [task for task in tasks if task.like >= 0]
    for task in again:
        for call, before in zip(task.calls, by_id[task.like].calls, strict=True):
            assert call.batch is not None and before.batch is not None and call.batch.shape == before.batch.shape
    assert any(call.op == "attend" for task in again for call in task.calls)


@pytest.mark.parametrize("cache", ["host", "gpu0", "both"])
def test_golden_experts_beside_a_device(cache: str) -> None:
    """A layer whose attention and shared expert are the device's. Its experts have a cache: in RAM over the disk, or in
    the device's memory over RAM, where the CPU computes those that are missing, or both.
    There two rows want one expert together, which is lifted, and RAM has fewer slots than experts are wanted. Decoded
    twice with one answer."""
    spec = spec_from_config(TINY["qwen2_moe"] | {"num_hidden_layers": 1, "mlp_only_layers": []}, "tiny")
    at = {"experts": "host", "router": "host"}
    units = [Unit(p.key, 0, p.granules, *[at.get(p.kind, "gpu0")] * 3) for p in parts(spec, F32)]  # type: ignore[arg-type]
    experts = next(p for p in parts(spec, F32) if p.kind == "experts")
    if cache != "gpu0":
        units = [replace(u, home="disk0") if u.part == experts.key else u for u in units]
    plan = make_plan(
        spec, F32, units, ring_bytes={"host": experts.nbytes} if cache != "gpu0" else {}, main="gpu0",
        stage_bytes=max(p.granule_bytes for p in parts(spec, F32)), kv_homes=[("gpu0", "gpu0")],
        caches=tuple(Cache(0, at, 3, "lru", 2) for at in (("host", "gpu0") if cache == "both" else (cache,))),  # type: ignore[arg-type]
        batch_seqs=2 if cache == "both" else 1,
    )  # fmt: skip
    check_plan(plan, spec, F32)
    routed = spec.layers[0].routed
    assert routed is not None
    lowering, tasks = Lowering(plan), list[Task]()
    for position in (8, 9):
        seqs = tuple(range(plan.batch_seqs))
        p = passes.decode(plan, seqs, (position,) * len(seqs), None)
        tasks += lowering.step(p, lambda call: [[0, *range(1 + 2 * i, routed.active + 2 * i)] for i in seqs])  # noqa: B023
    verify(tasks, plan.arenas, plan.units)
    check_golden(f"experts_{cache}", dump(tasks, plan))


@pytest.mark.parametrize("predicts", ["gpu0", "host"])
def test_golden_neurons(predicts: str) -> None:
    """A hot slice of an FFN on the device and a cold one with the CPU, which skip the neurons that by the layer's
    predictor are not active (PowerInfer)."""
    by_key = {p.key: p for p in parts(SMALL, F32)}
    units = [
        Unit(key, 0, by_key[key].granules, "gpu0", "gpu0", "gpu0") for key in ("embed", "0.norms", "0.attn", "edges")
    ]
    units += [Unit("0.ffn", 0, 1, "gpu0", "gpu0", "gpu0", 0.5), Unit("0.ffn", 1, 3, "host", "host", "host", 0.25)]
    plan = make_plan(SMALL, F32, units, ring_bytes={}, main="gpu0", kv_homes=[("gpu0", "gpu0")])
    plan = replace(plan, predictors=(Predictor(0, 16, predicts, F32),))
    plan = replace(plan, arenas=Layout(plan).arenas())
    tasks = lowered(plan, passes.decode(plan, (0,), (3,), passes.DECODE))
    verify(tasks, plan.arenas)
    cold = next(call for task in tasks for call in task.calls if call.op == "ffn" and call.unit == 5)
    assert cold.bytes * 4 == 2 * sum(block.nbytes for block in by_key["0.ffn"].blocks)
    check_golden(f"neurons_{predicts}", dump(tasks, plan))


@pytest.mark.parametrize("ahead", [0, 1])
def test_golden_asked(ahead: int) -> None:
    """Records of the neurons that predictors call active are read from a disk. Predictors that hear the layer before
    theirs have the next layer's reads begin before this layer's are computed on, as far as there is room."""
    spec, weights = (
        model(layers=3, d=64, heads=2, kv_heads=2, neurons=192, vocab=128),
        Format("int4", 64, neurons=True, records=True),
    )
    by_key = {p.key: p for p in parts(spec, weights)}
    units = [stay(key, by_key) for key in by_key if not key.endswith("ffn")]
    units += [Unit(f"{i}.ffn", 0, 1, "host", "host", "host") for i in range(3)]
    units += [Unit(f"{i}.ffn", n, n + 1, "disk0", "host", "host", asked=True) for i in range(3) for n in (1, 2)]
    units.sort(key=lambda unit: list(by_key).index(unit.part))
    plan = make_plan(spec, weights, units, ring_bytes={"host": by_key["0.ffn"].nbytes})
    known = tuple(Predictor(i, 32, "host", FORMAT, ahead) for i in range(3))
    plan = replace(plan, sparsity="predict", predictors=known)
    plan = replace(plan, arenas=Layout(plan).arenas())
    lowering, asked = Lowering(plan), list[int]()
    tasks = []
    for position in (3, 4):
        for task in lowering.step(passes.decode(plan, (0,), (position,), passes.DECODE), lambda _: [[1, 70, 191]]):
            tasks.append(task)
            picks = [call for call in task.calls if call.op == "pick"]
            asked += [call.unit for call in picks]
            for call in picks:
                assert isinstance(call.operands, ops.Pick)
                unit = units[call.unit]  # of a layer's two, the second finds the disk at work
                assert call.operands.follows == (unit.lo == 2 or (ahead == 1 and not unit.part.startswith("0.")))
    verify(tasks, plan.arenas, plan.units)
    assert asked == 2 * [u for u, unit in enumerate(units) if unit.asked]
    check_golden(f"asked_{'ahead' if ahead else 'own'}", dump(tasks, plan))
