"""Senseless flags and prompts; Ctrl-C, closed pipes and missing streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.checkpoints import LLAMA, save_checkpoint
from tests.cpu.commands import ROOT, Call, Outcome, apart, here, refused, standing, start

# --- flags -----------------------------------------------------------------------------------------------------------

DIGITS = "9" * 400
FLAGS = [
    ("--host-memory 0", "host memory of 0 B is too little"),
    ("--host-memory 1KiB", "1.00 KiB is too little"),
    ("--host-memory -1GiB", "--host-memory '-1GiB' is not a size"),
    ("--host-memory 1e9", "is not a size"),
    ("--host-memory 1.GiB", "is not a size"),
    ("--host-memory ١GiB", "is not a size"),
    (f"--host-memory {DIGITS}", "is not a size"),
    ("--host-memory 999999999TiB", "should be from 0 to 2**63"),
    ("--host-memory 999999TiB", "is more than"),
    ("--resident nan", "--resident 'nan' is not a size"),
    ("--resident -0", "is not a size"),
    ("--device-memory 1XiB", "--device-memory '1XiB' is not a size"),
    ("--context 0", "--context"),
    ("--context -5", "--context"),
    ("--context 257", "more than the model's 256 positions"),
    ("--context 2147483648", "context is 2147483648"),
    ("--context 1.5", "--context"),
    ("--batch 0", "--batch"),
    ("--batch 16385", "batch is 16385; it should be from 1 to 16384"),
    (f"--batch {DIGITS}", "batch is 9"),
    ("--prompt-tokens 0", "--prompt-tokens"),
    ("--output-tokens -1", "--output-tokens"),
    (f"--output-tokens {DIGITS} --context 64", "output_tokens is 9"),
    (f"--max-tokens {DIGITS} --context 64", "output_tokens is 9"),
    ("--max-tokens 0", "max_tokens is 0"),
    ("--temperature nan", "temperature is nan"),
    ("--temperature inf", "temperature is inf"),
    ("--top-k -2", "top_k is -2"),
    ("--top-p 0", "top_p is 0"),
    ("--top-p 1.01", "top_p is 1.01"),
    ("--min-p -1", "min_p is -1"),
    ("--repetition-penalty 0", "repetition_penalty is 0"),
    ("--seed -1", "seed is -1"),
    ("--threads 0", "--threads"),
    ("--threads 5000", "--threads"),
    ("--weights nonsense", "unknown number format 'nonsense'"),
    ("--weights int4", "packed with float32 weights: for int4"),
    ("--weights int4-g3", "group size 3"),
    ("--weights int4-g²", "the group size should be a number"),
    ("--weights int4-g", "packed with float32"),
    (f"--weights int4-g{DIGITS}", "the group size should be a number"),
    ("--weights float32-g64", "only int8 and int4 have groups"),
    ("--weights q4_k", "packed with float32 weights: for q4_k"),
    ("--weights q4_k-g64", "only int8 and int4 have groups"),
    ("--weights q4_k-neurons", "does not lie neuron by neuron"),
    ("--kv q4_0", "a KV cache in q4_0"),
    ("--kv nonsense", "unknown number format 'nonsense': there are float32, bfloat16, float16, int8, int4"),
    ("--kv int4-g24", "its groups should be multiples of 32"),
    ("--kv int8-g8", "a KV cache in int8-g8"),
    ("--objective speed", "latency or throughput"),
    ("--device gpu", "one of auto, cuda, none, emulated"),
    ("--plan /dev/null", "is a device, not a regular file"),
    ("--plan /nonexistent", "cannot be read"),
    ("--cache /dev/null", "cannot measure the disk at /dev/null"),
]


@pytest.mark.parametrize(("flags", "says"), FLAGS, ids=[flags[:30] for flags, _ in FLAGS])
def test_a_flag_that_makes_no_sense(flags: str, says: str, call: Call, model: Path) -> None:
    refused(call("run", model, "hi", *flags.split()), says)


@pytest.mark.parametrize("flags", ["--kv int8-g8", "--weights int4-g3", "--host-memory x", "--top-p 2", "--context 0"])
def test_flags_are_read_before_a_first_use_packs(flags: str, call: Call, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", LLAMA)
    refused(call("run", tmp_path / "source", "hi", *flags.split(), "--cache", tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "", "hi"], "holds no config.json"),
        (["run", "~nobody-of-that-name/model", "hi"], "is not there"),
        (["run", "/dev/null/model", "hi"], "is not there"),
        (["run", "/" + "x" * 300, "hi"], "File name too long"),
        (["run", "/no/\udcff\udcfe", "hi"], "is not there"),
        (["run", "/no\nsuch\nmodel", "hi"], "is not there"),
        (["run", "model.gguf", "hi"], "model.gguf is not there"),
        (["run", "tale-lama", "hi"], "org/name on the Hub, or what `penstock import` lists; tale-llama is bundled"),
        (["plan", "~nobody-of-that-name"], "is not there"),
        (["eval", "/tmp", "~nobody-of-that-name"], "cannot be read"),
        (["run", "/no", "hi", "--cache", ""], "--cache names no folder"),
    ],
)
def test_a_name_of_nothing(args: list[str], says: str, call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    refused(call(*args), says)
    assert not list(tmp_path.iterdir())


def test_a_user_without_a_home(capsys: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    refused(here(capsys, "plan", model, "--json"), "no home folder")


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_that_cannot_be_answered(call: Call, model: Path) -> None:
    refused(call("run", model, ""), "the prompt is empty", "BadRequest")
    error = refused(call("run", model, "x" * 257), "the prompt has 257 tokens, the context room for 256")
    assert "raise" not in error["message"]
    refused(call("run", model, "x" * 65, "--context", 64), "room for 64: raise --context")
    refused(call("run", model, "\udcff\udcfe"), "not valid Unicode")
    assert call("run", model, "x" * 256, "--ignore-eos").report["output_tokens"] == 1


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_prompt_on_stdin(locale: str, cache: Path, model: Path) -> None:
    env = {**os.environ, "LC_ALL": locale}
    args = ("run", model, "--json", "--cache", cache, "--max-tokens", 2, "--ignore-eos")
    refused(apart(*args, input=b"\xff\xfe", env=env), "not valid Unicode", "BadRequest")
    refused(apart(*args, input=b"", env=env), "the prompt is empty", "BadRequest")
    found = apart(*args, input="zwölf\0\n".encode(), env=env)
    assert found.report["prompt_tokens"] == len("zwölf\0".encode())


def test_no_streams_at_all(cache: Path, model: Path) -> None:
    """`penstock run MODEL <&- >&- 2>&-`, and a disk full behind stderr: nobody reads it, the work goes on."""
    line = f'"$0" -m penstock.cli run {model} --cache {cache} --max-tokens 2'
    shell = ["bash", "-c"]
    closed = subprocess.run([*shell, f"{line} --json <&-", sys.executable], cwd=ROOT, capture_output=True, text=True)
    refused(Outcome(closed.returncode, closed.stdout, closed.stderr), "the prompt is empty", "BadRequest")
    for streams in (">&-", "2>&-", ">&- 2>&-", "2>/dev/full"):
        assert subprocess.run([*shell, f"{line} hi {streams} <&-", sys.executable], cwd=ROOT).returncode == 0, streams


# --- signals and pipes -----------------------------------------------------------------------------------------------


def stopped(child: subprocess.Popen[bytes]) -> None:
    """130, also as a shell sees it: Python ends by the signal itself where it met it inside an `exec`, as
    dataclasses and named tuples do while a module is imported."""
    _, err = child.communicate(timeout=600)
    assert child.returncode in (130, -signal.SIGINT), err
    assert err.splitlines()[-1] == b"penstock: stopped" and b"Traceback" not in err


# The program, standing still when the file of its first shard is begun.
STANDS_PACKING = """
import sys, time
from pathlib import Path
from penstock.store.packing import Packing
write = Packing.write
def standing(self, dst, fill, *arguments, **named):
    def waiting(*which):
        if list(dst.parent.glob("*.partial/*.tmp")):
            print("begun", flush=True)
            time.sleep(600)
        return fill(*which)
    return write(self, dst, waiting, *arguments, **named)
