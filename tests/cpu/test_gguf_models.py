"""Models in GGUF: the spec, the packed bytes and the logits of the checkpoints that they were made of; and one line for
each that is refused."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

from penstock.errors import BadRequest, UnsupportedModel
from penstock.models import model_types, planned_types
from penstock.models.gguf import ARCHITECTURES
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.serve.source import resolve
from penstock.spec.ask import Ask
from penstock.store.copies import MODELS
from penstock.store.gguf.files import open_gguf
from penstock.store.pack import pack
from penstock.store.packed import open_packed
from tests.cpu import gguf_files, gguf_models
from tests.cpu.commands import MACHINE, ROOT, here, machine_cache
from tests.cpu.engines import load
from tests.cpu.gguf_models import Kind
from tests.cpu.oracle import Oracle, prompt, save
from tests.cpu.variants import CONTEXT, VARIANTS, Variant

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
TALE = ROOT / "penstock/assets/tale-llama"
# What a file cannot say, as llama.cpp has it instead. Of the windows it drops those of Qwen and Mixtral.
_CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
    "qwen3-biases": {"use_sliding_window": False, "sliding_window": None, "layer_types": None},
    "qwen3-moe-normalised": {},
    "gemma3-text": {"query_pre_attn_scalar": 32},
    "gemma3-text-caps": {"query_pre_attn_scalar": 20, "sliding_window_pattern": 6},
}
_SAME = (
    "llama-gqa", "llama-mha-tied", "llama-mqa-biases", "llama-llama3-rope", "llama-linear-rope", "qwen2", "qwen2-yarn",
    "qwen3", "smollm3", "gpt-oss", "gpt-oss-no-biases", "phi3-window", "phi3-partial", "phi3-longrope-short",
    "phi3-longrope-long",
)  # fmt: skip
CASES = [replace(v, keys=v.keys | _CHANGED.get(v.name, {})) for v in VARIANTS if v.name in (*_SAME, *_CHANGED)]


def by_name(name: str) -> Variant:
    return next(case for case in CASES if case.name == name)


def converted(folder: Path, name: str = "llama-gqa", **changes: Any) -> Path:
    """A variant's checkpoint as GGUF. `changes`: metadata that a writer adds."""
    save(by_name(name), folder / "hf")
    gguf_models.convert(folder / "hf", folder / "model.gguf", metadata=changes)
    return folder / "model.gguf"


def test_every_architecture_is_a_type_that_runs() -> None:
    assert set(gguf_models.ARCHITECTURES.values()) == set(ARCHITECTURES)
    assert {case.model_type for case in CASES} == set(gguf_models.ARCHITECTURES) <= set(model_types())
    assert len(CASES) == len(_SAME) + len(_CHANGED) and not set(planned_types()) & set(gguf_models.ARCHITECTURES)


@pytest.mark.parametrize("variant", CASES, ids=lambda variant: variant.name)
def test_a_converted_model_says_what_transformers_says(variant: Variant, tmp_path: Path) -> None:
    save(variant, tmp_path / "hf")
    gguf_models.convert(tmp_path / "hf", tmp_path / "model.gguf")
    of_folder, of_file = pack(tmp_path / "hf", tmp_path / "a"), pack(tmp_path / "model.gguf", tmp_path / "b")
    if variant.model_type.startswith("gemma"):  # 1 was added to its norms, and rounded
        assert open_packed(of_folder).parts == open_packed(of_file).parts
    else:
        assert open_packed(of_folder).sums == open_packed(of_file).sums
    oracle = Oracle(tmp_path / "hf")
    with load(of_file, context=CONTEXT, score=True, kv="float32") as engine:
        for length in variant.prompts:
            ids = prompt(variant, length)
            found, expected = engine.logits(ids), oracle.logits(ids)
            if not engine.packed.spec.is_routed:  # near ties of experts: `test_exact` has them
                np.testing.assert_allclose(found, expected, atol=1e-3)
        ids = prompt(variant, 17)
        tokens, wanted = engine.generate_ids(ids, GREEDY), oracle.greedy(ids, 24)
        clear = next((i for i, (_, margin) in enumerate(wanted) if margin <= 2e-3), 24)
        assert tokens[:clear] == [token for token, _ in wanted[:clear]]


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """As Mixtral's first files have them: the bytes of a file that stacks them."""
    save(by_name("mixtral"), tmp_path / "hf")
    stacked = gguf_models.convert(tmp_path / "hf", tmp_path / "stacked.gguf")
    metadata = {k: v for k, v in open_gguf(tmp_path / "stacked.gguf").metadata.items() if k.startswith("llama.")}
    apart: dict[str, Any] = {}
    for name, tensor in stacked.items():
        if "_exps." in name:
            for i, matrix in enumerate(tensor):
                apart[name.replace("_exps", f".{i}")] = matrix
        else:
            apart[name] = tensor
    gguf_files.write(tmp_path / "apart.gguf", "llama", metadata, apart)
    packed = [pack(tmp_path / f"{which}.gguf", tmp_path / which) for which in ("stacked", "apart")]
    assert open_packed(packed[0]).sums == open_packed(packed[1]).sums


