"""Commands from end to end, with a small model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cpu.commands import Call, standing, start
from tests.cpu.test_cli import STORIES, needs_stories, penstock
from tests.cpu.traps import Trap


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with this machine's own figures. The probe imports nothing from the folder that it is started in."""
    folder = str(tmp_path_factory.mktemp("cache"))
    done = Trap(tmp_path_factory.mktemp("here") / "folder").run("probe", "--cache", folder)
    assert done.returncode == 0, done.stderr
    return folder


@needs_stories
def test_run_streams_and_reports(cache):
    args = ["run", str(STORIES), "--cache", cache, "--max-tokens", "12", "--threads", "1"]
    shown = penstock(*args, "Once upon a time")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(", there was")
    assert "tok/s (promised" in shown.stderr.splitlines()[-1]
    told = penstock(*args, "--json", stdin="Once upon a time\n")
    report = json.loads(told.stdout.splitlines()[-1])
    assert report["text"] == shown.stdout.removesuffix("\n")
    assert (report["output_tokens"], report["finish_reason"], report["prompt_tokens"]) == (12, "length", 5)
    twice = json.loads(penstock(*args, "Once upon a time", "--json", "--batch", "2").stdout.splitlines()[-1])
    assert (twice["batch"], twice["token_ids"]) == (2, report["token_ids"])


@needs_stories
def test_ctrl_c_while_it_streams(cache, tmp_path):
    args = ["run", STORIES, "Once", "--cache", cache, "--max-tokens", "500", "--ignore-eos"]
    child = start(*args, script=standing(tmp_path, "passes == 200"))
    assert child.stdout.read(5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=600)
    assert (child.returncode, err.splitlines()[-1]) == (130, b"penstock: stopped")


@needs_stories
def test_stop_strings_and_seeds(cache):
    args = ["run", str(STORIES), "Once upon a time", "--cache", cache, "--max-tokens", "12", "--json"]
    stopped = json.loads(penstock(*args, "--stop", "was").stdout.splitlines()[-1])
    assert (stopped["text"], stopped["finish_reason"]) == (", there ", "stop")
    drawn = [json.loads(penstock(*args, "--temperature", "1", "--seed", s).stdout)["text"] for s in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


@needs_stories
def test_pack_verify_and_eval(cache, tmp_path):
    packed = tmp_path / "packed"
    done = penstock("pack", str(STORIES), str(packed), "--weights", "int8", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["weights"] == "int8" and report["verified"] and report["bytes"] > 0
    shard = next(packed.glob("*.safetensors"))
    (tmp_path / "text").write_text("Once upon a time there was a dog. He was happy.\n" * 3)
    args = ["eval", str(packed), str(tmp_path / "text"), "--cache", cache, "--json"]
    scored = json.loads(penstock(*args, "--against", str(STORIES)).stdout.splitlines()[-1])
    assert 1 < scored["perplexity"] < 512 and scored["tokens"] > 30 and 0 <= scored["kl"] < 0.1
    content = bytearray(shard.read_bytes())
    content[-100] ^= 0xFF
    shard.write_bytes(content)
    broken = penstock("pack", "--verify", str(packed), "--json")
    assert broken.returncode == 2
    assert json.loads(broken.stdout)["error"]["type"] == "DamagedModel"


@needs_stories
def test_a_plan_is_made_on_another_machine_and_run(cache, tmp_path):
    pytest.importorskip("penstock.planner.explain")
    probed = penstock("probe", "--cache", cache, "--json")
    assert probed.returncode == 0, probed.stderr
    (tmp_path / "machine.json").write_text(probed.stdout.splitlines()[-1])
    args = ["plan", str(STORIES), "--machine", str(tmp_path / "machine.json"), "--resident", "300KiB"]
    planned = penstock(*args, "--json")
    assert planned.returncode == 0, planned.stderr
    data = json.loads(planned.stdout)
    assert {"peak_host_bytes", "peak_device_bytes", "bound_by", "ttft_s"} <= set(data["predicted"])
    assert penstock(*args).stdout.strip()
    (tmp_path / "plan.json").write_text(planned.stdout)
    base = ["run", str(STORIES), "Once upon a time", "--cache", cache, "--max-tokens", "8", "--json"]
    streamed = json.loads(penstock(*base, "--plan", str(tmp_path / "plan.json")).stdout.splitlines()[-1])
    assert streamed["disk_bytes_per_token"] > 0
    assert streamed["token_ids"] == json.loads(penstock(*base).stdout.splitlines()[-1])["token_ids"]


@needs_stories
def test_synth(cache, tmp_path):
    done = penstock("synth", str(STORIES / "config.json"), str(tmp_path / "made"), "--weights", "int4", "--json")
    assert done.returncode == 0, done.stderr
    ran = penstock(
        "run", str(tmp_path / "made"), "abc", "--cache", cache, "--max-tokens", "4", "--ignore-eos", "--json"
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1])["output_tokens"] == 4


def test_bench_ops_times_every_op(call: Call, model: Path) -> None:
    done = call("bench", "ops", model, "--rows", "1,3", "--context", "64")
    assert done.code == 0
    measured = done.report["ops"]
    assert {(m["op"], m["rows"]) for m in measured} == {
        (op, rows) for op in "gather embed norm qkv attend out ffn merge head".split() for rows in (1, 3)
    }
    assert all(m["seconds"] > 0 and m["share_of_bound"] >= 0 for m in measured)
