"""Opens a batch's requests and its answers, which may have been begun when the model had no packed copy yet.

An answer's id tells the model. A packed one is called by its checksums. Those of a checkpoint are known when it is
packed, so answers that a first use begins call it by its files' stamps (size, times, inode). Its copy's record has them
too: so the same command goes on with these answers when there is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from penstock.serve.batch.journal import Journal, OtherAnswers
from penstock.serve.batch.lines import Lines
from penstock.serve.source import Source
from penstock.store import copies
from penstock.store.predictors import model_sha256


def model_names(source: Source) -> tuple[str, ...]:
    """What the model may be called in answers that were begun. New ones call it by the first. Raises BrokenModel,
    StorageFailed."""
    if source.to_write is not None:
        return (copies.made_from(source.to_write.stamps, source.to_write.job.weights.name),)
    record = copies.read_record(source.folder)
    before = () if record is None else tuple(copies.made_from(each.stamps, record.weights) for each in record.origins)
    return (model_sha256(source.folder), *before)


@contextmanager
def opened(requests: Path, out: Path, keys: Sequence[str]) -> Iterator[tuple[Lines, Journal]]:
    """The requests and their answers, by the first of these keys that the file of answers was begun with, or the very
    first where it is new. `keys`: names for the model and all that may change its answers, as for `Lines`. Raises
    OtherAnswers where the file was begun with none of them, and as `Lines` and `Journal`."""
    *others, last = keys
    for key in others:
        with closing(Lines(requests, key)) as lines:
            try:
                journal = Journal(out, lines)
            except OtherAnswers:
                continue
            with closing(journal):
                yield lines, journal
            return
    with closing(Lines(requests, last)) as lines, closing(Journal(out, lines)) as journal:
        yield lines, journal
