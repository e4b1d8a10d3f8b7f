"""Many streams for minutes, a tenth cut off, nonsense between."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

from bench.clients import Server, Stream, percentile, together
from bench.peers import PROMPT_TOKENS
from bench.serve.models import CONTEXT, Bench, Figures

STREAMS, PROMPTS, TOKENS = 64, 16, 24


def soak(bench: Bench, minutes: float) -> Iterator[Figures]:
    wrong, gaps, rss, asked, failed = 0, list[float](), list[int](), 0, list[str]()
    with bench.server("small", None, 8, CONTEXT) as server:
        whole = server.gauge("sequences_free")
        singles = [together(server, [s])[0] for s in bench.streams("small", PROMPTS, PROMPT_TOKENS, TOKENS)]
        rng, until_s, turn = random.Random(0), time.monotonic() + 60 * minutes, 0
        while not turn or time.monotonic() < until_s:
            chosen = [rng.randrange(PROMPTS) for _ in range(STREAMS)]
            made = [
                Stream(singles[k].prompt, TOKENS, rng.randrange(1, TOKENS) if i % 10 == 0 else None)
                for i, k in enumerate(chosen)
            ]
            nonsense = threading.Thread(target=_nonsense, args=(server.port, turn))
            nonsense.start()
            together(server, made, ends=False)
            nonsense.join()
            failed += [stream.failed for stream in made if stream.failed]
            for stream, k in zip(made, chosen, strict=True):
                expected = singles[k].fingerprint[: stream.cut]
                wrong += stream.fingerprint[: stream.cut] != expected
                gaps += stream.gaps_s
            rss.append(server.rss_bytes())
            asked, turn = asked + len(made), turn + 1
            yield _figures(asked, wrong, failed, rss, gaps)
        server.settle()
        yield {**_figures(asked, wrong, failed, rss, gaps), **_left(server, whole)}


def _left(server: Server, whole: float) -> Figures:
    """What requests still have when none is there: KV pages, by the server's own count of those that are neither free
    nor kept for prompts, and sequences, of which there were `whole`."""
    return {
        "pages_leaked": int(server.gauge("kv_pages_had")),
        "sequences_leaked": int(whole - server.gauge("sequences_free")),
    }


def _figures(asked: int, wrong: int, failed: list[str], rss: list[int], gaps: list[float]) -> Figures:
    """So far. A request that failed counts as a wrong answer."""
    quarter = max(1, len(rss) // 4)
    return {
        "requests": asked, "wrong_answers": wrong, "failed_requests": len(failed), "first_failures": failed[:3],
        "memory_growth_bytes": max(rss[-quarter:]) - max(rss[:quarter]),
        "gap_p99_s": percentile(gaps, 99) if gaps else None,
    }  # fmt: skip


def _nonsense(port: int, seed: int) -> None:
    """Malformed requests, whose answers nobody reads."""
    rng = random.Random(seed)
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            try:
                raw.sendall(
                    rng.choice([head, head + b"Content-Length: 9\r\n\r\n{", rng.randbytes(99), head + b"\r\n\r\n"])
                )
            except OSError:  # it hung up first
                continue
