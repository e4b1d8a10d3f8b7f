"""A file of random bytes, not a whole number of pages, open for direct reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock import _native
from penstock.units import MIB


class RandomFile:
    def __init__(self, path: Path, nbytes: int = 5 * MIB + 1234) -> None:
        self.path = path
        self.content = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        path.write_bytes(self.content.tobytes())
        self.fd, self.direct = _native.open_direct(str(path))
