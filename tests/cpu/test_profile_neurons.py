"""`penstock profile` of models with ReLU: which neurons make most activations, and how alike two texts are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.spec.hottest import made_by, made_by_all, same_hottest
from penstock.store.packed import open_packed
from penstock.store.profile_file import FILE, read
from tests.cpu.commands import Call, here, refused
from tests.cpu.test_neurons import relu_model


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    """A packed model with ReLU."""
    return relu_model(tmp_path, "opt", "float32-neurons")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    for name, line in (("one", "Which neurons fire for these letters, and for these? "), ("other", "0123 4567; ")):
        (tmp_path / f"{name}.txt").write_text(line * 20)
    return tmp_path / "one.txt", tmp_path / "other.txt"


def test_what_the_hottest_make_is_told(call: Call, relu: Path, texts: tuple[Path, Path]) -> None:
    report = call("profile", relu, texts[0], "--json").report
    kept = read(relu / FILE, open_packed(relu).spec)
    names = ("hot_50", "hot_80", "hot_90", "hot_99")
    assert tuple(report[name] for name in names) == made_by_all(kept)
    for told, layer in zip(report["layers"], kept.neurons, strict=True):
        assert tuple(told[name] for name in names) == made_by(layer.counted())
        assert "same_hottest" not in told
    assert report["beside"] is None


def test_two_texts_are_compared(call: Call, relu: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    """With a profile that was there, with one in a file, and with a text that is read beside."""
    one, other = texts
    call("profile", relu, other)
    shutil.copy(relu / FILE, tmp_path / "other.json")
    before = read(relu / FILE, open_packed(relu).spec)
    replaced = call("profile", relu, one, "--json").report
    seen = read(relu / FILE, open_packed(relu).spec)
    assert seen.name == "one.txt"
    same = same_hottest(seen, before)
    assert tuple(layer["same_hottest"] for layer in replaced["layers"]) == same
    assert replaced["beside"]["name"] == "other.txt" and replaced["beside"]["tokens"] == before.tokens
    assert replaced["beside"]["same_hottest"] == pytest.approx(sum(same) / len(same))
    assert call("profile", relu, one).report["beside"] is None  # the same text again
    for beside in (other, tmp_path / "other.json"):
        again = call("profile", relu, one, "--beside", beside).report
        assert (again["beside"], again["layers"]) == (replaced["beside"], replaced["layers"])
    assert read(relu / FILE, open_packed(relu).spec) == seen


def test_the_table_has_layers_and_all(
    cache: Path, capsys: pytest.CaptureFixture[str], relu: Path, texts: tuple[Path, Path]
) -> None:
    done = here(capsys, "profile", "--cache", cache, relu, texts[0], "--beside", texts[1])
    assert done.code == 0, done
    lines = done.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split() == "layer fires 50% 80% 90% 99% same".split())
    rows = lines[head + 1 : head + 2 + len(open_packed(relu).spec.layers)]
    assert rows[-1].split()[0] == "all" and all(len(row.split()) == 7 for row in rows)
    assert len({len(row) for row in (lines[head], *rows)}) == 1
    assert "of other.txt too" in lines[-1]


def test_what_cannot_be_compared_is_refused(call: Call, relu: Path, model: Path, texts: tuple[Path, Path]) -> None:
    refused(call("profile", model, texts[0], "--below", "0.5", "--beside", texts[1]), "--beside compares")
    call("profile", relu, texts[0])
    profile = texts[0].with_name("of_another_model.json")
    profile.write_text((relu / FILE).read_text().replace('"layer": 0', '"layer": 1'))
    refused(call("profile", relu, texts[0], "--beside", profile), f"{profile.name} is the profile of another model")


def test_a_profile_is_known_however_its_json_is_laid_out(call: Call, relu: Path, texts: tuple[Path, Path]) -> None:
    call("profile", relu, texts[1])
    compact = texts[0].with_name("compact.json")
    compact.write_text(json.dumps(json.loads((relu / FILE).read_text()), separators=(",", ":")))
    told = call("profile", relu, texts[0], "--beside", compact).report["beside"]
    assert told == call("profile", relu, texts[0], "--beside", texts[1]).report["beside"]
