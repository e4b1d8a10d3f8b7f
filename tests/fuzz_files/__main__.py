"""`python -m tests.fuzz_files`: mutated files under every command that reads them.

    --cases N | --minutes M    how much (10^5 cases)
    --first N                  begin with each seed's N-th mutant, for cases that no earlier run had
    --kinds a,b                only these folders of seeds
    --seeds                    each seed as it is instead
    --case config/good-llama.json:17    this one alone, and what it printed

The last line is one JSON object; the exit code is 1 if anything in it that should be 0 is not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz_files import child, corpus, findings, warm
from tests.fuzz_files.checks import KINDS, Fault, faults, snapshot
from tests.fuzz_files.child import Outcome
from tests.fuzz_files.corpus import Seed
from tests.fuzz_files.scenes import SCENES, Case, case
from tests.fuzz_files.world import Place, World

_TOLD_S = 10.0


def unmutated(seed: Seed) -> int:
    """How many of its commands `--seeds` runs on a seed: of one that should work all, of others the first."""
    return SCENES[seed.kind].unchanged if seed.path.name.startswith("good-") else 1


class Worker:
    """Runs cases one after the other in a scratch folder of its own."""

    def __init__(self, scratch: Path, all_seeds: tuple[Seed, ...], found: Path) -> None:
        self.place, self._logs, self._found = Place(scratch / "case"), scratch / "logs", found
        for folder in (self.place.root, self._logs, scratch / "world"):
            folder.mkdir(parents=True)
        self._families: dict[str, list[Seed]] = {}
        for seed in all_seeds:
            self._families.setdefault(seed.kind, []).append(seed)
        self._world = World(scratch / "world", self._honest)
        child.adopt_orphans()

    def _honest(self, argv: list[str]) -> int:
        done = child.run(argv, self._logs, self._logs, None, self._logs, limited=False)
        sys.stderr.write(done.err.decode() if done.code else "")
        return done.code

    def run(self, seed: Seed, number: int, expect_codes: bool = False) -> tuple[Case, Outcome, list[Fault]]:
        """One case. Too slow counts when it was so twice: other processes may have been at work."""
        codes = seed.codes(number) if expect_codes else (0, 2, 130)
        done, outcome, wrong = self._once(seed, number, codes)
        if any(fault.kind == "over_5_s" for fault in wrong):
            done, outcome, wrong = self._once(seed, number, codes)
        for fault in wrong:
            findings.keep(self._found, self.place, done, outcome, fault)
        return done, outcome, wrong

    def _once(self, seed: Seed, number: int, codes: tuple[int, ...]) -> tuple[Case, Outcome, list[Fault]]:
        made = case(self._world, self.place, seed, number, self._families[seed.kind])
        before = snapshot(self.place)
        as_it_is = not made.changed or number % 200 == 0
        outcome = child.run(made.argv, made.cwd, self.place.home, made.stdin, self._logs, as_it_is=as_it_is)
        return made, outcome, faults(made, outcome, before, snapshot(self.place), codes)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz_files", description="Mutated files under every command."
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kinds", default="")
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--case")
    parser.add_argument("--findings", type=Path, default=Path("build/fuzz-files"))
    args = parser.parse_args()

    kinds = args.kinds.split(",") if args.kinds else list(SCENES)
    seeds = tuple(seed for seed in corpus.seeds() if seed.kind in kinds)
    warm.warm_up()
    scratch = Path(tempfile.mkdtemp(prefix="penstock-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    # What ends us by a signal ends the jobs, and the scratch folder goes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if args.case:
            return _one(args.case, scratch, seeds, args.findings)
        shutil.rmtree(args.findings, ignore_errors=True)
        if args.seeds:
            work = [(seed, number) for seed in seeds for number in range(unmutated(seed))]
        else:
            work = [
                (seeds[i % len(seeds)], SCENES[seeds[i % len(seeds)].kind].unchanged + args.first + i // len(seeds))
                for i in range(args.cases)
            ]
        return _all(work, args, scratch, seeds)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _one(name: str, scratch: Path, seeds: tuple[Seed, ...], found: Path) -> int:
    """Runs a case again and shows what it printed."""
    path, _, number = name.rpartition(":")
    seed = next((seed for seed in seeds if seed.name == path), None)
    if seed is None or not number.isdecimal():
        sys.exit(f"{name}: no seed of that name")
    made, outcome, wrong = Worker(scratch, seeds, found).run(seed, int(number))
    sys.stdout.write(outcome.out.decode("utf-8", "replace")[-5000:])
    sys.stderr.write(outcome.err.decode("utf-8", "replace")[-20_000:])
    print(f"argv {' '.join(made.argv)}\nexit code {outcome.code} in {outcome.seconds:.2f} s")
    print(f"peak memory {outcome.peak_bytes >> 20} MiB")
    print("\n".join(f"{fault.kind}: {fault.what}" for fault in wrong) or "nothing wrong")
    return bool(wrong)


def _all(work: list[tuple[Seed, int]], args: argparse.Namespace, scratch: Path, seeds: tuple[Seed, ...]) -> int:
    start_s = time.perf_counter()
    until_s = start_s + 60 * args.minutes if args.minutes else float("inf")
    readers = []
    for job in range(args.jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.close(reader)
                child.end_with_parent()
                worker = Worker(scratch / str(job), seeds, args.findings)
                _work(worker, work[job :: args.jobs], until_s, args.seeds, writer)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        readers.append(os.fdopen(reader))
    report = _Report(len(work))
    for line in _lines(readers):
        report.add(*json.loads(line))
    broken = [code for _ in readers if (code := os.waitstatus_to_exitcode(os.wait()[1]))]
    code = report.end(time.perf_counter() - start_s, args.findings)
    if broken:
        print(f"jobs ended early, with {broken}", file=sys.stderr)
    return 1 if broken else code


def _work(worker: Worker, work: list[tuple[Seed, int]], until_s: float, expect_codes: bool, writer: int) -> None:
    """Runs cases and tells of each in a line of JSON."""
    before_s = time.process_time()
    with os.fdopen(writer, "w", buffering=1) as stream:
        for seed, number in work:
            if time.perf_counter() > until_s:
                break
            made, outcome, wrong = worker.run(seed, number, expect_codes)
            ours_s, before_s = time.process_time() - before_s, time.process_time()
            told = [made.name, outcome.code, outcome.seconds, outcome.cpu_seconds + ours_s, outcome.peak_bytes]
            stream.write(json.dumps([*told, [vars(fault) for fault in wrong]]) + "\n")


def _lines(readers: list[Any]) -> Iterator[str]:
    """Lines of all jobs as they come."""
    import select

    poll = select.poll()
    by_fd = {reader.fileno(): reader for reader in readers}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while by_fd:
        for fd, _ in poll.poll():
            line = by_fd[fd].readline()
            if line:
                yield line
            else:
                poll.unregister(fd)
                del by_fd[fd]


class _Report:
    def __init__(self, planned: int) -> None:
        self._planned, self._done = planned, 0
        self._counts: Counter[str] = Counter()
        self._codes: Counter[str] = Counter()
        self._signatures: Counter[str] = Counter()
        self._slowest, self._peak_bytes, self._cpu_s = ("", 0.0), 0, 0.0
        self._start_s = self._told_s = time.perf_counter()

    def add(
        self, name: str, code: int, seconds: float, cpu_seconds: float, peak_bytes: int, wrong: list[dict[str, str]]
    ) -> None:
        self._done += 1
        self._cpu_s += cpu_seconds
        self._codes[str(code)] += 1
        self._slowest = max(self._slowest, (name, seconds), key=lambda pair: pair[1])
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        for fault in wrong:
            self._counts[fault["kind"]] += 1
            self._signatures[fault["signature"]] += 1
            if self._signatures[fault["signature"]] == 1:
                print(f"{name}: {fault['kind']}: {fault['what']}", flush=True)
        now_s = time.perf_counter()
        if now_s - self._told_s > _TOLD_S:
            self._told_s = now_s
            rate = self._done / (now_s - self._start_s)
            print(
                f"{self._done} of {self._planned} cases, {rate:.0f} a second, {sum(self._counts.values())} wrong",
                flush=True,
            )

    def end(self, seconds: float, found: Path) -> int:
        """Prints the summary, and the JSON line; returns the exit code."""
        for signature, count in self._signatures.most_common():
            print(f"{count:6d} × {signature}")
        if self._signatures:
            print(f"one of each in {found}")
        name, slowest_s = self._slowest
        print(f"{self._done} cases; the slowest, {name}, took {slowest_s:.2f} s; exit codes {dict(self._codes)}")
        report = {"cases": self._done, **{kind: self._counts[kind] for kind in KINDS}}
        report |= {"per_second": round(self._done / seconds, 1), "peak_mib": self._peak_bytes >> 20}
        # What a case costs on a machine that others use too.
        report["cpu_ms_per_case"] = round(1e3 * self._cpu_s / max(1, self._done), 1)
        print(json.dumps(report))
        return int(bool(self._counts))


if __name__ == "__main__":
    sys.exit(main())
