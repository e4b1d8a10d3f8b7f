"""The table that a person reads: figures, limits, bands and what would be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.candidate import Compared
from penstock.planner.explain import Band, Width, limits, packed_bytes, rate, rates, table
from penstock.planner.solve import Solved, solve
from penstock.planner.what_if import what_if
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import Capacity, MachineSpec
from penstock.units import format_bytes, format_seconds
from tests.pure.machine import LLAMA_1B, MACHINE, WITH_DEVICE

BF16 = Format("bfloat16")
GIB = 1 << 30
STREAMS = Ask(host_memory_bytes=GIB, context=512)
SEEN, FEW = Width(1.12, 17, True), Width(1.25, 2)


def lines(ask: Ask, band: Band | None = None, machine: MachineSpec = MACHINE) -> tuple[Solved, list[str]]:
    solved = solve(ask, LLAMA_1B, BF16, machine)
    return solved, table(solved, ask, machine, band or Band(), what_if(solved, ask, machine)).splitlines()


def test_a_streaming_plan() -> None:
    solved, found = lines(STREAMS)
    text = "\n".join(found)
    p = solved.prediction
    assert f"{rate(p.decode_tokens_per_s)} tokens/s ({rates(p.decode_tokens_per_s, 1.25)})" in text
    assert "error band × or ÷ 1.25, assumed: no runs like this one on this machine are known" in found
    shares = f"the disk {p.lane_share['disk0']:.0%}, the processor {p.lane_share['host']:.0%}"
    assert f"bound by the disk (busy while decoding: {shares})" in found
    assert f"read from disk per token: {format_bytes(p.disk_bytes_per_token)}" in found
    memory = next(line for line in found if line.startswith("memory of RAM"))
    assert memory.endswith(f"{format_bytes(solved.plan.tier_bytes()['host'])} of 1.00 GiB")
    disk = next(line for line in found if line.startswith("disk, all weights"))
    assert disk.endswith(f"{format_bytes(packed_bytes(solved.plan))} of 1.00 TiB")
    assert next(line for line in found if line.startswith("one more GiB of RAM: ")).endswith("%)")
    faster = next(line for line in found if line.startswith("a disk twice as fast: "))
    assert "tokens/s (+" in faster and not any(line.startswith("a link twice") for line in found)
    assert next(line for line in found if line.startswith("in other formats")).endswith("(int4 would be faster)")
    assert found[0].split() == ["weights", "(bfloat16)", "RAM", "disk"]
    assert found[-1].startswith("· ")
    assert max(len(line) for line in found if not line.startswith("· ")) <= 120


def test_a_resident_plan() -> None:
    _, found = lines(Ask())
    assert "one more GiB of RAM: no faster, all weights are in memory" in found
    assert "bound by the processor (busy while decoding: the processor 100%)" in found
    assert not any(line.startswith(("read from disk", "a disk twice", "not yet run")) for line in found)


def test_a_cap_on_what_stays() -> None:
    _, found = lines(Ask(resident_bytes=300 << 20))
    assert "one more GiB of RAM: no faster, --resident keeps the rest on disk" in found


def test_a_device() -> None:
    """What lies there, what it takes, and what crosses; where the plan has no use for it, that."""
    ask = Ask(device_memory_bytes=GIB, context=512)
    solved = solve(ask, LLAMA_1B, BF16, WITH_DEVICE)
    text = table(solved, ask, WITH_DEVICE, Band())
    assert "memory of device" in text and "of 1.00 GiB" in text and "its driver and libraries" in text
    assert "of weights stay in device memory" in text and "the link to the device" in text
    others = table(solved, ask, WITH_DEVICE, Band(), what_if(solved, ask, WITH_DEVICE)).splitlines()
    assert any(line.startswith("a link twice as fast: ") for line in others)
    beside = table(solve(STREAMS, LLAMA_1B, BF16, MACHINE), STREAMS, WITH_DEVICE)
    assert "8.00 GiB: not used" in beside
    assert not any(line.startswith("device") for line in lines(STREAMS)[1])


def test_what_is_only_planned_stands_apart() -> None:
    solved = solve(STREAMS, LLAMA_1B, BF16, MACHINE)
    first, p = solved.compared[0]
    marked = Compared(first._replace(strategy="hot neurons", cannot_run="no kernels yet", lossy="skips neurons"), p)
    speed = f"{rate(p.decode_tokens_per_s)} tokens/s, first token after {format_seconds(p.ttft_s)}"
    line = f"not yet run by this version: hot neurons would give {speed} (no kernels yet; skips neurons)"
    assert line in table(replace(solved, not_yet=(marked,))).splitlines()


def test_a_disk_that_is_too_small() -> None:
    small = replace(MACHINE, tiers=(MACHINE.tiers[0], Capacity("disk0", GIB)))
    assert any(line.endswith("of 1.00 GiB: too little") for line in lines(STREAMS, machine=small)[1])


@pytest.mark.parametrize(
    ("band", "says"),
    [
        (Band(SEEN, SEEN), ["error band × or ÷ 1.12, from the last 17 runs like this one on this machine"]),
        (Band(FEW, FEW), ["error band × or ÷ 1.25, assumed: too few runs like this one on this machine are known"]),
        (Band(Width(2.5, 9, True)), [
            "error band of tokens/s × or ÷ 2.50, from the last 9 runs like this one on this machine",
            "error band of the first token × or ÷ 1.25, assumed: no runs like this one on this machine are known",
        ]),
    ],
)  # fmt: skip
def test_bands(band: Band, says: list[str]) -> None:
    solved, found = lines(STREAMS, band)
    assert [line for line in found if line.startswith("error band")] == says
    p = solved.prediction
    first = " to ".join(format_seconds(s) for s in (p.ttft_s / band.ttft.factor, p.ttft_s * band.ttft.factor))
    assert f"({first}), then {rate(p.decode_tokens_per_s)} tokens/s" in "\n".join(found)


def test_limits() -> None:
    solved = solve(STREAMS, LLAMA_1B, BF16, MACHINE)
    found = {limit.tier: limit for limit in limits(solved, replace(STREAMS, device_memory_bytes=3), WITH_DEVICE)}
    assert found["host"].limit_bytes == GIB and found["host"].used_bytes == solved.prediction.peak_host_bytes
    assert (found["gpu0"].used_bytes, found["gpu0"].limit_bytes) == (0, 3)
    assert found["disk0"].used_bytes == packed_bytes(solved.plan)
    assert {limit.tier: limit.limit_bytes for limit in limits(solved, Ask(), MACHINE)}["host"] == 16 * GIB


def test_only_a_plan() -> None:
    """As `penstock demo` prints it."""
    text = table(solve(STREAMS, LLAMA_1B, BF16, MACHINE))
    assert "tokens/s" in text and "error band" not in text and "one more GiB" not in text and " of 1.00 GiB" not in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00123, "0.00123"),
        (0.0123, "0.0123"),
        (0.119, "0.119"),
        (7.2, "7.20"),
        (38.4, "38.4"),
        (412.3, "412"),
        (2139.4, "2139"),
        (0, "0"),
    ],
)
def test_rates_have_three_digits(value: float, shown: str) -> None:
    assert rate(value) == shown


def test_rates_of_a_band() -> None:
    assert rates(7.2, 1.1) == "6.55 to 7.92"
    assert rates(0.5, 2.5) == "0.200 to 1.250"
    assert rates(0.5, 6.26) == "0.080 to 3.130"  # what was "0 ns to …" where errors were added


def test_a_model_that_can_only_be_planned() -> None:
    spec = replace(LLAMA_1B, cannot_run="there are no kernels for it")
    told = "not run by this version: models of type llama can only be planned (there are no kernels for it)"
    assert told in table(solve(STREAMS, spec, BF16, MACHINE)).splitlines()
    assert "not run" not in table(solve(STREAMS, LLAMA_1B, BF16, MACHINE))
