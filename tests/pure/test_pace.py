"""How many rows of a prompt go along with answers, and whether KV that gives way is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.graph.passes import MIXED
from penstock.planner.pace import LONGEST_GAP, pace
from penstock.planner.pass_times import PassTimes, pass_s
from penstock.planner.solve import solve
from penstock.planner.swap import swap
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.parts import parts
from penstock.spec.plan import Unit
from penstock.units import MIB
from tests.plans import make_plan
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE, model

INT4 = parse_format("int4")


@pytest.mark.parametrize("batch", [2, 8, 32])
@pytest.mark.parametrize("memory", [None, 512 * MIB])
def test_gaps_stay_within_the_limit(batch: int, memory: int | None) -> None:
    ask = Ask(batch=batch, context=256, prompt_tokens=128, host_memory_bytes=memory)
    plan = solve(ask, LLAMA_1B, INT4, MACHINE).plan
    found = pace(plan, MACHINE)
    assert 1 <= found.prompt_rows <= max(plan.chunk_rows, batch)
    assert found.gap_ratio <= LONGEST_GAP or found.prompt_rows == 1
    assert f"{found.prompt_rows} tokens a pass" in found.reason


@pytest.mark.parametrize("memory", [None, 512 * MIB])
def test_a_quarter_more_rows_would_be_too_many(memory: int | None) -> None:
    """Not only powers of two are tried."""
    ask = Ask(batch=8, context=256, prompt_tokens=128, host_memory_bytes=memory)
    plan = solve(ask, LLAMA_1B, INT4, MACHINE).plan
    rows = pace(plan, MACHINE).prompt_rows
    more = rows + max(1, rows // 4)
    assert pass_s(plan, MACHINE, 7, more) > LONGEST_GAP * pass_s(plan, MACHINE, 7, 0)


def test_a_slower_disk_leaves_room_for_more_rows() -> None:
    ask = Ask(batch=8, context=256, prompt_tokens=128, host_memory_bytes=512 * MIB)
    plan = solve(ask, LLAMA_1B, INT4, MACHINE).plan

    def with_disk(times: float) -> MachineSpec:
        rates = (replace(r, s_per_byte=r.s_per_byte * times) if r.lane == "disk0" else r for r in MACHINE.rates)
        return replace(MACHINE, rates=tuple(rates))

    rows = [pace(plan, with_disk(times)).prompt_rows for times in (0.1, 1, 30)]
    assert rows == sorted(rows) and rows[0] < rows[-1]


def test_one_sequence_reads_whole_chunks() -> None:
    plan = solve(Ask(context=64), model(layers=2), parse_format("float32"), MACHINE).plan
    assert pace(plan, MACHINE).prompt_rows == plan.chunk_rows


def test_sequences_that_share_pages_are_shorter() -> None:
    ask = Ask(batch=8, context=4096, prompt_tokens=128, host_memory_bytes=3000 * MIB)
    whole, shared = (solve(replace(ask, kv_tokens=n), LLAMA_1B, INT4, MACHINE).plan for n in (None, 1))
    assert shared.kv_pages and pace(shared, MACHINE).prompt_rows <= pace(whole, MACHINE).prompt_rows


def test_kv_is_stored_where_that_is_faster_than_computing_it() -> None:
    ask = Ask(batch=8, context=4096, prompt_tokens=128, host_memory_bytes=3000 * MIB, kv_tokens=1)
    plan, pays = solve(ask, LLAMA_1B, INT4, MACHINE).plan, []
    for times in (1e-3, 1e3):
        rates = (replace(r, s_per_byte=r.s_per_byte * times) if r.lane == "disk0" else r for r in MACHINE.rates)
        machine = replace(MACHINE, rates=tuple(rates))
        found = swap(plan, machine, PassTimes(plan, machine), 16)
        pays.append(found.pays)
        assert ("kept on the disk" in found.reason) == found.pays
    assert pays == [True, False]


@pytest.mark.parametrize("link", [1e-3, 1, 1e3])
def test_prompts_beside_answers_are_computed_where_they_are_read_faster(link: float) -> None:
    """FFNs are in RAM. The CPU computes them in decode, the device lifts them for prompts."""
    rates = (replace(r, s_per_byte=r.s_per_byte * link) if r.lane == "h2d0" else r for r in WITH_DEVICE.rates)
    machine, layers = replace(WITH_DEVICE, rates=tuple(rates)), range(len(LLAMA_1B.layers))
    units = [
        Unit(p.key, 0, p.granules, *(("host", "host", "gpu0") if p.kind == "ffn" else ("gpu0", "gpu0", "gpu0")))
        for p in parts(LLAMA_1B, INT4)
    ]
    ring = 3 * max(part.nbytes for part in parts(LLAMA_1B, INT4) if part.kind == "ffn")
    plan = make_plan(
        LLAMA_1B, INT4, units, ring_bytes={"gpu0": ring}, main="gpu0", kv_homes=[("gpu0", "gpu0") for _ in layers],
        batch_seqs=4, chunk_rows=64, context=256,
    )  # fmt: skip
    found = pace(plan, machine)
    rows_per_s = {
        way: found.prompt_rows / pass_s(plan, machine, 3, found.prompt_rows, way) for way in (MIXED, "prefill")
    }
    assert rows_per_s[found.mixed] == max(rows_per_s.values()) and "the other way" in found.reason
    assert link == 1 or found.mixed == ("prefill" if link < 1 else MIXED)
