"""`penstock plan`: the table, the JSON object, the picture."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.planner.picture import BEGINS
from penstock.spec.machine import dumps
from tests.cpu.commands import Call, apart, here, refused
from tests.pure.machine import MACHINE
from tests.pure.real_models import LLAMA3_ROPE, config


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    file = tmp_path / "machine.json"
    file.write_text(dumps(MACHINE))
    return file


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of an 80-layer model."""
    folder = tmp_path_factory.mktemp("large")
    keys = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5}
    data = config("llama", 8192, 80, 64, 28672, 128256, rope_scaling=LLAMA3_ROPE, torch_dtype="bfloat16", **keys)
    (folder / "config.json").write_text(json.dumps({**data, "tie_word_embeddings": False}))
    return folder


def test_the_collector_is_on_again(call: Call, model: Path) -> None:
    assert gc.isenabled()
    assert call("plan", model).code == 0 and gc.isenabled()
    assert call("plan", model, "--host-memory", "1MiB").code != 0 and gc.isenabled()


def test_json(call: Call, model: Path) -> None:
    done = call("plan", model, "--resident", "300KiB")
    assert done.code == 0, done
    report = done.report
    more = {"one_more_gib", "one_more_device_gib", "faster_disk", "faster_link", "other_formats", "commands"}
    chosen = {"plan", "predicted", "strategy", "cannot_run", "not_yet", "reasons", "rates"}
    assert {*chosen, "limits", "band", "compared", *more} == set(report)
    band, p = report["band"], report["predicted"]
    assert (band["decode"], band["ttft"], band["runs"], band["ttft_runs"]) == (0.25, 0.25, 0, 0)
    assert band["assumed"] == {"decode": True, "ttft": True}
    for name in ("decode_tokens_per_s", "ttft_s"):
        assert band[name] == pytest.approx([p[name] / 1.25, p[name] * 1.25])
    assert report["limits"]["host"]["used_bytes"] == report["predicted"]["peak_host_bytes"]
    assert report["limits"]["host"]["limit_bytes"] > report["limits"]["host"]["used_bytes"]
    assert set(report["other_formats"]) == {"int8", "int4"}
    assert report["faster_link"] is None and report["cannot_run"] == ""
    assert report["faster_disk"]["decode_change"] >= -0.01  # of 300 KiB less than all the tiny model's weights
    for then in (report["one_more_gib"], report["faster_disk"], *report["other_formats"].values()):
        assert set(then) == {"decode_tokens_per_s", "ttft_s", "decode_change"}
    assert report["one_more_gib"]["decode_change"] == pytest.approx(0, abs=1e-3)  # --resident is what binds


def test_all_that_was_compared(machine: Path, model: Path, capsys: pytest.CaptureFixture[str], call: Call) -> None:
    """Without a flag in JSON, with one in the text."""
    flags = ("plan", model, "--machine", machine, "--resident", "300KiB")
    compared = call(*flags).report["compared"]
    fields = {"strategy", "decode_tokens_per_s", "ttft_s", "bound_by", "lane_share", "tier_bytes", "weights_bytes"}
    assert compared and all(set(each) == {*fields, "also", "cannot_run", "lossy", "reasons"} for each in compared)
    assert compared[0]["strategy"] == call(*flags).report["strategy"]
    shown, silent = (here(capsys, *flags, *more).out for more in (("--compare",), ()))
    assert shown.startswith(silent) and "compared, the chosen first" in shown
    assert len(shown.splitlines()) >= len(silent.splitlines()) + 2 + len(compared)


def test_a_model_that_can_only_be_planned(machine: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("plan", "phi-3.5-moe", "--machine", machine, "--weights", "int4")
    told = "not run by this version: models of type phimoe can only be planned (there are no kernels for"
    assert told in here(capsys, *flags).out
    for command in (("run", "phi-3.5-moe", "a", "--json"), ("synth", "phi-3.5-moe", tmp_path / "new", "--json")):
        refused(here(capsys, *command), "model_type phimoe can be planned and does not run yet", "UnsupportedModel")
    assert not (tmp_path / "new").exists()


def test_json_of_a_resident_model(call: Call, model: Path) -> None:
    assert call("plan", model).report["one_more_gib"] is None


def test_the_table_and_a_picture(
    machine: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.svg"
    file.write_text(f"{BEGINS}/>")
    done = here(capsys, "plan", model, "--machine", machine, "--svg", file, "--host-memory", "12GiB")
    assert (done.code, done.err) == (0, "")
    assert " of 12.0 GiB" in done.out and "error band" not in done.out
    root = ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg") and any(model.name in (node.text or "") for node in root.iter())
    assert list(tmp_path.glob("plan.svg*")) == [file]


def test_a_picture_beside_json(call: Call, model: Path, tmp_path: Path) -> None:
    done = call("plan", model, "--svg", tmp_path / "a b.svg")
    assert done.code == 0 and done.report["predicted"]
    ElementTree.parse(tmp_path / "a b.svg")


def test_a_picture_through_a_link(call: Call, model: Path, tmp_path: Path) -> None:
    """The file that it points to is written, the link stays."""
    (tmp_path / "link.svg").symlink_to(tmp_path / "real.svg")
    assert call("plan", model, "--svg", tmp_path / "link.svg").code == 0
    assert (tmp_path / "link.svg").is_symlink()
    ElementTree.parse(tmp_path / "real.svg")


def test_pictures_that_cannot_be_written(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name, says in [
        (tmp_path / "folder", "is not a file"),
        (tmp_path / "none" / "x.svg", "No such file"),
        (tmp_path / "file" / "x.svg", "Not a directory"),
        (tmp_path / "loop", "cannot be written"),
        (tmp_path / ("n" * 300), "too long"),
        ("", "is not a file"),
        ("/dev/null", "is not a file"),
    ]:
        refused(call("plan", model, "--svg", name), says, "BadRequest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "loop"]


def test_the_band_of_a_machine_that_is_not_here(call: Call, model: Path, machine: Path) -> None:
    """What was measured here says nothing of it."""
    band = call("plan", model, "--machine", machine).report["band"]
    assert (band["decode"], band["ttft"], band["runs"], band["assumed"]["decode"]) == (0.25, 0.25, 0, True)


def test_a_large_model(large: Path, machine: Path) -> None:
    """How long that takes, `bench.startup` measures."""
    done = apart("plan", large, "--machine", machine, "--weights", "int4")
    assert done.code == 0, done
    assert "bound by the disk" in done.out and "faster: " in done.out
