"""`python -m bench.files`: GGUF files as people have them, beside llama.cpp on the very same file.

gpt-oss-20b's shape in MXFP4: decode and prefill in RAM, decode within 8 GB (`bench.files_mxfp4`).
Of an 8B shape with random blocks, in the mixtures Q4_K_M and Q4_0 of llama.cpp's quantiser: packing beside the disk's
rate, from the command to the first word, decode and prefill in RAM, decode within a memory cgroup. Of the trained
models at hand, quantised by llama.cpp itself: perplexity, greedy agreement and KL divergence. Engines take turns,
ceilings are measured between the turns, and quotients are medians of what each round gives. A figure that could not be
measured is null, with a reason. With --results parts of it, by --mixes and --only, give one line together. The last
line is one JSON object, which comes whatever fails (`bench.report`).
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings
from bench.cgroup import whole_pages
from bench.cpu import Ceilings as RamCeilings
from bench.cpu import spread
from bench.files_mxfp4 import Mxfp4, shape_config
from bench.files_mxfp4 import measure as measure_mxfp4
from bench.files_parts import Parts
from bench.files_quality import TEXT, compare
from bench.files_start import Start
from bench.offload import Setting
from bench.offload_engines import Engines, tell
from bench.peers import Worker
from bench.peers.random_gguf import MIXES, MXFP4, bytes_per_token, load_config, write
from bench.report import last_line, model_folder
from bench.rounds import build, checksum, this_machine
from penstock.runtime import host
from penstock.units import GIB, format_bytes

CONFIG = Path(__file__).parent / "shapes" / "llama-3.1-8b.json"
SECTIONS = ("start", "ram", "offload", "quality")
LIMIT_GB, CONTEXT, PREFILL_TOKENS = 2.86, 1024, 512
DECODE_BYTES, MOST_DECODE_TOKENS = 54e9, 32  # of weights, about a second's worth
SPARE_BYTES = 4 * GIB  # beside two models in RAM: ceilings, KV, both processes
BARS = {
    "decode_vs_llamacpp": 1.0, "prefill_vs_llamacpp": 1.5, "offload_vs_llamacpp": 3.0, "offload_share_of_bound": 0.88,
    "second_run_vs_allowed": 1.0, "agreement": 0.98, "kl": 0.002,
}  # fmt: skip

ALWAYS = ("decode_vs_llamacpp", "prefill_vs_llamacpp", "offload_vs_llamacpp", "perplexity_ratio")

Figures = dict[str, Any]


class FileEngines(Engines):
    """A GGUF file, the model packed of it, and how each engine is started with one of them."""

    def __init__(self, folder: Path, config_file: Path, mix: str) -> None:
        super().__init__(folder, large=config_file)
        self.mix = mix

    def limit(self, shape: str, gb: float) -> int:
        """As it is said: whoever names another shape names its limit too."""
        return whole_pages(round(gb * 1e9))

    def packed(self, shape: str) -> Path:
        return self.folder / f"{self.config_file.stem}-{shape}"

    @property
    def gguf(self) -> Path:
        return self.folder / f"{self.config_file.stem}-{self.mix}.gguf"

    def write_file(self) -> None:
        if not self.gguf.exists():
            tell(f"writing {self.gguf.name}")
            write(self.config_file, self.gguf, mix=self.mix)


def in_ram(engines: FileEngines, rounds: int) -> Figures:
    """Both engines loaded at once, each in a process of its own."""
    config, model = load_config(engines.config_file), engines.packed(engines.mix)
    need = 2 * engines.gguf.stat().st_size + SPARE_BYTES
    if need > host.available_bytes():
        why = f"two models of {engines.gguf.name} need {format_bytes(need)} of free memory"
        return {"decode_vs_llamacpp": None, "prefill_vs_llamacpp": None, "ram_reason": why}
    ceilings = RamCeilings(engines.threads)
    context = min(CONTEXT, config["max_position_embeddings"])
    same = ("--threads", engines.threads, "--context", context)
    ours = Worker("bench.peers.ours", model, *same)
    peer = Worker("bench.peers.llamacpp", engines.gguf, "--config", engines.config_file, *same)
    tokens = int(max(4, min(MOST_DECODE_TOKENS, DECODE_BYTES // bytes_per_token(config))))
    prompt = min(PREFILL_TOKENS, context)
    found: list[Figures] = []
    for worker in (ours, peer):
        worker.ask("prefill", min(64, prompt))  # not counted
        worker.ask("decode", 2)
    for i in range(rounds):
        figures: Figures = {}

        def decode(figures: Figures = figures) -> None:
            before = ceilings.ram()
            answer = ours.ask("decode", tokens)
            ram = (before + ceilings.ram()) / 2
            figures["decode_tokens_per_s"] = tokens / answer["seconds"]
            figures["decode_share_of_ram"] = answer["bytes"] / answer["seconds"] / ram
            figures["ram_read_bytes_per_s"] = ram

        def peer_decode(figures: Figures = figures) -> None:
            figures["llamacpp_decode_tokens_per_s"] = tokens / peer.ask("decode", tokens)["seconds"]

        def prefill(figures: Figures = figures) -> None:
            figures["prefill_tokens_per_s"] = prompt / ours.ask("prefill", prompt)["seconds"]

        def peer_prefill(figures: Figures = figures) -> None:
            figures["llamacpp_prefill_tokens_per_s"] = prompt / peer.ask("prefill", prompt)["seconds"]

        turns: list[Callable[[], None]] = [decode, peer_decode, prefill, peer_prefill]
        for turn in turns if i % 2 == 0 else reversed(turns):
            turn()
        for name in ("decode", "prefill"):
            beside = figures[f"llamacpp_{name}_tokens_per_s"]
            figures[f"{name}_vs_llamacpp"] = figures[f"{name}_tokens_per_s"] / beside
        found.append(figures)
        tell(f"{engines.mix} in RAM, round {i + 1} of {rounds}: {_told(figures)}")
    facts = {"penstock": ours.facts, "llamacpp": peer.facts}
    ours.close()
    peer.close()
    spreads = {name: spread([figures[name] for figures in found]) for name in found[0]}
    return {**{name: s["median"] for name, s in spreads.items()}, "ram_ranges": spreads, "ram_facts": facts}


def within(engines: FileEngines, gb: float, rounds: int) -> Figures:
    """Decode within a cgroup of the limit, llama.cpp with mmap."""
    ceilings = Ceilings(sorted(engines.packed(engines.mix).glob("*.safetensors")))
    found = Setting(engines, engines.mix, gb, ceilings).measure(rounds)
    ceilings.close()
    return {
        "offload_vs_llamacpp": found["vs_llamacpp"],
        "offload_share_of_bound": found["share_of_bound"],
        "offload_tokens_per_s": found["tokens_per_s"],
        "offload_llamacpp_tokens_per_s": found["llamacpp_tokens_per_s"],
        "offload_limit_bytes": found["limit_bytes"],
        "offload": found,
    }


def sections(engines: FileEngines, wanted: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """What is asked for of one mixture, by section. What a section needs is there when it is given."""
    engines.write_file()
    start = Start(engines.gguf, engines.cache)
    if wanted.prepare or {"ram", "offload"} & set(wanted.only):
        if not engines.packed(engines.mix).exists():
            start.pack_into(engines.packed(engines.mix))
    if not wanted.prepare:
        engines.probe()
        size = {"file_bytes": engines.gguf.stat().st_size}
        if "start" in wanted.only:
            yield "start", lambda: size | start.measure(wanted.rounds)
            start.clear()
        if "ram" in wanted.only:
            yield "ram", lambda: size | in_ram(engines, wanted.rounds)
        if "offload" in wanted.only:
            yield "offload", lambda: size | within(engines, wanted.limit_gb, wanted.rounds)
    if not wanted.keep:
        shutil.rmtree(engines.packed(engines.mix), ignore_errors=True)
        engines.gguf.unlink()


def sections_of_mxfp4(folder: Path, wanted: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Of gpt-oss-20b's shape as it is published."""
    asked = [name for name in ("ram", "offload") if name in wanted.only]
    if not asked:
        return
    bench = Mxfp4(folder, wanted.mxfp4_layers)
    bench.make()
    if not wanted.prepare:
        bench.probe()
        for name in asked:
            yield name, lambda name=name: measure_mxfp4(bench, wanted.rounds, name)  # type: ignore[misc]
    if not wanted.keep:
        bench.remove()


