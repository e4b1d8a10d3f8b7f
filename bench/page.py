"""`python -m bench.page`: the page and masks beside eight streams of a server.

`masks`  what holding answers to a JSON schema costs, with all weights in memory (`bench.masks`).
`cost`   what the open page costs the server: tokens/s with the page and with an empty tab, in turns; and the processor
         time of the server's for one answer to /v1/live, as a share of the processors at the page's pace.
`open`   the page open for many minutes. It streams one of the eight answers itself, and asks for it again
         (Regenerate) when it ends; the others are of other clients. Twice a minute the tab's memory after a forced
         collection, its DOM nodes, the memory of its process, and how often it asked the server for /v1/live.

`masks` and `cost` take a 1B shape, `open` the bundled model. The browser is Debian's Chromium without a window. It
takes processor time of this machine beside the server: `browser_cpu_share` says how much of one processor. The last
line is one JSON object; what did not run is null there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import masks
from bench.clients import Server, Stream, counted_tokens_per_s, kept_busy, served
from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import tell
from bench.page_shots import BUNDLED, FLAGS
from penstock.runtime import host
from penstock.runtime.probe import cpu_name, load_or_probe
from penstock.spec.format import parse_format
from penstock.store.synth import synth

PARTS = ("masks", "cost", "open")
STREAMS, CONTEXT, TURN_S, LOOK_S = 8, 1024, 8.0, 30.0
ASKED = 200  # answers to /v1/live that are timed
EVERY_S = 2.0  # the page asks once in so many seconds
BARS = {"masks_cost_at_1": 0.03, "page_cost": 0.01, "live_cpu_share": 0.01, "updates_per_s": 2.0}

Figures = dict[str, Any]


class Tab:
    """A tab of the browser. `asked`: how often it asked for /v1/live."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.page = browser.new_context().new_page()
        self._devtools = self.page.context.new_cdp_session(self.page)
        self._url, self.asked = f"http://127.0.0.1:{server.port}/", 0
        self.said: list[str] = []
        self.page.on("request", self._count)
        self.page.on("console", lambda line: self.said.append(line.text) if line.type == "error" else None)

    def _count(self, request: Any) -> None:
        self.asked += request.url.endswith("/v1/live")

    def open(self) -> None:
        self.page.goto(self._url)
        self.page.wait_for_function("() => document.querySelector('#speed').innerText.includes('tokens said')")

    def leave(self) -> None:
        self.page.goto("about:blank")

    def wait(self, seconds: float) -> None:
        """The browser's events come meanwhile."""
        self.page.wait_for_timeout(1000 * seconds)

    def speak(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def speak_again(self) -> bool:
        """Asks for the answer once more if it has ended."""
        again = self.page.get_by_role("button", name="Regenerate")
        if not self.page.locator("#send").is_visible() or not again.count():
            return False
        again.click()
        return True

    def memory(self) -> tuple[int, int]:
        """(bytes of the heap after a collection, DOM nodes)."""
        self._devtools.send("HeapProfiler.collectGarbage")
        used = self._devtools.send("Runtime.getHeapUsage")["usedSize"]
        nodes = self._devtools.send("Memory.getDOMCounters")["nodes"]
        return int(used), int(nodes)


def cpu_s(process_ids: list[int]) -> float:
    """Processor time that these processes took so far."""
    total = 0
    for pid in process_ids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / 100


def browsers(kind: str = "") -> list[int]:
    """Processes of Chromium that this one started, and theirs. `kind`: these alone, as `renderer`."""
    found, new = set[int](), {int(each) for each in _children("self")}
    while new:
        found |= new
        new = {int(each) for pid in new for each in _children(str(pid))} - found
    chromium = [pid for pid in found if "chrom" in Path(f"/proc/{pid}/comm").read_text()]
    return [pid for pid in chromium if kind in Path(f"/proc/{pid}/cmdline").read_text()]


def tabs_bytes() -> int:
    """Memory of the browser's tabs that is theirs alone."""
    text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in browsers("--type=renderer"))
    return 1024 * sum(map(int, re.findall(r"RssAnon:\s+(\d+) kB", text)))


