"""Bundled shapes: each loads, has the published number of weights, and says where it is from; names that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.errors import BadRequest, UnsupportedModel
from penstock.hubs.where import Where
from penstock.serve import named, planning, shapes, source
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.parts import parts
from penstock.store.packed import read_config

# In thousands of millions, as published (model cards, papers).
PUBLISHED = {
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.0,
    "llama-3.2-1b": 1.23,
    "llama-3.2-3b": 3.21,
    "mistral-7b-v0.3": 7.25,
    "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6,
    "opt-1.3b": 1.316,
    "opt-2.7b": 2.65,
    "opt-6.7b": 6.66,
    "opt-13b": 12.85,
    "opt-30b": 30.0,
    "opt-66b": 65.7,
    "opt-175b": 175.0,
    "phi-3-mini": 3.82,
    "phi-4": 14.7,
    "qwen1.5-4b": 3.95,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.8,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "relullama-7b": 6.74,
    "relullama-13b": 13.0,
    "relullama-70b": 69.0,
    "yi-1.5-34b": 34.4,
    "glm-4.5-air": 106.0,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 141.0,
    "olmoe-1b-7b": 6.92,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "qwen2-57b-a14b": 57.4,
    "phi-3.5-moe": 41.9,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}
SOURCES = (Path(penstock.__file__).parent / "shapes" / "SOURCES.md").read_text(encoding="utf-8")
ROWS = {cells[1]: cells for line in SOURCES.splitlines() if (cells := [c.strip() for c in line.split("|")])[2:]}


def test_the_table_is_complete() -> None:
    assert sorted(PUBLISHED) == shapes.names()
    assert set(ROWS) - {"name", "---"} == set(PUBLISHED)


@pytest.mark.parametrize("name", shapes.names())
def test_a_shape_has_the_published_size(name: str) -> None:
    path = shapes.find(name)
    assert path is not None
    _, spec = read_config(path, to_plan=True)
    weights = sum(part.weights_of(0, part.granules) for part in parts(spec, Format("bfloat16")))
    assert weights == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)
    assert ROWS[name][2] == f"{weights:,}"
    assert ROWS[name][3]
    assert spec.dtype != "float32"  # nobody stores them so wide


def test_a_name_stands_for_a_config() -> None:
    spec, fmt = planning.describe(Path("llama-3.2-1b"))
    assert (len(spec.layers), fmt.name) == (16, "bfloat16")


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.2-1b").mkdir()
    with pytest.raises(BadRequest, match="holds no config"):
        planning.describe(Path("llama-3.2-1b"))
    with pytest.raises(BadRequest, match="holds no config"):
        source.resolve("llama-3.2-1b", weights=None, cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama-3.1-7b", "did you mean .*llama-3.1-70b"),
        ("Qwen3-8B", "did you mean qwen3-8b"),
        ("phi-3-mini.json", "did you mean phi-3-mini"),
        ("tale-lama", r"did you mean tale-llama\?"),
        ("SOURCES", "there are gemma-2-27b, "),
        ("elephant", "there are gemma-2-27b, "),
    ],
)
def test_an_unknown_name_is_told_what_is_near(name: str, says: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is not there, nor is it a bundled shape: {says}"):
        planning.describe(Path(name))


@pytest.mark.parametrize("path", ["no/llama-3.2-1b", "/llama-3.2-1b", "../shapes/llama-3.2-1b"])
def test_a_path_is_no_name(path: str) -> None:
    with pytest.raises(BadRequest, match=f"^{path} is not there$"):
        planning.describe(Path(path))


def test_a_shape_has_no_weights_to_run(tmp_path: Path) -> None:
    with pytest.raises(
        BadRequest, match=r"without weights: `penstock plan qwen3-0\.6b` .* `penstock synth "
    ) as refused:
        source.resolve("qwen3-0.6b", weights=None, cache=tmp_path)
    assert "\n" not in refused.value.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["phi-3.5-moe"])
def test_a_shape_that_can_only_be_planned(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"can be planned and does not run yet: there are no kernels") as refused:
        source.resolve(name, weights=None, cache=tmp_path)
    assert "\n" not in refused.value.message
    with pytest.raises(UnsupportedModel, match="does not run yet"):
        planning.describe(Path(name))
    spec, _ = planning.describe(Path(name), to_plan=True)
    assert spec.cannot_run


def test_asks_of_shapes_are_within_their_positions() -> None:
    """So that every shape can be planned as `penstock plan` asks by default."""
    for name in shapes.names():
        spec, _ = planning.describe(Path(name), to_plan=True)
        assert spec.max_positions >= Ask().prompt_tokens + Ask().output_tokens


def test_the_bundled_model_has_a_name_but_a_folder_here_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named.locate("tale-llama", Where()).path == shapes.MODEL
    assert planning.describe(Path("tale-llama")) == planning.describe(shapes.MODEL)
    (tmp_path / "tale-llama").mkdir()
    assert named.locate("tale-llama", Where()).path == Path("tale-llama")
