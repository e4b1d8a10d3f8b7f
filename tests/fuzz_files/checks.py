"""What every case must be, whatever was in its files: an exit code, one line of error, nothing changed, in time."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.cli.output import one_line
from tests.fuzz_files.child import LIMIT_S, Outcome
from tests.fuzz_files.scenes import Case
from tests.fuzz_files.world import Place

KINDS = ("tracebacks", "aborts", "over_5_s", "changed_files", "bad_exit_codes", "bad_output", "orphans")

_LONGEST_LINE = 2000
_COMPARED_BYTES = 1 << 20
# Progress on stderr, as `cli.output.progress_line` writes it.
_PROGRESS = re.compile(r"(packing|writing|verifying|loading|scoring).*: .* of .*")
_FRAME = re.compile(r'File "[^"]*/(penstock/[^"]*)", line \d+, in (\w+)')

# name → (kind, size, time, the first MiB)
Snapshot = dict[str, tuple[object, ...]]


@dataclass(frozen=True)
class Fault:
    """`kind`: one of KINDS. `signature`: cases of the same one are probably the same mistake."""

    kind: str
    signature: str
    what: str


def snapshot(place: Place) -> Snapshot:
    """All that a command may not change: everything but the cache and what it was told to write."""
    found: Snapshot = {}
    for folder in (place.model, place.given, place.cwd, place.home):
        for entry in _walk(str(folder), str(place.cache)):
            status = entry.stat(follow_symlinks=False)
            content = b""
            if stat.S_ISREG(status.st_mode):
                with open(entry.path, "rb", buffering=0) as stream:
                    content = stream.read(_COMPARED_BYTES)
            # A folder's time changes where a file comes and goes again, as one that is written aside does.
            time_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
            found[os.path.relpath(entry.path, place.root)] = (status.st_mode, status.st_size, time_ns, content)
    return found


def _walk(folder: str, but: str) -> Iterable[os.DirEntry[str]]:
    for entry in os.scandir(folder):
        if entry.path == but:
            continue
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, but)


def faults(case: Case, outcome: Outcome, before: Snapshot, after: Snapshot, codes: tuple[int, ...]) -> list[Fault]:
    """What is wrong with a case. `codes`: what it may end with."""
    command = case.argv[0]
    out, err = outcome.out.decode("utf-8", "replace"), outcome.err.decode("utf-8", "replace")
    found: list[Fault] = []

    def add(kind: str, signature: str, what: str) -> None:
        found.append(Fault(kind, f"{kind}: {command}: {signature}", what))

    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if len(changed) == 1 and changed[0] not in before and _is_its_output(changed[0], case):
        changed = []
    if changed:
        kinds = ", ".join(_kind_of(name, case) for name in changed[:3])
        add("changed_files", kinds, f"changed: {', '.join(changed)}")
    if outcome.orphans:
        add("orphans", "processes left", f"{outcome.orphans} processes outlived the command")
    if outcome.late or outcome.seconds > LIMIT_S:
        add(
            "over_5_s",
            case.name.partition(":")[0],
            f"{outcome.seconds:.1f} s, {outcome.cpu_seconds:.1f} s of them computing",
        )
        return found
    if outcome.code < 0:
        add("aborts", f"signal {-outcome.code}, {_last_line(err)}", f"ended by signal {-outcome.code}")
        return found
    if "Traceback" in err or outcome.code in (1, 99):
        add("tracebacks", f"{_where(err)} {_last_line(err)}", _last_line(err))
        return found
    if outcome.code not in codes:
        add("bad_exit_codes", f"{outcome.code} {_last_line(err)}", f"exit code {outcome.code}, not one of {codes}")
    for complaint in _output_faults(case, outcome.code, out, err):
        add("bad_output", complaint, complaint)
    return found


def _output_faults(case: Case, code: int, out: str, err: str) -> Iterable[str]:
    """stderr: lines of ours alone, one of them the error; stdout: JSON last where it was asked for."""
    # Where a line is our own progress it may hold what moves the cursor; what is in files may not.
    lines = err.split("\n")[:-1] if err.endswith("\n") or not err else err.split("\n")
    for line in lines:
        if not line.startswith(("penstock: ", "Try `penstock")) and not _PROGRESS.fullmatch(line):
            yield f"stderr has a line that is not ours: {line[:60]!r}"
        if len(line) > _LONGEST_LINE:
            yield f"stderr has a line of {len(line) // 1000} thousand characters: {line[:60]!r}"
        if any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 for c in line):
            yield f"stderr has control characters in {_shape(line)}"
    if code == 2 and not lines:
        yield "exit code 2 and no word"
    if "--json" not in case.argv:
        return
    try:
        last = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        yield "the last line of stdout is not JSON"
        return
    if code == 2:
        message = last.get("error", {}).get("message", "") if isinstance(last, dict) else ""
        errors = [line for line in lines if line == f"penstock: {one_line(message)}"]
        if len(errors) != 1:
            yield f"the error of the JSON line stands {len(errors)} times on stderr"


def _is_its_output(name: str, case: Case) -> bool:
    """A file that was not there may be made where `--trace` or `--svg` names it."""
    named = {word for flag, word in itertools.pairwise(case.argv) if flag in ("--trace", "--svg")}
    return str(case.file) in named and case.file.name == os.path.basename(name)


def _kind_of(name: str, case: Case) -> str:
    """A changed file's name, of the seed's own file `the seed's file`."""
    return "the seed's file" if case.file.name == os.path.basename(name) else name


def _where(err: str) -> str:
    """The last frame of ours in a traceback."""
    frames = _FRAME.findall(err)
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "?"


def _last_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    return _shape(lines[-1].replace(" (PENSTOCK_DEBUG=1 shows where)", "")) if lines else ""


def _shape(line: str) -> str:
    """A line without its numbers, paths and quotations, so that the same mistake reads the same."""
    line = re.sub(r"/\S+/", "", line)
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line)
    return re.sub(r"\d+(\.\d+)?", "N", line)[:140]
