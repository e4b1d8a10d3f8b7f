"""A model on two disks: what is packed where, and that both are read, with the same answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import BadRequest, DamagedModel, StorageFailed
from penstock.graph.check_plan import check_plan
from penstock.planner.reads import on_disks
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.store.pack import pack, verify
from penstock.store.packed import find_disks, open_packed, part_disks
from penstock.store.synth import synth
from tests.cpu.checkpoints import LLAMA, folder_bytes, save_checkpoint
from tests.cpu.commands import MACHINE, here, machine_cache, refused
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load, streaming
from tests.cpu.sealed import damaged
from tests.cpu.test_engine_faults import soon

PROMPT = list(range(40))


@pytest.fixture(scope="module")
def second_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An ext4 file system of its own, in a file."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root can mount a second file system here")
    folder = tmp_path_factory.mktemp("second")
    image, mounted = folder / "image", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True).returncode:
        pytest.skip("this system refuses loop mounts")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, second_disk: Path) -> tuple[Path, Path]:
    """(on one disk, on two): the same weights."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "config.json").write_text(TINY_CONFIGS["qwen3"])
    one = synth(folder / "config.json", folder / "one", parse_format("float32"))
    return one, synth(folder / "config.json", folder / "two", parse_format("float32"), spread=second_disk)


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[int]:
    with load(models[0], context=128) as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


def test_half_of_the_bytes_lie_on_each_disk(models: tuple[Path, Path], second_disk: Path) -> None:
    packed = open_packed(models[1])
    there = {path for path in packed.files if path.is_symlink()}
    assert there and all(path.resolve().is_relative_to(second_disk) for path in there)
    assert set(packed.disks.values()) == {"disk0", "disk1"} and part_disks(models[1]) == packed.part_disks
    nbytes = {"disk0": 0, "disk1": 0}
    for key, location in packed.locations.items():
        nbytes[packed.part_disks[key]] += location.nbytes
    assert abs(nbytes["disk0"] - nbytes["disk1"]) <= max(location.nbytes for location in packed.locations.values())
    assert set(open_packed(models[0]).disks.values()) == {"disk0"}


@pytest.mark.parametrize("serial", [False, True], ids=["overlapped", "serial"])
@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_both_disks_are_read_and_the_answer_is_the_same(
    engine: str, serial: bool, models: tuple[Path, Path], expected: list[int]
) -> None:
    packed = open_packed(models[1])
    plan = streaming(packed, context=128, chunk_rows=16, io_depth=2, io_block_bytes=8192, io_engine=engine)
    plan = on_disks(plan, packed.part_disks)
    check_plan(plan, packed.spec, packed.weights)
    assert {unit.home for unit in plan.units} == {"host", "disk0", "disk1"}
    running = Engine.load(models[1], Ask(), Loading(machine=MACHINE, plan=plan, serial=serial))
    found = soon(lambda: running.generate([PROMPT], GREEDY))[0]
    assert found.token_ids == expected
    assert min(found.bytes_moved["disk0"], found.bytes_moved["disk1"]) > 0
    soon(running.close)


def test_a_plan_for_one_disk_runs_on_two(models: tuple[Path, Path], expected: list[int]) -> None:
    plan = streaming(open_packed(models[1]), context=128, chunk_rows=16, ring=1)
    with load(models[1], plan) as engine:
        assert engine.generate_ids(PROMPT, GREEDY) == expected


def test_the_planner_has_a_lane_for_each(models: tuple[Path, Path], expected: list[int]) -> None:
    with (
        load(models[0], context=128, resident_bytes=0) as single,
        load(models[1], context=128, resident_bytes=0) as double,
    ):
        assert {"disk0", "disk1"} <= set(double.prediction.lane_share)
        assert double.prediction.decode_tokens_per_s > single.prediction.decode_tokens_per_s
        assert double.generate_ids(PROMPT, GREEDY) == single.generate_ids(PROMPT, GREEDY) == expected


def test_the_command_packs_verifies_and_runs(
    tmp_path: Path, second_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    dst = tmp_path / "commanded"
    found = here(capsys, "pack", tmp_path / "src", dst, "--spread", second_disk, "--verify", "--json")
    assert found.code == 0 and json.loads(found.out)["verified"]
    assert here(capsys, "pack", "--verify", dst).code == 0
    (link,) = [path for path in open_packed(dst).files if path.is_symlink()]
    target = link.resolve()
    target.rename(target.with_name("away"))
    cache = machine_cache(tmp_path / "cache")
    for command in (("plan", dst, "--cache", cache, "--json"), ("pack", "--verify", dst, "--json")):
        refused(here(capsys, *command), "is its disk mounted?", "StorageFailed")
    with pytest.raises(StorageFailed, match=r"is its disk mounted\?"):
        Engine.load(dst, Ask(), Loading(machine=MACHINE))


def answer(model: Path, resident_bytes: int | None) -> list[int]:
    with load(model, context=128, resident_bytes=resident_bytes) as engine:
        return list(engine.generate_ids(PROMPT, GREEDY))


@pytest.mark.parametrize("resident", [None, 0], ids=["resident", "streamed"])
def test_damage_on_either_disk_is_met(models: tuple[Path, Path], expected: list[int], resident: int | None) -> None:
    packed = open_packed(models[1])
    for disk in ("disk0", "disk1"):
        part = next(part for part in packed.parts if part.endswith("ffn") and packed.part_disks[part] == disk)
        with damaged(packed, part, 1, 3, 16):
            with pytest.raises(DamagedModel, match=f"granule 1 of part {part} is damaged") as caught:
                answer(models[1], resident)
            assert caught.value.message.startswith(str(models[1]))  # the link, not where it leads
            with pytest.raises(DamagedModel, match=f"granule 1 of part {part} is damaged"):
                verify(models[1])
    verify(models[1])
    assert answer(models[1], resident) == expected


def test_packing_goes_on_where_it_stopped(tmp_path: Path, second_disk: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=100_000, spread=second_disk)

    class Stop(Exception):
        pass

    def stop(done: int, total: int, key: str) -> None:
        if done > 0.8 * total:
            raise Stop

    with pytest.raises(Stop):
        pack(tmp_path / "src", tmp_path / "dst", None, stop, 100_000, second_disk)
    assert not list((second_disk / "dst").glob("*.tmp")) and list((second_disk / "dst").iterdir())
    first: list[int] = []
    pack(tmp_path / "src", tmp_path / "dst", None, lambda done, *_: first.append(done), 100_000, second_disk)
    assert first[0] > 100_000  # it went on, it did not start over
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")
    verify(tmp_path / "dst")


def test_a_second_folder_in_use_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    (tmp_path / "far" / "dst").mkdir(parents=True)
    (tmp_path / "far" / "dst" / "mine").write_text("x")
    with pytest.raises(BadRequest, match="holds files already"):
        pack(tmp_path / "src", tmp_path / "dst", spread=tmp_path / "far")
    assert (tmp_path / "far" / "dst" / "mine").read_text() == "x"
    assert not (tmp_path / "dst.partial").exists()


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model-00001.safetensors").symlink_to(tmp_path / "unmounted" / "model-00001.safetensors")
    with pytest.raises(StorageFailed, match=r"leads to .*, which is not there: is its disk mounted\?"):
        find_disks([tmp_path / "model-00001.safetensors"])
