"""Broken files and senseless requests, as a user meets them: one clear line, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.spec.format import parse_format
from penstock.store import writer
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from tests.cpu.checkpoints import LLAMA, random_tensors, save_checkpoint, save_tensors, save_tokenizer
from tests.cpu.commands import Outcome, apart, refused
from tests.cpu.sealed import edit, reseal

Call = Callable[..., Outcome]
SMALL_SHARDS = 100_000


# --- checkpoints -----------------------------------------------------------------------------------------------------

DOWN = "model.layers.1.mlp.down_proj.weight"


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The safetensors file with its header changed, and padded to the length it had or a little more."""

    def broken(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return broken


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        found = random_tensors(LLAMA)
        change(found)
        save_tensors(folder / "model.safetensors", found)

    return broken


def content(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return broken


def config(**keys: Any) -> Callable[[Path], None]:
    return content(lambda text: json.dumps({**json.loads(text), **keys}).encode(), "config.json")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def a_folder_instead(name: str) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return broken


CHECKPOINTS = {
    "truncated": (content(lambda c: c[:-1000]), "is truncated"),
    "only a prefix": (content(lambda c: c[:7]), "too short"),
    "no bytes": (content(lambda c: b""), "too short"),
    "offsets past the end": (
        header(lambda h: h[DOWN].update(data_offsets=[x + 10**9 for x in h[DOWN]["data_offsets"]])),
        "is truncated",
    ),
    "offsets of 2^62": (header(lambda h: h[DOWN].update(shape=[2**40, 2**20], data_offsets=[0, 2**62])), DOWN),
    "overlapping": (header(lambda h: h[DOWN].update(data_offsets=[0, 72 * 172 * 4])), "overlap"),
    "dtype": (tensors(lambda t: t.update({DOWN: t[DOWN].astype(np.int8)})), "holds I8"),
    "dtype of nobody": (header(lambda h: h[DOWN].update(dtype="F12\nX")), "unknown element type"),
    "missing tensor": (tensors(lambda t: t.pop(DOWN)), f"lacks the tensor '{DOWN}'"),
    "shape": (tensors(lambda t: t.update({DOWN: t[DOWN].T.copy()})), "config.json leads to [72, 172]"),
    "NaN": (tensors(lambda t: t[DOWN].__setitem__((3, 4), np.nan)), f"'{DOWN}' holds NaN"),
    "header of 2^60": (content(lambda c: (2**60).to_bytes(8, "little") + c[8:]), "header of 1152921504606846976 bytes"),
    "header no JSON": (content(lambda c: c[:8] + b"[" + c[9:]), "not JSON"),
    "header deep": (content(lambda c: (10**5).to_bytes(8, "little") + b"[" * 10**5), "nests too deep"),
    "model type": (config(model_type="abacus"), "abacus"),
    "no model type": (config(model_type=None), "model_type"),
    "config no JSON": (content(lambda c: b"{", "config.json"), "config.json is not JSON"),
    "config not UTF-8": (content(lambda c: b"\xff\xfe{}", "config.json"), "config.json is not UTF-8"),
    "config empty": (content(lambda c: b"", "config.json"), "config.json is not JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no *.safetensors"),
    "no folder": (shutil.rmtree, "is not there"),
    "an empty folder": (emptied, "holds no config.json"),
    "a file": (a_file_instead, "is not JSON"),
    "config a folder": (a_folder_instead("config.json"), "config.json"),
    "weights a folder": (a_folder_instead("model.safetensors"), "model.safetensors"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint(name: str, call: Call, cache: Path, tmp_path: Path) -> None:
    """Packing it, and running it, which packs it first: both say the same."""
    breaks, says = CHECKPOINTS[name]
    source = tmp_path / "source"
    save_checkpoint(source, LLAMA)
    save_tokenizer(source, LLAMA)
    breaks(source)
    error = refused(call("pack", source, tmp_path / "packed", "--weights", "int4"), says)
    assert {path.name for path in tmp_path.iterdir()} <= {"source"}
    again = refused(call("run", source, "hi", "--weights", "int4", "--cache", tmp_path / "cache"), says)
    assert again["message"] == error["message"]
    assert not list(tmp_path.glob("cache/models/*"))


def test_a_destination_that_cannot_be(call: Call, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", LLAMA)
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for target in (tmp_path / "file", tmp_path / "file" / "packed", tmp_path / "source", "/proc/packed", ""):
        refused(call("pack", tmp_path / "source", target))
        refused(call("synth", tmp_path / "source", target))
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


# --- packed models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, int4, and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("intact")
    config = {**LLAMA, "vocab_size": 300}
    save_checkpoint(folder / "source", config)
    save_tokenizer(folder / "source", config)
    packed = pack(folder / "source", folder / "packed", parse_format("int4"), shard_bytes=SMALL_SHARDS)
    assert len(list(packed.glob("*.safetensors"))) > 2
    return packed


@pytest.fixture
def packed(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "packed"))


def sealed(breaks: Callable[[Path], None], weights: bool = False) -> Callable[[Path], None]:
    """The same with checksums that fit: a model that was packed broken. tests/cpu/test_damage.py has the others."""

    def broken(folder: Path) -> None:
        breaks(folder)
        reseal(folder, weights)

    return broken


def another_manifest(folder: Path) -> None:
    edit(folder, "penstock.json", lambda manifest: manifest["parts"][3].update(key="7.ffn"))


def swapped(folder: Path) -> None:
    one, two = folder / "model-00001.safetensors", folder / "model-00002.safetensors"
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def with_nan(folder: Path, key: str, block: str) -> None:
    """The scales of a matrix's first granule become NaN."""
    model = open_packed(folder)
    found = model.parts[key].block(block)
    path, offset, _ = model.locate(key, 0, 1)
    with path.open("r+b") as stream:
        # Behind the codes of the first tile and group.
        stream.seek(offset + found.offset + 16 * found.format.group * found.format.bits // 8)
        stream.write((0x7E00).to_bytes(2, "little") * found.rows)
    reseal(folder, weights=True)


SECOND = "model-00002.safetensors"
PACKED = {
    "truncated": (content(lambda c: c[:-4096], SECOND), "is truncated"),
    "swapped": (swapped, "holds other parts"),
    "shard missing": (lambda folder: (folder / SECOND).unlink(), "is missing"),
    "shard a folder": (a_folder_instead(SECOND), SECOND),
    "manifest flipped": (content(lambda c: c[:200] + b"\xff" + c[201:], "penstock.json"), "is not UTF-8"),
    "manifest cut": (content(lambda c: c[: len(c) // 2], "penstock.json"), "is not JSON"),
    "manifest of another": (another_manifest, "does not fit config.json"),
    "config of another": (sealed(config(num_attention_heads=3, num_key_value_heads=1)), "does not fit config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "no tokenizer": (sealed(lambda folder: (folder / "tokenizer.json").unlink()), "no tokenizer.json"),
    "tokenizer cut": (sealed(content(lambda c: c[:100], "tokenizer.json")), "is not a tokenizer"),
    "eos": (sealed(content(lambda c: b'{"eos_token_id": "2"}', "generation_config.json")), "eos_token_id is '2'"),
    "sampling": (sealed(content(lambda c: b'{"top_p": 7}', "generation_config.json")), "top_p is 7"),
    "NaN in a scale": (lambda folder: with_nan(folder, "1.ffn", "down"), "weights may be damaged"),
    "NaN in the embedding": (lambda folder: with_nan(folder, "embed", "rows"), "weights may be damaged"),
    "NaN in the head": (lambda folder: with_nan(folder, "head", "rows"), "weights may be damaged"),
}  # fmt: skip


@pytest.mark.parametrize("resident", ["1GiB", "0"], ids=["resident", "streaming"])
@pytest.mark.parametrize("name", PACKED)
def test_a_broken_packed_model(name: str, resident: str, call: Call, packed: Path) -> None:
    breaks, says = PACKED[name]
    breaks(packed)
    # The prompt's first byte lies in the granule of the embedding that is damaged.
    refused(
        call("run", packed, "\x01", "--resident", resident, "--max-tokens", 4),
        says,
        "BrokenModel" if "NaN" in name else None,
    )


def test_damage_that_only_a_check_or_a_score_shows(call: Call, packed: Path, intact: Path, tmp_path: Path) -> None:
    with_nan(packed, "0.ffn", "up")
    refused(call("pack", "--verify", packed), "NaN", "BrokenModel")
    (tmp_path / "text").write_text("some text")
    for first, second in ((packed, intact), (intact, packed)):
        refused(call("eval", first, tmp_path / "text", "--against", second), f"{packed} computed NaN", "BrokenModel")


def test_numbers_that_overflow_are_no_noise(packed: Path, cache: Path) -> None:
    """Not NaN, yet far too large: numpy would warn, line after line."""
    model = open_packed(packed)
    path, offset, nbytes = model.locate("1.norms", 0, 1)
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(np.full(nbytes // 4, 3e38, np.float32).tobytes())
    reseal(packed, weights=True)
    refused(apart("run", packed, "ab", "--cache", cache, "--json"), "weights may be damaged", "BrokenModel")
    (packed / "text").write_text("some text")
    refused(apart("eval", packed, packed / "text", "--cache", cache, "--json"), "weights may be damaged")


def test_eval_needs_one_vocabulary(call: Call, intact: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 400}))
    other = synth(tmp_path, tmp_path / "other", parse_format("int4"))
    (tmp_path / "text").write_text("some text")
    refused(call("eval", intact, tmp_path / "text", "--against", other), "cannot be compared", "BadRequest")
    (tmp_path / "text").write_bytes(b"")
    refused(call("eval", intact, tmp_path / "text"), "too short", "BadRequest")
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    refused(call("eval", intact, tmp_path / "text"), "not UTF-8", "BadRequest")


@pytest.mark.fuzz
@given(st.data())
def test_fuzz_flipped_bytes(intact: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Of penstock.json, config.json or a shard's header: our errors, with checksums that fit and with those of the
    model as it was."""
    folder = tmp_path_factory.mktemp("flip")
    for file in intact.iterdir():
        os.link(file, folder / file.name)
    name = data.draw(st.sampled_from(["penstock.json", "config.json", SECOND]))
    damaged = bytearray((folder / name).read_bytes())
    end = min(len(damaged), 600) if name == SECOND else len(damaged)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, end - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).unlink()
    (folder / name).write_bytes(damaged)
    assume(damaged != (intact / name).read_bytes())
    with pytest.raises(PenstockError) as caught:
        open_packed(folder)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message
    with suppress(ValueError):  # no longer JSON
        reseal(folder)
    try:
        found = open_packed(folder)
    except PenstockError as error:
        assert error.exit_code == 2 and "\n" not in error.message
    else:
        assert found.locations == open_packed(intact).locations
    shutil.rmtree(folder)


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounts a small tmpfs, which takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(call: Call, tiny_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "source", LLAMA)
    save_tokenizer(tmp_path / "source", LLAMA)
    for name in ("pack", "synth"):
        error = refused(call(name, tmp_path / "source", tiny_disk / "packed"), "too full", "StorageFailed")
        assert error["need_bytes"] > error["have_bytes"] > 0
    refused(call("run", tmp_path / "source", "hi", "--cache", tiny_disk), "too full", "StorageFailed")
    monkeypatch.setattr(writer, "_require_room", lambda partial, need: None)
    monkeypatch.setattr(pack, "__defaults__", (None, None, SMALL_SHARDS, None))
    refused(call("pack", tmp_path / "source", tiny_disk / "packed"), "became full", "StorageFailed")
    left = sorted(path.name for path in (tiny_disk / "packed.partial").iterdir())
    assert not (tiny_disk / "packed").exists() and left[0] == "model-00001.safetensors" and left[-1] == "resume.json"
    assert not [name for name in left if name.endswith(".tmp")]
    shutil.rmtree(tiny_disk / "packed.partial")
    refused(call("probe", "--cache", tiny_disk), "cannot measure the disk", "StorageFailed")
    assert not [path for path in tiny_disk.rglob("*") if path.is_file()]
