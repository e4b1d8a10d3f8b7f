"""Reading safetensors: what is right is read to the bit, what is wrong gets one line that says where."""

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, PenstockError, UnsupportedModel
from penstock.store import checkpoint as checkpoint_module
from penstock.store.checkpoint import Checkpoint
from penstock.store.header import DTYPE_BITS, TensorInfo, parse_header, read_header
from penstock.store.index import INDEX
from tests.cpu.checkpoints import Array, save_tensors

RNG = np.random.default_rng(0)
TENSORS: dict[str, Array] = {
    "model.a": RNG.standard_normal((7, 5)).astype(np.float32),
    "b": RNG.standard_normal((4, 6)).astype(np.float16),
    "vector": RNG.standard_normal(9).astype(np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "codes": np.zeros((2, 2), np.int8),
}


TALL = RNG.standard_normal((400, 256)).astype(np.float32)  # rows of 1 KB


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tall")
    save_tensors(folder / "model.safetensors", {"tall": TALL})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tensors(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_raw(folder: Path, header: bytes, data: bytes = bytes(8), length: int | None = None) -> None:
    prefix = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(prefix + header + data)


def test_reads_slices_of_both_axes_to_the_bit(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        for name in ("model.a", "b"):
            tensor = TENSORS[name]
            assert np.array_equal(checkpoint.read(name, 0, 1, 3), tensor[1:3])
            assert np.array_equal(checkpoint.read(name, 1, 2, 5), tensor[:, 2:5])
            assert checkpoint.read(name, 0, 2, 2).shape == (0, *tensor.shape[1:])
        assert np.array_equal(checkpoint.read("vector", 0, 3, 9), TENSORS["vector"][3:])
        assert checkpoint.read("empty", 0, 0, 0).shape == (0, 4)


@settings(max_examples=60)
@given(numbers=st.lists(st.integers(0, 399), min_size=1, max_size=60))
def test_takes_rows_in_any_order(numbers: list[int], tall: Path) -> None:
    with Checkpoint.open(tall) as checkpoint:
        got = checkpoint.take("tall", 0, np.array(numbers, np.int64))
    np.testing.assert_array_equal(got, TALL[numbers])


def test_rows_that_lie_near_are_read_at_once(tall: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1 KB: holes of 64 rows cost less than a request, larger ones do not."""
    spans: list[int] = []
    read = Checkpoint._rows

    def rows(self: Checkpoint, tensor: TensorInfo, start: int, stop: int) -> Array:
        spans.append(stop - start)
        return read(self, tensor, start, stop)

    monkeypatch.setattr(Checkpoint, "_rows", rows)
    with Checkpoint.open(tall) as checkpoint:
        checkpoint.take("tall", 0, np.arange(0, 128, 2))
        assert spans == [127]
        spans.clear()
        checkpoint.take("tall", 0, np.array([399, 2, 0, 100, 101]))
    assert spans == [3, 2, 1]


def test_two_reads_meet_a_file_system_that_refuses_direct_ones(tall: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin while reads bypass the cache. Whichever ends the bypass, both are tried again."""
    begun, real = threading.Barrier(2), checkpoint_module._native.read_into

    def read_into(fd: int, *rest: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            begun.wait(600)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *rest)

    with Checkpoint.open(tall) as checkpoint, ThreadPoolExecutor(2) as threads:
        fd = checkpoint._fd(tall / "model.safetensors")
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            pytest.skip("this file system has no direct reads")
        monkeypatch.setattr(checkpoint_module._native, "read_into", read_into)
        for got in threads.map(lambda lo: (lo, checkpoint.read("tall", 0, lo, 400)), (0, 7)):
            np.testing.assert_array_equal(got[1], TALL[got[0] :])


def test_finds_names_with_and_without_the_leading_model(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.find("a").name == checkpoint.find("model.a").name == "model.a"
        assert checkpoint.find("model.b").name == "b"
        with pytest.raises(BrokenModel, match=r"lacks the tensor 'model\.c'"):
            checkpoint.find("model.c")


def test_integers_are_no_weights(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(UnsupportedModel, match="'codes' holds I8"):
        checkpoint.read("codes", 0, 0, 1)


def test_a_slice_beyond_the_tensor_is_refused(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        for axis, start, stop in ((0, 0, 8), (1, 3, 6), (0, -1, 2), (2, 0, 1)):
            with pytest.raises(BrokenModel, match=r"'model\.a'"):
                checkpoint.read("model.a", axis, start, stop)


def test_a_file_cut_while_it_is_open(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-150])
        with pytest.raises(BrokenModel, match=r"truncated: tensor 'vector'"):
            checkpoint.read("vector", 0, 0, 9)


def test_sharded_and_single_files_of_any_name(tmp_path: Path) -> None:
    halves = dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])
    for i, half in enumerate(halves):
        save_tensors(tmp_path / f"part-{i}.safetensors", half)
    with pytest.raises(BrokenModel, match=r"holds 2 \*\.safetensors but no model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)
    weight_map = {name: f"part-{i}.safetensors" for i, half in enumerate(halves) for name in half}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read("vector", 0, 0, 9), TENSORS["vector"])
        assert np.array_equal(checkpoint.read("b", 1, 0, 6), TENSORS["b"])
    (tmp_path / INDEX).unlink()
    (tmp_path / "part-1.safetensors").unlink()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(halves[0])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "names 'gone.safetensors', which is missing"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "no plain file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no plain file name"),
        ('{"weight_map": {"a": "x.safetensors"}}', "lacks the tensor 'a' that"),
        ('{"weight_map": {"a": 1}}', "weight_map should map"),
        ('{"weight_map": []}', "weight_map should map"),
        ("{}", "weight_map should map"),
        ("[]", "should hold a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: it nests too deep"),
        ("\ud800", "is not UTF-8"),
    ],
)
def test_bad_index(tmp_path: Path, index: str, message: str) -> None:
    save_tensors(tmp_path / "x.safetensors", {"b": TENSORS["b"]})
    (tmp_path / INDEX).write_bytes(index.encode("utf-8", "surrogatepass"))
    with pytest.raises(BrokenModel, match=message):
        Checkpoint.open(tmp_path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="is no folder"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(BadRequest, match=r"holds no \*\.safetensors$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadRequest, match="pickled weights are not read"):
        Checkpoint.open(tmp_path)


def two(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    return json.dumps({"a": first, "b": second}).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "no object"),
        (b"{" * 200_000, "is not JSON"),
        (b'{"a":' * 100_000, "nests too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"a": {}, "a": {}}', "names 'a' twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "names 'dtype' twice"),
        (b'{"a": 7}', "should have dtype, shape"),
        (b'{"a": {}}', "should have dtype, shape"),
        (b'{"__metadata__": {"x": 1}}', "__metadata__"),
        (two(entry("F32"), entry(7)), "'b' has a dtype that is no string"),
        (two(entry("F32"), entry(shape=[-2])), "'b' has an impossible shape"),
        (two(entry("F32"), entry(shape=[2.0])), "'b' has an impossible shape"),
        (two(entry("F32"), entry(shape=[True, True])), "'b' has an impossible shape"),
        (two(entry("F32"), entry(shape=[2**62, 2**62])), "'b' has an impossible shape"),
        (two(entry("F32"), entry(shape=[1] * 100)), "'b' has an impossible shape"),
        (two(entry("F32"), entry(offsets=[8, 0])), "'b' has impossible data_offsets"),
        (two(entry("F32"), entry(offsets=[0])), "'b' has impossible data_offsets"),
        (two(entry("F32"), entry(offsets=[-8, 0])), "'b' has impossible data_offsets"),
        (two(entry("F32"), entry(offsets=[0, 4])), r"'b': F32 \[2\] takes 8 bytes, its offsets span 4"),
        (two(entry("F32"), entry(offsets=[8, 16])), r"'b' ends at byte \d+, the file has \d+: it is truncated"),
        (two(entry("F32"), entry(offsets=[2**61, 2**61 + 8])), "it is truncated"),
        (two(entry("F32"), entry()), "tensors 'a' and 'b' overlap"),
        (two(entry(), entry(shape=[1], offsets=[4, 8])), "tensors 'a' and 'b' overlap"),
        (json.dumps({"x\ny" * 100: {}}).encode(), r"'x\\ny"),
    ],
)
def test_bad_header(tmp_path: Path, header: bytes, message: str) -> None:
    write_raw(tmp_path, header)
    with pytest.raises(BrokenModel, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in caught.value.message
    assert "\n" not in caught.value.message and len(caught.value.message) < 500


def test_unknown_element_type(tmp_path: Path) -> None:
    write_raw(tmp_path, two(entry("F32"), entry("F7")))
    with pytest.raises(UnsupportedModel, match="'b' has the unknown element type 'F7'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("length", "message"),
    [(2**60, "claims a header of"), (2**64 - 1, "claims a header of"), (50_000, "is truncated: its header")],
)
def test_absurd_header_length(tmp_path: Path, length: int, message: str) -> None:
    write_raw(tmp_path, b"{}", length=length)
    with pytest.raises(BrokenModel, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_short_file(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(BrokenModel):
        Checkpoint.open(folder)


def test_truncated_data(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BrokenModel, match=r"'codes' ends at byte .* it is truncated"):
        Checkpoint.open(folder)


def test_trailing_spaces_holes_and_metadata_are_fine(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(shape=[1], offsets=[4, 8])}
    write_raw(tmp_path, json.dumps(header).encode() + b"   ")
    assert read_header(tmp_path / "model.safetensors").metadata == {"format": "pt"}


def only_our_errors(act: Callable[[], object]) -> None:
    try:
        act()
    except PenstockError as error:
        assert isinstance(error, BrokenModel | UnsupportedModel)
        assert "\n" not in error.message


@pytest.mark.fuzz
@given(st.binary(max_size=200), st.integers(0, 1000))
def test_fuzz_arbitrary_bytes(text: bytes, file_bytes: int) -> None:
    only_our_errors(lambda: parse_header(text, Path("f"), file_bytes))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "X"]) | JSON_VALUES,
        "shape": st.lists(st.integers(0, 9), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@pytest.mark.fuzz
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRIES | JSON_VALUES, max_size=4))
def test_fuzz_json_headers(header: dict[str, Any]) -> None:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    only_our_errors(lambda: parse_header(text, Path("f"), 100 + len(text)))


@pytest.mark.fuzz
@given(st.data())
def test_fuzz_mutated_headers(data: st.DataObject) -> None:
    valid = bytearray(two(entry(), entry(offsets=[8, 16])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(valid) - 1))
        replacement = data.draw(st.binary(max_size=3))
        valid[at : at + data.draw(st.integers(0, 3))] = replacement
    only_our_errors(lambda: parse_header(bytes(valid), Path("f"), 16 + 8 + len(valid)))
