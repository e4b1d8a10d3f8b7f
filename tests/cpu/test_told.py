"""What penstock does otherwise than asked it says: capped threads, answers that the context cuts, flags that a plan
settles; and what cannot be is refused where it is read, by one set of limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, _native
from penstock.errors import BadRequest
from penstock.runtime import host
from penstock.spec.format import MOST_GROUP, Format, parse_format
from tests.cpu.commands import Call, here, refused

SHORT = ("--ignore-eos", "--max-tokens", "4", "--context", "64")


def test_threads_beyond_the_cpus_are_told(call: Call, model: Path) -> None:
    cpus = host.usable_cpus()
    found = call("run", model, "once", "--threads", cpus + 62, *SHORT)
    assert found.code == 0
    assert found.err.count(f"--threads {cpus + 62}: this process may use {cpus} CPUs and has as many threads") == 1
    assert "--threads" not in call("run", model, "once", "--threads", 1, *SHORT).err


@pytest.mark.parametrize("command", ["run", "bench", "eval"])
@pytest.mark.parametrize("flag", [("--kv", "int8"), ("--kv-home", "disk"), ("--resident", "1MiB")])
def test_a_plan_leaves_no_choice(call: Call, model: Path, tmp_path: Path, command: str, flag: tuple[str, str]) -> None:
    file, text = tmp_path / "plan.json", tmp_path / "text.txt"
    file.write_text(json.dumps(call("plan", model, "--context", "64").report))
    text.write_text("once upon a time")
    words = {"run": ["once"], "bench": [], "eval": [text]}[command]
    refused(call(command, model, *words, "--plan", file, *flag), "give one or the other", "BadRequest")


def test_every_answer_of_a_batch_is_in_the_json(call: Call, model: Path) -> None:
    one = call("run", model, "once", *SHORT).report
    assert [answer["token_ids"] for answer in one["answers"]] == [one["token_ids"]]
    three = call("run", model, "once", "--batch", "3", "--temperature", "1", "--seed", "1", *SHORT).report
    assert three["batch"] == 3 and len(three["answers"]) == 3
    for name in ("text", "token_ids", "finish_reason", "output_tokens", "prompt_tokens"):
        assert three["answers"][0][name] == three[name]
    assert all(answer["output_tokens"] == 4 for answer in three["answers"])


@pytest.mark.parametrize(
    ("flags", "full", "says"),
    [
        (("--max-tokens", "4", "--context", "64"), False, ""),
        (
            ("--max-tokens", "100", "--context", "16"),
            True,
            "16 tokens is full: --context N makes room for more, up to 256",
        ),
        (("--max-tokens", "300", "--context", "256"), True, "256 tokens is full: it is the model's longest"),
    ],
)
def test_an_answer_that_the_context_cuts_says_so(
    call: Call,
    model: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    full: bool,
    says: str,
) -> None:
    found = call("run", model, "once", "--ignore-eos", *flags).report
    assert (found["context_full"], found["finish_reason"]) == (full, "length")
    told = here(capsys, "run", model, "once", "--cache", cache, "--ignore-eos", *flags).err
    assert says in told and ("the answer ends here" in told) == full


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_what_parses_the_kernels_take(kind: str) -> None:
    for group in (8, 64, MOST_GROUP):
        _native.Matrix(16, 2 * group, kind, parse_format(f"{kind}-g{group}").group, 0)
    for group in (0, 4, 12, MOST_GROUP + 8, 2 * MOST_GROUP):
        with pytest.raises(BadRequest, match="group size"):
            Format(kind, group)
        with pytest.raises(ValueError, match="group must be"):
            _native.Matrix(16, 64, kind, group, 0)
    for group in (32, 64, MOST_GROUP):
        Format(kind, group).check_kv()
        _native.CacheShape(kind, group, 1, 64, 128)
    with pytest.raises(ValueError, match="group must be"):
        _native.CacheShape(kind, 2 * MOST_GROUP, 1, 64, 128)


def test_a_group_that_no_kernel_takes_is_refused_before_packing(call: Call, model: Path, tmp_path: Path) -> None:
    refused(call("run", model, "once", "--weights", "int4-g2048"), "from 8 to 1024", "BadRequest")
    refused(call("plan", model, "--weights", "int8-g4096"), "from 8 to 1024", "BadRequest")


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (None, "prompts should be a string, a list of token ids, or a list of either, not NoneType"),
        ({"prompt": "once"}, "not dict"),
        (b"once", "not bytes"),
        (7, "not int"),
        (["once", None], r"prompts\[1\] should be a string or a list of token ids, not NoneType"),
        ([[1, "2"]], r"prompts\[0\] should be a string or a list of token ids, not list"),
    ],
)
def test_prompts_of_another_type(model: Path, cache: Path, prompts: Any, says: str) -> None:
    with LLM(model, cache=cache, context=64) as llm:
        with pytest.raises(TypeError, match=says):
            llm.generate(prompts)
        with pytest.raises(TypeError, match="params should be SamplingParams, not dict"):
            llm.generate("once", {"max_tokens": 3})  # type: ignore[arg-type]
