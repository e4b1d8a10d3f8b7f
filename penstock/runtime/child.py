"""Starts other processes of ours: a module of penstock in a Python of its own, whose memory is not this one's."""

from __future__ import annotations

import subprocess
import sys


def command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m MODULE ARGUMENTS`.

    `-P`: without it `-m` puts the working folder first on the import path, and a `numpy.py` in a model's folder would
    run. The other flags are those of this interpreter (a distribution's `#!/usr/bin/python3 -s` among them), so that
    a child imports from no place that its parent does not. PYTHONPATH holds for both.
    """
    flags = ["-P"]
    if sys.flags.isolated:
        flags.append("-I")
    if sys.flags.ignore_environment:
        flags.append("-E")
    if sys.flags.no_user_site:
        flags.append("-s")
    return [sys.executable, *flags, "-m", module, *arguments]


def run(module: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `python -m MODULE ARGUMENTS` and waits for its end. The result has its output in `stdout` and `stderr`."""
    return subprocess.run(
        command(module, *arguments), input=stdin, capture_output=True, text=True, errors="replace", check=False
    )


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts `python -m MODULE ARGUMENTS` and returns at once. Its standard input and output are pipes."""
    return subprocess.Popen(
        command(module, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace"
    )


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a child failed: the last line that it wrote to stderr."""
    return (done.stderr.strip() or "no reason given").splitlines()[-1]
