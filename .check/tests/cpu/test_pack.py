"""Packing: lossless where it should be, within bounds where not, and nothing half-written whatever happens."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors import safe_open

from penstock.errors import BadRequest, BrokenModel, PenstockError, StorageFailed, UnsupportedModel
from penstock.models import sources, spec_from_config
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import Block, Part, parts
from penstock.store import writer
from penstock.store.header import read_header
from penstock.store.pack import pack, verify
from penstock.store.packed import Packed, is_packed, open_packed, read_config
from penstock.store.quantize import decode, encode, fields
from penstock.store.synth import synth
from penstock.units import MIB
from tests.cpu.checkpoints import (
    LLAMA,
    OPT,
    PHI3,
    Array,
    folder_bytes,
    random_tensors,
    save_checkpoint,
    save_tensors,
)

SMALL_SHARDS = 100_000  # LLAMA in float32 becomes 8 shards


def block_bytes(packed: Packed, part: Part, block: Block, g: int) -> Array:
    path, offset, nbytes = packed.locate(part.key, g, g + 1)
    granule = np.fromfile(path, np.uint8, nbytes, offset=offset)
    return granule[block.offset : block.offset + block.nbytes]


def blocks_of(packed: Packed) -> Iterator[tuple[Part, Block, int, Array]]:
    """Every block of every granule, decoded: float32 [rows, cols]."""
    for part in packed.parts.values():
        for g in range(part.granules):
            for block in part.blocks:
                raw = block_bytes(packed, part, block, g)
                if block.tiled:
                    assert_padding_is_zero(raw, block)
                yield part, block, g, decode(raw, block.rows, block.cols, block.format, block.tiled)


def assert_padding_is_zero(raw: Array, block: Block) -> None:
    """Rows up to a whole tile and columns up to a whole group or pair: their bits are 0."""
    fmt, rows, cols = block.format, 16 * -(-block.rows // 16), block.cols
    if fmt.is_quantised:
        raw = raw.copy()
        _, scales, minimums = fields(raw, rows, cols, fmt)
        at = block.rows % 16 or 16
        assert not scales[-1, :, at:].any() and not minimums[-1, :, at:].any()
        scales[:], minimums[:] = 1, 0  # codes decode to themselves
        cols = fmt.groups(cols) * fmt.group
    elif fmt.kind == "bfloat16":
        cols += cols % 2
    found = decode(raw, rows, cols, fmt)
    assert not found[block.rows :].any() and not found[:, block.cols :].any()


def expected_block(packed: Packed, tensors: dict[str, Array], part: Part, block: Block, g: int) -> Array:
    """What the checkpoint holds at that place, cut short at the end: float32 [r, c]."""
    name, axis, offset = sources(packed.spec)[part.key, block.name]
    tensor = tensors[name].astype(np.float32)
    extent = block.cols if axis == 1 or block.rows == 1 else block.rows
    total = extent * part.rows // part.granule_rows
    lo, hi = offset + g * extent, offset + min((g + 1) * extent, total)
    return tensor[:, lo:hi] if axis == 1 else np.atleast_2d(tensor[lo:hi])


@pytest.mark.parametrize("config", [LLAMA, PHI3, OPT], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_by_default_every_number_is_kept(tmp_path: Path, config: dict[str, Any], dtype: str) -> None:
    tensors = save_checkpoint(tmp_path / "src", config, dtype=dtype)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst"))
    verify(tmp_path / "dst")
    assert packed.weights.kind == packed.spec.dtype == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    for part, block, g, found in blocks_of(packed):
        expected = expected_block(packed, tensors, part, block, g)
        r, c = expected.shape
        assert np.array_equal(found[:r, :c], expected), (part.key, block.name, g)
        assert not found[r:].any() and not found[:, c:].any()


@pytest.mark.parametrize("name", ["int4", "int8-g32", "bfloat16"])
def test_named_formats_apply_to_matrices_alone(tmp_path: Path, name: str) -> None:
    weights = parse_format(name)
    tensors = save_checkpoint(tmp_path / "src", OPT)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst", weights))
    verify(tmp_path / "dst")
    kept = set()
    for part, block, g, found in blocks_of(packed):
        expected = expected_block(packed, tensors, part, block, g)
        r, c = expected.shape
        if block.format == weights:
            raw = block_bytes(packed, part, block, g)
            assert raw.tobytes() == encode(expected, weights, block.rows, block.cols).tobytes()
        else:
            kept.add(block.name)
            assert np.array_equal(found[:r, :c], expected)
    assert {"positions", "project_in", "attn_in", "q_bias", "up_bias", "final"} <= kept


def test_headers_are_the_last_word_on_the_number_format(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", OPT, dtype="F16")
    config = json.loads((tmp_path / "src/config.json").read_text())
    for stated in ({"torch_dtype": "float32"}, {"dtype": "bfloat16"}, {}):
        del_both = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        (tmp_path / "src/config.json").write_text(json.dumps(del_both | stated))
        packed = open_packed(pack(tmp_path / "src", tmp_path / "dst"))
        assert packed.weights == Format("float16") and packed.spec.dtype == "float16"
        shutil.rmtree(tmp_path / "dst")


def test_mixed_formats_are_widened_never_rounded(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA, "BF16")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float32) * np.float32(1.0001)
    save_checkpoint(tmp_path / "src", LLAMA, tensors)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst"))
    assert packed.weights == Format("float32")
    head = packed.parts["head"]
    found = decode(block_bytes(packed, head, head.blocks[0], 1), 64, 72, head.format)
    assert np.array_equal(found, tensors["lm_head.weight"][64:128])


def test_shards_open_with_safetensors_and_lie_on_pages(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst", shard_bytes=SMALL_SHARDS))
    assert len(packed.files) > 3
    assert [file.name for file in packed.files] == [f"model-{i + 1:05d}.safetensors" for i in range(len(packed.files))]
    seen = []
    for file in packed.files:
        assert file.stat().st_size % 4096 == 0
        assert all(tensor.offset % 4096 == 0 for tensor in read_header(file).tensors.values())
        with safe_open(file, "numpy") as shard:
            for key in shard.keys():  # noqa: SIM118
                part, tensor = packed.parts[key], shard.get_tensor(key)
                assert tensor.dtype == np.uint8 and tensor.shape == (part.granules, part.granule_bytes)
                path, offset, nbytes = packed.locate(key, 1, part.granules)
                assert path == file and path.read_bytes()[offset:][:nbytes] == tensor[1:].tobytes()
                seen.append(key)
    assert sorted(seen) == sorted(packed.parts)
    assert packed.total_bytes == sum(part.nbytes for part in packed.parts.values())


def test_small_files_come_along_and_the_tokenizer_is_counted(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer.model"):
        (tmp_path / "src" / name).write_text(f"{name}\n")
    (tmp_path / "src/training_args.bin").touch()
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst"))
    found, expected = folder_bytes(tmp_path / "dst"), folder_bytes(tmp_path / "src")
    assert set(found) == set(expected) - {"model.safetensors", "training_args.bin"} | {
        "model-00001.safetensors",
        "penstock.json",
    }
    assert all(found[name] == expected[name] for name in found.keys() & expected.keys())
    assert packed.spec.tokenizer_bytes == 12 * len("tokenizer.json\n")
    assert not list(tmp_path.glob("*.partial"))


def test_manifest_says_what_lies_where(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst", parse_format("int4")))
    manifest = json.loads((tmp_path / "dst/penstock.json").read_text())
    assert manifest["schema"] == "penstock.packed/2" and manifest["weights"] == "int4"
    assert [part["key"] for part in manifest["parts"]] == list(packed.parts)
    ffn = next(part for part in manifest["parts"] if part["key"] == "1.ffn")
    assert (ffn["kind"], ffn["rows"], ffn["granules"]) == ("ffn", 172, 3)
    down = {"name": "down", "rows": 72, "cols": 64, "format": "int4", "offset": 9216, "tiled": True}
    assert ffn["blocks"][2] == down
    assert {block["name"] for part in manifest["parts"] for block in part["blocks"] if not block["tiled"]} == {
        "attn_in",
        "ffn_in",
        "final",
    }
    path, offset, nbytes = packed.locate("1.ffn", 0, 3)
    assert ffn["crc32"] == zlib.crc32(path.read_bytes()[offset : offset + nbytes])
    with pytest.raises(ValueError, match="has 3 granules"):
        packed.locate("1.ffn", 2, 4)


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    calls: list[tuple[int, int, str]] = []
    pack(tmp_path / "src", tmp_path / "dst", progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert {total for _, total, _ in calls} == {calls[-1][0]}
    assert {key for _, _, key in calls} == set(open_packed(tmp_path / "dst").parts)


# --- what cannot be packed -------------------------------------------------------------------------------------------


def refused(tmp_path: Path, kind: type[PenstockError], message: str) -> None:
    """Packing src fails with one clear line and leaves nothing."""
    with pytest.raises(kind, match=message) as caught:
        pack(tmp_path / "src", tmp_path / "dst", parse_format("int4"))
    assert "\n" not in caught.value.message and len(caught.value.message) < 400
    assert not (tmp_path / "dst").exists() and not (tmp_path / "dst.partial").exists()


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: t.pop(DOWN), BrokenModel, f"lacks the tensor '{DOWN}'"),
        (lambda t: t.update({DOWN: t[DOWN].astype(np.int8)}), UnsupportedModel, f"'{DOWN}' holds I8; penstock reads"),
        (lambda t: t.update({DOWN: t[DOWN].astype(np.float64)}), UnsupportedModel, "holds F64"),
        (
            lambda t: t.update({DOWN: t[DOWN].T.copy()}),
            BrokenModel,
            r"shape \[172, 72\]; config.json leads to \[72, 172\]",
        ),
        (lambda t: t.update({DOWN: t[DOWN][:, :128].copy()}), BrokenModel, r"has shape \[72, 128\]"),
        (lambda t: t.update({DOWN: t[DOWN].ravel()}), BrokenModel, r"has shape \[12384\]"),
        (lambda t: t.update({"model.norm.weight": t[DOWN]}), BrokenModel, r"leads to \[72\]|leads to \[1, 72\]"),
        (lambda t: t[DOWN].__setitem__((5, 171), np.nan), BrokenModel, f"'{DOWN}' holds NaN or infinite"),
        (lambda t: t["model.norm.weight"].__setitem__(3, np.inf), BrokenModel, "'model.norm.weight' holds NaN"),
        (lambda t: t[DOWN].__setitem__((5, 171), -1e5), UnsupportedModel, f"'{DOWN}' holds values up to 100000"),
    ],
)
def test_bad_tensors(
    tmp_path: Path, change: Callable[[dict[str, Array]], Any], kind: type[PenstockError], message: str
) -> None:
    tensors = random_tensors(LLAMA)
    change(tensors)
    save_checkpoint(tmp_path / "src", LLAMA, tensors)
    refused(tmp_path, kind, message)


def test_bad_folders(tmp_path: Path) -> None:
    refused(tmp_path, BadRequest, "src is not there")
    (tmp_path / "src").mkdir()
    refused(tmp_path, BadRequest, r"holds no config\.json")
    (tmp_path / "src/config.json").write_text("{")
    refused(tmp_path, BrokenModel, r"config\.json is not JSON")
    (tmp_path / "src/config.json").write_text(json.dumps({"model_type": "abacus"}))
    refused(tmp_path, UnsupportedModel, "abacus")
    (tmp_path / "src/config.json").write_text(json.dumps(LLAMA))
    refused(tmp_path, BadRequest, r"holds no \*\.safetensors")
    save_tensors(tmp_path / "src/model.safetensors", random_tensors(LLAMA))
    whole = (tmp_path / "src/model.safetensors").read_bytes()
    (tmp_path / "src/model.safetensors").write_bytes(whole[:-100])
    refused(tmp_path, BrokenModel, "it is truncated")
    (tmp_path / "src").rename(tmp_path / "moved")
    (tmp_path / "src").touch()
    refused(tmp_path, PenstockError, "src")


def test_a_destination_that_is_there_is_left_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    (tmp_path / "dst").mkdir()
    with pytest.raises(BadRequest, match="dst exists already"):
        pack(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "dst").rmdir()
    (tmp_path / "dst.partial").mkdir()
    for name in ("diary.doc", "model-00001.safetensors"):  # the second is a shard's name, but no state stands beside it
        (tmp_path / "dst.partial" / name).write_text("mine")
        with pytest.raises(BadRequest, match=f"holds '{name}', which packing did not write"):
            pack(tmp_path / "src", tmp_path / "dst")
        assert (tmp_path / "dst.partial" / name).read_text() == "mine"
        (tmp_path / "dst.partial" / name).unlink()
    pack(tmp_path / "src", tmp_path / "dst")


def test_a_packed_model_is_no_source(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "dst")
    with pytest.raises(BadRequest, match="is packed already"):
        pack(tmp_path / "dst", tmp_path / "again")


# --- opening what was damaged ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    save_checkpoint(folder / "src", LLAMA)
    return pack(folder / "src", folder / "dst", parse_format("int4"), shard_bytes=SMALL_SHARDS)


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


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
    with pytest.raises(BrokenModel, match=r"model-0000\d\.safetensors: part 1\.ffn is corrupt"):
        verify(copy)


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00])
def test_verify_finds_scales_and_minimums_that_are_not_finite(copy: Path, bits: int) -> None:
    packed = open_packed(copy)
    down = packed.parts["1.ffn"].block("down")
    overwrite(packed, "1.ffn", 1, down.offset + down.nbytes - 2, bits.to_bytes(2, "little"))
    with pytest.raises(BrokenModel, match=r"part 1\.ffn, granule 1: down holds NaN or infinite"):
        verify(copy)


def test_read_config_takes_a_folder_or_a_file(copy: Path) -> None:
    config, spec = read_config(copy)
    assert read_config(copy / "config.json") == (config, spec)
    assert replace(spec, tokenizer_bytes=0) == replace(spec_from_config(config, "x"), tokenizer_bytes=0)
    with pytest.raises(BadRequest, match="give its folder"):
        read_config(copy / SHARD)


# --- what happens on the way -----------------------------------------------------------------------------------------


def partial_is_clean(partial: Path) -> int:
    """No half-written file; the number of whole shards."""
    assert not list(partial.glob("*.tmp"))
    shards = list(partial.glob("model-*.safetensors"))
    for shard in shards:
        header = read_header(shard)
        assert header.file_bytes == max(tensor.offset + tensor.nbytes for tensor in header.tensors.values())
    return len(shards)


def test_full_disk_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    monkeypatch.setattr(writer, "free_bytes", lambda folder: 5000)
    with pytest.raises(StorageFailed, match=r"too full: .* needs .* 4\.88 KiB are free") as caught:
        pack(tmp_path / "src", tmp_path / "dst")
    assert caught.value.numbers["have_bytes"] == 5000 < caught.value.numbers["need_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_full_disk_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    true_pwrite, room = os.pwrite, 250_000

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = true_pwrite(fd, data[:room], offset)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StorageFailed, match=r"disk became full: .* finished shards are kept") as caught:
        pack(tmp_path / "src", tmp_path / "dst", shard_bytes=SMALL_SHARDS)
    assert caught.value.numbers["need_bytes"] > 0 and "\n" not in caught.value.message
    assert not (tmp_path / "dst").exists()
    kept = partial_is_clean(tmp_path / "dst.partial")
    assert kept >= 1
    monkeypatch.undo()
    first_done: list[int] = []
    pack(tmp_path / "src", tmp_path / "dst", None, lambda done, *_: first_done.append(done), SMALL_SHARDS)
    assert first_done[0] > kept * 4096  # it went on, it did not start over
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        save_checkpoint(tmp_path / "src", LLAMA)
        with pytest.raises(StorageFailed, match="too full"):
            pack(tmp_path / "src", small / "dst", shard_bytes=SMALL_SHARDS)
        true_free = writer.free_bytes
        monkeypatch.setattr(writer, "_require_room", lambda partial, need: None)
        with pytest.raises(StorageFailed, match="became full"):
            pack(tmp_path / "src", small / "dst", shard_bytes=SMALL_SHARDS)
        assert partial_is_clean(small / "dst.partial") >= 1
        with pytest.raises(StorageFailed, match="became full"):
            synth(tmp_path / "src", small / "other")
        assert not (small / "other.partial").exists() and true_free(small) > 0
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "direct")
    true_open, true_pwrite, refusals = os.open, os.pwrite, 0

    def no_direct_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return true_open(path, flags, *args, **kwargs)

    def refuse_once(fd: int, data: memoryview, offset: int) -> int:
        nonlocal refusals
        refusals += 1
        if refusals == 1:
            raise OSError(errno.EINVAL, "")
        return true_pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_direct_open)
        pack(tmp_path / "src", tmp_path / "buffered")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse_once)
        pack(tmp_path / "src", tmp_path / "late")
    assert folder_bytes(tmp_path / "direct") == folder_bytes(tmp_path / "buffered") == folder_bytes(tmp_path / "late")


# Packs and stands still, once `stop` bytes are done, until it is told otherwise.
CHILD = """
    import sys, time
    from pathlib import Path
    from penstock.store.pack import pack
    def progress(done, total, key):
        if done >= {stop}:
            print("stopped", flush=True)
            time.sleep(60)
    pack(Path(sys.argv[1]), Path(sys.argv[2]), None, progress, {shard_bytes})