def same_numbers(file: Path, held: dict[str, Any], folder: Path) -> str:
    """Compares a file with one in float32 of what the package dequantises it to: the same logits and, with exact
    activations, the same tokens. Returns the name of its weights' formats."""
    own = open_gguf(file).metadata
    metadata = {key: value for key, value in own.items() if key.startswith(own["general.architecture"])}
    words = gguf_models.any_tokenizer(4096)
    gguf_files.write(folder / "wide.gguf", own["general.architecture"], {**metadata, **words}, held)
    kept, wide = pack(file, folder / "kept"), pack(folder / "wide.gguf", folder / "wide")
    ids = np.random.default_rng(0).integers(2, 4000, 40).tolist()
    ask, exact = Ask(context=128, score=True, kv="float32"), Loading(machine=MACHINE, exact=True)
    with closing(Engine.load(kept, ask, exact)) as one, closing(Engine.load(wide, ask, exact)) as other:
        found, expected = one.logits(ids), other.logits(ids)
        assert expected.std() > 0.3
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert one.generate_ids(ids, GREEDY) == other.generate_ids(ids, GREEDY)
    return open_packed(kept).weights.name


TRAINED = {Kind.F16: "float16", Kind.BF16: "bfloat16", Kind.Q4_1: "int4-g32"}
TRAINED |= {kind: kind.name.lower() for kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)}
RANDOM = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4]


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.name)
def test_numbers_of_a_trained_model_are_those_of_the_file(kind: Kind, tmp_path: Path) -> None:
    held = gguf_models.convert(TALE, tmp_path / "file.gguf", lambda _: kind)
    assert same_numbers(tmp_path / "file.gguf", held, tmp_path) == TRAINED[kind]


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_numbers_of_experts_are_those_of_the_file(kind: Kind, tmp_path: Path) -> None:
    held = gguf_models.convert(ROOT / "bench/tale-moe", tmp_path / "file.gguf", lambda _: kind)
    assert same_numbers(tmp_path / "file.gguf", held, tmp_path) == TRAINED[kind]


@pytest.mark.parametrize("kind", RANDOM, ids=lambda kind: kind.name)
def test_numbers_of_random_blocks_are_those_of_the_file(kind: Kind, tmp_path: Path) -> None:
    """Formats that the package reads and does not write."""
    held = gguf_models.convert(ROOT / "bench/tale-relu", tmp_path / "file.gguf", lambda _: kind)
    assert same_numbers(tmp_path / "file.gguf", held, tmp_path) == kind.name.lower()


def q4_k_m(name: str) -> Kind:
    """As llama.cpp's quantiser mixes them: more bits for values, and for `down` in half of the layers."""
    more = "embd" in name or "attn_v" in name or ("ffn_down" in name and name.split(".")[1] in "0246")
    return Kind.Q6_K if more else Kind.Q4_K