def facts_of(wanted: argparse.Namespace) -> Figures:
    """What all parts of a file of results have in common. Hashes of what is read; `text` null where it is not there."""
    return {
        "shape": wanted.shape.stem,
        "configs": [checksum(wanted.shape), checksum(shape_config())],
        "mxfp4_layers": wanted.mxfp4_layers,
        "limit_gb": wanted.limit_gb,
        "text": checksum(wanted.text) if wanted.text.exists() else None,
        "characters": wanted.characters,
        "tokens": {"context": CONTEXT, "prefill": PREFILL_TOKENS, "decode": MOST_DECODE_TOKENS},
        "machine": this_machine(),
        "build": build(),
    }


def _told(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="where files lie; default a temporary folder (16 GB are written, 24 GB of gpt-oss)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the files in --folder for the next time")
    parser.add_argument("--shape", type=Path, default=CONFIG, metavar="CONFIG.JSON", help="of another llama")
    parser.add_argument("--limit-gb", type=float, default=LIMIT_GB, help="of the cgroup")
    parser.add_argument("--mixes", nargs="+", choices=(*MIXES, MXFP4), default=(*MIXES, MXFP4))
    parser.add_argument("--mxfp4-layers", type=int, help="so many of gpt-oss-20b's 24 layers, for less time and disk")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, default=TEXT, help="that perplexity is of")
    parser.add_argument("--characters", type=int, default=200_000, help="of the text")
    parser.add_argument(
        "--results", type=Path, metavar="FILE.json", help="keep parts here, and tell all that are there"
    )
    parser.add_argument("--prepare", action="store_true", help="write and pack the files in --folder, measure nothing")
    wanted = parser.parse_args()
    if wanted.prepare and not (wanted.folder and wanted.keep):
        parser.error("--prepare goes with --folder and --keep")
    start_s = time.perf_counter()
    facts = facts_of(wanted)
    parts = Parts(wanted.results, facts)

    def line() -> Figures:
        results = parts.line((*MIXES, MXFP4), ALWAYS)
        tell_bars(results)
        return {"bench": "files", **facts, "took_s": time.perf_counter() - start_s, **results}

    with last_line(line) as report, model_folder(wanted.folder) as folder, model_folder(None) as temporary:
        for mix in wanted.mixes:
            with report.part(mix):
                if set(wanted.only) - {"quality"}:
                    engines = FileEngines(folder, wanted.shape, mix)
                    of_mix = sections_of_mxfp4(folder, wanted) if mix == MXFP4 else sections(engines, wanted)
                    for name, part in of_mix:
                        with report.part(f"{mix} {name}"):
                            parts.measure(mix, name, part, wanted.rounds)
            if "quality" in wanted.only and not wanted.prepare:
                with report.part(f"{mix} quality"):
                    quality = partial(compare, mix, wanted.text, wanted.characters, temporary)
                    parts.measure(mix, "quality", quality, 1)


def tell_bars(results: Figures) -> None:
    for mix in results:
        for name, bar in BARS.items():
            if results[mix].get(name) is not None:
                print(f"{mix:8} {name:28} {results[mix][name]:8.3f}  (bar {bar})")
        for name, value in results[mix].items():
            if name not in BARS and isinstance(value, float | int | None):
                print(f"{mix:8} {name:28} {value if value is None else format(value, '.6g')}")


if __name__ == "__main__":
    main()
