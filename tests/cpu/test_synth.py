"""Synthetic models: the shape asked for, random weights, a byte tokenizer."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from penstock.errors import BadRequest, StorageFailed
from penstock.graph import passes
from penstock.graph.tasks import Call
from penstock.kernels.reference.blocks import widen_blocks
from penstock.models import sources
from penstock.serve.session import Session
from penstock.serve.shapes import find
from penstock.spec.blocks import BLOCKS
from penstock.spec.format import Format, parse_format, tiles
from penstock.spec.parts import parts
from penstock.store import writer
from penstock.store.pack import verify
from penstock.store.packed import open_packed
from penstock.store.synth import ROUTED_OUT, synth
from tests.cpu.checkpoints import (
    EXPERTS,
    LLAMA,
    OPT,
    Array,
    folder_bytes,
)
from tests.cpu.commands import here, refused
from tests.cpu.test_pack import block_bytes, blocks_of
from tests.plans import resident_plan

SMALL_SHARDS = 100_000  # LLAMA in float32 becomes 8 shards


ODD = {**LLAMA, "hidden_size": 71, "head_dim": 14}


def is_random(values: Array, std: float) -> None:
    """Mean 0 and the given standard deviation, as far as five sigma of so many samples tell."""
    assert abs(values.mean()) < 5 * std / values.size**0.5
    assert values.std() == pytest.approx(std, rel=0.05 + 5 / (2 * values.size) ** 0.5)


@pytest.mark.parametrize("name", [None, "int4", "int8-g32", "float16"])
@pytest.mark.parametrize(
    "config",
    [LLAMA, OPT, ODD, EXPERTS["qwen2_moe"], EXPERTS["glm4_moe"]],
    ids=["llama", "opt", "odd", "qwen2_moe", "glm4_moe"],
)
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
        if block.rows == 1 and not block.tiled:
            valid = values[:, : part.rows_of(g, g + 1) * block.cols // part.granule_rows]
            center = 0 if block.name.endswith("bias") else 1
            assert np.abs(valid - center).max() < (0.6 if center else 0.15) and not values[:, valid.shape[1] :].any()
        elif (part.key, block.name) in columns:
            fan_in = block.cols * part.rows / part.granule_rows
            std = fan_in**-0.5 * (ROUTED_OUT if block.name == "o" and packed.spec.is_routed else 1)
            is_random(values[:, : part.rows_of(g, g + 1) * block.cols // part.granule_rows], std)
        else:
            is_random(values[:rows], block.cols**-0.5)
            assert not values[rows:].any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_synth_in_formats_of_gguf_files(tmp_path: Path, kind: str) -> None:
    """Random numbers of the right size, zeros where rows are padding, and finite ones for `verify`."""
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **shape, "intermediate_size": 352}))
    packed = open_packed(synth(tmp_path / "config.json", tmp_path / "dst", parse_format(kind)))
    assert packed.weights == parse_format(kind)
    verify(tmp_path / "dst")
    data = {file: file.read_bytes() for file in packed.files}
    for key, part in packed.parts.items():
        for block in part.blocks:
            if not block.format.in_blocks:
                continue
            file, offset, _ = packed.locate(key, part.granules - 1, part.granules)
            begin, rows = offset + block.offset, part.rows_of(part.granules - 1, part.granules)
            raw = np.frombuffer(data[file][begin : begin + block.nbytes], np.uint8)
            values = widen_blocks(raw.reshape(tiles(block.rows), -1), block.cols, kind)
            if block.name in ("gate", "up", "rows"):
                assert not values[rows:].any()
                values = values[:rows]
            fan_in = part.rows if block.name == "down" else 256
            assert values.std() == pytest.approx(fan_in**-0.5, rel=0.7 if kind == "mxfp4" else 0.3)
            assert abs(values.mean()) < 0.4 * values.std()


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


def test_synth_takes_the_name_of_a_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def stop(config: Path, *_: object, **__: object) -> None:
        seen.append(config)
        raise BadRequest("enough")

    monkeypatch.setattr("penstock.store.synth.synth", stop)
    refused(here(capsys, "synth", "qwen3-0.6b", tmp_path / "made", "--json"), "enough")
    refused(here(capsys, "synth", "no-such-shape", tmp_path / "made", "--json"), "nor is it a bundled shape")
    assert seen == [find("qwen3-0.6b")]


@pytest.mark.parametrize("router_skew", [0.0, 0.5])
def test_tokens_go_to_all_experts_alike_or_by_rank(tmp_path: Path, router_skew: float) -> None:
    """In the last of many layers too: random attention alone would make all tokens alike by then."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 16, "num_experts": 32, "num_experts_per_tok": 4}
    config = {**EXPERTS["qwen2_moe"], **sizes, "mlp_only_layers": [], "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = open_packed(synth(tmp_path, tmp_path / "dst", parse_format("int4"), router_skew=router_skew))
    session = Session(packed, resident_plan(packed.spec, packed.weights, batch_seqs=1, context=128))
    counts = Counter[int]()

    def hear(call: Call, said: list[list[int]]) -> None:
        if getattr(call.operands, "layer", None) == 15:
            counts.update(expert for token in said for expert in token)

    with session.hearing.routers(hear):
        for p in passes.prompts(session.plan, (0,), (120,), None):
            start, rows = p.batches[0].start[0], p.batches[0].rows[0]
            session.step(p, [np.random.default_rng(start).integers(0, 300, rows, np.int32)])
    session.close()
    most = sum(count for _, count in counts.most_common(8)) / counts.total()
    assert (most > 0.4) == bool(router_skew), counts