@pytest.mark.parametrize("file_type, name", [(15, "q4_k_m"), (999, "q4_k+q6_k"), (None, "q4_k+q6_k")])
def test_a_mixture_keeps_all_its_formats(file_type: int | None, name: str, tmp_path: Path) -> None:
    metadata = {} if file_type is None else {"general.file_type": file_type}
    held = gguf_models.convert(ROOT / "bench/tale-relu", tmp_path / "file.gguf", q4_k_m, metadata)
    assert same_numbers(tmp_path / "file.gguf", held, tmp_path) == name
    formats = {
        f"{key}.{block.name}": block.format.name
        for key, part in open_packed(tmp_path / "kept").parts.items() for block in part.blocks if block.tiled
    }  # fmt: skip
    assert formats["embed.rows"] == formats["0.attn.v"] == formats["0.ffn.down"] == "q6_k"
    assert formats["0.attn.q"] == formats["1.ffn.down"] == formats["0.ffn.up"] == "q4_k"


# What is left so in the second layer of a quantised file.
LEFT = {"attn_v": Kind.F16, "ffn_gate": Kind.BF16, "attn_output": Kind.F16}


@pytest.mark.filterwarnings("ignore:.*held in float32")
@pytest.mark.parametrize("kind", [*TRAINED, *RANDOM], ids=lambda kind: kind.name)
def test_what_is_beside_floats_of_one_input_is_widened(kind: Kind, tmp_path: Path) -> None:
    """Some files keep a few matrices of a layer in 16 bits. The numbers of the others stay those of the file."""

    def choose(name: str) -> Kind:
        return next((left for part, left in LEFT.items() if f"1.{part}" in name), kind)

    held = gguf_models.convert(ROOT / "bench/tale-relu", tmp_path / "file.gguf", choose)
    same_numbers(tmp_path / "file.gguf", held, tmp_path)
    kept = open_packed(tmp_path / "kept").parts
    plain = {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    formats = {f"{key}.{b.name}": b.format.name for key, part in kept.items() for b in part.blocks if b.tiled}
    assert formats["1.attn.q"] == formats["1.attn.k"] == formats["1.ffn.up"] == plain
    assert formats["1.attn.v"] == formats["1.attn.o"] == "float16" and formats["1.ffn.gate"] == "bfloat16"
    assert formats["1.ffn.down"] == formats["0.attn.q"] == formats["0.ffn.up"]


HEADS = {"hidden_size": 256, "head_dim": 72, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 4096}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q6_K, Kind.MXFP4], ids=lambda kind: kind.name)
def test_heads_that_end_within_a_group_have_an_output_in_float32(kind: Kind, tmp_path: Path) -> None:
    """A granule has 72 columns of it. The numbers are those of the file."""
    save(Variant("llama-odd-heads", "llama", by_name("llama-gqa").keys | HEADS), tmp_path / "hf")
    held = gguf_models.convert(
        tmp_path / "hf", tmp_path / "file.gguf", lambda name: Kind.F16 if "ffn_down" in name else kind
    )
    with catch_warnings(record=True) as told:
        simplefilter("always")
        same_numbers(tmp_path / "file.gguf", held, tmp_path)
    formats = {b.name: b.format.name for b in open_packed(tmp_path / "kept").parts["1.attn"].blocks}
    if kind == Kind.F16:
        assert not told and formats["o"] == "float16"
        return
    assert formats["o"] == "float32" and formats["q"] == TRAINED.get(kind, kind.name.lower())
    assert "2 quantised matrices" in str(told[0].message) and "heads end within a group" in str(told[0].message)


def test_what_is_widened_is_told(tmp_path: Path) -> None:
    gguf_models.convert(TALE, tmp_path / "a.gguf", lambda name: Kind.F16 if "1.attn_v" in name else Kind.Q4_0)
    with pytest.warns(UserWarning, match=r"2 quantised matrices \(.*KiB\) are held in float32.*'blk.1.attn_k.weight'"):
        pack(tmp_path / "a.gguf", tmp_path / "packed")


