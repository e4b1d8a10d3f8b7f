"""The models of `bench.offload`, and how each engine is started: alone with a memory limit and an empty page cache."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.budgets import budget_bytes
from bench.ceilings import Ceilings
from bench.cgroup import Cgroup, drop_page_cache, limited
from bench.cpu import DEFAULT_SHAPES, write_models
from bench.peers import Worker
from bench.peers import random_checkpoint as checkpoints
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.store.pack import pack

CONTEXT = 1024
LARGE, SMALL = DEFAULT_SHAPES["8b"], DEFAULT_SHAPES["1b"]


class Engines:
    """The models of `folder`, and how one engine after the other is started within a limit."""

    def __init__(self, folder: Path, large: Path = LARGE, small: Path = SMALL) -> None:
        """`large`, `small`: config.json of other llamas in the place of "8b" and "1b"."""
        self.folder, self.cache = folder, folder / "cache"
        self.threads = host.usable_cpus()
        self.large, self.small = large, small

    @property
    def config_file(self) -> Path:
        """Of what llama.cpp runs."""
        return self.large

    def limit(self, shape: str, gb: float) -> int:
        """Bytes of a budget, for shapes other than 8b and 1b as much larger or smaller as their weights are."""
        if shape == "8b":
            return budget_bytes(gb, self.large, LARGE, "int4")
        return budget_bytes(gb, self.small, SMALL, "bfloat16" if shape == "1b_bf16" else "int4")

    def probe(self) -> None:
        """Once, outside every cgroup."""
        load_or_probe(self.cache, disk_folder=self.folder, whole=True)

    def packed(self, shape: str) -> Path:
        return self.folder / (f"{self.large.stem}-int4" if shape == "8b" else f"{self.small.stem}-bfloat16")

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.large.stem}-q4_0.gguf"

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.small.stem}-checkpoint"

    def write(self, shape: str) -> None:
        """Makes what is missing. Packed from the very checkpoint that the peer reads, where it reads one."""
        if shape == "8b":
            write_models(self.large, self.packed("8b"), self.gguf)
        else:
            if not self.checkpoint.exists():
                tell(f"writing {self.checkpoint.name}")
                checkpoints.write(self.small, self.checkpoint)
            if not self.packed(shape).exists():
                tell(f"packing {self.packed(shape).name}")
                pack(self.checkpoint, self.packed(shape))
        os.sync()

    def ceilings(self, shape: str) -> Ceilings:
        return Ceilings(sorted(self.packed(shape).glob("*.safetensors")))

    @contextmanager
    def ours(self, shape: str, limit: int | None, *more: object) -> Iterator[tuple[Worker, Cgroup | None]]:
        """Without a limit everything stays in memory, outside any cgroup."""
        within = () if limit is None else ("--limit", limit)
        arguments = ("--cache", self.cache, "--context", CONTEXT, *within, *more)
        with started(self.folder, "bench.peers.streamed", limit, self.packed(shape), *arguments) as ours:
            yield ours

    @contextmanager
    def llamacpp(self, limit: int) -> Iterator[tuple[Worker, Cgroup | None]]:
        arguments = ("--config", self.config_file, "--threads", self.threads, "--context", CONTEXT, "--mmap")
        with started(self.folder, "bench.peers.llamacpp", limit, self.gguf, *arguments) as peer:
            yield peer

    @contextmanager
    def accelerate(self, limit: int, cpu_bytes: int, copied: bool) -> Iterator[tuple[Worker, Cgroup | None]]:
        with tempfile.TemporaryDirectory(prefix="offload-", dir=self.folder) as offload:
            split = ("--cpu-bytes", cpu_bytes, *(["--copied"] if copied else []))
            arguments = ("--offload", offload, "--threads", self.threads, *split)
            with started(self.folder, "bench.peers.accelerate", limit, self.checkpoint, *arguments) as peer:
                yield peer


@contextmanager
def started(folder: Path, module: str, limit: int | None, *arguments: object) -> Iterator[tuple[Worker, Cgroup | None]]:
    """A worker whose process is alone in a cgroup of so many bytes; None: in none. The page cache holds none of the
    models of `folder`."""
    drop_page_cache(file for file in folder.glob("**/*") if file.is_file())
    with ExitStack() as stack:
        cgroup = stack.enter_context(limited(limit)) if limit is not None else None
        worker = Worker(module, *arguments, cgroup=cgroup.folder if cgroup else None)
        stack.callback(worker.close)
        try:
            yield worker, cgroup
        except BaseException:  # the bench is stopped: a pass within a small limit may take minutes more
            worker.kill()
            raise


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """Flags for other shapes than 8b and 1b. Limits are as much larger or smaller as their weights are."""
    parser.add_argument("--large", type=Path, default=LARGE, help="config.json of a llama in the place of 8b")
    parser.add_argument("--small", type=Path, default=SMALL, help="config.json of a llama in the place of 1b")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
