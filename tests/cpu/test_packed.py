"""Opening packed models: what is damaged is refused, in one clear line."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadRequest, BrokenModel, DamagedModel
from penstock.models import spec_from_config
from penstock.spec.format import parse_format
from penstock.store.pack import pack, verify
from penstock.store.packed import Packed, is_packed, open_packed, part_disks, read_config
from tests.cpu.checkpoints import (
    LLAMA,
    save_checkpoint,
)
from tests.cpu.sealed import edit, reseal

SMALL_SHARDS = 100_000  # LLAMA in float32 becomes 8 shards


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    save_checkpoint(folder / "src", LLAMA)
    return pack(folder / "src", folder / "dst", parse_format("int4"), shard_bytes=SMALL_SHARDS)


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


SHARD = "model-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("penstock.json", lambda m: m.update(schema="penstock.packed/1"), "has schema 'penstock.packed/1'"),
        ("penstock.json", lambda m: m.pop("weights"), "lacks 'weights'"),
        ("penstock.json", lambda m: m.update(weights="int3"), "unknown number format 'int3'"),
        ("penstock.json", lambda m: m.update(weights="int8"), "part embed has another layout"),
        ("penstock.json", lambda m: m.update(total_bytes=1), "total_bytes is 1"),
        ("penstock.json", lambda m: m["parts"].pop(3), r"\('0\.ffn' differs\)"),
        ("penstock.json", lambda m: m["parts"].reverse(), "'the order' differs"),
        ("penstock.json", lambda m: m["parts"][3].update(file="../x"), "which is no shard's name"),
        ("penstock.json", lambda m: m["parts"][3].update(offset=100), "no multiple of 4096"),
        ("penstock.json", lambda m: m["parts"][3].update(offset=-4096), "no multiple of 4096"),
        ("penstock.json", lambda m: m["parts"][3].update(offset=2**40), "disagree on part"),
        ("penstock.json", lambda m: m["parts"][3].update(granule_bytes=4096.0), "should be int"),
        ("penstock.json", lambda m: m["parts"][3]["blocks"][0].update(rows=65), "part 0.ffn has another layout"),
        ("config.json", lambda c: c.update(intermediate_size=236), "part 0.ffn has another layout"),
        ("config.json", lambda c: c.update(num_hidden_layers=3), r"\('2\.norms' differs\)"),
    ],
)
def test_an_inconsistent_packed_model_is_refused(
    copy: Path, name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(copy, name, change)
    with pytest.raises(BrokenModel, match=message) as caught:
        open_packed(copy)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["../model-00001.safetensors", "model-00001\0.safetensors", "", "config.json"])
def test_a_shard_has_a_shards_name(copy: Path, name: str) -> None:
    """Also where nothing but the disks of the parts is asked for: the fuzzer found a name that no file can have."""
    edit(copy, "penstock.json", lambda c: c["parts"][0].update(file=name))
    with pytest.raises(BrokenModel, match="no shard's name") as caught:
        part_disks(copy)
    assert "\n" not in caught.value.message


def test_a_damaged_shard_is_refused(copy: Path) -> None:
    file = copy / SHARD
    whole = file.read_bytes()
    for content, message in (
        (whole[:-4096], "it is truncated"),
        (whole[:5], "too short"),
        (whole + bytes(4096), "its parts end at"),
        ((copy / "model-00001.safetensors").read_bytes(), "holds other parts"),
        (whole.replace(b"U8", b"I8", 1), "disagree on part"),
    ):
        file.write_bytes(content)
        with pytest.raises(BrokenModel, match=message):
            open_packed(copy)
    file.unlink()
    with pytest.raises(BrokenModel, match="is missing"):
        open_packed(copy)


def test_no_packed_model(tmp_path: Path) -> None:
    assert not is_packed(tmp_path)
    with pytest.raises(BadRequest, match="holds no packed model"):
        open_packed(tmp_path)
    (tmp_path / "penstock.json").write_text("[]")
    with pytest.raises(BrokenModel, match="should hold a JSON object"):
        open_packed(tmp_path)


def overwrite(packed: Packed, key: str, g: int, at: int, content: bytes) -> None:
    path, offset, _ = packed.locate(key, g, g + 1)
    with path.open("r+b") as stream:
        stream.seek(offset + at)
        stream.write(content)


def test_verify_finds_one_changed_byte(copy: Path) -> None:
    verify(copy)
    packed = open_packed(copy)
    overwrite(packed, "1.ffn", 2, 7, b"\xa5")
    with pytest.raises(DamagedModel, match=r"model-0000\d\.safetensors: granule 2 of part 1\.ffn is damaged"):
        verify(copy)


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00])
def test_verify_finds_scales_and_minimums_that_are_not_finite(copy: Path, bits: int) -> None:
    packed = open_packed(copy)
    down = packed.parts["1.ffn"].block("down")
    overwrite(packed, "1.ffn", 1, down.offset + down.nbytes - 2, bits.to_bytes(2, "little"))
    reseal(copy, weights=True)
    with pytest.raises(BrokenModel, match=r"part 1\.ffn, granule 1: down holds NaN or infinite"):
        verify(copy)


def test_read_config_takes_a_folder_or_a_file(copy: Path) -> None:
    config, spec = read_config(copy)
    assert read_config(copy / "config.json") == (config, spec)
    assert replace(spec, tokenizer_bytes=0) == replace(spec_from_config(config, "x"), tokenizer_bytes=0)
    with pytest.raises(BadRequest, match="give its folder"):
        read_config(copy / SHARD)


def test_opening_needs_no_numpy() -> None:
    code = "import sys, penstock.store.packed; assert 'numpy' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
