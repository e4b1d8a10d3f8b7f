"""`penstock batch`: every line is answered as it would be alone, once, whatever interrupts it."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.batch.lines import MOST_LINE_BYTES
from penstock.serve.engine import Engine
from penstock.serve.sampling import SamplingParams
from penstock.store.pack import pack
from tests.cpu.commands import ROOT, Call, Outcome, apart, here, machine_cache, refused, standing, start
from tests.cpu.engines import load

TALE = ROOT / "penstock" / "assets" / "tale-llama"

WORDS = "the a king queen river stone house little girl boy dog went walked saw said and then to in".split()
KING = "Once upon a time there was a king who lived by the river and had a dog. " * 6


def request(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def requests(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Prompts of 5 to 80 words, of which a third begin alike."""
    rng, found = random.Random(seed), []
    for i in range(count):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.choice((5, 20, 80))))
        prompt = KING + text if i % 3 == 0 else text
        found.append(request(i, prompt=prompt, max_tokens=rng.choice((1, 4, 12)), temperature=0))
    return found


def nested(depth: int) -> dict[str, Any]:
    """A message with a field that nests so deep."""
    inner: Any = 1
    for _ in range(depth):
        inner = [inner]
    return {"role": "user", "content": "hi", "more": inner}


def write(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def texts(file: Path) -> dict[str, list[str]]:
    """custom_id → the texts of its choices. No id comes twice."""
    found = {}
    for answer in answers(file):
        assert answer["custom_id"] not in found and answer["response"]["status_code"] == 200
        found[answer["custom_id"]] = [choice["text"] for choice in answer["response"]["body"]["choices"]]
    return found


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("batch") / "tale-llama"
    pack(TALE, target)
    return target


@pytest.fixture(scope="module")
def single(packed: Path) -> Iterator[Engine]:
    """The model by itself, one sequence at a time."""
    with load(packed, prompt_tokens=200, context=512) as engine:
        yield engine


def alone(engine: Engine, line: dict[str, Any]) -> list[str]:
    """What the model says to a line's prompt by itself."""
    ids, n = engine.tokenizer.encode(line["body"]["prompt"]), line["body"].get("n", 1)
    named = {key: value for key, value in line["body"].items() if key not in ("prompt", "n")}
    return [engine.generate([ids], SamplingParams(**named).nth(i))[0].text for i in range(n)]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return machine_cache(tmp_path / "cache")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], cache: Path, packed: Path) -> Call:
    def batch(lines: Path, out: Path, *more: object) -> Outcome:
        return here(capsys, "batch", lines, out, "--model", packed, "--cache", cache, "--json", *more)

    return batch


@pytest.mark.parametrize(
    "limits",
    [
        (),
        ("--resident", "2MiB", "--batch", "5"),
        ("--kv-home", "disk", "--batch", "5"),
        ("--kv-home", "disk", "--kv", "int8"),
    ],
)
def test_every_line_has_the_answer_that_it_has_alone(
    limits: tuple[str, ...], call: Call, single: Engine, tmp_path: Path
) -> None:
    lines = requests(40)
    lines[5]["body"] |= {"n": 3, "temperature": 1.0, "seed": 7}
    found = call(write(tmp_path / "in", lines), tmp_path / "out", *limits)
    assert found.code == 0, found.err
    report, said = found.report, texts(tmp_path / "out")
    assert report["prompts"] == report["lines"] == len(said) == 40 and report["answers"] == 42 and not report["failed"]
    if "int8" not in limits:
        assert said == {line["custom_id"]: alone(single, line) for line in lines}
    sums = [answer["response"]["body"]["usage"] for answer in answers(tmp_path / "out")]
    assert sum(each["completion_tokens"] for each in sums) == report["output_tokens"]
    # What a third of the prompts begin with was read once. Int8 pages on a disk are shared by groups that fill whole
    # blocks, longer than these prompts: one is gone on in only after its request has ended, as the chosen batch has it.
    assert report["cached_tokens"] > 0 or "int8" in limits
    assert (report["bytes_moved"]["disk0"] > 0) == bool(limits) and report["predicted"]["seconds"] > 0


