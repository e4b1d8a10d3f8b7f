"""Answers that follow a JSON schema: the bytes of tokens, random schemas, hostile ones, and a child that dies."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models

from bench.masks import SCHEMA, vocabulary
from penstock.errors import BadRequest
from penstock.serve import guide_child
from penstock.serve.engine import Engine
from penstock.serve.guide_child import Mask, Matchers
from penstock.serve.guides import Allowed, Guides, guide_bytes
from penstock.serve.sampling import SamplingParams
from penstock.serve.schemas import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from penstock.serve.service import Service
from penstock.serve.token_bytes import token_bytes
from penstock.serve.tokenizer import Tokenizer
from penstock.serve.told import Ended, Failed
from tests.cpu.guided import CORES, HOSTILE, load_unchecked, made
from tests.cpu.services import Heard


@pytest.fixture(scope="module", params=["bytes", *CORES])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    core = CORES[request.param]() if request.param in CORES else None
    with load_unchecked(made(tmp_path_factory.mktemp("guides") / request.param, core)) as found:
        yield found


@pytest.mark.parametrize("name", list(CORES))
@given(text=st.text(max_size=40), ids=st.lists(st.integers(0, 300), max_size=20))
@settings(max_examples=60)
def test_bytes_of_tokens_are_those_of_the_text(name: str, text: str, ids: list[int]) -> None:
    core, special = CORE[name], {CORE[name].token_to_id(each) for each in ("<s>", "</s>", "<unk>")}
    known = BYTES[name]
    encoded = core.encode(text, add_special_tokens=False).ids
    if not special & set(encoded):
        found = b"".join(known[i] for i in encoded)
        assert found.decode(errors="replace").removeprefix(" ") == core.decode(encoded).removeprefix(" ")
    ids = [i for i in ids if i < len(known) and known[i]]
    joined = b"".join(known[i] for i in ids)
    try:
        expected = joined.decode()
    except UnicodeDecodeError:
        return
    # A decoder drops a space at the beginning; white space before JSON is none of its content.
    assert core.decode(ids) in (expected, expected.removeprefix(" "))


CORE = {name: make() for name, make in CORES.items()}
BYTES = {
    name: token_bytes(
        core,
        {i for i in map(core.token_to_id, ("<s>", "</s>", "<unk>")) if i is not None},
        {i for i in (core.token_to_id(f"<0x{b:02X}>") for b in range(256)) if i is not None},
    )
    or []
    for name, core in CORE.items()
}


def test_every_token_has_its_bytes() -> None:
    for name, known in BYTES.items():
        # Of the bytes that plain tokens have too, byte tokens have none.
        plain = {each for i, each in enumerate(known) if len(each) == 1 and CORE[name].id_to_token(i)[:3] != "<0x"}
        assert known.count(b"") == (2 if name == "byte-level" else 3 + len(plain))
        assert {bytes([b]) for b in range(256)} <= set(known)
    wordpiece = Core(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    wordpiece.decoder = decoders.WordPiece()
    assert token_bytes(wordpiece, (), ()) is None and token_bytes(Core(models.BPE()), (), ()) is None


def test_masks_as_they_come() -> None:
    def bits(*values: int) -> str:
        return base64.b64encode(bytes(values)).decode()

    for mask in (bits(0b0001_0011, 0), [0, 1, 4]):
        allowed = Allowed(mask, 6, frozenset([3, 99]), 4)
        assert allowed.tokens.tolist() == [True, True, False, True, False, False]
        assert allowed.end and not allowed.only_end
    assert allowed.choice.tolist() == [0, 1, 3]
    for mask in (bits(0b0001_0000), [4]):
        last = Allowed(mask, 6, frozenset([3]), 4)
        assert last.tokens.tolist() == [False, False, False, True, False, False] and last.end and last.only_end
    assert not Allowed([5], 6, frozenset([3]), 4).end


def small(draw: Any, depth: int) -> Any:
    return draw(schemas(depth))


@pytest.mark.parametrize("numbered", [2, guide_child.NUMBERED])
def test_slices_change_no_mask(numbered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the vocabulary is looked at once, and whichever masks are told by their numbers."""
    tokens = [word.replace("Ġ", " ").replace("Ċ", "\n") for word in vocabulary(3000)]
    monkeypatch.setattr(guide_child, "NUMBERED", numbered)
    sliced = Matchers(tokens)
    monkeypatch.setattr(guide_child, "_SLICES", [])
    plain = Matchers(tokens)
    rng, schema = np.random.default_rng(5), json.dumps(SCHEMA)
    known: dict[int, str] = {}
    count = 0

    def whole(mask: Mask) -> str | list[int]:
        nonlocal count
        if isinstance(mask, tuple):
            known[mask[0]], count = mask[1], count + 1
            return mask[1]
        return known[mask] if isinstance(mask, int) else mask

    for answer in range(3):
        mask = whole(sliced.begin(answer, "schema", schema, []))
        plain.begin(answer, "schema", schema, [])
        for _ in range(150):
            plain._numbered.clear()  # so it names none by a number
            choice = Allowed(mask, len(tokens), frozenset(), len(tokens))
            token = int(rng.choice(np.flatnonzero(choice.tokens)))
            mask, other = whole(sliced.step(answer, token)), plain.step(answer, token)
            assert mask == (other[1] if isinstance(other, tuple) else other)
    assert len(known) <= numbered and count < 200  # most masks of many ids are among the last ones


