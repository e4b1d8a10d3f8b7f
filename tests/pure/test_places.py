"""Places: their names, which files keep, and that one module spells them."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.spec import machine, places
from penstock.spec.machine import Capacity
from penstock.spec.places import GPU, HOST, device, disk, lane_between
from tests.pure.machine import MACHINE
from tests.syntax import tree_of

# The names, and those of arenas, which begin with their tier's.
_NAMES = re.compile(r"(host|gpu\d+|disk\d+|disk_write\d+|h2d\d+|d2h\d+)(\.\w*)?")


def test_one_module_spells_the_names() -> None:
    root = Path(penstock.__file__).parent
    for file in root.rglob("*.py"):
        if file == root / "spec" / "places.py":
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not _NAMES.fullmatch(node.value), f"{file}:{node.lineno} says {node.value!r}"


def test_names_are_those_of_the_files() -> None:
    assert tuple(GPU) == ("gpu0", "gpu0", "h2d0", "d2h0") and tuple(device(1)) == ("gpu1", "gpu1", "h2d1", "d2h1")
    assert tuple(disk(0)) == ("disk0", "disk0", "disk_write0") and disk(1).writes == "disk_write1"


def test_what_lies_between_two_tiers() -> None:
    for index in range(3):
        gpu, drive = device(index), disk(index)
        assert lane_between(HOST, gpu.executor) == gpu.to_device and lane_between(gpu.executor, HOST) == gpu.to_host
        assert lane_between(drive.tier, HOST) == drive.reads and lane_between(HOST, drive.tier) == drive.writes
        assert places.device_of(gpu.executor) == gpu and places.disk_of(drive.tier) == drive
        assert [places.is_device(name) for name in (*gpu, *drive)] == [True, True, False, False, False, False, False]
        assert [places.is_link(lane) for lane in (*gpu, *drive)] == [False, False, True, True, False, False, False]
    order = [disk(1).tier, HOST, disk(0).tier, GPU.executor]
    assert sorted(order, key=places.nearness) == ["gpu0", "host", "disk0", "disk1"]


@pytest.mark.parametrize("name", ["gpu", "gpux", "gpu²", "gpu" + "9" * 5000, "gpu-1", "disk", "disk²", ""])
def test_a_machine_may_name_tiers_that_are_no_places(name: str) -> None:
    more = replace(MACHINE, tiers=(*MACHINE.tiers, Capacity(places.Tier(name), 1)))
    assert machine.loads(machine.dumps(more), "a file") == more
