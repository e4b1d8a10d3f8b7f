"""`penstock completion`: what shells read, as shells read it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli.completion import script
from penstock.cli.main import COMMANDS, app
from tests.cpu.commands import here


def made(shell: str) -> str:
    group: Any = typer.main.get_command(app())
    return script(shell, group.commands)


def completed(text: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _penstock; printf '%s\\n' "
    line = text + asked + '"${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc", "-c", line], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_bash_completes_commands_and_flags() -> None:
    text = made("bash")
    names = set(COMMANDS)
    assert set(completed(text, "penstock", "")) == names | {"--help", "--version"}
    assert completed(text, "penstock", "pr") == ["profile", "probe", "prune"]
    assert completed(text, "penstock", "run", "--host") == ["--host-memory"]
    assert "--image" not in completed(text, "penstock", "run", "--")  # which is hidden
    assert completed(text, "penstock", "run", "fo") == []  # bash looks for files itself then
    assert completed(text, "penstock", "nothing", "--") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    text = made(shell)
    assert "host-memory" in text and "train-predictors" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read it")
    assert subprocess.run([shell, "-n", "-c", text], timeout=20).returncode == 0


def test_installed_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")
    file = tmp_path / ".local/share/bash-completion/completions/penstock"
    for _ in range(2):
        done = here(capsys, "completion")
        assert done.code == 0 and str(file) in done.err and file.read_text() == made("bash")
    file.write_text("mine")
    assert here(capsys, "completion").code == 2 and file.read_text() == "mine"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert here(capsys, "completion", "fish").code == 0
    assert os.listdir(tmp_path / "config/fish/completions") == ["penstock.fish"]
    for shell in ("/bin/sh", ""):
        monkeypatch.setenv("SHELL", shell)
        assert "name one of bash, zsh, fish" in here(capsys, "completion").err
