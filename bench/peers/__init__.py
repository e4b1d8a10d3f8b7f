"""Two engines measured side by side: each is a process of its own, loads its model once, and answers commands.

A command is a line `NAME COUNT`, an answer one JSON object. The clock is read in the process that works, around the
work alone; between commands it sleeps on its standard input, so that it takes nothing from the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = 16  # before a decode; attention over so few costs next to nothing
Answer = dict[str, Any]  # seconds, and what the work comes to: bytes of weights or of KV, flops
Loaded = tuple[dict[str, Any], dict[str, Callable[[int], Answer]]]  # facts of a model, and commands by their names


def token_ids(vocab: int, count: int, seed: int = 0) -> NDArray[np.int32]:
    """The same random prompt for both engines, int32 [count]."""
    return np.random.default_rng(seed).integers(0, vocab, count, np.int32)


def followed_ids(vocab: int, first: int, count: int) -> NDArray[np.int32]:
    """Tokens `first`, `first` + 1, … of a random text that all engines read, int32 [count]."""
    return token_ids(vocab, first + count, seed=7)[first:]


def packed_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every worker of penstock is told that plans by the machine's figures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, required=True, help="where the probe's figures are kept")
    return parser


def limited_arguments(description: str | None) -> argparse.ArgumentParser:
    """The same, for plans within a limit."""
    parser = packed_arguments(description)
    parser.add_argument("--limit", type=int, help="bytes of the whole process; default all weights stay in memory")
    parser.add_argument("--context", type=int, required=True)
    return parser


def serve(load: Callable[[], Loaded]) -> None:
    """A worker's whole life. `load` gives facts to tell and the commands by name."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    facts, commands = load()
    print(json.dumps(facts), file=answers)
    slept_from_s = time.process_time()
    for line in sys.stdin:
        name, count = line.split()
        idle_cpu_s = time.process_time() - slept_from_s
        answer = commands[name](int(count))
        slept_from_s = time.process_time()
        print(json.dumps({**answer, "cpu_s": slept_from_s, "idle_cpu_s": idle_cpu_s}), file=answers)


class WorkerEnded(SystemExit):
    """A worker ended before it answered; whoever expects that (a limit too small) may catch it."""


class Worker:
    """The parent's end. `facts`: what the worker told once its model was loaded. `cgroup`: the folder of one that it
    joins before its first instruction. `path`: a folder of packages that come before those of this Python."""

    def __init__(
        self, module: str, *arguments: object, cgroup: Path | None = None, path: Path | None = None
    ) -> None:  # fmt: skip
        self._module = module
        command = [sys.executable, "-m", module, *map(str, arguments)]
        if cgroup is not None:
            command = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh", *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"} if path else None,
        )
        self.cpu_s = 0.0  # processor time since its start
        self.idle_cpu_s = 0.0  # the part of it that it took while the other's turn was on
        self.facts = self._answer()

    def ask(self, command: str, count: int) -> Answer:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: the answer that does not come says so
            self._process.stdin.write(f"{command} {count}\n")
            self._process.stdin.flush()
        answer: Answer = self._answer()
        self.cpu_s = answer["cpu_s"]
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer

    def kill(self) -> None:
        """Ends the worker whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """The end of its input is the end of the worker."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # of a worker that has ended already
            self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerEnded(f"{self._module} ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found
