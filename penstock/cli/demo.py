"""`penstock demo`: runs the bundled model with half of its weights streaming from disk, without a network."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from typer import Argument

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Sampling, Workload
from penstock.cli.output import note, say_fitted
from penstock.errors import BadRequest
from penstock.serve.shapes import MODEL
from penstock.units import format_bytes

PROMPT = "Once upon a time"
# A story needs some randomness. The seed makes it the same story on all machines whose arithmetic rounds alike.
TELLING = {"do_sample": True, "temperature": 0.7, "top_k": 40}
SEED = 1


def demo(
    machine: Machine,
    sampling: Sampling,
    prompt: Annotated[str, Argument(metavar="PROMPT", help="How the story begins.")] = PROMPT,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """A bundled model tells a story, half of it on disk.

    At most half of its weights stay in memory, the rest streams. Prints the plan, the text, and the predicted
    beside the measured speed.
    """
    from penstock.cli.run import answer

    machine.prepare()
    if not (MODEL / "config.json").is_file():
        raise BadRequest("this installation has no bundled model: install penstock again, from a wheel")
    source = packed_model(str(MODEL), None, machine, cache_limit)
    from penstock.serve.tokenizer import Tokenizer
    from penstock.store.packed import open_packed

    ask = Workload().ask(machine)
    tokenizer = Tokenizer.open(source.folder, ask.host_memory_bytes, not machine.no_verify)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=SEED)
    ids, params = tokenizer.encode(prompt), sampling.params(TELLING)
    ask = dataclasses.replace(ask, prompt_tokens=max(1, len(ids)), output_tokens=params.max_tokens)
    if ask.resident_bytes is None:
        total = open_packed(source.folder, verify=not machine.no_verify).total_bytes
        ask = dataclasses.replace(ask, resident_bytes=total // 2)
        note(f"of {format_bytes(total)} of weights {format_bytes(total // 2)} may stay in memory")
    with loaded(source, ask, machine, tokenizer=tokenizer) as engine:
        from penstock.planner.explain import table

        say_fitted(table(engine.solved, why=False))
        answer(engine, ids, params, as_json, lead=prompt)
