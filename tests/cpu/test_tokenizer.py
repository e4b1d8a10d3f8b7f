"""Tokenizer, streaming text and stop strings, with the `tokenizers` library and transformers as oracles."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, BrokenModel
from penstock.serve.tokenizer import StopStrings, Tokenizer

STORIES = Path(__file__).parents[3] / "shared/models/stories-260k"
KINDS = ["byte-level", "byte-fallback", "metaspace", "wordpiece", "suffix"]


def build(kind: str):
    """Small tokenizers with the decoders that models use, with one special and one plain added token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    letters = list("abcdefgh") + ["é", "中"]
    if kind == "byte-level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {piece: i for i, piece in enumerate([*alphabet, "ab", "Ġa", "ĠĠ"])}
        core = Core(models.BPE(vocab, [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    elif kind == "byte-fallback":  # Llama 2, Gemma
        pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁", "▁a", "▁▁", "ab", "�"]
        core = Core(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif kind == "metaspace":
        core = Core(models.WordLevel({p: i for i, p in enumerate(["<unk>", *letters, "▁", "▁a", "▁▁"])}, "<unk>"))
        core.decoder = decoders.Metaspace()
    elif kind == "wordpiece":
        pieces = ["[UNK]", *letters, *("##" + x for x in letters), ".", "##."]
        core = Core(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
        core.decoder = decoders.WordPiece()
    else:  # OpenAI GPT, XLM
        core = Core(models.BPE({p: i for i, p in enumerate([*letters, *(x + "</w>" for x in letters)])}, []))
        core.decoder = decoders.BPEDecoder()
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("<|end|>", special=True)])
    return core


@cache
def opened(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return in_folder(Path(folder), build(kind))


def push(stream, token: int) -> str:
    """The text that a token makes certain."""
    stream.take(token)
    return stream.text()


def in_folder(folder: Path, core=None, **files) -> Tokenizer:
    (core or build("byte-level")).save(str(folder / "tokenizer.json"))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return Tokenizer.open(folder)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_stream_gives_the_text_of_all_ids(kind, data):
    tokenizer = opened(kind)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.size + 1), max_size=30))
    stream = tokenizer.stream()
    pieces = [push(stream, i) for i in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert tokenizer.decode(ids) == build(kind).decode([i for i in ids if i >= 0])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_streams_together_say_what_each_says_alone(kind, data):
    tokenizer = opened(kind)
    ids = st.lists(st.integers(-1, tokenizer.size + 1), max_size=12)
    answers = data.draw(st.lists(ids, min_size=2, max_size=5))
    together, alone = ([tokenizer.stream() for _ in answers] for _ in range(2))
    for i in range(max(map(len, answers))):
        speaking = [n for n, answer in enumerate(answers) if i < len(answer)]
        for n in speaking:
            together[n].take(answers[n][i])
        tokenizer.advance([together[n] for n in speaking])
        for n in speaking:
            assert together[n].text() == push(alone[n], answers[n][i])
    assert [stream.finish() for stream in together] == [stream.finish() for stream in alone]


def test_where_asking_together_fails_each_asks_alone(tmp_path, monkeypatch):
    tokenizer = in_folder(tmp_path)
    asked, ask = [], tokenizer._child.ask

    def fails_together(action, arguments, task):
        asked.append(action)
        if action == "advance_all":
            raise BrokenModel("too slow")
        return ask(action, arguments, task)

    monkeypatch.setattr(tokenizer._child, "ask", fails_together)
    streams = [tokenizer.stream() for _ in range(3)]
    for _ in range(2):
        for stream, token in zip(streams, tokenizer.encode("abc", False), strict=False):
            stream.take(token)
        tokenizer.advance(streams)
        assert [stream.text() for stream in streams[:2]] == ["ab", "c"]
    assert asked.count("advance_all") == 1


def test_texts_of_single_tokens_are_kept(tmp_path):
    tokenizer = in_folder(tmp_path)
    ids = tokenizer.encode("ab é")
    assert not tokenizer.has_texts(ids)
    tokenizer.prefetch_texts(ids)
    assert tokenizer.has_texts(ids) and tokenizer.texts(ids) == {i: tokenizer.decode([i], False) for i in ids}
    tokenizer.prefetch_texts(range(10**5, 10**5 + 40_000))  # more than are kept
    assert len(tokenizer._texts) <= 1 << 14


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@given(text=st.text(max_size=20))
def test_stream_never_shows_half_a_character(kind, text):
    text = text.replace("\ufffd", "").replace("▁", "")
    tokenizer = opened(kind)
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    pieces = [push(stream, i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)
    if kind == "byte-level":  # the text may have special tokens
        assert tokenizer.decode(tokenizer.encode(text, False), skip_special=False) == text


def test_stream_is_prompt():
    tokenizer = opened("byte-level")
    stream = tokenizer.stream()
    assert [push(stream, i) for i in tokenizer.encode("ab é!")] == ["ab", " ", "", "é", "!"]


def test_stream_shows_what_never_became_a_character():
    tokenizer = opened("byte-level")
    stream = tokenizer.stream()
    first, _ = tokenizer.encode("é")
    assert [push(stream, first), push(stream, first), stream.finish()] == ["", "", "\ufffd\ufffd"]


def test_control_tokens_are_not_text():
    tokenizer = opened("byte-level")
    ids = tokenizer.encode("a<think>b<|end|>c")
    assert tokenizer.decode(ids) == "a<think>bc"
    assert tokenizer.decode(ids, skip_special=False) == "a<think>b<|end|>c"
    assert tokenizer.decode([10**12, -5, 2**31]) == ""


def test_special_by_tokenizer_config_only(tmp_path):
    tokenizer = in_folder(tmp_path, tokenizer_config={"eos_token": {"content": "<think>"}, "pad_token": "not there"})
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "ab"
    assert tokenizer.size == build("byte-level").get_vocab_size()


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    core = build("byte-level")
    core.enable_truncation(4)
    core.enable_padding(length=50)
    tokenizer = in_folder(tmp_path, core)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_eos_and_bos(tmp_path):
    end = build("byte-level").token_to_id("<|end|>")
    config = {"bos_token_id": end, "eos_token_id": [7, 8]}
    tokenizer = in_folder(tmp_path, config=config, generation_config={"eos_token_id": 5})
    assert (tokenizer.eos_ids, tokenizer.bos) == ({5}, end)
    assert in_folder(tmp_path, config=config, generation_config={"eos_token_id": [5, 6]}).eos_ids == {5, 6}
    assert in_folder(tmp_path, config=config, generation_config={}).eos_ids == {7, 8}
    tokenizer = in_folder(tmp_path, config={}, tokenizer_config={"eos_token": "<|end|>"})
    assert (tokenizer.eos_ids, tokenizer.bos) == ({end}, None)
    with pytest.raises(BrokenModel, match="eos_token_id"):
        in_folder(tmp_path, generation_config={"eos_token_id": ["</s>"]})


@pytest.mark.parametrize("explicit", [None, True, False])
@pytest.mark.parametrize("processor", [False, True])
def test_bos_as_in_transformers(tmp_path, explicit, processor):
    transformers = pytest.importorskip("transformers")
    from tokenizers import processors

    core = build("byte-level")
    if processor:
        end = ("<|end|>", core.token_to_id("<|end|>"))
        core.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[end])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>"}
    if explicit is not None:
        config["add_bos_token"] = explicit
    tokenizer = in_folder(tmp_path, core, tokenizer_config=config)
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a cab") == oracle.encode("a cab")
    assert tokenizer.encode("a cab", add_special=False) == oracle.encode("a cab", add_special_tokens=False)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_files(tmp_path, text):
    with pytest.raises(BrokenModel, match=r"no tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BrokenModel, match="is not a tokenizer") as caught:
        Tokenizer.open(tmp_path)
    assert "\n" not in caught.value.message


def test_broken_side_files(tmp_path):
    in_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"generation_config\.json"):
        Tokenizer.open(tmp_path)


def test_text_that_is_no_unicode():
    with pytest.raises(BadRequest, match="Unicode"):
        opened("byte-level").encode("a\udcff")


@pytest.mark.skipif(not STORIES.is_dir(), reason="the reference model stories-260k is not on this machine")
def test_stories(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, oracle = Tokenizer.open(STORIES), transformers.AutoTokenizer.from_pretrained(STORIES)
    assert (tokenizer.bos, tokenizer.eos_ids, tokenizer.has_chat_template) == (1, {2}, False)
    for text in ["Once upon a time, there was a cat.", "  two  spaces\n\nand lines", "naïve 😀 中文", ""]:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == text
    (tmp_path / "half.json").write_bytes((STORIES / "tokenizer.json").read_bytes()[:5000])
    shutil.move(tmp_path / "half.json", tmp_path / "tokenizer.json")
    with pytest.raises(BrokenModel):
        Tokenizer.open(tmp_path)


# The first that is complete wins; of two that are complete at once, the longer.
def stop_by_brute_force(text: str, stops: list[str]) -> str:
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@given(
    pieces=st.lists(st.text("ab\n", max_size=5), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(pieces, stops):
    text = "".join(pieces)
    finder, given_out = StopStrings(stops), ""
    for piece in pieces:
        given_out += finder.push(piece)
        pushed = text[: len(given_out) + len(finder._held)]
        if finder.hit is None:
            # Held back is exactly the longest end that may still become a stop string.
            assert finder._held == next(
                (
                    pushed[i:]
                    for i in range(len(given_out), len(pushed))
                    if any(s.startswith(pushed[i:]) for s in stops)
                ),
                "",
            )
    given_out += finder.finish()
    assert given_out == stop_by_brute_force(text, stops)
    assert (finder.hit is not None) == any(stop in text for stop in stops)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whole_answers_say_what_streams_do(kind, data):
    tokenizer = opened(kind)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.size + 1), max_size=30))
    for skip_special in (True, False):
        stream, whole = tokenizer.stream(False, skip_special), tokenizer.stream(True, skip_special)
        texts = ["".join([*(push(each, i) for i in ids), each.finish()]) for each in (stream, whole)]
        assert texts[0] == texts[1]
