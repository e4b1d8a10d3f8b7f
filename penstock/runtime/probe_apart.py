"""The whole probe, in a process of its own: memory of the probe must not count against the run that follows.

It ends by the clock. What had no time is scaled from the figures of a machine like this one (`probe_scaled`), and the
machine's source says so. What was found out is kept as it comes, so that a probe that was broken off goes on.
"""

from __future__ import annotations

import json
import queue
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import IO, Any

from penstock.errors import BadRequest, BrokenModel, StorageFailed
from penstock.kernels import cpu
from penstock.runtime import host
from penstock.runtime.child import command
from penstock.runtime.fit import Tell
from penstock.runtime.probe_disk import UNIT_BYTES
from penstock.runtime.probe_ops import FORMATS, KV_FORMATS, ROW_OPS
from penstock.runtime.probe_parts import READS, SHARED, ProbeFindings, ProbePart, key, part_of, parts
from penstock.runtime.probe_scaled import Ratios, profile, scaled, seconds
from penstock.runtime.this_machine import of_this_machine
from penstock.spec import codec
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.places import CPU, DISK
from penstock.store.files import read_text, write_bytes

PROBE_S = 60.0  # of the whole, by the clock
_MARGIN_S, _KILLED_S = 3.0, 1.0  # what the child gets less; when it is ended, before that time
_WAIT_S = 2.0  # for a child that was told to end
_OLD_S = 86400.0  # what was found out longer ago is measured again
_SCHEMA, _VERSION = "penstock.begun", 1
_TICK_S = 0.2

# Gets a part's name, the share of all work that is done, and in how many seconds the probe ends at the latest.
OnPart = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Begun:
    """What a probe has found out so far. `at_s`: when, in seconds since 1970."""

    at_s: float = 0.0
    parts: dict[str, ProbeFindings] = field(default_factory=dict)


def probe_apart(
    disk_folder: Path,
    on_part: OnPart = lambda *_: None,
    formats: Sequence[str] = FORMATS,
    kv_formats: Sequence[str] = KV_FORMATS,
    *,
    tell: Tell = lambda _: None,
    kept: Path | None = None,
    isa: str | None = None,
    most_s: float = PROBE_S,
) -> MachineSpec:
    """Measures this machine, in `most_s` seconds at most. The disk is the one that holds `disk_folder`. `tell` gets a
    line about each figure that was measured again. `kept`: a file that keeps what was found out, until all is; a probe
    that was broken off today goes on from there. Raises StorageFailed where measuring fails."""
    wanted = parts(formats, kv_formats)
    begun, like = Begun() if kept is None else begun_in(kept), profile(isa or cpu.best_isa()[0])
    known = {part.name: begun.parts[part.name] for part in wanted if part.name in begun.parts}
    for name in _late(known, wanted, _lacking(known, wanted, formats, like), formats):
        known.pop(name, None)
    arguments = str(disk_folder), ",".join(formats), ",".join(kv_formats), str(max(0.0, most_s - _MARGIN_S))
    with _Child([*arguments, *([isa] if isa else [])], known, most_s) as measuring:
        for said in measuring.lines(lambda name, left_s: on_part(name, _share(wanted, known, left_s, most_s), left_s)):
            if "told" in said:
                tell(said["told"])
            elif "ends" in said:
                known[said["ends"]] = codec.from_json(ProbeFindings, said["found"])
                if kept is not None:
                    _keep(kept, known)
    lacking = _lacking(known, wanted, formats, like)
    late = _late(known, wanted, lacking, formats)
    if kept is not None and not late:
        kept.unlink(missing_ok=True)
    return _machine(disk_folder, known, lacking, late, like)


def begun_in(file: Path) -> Begun:
    """What a probe had found out that was broken off in the last day; nothing where there was none, or where the file
    is damaged."""
    with suppress(BadRequest, BrokenModel, StorageFailed):
        begun = codec.loads(Begun, read_text(file), _SCHEMA, _VERSION, str(file))
        if 0 <= time.time() - begun.at_s < _OLD_S:
            return begun
    return Begun()


def _keep(file: Path, known: dict[str, ProbeFindings]) -> None:
    with suppress(OSError):  # then a probe that is broken off begins anew
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, codec.dumps(Begun(time.time(), known), _SCHEMA, _VERSION).encode())


def _share(wanted: Sequence[ProbePart], known: dict[str, ProbeFindings], left_s: float, most_s: float) -> float:
    """The share of all work that is done. It goes on by the clock, as far as the part that is being measured."""
    done = [part.weight_s for part in wanted if part.name in known]
    going = next((part.weight_s for part in wanted if part.name not in known), 0.0)
    all_s = sum(part.weight_s for part in wanted)
    by_clock = 1 - left_s / most_s
    return min(max(by_clock, sum(done) / all_s), (sum(done) + 0.9 * going) / all_s)