def _children(pid: str) -> list[str]:
    try:
        return [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def turns(server: Server, tab: Tab, count: int) -> Figures:
    costs = []
    for turn in range(count):
        found = {}
        for with_page in (True, False) if turn % 2 == 0 else (False, True):
            tab.open() if with_page else tab.leave()
            tab.wait(0.5)
            measured: list[float] = []
            clock = threading.Thread(target=lambda m=measured: m.append(counted_tokens_per_s(server, TURN_S)))
            clock.start()
            while clock.is_alive():
                tab.wait(0.25)
            found[with_page] = measured[0]
        costs.append(1 - found[True] / found[False])
        tell(f"turn {turn + 1}: {found[True]:.2f} tokens/s with the page, {found[False]:.2f} without")
    return {"page_cost": statistics.median(costs), "page_costs": costs}


def live_cpu_share(server: Server) -> float:
    """Of one processor, for a page's questions: an answer's processor seconds of a server that does nothing else."""
    before = cpu_s([server.process_id])
    for _ in range(ASKED):
        server.get("/v1/live")
    return (cpu_s([server.process_id]) - before) / ASKED / EVERY_S


def watched(server: Server, tab: Tab, minutes: float) -> Figures:
    """The figures of `open`. The tab streams already."""
    start_s = look_s = time.perf_counter()
    asked, answers = tab.asked, 0
    browser_s, server_s = cpu_s(browsers()), cpu_s([server.process_id])
    found: list[tuple[int, int, int]] = []
    rates: list[float] = []
    while (now_s := time.perf_counter()) - start_s < 60 * minutes:
        tab.wait(1.0)
        answers += tab.speak_again()
        if now_s - look_s < min(LOOK_S, 15 * minutes):
            continue
        rates.append((tab.asked - asked) / (now_s - look_s))
        asked, look_s = tab.asked, now_s
        heap, nodes = tab.memory()
        found.append((heap, nodes, tabs_bytes()))
        shown = f"a heap of {heap:,} bytes, {nodes} nodes, {found[-1][2]:,} bytes of the process, {answers} answers"
        tell(f"{(now_s - start_s) / 60:.1f} min: {shown}")
    took_s = time.perf_counter() - start_s
    quarter = max(1, len(found) // 4)
    early, late = found[quarter : 2 * quarter] or found[:1], found[-quarter:]
    growth = dict[str, float]()
    for i, name in enumerate(("heap_bytes", "nodes", "process_bytes")):
        begin, end = (statistics.median(each[i] for each in part) for part in (early, late))
        growth |= {name: end, f"{name}_growth": end - begin}
    return {
        "minutes": took_s / 60,
        "updates_per_s": max(rates),
        **growth,  # from the second quarter of the time to the last, medians
        "answers": answers,
        "tokens_per_s": server.gauge("output_tokens_total") / took_s,
        "browser_cpu_share": (cpu_s(browsers()) - browser_s) / took_s,
        "server_cpu_share": (cpu_s([server.process_id]) - server_s) / took_s,
        "console_errors": tab.said,
    }


@contextmanager
def opened(server: Server) -> Iterator[Tab]:
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as started,
        started.chromium.launch(executable_path=shutil.which("chromium"), args=[*FLAGS]) as browser,
    ):
        yield Tab(browser, server)


def of_cost(config: Path, folder: Path, count: int) -> Figures:
    model = folder / f"{config.stem}-int4"
    if not model.exists():
        tell(f"writing {model.name}")
        synth(config, model, parse_format("int4"))
    flags = ("--batch", STREAMS, "--context", CONTEXT, "--prompt-tokens", 4, "--output-tokens", CONTEXT - 8)

    def ask(client: int, turn: int) -> Stream:
        return Stream([65 + client, 70 + turn % 9], CONTEXT - 4 - 16 * client)

    with served(folder, model, None, *flags) as server:
        figures: Figures = {"live_cpu_share": live_cpu_share(server)}
        with opened(server) as tab, kept_busy(server, ask, STREAMS):
            return figures | turns(server, tab, count)


def of_open(folder: Path, minutes: float) -> Figures:
    flags = ("--batch", STREAMS, "--context", 512, "--prompt-tokens", 16, "--output-tokens", 400)

    def ask(client: int, turn: int) -> Stream:
        return Stream([65 + client, 70 + turn % 9], 480 - 16 * client)

    with served(folder, BUNDLED, None, *flags) as server, opened(server) as tab:
        tab.open()
        with kept_busy(server, ask, STREAMS - 1):
            tab.speak("Once upon a time there was a king")
            return watched(server, tab, minutes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (1.5 GB); default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--config", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of another shape")
    parser.add_argument("--minutes", type=float, default=30.0, help="that the page stays open")
    parser.add_argument("--turns", type=int, default=8)
    wanted = parser.parse_args()
    if {"cost", "open"} & set(wanted.only) and shutil.which("chromium") is None:
        sys.exit("there is no chromium here: --only masks needs none")
    figures: Figures = dict.fromkeys(PARTS)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/var/tmp") as temporary:
        folder = (wanted.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        load_or_probe(folder / "cache", disk_folder=folder)
        if "masks" in wanted.only:
            figures["masks"] = masks.measure(wanted.config, folder, wanted.turns)
        if "cost" in wanted.only:
            figures["cost"] = of_cost(wanted.config, folder, wanted.turns)
        if "open" in wanted.only:
            figures["open"] = of_open(folder, wanted.minutes)
    for part in filter(None, figures.values()):
        for name, value in part.items():
            if not isinstance(value, list):
                print(f"{name:24} {value:14.6g}" + (f"  (bar {BARS[name]:g})" if name in BARS else ""))
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus()}
    print(json.dumps({"bench": "page", "shape": wanted.config.stem, "machine": machine, **figures}))


if __name__ == "__main__":
    main()
