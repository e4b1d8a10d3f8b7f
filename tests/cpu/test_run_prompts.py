"""`run --prompt-file`, `--max-tokens -1`, `--image`; the line of speed; time that is left."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import entry
from penstock.cli.options import Sampling
from penstock.cli.output import _Shown, fitted, progress_line, speed_line, speed_parts, table
from penstock.cli.run import answer
from penstock.units import format_left
from tests.cpu.commands import Outcome, here, machine_cache
from tests.cpu.engines import make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("prompts"), "llama", "float32")


@pytest.fixture
def run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    cache = machine_cache(tmp_path / "cache")

    def call(*args: object) -> Outcome:
        return here(capsys, "run", folder, *args, "--cache", cache, "--context", 64, "--ignore-eos", "--json")

    return call


def test_a_file_is_a_prompt(run: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("hello\n")
    by_file = run("--prompt-file", tmp_path / "prompt.txt", "--max-tokens", 4).report
    assert by_file["token_ids"] == run("hello", "--max-tokens", 4).report["token_ids"]
    both = run("hello", "--prompt-file", tmp_path / "prompt.txt")
    assert both.code == 2 and "one or the other" in both.report["error"]["message"]
    gone = run("--prompt-file", tmp_path / "gone.txt")
    assert gone.code == 2 and "gone.txt cannot be read" in gone.report["error"]["message"]


@pytest.mark.parametrize("given", ["", "\n"])
def test_an_empty_standard_input_is_no_prompt(given: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    found = run()
    assert found.code == 2 and "the prompt is empty: standard input has none" in found.report["error"]["message"]


def test_until_the_end_of_the_context(run: Any) -> None:
    found = run("hello", "--max-tokens", -1).report
    assert found["prompt_tokens"] + found["output_tokens"] == 64 + 1  # the last token is not fed back
    assert run("hello", "--max-tokens", -2).code == 2


def test_how_tokens_were_chosen_is_told(run: Any) -> None:
    found = run("hello", "--max-tokens", 2, "--top-k", 5, "--seed", 1).report["sampling"]
    assert (found["max_tokens"], found["temperature"], found["top_k"], found["seed"]) == (2, 1.0, 5, 1)


def test_which_values_the_model_gave() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 7}
    assert Sampling().from_model(config) == ["temperature", "top_p"]
    assert Sampling(top_p=0.5, temperature=0.0).from_model(config) == []
    assert Sampling().from_model({"temperature": 0.6}) == []  # it counts only beside do_sample


def test_ctrl_c_leaves_the_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        print("once", end="")
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.run.promise", lambda _: None)
    monkeypatch.setattr("penstock.cli.run.print_stream", stopped)
    with pytest.raises(KeyboardInterrupt):
        answer(None, [1], Sampling().params({}), False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "once\n"


@given(st.lists(st.text("ab ·–(),", max_size=150), max_size=6).map("\n".join), st.integers(0, 120))
def test_lines_are_broken_between_words(text: str, columns: int) -> None:
    found = fitted(text, columns)
    assert found.split() == text.split()
    words = {word for word in text.split() if len(word) > max(20, columns) // 2}
    assert all(len(line) <= max(20, columns) or words or not line.strip() for line in found.split("\n"))
    assert fitted(text, 200) == text and fitted(text) == text


def test_a_plan_in_forty_columns() -> None:
    row = f"{'  embedding':38}{'2.00 MiB':>14}{'–':>14}"
    assert fitted(f"{row}\n· reads of at most 1.00 MiB measured: blocks of 1.00 MiB", 40).split("\n") == [
        "  embedding  2.00 MiB  –",
        "· reads of at most 1.00 MiB measured:",
        "  blocks of 1.00 MiB",
    ]


def test_a_table_stays_one_in_forty_columns() -> None:
    rows = [("weights (int4)", "RAM", "disk"), ("  embedding", "–", "282 MiB"), ("  FFN", "1.63 GiB", "1.33 GiB")]
    text = "\n".join(f"{name:38}{ram:>14}{disk:>14}" for name, ram, disk in rows)
    told = ["kind          how much", "a             a few words", "another one   more words than there is room for"]
    assert fitted(text, 40).split("\n") == [
        "weights (int4)       RAM      disk",
        "  embedding            –   282 MiB",
        "  FFN           1.63 GiB  1.33 GiB",
    ]
    assert fitted("\n".join([*told, "", text]), 46).split("\n")[:3] == [
        "kind         how much",
        "a            a few words",
        "another one  more words than there is room for",
    ]
    assert fitted("\n".join(told), 30).split("\n")[2:] == ["another one  more words than", "  there is room for"]


def test_progress_stays_on_its_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("penstock.cli.output._terminal_columns", lambda: 40)
    monkeypatch.setattr("penstock.cli.output._FIRST_S", 1e-4)
    monkeypatch.setattr("penstock.cli.output._TTY_S", 0.0)
    shown = _Shown(True)
    for done in (1, 2, 3):
        shown.tell("packing 3.ffn of a model whose name is long", done << 30, 13 << 30)
        time.sleep(1e-3)
    lines = [line.removesuffix("\033[K") for line in capsys.readouterr().err.split("\r") if line]
    assert lines and all(len(line) == 39 for line in lines)


@pytest.mark.parametrize(("platform", "says"), [("win32", "WSL2"), ("darwin", "macOS")])
def test_other_systems_are_told_in_a_line(
    platform: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert entry.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and says in err


def test_images_are_refused_by_name(run: Any) -> None:
    refused = run("hello", "--image", "cat.png")
    assert refused.code == 2 and refused.report["error"]["message"].startswith("--image cat.png: ")


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.2, "1 s"), (7.2, "7 s"), (95, "1 min 35 s"), (1500, "25 min"), (3739, "1 h 2 min"), (200_000, "2 d 7 h")],
)
def test_time_that_is_left(seconds: float, says: str) -> None:
    assert format_left(seconds) == says
    assert progress_line("packing", 0, int(seconds * 1e9), 1e9).endswith(f", {says} left")


def test_the_line_of_speed_fits_80_columns() -> None:
    ran: Any = SimpleNamespace(decode_tokens_per_s=151.26, batch_ttft_s=0.0131, disk_bytes_per_token=7e6)
    line = speed_line(ran, SimpleNamespace(decode_tokens_per_s=154.4))  # type: ignore[arg-type]
    assert line == "151 tok/s (promised 154) · first word 13.1 ms · disk 1.06 GB/s"
    assert len(f"penstock: {line}") < 80


SPEEDS = st.floats(0, allow_nan=False)


@given(SPEEDS, SPEEDS, SPEEDS, SPEEDS)
def test_the_line_of_speed_fits_whatever_it_tells(speed: float, first_s: float, nbytes: float, promised: float) -> None:
    ran: Any = SimpleNamespace(decode_tokens_per_s=speed, batch_ttft_s=first_s, disk_bytes_per_token=nbytes)
    told: Any = SimpleNamespace(decode_tokens_per_s=promised)
    line = speed_line(ran, told)
    assert len(f"penstock: {line}") < 80 and line.startswith(speed_parts(ran, told)[0])


def test_a_table_that_is_too_wide_lists_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("name", "size", "packed from"), ("a-model", "5 MiB", "/here/a"), ("b", "12 MiB", "/here/with/a/long/name")]
    wide = ["name       size  packed from", "a-model   5 MiB  /here/a", "b        12 MiB  /here/with/a/long/name"]
    assert table(rows, right=[1]).split("\n") == wide
    monkeypatch.setattr("penstock.cli.output.stdout_columns", lambda: 38)
    listed = table(rows, right=[1]).split("\n")
    assert listed[:2] == ["a-model", "  size 5 MiB, packed from /here/a"]
    assert listed[2:] == ["b", "  size 12 MiB, packed from", "    /here/with/a/long/name"]
    monkeypatch.setattr("penstock.cli.output.stdout_columns", lambda: 39)
    assert table(rows, right=[1]).split("\n") == wide