class _Child:
    """The process that measures. It is ended with the block, or when its time is over."""

    def __init__(self, arguments: Sequence[str], known: dict[str, ProbeFindings], most_s: float) -> None:
        self._end_s = time.perf_counter() + most_s
        self._known = json.dumps(codec.to_json(known))
        self._arguments = arguments

    def __enter__(self) -> _Child:
        self._errors = tempfile.TemporaryFile()  # a pipe might fill up
        self._process = subprocess.Popen(
            command("penstock.runtime.probe_stages", *self._arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, errors="replace",
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()

    def lines(self, tick: Callable[[str, float], None]) -> Iterator[dict[str, Any]]:
        """What the child says, until its end or that of its time. `tick` is called now and then, with the part that is
        being measured and the seconds that are left. Raises StorageFailed where the child fails."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with suppress(BrokenPipeError):
            stdin.write(self._known)
            stdin.close()
        said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pass_on, args=(stdout, said), daemon=True).start()
        name = ""
        while (left_s := self._end_s - time.perf_counter()) > _KILLED_S:
            tick(name, left_s)
            try:
                line = said.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if line is None:
                self._check_end()
                return
            try:
                heard = json.loads(line)
            except ValueError:  # it broke off in the midst of a line
                self._check_end()
                raise StorageFailed(f"measuring this machine failed: it said {line.strip():.80}") from None
            if "failed" in heard:
                raise StorageFailed(f"measuring this machine failed: {heard['failed']}")
            name = heard.get("begins", name)
            yield heard

    def _check_end(self) -> None:
        """Raises StorageFailed where the child fails, or does not end soon after it has said everything."""
        try:
            failed = self._process.wait(_WAIT_S) != 0
        except subprocess.TimeoutExpired:
            raise StorageFailed(
                f"measuring this machine failed: its process had not ended {_WAIT_S:.0f} s after its last word"
            ) from None
        if failed:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise StorageFailed(f"measuring this machine failed: {last[-1]}")


def _pass_on(lines: IO[str], to: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        to.put(line)
    to.put(None)


def _lacking(
    known: dict[str, ProbeFindings], wanted: Sequence[ProbePart], formats: Sequence[str], like: MachineSpec
) -> list[Rate]:
    """The rates of the machine `like` that the wanted parts should have found, and have not."""
    names, measured = {part.name for part in wanted}, {key(rate) for each in known.values() for rate in each.rates}
    return [rate for rate in like.rates if key(rate) not in measured and part_of(rate, formats) in names]


def _late(
    known: dict[str, ProbeFindings], wanted: Sequence[ProbePart], lacking: Sequence[Rate], formats: Sequence[str]
) -> list[str]:
    """The names of the parts that have not found everything."""
    names = {part_of(rate, formats) for rate in lacking}
    names |= {name for name, kind in ((READS, "reads"), (SHARED, "sharing")) if not getattr(known.get(name), kind, ())}
    return [part.name for part in wanted if part.name in names or part.name not in known]


def _machine(
    folder: Path, known: dict[str, ProbeFindings], lacking: Sequence[Rate], late: Sequence[str], like: MachineSpec
) -> MachineSpec:
    """The machine by what was found out; what is `lacking` is scaled from the machine `like`."""
    rates = [rate for each in known.values() for rate in each.rates]
    begins = [rate.alpha_s for rate in rates if rate.op in ROW_OPS]
    rates = [
        replace(rate, alpha_s=min(begins, default=0.0)) if (rate.lane, rate.op) == (CPU, "*") else rate
        for rate in rates
    ]
    rates += scaled(lacking, _ratios(rates, known, like))
    source = f"probe {date.today().isoformat()}"
    if late:
        source += f"; no time for {', '.join(late)}: scaled from {like.name}"
    return of_this_machine(
        tuple(rates),
        folder,
        host.usable_cpus(),
        source,
        sharing=known[SHARED].sharing if SHARED in known else like.sharing,
        reads=known[READS].reads if READS in known else (),
        rough=len(lacking) > len(rates) // 2,
    )


def _ratios(rates: Sequence[Rate], known: dict[str, ProbeFindings], like: MachineSpec) -> Ratios:
    """How many times as long this machine takes as the profile's, by what was measured; 1 where nothing was. On a busy
    machine a larger product may seem to take no longer: such a rate tells no speed."""

    def median(op: str, few: bool) -> float:
        ratios = [
            (ours.s_per_byte / theirs.s_per_byte) if few else (ours.s_per_flop / theirs.s_per_flop)
            for ours in rates
            if (ours.lane, ours.op) == (CPU, op)
            and ((ours.rows == 1 and ours.s_per_byte > 0) if few else ours.s_per_flop > 0)
            for theirs in like.rates
            if key(ours) == key(theirs)
        ]
        return statistics.median(ratios) if ratios else 1.0

    def disk(op: str, nbytes: int) -> float:
        ours = [rate for rate in rates if (rate.lane, rate.op) == (DISK.reads, op)]
        theirs = seconds(like.rate(DISK.reads, op, "*"), nbytes)
        if ours:
            return seconds(ours[0], nbytes) / theirs
        speeds = [reads.bytes_per_s for reads in (known[READS].reads if READS in known else ()) if not reads.most_bytes]
        return nbytes / speeds[0] / theirs if op == "*" and speeds else 1.0

    return Ratios(median("ffn", True), median("ffn", False), disk("*", UNIT_BYTES), disk("fetch", UNIT_BYTES))
