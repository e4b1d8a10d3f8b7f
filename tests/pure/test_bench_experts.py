"""Turns of bench.experts that are kept in a file: which count, what they give together, and what is left to measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import experts, rounds
from bench.budgets import weights_bytes
from bench.experts_engines import Engines
from bench.experts_rounds import COLD_TOKENS, Part, Tokens, budget, foretold_cold
from bench.rounds import Rounds
from penstock.planner.predict import COLD_PASSES

ABOUT = {"bench": "experts", "tokens": {"4.9": [16, 16]}}


class NoEngines:
    """Says how large budgets are, and fails where a model would be written or the machine probed."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        self.folder, self.config, self.name = folder, config, "tiny"

    def limit(self, gb: str) -> int:
        return round(float(gb) * 1e9)

    def make(self, table: str, beside: bool) -> None:
        raise AssertionError(f"models of {table} are not asked for")

    def ready(self) -> None:
        raise AssertionError("nobody asked for a probe")


def part(beside: bool = True, table: str = "uniform") -> Part:
    return budget(NoEngines(Path(), None), "4.9", table, Tokens(16, 16), beside)  # type: ignore[arg-type]


def kept(ours: list[float], peers: list[float], name: str = "4.9 uniform") -> Rounds:
    found = Rounds(None, ABOUT)
    for value in ours:
        found.measure(f"{name} ours", lambda value=value: {"tokens_per_s": value})  # type: ignore[misc]
    for value in peers:
        found.measure(f"{name} peer", lambda value=value: {"llamacpp_tokens_per_s": value})  # type: ignore[misc]
    return found


@pytest.mark.parametrize("beside", [True, False])
def test_a_budget_without_its_peer_says_so(beside: bool) -> None:
    figures, missing = experts.found(kept([1.0, 3.0], []), "4.9 uniform", part(beside))
    assert figures is not None and missing == ["4.9 uniform peer"]
    assert figures["vs_llamacpp"] is None and figures["tokens_per_s"] == 2.0


def test_turns_of_ours_count_where_the_peer_has_fewer() -> None:
    figures, missing = experts.found(kept([4.0, 2.0, 6.0], [2.0]), "4.9 uniform", part())
    assert figures is not None and missing == ["4.9 uniform peer"]
    assert figures["tokens_per_s"] == 4.0 and len(figures["by_round"]) == 3
    assert figures["vs_llamacpp"] == 2.0 and figures["ranges"]["vs_llamacpp"]["max"] == 2.0


def test_the_first_tokens_are_foretold_with_the_first() -> None:
    """It finds its caches empty, and is a prompt of one token."""
    facts = {"predicted_ttft_s": 5.0, "predicted_cold_s": float(COLD_PASSES)}
    assert foretold_cold(facts) == COLD_TOKENS / (5.0 + COLD_TOKENS - 1)
    assert foretold_cold({"predicted_ttft_s": 5.0, "predicted_cold_s": None}) is None


def test_a_whole_budget_misses_nothing_and_one_without_ours_is_missing() -> None:
    figures, missing = experts.found(kept([4.0, 2.0], [2.0, 2.0]), "4.9 uniform", part())
    assert figures is not None and figures["vs_llamacpp"] == 1.5 and not missing
    assert experts.found(kept([], [2.0]), "4.9 uniform", part()) == (None, ["4.9 uniform"])


def test_injected_answers_have_no_peer_that_could_be_missing() -> None:
    figures, missing = experts.found(kept([4.0], [], "4.9 local"), "4.9 local", part(table="local"))
    assert figures is not None and figures["vs_llamacpp"] is None and not missing


def test_what_is_left_comes_in_turns() -> None:
    assert experts.left(kept([], []), "4.9 uniform", part(), 2, ()) == [
        (0, "ours"), (0, "peer"), (1, "peer"), (1, "ours"),
    ]  # fmt: skip
    assert experts.left(kept([1.0, 1.0], [1.0]), "4.9 uniform", part(), 2, ()) == [(1, "peer")]
    assert experts.left(kept([1.0], []), "4.9 uniform", part(), 1, ("ours",)) == []


def test_nothing_left_writes_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, rows = tmp_path / "config.json", tmp_path / "rows"
    config.write_text("{}")
    about = experts.about_of(NoEngines(tmp_path, config), None)  # type: ignore[arg-type]
    Rounds(rows, about).measure("4.9 uniform ours", lambda: {"tokens_per_s": 3.0})
    monkeypatch.setattr(experts, "Engines", NoEngines)
    flags = ["--config", str(config), "--folder", str(tmp_path), "--rows", str(rows), "--only", "4.9", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["experts", *flags, "--tables", "uniform", "--turns", "ours", "--resume"])
    experts.main()
    line = json.loads(capsys.readouterr().out)
    assert line["4.9"]["tokens_per_s"] == 3.0 and line["4.9"]["vs_llamacpp"] is None and line["builds"] == 1
    assert "4.9 uniform peer" in line["missing"] and "4.9 skewed" in line["missing"]
    monkeypatch.setattr("sys.argv", ["experts", *flags, "--tables", "skewed", "--turns", "ours", "--resume"])
    with pytest.raises(SystemExit, match=r"failed: 4\.9 skewed"):
        experts.main()
    line = json.loads(capsys.readouterr().out)
    assert "models of skewed" in line["failed"]["4.9 skewed"] and line["4.9"]["tokens_per_s"] == 3.0