Packing.write = standing
from penstock.cli.entry import main
sys.exit(main())
"""


def test_ctrl_c_while_packing(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before the first shard is whole nothing stays. (What is kept after it: test_pack.)"""
    large = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 4000}
    save_checkpoint(tmp_path / "source", large)
    script = tmp_path_factory.mktemp("script") / "standing"
    script.write_text(f"#!{sys.executable}\n{STANDS_PACKING}")
    script.chmod(0o755)
    child = start("pack", tmp_path / "source", tmp_path / "packed", "--weights", "int4", "--json", script=script)
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    child.send_signal(signal.SIGINT)
    stopped(child)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.3])
def test_ctrl_c_while_running(wait_s: float, cache: Path, model: Path, tmp_path: Path) -> None:
    """At any time after the first line: while it loads, reads the prompt, or answers, before its 200th pass."""
    flags = ("--resident", 0, "--ignore-eos", "--max-tokens", 250, "--cache", cache, "--json")
    child = start("run", model, "abc", *flags, "--batch", 40, script=standing(tmp_path, "passes == 200"))
    assert child.stderr is not None and child.stderr.readline().startswith(b"penstock: this model has no chat")
    time.sleep(wait_s)
    child.send_signal(signal.SIGINT)
    stopped(child)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("run {model} abc {flags} | head -c 3", 0),
        ("run {model} abc {flags} 2>&1 | head -c 3", 0),
        ("run {model} abc {flags} --json | true", 0),
        ("run {model} abc {flags} 2> >(true)", 0),
        ("plan {model} --cache {cache} | head -n 1", 0),
        # What failed has failed, whether or not somebody reads it.
        ("run /no/such abc {flags} 2>&1 | true", 2),
        ("run /no/such abc {flags} --json | true", 2),
        ("run {model} abc {flags} >/dev/full", 2),
    ],
)
def test_a_reader_that_has_seen_enough(line: str, code: int, cache: Path, model: Path) -> None:
    flags = f"--cache {cache} --max-tokens 30 --ignore-eos"
    text = '"$0" -m penstock.cli ' + line.format(model=model, flags=flags, cache=cache)
    script = ["bash", "-o", "pipefail", "-c", text, sys.executable]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    assert all(each.startswith("penstock: ") for each in done.stderr.splitlines())
    assert "fault of ours" not in done.stderr
