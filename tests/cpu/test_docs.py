"""The documentation: its commands are run, its names are those of the output, and its site fetches nothing."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.commands import ROOT, here
from tools.trace_picture import picture

DOCS = ROOT / "docs"
MODEL = ROOT / "penstock/assets/tale-llama"
RUN_PAGES = ("start.md", "fits.md")


def console(page: str) -> list[tuple[str, list[str]]]:
    """The commands of a page, each with the lines that it should print."""
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


@pytest.mark.parametrize(
    ("command", "lines"), [pytest.param(*each, id=each[0]) for page in RUN_PAGES for each in console(page)]
)
def test_a_command_of_the_docs(command: str, lines: list[str], cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)
    assert words[0] == "penstock"
    arguments = [str(MODEL) if word == "MODEL" else word for word in words[1:]]
    done = here(capsys, *arguments, "--cache", cache)
    expected = re.search(r"exit code (\d)", command)
    assert done.code == (int(expected[1]) if expected else 0), done
    pattern = "".join(r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + r"\n" for line in lines)
    assert any(re.fullmatch(pattern, said) for said in (done.out, done.err)), done


@pytest.mark.parametrize("command", ["run", "plan"])
def test_the_names_of_the_json(command: str, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every name of the output stands in the page's table, and every name of the table's first column is there."""
    page = (DOCS / "json.md").read_text()
    table = page.split(f"## `penstock {command} MODEL")[1].split("\n## ")[0]
    told = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    asked = ("Once upon a time", "--max-tokens", "2") if command == "run" else ()
    done = here(capsys, command, MODEL, *asked, "--json", "--cache", cache)
    assert told == set(done.report)


def test_the_type_that_is_shown_is_the_one_that_runs() -> None:
    assert (ROOT / "penstock/models/seed_oss.py").read_text() in (DOCS / "model-types.md").read_text()


def test_a_picture_of_a_trace() -> None:
    def event(name: str, kind: str, track: int, start: float, length: float, **args: object) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": kind, "tid": track, "ts": start, "dur": length, "args": args}

    named = [
        {"ph": "M", "name": "thread_name", "tid": i, "args": {"name": lane}}
        for i, lane in enumerate(("passes", "host", "disk0", "disk0 (2)"))
    ]
    drawn = picture(
        [*named, event("decode 1", "pass", 0, 0, 100, rows=1), event("ffn", "compute", 1, 50, 50, ops="ffn"),
         event("load", "load", 2, -50, 100, ops="load"), event("load", "load", 3, 0, 200, ops="load")],
        "decode", 1,
    )  # fmt: skip
    assert "A pass of 1 token: 0.1 ms" in drawn and "50% busy" in drawn and "100% busy" in drawn
    assert drawn.count('class="orange"') == 3 and drawn.count('class="blue"') == 2  # with the legend's
    with pytest.raises(SystemExit):
        picture(named, "decode", 1)


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs builds the site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", ROOT / "mkdocs.yml", "-d", tmp_path]
    done = subprocess.run(build, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    elsewhere = re.compile(r"""(?:src=|<link[^>]*href=|url\(|@import )["']?(?:https?:)?//""")
    pages = [file for kind in ("*.html", "*.css") for file in tmp_path.rglob(kind)]
    assert len(pages) > 15
    for file in pages:
        assert not elsewhere.search(file.read_text()), file
