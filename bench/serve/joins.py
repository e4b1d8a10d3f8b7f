"""A prompt that joins eight streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

from bench.clients import leave, medians, percentile, together, wait_until
from bench.offload_engines import tell
from bench.peers import PROMPT_TOKENS
from bench.serve.models import Bench, Figures

CONTEXT, JOIN_TOKENS = 1024, 512
GAPS = 24  # of each stream before the prompt comes


def prompt(bench: Bench, rounds: int) -> Iterator[Figures]:
    found: list[Figures] = []
    output = CONTEXT - PROMPT_TOKENS
    with bench.server("large", bench.limit, 9, CONTEXT) as server:
        for i in range(rounds):
            joins = bench.streams("large", 3, JOIN_TOKENS, 2, seed=10_000 + 3 * i)
            together(server, joins[2:])  # not counted: a granule's first read is compared with its checksum
            together(server, joins[:1])
            talking = bench.streams("large", 8, PROMPT_TOKENS, output, seed=20_000 + 8 * i)
            threads = [threading.Thread(target=stream.run, args=(server,)) for stream in talking]
            for thread in threads:
                thread.start()
            # Some gaps before the prompt comes, when all of their own prompts are read.
            all_s = wait_until(talking, threads, lambda stream: bool(stream.times_s))
            enough = max(len(stream.times_s) for stream in talking) + GAPS
            wait_until(talking, threads, lambda stream, enough=enough: len(stream.times_s) >= enough)  # type: ignore[misc]
            together(server, joins[1:2])
            leave(talking, threads)
            start_s, end_s = joins[1].asked_s, joins[1].times_s[0]
            gaps = [(at, gap) for s in talking for at, gap in zip(s.times_s[1:], s.gaps_s, strict=True)]
            before = percentile([gap for at, gap in gaps if all_s < at - gap and at <= start_s], 95)
            during = percentile([gap for at, gap in gaps if at > start_s and at - gap < end_s], 95)
            found.append({
                "gap_p95_before_s": before, "gap_p95_during_s": during, "gap_worst_ratio": during / before,
                "ttft_alone_s": joins[0].ttft_s, "ttft_joined_s": joins[1].ttft_s,
                "ttft_joined_ratio": joins[1].ttft_s / joins[0].ttft_s,
            })  # fmt: skip
            tell(f"a prompt joins, round {i + 1}: {json.dumps(found[-1])}")
            yield medians(found)
