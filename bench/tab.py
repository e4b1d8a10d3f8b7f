"""A tab of Chromium for `bench.page`, driven over a pipe by the browser's own protocol.

Playwright would do it in fewer lines. But it has the browser report what goes over the network, and the tab then keeps
the body of every answer for it: memory that a tab of a person's does not take.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.page_shots import FLAGS
from penstock.runtime.host import cpu_s

_ANSWER_S = 30.0
# Counts how often the page asks for what the machine does. What the console is told of errors is kept too.
_COUNT = """
(() => {
  const fetched = window.fetch;
  window.asked = 0;
  window.wrong = [];
  window.fetch = (path, ...others) => { window.asked += path === "v1/live"; return fetched(path, ...others); };
  window.addEventListener("error", (event) => window.wrong.push(event.message));
  window.addEventListener("unhandledrejection", (event) => window.wrong.push(String(event.reason)));
})()
"""


class Tab:
    """A tab that shows `url` once it is opened, in a browser of its own. `process_id`: of the browser."""

    def __init__(self, url: str, process_id: int, write: int, read: int) -> None:
        self._url, self.process_id, self._write, self._read = url, process_id, write, read
        self._number, self._buffer, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Page.addScriptToEvaluateOnNewDocument", source=_COUNT)

    def open(self) -> None:
        self._ask("Page.navigate", url=self._url)
        self.until("document.querySelector('#speed')?.innerText.includes('tokens said')")

    def leave(self) -> None:
        self._ask("Page.navigate", url="about:blank")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits until a JavaScript expression is true."""
        end_s = time.perf_counter() + _ANSWER_S
        while not self.run(f"Boolean({condition})"):
            if time.perf_counter() > end_s:
                raise TimeoutError(condition)
            time.sleep(0.1)

    def speak(self, text: str) -> None:
        self.run(f"document.querySelector('#prompt').value = {json.dumps(text)}")
        self.run("document.querySelector('#compose').requestSubmit()")

    def speak_again(self) -> bool:
        """Asks for the answer once more if it has ended."""
        again = "[...document.querySelectorAll('.acts button')].find((each) => each.textContent === 'Regenerate')"
        return bool(self.run(f"!document.querySelector('#send').hidden && ({again}?.click(), Boolean({again}))"))

    @property
    def asked(self) -> int:
        """How often the page asked for /v1/live."""
        return int(self.run("window.asked"))

    @property
    def wrong(self) -> list[str]:
        """Errors of the page's scripts."""
        return list(self.run("window.wrong"))

    def memory(self) -> tuple[int, int, int]:
        """(bytes of the heap after a collection, DOM nodes, bytes of the tabs' processes that are theirs alone)."""
        self._ask("HeapProfiler.collectGarbage")
        heap = self._ask("Runtime.getHeapUsage")["usedSize"]
        nodes = self._ask("Memory.getDOMCounters")["nodes"]
        text = "".join(Path(f"/proc/{pid}/status").read_text() for pid in self.processes("--type=renderer"))
        return int(heap), int(nodes), 1024 * sum(map(int, re.findall(r"RssAnon:\s+(\d+) kB", text)))

    def cpu_s(self) -> float:
        """Processor time of the whole browser so far."""
        return sum(map(cpu_s, self.processes()))

    def processes(self, kind: str = "") -> list[int]:
        """Of the browser. `kind`: those alone that have it in their command."""
        found, new = set[int](), {self.process_id}
        while new:
            found |= new
            new = {child for pid in new for child in _children(pid)} - found
        return [pid for pid in found if kind in _command(pid)]

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                if not (piece := os.read(self._read, 1 << 16)):
                    raise SystemExit("the browser ended")
                self._buffer += piece
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:  # the others are events
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])


@contextmanager
def opened(url: str, folder: Path) -> Iterator[Tab]:
    """A browser without a window, with one tab. `folder`: of its profile."""
    (from_us, write), (read, to_us) = os.pipe(), os.pipe()
    command = ["--headless", *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    # The browser reads its file 3 and writes its file 4.
    script = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", str(shutil.which("chromium")), *command],
        pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(from_us)
    os.close(to_us)
    try:
        yield Tab(url, process.pid, write, read)
    finally:
        os.close(write)  # the browser ends then
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)


def _command(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text()
    except OSError:
        return ""


def _children(process_id: int) -> list[int]:
    try:
        files = [task / "children" for task in Path(f"/proc/{process_id}/task").iterdir()]
        return [int(child) for file in files for child in file.read_text().split()]
    except OSError:
        return []