def test_turns_of_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows"
    Rounds(file, ABOUT).measure("4.9 uniform ours", dict)
    assert len(Rounds(file, ABOUT).turns("4.9 uniform ours")) == 1
    with pytest.raises(SystemExit, match="not those of"):
        Rounds(file, ABOUT | {"tokens": {"4.9": [64, 32]}})
    monkeypatch.setattr(rounds, "build", lambda: 1)
    with pytest.raises(SystemExit, match="not those of"):
        Rounds(file, ABOUT)


def test_what_turns_are_about_follows_config_and_tokens(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    found: list[Any] = []
    for folder, text in ((one, "{}"), (other, '{"layers": 2}')):
        (folder / "config.json").write_text(text)
        found.append(experts.about_of(NoEngines(folder, folder / "config.json"), None))  # type: ignore[arg-type]
    assert found[0] != found[1]  # of one name
    engines: Any = NoEngines(one, one / "config.json")
    assert experts.about_of(engines, Tokens(2, 2)) != found[0] == experts.about_of(engines, None)
    assert json.loads(json.dumps(found[0])) == found[0]


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    first = Rounds(file, ABOUT)
    first.measure("a", lambda: {"nth": 1})
    first.measure("a", lambda: {"nth": 2})
    file.write_text(file.read_text()[:-9])
    second = Rounds(file, ABOUT)
    assert second.turns("a") == [{"nth": 1}]
    second.measure("a", lambda: {"nth": 3})
    assert Rounds(file, ABOUT).turns("a") == [{"nth": 1}, {"nth": 3}]
    file.write_text(file.read_text()[:-1])  # whole but for the end of the line
    third = Rounds(file, ABOUT)
    third.measure("a", lambda: {"nth": 4})
    assert Rounds(file, ABOUT).turns("a") == [{"nth": 1}, {"nth": 3}, {"nth": 4}]
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0][:-9], *lines[1:]]))
    with pytest.raises(json.JSONDecodeError):  # no kill does this
        Rounds(file, ABOUT)


def test_a_build_is_of_the_native_part_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = tmp_path / "_native.so"
    native.write_bytes(b"one")
    monkeypatch.setattr(rounds._native, "__file__", str(native))
    one = rounds.build()
    assert rounds.build() == one
    native.write_bytes(b"another")
    assert rounds.build() != one


def test_models_and_ready_are_of_one_table() -> None:
    assert experts.table_of(["local"]) == "uniform" == experts.table_of(["skewed", "local"])
    assert experts.table_of(["skewed"]) == "skewed"
    assert experts.asked(["--only", "models", "ready", "--tables", "local"]).only == ["models", "ready"]


@pytest.mark.parametrize("flags", ["--only models resident", "--only ready 4.9", "--only prefill --tables skewed"])
def test_mixtures_that_make_no_sense(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experts.asked(flags.split())
    assert "--only" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "wanted"), [(["models"], ["make"]), (["models", "ready"], ["make", "ready"])])
def test_models_and_ready_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], wanted: list[str]
) -> None:
    done: list[str] = []

    class Noted(NoEngines):
        def make(self, table: str, beside: bool) -> None:
            assert table == "uniform"
            done.append("make")

        def ready(self) -> None:
            done.append("ready")

    config = tmp_path / "config.json"
    config.write_text("{}")
    monkeypatch.setattr(experts, "Engines", Noted)
    folders = ["--config", str(config), "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["experts", *folders, "--only", *flags, "--tables", "local"])
    experts.main()
    assert done == wanted


def test_a_smaller_shape_has_room_for_the_process_beside_it(tmp_path: Path) -> None:
    whole = Engines(tmp_path, None)
    config = json.loads(whole.config.read_text())
    (tmp_path / "toy.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "vocab_size": 1000}))
    toy = Engines(tmp_path, tmp_path / "toy.json")
    assert whole.limit("4.9") == 4_900_000_000 // 4096 * 4096
    share = weights_bytes(toy.config, "int4") / weights_bytes(whole.config, "int4")
    assert toy.limit("4.9") == pytest.approx(100e6 + 4.8e9 * share, rel=1e-3)
