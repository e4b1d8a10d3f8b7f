"""Neurons in another order than the checkpoint's: `penstock pack --profile`, of checkpoints and of packed models."""

from __future__ import annotations

import json
from base64 import b64encode
from contextlib import closing
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, DamagedModel
from penstock.serve import profiling
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.format import Format, parse_format
from penstock.spec.model import FfnSpec
from penstock.spec.order import NeuronOrder, hot_to_cold, moved_together
from penstock.spec.parts import Part
from penstock.spec.profile import FiringCounts, Profile, dumps
from penstock.store import writer
from penstock.store.pack import pack
from penstock.store.packed import Packed, open_packed
from penstock.store.profile_file import FILE, kept
from penstock.store.quantize import decode, decode_rows
from penstock.store.reorder import move_neurons, reorder
from penstock.store.verify import verify
from tests.cpu import sealed
from tests.cpu.checkpoints import save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, Call, Outcome, here, refused
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import GREEDY, load
from tests.cpu.native_neurons import FORMATS, ffn_part, granules

KINDS = [*FORMATS, *(f"{name}-neurons" for name in FORMATS), "int4-g24", "int8-g128"]
IDS = [int(i) for i in np.random.default_rng(1).integers(0, 90, 100)]


def profile_of(neurons: int, layers: int, seed: int = 0, tokens: int = 50) -> Profile:
    """A profile that counted any numbers."""
    rng = np.random.default_rng(seed)
    counted = []
    for layer in range(layers):
        counts = rng.integers(0, tokens + 1, neurons).astype("<u4")
        counted.append(FiringCounts(layer, neurons, b64encode(counts.tobytes()).decode(), (0.1,) * 6))
    return Profile("text", "0" * 64, tokens, (), tuple(counted))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.sampled_from([1, 8, 32, 64]), st.randoms())
def test_hot_comes_before_cold(counts: list[int], together: int, random: Any) -> None:
    before = list(range(len(counts)))
    random.shuffle(before)
    order = list(hot_to_cold(counts, before, together))
    assert sorted(order) == list(range(len(counts)))
    whole = len(counts) // together * together
    assert order[whole:] == before[whole:]
    runs = [tuple(order[lo : lo + together]) for lo in range(0, whole, together)]
    places = {tuple(before[lo : lo + together]): lo for lo in range(0, whole, together)}
    for one, other in pairwise(runs):
        hot, cold = (sum(counts[n] for n in run) for run in (one, other))
        assert hot > cold or (hot == cold and places[one] < places[other])


@given(st.permutations(list(range(40))))
def test_an_order_is_read_as_it_was_written(order: list[int]) -> None:
    assert list(NeuronOrder.of(3, order).numbers(40)) == order


@pytest.mark.parametrize(
    "order", ["", "!", "AAA", b64encode(bytes(8)).decode(), b64encode(np.array([0, 2], "<u4").tobytes()).decode()]
)
def test_what_is_no_permutation_is_refused(order: str) -> None:
    with pytest.raises(BadRequest, match="layer 1 is no permutation of 2"):
        NeuronOrder(1, order).numbers(2)


