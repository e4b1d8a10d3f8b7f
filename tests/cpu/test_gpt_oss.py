"""gpt-oss as it is published, with experts in MXFP4: held bit for bit, and as exact as its float copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from penstock.errors import BrokenModel, PenstockError, UnsupportedModel
from penstock.kernels import cpu
from penstock.kernels.reference.blocks import widen_blocks
from penstock.planner.solve import solve
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.planning import describe
from penstock.spec.ask import Ask
from penstock.spec.format import Format, Mixed
from penstock.spec.parts import parts
from penstock.store.own import own_format
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from penstock.store.synth import synth
from tests.cpu.near_ties import choosing, heard
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.test_exact import GREEDY, MACHINE, TOLERANCE
from tests.cpu.variants import CONTEXT, VARIANTS, Variant

Bytes = NDArray[np.uint8]
GPT_OSS = next(variant for variant in VARIANTS if variant.name == "gpt-oss")
# Rows of whole blocks; 96 neurons are a granule and a half.
SHAPES = {
    "published": Variant("gpt-oss-mxfp4", "gpt_oss", GPT_OSS.keys | {"hidden_size": 96, "intermediate_size": 96}),
    "wider": Variant("gpt-oss-wider", "gpt_oss", GPT_OSS.keys | {"hidden_size": 160, "intermediate_size": 32}),
}
# e2m1 of OCP Microscaling Formats 1.0, table 5.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def numbers(codes: Bytes, scales: Bytes) -> NDArray[np.float32]:
    """codes uint8 [..., blocks, 16] and scales uint8 [..., blocks] → float32 [..., blocks · 32]."""
    values = E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], 32)
    values = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*codes.shape[:-2], -1)


def publish(folder: Path, to: Path, rng: np.random.Generator) -> dict[str, Bytes]:
    """The checkpoint `folder` with random experts, as published: `to`, with these in MXFP4. The float one gets the same
    numbers. Returns the new tensors."""
    shutil.copytree(folder, to)
    tensors, made = load_file(folder / "model.safetensors"), dict[str, Bytes]()
    published = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        x, columns, rows = tensors[name].shape
        codes = rng.integers(0, 256, (x, rows, columns // 32, 16), np.uint8)
        # Half of a number's spread is 1.5 / sqrt(columns) at some 2^-4.
        scales = rng.integers(121, 125, (x, rows, columns // 32), np.uint8)
        del published[name]
        made |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        tensors[name] = np.ascontiguousarray(numbers(codes, scales).swapaxes(1, 2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(published | made, to / "model.safetensors", {"format": "pt"})
    edit(to, quantization_config=QUANTISED)
    return made


def edit(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


@pytest.fixture(scope="module", params=SHAPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Variant, Path]:
    """`float` and `mxfp4` in a folder."""
    folder, variant = tmp_path_factory.mktemp(request.param), SHAPES[request.param]
    save(variant, folder / "float")
    publish(folder / "float", folder / "mxfp4", np.random.default_rng(3))
    pack(folder / "mxfp4", folder / "packed")
    return variant, folder


@pytest.mark.parametrize("kernels", [*cpu.available(), "reference"])
def test_experts_in_mxfp4_say_what_their_floats_say(folders: tuple[Variant, Path], kernels: str) -> None:
    variant, folder = folders
    oracle = Oracle(folder / "float")
    ask = Ask(prompt_tokens=300, output_tokens=1, context=CONTEXT, score=True, kv="float32")
    how = Loading(machine=MACHINE, kernels=kernels, exact=True)
    with closing(Engine.load(folder / "packed", ask, how)) as engine:
        for length in (1, 40, 300):
            ids = prompt(variant, length)
            found, expected = engine.logits(ids), oracle.logits(ids)
            if np.abs(found - expected).max() > TOLERANCE:
                with heard(engine) as said:
                    assert np.array_equal(engine.logits(ids), found)
                with choosing(oracle.model, said):
                    expected = oracle.logits(ids)
            assert np.abs(found - expected).max() <= TOLERANCE, f"prompt of {length} tokens"


def test_the_numbers_are_held_as_they_are(folders: tuple[Variant, Path]) -> None:
    """Every expert's matrix out of the packed model is what the file says, and takes as many bytes."""
    variant, folder = folders
    packed, tensors = open_packed(folder / "packed"), load_file(folder / "mxfp4" / "model.safetensors")
    assert isinstance(packed.weights, Mixed) and packed.weights.name == "float32+mxfp4"
    assert own_format(folder / "mxfp4") == describe(folder / "mxfp4")[1] == packed.weights
    d, n = variant.keys["hidden_size"], variant.keys["intermediate_size"]
    for key, part in packed.parts.items():
        if part.kind != "experts":
            continue
        mlp = f"model.layers.{part.layer}.mlp.experts."
        wanted = {name: numbers(tensors[f"{mlp}{name}_blocks"], tensors[f"{mlp}{name}_scales"])
                  for name in ("gate_up_proj", "down_proj")}  # fmt: skip
        both = wanted["gate_up_proj"]
        matrices = {"gate": both[:, 0::2], "up": both[:, 1::2], "down": wanted["down_proj"]}
        file, offset, nbytes = packed.locate(key, 0, part.granules)
        granules = np.fromfile(file, np.uint8, nbytes, offset=offset).reshape(part.granules, -1)
        for g, granule in enumerate(granules):
            expert, nth = divmod(g, part.expert_granules)
            for name, matrix in matrices.items():
                block = part.block(name)
                tiles = granule[block.offset : block.end].reshape(-1, block.format.tile_bytes(block.cols))
                found = widen_blocks(tiles, block.cols, "mxfp4")
                wants = matrix[expert][:, nth * 64 :][:, :64] if name == "down" else matrix[expert][nth * 64 :][:64]
                assert np.array_equal(found[: wants.shape[0], : wants.shape[1]], wants)
            bias = part.block("up_bias")
            wants = tensors[f"{mlp}gate_up_proj_bias"][expert, 1::2][nth * 64 :][:64]
            assert np.array_equal(granule[bias.offset : bias.end].view(np.float32)[: len(wants)], wants)
        gate = part.block("gate")
        assert gate.format == Format("mxfp4", 32) and gate.nbytes == 64 * d * 17 // 32 and part.rows == n


