"""`python -m bench.peers.block MODEL`: penstock answering one block of prompts, as a worker of `bench.throughput`.

Prompts and decoding are two commands, so that ceilings can be read between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peers import Answer, Loaded, packed_arguments, serve, token_ids
from bench.peers.streamed import streamed_bytes
from penstock.graph import ops, passes
from penstock.graph.arenas import Layout
from penstock.graph.tasks import Pass
from penstock.planner.bound import score_s, sequences
from penstock.runtime import host
from penstock.serve.answering import Answering, checked_ids
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec import plan as plans
from penstock.spec.ask import Ask
from penstock.spec.part_keys import head_key
from penstock.spec.places import DISK, HOST
from penstock.spec.plan import Plan

_BLOCKS = {"attn": ops.QKV_BLOCKS + ops.OUT_BLOCKS, "ffn": ops.FFN_BLOCKS}


class Block:
    """One loaded engine, and one block of the ask's prompts: as many as its plan answers at once."""

    def __init__(self, folder: Path, ask: Ask, cache: Path, plan: Plan | None) -> None:
        self.ask = ask
        self.engine = Engine.load(folder, ask, Loading(cache=cache, plan=plan))
        self.plan = self.engine.plan
        self.seqs = sequences(self.plan, ask)
        self._kv = Layout(self.plan).kv
        self._answers: list[Generation] = []
        self._pieces: Iterator[object] = iter(())

    def facts(self) -> dict[str, Any]:
        """What the plan and its prediction say. Bytes and operations are those of a decode pass of the block."""
        plan, predicted, session = self.plan, self.engine.prediction, self.engine.session
        kv = [{"layers": list(h.layers), "home": h.home, "format": h.format.name} for h in plan.kv]
        load = self.engine.machine.rate(DISK.reads, "load", plan.target.weights.kind)
        return {
            "seqs": self.seqs,
            "block": [plan.batches_per_pass, plan.batch_seqs],
            "chunk_rows": plan.chunk_rows,
            "kv": kv,
            "pass_streamed_bytes": streamed_bytes(plan),
            "pass_weight_bytes": sum(plan.unit_bytes(u) for u in plan.units if _computed(plan, u.part)),
            "pass_ops": matrix_ops(plan, self.seqs),
            "planned_host_bytes": plan.tier_bytes()[HOST],
            "peak_exact": session.arena_bytes == plan.tier_bytes()[HOST] - plan.process_bytes,
            "predicted_prompts_s": predicted.ttft_s,
            "predicted_decode_tokens_per_s": predicted.decode_tokens_per_s,
            "predicted_s_per_token": score_s(predicted, plan, self.ask),
            "probed_disk_bytes_per_s": 1 / load.s_per_byte,
            "bound_by": predicted.bound_by,
            "reasons": list(self.engine.solved.reasons),
        }

    def prompts(self, _: int) -> Answer:
        """Reads all prompts of the block, up to the first token of each answer."""
        vocab, engine = self.plan.target.spec.vocab, self.engine
        wanted = [
            checked_ids(token_ids(vocab, self.ask.prompt_tokens, s).tolist(), self.plan) for s in range(self.seqs)
        ]
        params = SamplingParams(max_tokens=self.ask.output_tokens, temperature=0.0, ignore_eos=True)
        run = Answering(engine.session, engine.tokenizer, wanted, params, streams=False)
        self._answers, self._pieces = run.answers, run.pieces()
        for _ in range(self.seqs):
            next(self._pieces)
        return {"seconds": max(answer.ttft_s for answer in self._answers), "tokens": sum(map(len, wanted))}

    def steps(self, count: int) -> Answer:
        """So many decode passes behind prompts that nobody read: what their cache holds changes no pass's time."""
        plan, session = self.plan, self.engine.session
        fed = np.array([token_ids(plan.target.spec.vocab, 1, seq)[0] for seq in range(self.seqs)])
        read, expected, start_s = 0, 0, 0.0
        for step in range(count + 1):  # the first one is not counted: loads run ahead from there on
            start_s = time.perf_counter() if step == 1 else start_s
            p = self._pass(step)
            session.step(p, [fed[list(batch.seqs)] for batch in p.batches])
            if step:
                read, expected = read + session.consumed_bytes, expected + self._pass_bytes(fed, step)
            fed = np.array([token for best in session.best for _, token in best])
        seconds = time.perf_counter() - start_s
        session.drain()
        return {
            "seconds": seconds,
            "tokens": count * self.seqs,
            "passes": count,
            "read_bytes": read,
            "exact": read == expected,
            **self._kv_bytes(range(1, count + 1)),
            "peak_host_bytes": host.peak_rss_bytes(),
        }

    def decode(self, _: int) -> Answer:
        """The other tokens of the answers. `read_bytes`: that its passes took from slower tiers; `exact`: as many as
        reading the weights that stream once a pass for the whole block makes, the granules of the tokens' rows of the
        embedding, and the pages of KV on a disk before each pass's rows."""
        for _piece in self._pieces:
            pass
        answer = self._answers[0]
        return {
            "seconds": answer.decode_s,
            "tokens": answer.decode_tokens,
            "passes": answer.decode_steps,
            "read_bytes": answer.decode_disk_bytes,
            "exact": answer.decode_disk_bytes == self._reads(answer.decode_steps),
            **self._kv_bytes(range(answer.decode_steps)),
            "bytes_moved": answer.bytes_moved,
            "peak_host_bytes": host.peak_rss_bytes(),
        }

    def _reads(self, steps: int) -> int:
        """What decode passes should have read: see `decode`."""
        fed = ([answer.token_ids[step] for answer in self._answers] for step in range(steps))
        return sum(self._pass_bytes(np.array(tokens), step) for step, tokens in enumerate(fed))

    def _pass(self, step: int) -> Pass:
        """The decode pass so many tokens behind the prompts."""
        at = self.ask.prompt_tokens + step
        return passes.decode(self.plan, range(self.seqs), (at,) * self.seqs, passes.DECODE)

    def _kv_bytes(self, steps: range) -> dict[str, int]:
        """What these passes read of KV from disks, and what their attention reads in memory."""
        read = sum(self._kv.loaded_bytes(self._pass(step).batches, from_disk=True) for step in steps)
        a_token = self.seqs * sum(kv_token_bytes(self.plan))
        seen = sum(self.ask.prompt_tokens + step + 1 for step in steps)
        return {"kv_read_bytes": read, "kv_seen_bytes": seen * a_token}

    def _pass_bytes(self, fed: NDArray[Any], step: int) -> int:
        """What the decode pass with these tokens [S], so many behind the prompts, should read."""
        plan, table = self.plan, self.plan.parts["embed"]
        looked_up = any(unit.part == "embed" and unit.home == "disk0" for unit in plan.units)
        row = table.granule_bytes if looked_up else 0
        batches = (fed[at : at + plan.batch_seqs] for at in range(0, self.seqs, plan.batch_seqs))
        granules = sum(len(np.unique(batch // table.granule_rows)) for batch in batches)
        kv = self._kv.loaded_bytes(self._pass(step).batches, from_disk=True)
        return streamed_bytes(plan) - row + granules * row + kv


def _computed(plan: Plan, part: str) -> bool:
    """Whether a decode pass multiplies with the part: all but an embedding that is no head."""
    return part == head_key(plan.target.spec) or plan.parts[part].kind != "embed"


def kv_token_bytes(plan: Plan) -> Iterator[int]:
    """Bytes of K and V of a token in each layer, where all sequences keep them in one format. Of layers with a window
    attention reads no more than that, so they are left out."""
    for home in plan.kv:
        for layer in plan.target.spec.layers[slice(*home.layers)]:
            a = layer.attention
            yield 0 if a.window else 2 * a.kv_heads * home.format.kv_bytes(a.head_dim)


def matrix_ops(plan: Plan, rows: int) -> float:
    """Operations of all products of a decode pass with so many rows. Attention to what was said is not counted."""
    total = 0.0
    for part in plan.parts.values():
        if part.kind in _BLOCKS or part.key == head_key(plan.target.spec):
            blocks = _BLOCKS.get(part.kind, ops.VOCAB_BLOCKS)
            total += ops.matrix_cost(part, 0, part.granules, blocks, rows)[1]
    return total


def main() -> None:
    parser = packed_arguments(__doc__)
    parser.add_argument("--ask", required=True, help="the fields of an Ask, as JSON")
    parser.add_argument("--plan", type=Path, help="default: the plan of the ask")
    wanted = parser.parse_args()

    def load() -> Loaded:
        plan = plans.loads(wanted.plan.read_text(), str(wanted.plan)) if wanted.plan else None
        ours = Block(wanted.model, Ask(**json.loads(wanted.ask)), wanted.cache, plan)
        return ours.facts(), {"prompts": ours.prompts, "decode": ours.decode, "steps": ours.steps}

    serve(load)


if __name__ == "__main__":
    main()