def numbers_of(part: Part, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Each block of an FFN as decoded numbers, neuron by neuron: [neurons, …]."""
    found = {}
    for block in part.blocks:
        rows = []
        for granule in weights:
            data = granule[block.offset : block.offset + block.nbytes]
            if block.stride:
                rows.append(decode_rows(granule, block))
            else:
                matrix = decode(data, block.rows, block.cols, block.format, block.tiled)
                rows.append(matrix.T if block.name == "down" or not block.tiled else matrix)
        found[block.name] = np.concatenate(rows)[: part.rows]
    return found


@given(st.data(), st.integers(0, 2**32 - 1))
def test_neurons_move_whole(data: st.DataObject, seed: int) -> None:
    """Against numpy: any format, biases, a gate, a last granule with few neurons; all numbers as they were."""
    rng = np.random.default_rng(seed)
    name, neurons = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 400))
    d = data.draw(st.sampled_from([1, 31, 64, 97]))
    part, _ = ffn_part(neurons, d, data.draw(st.booleans()), data.draw(st.booleans()), name)
    weights, together = granules(part, rng, 0.5), moved_together(parse_format(name))
    order = np.array(hot_to_cold(rng.integers(0, 9, neurons).tolist(), None, together))
    out, cut = np.zeros_like(weights), data.draw(st.integers(0, part.granules))
    for lo, hi in ((0, cut), (cut, part.granules)):
        if lo < hi:
            moved = order[lo * 64 : hi * 64]
            move_neurons(part, weights, moved, out[lo:hi], together)
    before, after = numbers_of(part, weights), numbers_of(part, out)
    for block in part.blocks:
        np.testing.assert_array_equal(after[block.name], before[block.name][order])
    back = np.zeros_like(weights)
    move_neurons(part, out, np.argsort(order), back, together)
    np.testing.assert_array_equal(back, weights)


def test_neurons_that_share_a_group_move_together() -> None:
    together = {name: moved_together(parse_format(name)) for name in ("int4", "int4-g32", "int8-g24", "int8-g128")}
    assert together == {"int4": 64, "int4-g32": 32, "int8-g24": 64, "int8-g128": 64}
    assert moved_together(parse_format("int4-neurons")) == moved_together(Format("bfloat16")) == 1


# -- whole models -------------------------------------------------------------------------------------


def checkpoint(folder: Path, name: str) -> Path:
    config = json.loads(TINY_CONFIGS[name]) | ({"hidden_act": "relu"} if name == "llama" else {})
    save_checkpoint(folder, config)
    save_tokenizer(folder, config)
    return folder


def counted(folder: Path, exact: bool = False) -> Profile:
    ask = Ask(context=64, prompt_tokens=64)
    with closing(Engine.load(folder, ask, Loading(machine=MACHINE, exact=exact))) as engine:
        return profiling.profile_ids(engine, IDS, "text", "0" * 64)


def logits(folder: Path, sparsity: str) -> np.ndarray:
    """With exact activations: where they are rounded to integers, a last bit may become a step."""
    ask = Ask(context=64, score=True, kv="float32", sparsity=sparsity)
    with closing(Engine.load(folder, ask, Loading(machine=MACHINE, exact=True))) as engine:
        return np.array(engine.logits(IDS[:40]))


@pytest.mark.parametrize("name", ["opt", "llama", "falcon"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int4-neurons", "float16-neurons"])
def test_a_model_hot_to_cold_says_the_same(tmp_path: Path, name: str, weights: str) -> None:
    """From the checkpoint, and from the packed model: the same bytes. The same logits but for the order of sums, exact
    as off to the bit, and the same counts of who fires.

    Of neurons in int4 with exact activations: else the values of a granule's neurons are rounded to int8 by the largest
    of them, so it matters which neurons share a granule, and later layers may count a few other tokens."""
    rounded = weights == "int4-neurons"
    source = checkpoint(tmp_path / "hf", name)
    plain = pack(source, tmp_path / "plain", parse_format(weights))
    seen = counted(plain, exact=rounded)
    ordered = pack(source, tmp_path / "ordered", parse_format(weights), profile=seen)
    moved = reorder(plain, tmp_path / "moved", seen)
    verify(ordered)
    opened = open_packed(ordered)
    assert (opened.sums, opened.orders) == (open_packed(moved).sums, open_packed(moved).orders)
    for layer, order in opened.orders.items():
        counts = seen.neurons[layer].counted()
        assert [counts[n] for n in order] == sorted(counts, reverse=True)
    assert kept(ordered, opened.spec) == kept(moved, opened.spec) == seen
    before, off, exact = logits(plain, "off"), logits(ordered, "off"), logits(ordered, "exact")
    np.testing.assert_array_equal(off, exact)
    assert np.abs(off - before).max() <= 1e-4 * max(1.0, float(np.abs(before).max()))
    again = counted(ordered, exact=rounded)
    assert [layer.counts for layer in again.neurons] == [layer.counts for layer in seen.neurons]


@pytest.mark.parametrize("weights", ["int4", "int4-g32", "int8-g24"])
def test_numbers_of_packed_tiles_stay(tmp_path: Path, weights: str) -> None:
    """Their groups run along the neurons, so only whole groups move. A second time nothing moves."""
    source = checkpoint(tmp_path / "hf", "opt")
    plain = pack(source, tmp_path / "plain", parse_format(weights))
    seen = counted(plain)
    moved = reorder(plain, tmp_path / "moved", seen)
    part = open_packed(plain).parts["0.ffn"]
    before, after = (numbers_of(part, weights_of(open_packed(folder), part)) for folder in (plain, moved))
    order = np.array(open_packed(moved).orders[0])
    for block in part.blocks:
        np.testing.assert_array_equal(after[block.name], before[block.name][order])
    again = reorder(moved, tmp_path / "again", seen)
    assert open_packed(again).sums == open_packed(moved).sums
    assert [layer.counts for layer in counted(moved).neurons] == [layer.counts for layer in seen.neurons]
    said, unmoved = logits(moved, "exact"), logits(plain, "off")
    assert np.abs(said - unmoved).max() <= 1e-4 * max(1.0, float(np.abs(unmoved).max()))


def weights_of(packed: Packed, part: Part) -> np.ndarray:
    file, offset, nbytes = packed.locate(part.key, 0, part.granules)
    with file.open("rb") as stream:
        stream.seek(offset)
        return np.frombuffer(stream.read(nbytes), np.uint8).reshape(part.granules, part.granule_bytes)


def test_an_interrupted_packing_goes_on_by_the_same_profile_only(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", "opt")
    plain = pack(source, tmp_path / "plain", parse_format("float32-neurons"))
    part = open_packed(plain).parts["0.ffn"]
    layers = len(open_packed(plain).spec.layers)

    def stop(done: int, total: int, key: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    for seed, begun in ((0, False), (1, True)):
        with pytest.raises(KeyboardInterrupt):
            reorder(plain, tmp_path / "moved", profile_of(part.rows, layers, seed), None, stop, shard_bytes=1 << 15)
        assert (tmp_path / "moved.partial").is_dir() or begun
    moved = reorder(plain, tmp_path / "moved", profile_of(part.rows, layers, 1), shard_bytes=1 << 15)
    verify(moved)
    whole = reorder(plain, tmp_path / "whole", profile_of(part.rows, layers, 1))
    assert open_packed(moved).sums == open_packed(whole).sums


@pytest.mark.parametrize("by", ["pack", "reorder"])
def test_weights_are_never_there_without_their_profile(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is cut off at any file that it writes: either the whole model is there, or none."""
    source = checkpoint(tmp_path / "hf", "opt")
    plain = pack(source, tmp_path / "plain", parse_format("float32-neurons"))
    packed = open_packed(plain)
    seen = profile_of(packed.parts["0.ffn"].rows, len(packed.spec.layers))
    target, write = tmp_path / "moved", writer.write_bytes

    def once() -> None:
        if by == "pack":
            pack(source, target, parse_format("float32-neurons"), profile=seen)
        else:
            reorder(plain, target, seen)

    for stop in count(1):
        written = 0

        def cut_off(file: Path, content: bytes, stop: int = stop) -> None:
            nonlocal written
            written += 1
            if written == stop:
                raise KeyboardInterrupt
            write(file, content)

        monkeypatch.setattr(writer, "write_bytes", cut_off)
        try:
            once()
        except KeyboardInterrupt:
            assert not target.exists()
            continue
        break
    assert stop > 4 and kept(target, packed.spec) == seen
    verify(target)


def test_hostile_orders_are_refused_in_a_line(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", "opt")
    plain = pack(source, tmp_path / "plain", parse_format("float32-neurons"))
    spec = open_packed(plain).spec
    neurons = [layer.ffn.neurons for layer in spec.layers if isinstance(layer.ffn, FfnSpec)]
    folder = reorder(plain, tmp_path / "moved", profile_of(neurons[0], len(neurons)))
    good = json.loads((folder / "penstock.json").read_text())["orders"]
    twice = {"layer": 0, "order": b64encode(bytes(4 * neurons[0])).decode()}
    for orders, says in [
        (good[:-1], "not those of this model's layers"),
        ([*good, good[0]], "not those of this model's layers"),
        ([{**good[0], "layer": 2**70}, *good[1:]], "not those of this model's layers"),
        ([twice, *good[1:]], f"layer 0 is no permutation of {neurons[0]}"),
        ([{**good[0], "order": good[0]["order"][:-8]}, *good[1:]], "is no permutation"),
        ([{**good[0], "order": 7}, *good[1:]], "should be str"),
        (good[0], "should be a list"),
    ]:
        sealed.edit(folder, "penstock.json", lambda content, orders=orders: content.update(orders=orders))
        with pytest.raises(BrokenModel, match=says):
            open_packed(folder)
    sealed.edit(folder, "penstock.json", lambda content: content.update(orders=good))
    open_packed(folder)


def test_what_cannot_be_reordered_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "hf", "opt")
    plain = pack(source, tmp_path / "plain", parse_format("float32"))
    spec = open_packed(plain).spec
    other = profile_of(7, len(spec.layers))
    with pytest.raises(BadRequest, match="its neurons differ"):
        reorder(plain, tmp_path / "moved", other)
    with pytest.raises(BadRequest, match="its neurons differ"):
        pack(source, tmp_path / "ordered", profile=other)
    neurons = next(layer.ffn.neurons for layer in spec.layers if isinstance(layer.ffn, FfnSpec))
    seen = profile_of(neurons, len(spec.layers))
    with pytest.raises(BadRequest, match="float32 weights, which stay"):
        reorder(plain, tmp_path / "moved", seen, parse_format("int4"))
    silu = tmp_path / "silu"
    config = json.loads(TINY_CONFIGS["llama"])
    save_checkpoint(silu, config)
    with pytest.raises(BadRequest, match="neurons differ"):
        pack(silu, tmp_path / "ordered", profile=seen)
    with pytest.raises(BadRequest, match="counted no neurons"):
        pack(silu, tmp_path / "ordered", profile=replace(seen, neurons=()))
    with sealed.damaged(open_packed(plain), "1.ffn", 1, 5, 1), pytest.raises(DamagedModel, match="granule 1"):
        reorder(plain, tmp_path / "moved", seen)
    assert not (tmp_path / "moved").exists() and not (tmp_path / "ordered").exists()


def test_the_command(call: Call, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def packs(*args: object) -> Outcome:
        return here(capsys, "pack", *args, "--json")

    source = checkpoint(tmp_path / "hf", "opt")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a text. " * 10)
    assert packs(source, tmp_path / "plain", "--weights", "int4-neurons").code == 0
    assert call("profile", tmp_path / "plain", text).code == 0
    by = tmp_path / "plain" / FILE
    report = packs(source, tmp_path / "ordered", "--weights", "int4-neurons", "--profile", by).report
    assert report["ordered"]
    done = packs(tmp_path / "plain", tmp_path / "moved", "--profile", by, "--verify")
    assert done.report["ordered"] and done.report["verified"]
    said = [call("run", tmp_path / each, "abc", "--max-tokens", "5").report["text"] for each in ("plain", "moved")]
    assert said[0] == said[1]
    refused(packs(tmp_path / "plain", "--verify", "--profile", by), "--profile is for packing")
    refused(packs(tmp_path / "plain", tmp_path / "again", "--profile", text), "is not JSON")
    (tmp_path / "cut.json").write_text(dumps(profile_of(3, 1)))
    refused(packs(tmp_path / "moved", tmp_path / "again", "--profile", tmp_path / "cut.json"), "neurons differ")
    with load(tmp_path / "moved", context=64) as engine:
        assert engine.generate([[1, 2, 3]], GREEDY)
