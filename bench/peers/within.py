"""A worker: one model as the engine plans it within a limit of memory, reading random tokens. For benches of disks.

Commands: `decode N` reads a prompt, and then N tokens one by one: seconds of the N, bytes that the disk read meanwhile,
and `bound_s`, what the machine's figures say that these reads take, each in its place and nothing between them. Of
records that were asked for `asked_bytes` are all bytes of their reads, and `records_bytes` those of the records alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Answer, serve
from penstock.graph import ops, passes
from penstock.graph.recent import PAIR_BYTES
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Pass, Task
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
        self._bound_s, self._asked_bytes, self._records_bytes = 0.0, 0, 0
        session = self.engine.session
        step, plan = session.lowering.step, self.engine.plan
        asked = [unit for unit in plan.units if unit.asked]
        strides = {unit.part: Records.of(plan.parts[unit.part]).stride for unit in asked}
        firsts = {unit.part: plan.unit_rows(unit)[0] for unit in reversed(asked)}

        def counted(call: Call, answer: Any) -> Any:
            """What was answered. Notes the records that it names, of neurons from the first that is asked for on."""
            found, operands = answer(call), call.operands
            assert isinstance(operands, ops.Fire | ops.Predict)
            part = f"{operands.layer}.ffn"
            live = {neuron for row in found for neuron in row if neuron >= firsts[part]}
            self._records_bytes += len(live) * strides[part]
            return found

        def noting(p: Pass, answer: Any) -> Iterator[Task]:
            for task in step(p, lambda call: counted(call, answer)):
                if p.purpose == "decode" and isinstance(task.calls[0].operands, ops.Load | ops.Pick | ops.Fetch):
                    self._bound_s += self._cost.seconds(task)
                    self._asked_bytes += sum(c.bytes for c in task.calls if isinstance(c.operands, ops.Pick))
                for call in task.calls:
                    if isinstance(call.operands, ops.Recall):  # of these nothing is read
                        self._records_bytes -= (
                            len(call.operands.held) // PAIR_BYTES * strides[plan.units[call.unit].part]
                        )
                yield task

        session.lowering.step = noting  # type: ignore[method-assign, assignment]

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
        ids = given(PROMPT_TOKENS + tokens)
        for p in passes.prefill(plan, 0, PROMPT_TOKENS, passes.DECODE):
            batch = p.batches[0]
            session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        answered, read = [session.best[0][0][1]], session.bytes_moved()
        self._bound_s, self._asked_bytes, self._records_bytes, start_s = 0.0, 0, 0, time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
            session.step(passes.decode(plan, (0,), (position,), passes.DECODE), [ids[position : position + 1]])
            answered.append(session.best[0][0][1])
        seconds = time.perf_counter() - start_s
        now = session.bytes_moved()
        return {
            "seconds": seconds, "disk_bytes": sum(now.values()) - sum(read.values()), "bound_s": self._bound_s,
            "asked_bytes": self._asked_bytes, "records_bytes": self._records_bytes,
            "tokens": answered, "peak_bytes": session.peak_host_bytes,
        }  # fmt: skip


def given(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Random tokens of a tokenizer of bytes, which models of `synth` have. A random model's own answers repeat a token,
    for which other neurons count than for the tokens that rates were set by."""
    return np.random.default_rng(3).integers(0, 256, count).astype(np.int32)


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
