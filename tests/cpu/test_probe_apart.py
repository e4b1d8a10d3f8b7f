"""The whole probe ends by the clock, keeps what it found out, and goes on from there."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.cli.bar import bar_line
from penstock.cli.probe import summary
from penstock.errors import StorageFailed
from penstock.kernels import cpu
from penstock.runtime.fit import Fit, straight
from penstock.runtime.probe_apart import Begun, _keep, begun_in, probe_apart
from penstock.runtime.probe_ops import FORMATS, KV_FORMATS
from penstock.runtime.probe_parts import LOADS, RAM, READS, SHARED, ProbeFindings, part_of, parts
from penstock.runtime.probe_scaled import profile
from penstock.spec.machine import USUAL_READS

LIKE = profile(cpu.best_isa()[0])
NAMES = [part.name for part in parts(FORMATS, KV_FORMATS)]


def known(*without: str) -> dict[str, ProbeFindings]:
    """What a probe of the profile's machine would have found, but for some parts."""
    of = {name: tuple(r for r in LIKE.rates if part_of(r, FORMATS) == name) for name in NAMES if name not in without}
    found = {name: ProbeFindings(rates) for name, rates in of.items()}
    found |= {READS: ProbeFindings(reads=(USUAL_READS,))} if READS in found else {}
    return found | ({SHARED: ProbeFindings(sharing=LIKE.sharing)} if SHARED in found else {})


def test_every_rate_belongs_to_a_part() -> None:
    assert {part_of(rate, FORMATS) for rate in LIKE.rates} | {READS, SHARED} == set(NAMES)


def test_it_goes_on_with_what_is_lacking(tmp_path: Path) -> None:
    """A part that had no time for all of its rates is measured again, too."""
    kept, seen = tmp_path / "kept.json", list[str]()
    found = known(RAM)
    found[LOADS] = ProbeFindings(found[LOADS].rates[:1])
    _keep(kept, found)
    machine = probe_apart(tmp_path, lambda name, *_: seen.append(name), kept=kept, most_s=600)
    assert set(seen) - {""} <= {LOADS, RAM}
    assert not kept.exists() and "no time" not in machine.source and not machine.rough
    assert machine.rate("host", "ffn", "int8", 512) == LIKE.rate("host", "ffn", "int8", 512)
    assert machine.reads == (USUAL_READS,) and machine.sharing == LIKE.sharing
    assert machine.rate("host", "*", "*").s_per_byte != LIKE.rate("host", "*", "*").s_per_byte


def test_time_that_does_not_suffice_is_told(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    _keep(kept, known("int8 products", SHARED))
    machine = probe_apart(tmp_path, kept=kept, most_s=1.2)  # a part of it is not even begun
    assert "no time for" in machine.source and "int8 products" in machine.source
    assert machine.rate("host", "ffn", "int8").r2 == LIKE.rate("host", "ffn", "int8").r2 and not machine.rough
    assert "int4 products" in begun_in(kept).parts


def test_what_is_old_or_damaged_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.json"
    assert begun_in(kept) == Begun()
    kept.write_text("{")
    assert begun_in(kept) == Begun()
    _keep(kept, known())
    assert list(begun_in(kept).parts) == list(known())
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 90_000)
    assert begun_in(kept) == Begun()


def test_a_child_that_fails_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="cannot measure the disk"):
        probe_apart(tmp_path / "file")
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit('no such thing')"]
    monkeypatch.setattr("penstock.runtime.probe_apart.command", lambda *_: command)
    with pytest.raises(StorageFailed, match="no such thing"):
        probe_apart(tmp_path)


def replaced(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """These lines of Python run in place of the child."""
    code = "\n".join(("import os, signal, sys, time", *lines))
    monkeypatch.setattr("penstock.runtime.probe_apart.command", lambda *_: [sys.executable, "-c", code])


def test_a_child_that_will_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replaced(
        monkeypatch,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        """print('{"told": "deaf"}', flush=True)""",
        "time.sleep(600)",
    )
    monkeypatch.setattr("penstock.runtime.probe_apart._WAIT_S", 0.1)
    deaf, seen = threading.Event(), list[str]()

    def hear(text: str) -> None:
        seen.append(text)
        deaf.set()
        # Its time is over at once, but not before it has become deaf.
        monkeypatch.setattr("penstock.runtime.probe_apart._KILLED_S", 1e9)

    assert probe_apart(tmp_path, tell=hear).rough and seen == ["deaf"]


@pytest.mark.parametrize("code", (0, 3))
def test_a_line_that_was_cut_off(code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replaced(
        monkeypatch,
        "sys.stdin.read()",
        """print('{"told": "an', end='', flush=True)""",
        "sys.stderr.write('out of luck')",
        f"os._exit({code})",
    )
    with pytest.raises(StorageFailed, match='it said {"told": "an' if code == 0 else "out of luck"):
        probe_apart(tmp_path)


def test_a_child_that_says_no_more_and_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replaced(monkeypatch, "sys.stdin.read()", "os.close(1)", "time.sleep(600)")
    monkeypatch.setattr("penstock.runtime.probe_apart._WAIT_S", 0.2)
    with pytest.raises(StorageFailed, match="had not ended 0 s after its last word"):
        probe_apart(tmp_path)


def test_straight_fits_count_where_there_are_some() -> None:
    line, crooked = Fit(1.0, 2.0, 0.99), Fit(1.0, 9.0, 0.3)
    assert straight([crooked, line]) == [line] and straight([crooked]) == [crooked]


def test_the_bar_fits_its_line() -> None:
    assert bar_line("measuring", "int8 products", 0.5, 24, 79).startswith("measuring ━━━━━━━━━━━━──────────── ")
    for columns in range(1, 100):
        assert len(bar_line("measuring this machine", "the disk beside computing", 0.07, 59, columns)) <= columns


def test_the_picture_of_a_machine() -> None:
    lines = summary(LIKE)
    assert len(lines) == 8 and max(map(len, lines[1:])) <= 80
    assert lines[1].startswith("  ┌ disk ──") and "GB/s▶" in lines[2] and "processor" in lines[1]
    assert len({line.rstrip().rfind(end) for line, end in zip(lines[1:5], "┐││┘", strict=True)}) == 1


def test_the_picture_stands_upright_in_forty_columns() -> None:
    lines, wide = summary(LIKE, 40), summary(LIKE, 80)
    picture = lines[1 : 1 + 3 * 4 + 2]
    assert wide == summary(LIKE) and max(map(len, picture)) <= 40
    assert [line[2] for line in picture] == [*"┌││└", " ", *"┌││└", " ", *"┌││└"]
    assert "GB/s ▼" in picture[4] and picture[4].endswith("▲")
    assert lines[1 + len(picture) :] == wide[5:]
