"""`python -m bench.serve`: what a server gives whose weights stream: many answers for one read of them.

`streams`   8 and 32 streams within a budget, beside the best plan of one stream in the same cgroup, and beside 32
            streams with all weights in memory, in turns. Contexts of 256 tokens.
`resident`  8 streams with all weights in memory, beside llama.cpp with 8 sequences where llama-cpp-python is installed.
`http`      what HTTP costs: 8 streams of the server beside the same in one process without it.
`prompt`    a prompt of 512 tokens that joins eight streams: their 95th percentile of gaps beside that without it, and
            its first token beside its time alone.
`prefix`    turn 20 of a chat with a prefix of 2,000 tokens: its first token beside the time of its new tokens alone,
            beside the model's own pass, and after a restart (`bench.turns`).
`load`      requests that arrive by chance at three rates: first token and tokens/s beside those that a scheduler on a
            virtual clock foretold.
`soak`      64 streams at a time, a tenth cut off, malformed requests between: answers that are not those of the same
            request alone, growth of memory, sequences that were not given back.

All servers are processes of their own, in a cgroup where a budget is given. The clients are in this process and take
processor time too. GB are 10^9 bytes. The last line is one JSON object; what did not run is null there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cgroup import whole_pages
from bench.clients import Server, Stream, leave, medians, percentile, served, together, tokens_per_s
from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import started, tell
from bench.peers import PROMPT_TOKENS, token_ids
from bench.peers import random_gguf as gguf
from bench.turns import prefix
from penstock.planner.pass_times import LEAST_PASSES, PassTimes
from penstock.runtime import host
from penstock.runtime.probe import cpu_name, load_or_probe
from penstock.serve.foretold import Arrival, foretell
from penstock.spec import plan as plans
from penstock.spec.format import parse_format
from penstock.store.packed import open_packed
from penstock.store.synth import synth

PARTS = ("streams", "resident", "http", "prompt", "prefix", "load", "soak")
LIMIT_GB, CONTEXT, OUTPUT_TOKENS = 2.86, 256, 48
STREAM_PROMPT_TOKENS = 4  # short, so that 32 of them are read before the first answer ends
JOIN_CONTEXT, JOIN_TOKENS = 1024, 512
RATES = (0.5, 0.8, 1.1)  # of what the server can do: idle at times, busy, more than it can do
SOAK_STREAMS, SOAK_PROMPTS, SOAK_TOKENS = 64, 16, 24
# Of `bench.serve`'s last line; the other figures stand beside them.
NAMES = ("streams_8_gain", "streams_32_gain", "vs_llamacpp_8", "gap_worst_ratio", "ttft_prefix_ratio",
         "predicted_error_median", "wrong_answers", "pages_leaked")  # fmt: skip

Figures = dict[str, Any]


class Bench:
    """The models of `folder`: `large` for budgets, `small` for loads. Both may be one."""

    def __init__(self, folder: Path, large: Path, small: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.configs = {"large": large, "small": small}
        self.models = {name: folder / f"{config.stem}-int4" for name, config in self.configs.items()}
        for name, config in self.configs.items():
            if not self.models[name].exists():
                tell(f"writing {self.models[name].name}")
                synth(config, self.models[name], parse_format("int4"))
        self.machine = load_or_probe(folder / "cache", disk_folder=folder, whole=True)
        self.vocab = {name: open_packed(model).spec.vocab for name, model in self.models.items()}

    def server(
        self, model: str, limit: int | None, batch: int, context: int, output: int = OUTPUT_TOKENS,
        more: tuple[object, ...] = (),
    ) -> Any:  # fmt: skip
        """A server with KV room for the whole context of each of `batch` answers: requests here take all of it.
        `more`: flags."""
        flags = ("--batch", batch, "--context", context, "--prompt-tokens", PROMPT_TOKENS, "--output-tokens", output)
        return served(self.folder, self.models[model], limit, *flags, "--kv-tokens", batch * context, *more)

    def streams(self, model: str, count: int, prompt: int, output: int, seed: int = 0) -> list[Stream]:
        return [
            Stream(token_ids(self.vocab[model], prompt, seed + i).tolist(), output) for i in range(count)
        ]  # fmt: skip

    def gguf(self) -> Path:
        file = self.folder / f"{self.configs['large'].stem}-q4_0.gguf"
        if not file.exists():
            tell(f"writing {file.name}")
            gguf.write(self.configs["large"], file)
        return file


def streams(bench: Bench, rounds: int) -> Figures:
    found = []
    for i in range(rounds):
        figures: Figures = {}
        turns: list[Callable[[], Figures]] = [
            lambda: {"single_tokens_per_s": _without_http(bench, bench.limit, 1)},
            lambda: {"streams_8_tokens_per_s": _with_http(bench, bench.limit, 8)},
            lambda: {"streams_32_tokens_per_s": _with_http(bench, bench.limit, 32)},
            lambda: {"streams_32_in_ram_tokens_per_s": _with_http(bench, None, 32)},
        ]
        for turn in turns if i % 2 == 0 else reversed(turns):
            figures |= turn()
        for count in (8, 32):
            figures[f"streams_{count}_gain"] = figures[f"streams_{count}_tokens_per_s"] / figures["single_tokens_per_s"]
        figures["streams_32_share_of_ram"] = (
            figures["streams_32_tokens_per_s"] / figures["streams_32_in_ram_tokens_per_s"]
        )
        tell(f"streams, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)


def _with_http(bench: Bench, limit: int | None, count: int) -> float:
    with bench.server("large", limit, count, CONTEXT) as server:
        together(server, bench.streams("large", count, STREAM_PROMPT_TOKENS, 4, seed=1000))  # not counted
        made = bench.streams("large", count, STREAM_PROMPT_TOKENS, CONTEXT - STREAM_PROMPT_TOKENS)
        return tokens_per_s(server, made, OUTPUT_TOKENS)


def _without_http(bench: Bench, limit: int | None, count: int) -> float:
    within = () if limit is None else ("--limit", limit)
    arguments = ("--cache", bench.folder / "cache", "--context", CONTEXT, "--output", OUTPUT_TOKENS, *within)
    model = bench.models["large"]
    with started(bench.folder, "bench.peers.together", limit, model, *arguments, "--sequences", count) as (worker, _):
        worker.ask("decode", 2)
        return count * OUTPUT_TOKENS / float(worker.ask("decode", OUTPUT_TOKENS)["seconds"])


def resident(bench: Bench, rounds: int) -> Figures:
    if importlib.util.find_spec("llama_cpp") is None:
        tell("llama-cpp-python is not installed: no peer")
        return {"vs_llamacpp_8": None}
    found = []
    for i in range(rounds):
        figures: Figures = {}
        for turn in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            figures[f"{turn}_tokens_per_s"] = _with_http(bench, None, 8) if turn == "ours" else _llamacpp(bench)
        figures["vs_llamacpp_8"] = figures["ours_tokens_per_s"] / figures["peer_tokens_per_s"]
        tell(f"in memory, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)


def _llamacpp(bench: Bench) -> float:
    arguments = ("--config", bench.configs["large"], "--threads", host.usable_cpus(), "--context", 8 * CONTEXT)
    arguments = (*arguments, "--sequences", 8)
    with started(bench.folder, "bench.peers.llamacpp", None, bench.gguf(), *arguments) as (worker, _):
        worker.ask("decode_together", 2)
        return 8 * OUTPUT_TOKENS / float(worker.ask("decode_together", OUTPUT_TOKENS)["seconds"])


def http(bench: Bench, rounds: int) -> Figures:
    found = []
    for i in range(rounds):
        figures: Figures = {}
        for turn in ("with", "without") if i % 2 == 0 else ("without", "with"):
            measure = _with_http if turn == "with" else _without_http
            figures[f"{turn}_http_tokens_per_s"] = measure(bench, None, 8)
        figures["http_costs"] = 1 - figures["with_http_tokens_per_s"] / figures["without_http_tokens_per_s"]
        tell(f"HTTP, round {i + 1}: {json.dumps(figures)}")
        found.append(figures)
    return medians(found)


def prompt(bench: Bench, rounds: int) -> Figures:
    found = []
    output = JOIN_CONTEXT - PROMPT_TOKENS
    with bench.server("large", bench.limit, 9, JOIN_CONTEXT) as server:
        for i in range(rounds):
            joins = bench.streams("large", 3, JOIN_TOKENS, 2, seed=10_000 + 3 * i)
            together(server, joins[2:])  # not counted: a granule's first read is compared with its checksum
            together(server, joins[:1])
            talking = bench.streams("large", 8, PROMPT_TOKENS, output, seed=20_000 + 8 * i)
            threads = [threading.Thread(target=stream.run, args=(server,)) for stream in talking]
            for thread in threads:
                thread.start()
            # Some gaps before the prompt comes, as many as it will take.
            while min(len(stream.times_s) for stream in talking) < 24:
                time.sleep(0.02)
            together(server, joins[1:2])
            leave(talking, threads)
            start_s, end_s = joins[1].asked_s, joins[1].times_s[0]
            gaps = [(at, gap) for s in talking for at, gap in zip(s.times_s[1:], s.gaps_s, strict=True)]
            before = percentile([gap for at, gap in gaps if at <= start_s], 95)
            during = percentile([gap for at, gap in gaps if start_s < at <= end_s], 95)
            found.append({
                "gap_p95_before_s": before, "gap_p95_during_s": during, "gap_worst_ratio": during / before,
                "ttft_alone_s": joins[0].ttft_s, "ttft_joined_s": joins[1].ttft_s,
                "ttft_joined_ratio": joins[1].ttft_s / joins[0].ttft_s,
            })  # fmt: skip
            tell(f"a prompt joins, round {i + 1}: {json.dumps(found[-1])}")
    return medians(found)


def load(bench: Bench, minutes: float) -> Figures:
    found, errors = {}, []
    lengths = (32, 64, 96)
    with bench.server("small", None, 8, CONTEXT) as server:
        told = server.get("/v1/plan")
        plan = plans.loads(json.dumps(told["plan"]), "/v1/plan")
        for count in range(1, 9):  # not counted; the server notes what its passes take
            together(server, bench.streams("small", count, PROMPT_TOKENS, 16))
        for count in (3, 7):  # with prompts beside them too
            beside = (server, bench.streams("small", count, PROMPT_TOKENS, 100, 80))
            talking = threading.Thread(target=together, args=beside)
            talking.start()
            for i in range(3):
                together(server, bench.streams("small", 1, 128, 2, seed=90 + i))
            talking.join()
        times = PassTimes(plan, bench.machine)
        for seen in server.get("/v1/plan")["passes"]:
            for _ in range(LEAST_PASSES):
                times.note(seen["answers"], seen["prompt_rows"], seen["seconds"])
        mean = statistics.mean(lengths)
        per_request_s = mean * times.seconds(8, 0) / 8 + times.seconds(7, 64)
        for rate in RATES:
            rng = random.Random(int(rate * 10))
            arrivals, at_s = [], 0.0
            while (at_s := at_s + rng.expovariate(rate / per_request_s)) < 60 * minutes / len(RATES):
                arrivals.append(Arrival(at_s, rng.choice((16, 64, 128)), rng.choice(lengths)))
            if not arrivals:
                continue
            foretold = foretell(plan, times, told["prompt_rows"], arrivals)
            real = _arrive(bench, server, arrivals)
            each = [
                (
                    abs(f.ttft_s / s.ttft_s - 1),
                    abs((s.times_s[-1] - s.times_s[0]) / (f.all_s - f.ttft_s) - 1),  # of tokens/s
                )
                for f, s in zip(foretold, real, strict=True)
            ]
            errors += [error for pair in each for error in pair]
            found[str(rate)] = {
                "requests": len(arrivals),
                "wait_foretold_s": statistics.median(f.wait_s for f in foretold),
                "ttft_error_median": statistics.median(ttft for ttft, _ in each),
                "tokens_per_s_error_median": statistics.median(rate for _, rate in each),
            }
            tell(f"load {rate}: {json.dumps(found[str(rate)])}")
    return {"predicted_error_median": statistics.median(errors) if errors else None, "by_rate": found}


def _arrive(bench: Bench, server: Server, arrivals: list[Arrival]) -> list[Stream]:
    """Sends the requests when they are due, and waits for all answers."""
    made = [
        Stream(token_ids(bench.vocab["small"], a.prompt, 70_000 + i).tolist(), a.output) for i, a in enumerate(arrivals)
    ]
    threads = []
    start_s = time.perf_counter()
    for stream, arrival in zip(made, arrivals, strict=True):
        time.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
        threads.append(threading.Thread(target=stream.run, args=(server,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if bad := [stream.failed for stream in made if stream.failed]:
        raise SystemExit(f"a request failed: {bad[0]}")
    return made


def soak(bench: Bench, minutes: float) -> Figures:
    wrong, gaps, rss, asked = 0, list[float](), list[int](), 0
    with bench.server("small", None, 8, CONTEXT) as server:
        plan, whole = server.get("/v1/plan"), server.gauge("sequences_free")
        singles = [together(server, [s])[0] for s in bench.streams("small", SOAK_PROMPTS, PROMPT_TOKENS, SOAK_TOKENS)]
        rng, until_s, turn = random.Random(0), time.monotonic() + 60 * minutes, 0
        while not turn or time.monotonic() < until_s:
            chosen = [rng.randrange(SOAK_PROMPTS) for _ in range(SOAK_STREAMS)]
            made = [
                Stream(singles[k].prompt, SOAK_TOKENS, rng.randrange(1, SOAK_TOKENS) if i % 10 == 0 else None)
                for i, k in enumerate(chosen)
            ]
            nonsense = threading.Thread(target=_nonsense, args=(server.port, turn))
            nonsense.start()
            together(server, made)
            nonsense.join()
            for stream, k in zip(made, chosen, strict=True):
                expected = singles[k].fingerprint[: stream.cut]
                wrong += stream.fingerprint[: stream.cut] != expected
                gaps += stream.gaps_s
            rss.append(server.rss_bytes())
            asked, turn = asked + len(made), turn + 1
        server.settle()
        free = server.gauge("sequences_free")
    pages = -(-CONTEXT // plan["plan"]["page_tokens"])
    quarter = max(1, len(rss) // 4)
    return {
        "requests": asked, "wrong_answers": wrong, "pages_leaked": int(whole - free) * pages,
        "memory_growth_bytes": max(rss[-quarter:]) - max(rss[:quarter]), "gap_p99_s": percentile(gaps, 99),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models here (11 GB); default a temporary folder")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-gb", type=float, default=LIMIT_GB)
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="of load; soak takes 10, or these if they are fewer"
    )
    parser.add_argument("--large", type=Path, default=DEFAULT_SHAPES["8b"], help="config.json of the shape for budgets")
    parser.add_argument("--small", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of the shape for loads")
    wanted = parser.parse_args()
    start_s = time.perf_counter()
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        folder = (wanted.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, wanted.large, wanted.small, whole_pages(round(wanted.limit_gb * 1e9)))
        parts: dict[str, Callable[[], Figures]] = {
            "streams": lambda: streams(bench, wanted.rounds),
            "resident": lambda: resident(bench, wanted.rounds),
            "http": lambda: http(bench, wanted.rounds),
            "prompt": lambda: prompt(bench, wanted.rounds),
            "prefix": lambda: prefix(bench, wanted.rounds),
            "load": lambda: load(bench, wanted.minutes),
            "soak": lambda: soak(bench, min(10.0, wanted.minutes)),
        }
        for name in (name for name in PARTS if name in wanted.only):
            found[name] = parts[name]()
            tell(f"{name}: {json.dumps({k: v for k, v in found[name].items() if k != 'by_round'})}")
    said: Figures = {name: next((part[name] for part in found.values() if name in part), None) for name in NAMES}
    machine = {"cpu": cpu_name(), "threads": host.usable_cpus(), "memory_bytes": host.physical_bytes()}
    took_s = time.perf_counter() - start_s
    about = {
        "bench": "serve",
        "rounds": wanted.rounds,
        "limit_gb": wanted.limit_gb,
        "machine": machine,
        "took_s": took_s,
    }
    print(json.dumps({**said, **about, **found}), file=sys.stdout)


if __name__ == "__main__":
    main()
