"""`python -m bench.page`: the page and masks beside eight streams of a server.

`masks`  what holding answers to a JSON schema costs, with all weights in memory (`bench.masks`).
`cost`   what the open page costs the server: tokens/s with the page and with an empty tab, in turns; and the processor
         time of the server for one answer to /v1/live, as a share of the processors at the page's pace.
`open`   the page open for many minutes by the clock. It streams one of the eight answers itself, and asks for it again
         (Regenerate) when it ends; the others are of other clients. Twice a minute the tab's memory after a forced
         collection, its DOM nodes, the memory of its process, and how often it asked the server for /v1/live. The
         server has no limit, or with `--share` that share of one processor where it can be had.

`masks` and `cost` take a 1B shape, `open` the bundled model. The browser is Debian's Chromium without a window. It
takes processor time of this machine beside the server: `browser_cpu_share` says how much of one processor. The last
line is one JSON object; what did not run is null there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import masks
from bench.cgroup import slowed
from bench.clients import Server, Stream, counted_tokens_per_s, kept_busy, served
from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import tell
from bench.page_shots import BUNDLED
from bench.report import model_folder
from bench.tab import Tab, opened
from penstock.runtime import host
from penstock.runtime.host import cpu_s
from penstock.runtime.probe import load_or_probe
from penstock.runtime.this_machine import cpu_name

PARTS = ("masks", "cost", "open")
STREAMS, CONTEXT, TURN_S, LOOK_S = 8, 1024, 8.0, 30.0
ASKED = 200  # answers to /v1/live that are timed
EVERY_S = 2.0  # the page asks once in so many seconds
BARS = {"masks_cost_at_1": 0.03, "page_cost": 0.01, "live_cpu_share": 0.01, "updates_per_s": 2.0}

Figures = dict[str, Any]


def turns(server: Server, tab: Tab, count: int) -> Figures:
    costs = []
    for turn in range(count):
        found = {}
        for with_page in (True, False) if turn % 2 == 0 else (False, True):
            tab.open() if with_page else tab.leave()
            time.sleep(0.5)
            found[with_page] = counted_tokens_per_s(server, TURN_S)
        costs.append(1 - found[True] / found[False])
        tell(f"turn {turn + 1}: {found[True]:.2f} tokens/s with the page, {found[False]:.2f} without")
    return {"page_cost": statistics.median(costs), "page_costs": costs}


def live_cpu_share(server: Server) -> float:
    """Of one processor, for a page's questions: an answer's processor seconds of a server that does nothing else."""
    before_s = cpu_s(server.process_id)
    for _ in range(ASKED):
        server.get("/v1/live")
    return (cpu_s(server.process_id) - before_s) / ASKED / EVERY_S


def watched(server: Server, tab: Tab, minutes: float) -> Figures:
    """The figures of `open`. The tab streams already."""
    start_s = look_s = time.perf_counter()
    asked, answers = tab.asked, 0
    browser_s, server_s = tab.cpu_s(), cpu_s(server.process_id)
    found: list[tuple[int, int, int]] = []
    rates: list[float] = []
    while (now_s := time.perf_counter()) - start_s < 60 * minutes:
        time.sleep(1.0)
        answers += tab.speak_again()
        if now_s - look_s < min(LOOK_S, 15 * minutes):
            continue
        count = tab.asked
        rates.append((count - asked) / (now_s - look_s))
        asked, look_s = count, now_s
        found.append(tab.memory())
        heap, nodes, process = found[-1]
        shown = f"a heap of {heap:,} bytes, {nodes} nodes, {process:,} bytes of the process, {answers} answers"
        tell(f"{(now_s - start_s) / 60:.1f} min: {shown}")
    took_s = time.perf_counter() - start_s
    quarter = max(1, len(found) // 4)
    early, late = found[quarter : 2 * quarter] or found[:1], found[-quarter:]
    growth = dict[str, float]()
    for i, name in enumerate(("heap_bytes", "nodes", "process_bytes")):
        begin, end = (statistics.median(each[i] for each in part) for part in (early, late))
        growth |= {f"{name}_first": found[0][i], name: end, f"{name}_growth": end - begin}
    return {
        "minutes": took_s / 60,
        "looks": len(found),
        "updates_per_s": max(rates),
        **growth,  # from the second quarter of the time to the last, medians
        "answers": answers,
        "tokens_per_s": server.gauge("output_tokens_total") / took_s,
        "browser_cpu_share": (tab.cpu_s() - browser_s) / took_s,
        "server_cpu_share": (cpu_s(server.process_id) - server_s) / took_s,
        "errors": tab.wrong,
    }


def of_cost(config: Path, folder: Path, count: int) -> Figures:
    model = masks.with_words(config, folder / f"{config.stem}-int4-words")
    flags = ("--batch", STREAMS, "--context", CONTEXT, "--prompt-tokens", 4, "--output-tokens", CONTEXT - 8)

    def ask(client: int, turn: int) -> Stream:
        return Stream([65 + client, 70 + turn % 9], CONTEXT - 4 - 16 * client)

    with served(folder, model, None, *flags, "--no-verify") as server:
        figures: Figures = {"live_cpu_share": live_cpu_share(server)}
        with opened(server.url, folder / "browser") as tab, kept_busy(server, ask, STREAMS):
            return figures | turns(server, tab, count)


def of_open(folder: Path, minutes: float, share: float | None) -> Figures:
    flags = ("--batch", STREAMS, "--context", 512, "--prompt-tokens", 16, "--output-tokens", 400)

    def ask(client: int, turn: int) -> Stream:
        return Stream([65 + client, 70 + turn % 9], 480 - 16 * client)

    with served(folder, BUNDLED, None, *flags) as server, opened(server.url, folder / "browser") as tab:
        tab.open()
        limited = nullcontext(False) if share is None else slowed(server.process_id, share)
        with kept_busy(server, ask, STREAMS - 1), limited as slow:
            tab.speak("Once upon a time there was a king")
            return {**watched(server, tab, minutes), "server_share": share if slow else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (1.5 GB); default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--config", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of another shape")
    parser.add_argument("--minutes", type=float, default=30.0, help="that the page stays open")
    parser.add_argument(
        "--share", type=float, help="of one processor, that the server of `open` gets; default no limit"
    )
    parser.add_argument("--turns", type=int, default=8)
    wanted = parser.parse_args()
    if {"cost", "open"} & set(wanted.only) and shutil.which("chromium") is None:
        sys.exit("there is no chromium here: --only masks needs none")
    figures: Figures = dict.fromkeys(PARTS)
    with model_folder(wanted.folder) as folder:
        load_or_probe(folder / "cache", disk_folder=folder)
        if "masks" in wanted.only:
            figures["masks"] = masks.measure(wanted.config, folder, wanted.turns)
        if "cost" in wanted.only:
            figures["cost"] = of_cost(wanted.config, folder, wanted.turns)
        if "open" in wanted.only:
            figures["open"] = of_open(folder, wanted.minutes, wanted.share)
    for part in filter(None, figures.values()):
        for name, value in part.items():
            if isinstance(value, int | float):
                print(f"{name:24} {value:14.6g}" + (f"  (bar {BARS[name]:g})" if name in BARS else ""))
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus()}
    print(json.dumps({"bench": "page", "shape": wanted.config.stem, "machine": machine, **figures}))


if __name__ == "__main__":
    main()
