"""Servers and clients for `bench.serve`: `penstock serve` in a cgroup of its own, and streams that note when each token
came."""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup, drop_page_cache, limited
from penstock.runtime.host import cpu_s

_START_S, _ANSWER_S, _END_S = 600.0, 600.0, 120.0


@dataclass
class Server:
    """A running server. `process_id`: of the server; what it started are its children."""

    port: int
    process_id: int
    cgroup: Cgroup | None

    @property
    def url(self) -> str:
        """Of its page."""
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text

    def gauge(self, name: str) -> float:
        """A figure of /metrics."""
        found = re.search(rf"^penstock_{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return float(found[1])

    def rss_bytes(self) -> int:
        """Memory of the server and of the processes that it started."""
        return sum(map(_rss_bytes, self._processes()))

    def cpu_s(self) -> float:
        """Processor time of these so far."""
        return sum(map(cpu_s, self._processes()))

    def _processes(self) -> list[int]:
        found = [self.process_id]
        for task in Path(f"/proc/{self.process_id}/task").iterdir():  # whichever thread started them
            with suppress(OSError):  # a thread that has just ended
                found += map(int, (task / "children").read_text().split())
        return found

    def settle(self) -> None:
        """Waits until no request is there. Ends the bench where that takes longer than an answer may."""
        until_s = time.monotonic() + _ANSWER_S
        while self.gauge("requests_running") or self.gauge("requests_waiting"):
            if time.monotonic() > until_s:
                raise SystemExit("requests are left in the server")
            time.sleep(0.05)


@contextmanager
def served(folder: Path, model: Path, limit: int | None, *flags: object) -> Iterator[Server]:
    """`penstock serve MODEL`, alone in a cgroup of so many bytes; None: in none. The page cache holds nothing of
    `folder`, where the machine's figures are too."""
    drop_page_cache(file for file in folder.glob("**/*") if file.is_file())
    with ExitStack() as stack:
        cgroup = stack.enter_context(limited(limit)) if limit is not None else None
        within = () if limit is None else ("--host-memory", limit)
        arguments = ("serve", model, "--cache", folder / "cache", "--port", 0, "--queue", 10_000, *within, *flags)
        command = [sys.executable, "-m", "penstock.cli", *map(str, arguments)]
        if cgroup is not None:
            command = ["sh", "-c", f'echo $$ > {cgroup.folder}/cgroup.procs && exec "$@"', "sh", *command]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            yield Server(_port(process), process.pid, cgroup)
        except BaseException:  # the bench is stopped, or a part of it failed: nobody waits for answers
            process.kill()
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise SystemExit(f"the server had not ended {_END_S:.0f} s after SIGTERM") from None


def _port(process: subprocess.Popen[str]) -> int:
    """Where it listens. Ends the bench where it ends before, or takes longer than _START_S."""
    assert process.stderr is not None
    said = []
    late = threading.Timer(_START_S, process.kill)
    late.start()
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://\S+?:(\d+)/v1", line):
                # What it says later is read too, or it would wait for us.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return int(found[1])
    finally:
        late.cancel()
    raise SystemExit(f"the server ended: {''.join(said[-5:])}")


@dataclass
class Stream:
    """A request and its streamed answer. `times_s`: when each token came. `fingerprint`: each token's log probability,
    which tells tokens apart whose texts are the same. `cut`: the client leaves after so many tokens."""

    prompt: Sequence[int]
    max_tokens: int
    cut: int | None = None
    asked_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    fingerprint: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    def body(self) -> dict[str, Any]:
        """The request, of /v1/completions."""
        return {
            "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0,
        }  # fmt: skip

    def run(self, server: Server) -> Stream:
        body = self.body()
        connection = HTTPConnection("127.0.0.1", server.port, timeout=_ANSWER_S)
        self.asked_s = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                self.failed = answer.read().decode()[:200]
                return self
            self._read(answer)
        except (OSError, HTTPException) as error:  # the answer may break off within a chunk
            self.failed = repr(error)
        finally:
            connection.close()
        return self

    def _read(self, answer: Iterable[bytes]) -> None:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", ()):
                if choice["logprobs"]:
                    self.times_s.append(time.perf_counter())
                    self.fingerprint += choice["logprobs"]["token_logprobs"]
            if "error" in event:
                self.failed = event["error"]["message"]
            if self.cut is not None and len(self.times_s) >= self.cut:
                return


def together(server: Server, streams: Sequence[Stream], ends: bool = True) -> Sequence[Stream]:
    """Runs all of them at once. With `ends` it ends the bench where one fails."""
    threads = [threading.Thread(target=stream.run, args=(server,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if ends and (bad := [stream.failed for stream in streams if stream.failed]):
        raise SystemExit(f"a request failed: {bad[0]}")
    return streams


def tokens_per_s(server: Server, streams: Sequence[Stream], tokens: int) -> float:
    """Of all streams together, while every one of them is being answered: until each has so many tokens more than when
    the last one began. They leave then. Ends the bench where one ends before."""
    threads = [threading.Thread(target=stream.run, args=(server,)) for stream in streams]
    for thread in threads:
        thread.start()
    start_s = wait_until(streams, threads, lambda stream: bool(stream.times_s))
    had = {id(stream): len(stream.times_s) for stream in streams}
    end_s = wait_until(streams, threads, lambda stream: len(stream.times_s) >= had[id(stream)] + tokens)
    leave(streams, threads)
    return sum(start_s < at <= end_s for s in streams for at in s.times_s) / (end_s - start_s)


def wait_until(streams: Sequence[Stream], threads: Sequence[threading.Thread], done: Callable[[Stream], bool]) -> float:
    """Returns when all of them are so far, on the clock. Ends the bench where one ends before."""
    while not all(map(done, streams)):
        if any(stream.failed or not thread.is_alive() for stream, thread in zip(streams, threads, strict=True)):
            raise SystemExit(f"a stream ended before all were answered at once: {[s.failed for s in streams]}")
        time.sleep(0.01)
    return time.perf_counter()


def leave(streams: Sequence[Stream], threads: Sequence[threading.Thread]) -> None:
    """The clients of streams have heard enough."""
    for stream in streams:
        stream.cut = 0
    for thread in threads:
        thread.join()


@contextmanager
def kept_busy(server: Server, ask: Callable[[int, int], Stream], count: int) -> Iterator[None]:
    """So many clients, each of which asks again when its answer ends: `ask(client, turn)`. Begins when the server
    answers all of them. Raises RuntimeError at the end where a stream failed."""
    ends, streams = threading.Event(), dict[int, Stream]()

    def client(number: int) -> None:
        for turn in itertools.count():
            stream = streams[number] = ask(number, turn)
            if ends.is_set() or stream.run(server).failed:
                return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        while server.gauge("requests_running") < count and not any(s.failed for s in [*streams.values()]):
            time.sleep(0.05)
        yield
    finally:
        ends.set()
        leave([*streams.values()], threads)
    if bad := [stream.failed for stream in streams.values() if stream.failed]:
        raise RuntimeError(f"a stream failed: {bad[0]}")


def counted_tokens_per_s(server: Server, seconds: float) -> float:
    """Of all streams together, as the server counts them."""
    begin, start_s = server.gauge("output_tokens_total"), time.perf_counter()
    time.sleep(seconds)
    return (server.gauge("output_tokens_total") - begin) / (time.perf_counter() - start_s)


def percentile(values: Iterable[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every number over the rounds that have it, beside what each round gave. None for what no round has."""
    names = dict.fromkeys(name for each in found for name, value in each.items() if _is_plain(value))
    columns = {name: [each[name] for each in found if each.get(name) is not None] for name in names}
    middles = {name: statistics.median(column) if column else None for name, column in columns.items()}
    return {**middles, "by_round": list(found)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, float | int)


def _rss_bytes(pid: int) -> int:
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it has just ended
        return 0
    return int(found[1]) * 1024 if found else 0