@st.composite
def schemas(draw: Any, depth: int = 2) -> dict[str, Any]:
    """Schemas whose answers tend to be short."""
    kinds = ["integer", "boolean", "null", "enum", "string", "number", "const"]
    kind = draw(st.sampled_from(kinds + (["object", "array", "anyOf"] if depth else [])))
    if kind == "integer":
        low = draw(st.integers(-1000, 1000))
        return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 5000))}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": draw(st.integers(1, 100))}
    if kind == "enum":
        return {"enum": draw(st.lists(SCALARS, min_size=1, max_size=4))}
    if kind == "const":
        return {"const": draw(SCALARS)}
    if kind == "string":
        form = draw(st.sampled_from(["length", "pattern", "date"]))
        if form == "pattern":
            return {
                "type": "string",
                "pattern": draw(st.sampled_from(["^[a-c]{1,3}$", "^(x|yy)+z$", "^\\d{2}-\\w$", "^é?[^a]$"])),
            }
        if form == "date":
            return {"type": "string", "format": draw(st.sampled_from(["date", "ipv4"]))}
        low = draw(st.integers(0, 3))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}
    if kind == "array":
        low = draw(st.integers(0, 2))
        return {"type": "array", "items": small(draw, depth - 1), "minItems": low, "maxItems": low + 1}
    if kind == "anyOf":
        return {"anyOf": [small(draw, depth - 1) for _ in range(draw(st.integers(1, 3)))]}
    if kind == "object":
        names = draw(st.lists(st.text(max_size=4), max_size=3, unique=True))
        return {
            "type": "object",
            "properties": {name: small(draw, depth - 1) for name in names},
            "required": [name for name in names if draw(st.booleans())],
            "additionalProperties": draw(st.sampled_from([False, {"type": "boolean"}])),
        }
    return {"type": kind}


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=5))


