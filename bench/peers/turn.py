"""`python -m bench.peers.turn MODEL`: penstock reading the new tokens of a chat's turn by the plan of a server, without
its scheduler and HTTP, as a worker of `bench.serve`."""

from __future__ import annotations

import time
from pathlib import Path

from bench.peers import PROMPT_TOKENS, Answer, Loaded, packed_arguments, serve, token_ids
from penstock import _native
from penstock.graph.batch import Batch
from penstock.graph.ops import attend_cost
from penstock.graph.passes import DECODE
from penstock.graph.tasks import Pass, Stream
from penstock.runtime import host
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec import plan as plans
from penstock.spec.ask import Ask

_ALONE = 1  # the sequence that has nothing before its tokens; 0 has the chat


def main() -> None:
    parser = packed_arguments(__doc__)
    parser.add_argument("--plan", type=Path, help="the server's: of two sequences at least; default one all in memory")
    parser.add_argument("--context", type=int, help="of a plan all in memory")
    parser.add_argument("--limit", type=int, help="bytes of the whole process, as the plan was made for")
    wanted = parser.parse_args()

    def load() -> Loaded:
        given = plans.loads(wanted.plan.read_text(), str(wanted.plan)) if wanted.plan else None
        ask = Ask(
            batch=2, context=wanted.context, prompt_tokens=PROMPT_TOKENS, host_memory_bytes=wanted.limit
        )  # fmt: skip
        engine = Engine.load(wanted.model, ask, Loading(cache=wanted.cache, plan=given))
        session, plan, spec, length = engine.session, engine.plan, engine.plan.target.spec, 0

        def step(purpose: str, seq: int, start: int, rows: int, then: Stream) -> float:
            """Takes a pass with rows of one sequence. Returns its seconds."""
            batch = Batch(0, (seq,), (start,), (rows,), (rows - 1,))
            tokens = token_ids(spec.vocab, rows, start)
            start_s = time.perf_counter()
            session.step(Pass(purpose, (batch,), then), [tokens])
            return time.perf_counter() - start_s

        def read(tokens: int) -> Answer:
            """Reads the chat so far."""
            nonlocal length
            until = length + tokens
            while length < until:
                rows = min(plan.chunk_rows, until - length)
                step("prefill", 0, length, rows, Stream("prefill", True))
                length += rows
            return {"tokens": length}

        def turn(seq: int, rows: int) -> Answer:
            """Rows of a turn behind what its sequence has, after a token of the answer before it; in as many passes as
            the plan's chunks make of them."""
            start = 0 if seq == _ALONE else length
            step("decode", seq, max(0, start - 1), 1, Stream("prefill", True))
            seconds, flops, until = 0.0, 0, start + rows
            while start < until:
                count = min(plan.chunk_rows, until - start)
                then = DECODE if start + count == until else Stream("prefill", True)
                seconds += step("prefill", seq, start, count, then)
                batch = Batch(0, (seq,), (start,), (count,), ())
                flops += sum(attend_cost(each.attention, each.attention.kv_heads, batch, 0)[1] for each in spec.layers)
                start += count
            return {"seconds": seconds, "attend_flops": flops}

        def peak(_: int) -> Answer:
            return {"float32_flops_per_s": _native.peak_per_s("float32", host.usable_cpus())}

        commands = {"read": read, "turn": lambda rows: turn(0, rows), "alone": lambda rows: turn(_ALONE, rows)}
        return {}, {**commands, "peak": peak}

    serve(load)


if __name__ == "__main__":
    main()
