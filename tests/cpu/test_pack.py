"""Packing: lossless where it should be, within bounds where not; what cannot be packed is refused."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from penstock.errors import BadRequest, BrokenModel, PenstockError, UnsupportedModel
from penstock.models import sources
from penstock.spec.format import Format, parse_format
from penstock.spec.parts import Block, Part
from penstock.store.header import read_header
from penstock.store.pack import pack, verify
from penstock.store.packed import TOKENIZER_PEAK, Packed, open_packed
from penstock.store.quantize import decode, encode, fields
from tests.cpu.checkpoints import (
    EXPERTS,
    LLAMA,
    OPT,
    PHI3,
    Array,
    folder_bytes,
    random_tensors,
    save_checkpoint,
    save_tensors,
    stacked_tensors,
)
from tests.xxh3 import xxh3_64

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
    source, (expert, nth) = sources(packed.spec)[part.key, block.name], divmod(g, part.expert_granules)
    tensor = tensors[source.of_expert(expert)].astype(np.float32)
    extent = block.cols if source.axis == 1 or (block.rows == 1 and not block.tiled) else block.rows
    total = extent * part.rows // part.granule_rows
    lo, hi = source.offset + nth * extent, source.offset + min((nth + 1) * extent, total)
    return tensor[:, lo:hi] if source.axis == 1 else np.atleast_2d(tensor[lo:hi])


@pytest.mark.parametrize("config", [LLAMA, PHI3, OPT, *EXPERTS.values()], ids=lambda config: config["model_type"])
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


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", [None, "float32", "bfloat16", "int4"])
@pytest.mark.parametrize("config", EXPERTS.values(), ids=lambda config: config["model_type"])
def test_experts_in_one_tensor_are_the_same(
    tmp_path: Path, config: dict[str, Any], name: str | None, dtype: str
) -> None:
    """All experts of a layer as one tensor with three axes, or each by itself: the same packed bytes."""
    apart = save_checkpoint(tmp_path / "apart", config, dtype=dtype)
    stacked = save_checkpoint(tmp_path / "stacked", config, stacked_tensors(config, apart), dtype)
    assert {tensor.ndim for tensor in stacked.values()} == {1, 2, 3}
    weights = None if name is None else parse_format(name)
    made = [pack(tmp_path / how, tmp_path / f"packed-{how}", weights) for how in ("apart", "stacked")]
    assert folder_bytes(made[0]) == folder_bytes(made[1])


def test_a_router_with_a_bias_in_float32_changes_no_format(tmp_path: Path) -> None:
    """Its bias is a vector, which is float32 in any case."""
    tensors = random_tensors(EXPERTS["glm4_moe"], "BF16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].astype(np.float32) * np.float32(1.0001)
    save_checkpoint(tmp_path / "src", EXPERTS["glm4_moe"], tensors, "BF16")
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst"))
    assert packed.weights == Format("bfloat16")
    router = packed.parts["1.router"]
    found = decode(block_bytes(packed, router, router.block("bias"), 0), 1, 6, Format("float32"), tiled=False)
    assert np.array_equal(found[0], tensors[name])


@pytest.mark.parametrize("name", ["int4", "int8-g32", "bfloat16"])
@pytest.mark.parametrize("config", [OPT, *EXPERTS.values()], ids=lambda config: config["model_type"])
def test_named_formats_apply_to_matrices_alone(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    weights = parse_format(name)
    tensors = save_checkpoint(tmp_path / "src", config)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst", weights))
    verify(tmp_path / "dst")
    kept = set()
    for part, block, g, found in blocks_of(packed):
        expected = expected_block(packed, tensors, part, block, g)
        r, c = expected.shape
        if block.format == weights.within(block.cols):
            raw = block_bytes(packed, part, block, g)
            assert raw.tobytes() == encode(expected, block.format, block.rows, block.cols).tobytes()
        else:
            kept.add(block.name)
            assert np.array_equal(found[:r, :c], expected)
    expected_kept = {
        "opt": {"positions", "project_in", "q_bias", "up_bias"},
        "qwen2_moe": {"scores", "shared_gate"},  # who goes to which expert is not rounded
        "glm4_moe": {"scores", "bias"},
    }
    assert kept >= {"attn_in", "final"} | expected_kept.get(config["model_type"], {"scores"})


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
    found = decode(block_bytes(packed, head, head.blocks[0], 1), 64, 72, head.blocks[0].format)
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
        "penstock.sums",
    }
    assert all(found[name] == expected[name] for name in found.keys() & expected.keys())
    assert packed.spec.tokenizer_bytes == TOKENIZER_PEAK * len("tokenizer.json\n")
    assert not list(tmp_path.glob("*.partial"))


def test_formats_of_gguf_files_are_not_quantised_to(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    with pytest.raises(BadRequest, match="q4_k is a format of quantised files"):
        pack(tmp_path / "src", tmp_path / "dst", parse_format("q4_k"))
    assert not list(tmp_path.glob("dst*"))


def test_manifest_says_what_lies_where(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "src", LLAMA)
    packed = open_packed(pack(tmp_path / "src", tmp_path / "dst", parse_format("int4")))
    manifest = json.loads((tmp_path / "dst/penstock.json").read_text())
    assert manifest["schema"] == "penstock.packed/3" and manifest["weights"] == "int4"
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
    content = path.read_bytes()[offset : offset + nbytes]
    before = sum(part["granules"] for part in manifest["parts"][: manifest["parts"].index(ffn)])
    sums = (tmp_path / "dst/penstock.sums").read_bytes()
    assert len(sums) == 8 * sum(part["granules"] for part in manifest["parts"]) and packed.sums == sums
    for g in range(3):
        granule = content[g * nbytes // 3 : (g + 1) * nbytes // 3]
        assert int.from_bytes(sums[8 * (before + g) :][:8], "little") == xxh3_64(granule)
    text = (tmp_path / "dst/penstock.json").read_text()
    assert manifest["sha256"] == hashlib.sha256(text[: text.rindex(",")].encode()).hexdigest()
    for file in manifest["files"]:
        found = (tmp_path / "dst" / file["name"]).read_bytes()
        assert (file["nbytes"], file["sha256"]) == (len(found), hashlib.sha256(found).hexdigest())
    assert {file["name"] for file in manifest["files"]} == {"config.json", "penstock.sums"}
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


MOE = EXPERTS["qwen2_moe"]
_MLP = "model.layers.1.mlp."
_LAST, _ROUTER, _BOTH = f"{_MLP}experts.4.up_proj.weight", f"{_MLP}gate.weight", f"{_MLP}experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(_LAST), f"lacks the tensor '{_LAST}'"),
        (lambda t: t.pop(f"{_MLP}experts.0.down_proj.weight"), r"lacks the tensor .*experts\.0\.down"),
        (lambda t: t.pop(_ROUTER), "lacks the tensor 'model.layers.1.mlp.gate.weight'"),
        (lambda t: t.pop(f"{_MLP}shared_expert_gate.weight"), "lacks the tensor .*shared_expert_gate"),
        (lambda t: t.pop(f"{_MLP}shared_expert.up_proj.weight"), "lacks the tensor .*shared_expert.up_proj"),
        (lambda t: t.update({_LAST: t[_LAST][:40].copy()}), r"shape \[40, 72\]; config.json leads to \[44, 72\]$"),
        (lambda t: t.update({_LAST: t[_LAST][None].copy()}), r"has shape \[1, 44, 72\]"),
        (
            lambda t: t.update({_ROUTER: np.zeros((8, 72), np.float32)}),
            r"gate.weight' has shape \[8, 72\]; config.json leads to \[5, 72\]: it says num_experts 5$",
        ),
        (lambda t: t.update({_ROUTER: t[_ROUTER][:, :8].copy()}), r"leads to \[5, 72\]$"),
        (lambda t: t[_LAST].__setitem__((43, 71), np.nan), f"'{_LAST}' holds NaN or infinite"),
    ],
)  # fmt: skip
def test_bad_experts(tmp_path: Path, change: Callable[[dict[str, Array]], Any], message: str) -> None:
    tensors = random_tensors(MOE)
    change(tensors)
    save_checkpoint(tmp_path / "src", MOE, tensors)
    refused(tmp_path, BrokenModel, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(_BOTH), f"lacks the tensor '{_BOTH}'"),
        (lambda t: t.pop(f"{_MLP}experts.down_proj"), "lacks the tensor .*experts.down_proj'"),
        (
            lambda t: t.update({_BOTH: np.concatenate([t[_BOTH], t[_BOTH]])}),
            r"shape \[10, 88, 72\]; config.json leads to \[5, 88, 72\]: it says num_experts 5$",
        ),
        (lambda t: t.update({_BOTH: t[_BOTH][:4].copy()}), r"\[4, 88, 72\]; .* \[5, 88, 72\]: it says num_experts 5$"),
        (lambda t: t.update({_BOTH: t[_BOTH].swapaxes(1, 2).copy()}), r"has shape \[5, 72, 88\].* \[5, 88, 72\]$"),
        (lambda t: t.update({_BOTH: t[_BOTH].reshape(-1, 72)}), r"has shape \[440, 72\]"),
        (lambda t: t.update({_BOTH: t[_BOTH].ravel()}), r"has shape \[31680\]"),
        (lambda t: t.update({_BOTH: t[_BOTH][:0].copy()}), r"has shape \[0, 88, 72\]"),
        (lambda t: t[_BOTH].__setitem__((4, 87, 71), np.inf), f"'{_BOTH}' holds NaN or infinite"),
        # Of one layer stacked, of another apart: nobody saves that.
        (lambda t: t.update({_LAST: t.pop(_BOTH)[4, 44:].copy()}), f"lacks the tensor '{_BOTH}'"),
    ],
)  # fmt: skip
def test_bad_stacked_experts(tmp_path: Path, change: Callable[[dict[str, Array]], Any], message: str) -> None:
    tensors = stacked_tensors(MOE, random_tensors(MOE))
    change(tensors)
    save_checkpoint(tmp_path / "src", MOE, tensors)
    refused(tmp_path, BrokenModel, message)


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
