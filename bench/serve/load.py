"""Requests that arrive by chance, beside what was foretold of them: by a scheduler on a virtual clock that knows all
arrivals, and for every third one by the server itself (`/v1/plan`) when it came."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from bench.clients import Server, Stream, together
from bench.offload_engines import tell
from bench.peers import PROMPT_TOKENS, token_ids
from bench.serve.models import CONTEXT, Bench, Figures
from penstock.planner.pass_times import LEAST_PASSES, PassTimes
from penstock.serve.foretold import Arrival, ForetoldRequest, foretell
from penstock.spec import plan as plans

RATES = (0.5, 0.8, 1.1)  # of what the server can do: idle at times, busy, more than it can do
PROMPTS, OUTPUTS = (16, 64, 128), (32, 64, 96)  # tokens
ASKS = 3  # /v1/plan is asked for one request of so many, since each time takes processor time that passes need


def load(bench: Bench, minutes: float) -> Iterator[Figures]:
    found: Figures = {}
    errors: list[float] = []
    with bench.server("small", None, 8, CONTEXT) as server:
        _warm(bench, server)
        told = server.get("/v1/plan")
        plan = plans.loads(json.dumps(told["plan"]), "/v1/plan")
        times = PassTimes(plan, bench.machine)
        for seen in told["passes"]:
            for _ in range(seen["passes"]):
                times.note(seen["answers"], seen["prompt_rows"], seen["seconds"])
        pass_s = times.seconds(8, 0)
        per_request_s = statistics.mean(OUTPUTS) * pass_s / 8 + times.seconds(7, 64)
        for rate in RATES:
            rng = random.Random(int(rate * 10))
            arrivals, at_s = list[Arrival](), 0.0
            while (at_s := at_s + rng.expovariate(rate / per_request_s)) < 60 * minutes / len(RATES):
                arrivals.append(Arrival(at_s, rng.choice(PROMPTS), rng.choice(OUTPUTS)))
            if not arrivals:
                continue
            real = _arrive(bench, server, arrivals)
            failed = [stream.failed or "no answer" for _, stream, _ in real if stream.failed or not stream.times_s]
            real = [each for each in real if each[1].times_s and not each[1].failed]
            foretold = foretell(plan, times, told["prompt_rows"], [came for came, _, _ in real])
            told_s = [(said["ttft_s"], stream.ttft_s) for _, stream, said in real if said and said["ttft_s"]]
            each = _errors(foretold, [stream for _, stream, _ in real], pass_s)
            errors += [error for some in each.values() for error in some]
            found[str(rate)] = {
                "requests": len(arrivals), "failed_requests": len(failed), "waited": len(each["wait"]),
                **{f"{name}_error_median": _median(some) for name, some in each.items()},
                "plan_ttft_error_median": _median(abs(said_s / took_s - 1) for said_s, took_s in told_s),
            }  # fmt: skip
            tell(f"load {rate}: {json.dumps(found[str(rate)])}{f'; {failed[0]}' if failed else ''}")
            yield {"predicted_error_median": _median(errors), "by_rate": found}


def _warm(bench: Bench, server: Server) -> None:
    """Requests that are not counted. The server notes what its passes take."""
    for count in range(1, 9):
        together(server, bench.streams("small", count, PROMPT_TOKENS, 16))
    for tokens in PROMPTS:  # alone, as often as is believed
        for i in range(LEAST_PASSES):
            together(server, bench.streams("small", 1, tokens, 2, seed=60 + i))
    for count in (3, 7):  # with prompts beside them too
        talking = threading.Thread(
            target=together, args=(server, bench.streams("small", count, PROMPT_TOKENS, 100, 80))
        )
        talking.start()
        for i in range(3):
            together(server, bench.streams("small", 1, 128, 2, seed=90 + i))
        talking.join()


def _errors(foretold: Sequence[ForetoldRequest], real: Sequence[Stream], pass_s: float) -> dict[str, list[float]]:
    """Of each request how far what was foretold is off. `wait`: of those that waited for a sequence, for a pass or
    longer; of the others it is next to nothing."""
    pairs = list(zip(foretold, real, strict=True))
    return {
        "wait": [abs(f.wait_s / s.usage["wait_s"] - 1) for f, s in pairs if s.usage["wait_s"] >= pass_s],
        "ttft": [abs(f.ttft_s / s.ttft_s - 1) for f, s in pairs],
        "tokens_per_s": [abs((s.times_s[-1] - s.times_s[0]) / (f.all_s - f.ttft_s) - 1) for f, s in pairs],
    }


def _median(values: Iterable[float]) -> float | None:
    some = list(values)
    return statistics.median(some) if some else None


def _arrive(
    bench: Bench, server: Server, arrivals: Sequence[Arrival]
) -> list[tuple[Arrival, Stream, dict[str, Any] | None]]:
    """Sends the requests when they are due, and waits for all answers. Returns when each came, in this order, its
    stream, and what /v1/plan said right before, of those that it was asked for."""
    made = [
        Stream(token_ids(bench.vocab("small"), a.prompt, 70_000 + i).tolist(), a.output) for i, a in enumerate(arrivals)
    ]
    said: list[dict[str, Any] | None] = [None] * len(arrivals)

    def run(i: int) -> None:
        if i % ASKS == 0:
            about = f"prompt_tokens={arrivals[i].prompt}&output_tokens={arrivals[i].output}"
            with suppress(OSError, HTTPException, LookupError):  # then this one is not compared with it
                said[i] = server.get(f"/v1/plan?{about}")["next_request"]
        made[i].run(server)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(arrivals))]
    start_s = time.perf_counter()
    for thread, arrival in zip(threads, arrivals, strict=True):
        time.sleep(max(0.0, start_s + arrival.at_s - time.perf_counter()))
        thread.start()
    for thread in threads:
        thread.join()
    came = [a._replace(at_s=stream.asked_s - start_s) for a, stream in zip(arrivals, made, strict=True)]
    return sorted(zip(came, made, said, strict=True), key=lambda each: each[0].at_s)
