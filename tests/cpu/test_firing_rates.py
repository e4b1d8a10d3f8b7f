"""Random ReLU models whose neurons fire at given rates: they do, in the model as it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.tale_sparsity import live_neurons
from penstock.errors import BadRequest, BrokenModel, DoesNotFit
from penstock.models import spec_from_config
from penstock.runtime import host
from penstock.serve import firing_rates
from penstock.serve.firing_rates import FiringRates, find_shifts, parse_rates, together
from penstock.spec.format import FLOAT32, parse_format
from penstock.spec.model import ModelSpec
from penstock.store.packed import Packed, open_packed
from penstock.store.synth import synth
from tests.cpu.checkpoints import EXPERTS, LLAMA
from tests.cpu.commands import here, refused

WIDTH = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 300}
OPT = {
    **WIDTH, "model_type": "opt", "ffn_dim": 492, "word_embed_proj_dim": 256, "max_position_embeddings": 512,
    "torch_dtype": "float16",
}  # fmt: skip
REGLU = {**LLAMA, **WIDTH, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 492, "hidden_act": "relu"}
SQUARED = {
    **REGLU, "model_type": "nemotron", "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
}  # fmt: skip
CONFIGS = {"opt": OPT, "reglu": REGLU, "squared": SQUARED}
RATES = "zipf:1.03"


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, "test")


def made(folder: Path, config: dict[str, Any], weights: str) -> tuple[Packed, FiringRates]:
    (folder / "config.json").write_text(json.dumps(config))
    rates = parse_rates(RATES, spec_of(config))
    shifts, _ = find_shifts(spec_of(config), parse_format(weights), 0, rates)
    return open_packed(synth(folder, folder / "packed", parse_format(weights), shifts=shifts)), rates


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("opt", "int4"), ("reglu", "int4"), ("reglu", "bfloat16"), ("squared", "int8"), ("opt", "int4-records"),
        ("reglu", "int4-records"), ("squared", "bfloat16-records"),
    ],
)  # fmt: skip
def test_neurons_of_the_model_fire_at_their_rates(tmp_path: Path, name: str, weights: str) -> None:
    """On other tokens than those that the shifts were found with."""
    packed, rates = made(tmp_path, CONFIGS[name], weights)
    tokens = np.random.default_rng(77).integers(0, 256, (4, 400), np.int32)
    for layer, fired in enumerate(live_neurons(packed, tokens)):
        wanted, shares = rates.of(layer, 0), fired.mean(0)
        assert shares.mean() == pytest.approx(0.03, rel=0.2), layer
        hottest = np.argsort(-wanted)
        quarter = hottest[: int(0.26 * len(hottest))]
        assert fired[:, quarter].sum() / fired.sum() == pytest.approx(0.8, abs=0.06), layer
        # Neurons that should fire a tenth of the time or more do so; and they are not the first of the layer.
        often = wanted > 0.1
        assert np.corrcoef(wanted[often], shares[often])[0, 1] > 0.9
        assert hottest[:8].max() > 64
        by_window = fired.reshape(4, 400, -1)
        alike = (by_window[:, 1:] & by_window[:, :-1]).sum() / by_window[:, 1:].sum()
        assert 0.28 < alike < 0.6


def test_what_is_told_was_measured_and_repeats_itself(tmp_path: Path) -> None:
    spec, fmt = spec_of(OPT), parse_format("int4")
    rates = parse_rates(RATES, spec)
    (shifts, fired), (again, told) = (find_shifts(spec, fmt, 3, rates) for _ in range(2))
    assert fired == told and all((shifts[i] == again[i]).all() for i in range(3))
    mean = together(fired)
    assert mean.active == pytest.approx(0.03, rel=0.15) and mean.hot == pytest.approx(0.26, abs=0.01)
    assert mean.made == pytest.approx(0.8, abs=0.06) and 0.3 < mean.alike < 0.6


def test_rates_from_a_file(tmp_path: Path) -> None:
    spec, file = spec_of(OPT), tmp_path / "rates"
    of_layer = np.linspace(0, 0.5, 492)
    file.write_text("\n".join(map(str, of_layer)) + "\n")
    for layer in range(3):
        rates = parse_rates(str(file), spec).of(layer, 0)
        assert np.sort(rates) == pytest.approx(of_layer.clip(firing_rates.LEAST, 1)) and not (np.diff(rates) > 0).all()
    file.write_text("\n".join(["0.25"] * 492 + ["0.5"] * 492 + ["0.75"] * 492))
    rates = parse_rates(str(file), spec)
    assert [float(rates.of(i, 0).mean()) for i in range(3)] == [0.25, 0.5, 0.75]
    _, fired = find_shifts(spec, FLOAT32, 0, rates)
    assert [layer.active for layer in fired] == pytest.approx([0.25, 0.5, 0.75], abs=0.02)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("zipf:", "after zipf: comes the steepness, a number from 0 to 4"),
        ("zipf:nan", "after zipf:"),
        ("zipf:-1", "after zipf:"),
        ("zipf:9", "after zipf:"),
        ("nowhere", "is neither zipf:S nor a file"),
    ],
)
def test_rates_that_make_no_sense(said: str, error: str) -> None:
    with pytest.raises(BadRequest, match=error):
        parse_rates(said, spec_of(OPT))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0.5\n" * 491, "has 491 rates; this model needs 492 of a layer or 1476 of all layers"),
        ("", "has 0 rates"),
        ("0.5\n" * 491 + "1.5", "rate 492 is '1.5', not a number from 0 to 1"),
        ("0.5\n" * 491 + "nan", "rate 492 is 'nan'"),
        ("0.5\n" * 491 + "x" * 4000, "rate 492 is 'xxxxxxxxxxxxxxxxxxxx'"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "rates").write_text(text)
    with pytest.raises(BadRequest, match=error):
        parse_rates(str(tmp_path / "rates"), spec_of(OPT))


def test_a_file_of_bytes_and_one_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rates").write_bytes(b"\xff\xfe\n" * 10)
    with pytest.raises(BrokenModel, match="not UTF-8"):
        parse_rates(str(tmp_path / "rates"), spec_of(OPT))
    (tmp_path / "rates").write_text("0.5\n" * 492)
    monkeypatch.setattr(firing_rates, "_MAX_FILE_BYTES", 100)
    with pytest.raises(BrokenModel):
        parse_rates(str(tmp_path / "rates"), spec_of(OPT))


@pytest.mark.parametrize("config", [LLAMA, EXPERTS["qwen2_moe"]], ids=["silu", "experts"])
def test_models_without_zeros_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="of relu or relu2"):
        parse_rates(RATES, spec_of(config))


def test_a_layer_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 20)
    with pytest.raises(DoesNotFit, match=r"takes .*MiB, a layer of the model by itself; 1.00 MiB is free"):
        find_shifts(spec_of(OPT), FLOAT32, 0, parse_rates(RATES, spec_of(OPT)))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REGLU))
    flags = ("--weights", "int4", "--activation-rate", RATES)
    report = here(capsys, "synth", tmp_path, tmp_path / "made", *flags, "--json").report
    assert report["fires"]["active"] == pytest.approx(0.03, rel=0.2)
    refused(here(capsys, "synth", tmp_path, tmp_path / "other", *flags[:-1], "no-file", "--json"), "nor a file")
    assert not (tmp_path / "other").exists()
