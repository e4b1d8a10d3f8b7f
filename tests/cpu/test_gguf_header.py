"""Headers of GGUF files: equal to what the package `gguf` reads, and one line for each that is bad."""

from __future__ import annotations

import struct
import time
import tracemalloc
from array import array as Numbers
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, PenstockError, UnsupportedModel
from penstock.store.gguf.blocks import BLOCK_FORMATS, IN_TURNS
from penstock.store.gguf.files import name_of, open_gguf
from penstock.store.gguf.header import Strings, is_gguf, read_gguf_header
from tests.cpu import gguf_files
from tests.cpu.gguf_files import SEEN, array, entry, header, padded, save, string, tensor

gguf = pytest.importorskip("gguf", reason="the package gguf, which reads and writes GGUF, is not installed")

U64 = 2**64 - 1


def plain(value: Any) -> Any:
    if isinstance(value, Strings):
        return value.texts()
    return value.tolist() if isinstance(value, Numbers) else value


def same_as_the_package(file: Path) -> None:
    reader, found = gguf.GGUFReader(file), read_gguf_header(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert {name: plain(value) for name, value in found.metadata.items()} == fields
    assert list(found.tensors) == [each.name for each in reader.tensors]
    for each in reader.tensors:
        mine = found.tensors[each.name]
        assert mine.shape == tuple(reversed(each.shape.tolist()))
        assert (mine.dtype, mine.offset, mine.nbytes) == (each.tensor_type.name, each.data_offset, each.n_bytes)


def test_block_formats_are_those_of_the_package() -> None:
    for number, each in BLOCK_FORMATS.items():
        number = 39 if number == IN_TURNS else number
        kind = gguf.GGMLQuantizationType(number)
        assert (each.name, (each.numbers, each.nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_a_written_file_reads_as_the_package_reads_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    metadata = {
        "a.number": 7, "a.flag": True, "a.text": "häh\n", "a.float": 0.5, "a.list": [3, 1, 2], "a.floats": [0.5, 2.5],
        "a.words": ["", "two", "drei ▁"],
    }  # fmt: skip
    tensors = {
        "vector": rng.standard_normal(5).astype(np.float32),
        "halves": rng.standard_normal((3, 7)).astype(np.float16),
        "blocks": (
            gguf.quants.quantize(rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0),
            gguf.GGMLQuantizationType.Q4_0,
        ),
        "experts": rng.standard_normal((2, 3, 4)).astype(np.float32),
    }
    file = gguf_files.write(tmp_path / "a.gguf", "llama", metadata, tensors)
    assert is_gguf(file)
    same_as_the_package(file)


@pytest.mark.parametrize("name", sorted(p.name for p in SEEN.glob("*.gguf")))
def test_real_vocabularies_read_as_the_package_reads_them(name: str) -> None:
    same_as_the_package(SEEN / name)


def test_every_type_of_value(tmp_path: Path) -> None:
    found = read_gguf_header(save(tmp_path / "a.gguf", gguf_files.small()))
    assert found.metadata["number.12"] == 1.0 and found.metadata["number.7"] is True
    assert found.metadata["array.3"].tolist() == [1, 0, 1]
    assert found.metadata["words"].texts() == ["a", "", "häh"]
    words, numbers = found.metadata["nested"]
    assert words.texts() == ["x"] and numbers.tolist() == [7]
    assert found.tensors["b"].shape == (2, 32) and found.tensors["b"].nbytes == 68


FEW = [entry("general.architecture", 8, string("llama"))]


def nested(depth: int) -> bytes:
    return array(9, 1, nested(depth - 1)) if depth else array(0, 1, b"x")


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no GGUF file"),
    "only the magic": (b"GGUF", "no GGUF file"),
    "another kind of file": (b"PK\x03\x04" + bytes(60), "no GGUF file"),
    "version 1": (header(FEW, [], version=1), "has version 1 of GGUF"),
    "version 4": (header(FEW, [], version=4), "has version 4 of GGUF"),
    "big-endian": (header(FEW, [], version=3 << 24), "big-endian"),
    "entries 2^64-1": (header(FEW, [], entries=U64), f"claims {U64} metadata entries"),
    "tensors 2^64-1": (header(FEW, [], tensors=U64), f"claims {U64} tensors"),
    "tensors 2^63": (header(FEW, [], tensors=2**63), "tensors; at most"),
    "more entries than there are": (header(FEW, [], entries=9), "is truncated"),
    "more tensors than there are": (header(FEW, [], tensors=9), "is truncated"),
    "a key of 2^63 bytes": (header([struct.pack("<Q", 2**63) + b"key"], []), "for the key of metadata entry 0"),
    "a key that is no UTF-8": (header([entry(b"\xff\xfe", 4, bytes(4))], []), "which is not UTF-8"),
    "a string of 2^63 bytes": (header([entry("a", 8, struct.pack("<Q", 2**63))], []), "at most"),
    "a string of a MB": (header([entry("a", 8, struct.pack("<Q", 2**20))], []), "claims 1048576 bytes"),
    "an unknown type": (header([entry("a", 13, bytes(8))], []), "unknown type 13"),
    "an array of an unknown type": (header([entry("a", 9, array(99, 1, bytes(8)))], []), "unknown type 99"),
    "2^64-1 numbers": (header([entry("a", 9, array(10, U64, bytes(8)))], []), "is truncated"),
    "2^61 numbers": (header([entry("a", 9, array(10, 2**61, bytes(8)))], []), "is truncated"),
    "2^64-1 strings": (header([entry("a", 9, array(8, U64, bytes(8)))], []), "is truncated"),
    "a string of 2^63 in an array": (
        header([entry("a", 9, array(8, 2, string("x") + struct.pack("<Q", 2**63)))], []), "claims to be too long",
    ),
    "a string that ends behind the file": (
        header([entry("a", 9, array(8, 2, string("x") + struct.pack("<Q", 99)))], []), "is truncated",
    ),
    "2^64-1 arrays": (header([entry("a", 9, array(9, U64, bytes(8)))], []), "is truncated"),
    "arrays nested too deep": (header([entry("a", 9, nested(6))], []), "nested more than 4 deep"),
    "arrays nested a thousand deep": (header([entry("a", 9, nested(900))], []), "nested more than 4 deep"),
    "a key twice": (header([entry("a", 4, bytes(4))] * 2, []), "has the metadata 'a' twice"),
    "alignment 0": (header([entry("general.alignment", 4, bytes(4))], []), "general.alignment 0"),
    "alignment 33": (header([entry("general.alignment", 4, struct.pack("<I", 33))], []), "general.alignment 33"),
    "alignment 2^31": (header([entry("general.alignment", 4, struct.pack("<I", 2**31))], []), "should be a power of 2"),
    "alignment a text": (header([entry("general.alignment", 8, string("32"))], []), "is no number"),
    "a tensor twice": (padded(header(FEW, [tensor("a", [4], 0, 0)] * 2), bytes(64)), "has the tensor 'a' twice"),
    "a name of 2^63 bytes": (header(FEW, [struct.pack("<Q", 2**63)]), "for the name of tensor 0"),
    "no dimensions": (padded(header(FEW, [tensor("a", [], 0, 0)]), bytes(64)), "0 dimensions"),
    "2^32-1 dimensions": (header(FEW, [string("a") + struct.pack("<I", 2**32 - 1)]), "4294967295 dimensions"),
    "a dimension of 0": (padded(header(FEW, [tensor("a", [4, 0], 0, 0)]), bytes(64)), "impossible shape"),
    "a dimension of 2^64-1": (padded(header(FEW, [tensor("a", [U64], 0, 0)]), bytes(64)), "impossible shape"),
    "a product beyond 2^64": (padded(header(FEW, [tensor("a", [2**40] * 4, 0, 0)]), bytes(64)), "is truncated"),
    "half a block": (padded(header(FEW, [tensor("a", [48, 2], 8, 0)]), bytes(256)), "has blocks of 32"),
    "an unknown number format": (padded(header(FEW, [tensor("a", [32], 4, 0)]), bytes(256)), "number format 4"),
    "an offset behind the file": (padded(header(FEW, [tensor("a", [4], 0, 2**63)]), bytes(64)), "is truncated"),
    "an offset between": (padded(header(FEW, [tensor("a", [4], 0, 4)]), bytes(64)), "no multiple of 32"),
    "data cut short": (padded(header(FEW, [tensor("a", [64], 0, 0)]), bytes(255)), "is truncated"),
    "tensors that overlap": (
        padded(header(FEW, [tensor("a", [16], 0, 0), tensor("b", [4], 0, 32)]), bytes(64)), "overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_headers_are_one_line(tmp_path: Path, name: str) -> None:
    content, says = BAD[name]
    file = save(tmp_path / "bad.gguf", content)
    with pytest.raises((BrokenModel, UnsupportedModel)) as raised:
        read_gguf_header(file)
    assert says in raised.value.message and "\n" not in raised.value.message and str(file) in raised.value.message


def test_strings_are_decoded_when_they_are_asked_for(tmp_path: Path) -> None:
    bad = array(8, 2, string("x") + string(b"\xff"))
    found = read_gguf_header(save(tmp_path / "a.gguf", header([entry("words", 9, bad)], [])))
    with pytest.raises(BrokenModel, match="'words', string 1 is not UTF-8"):
        found.metadata["words"].texts()


def test_a_header_takes_no_more_memory_than_its_bytes_claim(tmp_path: Path) -> None:
    """Each claims 2^60 bytes or more, and has 4 MB behind the claim."""
    claims = [
        header([entry("a", 9, array(8, 2**60, string("")))], []),
        header([entry("a", 9, array(0, 2**60, b""))], []),
        header([entry("a", 9, array(9, 2**60, b""))], []),
        header([entry("a", 8, struct.pack("<Q", 2**60))], []),
        header(FEW, [], tensors=2**18),
    ]
    for content in claims:
        file, start_s = save(tmp_path / "a.gguf", content + bytes(4_000_000)), time.process_time()
        tracemalloc.start()
        with pytest.raises(PenstockError):
            read_gguf_header(file)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 40_000_000 and time.process_time() - start_s < 10


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_a_changed_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gguf_files.small())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "long", "cut", "twice"]))
        if kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "long":
            content[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 2**31, 2**63, U64, 2**48])))
        elif kind == "cut":
            del content[max(at, 1) :]
        else:
            content[at:at] = content[at : at + 40]
    file = save(tmp_path / "a.gguf", bytes(content))
    try:
        found = read_gguf_header(file)
        for value in found.metadata.values():
            if isinstance(value, Strings):
                value.texts()
    except PenstockError as error:
        assert "\n" not in error.message
        return
    assert all(each.offset + each.nbytes <= len(content) for each in found.tensors.values())


