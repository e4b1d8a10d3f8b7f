"""Names of models on the Hub, and which files of a repository a name means."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel, PenstockError
from penstock.hubs.listing import Choice, Listing, RemoteFile, choose, parse_listing
from penstock.hubs.names import HubName, hub_name, is_plain, quantisation_of
from penstock.store.index import INDEX

COMMIT = "0" * 40


@pytest.mark.parametrize(
    ("text", "means"),
    {
        "org/name": HubName("org/name"),
        "Qwen/Qwen2.5-0.5B_x": HubName("Qwen/Qwen2.5-0.5B_x"),
        "org/name:v1.0": HubName("org/name", "v1.0"),
        "org/name:refs/pr/3": HubName("org/name", "refs/pr/3"),
        "org/name:feature%2Fa": HubName("org/name", "feature/a"),
        "org/name:q4_k_m": HubName("org/name", quantisation="Q4_K_M"),
        "org/name:UD-Q4_K_XL": HubName("org/name", quantisation="UD-Q4_K_XL"),
        "org/name:BF16": HubName("org/name", quantisation="BF16"),
        "org/name/a.gguf": HubName("org/name", file="a.gguf"),
        "org/name:v2/Q4/a-00001-of-00002.gguf": HubName("org/name", "v2", file="Q4/a-00001-of-00002.gguf"),
        "hf.co/org/name": HubName("org/name", sure=True),
        "https://huggingface.co/org/name:v1/": HubName("org/name", "v1", sure=True),
    }.items(),
)
def test_a_name(text: str, means: HubName) -> None:
    assert hub_name(text) == means
    assert hub_name(str(means)) == HubName(means.repo, means.revision, means.quantisation, means.file) or "%2F" in text


@pytest.mark.parametrize(
    "text",
    ["", "name", "/org/name", "./org/name", "../org/name", "org/name/", "org//name", "org/name/file.bin", "a/b/c",
     "~/org/name", "org/../name", "org/na--me", "org/name.git", "ollama:llama3:1b", "C:\\a\\b", "org/name:", "ö/name",
     "org/name\n", "org/" + 100 * "n"],
)  # fmt: skip
def test_no_name(text: str) -> None:
    assert hub_name(text) is None or text == "org/name/"


@pytest.mark.parametrize(
    ("text", "says"),
    {
        "org/name:../x.gguf": "no name that can stand on the Hub",
        "org/name:a%2F..%2Fb": "no name that can stand on the Hub",
        "org/name/../../x.gguf": "no name that can stand on the Hub",
        "org/name/a//x.gguf": "no name that can stand on the Hub",
        "org/name/a\x07.gguf": "no name that can stand on the Hub",
        "org/name:Q4_0/a.gguf": "names a quantisation and a file",
        "hf.co/name": "is no model of the Hub",
        "hf.co/org/name/model.bin": "is no model of the Hub",
    }.items(),
)
def test_a_name_that_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        hub_name(text)


@given(st.text(max_size=40) | st.from_regex(r"\A[a-z.]{1,4}/[a-z.-]{1,4}(:[a-z./%]{0,6})?(/[a-z./]{0,8})?\Z"))
def test_any_text_is_a_name_or_none_or_refused(text: str) -> None:
    try:
        name = hub_name(text)
    except BadRequest:
        return
    if name is not None:
        assert is_plain(name.repo) and is_plain(name.revision) and (not name.file or is_plain(name.file))
        assert ".." not in PurePosixPath(name.repo, name.revision, name.file).parts


@pytest.mark.parametrize(
    ("file", "quantisation"),
    {
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf": "Q4_K_M", "llama-3.2-1b.q8_0.gguf": "Q8_0", "m-IQ4_XS.gguf": "IQ4_XS",
        "m-UD-Q4_K_XL.gguf": "UD-Q4_K_XL", "m-bf16.gguf": "BF16", "m-F16-00001-of-00003.gguf": "F16",
        "Q6_K/m-00001-of-00002.gguf": "Q6_K", "gpt-oss-20b-mxfp4.gguf": "MXFP4", "model.gguf": "", "Q4/m.gguf": "",
        "phi-3-mini-4k-instruct-q4.gguf": "",
    }.items(),
)  # fmt: skip
def test_the_quantisation_in_a_name(file: str, quantisation: str) -> None:
    assert quantisation_of(file) == quantisation


def listed(*names: str, **sizes: int) -> Listing:
    return Listing("org/name", COMMIT, {name: RemoteFile(name, sizes.get(name, 1 << 20), "0" * 40) for name in names})


def chosen(listing: Listing, text: str = "org/name", index: bytes = b"") -> Choice:
    name = hub_name(text)
    assert name is not None
    return choose(listing, name, lambda _: index, 5 << 30)


def names(choice: Choice) -> list[str]:
    return [file.name for file in choice.files]


def test_a_folder_needs_no_pickles_no_code_and_no_second_copy() -> None:
    files = (
        "README.md", "config.json", "modeling_x.py", "pytorch_model.bin", "model.safetensors",
        "consolidated.safetensors", "tokenizer.json", "tokenizer_config.json",
        "original/consolidated.00.pth", "onnx/model.onnx", "tf_model.h5",
        "generation_config.json", "chat_template.jinja", "training_args.bin",
    )  # fmt: skip
    assert names(chosen(listed(*files))) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors",
    ]  # fmt: skip


def test_shards_are_those_of_the_index() -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    listing = listed("config.json", INDEX, *shards, "consolidated-00001-of-00001.safetensors")
    index = json.dumps({"weight_map": {"a": shards[1], "b": shards[0], "c": shards[0]}}).encode()
    assert names(chosen(listing, index=index)) == ["config.json", INDEX, *shards]


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "missing.safetensors", 5])
def test_an_index_that_leads_elsewhere(shard: object) -> None:
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    with pytest.raises(BrokenModel):
        chosen(listed("config.json", INDEX, "x.safetensors"), index=index)


def test_one_gguf_file_needs_no_name() -> None:
    assert names(chosen(listed("README.md", "m-Q4_0.gguf", "mmproj-m-F16.gguf", "config.json"))) == ["m-Q4_0.gguf"]


def test_split_files_are_one_model() -> None:
    parts = [f"Q8_0/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    listing = listed(*parts, "m-Q4_K_M.gguf", "bad-00001-of-00002.gguf")
    for text in ("org/name:Q8_0", f"org/name/{parts[1]}"):
        choice = chosen(listing, text)
        assert (names(choice), choice.main) == (parts, parts[0])
    with pytest.raises(BadRequest, match=r"is one of 2 files of a model, and bad-00002-of-00002.gguf is missing"):
        chosen(listing, "org/name/bad-00001-of-00002.gguf")


def test_several_gguf_files_are_listed_with_what_each_would_do() -> None:
    sizes = {"m-Q4_K_M.gguf": 4 << 30, "m-Q8_0.gguf": 8 << 30, "m-IQ2_M.gguf": 2 << 30, "x.gguf": 3 << 30}
    listing = listed(*sizes, **sizes)
    with pytest.raises(BadRequest) as refusal:
        chosen(listing)
    assert refusal.value.message == (
        "org/name has 4 GGUF files: write org/name:Q4_K_M or org/name/FILE; IQ2_M 2.00 GiB (not read), 'x.gguf' 3.00"
        " GiB, Q4_K_M 4.00 GiB, Q8_0 8.00 GiB (streams); 5.00 GiB of RAM are free here, and what is larger streams"
    )


@pytest.mark.parametrize(
    ("files", "text", "says"),
    [
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "org/name:Q4_K_S", "has no Q4_K_S; it has Q4_K_M"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "org/name:Q8_0", "has 2 GGUF files in Q8_0: 'a-Q8_0.gguf'"),
        (["model.safetensors", "config.json"], "org/name:Q8_0", "has no GGUF file, so no Q8_0"),
        (["llama-q8.gguf"], "org/name/lama-q8.gguf", "has no file 'lama-q8.gguf'; it has 'llama-q8.gguf'"),
        (["pytorch_model.bin", "config.json"], "org/name", "neither safetensors nor a GGUF file: it has pickled"),
        (["adapter_model.safetensors", "adapter_config.json"], "org/name", "it is an adapter"),
        (["README.md"], "org/name", "neither safetensors nor a GGUF file"),
        ([], "org/name", "neither safetensors nor a GGUF file"),
    ],
)
def test_what_is_not_there(files: list[str], text: str, says: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chosen(listed(*files), text)
    assert says in refusal.value.message


def test_unsloth_and_plain_quantisations() -> None:
    listing = listed("m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf")
    assert chosen(listing, "org/name:Q4_K_XL").main == "m-Q4_K_XL.gguf"
    assert chosen(listing, "org/name:UD-Q4_K_XL").main == "m-UD-Q4_K_XL.gguf"
    assert chosen(listed("m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"), "org/name:Q4_K_XL").main == "m-UD-Q4_K_XL.gguf"


GOOD = {"rfilename": "a", "size": 5, "blobId": "0" * 40}


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"[]", b"<html>", b"{}", {"sha": "main", "siblings": []}, {"sha": COMMIT}, {"sha": COMMIT, "siblings": {}},
        {"sha": "../../x", "siblings": []}, {"siblings": [5]}, {"siblings": [{"rfilename": 5}]},
        {"siblings": [{**GOOD, "size": -1}]}, {"siblings": [{**GOOD, "size": 2**63}]},
        {"siblings": [{**GOOD, "size": True}]}, {"siblings": [{**GOOD, "size": None}]},
        {"siblings": [{**GOOD, "blobId": "../../../etc/x"}]}, {"siblings": [{**GOOD, "blobId": None}]},
        {"siblings": [{**GOOD, "lfs": {"sha256": "ab", "size": 5}}]}, {"siblings": [{**GOOD, "lfs": {"size": 1e99}}]},
        b'{"a":' * 100_000,
    ],
)  # fmt: skip
def test_a_list_that_is_none(answer: bytes | dict[str, object]) -> None:
    content = answer if isinstance(answer, bytes) else json.dumps({"sha": COMMIT} | answer).encode()
    with pytest.raises(PenstockError):
        parse_listing(content, "org/name")


def test_names_in_a_list_that_lead_elsewhere_are_left_out() -> None:
    bad = ["../a", "/a", "a/../../b", "a//b", "", "a\nb", "a\\b", "." , "a/./b", 300 * "a"]  # fmt: skip
    content = json.dumps({"sha": COMMIT, "siblings": [{**GOOD, "rfilename": name} for name in [*bad, "good"]]})
    assert list(parse_listing(content.encode(), "org/name").files) == ["good"]


KEYS = st.sampled_from(["sha", "siblings", "rfilename", "size", "blobId", "lfs", "sha256"])
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


@given(st.recursive(PLAIN, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=4)))
def test_any_json_is_a_list_or_refused(value: object) -> None:
    try:
        parse_listing(json.dumps(value).encode(), "org/name")
    except BrokenModel as error:
        assert "\n" not in error.message
