"""`python -m bench.peers.streamed MODEL`: penstock as a worker of `bench.offload`, planned for a memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import PROMPT_TOKENS, Answer, Loaded, limited_arguments, serve, token_ids
from penstock.runtime import host
from penstock.serve.engine import Engine
from penstock.serve.generation import Generation
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.part_keys import head_key
from penstock.spec.places import DISK, HOST
from penstock.spec.plan import Plan

OUTPUT_TOKENS = 32  # that plans are made for; a round decodes about as many


class Streamed:
    """One loaded engine, as a user would load it."""

    def __init__(self, folder: Path, ask: Ask, cache: Path) -> None:
        self.engine = Engine.load(folder, ask, Loading(cache=cache))
        self.plan = self.engine.plan

    def facts(self) -> dict[str, Any]:
        """`streamed_bytes` and `weight_bytes`: of a token, from the plan alone."""
        predicted = self.engine.prediction
        return {
            "streamed_bytes": streamed_bytes(self.plan),
            "weight_bytes": weight_bytes(self.plan),
            "planned_host_bytes": self.plan.tier_bytes()[HOST],
            "predicted_tokens_per_s": predicted.decode_tokens_per_s,
            "predicted_ttft_s": predicted.ttft_s,
            "io": {"engine": self.plan.io_engine, "depth": self.plan.io_depth, "block_bytes": self.plan.io_block_bytes},
            "reasons": list(self.engine.solved.reasons),
        }

    def decode(self, tokens: int) -> Answer:
        """So many steps. `exact`: the disk was read for each token, and altogether, as the plan says."""
        ids = token_ids(self.plan.target.spec.vocab, PROMPT_TOKENS).tolist()
        answer = self._generate(ids, tokens + 1)
        each = streamed_bytes(self.plan)
        exact = answer.disk_bytes_per_token == each and answer.bytes_moved[DISK.reads] == self._all_reads(ids, tokens)
        return {
            "seconds": answer.decode_s,
            "disk_bytes_per_token": answer.disk_bytes_per_token,
            "exact": exact,
            "peak_host_bytes": host.peak_rss_bytes(),
        }

    def prefill(self, tokens: int) -> Answer:
        ids = token_ids(self.plan.target.spec.vocab, tokens).tolist()
        return {"seconds": self._generate(ids, 1).ttft_s, "peak_host_bytes": host.peak_rss_bytes()}

    def _generate(self, ids: list[int], tokens: int) -> Generation:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        (answer,) = self.engine.generate([ids], params)
        return answer

    def _all_reads(self, ids: list[int], steps: int) -> int:
        """What the disk reader should have counted: the streamed weights once per prompt chunk and once per step, and
        the granules that hold the tokens' embedding rows."""
        plan, row = self.plan, embedding_row_bytes(self.plan)
        chunks = [ids[at : at + plan.chunk_rows] for at in range(0, len(ids), plan.chunk_rows)]
        granule_rows = plan.parts["embed"].granule_rows
        granules = sum(len(np.unique(np.array(chunk) // granule_rows)) for chunk in chunks)
        head = sum(plan.unit_bytes(u) for u in plan.units if u.part == head_key(plan.target.spec) and u.home == "disk0")
        weights = streamed_bytes(plan) - row
        # The head is read for the prompt's last row alone.
        return len(chunks) * (weights - head) + head + steps * weights + (granules + steps) * row


def embedding_row_bytes(plan: Plan) -> int:
    """What is read from disk to look up one token: the granule its row lies in, unless the table stays in memory."""
    at_disk = any(unit.part == "embed" and unit.home == "disk0" for unit in plan.units)
    return plan.parts["embed"].granule_bytes if at_disk else 0


def streamed_bytes(plan: Plan) -> int:
    """Read from disk per decoded token: what is at home there, but of a mere embedding the token's row alone."""
    table = set() if plan.target.spec.tied else {"embed"}
    found = sum(plan.unit_bytes(u) for u in plan.units if u.home == "disk0" and u.part not in table)
    return found + embedding_row_bytes(plan)


def weight_bytes(plan: Plan) -> int:
    """Read from memory per decoded token, wherever the weights come from."""
    table = set() if plan.target.spec.tied else {"embed"}
    return sum(plan.unit_bytes(unit) for unit in plan.units if unit.part not in table)


def main() -> None:
    parser = limited_arguments(__doc__)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens that the plan is made for")
    wanted = parser.parse_args()

    def load() -> Loaded:
        lengths = {"prompt_tokens": wanted.prompt, "output_tokens": OUTPUT_TOKENS, "context": wanted.context}
        ours = Streamed(wanted.model, Ask(batch=1, host_memory_bytes=wanted.limit, **lengths), wanted.cache)
        return ours.facts(), {"decode": ours.decode, "prefill": ours.prefill}

    serve(load)


if __name__ == "__main__":
    main()