def test_a_gguf_file_of_it_packs_to_the_same_bytes(folders: tuple[Variant, Path], tmp_path: Path) -> None:
    """Its blocks have the scale first, and number 16 + i beside number i."""
    pytest.importorskip("gguf")
    from tests.cpu import gguf_models

    _, folder = folders
    tensors, given = load_file(folder / "mxfp4" / "model.safetensors"), dict[str, Bytes]()
    for name, codes in tensors.items():
        if not name.endswith("_blocks"):
            continue
        apart = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
        scales = tensors[name.removesuffix("_blocks") + "_scales"][..., None]
        blocks = np.concatenate([scales, apart[..., :16] | apart[..., 16:] << 4], axis=-1)
        rows = blocks.reshape(*blocks.shape[:2], -1)
        layer = name.split(".")[2]
        for which, taken in {"gate": rows[:, 0::2], "up": rows[:, 1::2]}.items() if "gate_up" in name else ():
            given[f"blk.{layer}.ffn_{which}_exps.weight"] = np.ascontiguousarray(taken)
        if "down" in name:
            given[f"blk.{layer}.ffn_down_exps.weight"] = rows

    def choose(name: str) -> Any:
        return gguf_models.Kind.MXFP4 if name in given else gguf_models.Kind.F32

    held = gguf_models.convert(folder / "float", tmp_path / "model.gguf", choose, given=given)
    assert np.isfinite(held["blk.0.ffn_down_exps.weight"]).all()
    found, wanted = open_packed(pack(tmp_path / "model.gguf", tmp_path / "packed")), open_packed(folder / "packed")
    assert found.weights == wanted.weights and found.sums == wanted.sums and found.sums is not None


def test_a_float_copy_packs_to_other_formats(folders: tuple[Variant, Path], tmp_path: Path) -> None:
    _, folder = folders
    pack(folder / "float", tmp_path / "int8", Format("int8", 64))
    assert open_packed(tmp_path / "int8").weights == Format("int8", 64)
    with pytest.raises(UnsupportedModel, match=r"is quantised \(float32\+mxfp4\), and penstock keeps its numbers"):
        pack(folder / "mxfp4", tmp_path / "none", Format("int8", 64))


