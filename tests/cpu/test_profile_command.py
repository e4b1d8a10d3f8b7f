"""`penstock profile` and `run --record`: what routers say is kept, and plans go by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.spec import answers
from penstock.spec.format import parse_format
from penstock.store.packed import open_packed
from penstock.store.profile_file import FILE
from penstock.store.synth import synth
from tests.cpu.commands import Call, here, refused
from tests.cpu.configs import TINY_CONFIGS

TEXT = "In the beginning there was a text, and the routers were asked about each of its letters. " * 8


@pytest.fixture
def routed(tmp_path: Path) -> Path:
    """A packed model with experts."""
    sizes = {"num_experts": 32, "moe_intermediate_size": 2048, "max_position_embeddings": 1024}
    config = {**json.loads(TINY_CONFIGS["qwen2_moe"]), **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return synth(tmp_path / "config.json", tmp_path / "packed", parse_format("int4"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_a_profile_is_kept_and_plans_go_by_it(call: Call, routed: Path, text: Path) -> None:
    report = call("profile", routed, text, "--json").report
    rates = report["hit_rates"]
    assert report["file"] == str(routed / FILE)
    assert rates[0] == 0 and rates == sorted(rates) and rates[-1] <= 1
    assert report["tokens"] == len(TEXT.encode())
    whole = call("plan", routed, "--context", "64").report["predicted"]["peak_host_bytes"]
    planned = call("plan", routed, "--context", "64", "--host-memory", f"{(whole >> 20) - 5}MiB").report
    assert planned["plan"]["caches"]
    assert planned["predicted"]["experts"]["source"].startswith(
        f"by a profile of {report['tokens']} tokens of text.txt"
    )
    again = call("profile", routed, text, "--tokens", "40", "--json").report
    assert again["tokens"] == 40 and again["text_sha256"] == report["text_sha256"]


def test_the_table_names_sizes_and_rates(
    cache: Path, capsys: pytest.CaptureFixture[str], routed: Path, text: Path
) -> None:
    done = here(capsys, "profile", "--cache", cache, routed, text)
    assert done.code == 0, done
    assert "of so many of" in done.out and "%" in done.out
    assert FILE in done.err


def test_a_dense_model_has_nothing_to_count(call: Call, model: Path, text: Path) -> None:
    refused(call("profile", model, text), "no experts")


def test_a_damaged_profile_is_one_line(call: Call, routed: Path, text: Path) -> None:
    call("profile", routed, text, "--tokens", "64")
    file = routed / FILE
    kept = json.loads(file.read_text())
    kept["layers"][0]["trace"][0] = [0, 10**9]
    file.write_text(json.dumps(kept))
    refused(call("plan", routed), "another model, or damaged")
    file.write_text("{")
    refused(call("plan", routed), FILE)


def test_an_empty_text_is_refused(call: Call, routed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(call("profile", routed, tmp_path / "empty.txt"), "no tokens")


def test_what_a_run_recorded_is_replayed(call: Call, routed: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    run = call("run", routed, "abc", "--max-tokens", "5", "--ignore-eos", "--record", file)
    assert run.code == 0, run
    kept = answers.loads(file.read_text(), "answers")
    spec = open_packed(routed).spec
    kept.check(spec, "answers")
    assert [len(tokens) for tokens in kept.layers] == [0 if layer.routed is None else 3 + 4 for layer in spec.layers]
    whole = call("plan", routed, "--context", "64").report["predicted"]["peak_host_bytes"]
    planned = call(
        "plan", routed, "--context", "64", "--host-memory", f"{(whole >> 20) - 5}MiB", "--answers", file
    ).report
    assert planned["predicted"]["experts"]["source"] == f"as recorded in {file}"


def test_a_dense_model_has_no_routers_to_record(call: Call, model: Path, tmp_path: Path) -> None:
    refused(call("run", model, "abc", "--record", tmp_path / "answers.json"), "what routers say")
    assert not (tmp_path / "answers.json").exists()


def test_records_replace_only_records(call: Call, routed: Path, text: Path) -> None:
    refused(call("run", routed, "abc", "--record", text), "something else than a run's answers")
    assert text.read_text() == TEXT


@pytest.mark.parametrize(
    ("layers", "says"), [([], "layers"), ([[], []], "nobody asked"), ([[[0, 1, 99]], []], "another model, or damaged")]
)
def test_answers_of_another_model_are_refused(
    call: Call, routed: Path, tmp_path: Path, layers: list[object], says: str
) -> None:
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"schema": "penstock.answers/1", "model": "other", "layers": layers}))
    refused(call("plan", routed, "--answers", file), says)