def test_a_format_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    gguf_models.convert(ROOT / "bench/tale-relu", tmp_path / "a.gguf", lambda _: Kind.TQ1_0)
    with pytest.raises(UnsupportedModel, match="holds TQ1_0; penstock reads F32, F16, BF16, Q4_1, Q4_0, "):
        pack(tmp_path / "a.gguf", tmp_path / "packed")


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path) -> None:
    from penstock.spec.format import parse_format

    gguf_models.convert(TALE, tmp_path / "a.gguf", lambda _: Kind.Q4_1)
    with pytest.raises(UnsupportedModel, match=r"is quantised \(int4-g32\), and penstock keeps its numbers"):
        pack(tmp_path / "a.gguf", tmp_path / "packed", parse_format("int8"))
    gguf_models.convert(TALE, tmp_path / "b.gguf", lambda _: Kind.F16)
    assert open_packed(pack(tmp_path / "b.gguf", tmp_path / "packed", parse_format("int4"))).weights.name == "int4"


def tale(folder: Path, kind: Kind = Kind.F16, **more: Any) -> Path:
    file = folder / "tale.gguf"
    gguf_models.convert(TALE, file, lambda _: kind, gguf_models.tokenizer_metadata(TALE, "gpt-2"), **more)
    return file


def test_commands_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, cache = tale(tmp_path), machine_cache(tmp_path / "cache")
    flags = ("--cache", cache, "--json", "--threads", 1)
    run = ("run", file, "Once upon a time", *flags, "--max-tokens", 16, "--temperature", 0, "--kv", "float32")
    first, again = here(capsys, *run), here(capsys, *run)
    assert first.code == 0 and f"writes {format_mib(file)}" in first.err, first
    assert again.code == 0 and "writes" not in again.err and again.report["text"] == first.report["text"]
    (copy,) = (cache / MODELS).iterdir()
    assert copy.name.startswith("tale-") and copy.name.endswith("-float16")
    of_folder = here(capsys, "run", TALE, *run[2:], "--weights", "float16")
    assert of_folder.code == 0 and of_folder.report["token_ids"] == first.report["token_ids"]
    planned = here(capsys, "plan", file, *flags)
    assert planned.code == 0 and planned.report["predicted"]["decode_tokens_per_s"] > 0
    packed = here(capsys, "pack", file, tmp_path / "packed", "--verify", "--json")
    assert packed.code == 0 and packed.report["weights"] == "float16"
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a captain, and he had a ship. " * 12)
    scored = here(capsys, "eval", file, text, *flags)
    assert scored.code == 0 and scored.report["perplexity"] < 500


def format_mib(file: Path) -> str:
    """How much packing a file of some MiB writes, in its first digits."""
    return f"{file.stat().st_size / 2**20:.0f}."[:2]


def test_a_file_that_changed_is_packed_again(tmp_path: Path) -> None:
    file = tale(tmp_path)
    first = resolve(str(file), weights=None, cache=tmp_path / "cache")
    first.close()
    shutil.copy(file, tmp_path / "copy.gguf")
    moved = resolve(str(tmp_path / "copy.gguf"), weights=None, cache=tmp_path / "cache")
    moved.close()
    assert moved.folder == first.folder  # by the checksums of what packing it would write
    content = bytearray(file.read_bytes())
    content[-3000] ^= 1
    file.write_bytes(content)
    changed = resolve(str(file), weights=None, cache=tmp_path / "cache")
    changed.close()
    assert changed.folder != first.folder


def test_split_files_are_packed_as_one(tmp_path: Path) -> None:
    whole, folder = tale(tmp_path), tmp_path / "split"
    folder.mkdir()
    gguf_models.convert(
        TALE, folder / "tale.gguf", lambda _: Kind.F16, gguf_models.tokenizer_metadata(TALE, "gpt-2"),
        split_max_tensors=20,
    )  # fmt: skip
    files = sorted(folder.iterdir())
    assert len(files) > 2
    sums = [open_packed(pack(file, tmp_path / f"packed{i}")).sums for i, file in enumerate([whole, files[1]])]
    assert sums[0] == sums[1]
    source = resolve(str(files[-1]), weights=None, cache=tmp_path / "cache")
    source.close()
    assert source.folder.name.startswith("tale-")
    files[1].unlink()
    with pytest.raises(BadRequest, match="is missing beside it"):
        resolve(str(files[0]), weights=None, cache=tmp_path / "cache")
