"""Prompts that join eight streams.

A pass with rows of a prompt is compared with passes a second before and after it, for the same pass takes twice as
long from one ten seconds to the next. So several prompts join in a round, one after the other, and between them the
eight are alone for as many gaps. The percentiles are of all gaps of a round with a prompt, and of all without. A
percentile of 24 gaps before one prompt, as this was before, is the second longest of them: its ratio went from 1.18
to 1.68.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bench.clients import Stream, leave, medians, percentile, together, wait_until
from bench.offload_engines import tell
from bench.peers import PROMPT_TOKENS
from bench.serve.models import Bench, Figures

CONTEXT, JOIN_TOKENS = 1024, 512
GAPS = 24  # of each stream, at least, before a prompt comes and after it


def prompt(bench: Bench, rounds: int, joins: int) -> Iterator[Figures]:
    """`joins`: prompts of a round. Fewer join if the eight have no room left for their answers."""
    found: list[Figures] = []
    with bench.server("large", bench.limit, 9, CONTEXT) as server:
        together(server, bench.streams("large", 1, JOIN_TOKENS, 2, seed=9_000))  # the first read of granules is checked
        for i in range(rounds):
            found.append(_round(bench, server, joins, 1000 * (i + 10)))
            tell(f"prompts join, round {i + 1}: {json.dumps(found[-1])}")
            yield medians(found)


def _round(bench: Bench, server: Any, joins: int, seed: int) -> Figures:
    alone = [*together(server, bench.streams("large", 1, JOIN_TOKENS, 2, seed=seed))]
    talking = bench.streams("large", 8, PROMPT_TOKENS, CONTEXT - PROMPT_TOKENS, seed=seed + 100)
    threads = [threading.Thread(target=stream.run, args=(server,)) for stream in talking]
    for thread in threads:
        thread.start()
    all_s = wait_until(talking, threads, lambda stream: bool(stream.times_s))  # their own prompts are read
    _wait_gaps(talking, threads, GAPS)
    joined, before = list[Stream](), 0
    for stream in bench.streams("large", joins, JOIN_TOKENS, 2, seed=seed + 200):
        said = max(len(each.times_s) for each in talking)
        # As many gaps as the prompt before took, and once more as many without a prompt after it.
        if joined and said + 2 * max(GAPS, before) > CONTEXT - PROMPT_TOKENS:
            break
        joined += together(server, [stream])
        before = max(len(each.times_s) for each in talking) - said
        _wait_gaps(talking, threads, max(GAPS, before))
    leave(talking, threads)
    alone += together(server, bench.streams("large", 1, JOIN_TOKENS, 2, seed=seed + 300))
    return figures(talking, joined, alone, all_s)


def _wait_gaps(talking: Sequence[Stream], threads: Sequence[threading.Thread], gaps: int) -> None:
    """Until each of the eight has so many tokens more than any has now, or is at the end of its context."""
    enough = min(CONTEXT - PROMPT_TOKENS - 1, max(len(stream.times_s) for stream in talking) + gaps)
    wait_until(talking, threads, lambda stream: len(stream.times_s) >= enough)


def figures(talking: Sequence[Stream], joined: Sequence[Stream], alone: Sequence[Stream], all_s: float) -> Figures:
    """Of one round. `all_s`: when the prompts of all that were `talking` had been read. A gap in which a prompt was
    asked for or read for a part of it is one with a prompt."""
    gaps = [(end_s - gap_s, end_s, gap_s)
            for s in talking for end_s, gap_s in zip(s.times_s[1:], s.gaps_s, strict=True)]  # fmt: skip
    spans = [(stream.asked_s, stream.times_s[0]) for stream in joined]
    during, without = list[float](), list[float]()
    for start_s, end_s, gap_s in gaps:
        if start_s > all_s:
            beside = any(start_s < to_s and end_s > from_s for from_s, to_s in spans)
            (during if beside else without).append(gap_s)
    of_alone, of_joined = (statistics.median(s.ttft_s for s in streams) for streams in (alone, joined))
    p95 = percentile(during, 95), percentile(without, 95)
    return {
        "joins": len(joined), "gaps_during": len(during), "gaps_without": len(without),
        "gap_p95_without_s": p95[1], "gap_p95_during_s": p95[0], "gap_worst_ratio": p95[0] / p95[1],
        "gap_median_ratio": statistics.median(during) / statistics.median(without),
        "ttft_alone_s": of_alone, "ttft_joined_s": of_joined, "ttft_joined_ratio": of_joined / of_alone,
    }  # fmt: skip