@pytest.mark.fuzz
def test_answers_that_end_follow_random_schemas(engine: Engine) -> None:
    ended = []

    @given(schema=schemas(), seed=st.integers(0, 1000))
    @settings(max_examples=max(40, settings().max_examples // 8))
    def run(schema: dict[str, Any], seed: int) -> None:
        params = SamplingParams(max_tokens=120, temperature=1.0, seed=seed, json_schema=schema)  # type: ignore[arg-type]
        try:
            found = engine.generate([[5, 6]], params)[0]
        except BadRequest as error:
            assert "JSON schema" in error.message
            ended.append(None)
            return
        ended.append(found.finish_reason == "stop")
        if found.finish_reason == "stop":
            Draft202012Validator(schema).validate(json.loads(found.text))

    run()
    assert ended.count(True) > len(ended) // 2, ended


def test_json_object_and_recursion(engine: Engine) -> None:
    tree = {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"type": "object", "properties": {"n": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/node"}},
                           "required": ["n"], "additionalProperties": False}},
    }  # fmt: skip
    texts = []
    for seed in range(8):
        params = SamplingParams(max_tokens=100, temperature=1.0, seed=seed, json_schema=tree)  # type: ignore[arg-type]
        found = engine.generate([[5]], params)[0]
        if found.finish_reason == "stop":
            Draft202012Validator(tree).validate(json.loads(found.text))
            texts.append(found.text)
    assert texts
    greedy = SamplingParams(max_tokens=60, json_schema='{"type": "object"}')
    text = engine.generate([[5]], greedy)[0].text
    assert text.lstrip().startswith("{")
    assert "".join(engine.stream([5], greedy)) == text


def test_masks_that_take_long_end_their_answer_and_no_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within its limit: whoever is in the same pass would wait for every one of them."""
    slow, quick = ({"type": "array", "items": {"type": kind}, "minItems": 12} for kind in ("integer", "boolean"))
    ask = engine.guides._confined.ask
    rules: dict[int, str] = {}

    def slowly(action: str, arguments: list[Any], task: Any) -> tuple[Any, float]:
        answer, taken_s = ask(action, arguments, task)
        if action == "begin":
            rules[arguments[0]] = arguments[2]
        return answer, 0.2 if "integer" in rules.get(arguments[0], "") else taken_s

    monkeypatch.setattr(engine.guides._confined, "ask", slowly)
    heard = [Heard(), Heard()]
    with closing(Service(engine, prompt_rows=4, queue=100)) as service:
        for schema, each in zip((slow, quick), heard, strict=True):
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, json_schema=json.dumps(schema))
            service.submit([5], params, each.tell)
        (text, failed), (_, ended) = (each.end() for each in heard)
    assert isinstance(failed, Failed) and "others wait meanwhile" in failed.error.message
    assert isinstance(ended, Ended) and len(text) < 40


def test_answers_together_are_those_alone(engine: Engine) -> None:
    """Answers with and without a schema in one pass; each is what it is alone."""
    schemas = [{"enum": ["one", "two"]}, None, {"type": "array", "items": {"type": "integer"}, "maxItems": 9}, None] * 2
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=i, json_schema=schema, ignore_eos=schema is None)  # type: ignore[arg-type]
        for i, schema in enumerate(schemas)
    ]
    alone = [engine.generate([[5, i]], p)[0] for i, p in enumerate(params)]
    with closing(Service(engine, prompt_rows=4, queue=100)) as service:
        heard = [Heard() for _ in params]
        for i, (p, each) in enumerate(zip(params, heard, strict=True)):
            service.submit([5, i], p, each.tell)
        for each, expected in zip(heard, alone, strict=True):
            text, told = each.end()
            assert isinstance(told, Ended) and told.answer.token_ids == expected.token_ids
            assert text == expected.text == told.answer.text and told.answer.finish_reason == expected.finish_reason


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with load_unchecked(made(tmp_path_factory.mktemp("guides") / "plain")) as found:
        yield found


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_schemas_end_in_a_line_and_cost_nobody_else(plain: Engine, name: str) -> None:
    """Refused when compiled, ended at a step, or followed: in any case others go on, and the limits hold."""
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=1, json_schema=schema)  # type: ignore[arg-type]
        for schema in (HOSTILE[name], {"type": "array", "items": {"enum": [1, 2]}})
    ]
    expected = plain.generate([[5]], params[1])[0]
    with closing(Service(plain, prompt_rows=4, queue=100)) as service:
        heard = [Heard(), Heard()]
        for p, each in zip(params, heard, strict=True):
            service.submit([5], p, each.tell)
        (_, first), (_, second) = (each.end() for each in heard)
        assert isinstance(second, Ended) and second.answer.token_ids == expected.token_ids
        if isinstance(first, Failed):
            assert isinstance(first.error, BadRequest) and "\n" not in first.error.message, first
            assert "JSON schema" in first.error.message
        assert service.free_sequences == 4
    assert plain.guides.peak_bytes <= 2 * guide_bytes(plain.packed.spec.vocab)


def test_schemas_are_bounded() -> None:
    deep: Any = {}
    for _ in range(MAX_SCHEMA_DEPTH + 5):
        deep = {"items": deep}
    for schema, says in (
        (deep, "deeper"),
        ("[" * 10_000, "JSON"),
        ('{"a":' * 10_000, "JSON"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, "may have"),
        (" " * (MAX_SCHEMA_BYTES + 1), "may have"),
        ("[]", "object"),
        ({"minimum": float("nan")}, "JSON"),
        ({"const": "\ud800"}, None),
        ({"const": {1, 2}}, "JSON"),
        (7, "object"),
    ):
        if says is None:
            SamplingParams(json_schema=schema)  # type: ignore[arg-type]
            continue
        with pytest.raises(BadRequest, match=says):
            SamplingParams(json_schema=schema)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="ignore_eos"):
        SamplingParams(json_schema="{}", ignore_eos=True)


def test_a_child_that_dies_is_told_anew(plain: Engine) -> None:
    params = SamplingParams(
        max_tokens=40, temperature=1.0, seed=3, json_schema={"type": "array", "items": {"enum": [7]}}
    )  # type: ignore[arg-type]
    expected = plain.generate([[5]], params)[0]
    ids, guide = [], plain.guide(params)
    assert guide is not None
    for i, token in enumerate(expected.token_ids):
        if i in (1, 5):
            child = plain.guides._confined._child
            assert child is not None
            guide.allowed()
            os.kill(child.process.pid, signal.SIGKILL)
            child.process.wait()
        allowed = guide.allowed()
        if allowed.only_end or token in plain.tokenizer.eos_ids:
            assert allowed.end
            break
        assert allowed.tokens[token]
        guide.push(token)
        ids.append(token)
    assert ids


def test_no_room_is_said(plain: Engine) -> None:
    guides = Guides(plain.tokenizer, plain.packed.spec.vocab, lambda: 1 << 20)
    with closing(guides), pytest.raises(BadRequest, match="of memory"):
        guides.check("{}")


def test_a_tokenizer_without_bytes_is_refused(tmp_path: Path) -> None:
    core = Core(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    guides = Guides(tokenizer, 3, lambda: 1 << 28)
    with closing(tokenizer), closing(guides), pytest.raises(BadRequest, match="tokenizer"):
        guides.check("{}")


def test_a_mask_is_the_last_word(plain: Engine) -> None:
    """Biases and penalties choose among what is allowed, greedy or not."""
    from penstock.serve.sampling import Sampler

    logits, allowed = np.array([9, 1, 2, 3], np.float32), np.array([False, True, True, False])
    for how in (
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1e-9},
        {"logit_bias": {0: 100, 3: 100}},
        {"min_p": 1.0, "temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.01},
    ):
        assert Sampler(SamplingParams(**how), []).next(logits, (9.0, 0), allowed) == 2  # type: ignore[arg-type]
    wild = [SamplingParams(temperature=1e6, top_k=3, seed=i) for i in range(40)]
    assert {Sampler(params, []).next(logits, None, allowed) for params in wild} == {1, 2}
