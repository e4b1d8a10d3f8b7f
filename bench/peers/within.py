"""A worker: one model as the engine plans it within a limit of memory, reading random tokens. For benches of disks.

Commands: `decode N` reads a prompt, and then N tokens one by one: seconds of the N, bytes that the disk read meanwhile,
and `bound_s`, what the machine's figures say that these reads take if nothing comes between them. Of
records that were asked for `asked_bytes` are all bytes of their reads: `records_bytes` those of the records alone,
`alignment_bytes` the rest of their pages, and `hole_bytes` pages between them that are read through.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Answer, Loaded, serve
from penstock.graph import ops, passes
from penstock.graph.recent import PAIR_BYTES
from penstock.graph.records import Records
from penstock.graph.tasks import Call, Pass, Task
from penstock.planner.cost import Cost
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.spec.machine import PICKS_IN_FLIGHT
from penstock.spec.places import DISK

PROMPT_TOKENS = 16
_NOTED = (ops.Load, ops.Pick, ops.Fetch, ops.Recall)


class Within:
    """`limit`: bytes of the process. `cache`: of this machine's figures; None for the user's."""

    def __init__(self, folder: Path, limit: int, context: int, sparsity: str, cache: Path | None = None) -> None:
        ask = Ask(
            context=context, host_memory_bytes=limit, sparsity=sparsity, prompt_tokens=PROMPT_TOKENS,
            output_tokens=context - PROMPT_TOKENS,
        )  # fmt: skip
        self.engine = Engine.load(folder, ask, Loading(cache=cache))
        self._cost = Cost(self.engine.machine)
        self._pick = self.engine.machine.rate(DISK.reads, "pick", "*")
        session = self.engine.session
        step, plan = session.lowering.step, self.engine.plan
        self._asked = {unit.part: plan.unit_rows(unit)[0] for unit in reversed(plan.units) if unit.asked}
        self._reads = self._none()
        # What was answered, 2 bytes a neuron: the limit has no room for lists. What it comes to is counted when the
        # clock stands.
        self._answers: list[tuple[str, array[int]]] = []

        def noted(call: Call, answer: Any) -> Any:
            found, operands = answer(call), call.operands
            assert isinstance(operands, ops.Fire | ops.Predict) and len(found) == 1
            self._answers.append((f"{operands.layer}.ffn", array("H", found[0])))
            return found

        def noting(p: Pass, answer: Any, *more: Any) -> Iterator[Task]:
            for task in step(p, lambda call: noted(call, answer), *more):
                if isinstance(task.calls[0].operands, _NOTED):
                    self._note(task)
                yield task

        session.lowering.step = noting  # type: ignore[method-assign, assignment]

    @staticmethod
    def _none() -> dict[str, float]:
        return dict.fromkeys(("bound_s", "told_bytes", "asked_bytes", "records_bytes", "reads"), 0)

    def _note(self, task: Task) -> None:
        """Adds a read. `told_bytes`: of all reads, as tasks have them."""
        (call,) = task.calls
        op, reads = call.operands, self._reads
        if isinstance(op, ops.Recall):  # of these nothing is read
            plan = self.engine.plan
            stride = Records.of(plan.parts[plan.units[call.unit].part]).stride
            reads["records_bytes"] -= len(op.held) // PAIR_BYTES * stride
            return
        reads["told_bytes"] += call.bytes
        if isinstance(op, ops.Pick):
            # At the rate of reads in flight together. What the planner charges for few reads by themselves is no bound.
            reads["bound_s"] += len(op.runs) * self._pick.alpha_s / PICKS_IN_FLIGHT + call.bytes * self._pick.s_per_byte
            reads["asked_bytes"] += call.bytes
            reads["reads"] += len(op.runs)
        else:
            reads["bound_s"] += self._cost.seconds(task)

    def facts(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "reasons": engine.solved.reasons,
            "predicted_tokens_per_s": engine.prediction.decode_tokens_per_s,
            "predicted_disk_bytes": engine.prediction.disk_bytes_per_token,
            "asks": engine.plan.asks,
            "hole_limit_bytes": engine.plan.hole_bytes,
        }

    def decode(self, tokens: int) -> Answer:
        session, plan = self.engine.session, self.engine.plan
        ids = given(PROMPT_TOKENS + tokens)
        for p in passes.prefill(plan, 0, PROMPT_TOKENS, passes.DECODE):
            batch = p.batches[0]
            session.step(p, [ids[batch.start[0] : batch.start[0] + batch.rows[0]]])
        answered = [session.best[0][0][1]]
        session.drain()
        read = session.bytes_moved()
        self._reads = self._none()
        self._answers.clear()
        start_s = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens):
            session.step(passes.decode(plan, (0,), (position,), passes.DECODE), [ids[position : position + 1]])
            answered.append(session.best[0][0][1])
        seconds = time.perf_counter() - start_s
        session.drain()
        now = session.bytes_moved()
        return {
            "seconds": seconds, "disk_bytes": sum(now.values()) - sum(read.values()), "tokens": answered,
            "peak_bytes": session.peak_host_bytes, **self._counted(),
        }  # fmt: skip

    def _counted(self) -> dict[str, float]:
        """What was noted since the last time."""
        parts, found, pages = self.engine.plan.parts, dict(self._reads), 0
        for part, neurons in self._answers:
            records, first = Records.of(parts[part]), self._asked[part]
            live = [neuron for neuron in neurons if neuron >= first]
            found["records_bytes"] += len(live) * records.stride
            pages += sum(hi - lo for lo, hi in records.runs(live, parts[part].granule_rows, 0))
        return {
            **found, "alignment_bytes": pages - found["records_bytes"], "hole_bytes": found["asked_bytes"] - pages
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
    parser.add_argument("--cache", type=Path, help="the folder of this machine's figures; default the user's")
    wanted = parser.parse_args()

    def load() -> Loaded:
        ours = Within(wanted.model, wanted.limit, wanted.context, wanted.sparsity, wanted.cache)
        return ours.facts(), {"decode": ours.decode}

    serve(load)


if __name__ == "__main__":
    main()