"""


def interrupt(src: Path, dst: Path, how: signal.Signals, stop: int) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD).format(stop=stop, shard_bytes=SMALL_SHARDS)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(src), str(dst)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "stopped\n", child.communicate()[1]
    child.send_signal(how)
    child.communicate(timeout=30)
    return child


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pack_goes_on_to_the_same_bytes(tmp_path: Path, how: signal.Signals) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    pack(tmp_path / "src", tmp_path / "whole", shard_bytes=SMALL_SHARDS)
    child = interrupt(tmp_path / "src", tmp_path / "dst", how, stop=300_000)
    assert child.returncode in (-how, 130)
    assert not (tmp_path / "dst").exists()
    if how == signal.SIGINT:
        assert partial_is_clean(tmp_path / "dst.partial") >= 2
    else:
        assert list((tmp_path / "dst.partial").glob("*.tmp"))
    calls: list[int] = []
    pack(tmp_path / "src", tmp_path / "dst", None, lambda done, *_: calls.append(done), SMALL_SHARDS)
    assert calls[0] > 100_000
    assert folder_bytes(tmp_path / "dst") == folder_bytes(tmp_path / "whole")
    assert not (tmp_path / "dst.partial").exists()


def test_an_interrupt_before_the_first_shard_leaves_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    interrupt(tmp_path / "src", tmp_path / "dst", signal.SIGINT, stop=1)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_changed_source_or_format_starts_over(tmp_path: Path) -> None:
    def stop_late(done: int, total: int, key: str) -> None:
        if done > 300_000:
            raise KeyboardInterrupt

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            pack(tmp_path / "src", tmp_path / "dst", None, stop_late, SMALL_SHARDS)
        assert partial_is_clean(tmp_path / "dst.partial") >= 2

    def first_done(weights: Format | None) -> int:
        calls: list[int] = []
        pack(tmp_path / "src", tmp_path / "dst", weights, lambda done, *_: calls.append(done), SMALL_SHARDS)
        verify(tmp_path / "dst")
        shutil.rmtree(tmp_path / "dst")
        return calls[0]

    save_checkpoint(tmp_path / "src", LLAMA)
    interrupted()
    assert first_done(parse_format("bfloat16")) < 100_000
    interrupted()
    assert first_done(None) > 100_000
    interrupted()
    (tmp_path / "dst.partial/resume.json").write_text("{")
    assert first_done(None) < 100_000
    interrupted()
    save_tensors(tmp_path / "src/model.safetensors", random_tensors(LLAMA, seed=7))
    assert first_done(None) < 100_000
    interrupted()
    shard = tmp_path / "dst.partial/model-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert first_done(None) < 100_000


def test_two_processes_do_not_write_one_destination(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    refusals: list[str] = []

    def second(done: int, total: int, key: str) -> None:
        if not refusals:
            with pytest.raises(BadRequest, match="another process is writing") as caught:
                pack(tmp_path / "src", tmp_path / "dst")
            refusals.append(caught.value.message)

    pack(tmp_path / "src", tmp_path / "dst", progress=second)
    assert len(refusals) == 1
    verify(tmp_path / "dst")


# --- memory ----------------------------------------------------------------------------------------------------------

BIG = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64}
BIG |= {"num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 8000}

PEAK = """
    import sys
    from pathlib import Path
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack
    pack(Path(sys.argv[1]), Path(sys.argv[2]), parse_format("int4"))
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def cached_share(file: Path) -> float | None:
    """Share of a file's pages that are in the page cache; None where the file system does not say."""
    found = []
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else asking for one page reads those behind it
        for offset in range(0, file.stat().st_size, MIB // 2):
            try:
                found.append(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1)
            except BlockingIOError:
                found.append(False)
            except OSError:
                return None
    finally:
        os.close(fd)
    return sum(found) / len(found)


def test_peak_memory_and_page_cache(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", BIG)
    source = tmp_path / "src/model.safetensors"
    assert source.stat().st_size > 250 * MIB
    fd = os.open(source, os.O_RDONLY)
    os.fsync(fd)  # pages that are not on the disk yet cannot be dropped
    os.close(fd)
    code = [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path / "src"), str(tmp_path / "dst")]
    result = subprocess.run(code, capture_output=True, text=True, check=True)
    match = re.search(r"(\d+) kB", result.stdout)
    assert match is not None
    # The interpreter with numpy takes 35 MiB, two stages 16, the kept tensor 16, granules in flight 25.
    assert int(match[1]) / 1024 < 160
    for file in (source, tmp_path / "dst/model-00001.safetensors"):
        share = cached_share(file)
        assert share is None or share < 0.1


# --- synth -----------------------------------------------------------------------------------------------------------


ODD = {**LLAMA, "hidden_size": 71, "head_dim": 14}


def is_random(values: Array, std: float) -> None:
    """Mean 0 and the given standard deviation, as far as five sigma of so many samples tell."""
    assert abs(values.mean()) < 5 * std / values.size**0.5
    assert values.std() == pytest.approx(std, rel=0.05 + 5 / (2 * values.size) ** 0.5)


@pytest.mark.parametrize("name", [None, "int4", "int8-g32", "float16"])
@pytest.mark.parametrize("config", [LLAMA, OPT, ODD], ids=["llama", "opt", "odd"])
def test_synth_makes_a_model_of_the_shape(tmp_path: Path, config: dict[str, Any], name: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300, "torch_dtype": "bfloat16"}))
    weights = parse_format(name) if name else None
    packed = open_packed(synth(tmp_path / "config.json", tmp_path / "dst", weights))
    verify(tmp_path / "dst")
    assert packed.weights == (weights or Format("bfloat16"))
    assert list(packed.parts) == [part.key for part in parts(packed.spec, packed.weights)]
    columns = {key for key, source in sources(packed.spec).items() if source.axis == 1}
    for part, block, g, values in blocks_of(packed):
        rows = part.rows_of(g, g + 1) * block.rows // part.granule_rows
        if block.rows == 1:
            valid = values[:, : part.rows_of(g, g + 1) * block.cols // part.granule_rows]
            center = 0 if block.name.endswith("_bias") else 1
            assert np.abs(valid - center).max() < 0.6 and not values[:, valid.shape[1] :].any()
        elif (part.key, block.name) in columns:
            fan_in = block.cols * part.rows / part.granule_rows
            is_random(values[:, : part.rows_of(g, g + 1) * block.cols // part.granule_rows], fan_in**-0.5)
        else:
            is_random(values[:rows], block.cols**-0.5)
            assert not values[rows:].any()


def test_synth_repeats_itself_and_seeds_differ(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synth(tmp_path, tmp_path / name, parse_format("int4"), seed)
    a, b, c = (folder_bytes(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model-00001.safetensors"] != c["model-00001.safetensors"]
    packed = open_packed(tmp_path / "a")
    heads = [block_bytes(packed, packed.parts["0.attn"], packed.parts["0.attn"].blocks[0], g) for g in (0, 1)]
    assert heads[0].tobytes() != heads[1].tobytes()


@pytest.mark.parametrize("vocab", [300, 258, 257, 100])
def test_synth_writes_a_byte_tokenizer(tmp_path: Path, vocab: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": vocab}))
    synth(tmp_path, tmp_path / "dst", parse_format("int4"))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "dst/tokenizer.json"))
    text = "Hello, wörld!\n🙂" if vocab > 256 else "ABC 123"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert max(tokenizer.get_vocab().values()) < vocab
    generation = json.loads((tmp_path / "dst/generation_config.json").read_text())
    if vocab >= 258:
        assert generation == {"bos_token_id": 256, "eos_token_id": 257}
        assert tokenizer.token_to_id("<|eos|>") == 257
        assert tokenizer.decode([72, 105, 257]) == "Hi"
    else:
        assert generation == {}


def test_synth_refuses_as_pack_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="is not there"):
        synth(tmp_path / "config.json", tmp_path / "dst")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(writer, "free_bytes", lambda folder: 1)
    with pytest.raises(StorageFailed, match="too full"):
        synth(tmp_path, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_opening_needs_no_numpy() -> None:
    code = "import sys, penstock.store.packed; assert 'numpy' not in sys.modules and 'torch' not in sys.modules"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.monotonic() - started < 30
