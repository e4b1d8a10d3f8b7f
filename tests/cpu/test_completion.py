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
    done = subprocess.run(["bash", "--norc", "-c", line], capture_output=True, text=True, timeout=600)
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
def test_other_shells_read_it(shell: str) -> None:
    text = made(shell)
    assert "host-memory" in text and "train-predictors" in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read it")
    assert subprocess.run([shell, "-n", "-c", text], timeout=600).returncode == 0


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user who has a command `penstock`."""
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return {"HOME": str(tmp_path), "PATH": f"{command.parent}:{os.environ['PATH']}", "TERM": "dumb"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes_commands_flags_and_files(home: dict[str, str]) -> None:
    file = Path(home["HOME"]) / ".config/fish/completions/penstock.fish"
    file.parent.mkdir(parents=True)
    file.write_text(made("fish"))

    def offered(line: str) -> list[str]:
        asked = ["fish", "-c", f"complete -C '{line}'"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=600, env=home, cwd=home["HOME"])
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert offered("penstock pr") == ["probe", "profile", "prune"]
    assert offered("penstock run --host") == ["--host-memory"]
    assert offered("penstock run bi") == ["bin/"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_commands_flags_and_files(home: dict[str, str]) -> None:
    pexpect = pytest.importorskip("pexpect")
    folder = Path(home["HOME"]) / ".local/share/zsh/site-functions"
    folder.mkdir(parents=True)
    (folder / "_penstock").write_text(made("zsh"))
    shell = pexpect.spawn("zsh", ["-f", "-i"], encoding="utf8", timeout=600, env=home, cwd=home["HOME"])
    shell.sendline(f"fpath+=({folder}); autoload -Uz compinit; compinit -u; PS1=; echo rea''dy")
    shell.expect("ready")
    for typed, shown in (
        ("penstock pr", "probe +profile +prune"),
        ("penstock run --host", "-memory"),
        ("penstock run bi", "n/"),
    ):
        shell.send(typed)
        shell.expect_exact(typed)
        shell.send("\t")
        shell.expect(shown)
        shell.sendcontrol("u")
    shell.close(force=True)


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
