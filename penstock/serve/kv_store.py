"""Keeps KV pages in a folder, so that prompts go on from them after a restart: one file a page, named by the digest of
all tokens up to its end (`serve.pages`).

A file is the checksum of its content, then the page's K and V layer after layer, as they lie in the pools. It does not
matter where pools lie: a plan with KV on a disk finds what a plan with KV in RAM has kept. What a file holds is
compared with its checksum when it is read. A file that is wrong is removed, and its tokens go through the model again.
Pages of another model, format or length lie in another folder, whose name is a digest of all these. The folder is for
its owner alone, since whoever has the KV of a text, and the model, can find out the text.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.graph.arenas import Layout
from penstock.spec import codec
from penstock.spec.plan import Plan
from penstock.store.files import Output, is_aside, open_regular, storage_errors

Parts = Iterable[NDArray[np.uint8]]  # of a page, in order; a part is valid until the next one is asked for
_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_SUM_BYTES = 32
_FORMAT = b"penstock KV page 1"


def store_key(plan: Plan, sums: bytes | None, exact: bool) -> bytes:
    """What the KV of a text depends on beside the text, 16 bytes. `sums`: the checksums of the model's weights.
    `exact`: whether activations are rounded. Raises BadRequest for a model that is not compared with its checksums."""
    if sums is None:
        raise BadRequest("pages are kept by the checksums of the weights: leave out --no-verify, or --keep-kv")
    tokens = (plan.page_tokens, plan.page_tokens * Layout(plan).kv.page_group)
    about = [codec.to_json(plan.target.spec), plan.target.weights.name, tokens, plan.context, exact]
    if plan.sparsity in ("predict", "threshold"):  # neurons that are left out change K and V of later layers
        about += [plan.sparsity, plan.levels]
    if plan.value_share < 1:  # and so do values that attention leaves out
        about.append(plan.value_share)
    about += [(home.format.name, home.attend) for home in plan.kv for _ in range(*home.layers)]
    return blake2b(_FORMAT + repr(about).encode() + blake2b(sums).digest(), digest_size=16).digest()


class KvStore:
    """Pages of one model in `folder`, at most `limit_bytes` of them; where there are more, the one longest unused goes.
    Raises StorageFailed where the folder cannot be made or read."""

    def __init__(self, folder: Path, key: bytes, page_bytes: int, limit_bytes: int) -> None:
        self._folder, self._file_bytes = folder / key.hex(), _SUM_BYTES + page_bytes
        self._most, self._pages = limit_bytes // self._file_bytes, OrderedDict[bytes, None]()  # the oldest first
        with storage_errors("use", self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = []
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if is_aside(entry.name):  # left by a process that was killed
                        os.unlink(entry.path)
                    elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        files.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        for _, name in sorted(files):
            self._pages[bytes.fromhex(name[:32])] = None
        self._shrink(self._most)

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def use(self, digests: Iterable[bytes]) -> None:
        """Notes that these pages will be read. Other pages are removed before them."""
        for digest in digests:
            if digest in self._pages:
                self._pages.move_to_end(digest)

    def save(self, digest: bytes, parts: Parts) -> None:
        """Writes a page. Raises StorageFailed."""
        if not self._most or digest in self._pages:
            return
        self._shrink(self._most - 1)
        file = self._file(digest)
        with storage_errors("write", file), Output(file) as output:
            output.stream.write(bytes(_SUM_BYTES))
            checksum = _sum(digest)
            for part in parts:
                checksum.update(part.data)
                output.stream.write(part.data)
            output.stream.seek(0)
            output.stream.write(checksum.digest())
            output.commit()
        self._pages[digest] = None

    def load(self, digest: bytes, rooms: Parts) -> bool:
        """Reads a page into its place. False where it is not there or not what was written; then the place holds
        anything. Raises StorageFailed where the place is on a disk that fails."""
        file, checksum = self._file(digest), _sum(digest)
        try:
            with os.fdopen(open_regular(file), "rb", buffering=0) as stream:
                right = os.fstat(stream.fileno()).st_size == self._file_bytes
                expected = stream.read(_SUM_BYTES)
                for part in rooms if right else ():
                    if not (right := _fill(stream.fileno(), part)):
                        break
                    checksum.update(part.data)
            right = right and expected == checksum.digest()
        except (OSError, BrokenModel):
            right = False
        if right:
            self._pages.move_to_end(digest)
            with suppress(OSError):
                os.utime(file)
        else:
            self._remove(digest)
        return right

    def _file(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}.kv"

    def _shrink(self, most: int) -> None:
        while len(self._pages) > most:
            self._remove(next(iter(self._pages)))

    def _remove(self, digest: bytes) -> None:
        self._pages.pop(digest, None)
        with suppress(OSError):
            self._file(digest).unlink()


def _fill(fd: int, view: NDArray[np.uint8]) -> bool:
    done = 0
    while done < view.nbytes:
        if not (n := os.readv(fd, [view.data[done:]])):
            return False
        done += n
    return True


def _sum(digest: bytes) -> blake2b:
    """The checksum of a page before its first byte."""
    return blake2b(digest, digest_size=_SUM_BYTES)
