"""`python -m bench.chat_turns`: a chat of 20 turns on the 1B shape in int4, whose context does not fill.

Each turn's prompt is all that was said, and some new tokens. Its first token should take as long in turn 20 as in turn
2, for only what is new goes through the model, and the last answer should be that of the same prompt from scratch. Each
turn's figure is the median of some rounds.

The new tokens attend to all positions before them, so the last turn computes more than the second one does. What that
takes at the least, by the float32 peak of this minute, is told beside: `attention_s` (scores and sums of values, two
operations each for a position and a number of a query). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bench.cpu import DEFAULT_SHAPES
from bench.offload_engines import tell
from bench.peers import token_ids
from bench.report import model_folder
from penstock.runtime.ceilings import ceilings_apart
from penstock.runtime.host import usable_cpus
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.model import ModelSpec
from penstock.store.synth import synth

TURNS, NEW, ANSWER, CONTEXT = 20, 40, 24, 2048
FLAT = 0.20  # a turn's first token may take so much more or less than the median of turns


def chat(engine: Engine, seed: int) -> tuple[list[float], list[int], bool]:
    """One chat: seconds until the first token of each turn; how many tokens went through the model before it beside
    the new ones and the one before them, which was never computed; whether the last answer is that from scratch."""
    vocab, params = engine.plan.target.spec.vocab, SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    ids: list[int] = []
    first_s, beyond = list[float](), list[int]()
    for turn in range(TURNS):
        ids += token_ids(vocab, NEW, 1000 * seed + turn).tolist()
        for _ in engine.stream(ids, params):
            pass
        assert engine.last is not None
        first_s.append(engine.last.ttft_s)
        beyond.append(len(ids) - engine.last.cached_tokens - NEW - (1 if turn else 0))
        prompt, answer = list(ids), list(engine.last.token_ids)
        ids += answer
    engine.session.held.forget()
    return first_s, beyond, engine.generate([prompt], params)[0].token_ids == answer


def attention_flops(spec: ModelSpec, turn: int) -> int:
    """Operations of attention before the first token of a turn, counted from 1: its new tokens, and the last one of the
    answer before, attend to what was said so far."""
    before = (turn - 1) * (NEW + ANSWER)
    attended = sum(position + 1 for position in range(max(0, before - 1), before + NEW))
    return sum(4 * layer.attention.heads * layer.attention.head_dim * attended for layer in spec.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps the model here (0.7 GB); default a temporary folder")
    parser.add_argument("--config", type=Path, default=DEFAULT_SHAPES["1b"], help="config.json of another shape")
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    with model_folder(wanted.folder) as folder:
        model = folder / f"{wanted.config.stem}-int4"
        if not model.exists():
            synth(wanted.config, model, parse_format("int4"))
        ask = Ask(prompt_tokens=NEW, output_tokens=ANSWER, context=CONTEXT)
        before = ceilings_apart(usable_cpus(), None)
        engine = Engine.load(model, ask, Loading(cache=model.parent / "cache"))
        try:
            chat(engine, 99)  # caches and threads come up
            rounds = [chat(engine, seed) for seed in range(wanted.rounds)]
            flops = [attention_flops(engine.plan.target.spec, turn) for turn in (2, TURNS)]
        finally:
            engine.close()
        after = ceilings_apart(usable_cpus(), None)
    turns_s = [statistics.median(times) for times in zip(*(first_s for first_s, _, _ in rounds), strict=True)]
    later = turns_s[1:]  # the first turn has no answer before it
    middle = statistics.median(later)
    for turn, seconds in enumerate(turns_s, start=1):
        tell(f"turn {turn:2}: first token {1e3 * seconds:6.1f} ms")
    off = max(abs(seconds / middle - 1) for seconds in later)
    peak = max(before.float32_flops_per_s, after.float32_flops_per_s)
    attention_s = [each / peak for each in flops]
    print(
        json.dumps(
            {
                "bench": "chat_turns",
                "rounds": wanted.rounds,
                "first_token_s": turns_s,
                "last_to_second": later[-1] / later[0],
                "attention_s": attention_s,  # of the second turn and of the last, at the peak
                "last_to_second_at_least": 1 + (attention_s[1] - attention_s[0]) / later[0],
                "worst_off_median": off,
                "flat": off <= FLAT,
                "tokens_beyond_the_new": max(count for _, beyond, _ in rounds for count in beyond),
                "as_from_scratch": all(same for _, _, same in rounds),
                "ram_bytes_per_s": [before.ram_read_bytes_per_s, after.ram_read_bytes_per_s],
            }
        )
    )


if __name__ == "__main__":
    main()
