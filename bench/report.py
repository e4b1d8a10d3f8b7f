"""The last line of a bench, which comes whatever fails: hours of figures are not lost to one part that ends early.

A bench runs its parts under `Report.part`, each by its name. Where one fails its error is told at once, the other parts
run all the same, and the bench ends with exit code 1 after its last line. SIGTERM and Ctrl-C end the bench, and its
last line has what was measured up to there.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Report:
    """`failed`: the parts that failed, each with its error; "bench" is what ended the bench itself."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """An error inside is kept and told on stderr, and what comes after the `with` goes on. So it does where a
        process of the bench ended (SystemExit of `bench.peers.WorkerEnded`), but not where the bench is to end."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failed[name] = _line(error)
            traceback.print_exc()
            print(f"{name} failed, and the bench goes on: {self.failed[name]}", file=sys.stderr, flush=True)


class Stopped(BaseException):
    """SIGTERM. It is no SystemExit, which turns and parts of a bench bear."""


@contextmanager
def last_line(line: Callable[[], dict[str, Any]]) -> Iterator[Report]:
    """Prints what `line` gives as one JSON object when the bench ends, however it ends, with `failed` in it if anything
    did. The exit code is 1 then."""
    report = Report()

    def stop(*_: object) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    ended: BaseException | None = None
    try:
        yield report
    except (Exception, SystemExit, KeyboardInterrupt, Stopped) as error:
        ended = error
        report.failed["bench"] = _line(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(line() | ({"failed": report.failed} if report.failed else {})), flush=True)
    if isinstance(ended, Stopped):
        sys.exit(str(ended))
    if ended is not None:
        raise ended
    if report.failed:
        sys.exit(f"failed: {', '.join(report.failed)}")


@contextmanager
def model_folder(kept: Path | None) -> Iterator[Path]:
    """Where a bench writes its models: in a folder that is kept, made if it is missing, or in a temporary one under
    /var/tmp. /tmp is RAM on many systems, which knows no direct reads and takes what is measured of the memory."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/var/tmp") as temporary:
        folder = (kept or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
