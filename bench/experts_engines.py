"""The models of `bench.experts`, and how each engine is started: alone with a memory limit and an empty page cache."""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from bench.budgets import budget_bytes
from bench.ceilings import Ceilings
from bench.cgroup import Cgroup
from bench.offload_engines import started, tell
from bench.peers import Worker
from bench.peers import random_gguf as gguf
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.serve.shapes import locate
from penstock.spec.format import parse_format
from penstock.store.profile_file import FILE as PROFILE
from penstock.store.synth import synth

SHAPE, WEIGHTS = "qwen3-30b-a3b", "int4"
TABLES = {"uniform": 0.0, "skewed": 0.5}  # how the norms of routers' rows fall
CONTEXT, PREFILL_TOKENS = 1024, 512
LEAST_GB = "4.9"
EXPERT_DEPTHS = (2, 4, 8)  # reads of one expert in flight: a layer may miss as many
# Experts are read to their slots, which no cache of a processor holds. On a Sapphire Rapids 2 reads in flight to two
# places gave 2.2 GB/s, to places all over 1 GiB 1.87 (docs/LOG.md).
ROOM_BYTES = 1 << 30


class Engines:
    """The models of `folder`, of one table at a time: two do not fit on a common disk."""

    def __init__(self, folder: Path, config: Path | None) -> None:
        whole = locate(Path(SHAPE))
        self.folder, self.cache, self.config = folder, folder / "cache", config or whole
        self.name = config.stem if config else SHAPE
        self._whole = whole
        self.threads = host.usable_cpus()
        self.table = ""

    def limit(self, gb: str) -> int:
        """The bytes of a budget."""
        return budget_bytes(float(gb), self.config, self._whole, WEIGHTS)

    @property
    def packed(self) -> Path:
        return self.folder / f"{self.name}-{WEIGHTS}-{self.table}"

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.name}-q4_0-{self.table}.gguf"

    def make(self, table: str, beside: bool) -> None:
        """Writes what is missing of the table's models, the peer's too if something runs `beside` ours, and removes
        the other table's."""
        for other in TABLES.keys() - {table}:
            self.table = other
            shutil.rmtree(self.packed, ignore_errors=True)
            self.gguf.unlink(missing_ok=True)
        self.table = table
        if not self.packed.exists():
            tell(f"writing {self.packed.name}")
            synth(self.config, self.packed, parse_format(WEIGHTS), router_skew=TABLES[table])
        if beside and not self.gguf.exists():
            tell(f"writing {self.gguf.name}")
            unfinished = self.gguf.with_suffix(".unfinished")
            gguf.write(self.config, unfinished, TABLES[table])
            unfinished.rename(self.gguf)
        os.sync()

    def ready(self) -> None:
        """Probes the machine, and keeps what routers say beside the model. What was done stays."""
        load_or_probe(self.cache, disk_folder=self.folder, whole=True)
        if not (self.packed / PROFILE).exists():
            tell("asking routers about other random tokens, as `penstock profile` does")
            # By the plan of the least budget, for answers are the same by any. In no cgroup: what is heard counts too.
            within = ("--limit", self.limit(LEAST_GB), "--prompt", PREFILL_TOKENS)
            with self.ours(None, *within) as (worker, _):
                worker.ask("profile", PREFILL_TOKENS)

    def ours(self, limit: int | None, *more: object) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        within = () if limit is None else ("--limit", limit)
        arguments = ("--cache", self.cache, "--context", CONTEXT, *within, *more)
        return started(self.folder, "bench.peers.routed", limit, self.packed, *arguments)

    def peer(self, limit: int | None, how: str) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        arguments = ("--config", self.config, "--threads", self.threads, "--context", CONTEXT, *filter(None, [how]))
        return started(self.folder, "bench.peers.llamacpp", limit, self.gguf, *arguments)

    def ceilings(self, expert_bytes: int | None = None, room_bytes: int = 0) -> Ceilings:
        """Of large reads, or of reads of one expert. `room_bytes`: as for `Ceilings`."""
        files = sorted(self.packed.glob("*.safetensors"))
        if expert_bytes is None:
            return Ceilings(files)
        return Ceilings(files, (expert_bytes,), EXPERT_DEPTHS, room_bytes)
