"""gpt-oss-20b's shape as it is published, experts in MXFP4, for `bench.files`: beside llama.cpp on the same file.

The file has 12 GB, so one engine after the other is alone in memory, in a process of its own, with an empty page cache.
Both follow the same random text, token by token. In RAM llama.cpp reads the file into memory, repacked where it can;
within a memory cgroup it maps it.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings
from bench.cgroup import Cgroup
from bench.cpu import spread
from bench.files_start import Start
from bench.offload_engines import started, tell
from bench.peers import Worker
from bench.peers.random_gguf import MXFP4, load_config, write
from penstock.runtime import host
from penstock.runtime.probe import load_or_probe
from penstock.serve.shapes import locate

SHAPE, LIMIT_GB, CONTEXT, PREFILL_TOKENS = "gpt-oss-20b", 8.0, 1024, 512
WARM_TOKENS, DECODE_TOKENS = 4, 32
OFFLOAD_WARM, OFFLOAD_TOKENS, PEER_TOKENS = 32, 32, 12  # within the limit a token of the peer's takes seconds

Figures = dict[str, Any]


def shape_config() -> Path:
    """The config.json of the whole shape."""
    shape = locate(Path(SHAPE))
    return shape / "config.json" if shape.is_dir() else shape


class Mxfp4:
    """The file and what is packed of it in `folder`. `layers`: so many of the shape's, None for all. With fewer of them
    `limit_bytes` is smaller in proportion, which is harder: embedding and head stay whole."""

    def __init__(self, folder: Path, layers: int | None = None) -> None:
        self.folder, self.cache, self.threads = folder, folder / "cache", host.usable_cpus()
        config = load_config(shape_config())
        whole: int = config["num_hidden_layers"]
        if layers is not None:
            config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
        self.layers: int = config["num_hidden_layers"]
        self.limit_bytes = round(LIMIT_GB * 1e9 * self.layers / whole) // 4096 * 4096
        self.config = folder / f"{SHAPE}-{self.layers}-layers.json"
        self.config.write_text(json.dumps(config))
        self.gguf, self.packed = self.config.with_suffix(".gguf"), folder / f"{SHAPE}-{self.layers}-packed"

    def make(self) -> None:
        """Writes what is missing."""
        if not self.gguf.exists():
            tell(f"writing {self.gguf.name}")
            write(self.config, self.gguf, mix=MXFP4)
        if not self.packed.exists():
            Start(self.gguf, self.cache).pack_into(self.packed)

    def probe(self) -> None:
        """Once, outside every cgroup."""
        load_or_probe(self.cache, disk_folder=self.folder, whole=True)

    def remove(self) -> None:
        shutil.rmtree(self.packed, ignore_errors=True)
        self.gguf.unlink(missing_ok=True)

    def ours(self, limit: int | None) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        within = ("--prompt", PREFILL_TOKENS) if limit is None else ("--limit", limit)
        arguments = ("--cache", self.cache, "--context", CONTEXT, *within)
        return started(self.folder, "bench.peers.routed", limit, self.packed, *arguments)

    def peer(self, limit: int | None) -> AbstractContextManager[tuple[Worker, Cgroup | None]]:
        arguments = ("--config", self.config, "--threads", self.threads, "--context", CONTEXT)
        return started(
            self.folder, "bench.peers.llamacpp", limit, self.gguf, *arguments, *(["--mmap"] if limit else [])
        )


def measure(bench: Mxfp4, rounds: int, section: str) -> Figures:
    """The figures of a section, ram or offload."""
    figures: Figures = {"layers": bench.layers, "file_bytes": bench.gguf.stat().st_size}
    return figures | _rounds(bench, rounds, section, None if section == "ram" else bench.limit_bytes)


def _rounds(bench: Mxfp4, rounds: int, section: str, limit: int | None) -> Figures:
    found: list[Figures] = []
    for i in range(rounds):
        figures: Figures = {}
        for turn in (_ours, _peer) if i % 2 == 0 else (_peer, _ours):
            figures |= turn(bench, limit)
        figures["decode_vs_llamacpp"] = figures["tokens_per_s"] / figures["llamacpp_tokens_per_s"]
        if limit is None:
            figures["prefill_vs_llamacpp"] = figures["prefill_tokens_per_s"] / figures["llamacpp_prefill_tokens_per_s"]
        tell(f"{SHAPE}, {section}, round {i + 1} of {rounds}: {json.dumps(figures)}")
        found.append(figures)
    medians = {name: spread([figures[name] for figures in found])["median"] for name in found[0]}
    if limit is None:
        return medians
    renamed = {f"offload_{name}": value for name, value in medians.items()}
    renamed["offload_vs_llamacpp"] = renamed.pop("offload_decode_vs_llamacpp")
    return renamed | {"offload_limit_bytes": limit}


def _ours(bench: Mxfp4, limit: int | None) -> Figures:
    ceilings = Ceilings(sorted(bench.packed.glob("*.safetensors")))
    with bench.ours(limit) as (worker, _):
        # Ceilings come first: 8 tokens after 3 s of other work take 1.3 times as long. The peer has no such pause.
        before = ceilings.read()
        worker.ask("follow", WARM_TOKENS if limit is None else OFFLOAD_WARM)
        answer = worker.ask("follow", DECODE_TOKENS if limit is None else OFFLOAD_TOKENS)
        after = ceilings.read()
        facts = worker.facts
        read = facts["dense_bytes"] + facts["routed_layers"] * facts["active"] * facts["expert_bytes"]
        rate = (DECODE_TOKENS if limit is None else OFFLOAD_TOKENS) / answer["seconds"]
        figures = {
            "tokens_per_s": rate, "predicted_tokens_per_s": facts["predicted_tokens_per_s"],
            "bytes_per_token": read, "hit_rate": answer["hit_rate"], "peak_host_bytes": answer["peak_host_bytes"],
            "ram_read_bytes_per_s": (before.ram_read_bytes_per_s + after.ram_read_bytes_per_s) / 2,
            "disk_read_bytes_per_s": (before.disk_read_bytes_per_s + after.disk_read_bytes_per_s) / 2,
        }  # fmt: skip
        if limit is None:
            figures["prefill_tokens_per_s"] = PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]
    ceilings.close()
    return figures


def _peer(bench: Mxfp4, limit: int | None) -> Figures:
    with bench.peer(limit) as (worker, _):
        worker.ask("follow", WARM_TOKENS)
        tokens = DECODE_TOKENS if limit is None else PEER_TOKENS
        figures = {"llamacpp_tokens_per_s": tokens / worker.ask("follow", tokens)["seconds"]}
        if limit is None:
            figures["llamacpp_prefill_tokens_per_s"] = PREFILL_TOKENS / worker.ask("prefill", PREFILL_TOKENS)["seconds"]
    return figures
