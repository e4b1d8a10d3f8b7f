"""A finding: the case's files in a folder of their own, and a line that runs it again. One of each signature."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

from tests.fuzz_files.checks import Fault
from tests.fuzz_files.child import Outcome
from tests.fuzz_files.scenes import Case
from tests.fuzz_files.world import Place


def keep(folder: Path, place: Place, case: Case, outcome: Outcome, fault: Fault) -> Path | None:
    """Copies what the case was made of. None where a finding of the signature is there already."""
    target = folder / hashlib.sha256(fault.signature.encode()).hexdigest()[:10]
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        return None
    for path in (place.model, place.given):
        _copy(path, target / path.name)
    (target / "stdout").write_bytes(outcome.out[:100_000])
    (target / "stderr").write_bytes(outcome.err[:100_000])
    record = {
        "case": case.name,
        "signature": fault.signature,
        "what": fault.what,
        "again": f"python -m tests.fuzz_files --case {case.name}",
        "argv": case.argv,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 2),
        "cpu_seconds": round(outcome.cpu_seconds, 2),
        "peak_mib": outcome.peak_bytes >> 20,
    }
    (target / "finding.json").write_text(json.dumps(record, indent=1) + "\n")
    return target


def _copy(source: Path, target: Path) -> None:
    """Plain files of a sensible size; pipes, links and holes are for `--case` to make again."""
    for folder, _, names in os.walk(source):
        for name in names:
            file = Path(folder, name)
            status = file.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_size < 10 << 20:
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
