"""A file of random bytes, not a whole number of pages, open for direct reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock import _native


class RandomFile:
    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.content = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        path.write_bytes(self.content.tobytes())
        self.fd, self.direct = _native.open_direct(str(path))


@contextmanager
def random_file(nbytes: int) -> Iterator[RandomFile]:
    """Not in /tmp, which is often RAM: that has no disk to read around the page cache."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        opened = RandomFile(Path(folder) / "random", nbytes)
        yield opened
        os.close(opened.fd)
