"""`penstock profile`: counts the experts that a text asks for, and the share that caches of any size would hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Model, Weights, Work, read_text
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest
from penstock.store.files import MAX_TEXT_BYTES
from penstock.units import format_bytes

_SHOWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # sizes of caches, as shares of a layer's experts


def profile(
    model: Model,
    file: Annotated[str, Argument(metavar="FILE", help=f"A text, UTF-8, of at most {format_bytes(MAX_TEXT_BYTES)}.")],
    machine: Machine,
    work: Work,
    weights: Weights = None,
    tokens: Annotated[int, Option("--tokens", min=1, help="Read at most so many tokens of the text.")] = 16384,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """Which experts of a model a text asks for.

    The text is read in windows of 512 tokens. What its routers said is kept beside the packed model. `plan` and `run`
    predict by it from then on.
    """
    machine.prepare()
    if work.context is not None or work.batch != 1 or work.prompt_tokens or work.output_tokens:
        raise BadRequest("profile reads one window of 512 tokens at a time; --context, --batch and lengths are settled")
    text, ask = read_text(file), work.ask(machine)
    source = packed_model(model, weights, machine, cache_limit)
    from penstock.serve import profiling
    from penstock.serve.planning import describe
    from penstock.spec.profile import hit_rates
    from penstock.store.profile_file import keep

    spec, _ = describe(source.folder, verify=not machine.no_verify)
    if not spec.is_routed:
        raise BadRequest(f"{source.folder} has no experts to count")
    window = min(profiling.WINDOW_TOKENS, spec.max_positions)
    ask = dataclasses.replace(ask, context=window, prompt_tokens=window, output_tokens=1)
    with loaded(source, ask, machine) as engine, progress() as tell:
        seen = profiling.profile(engine, text, Path(file).name, tokens, tell)
    kept = keep(seen, source.folder)
    rates = hit_rates(seen)
    experts = len(rates) - 1
    if as_json:
        print_json({"tokens": seen.tokens, "text_sha256": seen.text_sha256, "hit_rates": rates, "file": str(kept)})
        return
    note(f"kept in {kept}: `plan` and `run` of this model go by it")
    print(f"{seen.tokens} tokens; a cache of so many of {experts} experts a layer would have had")
    for share in _SHOWN:
        slots = round(share * experts)
        print(f"  {slots:4} experts ({share:.0%})  {rates[slots]:.1%}")
