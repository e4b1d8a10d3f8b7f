"""Bundled machines: each loads, every figure has a source, and the orderings that hold in every computer hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import penstock
from penstock.graph.ops import OPS
from penstock.planner.solve import solve
from penstock.serve import planning
from penstock.spec import machine as machines
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.units import GIB

FILES = {path.stem: path for path in sorted((Path(penstock.__file__).parent / "machines").glob("*.json"))}
FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
WITH_GPU = sorted(name for name in FILES if re.search(r"-(rtx\w+|a6000|t4)-", name))
# Named by their device memory: the papers do not say how much RAM there is, or it matters less.
NAMED_BY_DEVICE = {"laptop-rtx3060-6gb", "pc-rtx4060ti-16gb", *(name for name in FILES if name.startswith("server-"))}
OVERHEADS = {"task", "call", "pass"}


def load(name: str) -> MachineSpec:
    return machines.loads(FILES[name].read_text(encoding="utf-8"), name)


def test_there_are_machines_of_every_kind() -> None:
    assert 9 <= len(FILES) <= 15
    assert 2 <= len(WITH_GPU) < len(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_machine_loads_as_it_is_written(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert json.loads(machines.dumps(machine)) == json.loads(FILES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_every_figure_has_a_source(name: str) -> None:
    machine = load(name)
    assert machine.source and machine.cpu
    assert all(len(tier.source) > 10 for tier in machine.tiers)
    assert all(len(rate.source) > 10 for rate in machine.rates)


@pytest.mark.parametrize("name", FILES)
def test_it_has_the_lanes_of_its_kind(name: str) -> None:
    machine = load(name)
    device = {"h2d0", "d2h0", "gpu0"} if name in WITH_GPU else set()
    assert {rate.lane for rate in machine.rates} - {"disk_write0"} == {"host", "disk0"} | device
    assert {tier.name for tier in machine.tiers} == {"host", "disk0"} | ({"gpu0"} if device else set())
    assert {rate.op for rate in machine.rates if rate.lane == "host"} == {"*", "attend"} | OVERHEADS
    assert all(rate.s_per_byte == 0 for rate in machine.rates if rate.op in OVERHEADS)
    for lane in {"host", "gpu0"} & {rate.lane for rate in machine.rates}:
        assert all(machine.rate(lane, op, fmt).s_per_byte for op in OPS for fmt in (*FORMATS, "*"))


@pytest.mark.parametrize("name", FILES)
def test_disk_is_slower_than_ram_and_ram_than_a_device(name: str) -> None:
    machine = load(name)
    disk, ram = machine.rate("disk0", "load", "*").s_per_byte, machine.rate("host", "ffn", "int4").s_per_byte
    assert 1e-10 < disk < 3e-9  # 0.33 to 10 GB/s
    assert 5e-12 < ram < disk / 3
    sharing = {(sharing.lane, sharing.beside): sharing.factor for sharing in machine.sharing}
    assert 1 < sharing["host", "disk0"] < 1.2
    if name in WITH_GPU:
        link = machine.rate("h2d0", "copy", "*").s_per_byte
        assert machine.rate("gpu0", "ffn", "int4").s_per_byte < ram < link < disk
        assert sharing["host", "h2d0"] > sharing["host", "disk0"]
        assert machine.tier("gpu0").bytes < machine.tier("host").bytes < machine.tier("disk0").bytes


@pytest.mark.parametrize("name", FILES)
def test_arithmetic_is_faster_in_narrow_formats_and_on_a_device(name: str) -> None:
    machine = load(name)
    flop = {fmt: machine.rate("host", "ffn", fmt).s_per_flop for fmt in FORMATS}
    assert flop["int4"] < flop["int8"] == flop["bfloat16"] == flop["float16"] == flop["float32"]
    # From 100 GFLOP/s to 10 TOP/s; one row of anything is bound by reading the weights.
    assert all(1e-13 < s < 1e-11 for s in flop.values())
    assert all(2 * flop[fmt] * 2 < machine.rate("host", "ffn", fmt).s_per_byte for fmt in FORMATS)
    if name in WITH_GPU:
        device = {fmt: machine.rate("gpu0", "ffn", fmt).s_per_flop for fmt in FORMATS}
        assert all(device[fmt] < flop[fmt] for fmt in FORMATS)
        assert device["float16"] < device["float32"]


@pytest.mark.parametrize("name", FILES)
def test_the_name_says_the_memory(name: str) -> None:
    machine = load(name)
    said = next(int(word[:-2]) for word in name.split("-") if word.endswith("gb"))
    tier = "gpu0" if name in NAMED_BY_DEVICE else "host"
    assert 0.8 * said * GIB < machine.tier(tier).bytes < said * GIB


def test_a_better_machine_is_predicted_to_be_faster() -> None:
    spec, fmt = planning.describe(Path("llama-3.1-8b"), parse_format("int4"))
    ask = Ask(prompt_tokens=16, output_tokens=4, context=64)
    plain = ("pc-16gb-sata", "pc-32gb-nvme", "pc-64gb-nvme4")
    predicted = [solve(ask, spec, fmt, load(name)).prediction for name in plain]
    speeds = [p.decode_tokens_per_s for p in predicted]
    assert speeds == sorted(speeds)
    # What reading 4.2 GB of weights a token from memory allows.
    assert 3 < speeds[0] < 38.4 / 4.2 and speeds[2] < 89.6 / 4.2


def test_links_are_within_what_pci_express_carries() -> None:
    """PowerInfer counts both directions, ScheInfer's fitted β gives more than the link has: neither is taken over."""
    for name in WITH_GPU:
        assert load(name).rate("h2d0", "copy", "*").s_per_byte >= 1 / 31.5e9
    for name in ("cloud-t4-208gb", "pc-rtx2080ti-64gb", "server-rtx2080ti-11gb"):  # PCIe 3.0
        assert load(name).rate("h2d0", "copy", "*").s_per_byte >= 1 / 15.75e9


def test_scheinfers_fits_are_taken_over() -> None:
    """Table I: seconds a multiply-add, which with one row reads one weight of 2 bytes (FP16)."""
    for name, cpu, device in (
        ("server-a6000-48gb", 1.6e-11, 3.2e-12),
        ("server-rtx3090-24gb", 1.5e-11, 2.6e-12),
        ("server-rtx2080ti-11gb", 2.5e-11, 3.6e-12),
    ):
        assert load(name).rate("host", "ffn", "float16").s_per_byte * 2 == pytest.approx(cpu)
        assert load(name).rate("gpu0", "ffn", "float16").s_per_byte * 2 == pytest.approx(device)


def test_a_disk_that_writes_at_its_own_speed() -> None:
    machine = load("cloud-t4-208gb")
    assert machine.rate("disk_write0", "save", "*").s_per_byte == 2 * machine.rate("disk0", "load", "*").s_per_byte
