"""From the command `penstock run model.gguf` to its first word, and packing, for `bench.files`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings
from bench.cgroup import drop_page_cache
from bench.offload_engines import tell

START_S = 1.0  # of the bar: 1.2 × file ÷ disk rate, plus so much
TIMES = 1.2


class Start:
    """Runs of one file. `cache`: the folder that the command keeps its files in. The probe's are there."""

    def __init__(self, file: Path, cache: Path) -> None:
        self.file, self.cache = file, cache

    def measure(self, rounds: int) -> dict[str, Any]:
        """A first run, which packs, and later ones, each with an empty page cache."""
        self.clear()
        rate = self._disk_bytes_per_s()
        first_s, first_cpu_s, _ = self._first_word()
        later, rates, pages_s = [], [rate], []
        for _ in range(rounds):
            seconds, _, of_pages_s = self._first_word()
            later.append(seconds)
            pages_s.append(of_pages_s)
            rates.append(self._disk_bytes_per_s())
        rate, size = statistics.median(rates), self.file.stat().st_size
        second_s = statistics.median(later)
        allowed_s = TIMES * size / rate + START_S
        taken_s = statistics.median(pages_s)
        shown = f"{first_s:.2f} s the first time, then {second_s:.2f} s of {allowed_s:.2f} s"
        shown += f" (the system took {taken_s:.2f} s meanwhile to make pages ready)"
        tell(f"{self.file.name}: first word after {shown}")
        return {
            "first_run_s": first_s, "first_run_cpu_s": first_cpu_s, "second_run_s": second_s, "second_runs_s": later,
            "second_run_allowed_s": allowed_s, "second_run_vs_allowed": second_s / allowed_s,
            "second_run_pages_s": pages_s,
            # Where a virtual machine's host has taken memory back, pages come more slowly than the disk's bytes.
            "second_run_allowed_with_pages_s": max(allowed_s, taken_s + START_S),
            "start_disk_read_bytes_per_s": rate, "first_run_bytes_per_s": size / first_s,
        }  # fmt: skip

    def pack_into(self, folder: Path) -> None:
        """Packs the file by the command."""
        tell(f"packing {self.file.name}")
        subprocess.run([*_COMMAND, "pack", str(self.file), str(folder)], check=True, stderr=subprocess.DEVNULL)
        os.sync()

    def clear(self) -> None:
        shutil.rmtree(self.cache / "models", ignore_errors=True)

    def _first_word(self) -> tuple[float, float, float]:
        """(seconds from the start of the process to the first byte of its answer, its processor seconds, seconds in
        which the system made pages ready). The last are of one more run: its JSON object comes well after the word."""
        seconds, spent_s, _ = self._run()
        return seconds, spent_s, float(json.loads(self._run("--json")[2])["loading"]["pages_s"])

    def _run(self, *more: str) -> tuple[float, float, bytes]:
        """(seconds from the start of the process to the first byte that it prints, its processor seconds, all that it
        prints)."""
        drop_page_cache([self.file])
        how = ["--max-tokens", "1", "--temperature", "0", "--raw", "--ignore-eos", "--cache", str(self.cache), *more]
        before, start_s = os.times(), time.perf_counter()
        command = [*_COMMAND, "run", str(self.file), "Once upon", *how]
        # Python keeps what it has compiled, as it does for users, whatever this process was told.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=kept) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = time.perf_counter() - start_s
            rest = process.stdout.read()
        if process.returncode or not first:
            sys.exit(f"`penstock run {self.file}` ended with {process.returncode} and no word")
        after = os.times()
        return seconds, sum(after[2:4]) - sum(before[2:4]), first + rest

    def _disk_bytes_per_s(self) -> float:
        ceilings = Ceilings([self.file])
        rate = ceilings.read().disk_read_bytes_per_s
        ceilings.close()
        return rate


_COMMAND = [sys.executable, "-m", "penstock.cli"]
