"""A worker: one model as the engine plans it within a limit of memory, decoding greedily. For benches of disks.

Commands: `decode N` answers a prompt and decodes N tokens: seconds of the N, bytes that the disk read meanwhile, and
`bound_s`, what the machine's figures say that these reads take, each in its place and nothing between them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Answer, serve, token_ids
from penstock.graph import ops, passes
from penstock.graph.tasks import Pass, Task
from penstock.planner.cost import Cost
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask

PROMPT_TOKENS = 16


class Within:
    """`limit`: bytes of the process."""

    def __init__(self, folder: Path, limit: int, context: int, sparsity: str) -> None:
        ask = Ask(
            context=context, host_memory_bytes=limit, sparsity=sparsity, prompt_tokens=PROMPT_TOKENS,
            output_tokens=context - PROMPT_TOKENS,
        )  # fmt: skip
        self.engine = Engine.load(folder, ask, Loading())
        self._cost = Cost(self.engine.machine)
        self._bound_s = 0.0
        session = self.engine.session
        step = session.lowering.step

        def noting(p: Pass, answer: Any) -> Iterator[Task]:
            for task in step(p, answer):
                if p.purpose == "decode" and isinstance(task.calls[0].operands, ops.Load | ops.Pick | ops.Fetch):
                    self._bound_s += self._cost.seconds(task)
                yield task

        session.lowering.step = noting  # type: ignore[method-assign]

    def facts(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "reasons": engine.solved.reasons,
            "predicted_tokens_per_s": engine.prediction.decode_tokens_per_s,
            "predicted_disk_bytes": engine.prediction.disk_bytes_per_token,
            "asks": engine.plan.asks,
        }

    def decode(self, tokens: int) -> Answer:
        session, plan = self.engine.session, self.engine.plan
        ids = token_ids(plan.target.spec.vocab, PROMPT_TOKENS)
        for p in passes.prefill(plan, 0, len(ids), passes.DECODE):
            batch = p.batches[0]
            session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        token = session.best[0][0][1]
        answered, read = [token], session.bytes_moved()
        self._bound_s, start_s = 0.0, time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
            session.step(passes.decode(plan, (0,), (position,), passes.DECODE), [np.array([token], np.int32)])
            token = session.best[0][0][1]
            answered.append(token)
        seconds = time.perf_counter() - start_s
        now = session.bytes_moved()
        return {
            "seconds": seconds, "disk_bytes": sum(now.values()) - sum(read.values()), "bound_s": self._bound_s,
            "tokens": answered, "peak_bytes": session.peak_host_bytes,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--limit", type=int, required=True)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--sparsity", default="auto")
    wanted = parser.parse_args()

    def load() -> tuple[dict[str, Any], dict[str, Callable[[int], Answer]]]:
        ours = Within(wanted.model, wanted.limit, wanted.context, wanted.sparsity)
        return ours.facts(), {"decode": ours.decode}

    serve(load)


if __name__ == "__main__":
    main()
