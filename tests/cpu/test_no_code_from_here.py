"""No command imports anything from the folder that the user stands in, nor do the processes that it starts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import app
from penstock.runtime import child
from tests.cpu.checkpoints import MOE, save_checkpoint, save_tokenizer
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.hub import server as hub_server
from tests.cpu.servers import serving
from tests.cpu.traps import SCRIPT, Trap
from tests.syntax import tree_of

CONFIG = {**MOE, "vocab_size": 300}  # `profile` wants experts
PACKAGE = Path(penstock.__file__).parent


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    """The folder is a checkpoint's too: `penstock run .` is what its author hopes for."""
    folder = tmp_path_factory.mktemp("traps") / "model"
    save_checkpoint(folder, CONFIG)
    save_tokenizer(folder, CONFIG)
    (folder / "text.txt").write_text("some words to be scored\n")
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 2}}
    (folder / "requests.jsonl").write_text(json.dumps(line))
    return Trap(folder)


COMMANDS = [
    "run . hi --max-tokens 2 --cache {cache}",  # packs it
    "run . --max-tokens 2 --cache {cache}",
    "plan . --cache {cache} --compare",
    "plan . --cache {cache} --device emulated --trace {out}/trace.json --svg {out}/plan.svg",
    "plan llama-3.2-1b --machine pc-rtx4090-64gb --weights int4",  # asks the solvers that load HiGHS
    "pack . {out}/packed --verify",
    "synth . {out}/synth",
    "eval . text.txt --cache {cache}",
    "eval . text.txt --cache {cache} --against .",
    "profile . text.txt --cache {cache}",
    "batch requests.jsonl {out}/answers.jsonl --model . --cache {cache}",
    "list --cache {cache}",
    "prune --cache {cache}",
    "import",
    "completion bash --show",
    "bench . --repeats 1 --seconds 0.1 --prompt-tokens 4 --output-tokens 2 --cache {cache}",  # starts `ceilings`
    "bench ops . --rows 1 --context 16",
    "bench --calibrate --cache {cache}",
    "probe --cache {cache}",
    "demo --max-tokens 2 --cache {cache}",
    "--help",
]
APART = {"serve", "rm", "pull", "train-predictors"}  # have a test each


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, trap: Trap, cache: Path, tmp_path: Path) -> None:
    done = trap.run(*command.format(cache=cache, out=tmp_path).split(), stdin="hi")
    assert done.returncode == 0, done.stderr


def test_no_command_is_left_out() -> None:
    names = {command.name for command in app().registered_commands}
    assert names == {command.split()[0] for command in COMMANDS if command != "--help"} | APART


def test_pulling(trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"", "tokenizer.json": b"{}"}
    with hub_server.serving({"org/name": files}) as hub:
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HOME": tmp_path / "hf", "HF_HUB_OFFLINE": 0}.items():
            monkeypatch.setenv(name, str(value))
        done = trap.run("pull", "org/name")
    assert done.returncode == 0, done.stderr


def test_removal_from_the_cache(trap: Trap, tmp_path: Path) -> None:
    assert trap.run("run", ".", "hi", "--max-tokens", "1", "--cache", tmp_path).returncode == 0
    (packed,) = (tmp_path / "models").iterdir()
    assert trap.run("rm", packed.name, "--cache", tmp_path).returncode == 0
    assert not packed.exists()


def test_training_predictors(cache: Path, tmp_path: Path) -> None:
    config = json.loads(TINY_CONFIGS["opt"])
    save_checkpoint(tmp_path / "model", config)
    save_tokenizer(tmp_path / "model", config)
    (tmp_path / "model" / "text.txt").write_text("some words to be learnt from. " * 200)
    trap = Trap(tmp_path / "model")
    done = trap.run("train-predictors", ".", "--text", "text.txt", "--weights", "int8-records", "--cache", cache)
    assert done.returncode == 0, done.stderr


def test_the_server(trap: Trap, cache: Path) -> None:
    with serving(Path("."), cache, script=SCRIPT, cwd=trap.folder) as server:
        status, _, _ = server.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2})
    assert status == 200
    trap.check()


def test_the_probe(trap: Trap) -> None:
    """It begins, with all of its imports, and finds no disk. (`test_cli` has one that measures.)"""
    done = trap.run("probe", "--cache", "/dev/null")
    assert (done.returncode, "cannot measure the disk at /dev/null" in done.stderr) == (2, True)


def test_the_measuring_of_a_device(trap: Trap) -> None:
    command = child.command("penstock.runtime.device.cuda.measure")
    done = subprocess.run(command, cwd=trap.folder, input="{}", capture_output=True, text=True, timeout=600)
    trap.check()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


def test_the_trap_works(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "model")
    subprocess.run([sys.executable, "-m", "penstock.runtime.probe"], cwd=trap.folder, capture_output=True)
    assert trap.caught


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    code = (
        "import os, sys; from penstock.runtime.child import run; os.rmdir(os.getcwd());"
        "sys.exit(run('penstock.cli', '--version').returncode)"
    )
    (tmp_path / "gone").mkdir()
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path / "gone").returncode == 0


@pytest.mark.parametrize("flags", [[], ["-I"], ["-E"], ["-s"]])
def test_a_child_imports_from_no_more_places(flags: list[str], tmp_path: Path) -> None:
    """PYTHONPATH and the user's own packages: as for the parent."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "told.py").write_text("import sys; print(sys.flags.no_user_site, *sys.path, sep='\\n')")
    code = (
        "import sys; from penstock.runtime.child import run; print(sys.flags.no_user_site, *sys.path, sep='\\n');"
        "print('---'); print(run('told').stdout, end='')"
    )
    env = {"PYTHONPATH": str(tmp_path / "mine")}
    done = subprocess.run(
        [sys.executable, "-P", *flags, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    ours, _, theirs = done.stdout.partition("---\n")
    if flags in (["-I"], ["-E"]):
        assert str(tmp_path / "mine") not in ours and theirs == ""  # no such module for the child either
    else:
        assert ours == theirs and str(tmp_path / "mine") in ours


def test_every_process_is_started_by_that_command() -> None:
    """`runtime.child.command`, which knows the flags."""
    starters = {"multiprocessing", "system", "popen", "posix_spawn", "posix_spawnp", "execv", "execvp", "execve"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                assert starters.isdisjoint(alias.name for alias in node.names), path
            elif isinstance(node, ast.Attribute):
                assert node.attr not in starters, path
                assert ast.unparse(node) != "subprocess.call", path
            elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                assert ast.unparse(node.args[0]).startswith("command("), path