def test_bad_lines_have_an_error_line_each(call: Call, tmp_path: Path) -> None:
    good, chat = request(0, prompt="a king", max_tokens=3), {"messages": [{"role": "user", "content": "hi"}]}
    asked: list[Any] = [
        good,
        "nonsense",
        "",
        "[1]",
        "[" * 100_000,
        json.dumps(good).replace("a king", "\\ud800"),
        {"custom_id": "b", "body": {}},
        {**good, "custom_id": "e", "body": [1]},
        json.dumps(good).replace(": 3", f": {'1' * 5000}"),
        {**good, "custom_id": "c", "url": "/v1/images/generations"},
        {**good, "custom_id": "d", "method": "GET"},
        request(5, prompt="a", max_tokens=-1),
        request(6, prompt="a", stream=True),
        request(7, prompt="a", model="gpt-4"),
        request(8, prompt="a " * 3000, max_tokens=3),
        request(9, prompt=[1, 2, 10**9], max_tokens=3),
        request(10, prompt="a", nonsense=1),
        request(11, prompt=[], max_tokens=3),
        {**good, "custom_id": 12},
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": {**chat, "max_tokens": 3, "model": "tale-llama"}},
        "x" * (MOST_LINE_BYTES + 10),
        request(14, prompt="a queen", max_tokens=3, logprobs=2, echo=True),
        {**good, "url": "/v1/completions"},  # whose custom_id has come before
        {"custom_id": "deep", "url": "/v1/chat/completions", "body": {"messages": [nested(900)], "max_tokens": 3}},
        " " * (MOST_LINE_BYTES + 10) + "x",
        request(15, prompt="a", response_format={"type": "json_schema", "json_schema": {"schema": {"type": 3}}}),
    ]  # fmt: skip
    found = call(write(tmp_path / "in", asked), tmp_path / "out")
    assert found.code == 0, found.err
    done = answers(tmp_path / "out")
    fine = {answer["custom_id"]: answer for answer in done if answer["error"] is None}
    fine = {name: each for name, each in fine.items() if each["response"]["status_code"] == 200}
    assert {"r0", "chat", "r14"} <= set(fine) <= {"r0", "chat", "r14", "deep"}
    assert fine["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    choice = fine["r14"]["response"]["body"]["choices"][0]
    assert choice["text"].startswith("a queen") and len(choice["logprobs"]["tokens"]) > 3
    codes = {
        answer["custom_id"]: (answer["error"] or answer["response"]["body"]["error"])["code"]
        for answer in done
        if answer not in fine.values() and answer["custom_id"] != "r0"
    }
    codes.pop("deep", None)  # how deep messages may nest is Python's to say
    assert codes == {
        None: "invalid_line", "b": "invalid_line", "c": "invalid_url", "d": "invalid_url", "e": "invalid_line",
        "r5": "invalid_request", "r6": "invalid_request", "r7": "model_not_found", "r8": "context_length_exceeded",
        "r9": "invalid_request",
        "r10": "invalid_request", "r11": "invalid_request", "r15": "invalid_request",
    }  # fmt: skip
    said = [answer["error"]["message"] for answer in done if answer["error"]]
    for message in ("the line is no JSON object", "url: Field required", "body: Input should be a valid dictionary"):
        assert message in said
    assert any(message.endswith("value has 5000 digits") for message in said)
    assert len(done) == len(asked) - 1 == found.report["lines"] and found.report["failed"] == len(done) - len(fine)
    again = call(tmp_path / "in", tmp_path / "out")
    assert again.report["resumed"] == len(done) and again.report["prompts"] == 0 and answers(tmp_path / "out") == done


def test_a_run_that_is_killed_goes_on(cache: Path, packed: Path, single: Engine, tmp_path: Path) -> None:
    """Killed at three moments, of which the file shows the progress. A line that was cut off is done again."""
    done_file = f"Path({str(tmp_path / 'out')!r})"
    lines, out = requests(120, seed=2), tmp_path / "out"
    write(tmp_path / "in", lines)
    args = ("batch", tmp_path / "in", out, "--model", packed, "--cache", cache, "--json", "--batch", "4")
    rng, before = random.Random(3), 0
    for _ in range(3):
        wanted = before + rng.randint(1, 30)
        # It is killed some lines later at most, and in the midst of its work, if this test is awake.
        script = standing(tmp_path, f"{done_file}.exists() and {done_file}.read_bytes().count(b'\\n') > {wanted} + 3")
        process = start(*args, script=script)
        until_s = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < until_s:
            if out.exists() and out.read_bytes().count(b"\n") >= wanted:
                break
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        before = out.read_bytes().count(b"\n")
        assert before >= wanted
        with open(out, "ab") as stream:  # as if the last write had not come to its end
            stream.write(b'{"id": "batch_req_000'[: rng.randint(1, 21)])
    done = apart(*args)
    assert done.code == 0 and done.report["resumed"] == before and done.report["prompts"] == 120 - before
    assert texts(out) == {line["custom_id"]: alone(single, line) for line in lines}


def test_ctrl_c_says_how_to_go_on(cache: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(tmp_path / "in", [request(i, prompt="a king", max_tokens=200, ignore_eos=True) for i in range(300)])
    process = start("batch", tmp_path / "in", out, "--model", packed, "--cache", cache, "--batch", "2")
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s and not (out.exists() and out.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "of 300 lines are left: the same command goes on with them" in err.decode()
    assert len(texts(out)) < 300


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """No file may grow beyond: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_one_line_and_the_run_goes_on(call: Call, single: Engine, tmp_path: Path) -> None:
    lines = requests(30)
    write(tmp_path / "in", lines)
    with largest_file(8_000):
        found = call(tmp_path / "in", tmp_path / "out")
    assert found.code == 2 and found.report["error"]["type"] == "StorageFailed"
    assert found.err.endswith("of 30 lines are done, and the same command goes on from there\n")
    whole = answers(tmp_path / "out")
    assert 0 < len(whole) < 30
    assert call(tmp_path / "in", tmp_path / "out").report["resumed"] == len(whole)
    assert texts(tmp_path / "out") == {line["custom_id"]: alone(single, line) for line in lines}


def test_answers_of_other_requests_and_of_another_model_stay(call: Call, tmp_path: Path) -> None:
    asked, out = write(tmp_path / "in", requests(3)), tmp_path / "out"
    assert call(asked, out).code == 0
    before = out.read_bytes()
    refused(call(write(tmp_path / "other", requests(3, seed=5)), out), "these flags; name another file")
    refused(call(asked, out, "--kv", "int8"), "these flags; name another file")
    refused(call(asked, asked), "is the file of the requests")
    refused(call(asked, tmp_path), "is not a file that can be written")
    refused(call(tmp_path, out), "is a folder")
    refused(call(tmp_path / "nothing", out), "cannot be read")
    os.mkfifo(tmp_path / "pipe")
    refused(call(tmp_path / "pipe", out), "is a pipe")
    refused(call(write(tmp_path / "named", [request(1, prompt="a", model="gpt-4")]), tmp_path / "new"), "--name NAME")
    assert call(tmp_path / "named", tmp_path / "new", "--name", "gpt-4").report["prompts"] == 1
    with open(out, "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        refused(call(asked, out), "another process is writing answers")
    assert out.read_bytes() == before


def test_a_file_that_only_scores(call: Call, tmp_path: Path) -> None:
    asked = [request(i, prompt=f"a king {i}", max_tokens=0, echo=True, logprobs=1) for i in range(3)]
    found = call(write(tmp_path / "in", asked), tmp_path / "out")
    assert found.code == 0 and found.report["answers"] == 3 and found.report["output_tokens"] == 0, found.err


def test_answers_that_may_be_longer_than_the_context(call: Call, tmp_path: Path) -> None:
    """What no answer can reach is not planned for."""
    asked = [request(i, prompt="a king", max_tokens=1 << 20) for i in range(3)]
    found = call(write(tmp_path / "in", asked), tmp_path / "out")
    assert found.code == 0 and found.report["output_tokens"] <= 3 * 512, found.err
    assert found.report["predicted"]["seconds"] < 3600


def test_a_context_that_may_grow(call: Call, tmp_path: Path) -> None:
    found = call(write(tmp_path / "in", [request(1, prompt="a king", max_tokens=3)]), tmp_path / "out", "--context", -1)
    assert found.code == 0 and found.report["output_tokens"] <= 3, found.err


def test_more_answers_than_fit_at_once(call: Call, tmp_path: Path) -> None:
    """3,000 answers at once want some 845 MiB. Fewer at once are planned for."""
    asked = [request(i, prompt=f"a king {i}", max_tokens=1) for i in range(3000)]
    found = call(write(tmp_path / "in", asked), tmp_path / "out", "--host-memory", "220MiB")
    assert found.code == 0 and found.report["answers"] == 3000, found.err
    assert found.report["block"]["answers"] < 3000


def test_calls_of_tools(call: Call, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"legs": {"enum": [2, 4]}},
        "required": ["legs"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "count_legs", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "A dog?"}], "tools": [tool], "max_tokens": 80}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": {**asked, **more}}
        for i, more in enumerate(({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": "none"}))
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert call(source, target).code == 0
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0] for answer in answers(target)}
    (made,) = found["c0"]["message"]["tool_calls"]
    assert made["function"]["name"] == "count_legs" and json.loads(made["function"]["arguments"])["legs"] in (2, 4)
    assert found["c0"]["finish_reason"] == "tool_calls" and "tool_calls" not in found["c1"]["message"]