def split(folder: Path, **says: Any) -> list[Path]:
    """A model in three files. `says`: what the second has instead (`no`, `count`), or all (`tensors`, `name`)."""
    files, count = [], 3
    for i in range(count):
        no, of = (says.get("no", i), says.get("count", count)) if i == 1 else (i, count)
        entries = [entry("split.no", 2, struct.pack("<H", no)), entry("split.count", 2, struct.pack("<H", of))]
        entries += [entry("split.tensors.count", 5, struct.pack("<i", says.get("tensors", count)))]
        entries += [entry("general.architecture", 8, string("llama"))] if i == 0 else []
        name = says.get("name", "t{}").format(i)
        content = padded(header(entries, [tensor(name, [4], 0, 0)]), bytes([i] * 32))
        files.append(save(folder / f"my-model-{i + 1:05}-of-{count:05}.gguf", content))
    return files


def test_split_files_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    for file in files:
        found = open_gguf(file)
        assert found.files == tuple(files) and found.metadata["general.architecture"] == "llama"
        assert {name: each.file for name, each in found.tensors.items()} == {f"t{i}": files[i] for i in range(3)}
        assert name_of(file) == "my-model"


@pytest.mark.parametrize(
    "says, complaint",
    [
        ({"no": 2}, "says split.no 2 of 3; by its name it is 1 of 3"),
        ({"count": 4}, "says split.no 1 of 4; by its name it is 1 of 3"),
        ({"tensors": 5}, "split.tensors.count 5; its files have 3 tensors"),
        ({"name": "same"}, "both have the tensor 'same'"),
    ],
)
def test_split_files_that_do_not_belong_together(tmp_path: Path, says: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BrokenModel) as raised:
        open_gguf(split(tmp_path, **says)[0])
    assert complaint in raised.value.message


def test_split_files_of_which_some_are_missing(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(BadRequest, match=r"my-model-00002-of-00003\.gguf is missing"):
        open_gguf(files[0])
    alone = files[2].rename(tmp_path / "alone.gguf")
    with pytest.raises(BrokenModel, match="says that it is one of 3 files"):
        open_gguf(alone)
    save(tmp_path / "x-00007-of-00003.gguf", b"")
    with pytest.raises(BadRequest, match="file 7 of 3"):
        open_gguf(tmp_path / "x-00007-of-00003.gguf")


def test_pipes_and_folders_are_no_gguf(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    assert not is_gguf(tmp_path / "pipe.gguf") and not is_gguf(tmp_path) and not is_gguf(tmp_path / "none.gguf")
    with pytest.raises(BrokenModel, match="it is a pipe"):
        read_gguf_header(tmp_path / "pipe.gguf")
