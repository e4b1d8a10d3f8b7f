"""The container file and the systemd unit: their commands are run, with a model and a cache of the test's in place of
theirs, and no daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cpu.commands import ROOT

CONTAINER = ROOT / "contrib" / "container" / "Containerfile"
UNIT = ROOT / "contrib" / "systemd" / "penstock.service"
BINARY = "/opt/penstock/bin/penstock"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")


def instructions() -> list[tuple[str, str]]:
    """(name, what follows) of each instruction of the container file."""
    lines = [line for line in CONTAINER.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def settings() -> dict[str, str]:
    """The unit's settings; of one that comes twice the last."""
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def ours(command: list[str], model: Path, cache: Path) -> list[str]:
    """The command for this machine: our interpreter, a model and a cache of the test's, any port that is free."""
    changed = {"/models/model": str(model), "${PENSTOCK_MODEL}": str(model), "8000": "0",
               "/cache": str(cache), "/var/cache/penstock": str(cache)}  # fmt: skip
    assert command[0] == BINARY and changed.keys() & {*command}
    return [sys.executable, "-m", "penstock.cli", *(changed.get(word, word) for word in command[1:])]


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[int]:
    """The server, until SIGTERM, which it must take well. Yields its port."""
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment, "HOME": "/nonexistent"}
    )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://\S+?:(\d+)/v1", line):
                yield int(found[1])
                break
        else:
            pytest.fail("".join(said))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0


def answered(port: int, **headers: str) -> str:
    body = json.dumps({"prompt": "a", "max_tokens": 3, "ignore_eos": True}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_the_containers_command(model: Path, cache: Path) -> None:
    told = dict(instructions())
    entry, command = json.loads(told["ENTRYPOINT"]), json.loads(told["CMD"])
    assert [name for name, _ in instructions()][-2:] == ["ENTRYPOINT", "CMD"] and told["USER"] == "penstock"
    full = ours([*entry, *command], model, cache)
    without = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert without.returncode == 2 and "PENSTOCK_API_KEY" in without.stderr  # it listens beyond its loopback
    with started(full, PENSTOCK_API_KEY="secret") as port:
        assert answered(port, authorization="Bearer secret")
        check = json.loads(told["HEALTHCHECK"].partition(" CMD ")[2])
        assert check[0] == "/opt/penstock/bin/python" and "8000/health" in check[2]
        subprocess.run([sys.executable, "-c", check[2].replace("8000", str(port))], check=True, timeout=600)


def test_what_the_container_installs() -> None:
    """Each line is a command that sh reads, of packages that Debian has, and installs an extra that there is."""
    runs = [rest for name, rest in instructions() if name == "RUN"]
    for run in runs:
        subprocess.run(["sh", "-n", "-c", run], check=True)
    (pip,) = [run for run in runs if "pip install" in run]
    assert "serve = [" in (ROOT / "pyproject.toml").read_text() and "'/src[serve]'" in pip
    names = {word for run in runs if "apt-get install" in run for word in run.split("&&")[1].split()[4:]}
    assert {"g++", "python3", "python3-venv"} <= names
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt here: whether the packages are there was not looked at")
    known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, check=True).stdout.split()
    if len(known) < 10_000:
        pytest.skip("apt has no lists here")
    assert names <= {*known}


def test_the_units_command(model: Path, cache: Path) -> None:
    unit = settings()
    with started(ours(shlex.split(unit["ExecStart"]), model, cache)) as port:
        assert answered(port)
    assert float(unit["TimeoutStopSec"]) > 60 and unit["DynamicUser"] == "yes"


@needs_systemd
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program in the place of ours, which is not installed there. It is rated as well sandboxed."""
    program = tmp_path / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "penstock.service"
    unit.write_text(UNIT.read_text().replace(BINARY, str(program)).replace("file:///opt/penstock", "man:systemd(1)"))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    about = [line for line in verified.stderr.splitlines() if "penstock" in line]
    assert verified.returncode == 0 and not about, verified.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", unit],
        capture_output=True, text=True,
    )  # fmt: skip
    assert rated.returncode == 0, rated.stdout
