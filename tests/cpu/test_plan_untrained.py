"""What `plan` says of predictors is what `run` would do: those that are not there are to be trained, also of a
checkpoint whose packed copy is in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.serve.planning import plan
from penstock.spec.predictors import TRAIN
from tests.cpu.checkpoints import save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, Call, here, refused
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_predict import give_predictors

ASKS = ("--sparsity", "predict", "--context", "64")


def test_untrained_predictors_are_said_as_run_says(
    call: Call, cache: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = relu_model(tmp_path, "opt", "float32-records")
    refused(call("run", folder, "abc", *ASKS), TRAIN)
    report = call("plan", folder, *ASKS).report
    assert report["cannot_run"].endswith(TRAIN)
    assert any(reason.endswith(f"this does not run: {TRAIN}") for reason in report["reasons"])
    done = here(capsys, "plan", "--cache", cache, folder, *ASKS)
    assert f"does not run yet: it has no predictors yet: {TRAIN}" in " ".join(done.out.split())
    assert not call("plan", folder, "--context", "64").report["cannot_run"]
    give_predictors(folder, -0.3)
    report = call("plan", folder, *ASKS).report
    assert not report["cannot_run"] and not any(TRAIN in reason for reason in report["reasons"])


def test_a_plan_of_a_checkpoint_goes_by_its_copy(call: Call, cache: Path, tmp_path: Path) -> None:
    """As `run` does: by the profile and the predictors that are kept beside the copy in the cache."""
    source, text = tmp_path / "hf", tmp_path / "text.txt"
    save_checkpoint(source, json.loads(TINY_CONFIGS["opt"]))
    save_tokenizer(source, json.loads(TINY_CONFIGS["opt"]))
    text.write_text("Once upon a time there was a text. " * 10)
    weights = ("--weights", "float32-records")
    assert call("plan", source, *weights, *ASKS).report["cannot_run"]
    profiled = call("profile", source, text, *weights)
    assert profiled.code == 0, profiled
    told = f"by a profile of {profiled.report['tokens']} tokens of text.txt"
    assert any(told in reason for reason in call("plan", source, *weights, "--context", "64").report["reasons"])
    assert not any(told in reason for reason in call("plan", source, "--context", "64").report["reasons"])
    copy = Path(profiled.report["file"]).parent
    assert copy.is_relative_to(cache)
    give_predictors(copy, -0.3)
    report = call("plan", source, *weights, *ASKS).report
    assert not report["cannot_run"] and any("tokens of a text" in reason for reason in report["reasons"])
    solved = plan(source, machine=MACHINE, weights=weights[1], cache=cache, sparsity="predict", context=64)
    assert any("tokens of a text" in reason for reason in solved.reasons)
    assert call("run", source, "abc", *weights, *ASKS, "--max-tokens", "2").code == 0
    (source / "config.json").touch()  # its files are others now
    assert call("plan", source, *weights, *ASKS).report["cannot_run"]
