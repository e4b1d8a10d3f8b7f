"""The files of `penstock batch`: requests that change, answers that cannot be written, files of something else."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from penstock.cli.batch_told import ShownBatch
from penstock.cli.output import progress_line
from penstock.errors import BadRequest, StorageFailed
from penstock.serve.batch.answering import Done
from penstock.serve.batch.foretelling import Foretelling
from penstock.serve.batch.journal import Journal
from penstock.serve.batch.lines import Lines
from penstock.serve.decode_clock import DecodeClock
from tests.cpu.test_batch import answers, requests, write


def test_progress_says_what_is_left_once() -> None:
    """As it goes, and as promised; before the first answer as promised alone."""
    told: list[str] = []
    shown = ShownBatch(lambda *said: told.append(progress_line(*said, 2.0)), 1000)
    done = Done(DecodeClock.__new__(DecodeClock), Foretelling([0.1 * (i + 1) for i in range(1000)]))
    shown.tell(done)
    done.seconds, done.answers, done.tokens.output, done.bytes_moved = 60.0, 150, 24_000, {"disk0": 90 * 10**9}
    shown.tell(done)
    assert told == [
        "0 of 1000 answers, 0 tok/s, promised 1 min 40 s",
        "150 of 1000 answers, 400 tok/s, disk 1.50 GB/s, 5 min 40 s left (promised 1 min 25 s)",
    ]
    assert progress_line("foretelling, answers", 150, 1000, 2.0).endswith("150 of 1000, 2.0 a second, 7 min 5 s left")


def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Lines(write(tmp_path / "in", requests(3)), "m")) as lines:
        with closing(Journal(tmp_path / "out", lines)) as journal:
            journal.add(1, "r1", {"status_code": 200})
            real = os.write

            def half(fd: int, content: bytes) -> int:
                if content.startswith(b"{"):
                    return real(fd, content[: len(content) // 2])
                raise OSError(28, "No space left on device")

            with monkeypatch.context() as patched, pytest.raises(StorageFailed, match="No space left"):
                patched.setattr(os, "write", half)
                journal.add(0, "r0", {"status_code": 200})
            assert [each["custom_id"] for each in answers(tmp_path / "out")] == ["r1"]
            journal.add(2, "r2", {"status_code": 200})
        with closing(Journal(tmp_path / "out", lines)) as journal:
            assert journal.done == {1, 2}


FOREIGN = [
    b'{"id": "batch_req_6740ff0da1',
    b'{"id": "batch_req_6740ff0da18c8190b0c4e3a9a4d4a1c2", "custom_id": "a"}',
    b"my notes\n",
    b"my notes",
    b"{",
    b'{"id": "batch_req_"}\n',
    b'{"id": "batch_req_00000000000000000000000"}\n',
    b'{"id": 5}\n',
    b"[]\n",
    b"\n",
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("content", FOREIGN, ids=[str(content[:24]) for content in FOREIGN])
def test_a_file_of_something_else_stays(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(content)
    with closing(Lines(write(tmp_path / "in", requests(3)), "m")) as lines:
        if content == b"{":  # so begins an answer that was cut off, too
            with closing(Journal(tmp_path / "out", lines)) as journal:
                assert not journal.done
            return
        with pytest.raises(BadRequest, match="stays: its line 1 is no answer"):
            Journal(tmp_path / "out", lines)
    assert (tmp_path / "out").read_bytes() == content


def test_requests_that_change_meanwhile(tmp_path: Path) -> None:
    file = write(tmp_path / "in", requests(3))
    with closing(Lines(file, "m")) as lines:
        assert json.loads(lines.text(2))["custom_id"] == "r2"
        content = file.read_bytes()
        file.write_bytes(content.replace(b"r2", b"r3"))
        with pytest.raises(BadRequest, match="was changed while it was being answered: line 3"):
            lines.text(2)
        assert lines.number_of(lines.id_of(1)) == 1
        for other in (None, 5, "", "batch_req_", lines.id_of(1)[:-1], lines.id_of(1) + "0", lines.id_of(1).upper()):
            assert lines.number_of(other) is None