def test_streams_and_caches_change_no_token(folders: tuple[Variant, Path]) -> None:
    """All in memory, with half of the weights on the disk, and with KV in int8 beside itself."""
    variant, folder = folders
    total, ids, answers = open_packed(folder / "packed").total_bytes, prompt(variant, 40), []
    for resident in (None, total // 2, 0):
        ask = Ask(prompt_tokens=40, output_tokens=32, context=CONTEXT, resident_bytes=resident, kv="int8")
        with closing(Engine.load(folder / "packed", ask, Loading(machine=MACHINE))) as engine:
            answers.append(engine.generate_ids(ids, GREEDY))
    assert answers[0] == answers[1] == answers[2]


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (lambda f: tensor(f, "gate_up_proj_scales", None), "holds U8"),
    "no codes": (lambda f: tensor(f, "down_proj_blocks", None), "lacks the tensor"),
    "fewer scales": (lambda f: tensor(f, "down_proj_scales", lambda t: t[:, :-1]), "are no pair in MXFP4"),
    "odd blocks": (lambda f: tensor(f, "down_proj_blocks", lambda t: t[..., :8]), "are no pair in MXFP4"),
    "a wider expert": (lambda f: edit(f, intermediate_size=128), "config.json leads to"),
    "another method": (lambda f: edit(f, quantization_config={"quant_method": "bitsnbytes"}), "quantization_config"),
    "no method": (lambda f: edit(f, quantization_config={}), "quantization_config.quant_method is missing"),
    "another limit": (lambda f: edit(f, swiglu_limit=8.0), "swiglu_limit 8.0 is not 7.0"),
}


def tensor(folder: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]] | None) -> None:
    """Changes a tensor of layer 1, or removes it."""
    tensors = load_file(folder / "model.safetensors")
    key = f"model.layers.1.mlp.experts.{name}"
    changed = tensors.pop(key)
    if change is not None:
        tensors[key] = np.ascontiguousarray(change(changed))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_what_makes_no_sense_is_refused(folders: tuple[Variant, Path], name: str, tmp_path: Path) -> None:
    change, says = CASES[name]
    shutil.copytree(folders[1] / "mxfp4", tmp_path / "m")
    change(tmp_path / "m")
    with pytest.raises(PenstockError) as refused:
        pack(tmp_path / "m", tmp_path / "packed")
    assert isinstance(refused.value, BrokenModel | UnsupportedModel) and says in refused.value.message
    assert "\n" not in refused.value.message and not (tmp_path / "packed").exists()


# --- the real shapes -------------------------------------------------------------------------------------------------


def test_plans_of_the_published_shapes_are_in_mxfp4() -> None:
    """Of 20b: 12.8 GB of experts' matrices at 4.25 bits, and what else is in bfloat16."""
    for name, experts, layers in (("gpt-oss-20b", 32, 24), ("gpt-oss-120b", 128, 36)):
        spec, weights = describe(Path(name))
        assert weights.name == "bfloat16+mxfp4" and not spec.cannot_run
        of_experts = [part for part in parts(spec, weights) if part.kind == "experts"]
        matrices = sum(b.nbytes * part.granules for part in of_experts for b in part.blocks if b.tiled)
        assert matrices == layers * experts * 3 * 2880 * 2880 * 17 // 32
        # Biases of a granule, and what rounds it up to whole pages.
        assert sum(part.nbytes for part in of_experts) < 1.02 * matrices
        roomy = replace(MACHINE, tiers=tuple(replace(tier, bytes=1 << 37) for tier in MACHINE.tiers))
        solved = solve(Ask(), spec, weights, roomy)
        assert solved.plan.target.weights == weights and solved.prediction.decode_tokens_per_s > 0


def test_synth_makes_such_a_shape(tmp_path: Path) -> None:
    """gpt-oss-20b with fewer and narrower layers: the same formats, and it answers."""
    from penstock.serve import shapes

    path = shapes.find("gpt-oss-20b")
    assert path is not None
    config = json.loads(path.read_text()) | {
        "hidden_size": 160, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 300, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = open_packed(synth(tmp_path / "config.json", tmp_path / "packed"))
    assert packed.weights.name == "bfloat16+mxfp4"
    kinds = {key: part.kinds() for key, part in packed.parts.items()}
    assert (kinds["0.experts"], kinds["0.attn"], kinds["embed"]) == ("mxfp4", "bfloat16", "bfloat16")
    ask = Ask(prompt_tokens=40, output_tokens=8, context=128)
    with closing(Engine.load(packed.folder, ask, Loading(machine=MACHINE))) as engine:
        assert len(engine.generate_ids(list(range(40)), replace(GREEDY, max_tokens=8))) == 8


def test_the_oracle_holds_the_same_numbers(folders: tuple[Variant, Path]) -> None:
    """What transformers makes of the float copy, so that both sides mean the same matrices."""
    _, folder = folders
    experts = Oracle(folder / "float").model.model.layers[0].mlp.experts
    tensors = load_file(folder / "mxfp4" / "model.safetensors")
    mlp = "model.layers.0.mlp.experts.down_proj"
    turned = numbers(tensors[f"{mlp}_blocks"], tensors[f"{mlp}_scales"]).swapaxes(1, 2)
    assert torch.equal(experts.down_proj, torch.from_numpy(np.ascontiguousarray(turned)))
