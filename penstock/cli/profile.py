"""`penstock profile`: counts the experts that a text asks for, or the neurons that it fires."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Model, Weights, Workload, read_text
from penstock.cli.output import note, print_json, progress
from penstock.cli.text_argument import TextFile
from penstock.errors import BadRequest
from penstock.spec.ask import LOSSY

if TYPE_CHECKING:
    from penstock.spec.profile import Profile

_HOT = 0.8  # PowerInfer, Figure 4: of all activations
_SHOWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # sizes of caches, as shares of a layer's experts


def profile(
    model: Model,
    file: TextFile,
    machine: Machine,
    work: Workload,
    weights: Weights = None,
    tokens: Annotated[int, Option("--tokens", min=1, help="Read at most so many tokens of the text.")] = 16384,
    below: Annotated[
        float | None,
        Option(
            "--below",
            metavar="SHARE",
            help="Of a model without ReLU: find below which level this share of each"
            " layer's activations is, for --sparsity threshold.",
        ),
    ] = None,
    cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:
    """Which experts of a model a text asks for, or which neurons it fires.

    The text is read in windows of 512 tokens. What its routers said, or which neurons of a model with ReLU fired, is
    kept beside the packed model. `plan` and `run` predict by it from then on.
    """
    machine.prepare()
    work.refuse_sizes("profile reads")
    if work.sparsity in LOSSY:
        raise BadRequest(f"--sparsity {work.sparsity} leaves some out: a profile says what a model fires by itself")
    text, ask = read_text(file), work.ask(machine)
    from penstock.serve import levels, profiling
    from penstock.serve.planning import describe
    from penstock.store.profile_file import keep

    require = profiling.require_counted if below is None else partial(levels.require, below)
    source = packed_model(model, weights, machine, cache_limit, require=require)
    spec, _ = describe(source.folder, verify=not machine.no_verify)
    require(spec, str(source.folder))
    window = min(profiling.WINDOW_TOKENS, spec.max_positions)
    ask = dataclasses.replace(ask, context=window, prompt_tokens=window, output_tokens=1)
    with loaded(source, ask, machine) as engine, progress() as tell:
        name = Path(file).name
        if below is None:
            seen = profiling.profile(engine, text, name, tokens, tell)
        else:
            seen = levels.profile(engine, text, name, below, tokens, tell)
    kept = keep(seen, source.folder)
    note_kept = f"kept in {kept}: `plan` and `run` of this model go by it"
    said = {"tokens": seen.tokens, "text_sha256": seen.text_sha256, "file": str(kept)}
    if seen.levels:
        _tell_levels(seen, said, None if as_json else note_kept)
    elif seen.neurons:
        _tell_neurons(seen, said, None if as_json else note_kept)
    else:
        _tell_experts(seen, said, None if as_json else note_kept)


def _tell_experts(seen: Profile, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table."""
    from penstock.spec.profile import hit_rates

    rates = hit_rates(seen)
    experts = len(rates) - 1
    if note_kept is None:
        print_json(said | {"hit_rates": rates})
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; a cache of so many of {experts} experts a layer would have had")
    for share in _SHOWN:
        slots = round(share * experts)
        print(f"  {slots:4} experts ({share:.0%})  {rates[slots]:.1%}")


def _tell_levels(seen: Profile, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table."""
    if note_kept is None:
        layers = [{"layer": each.layer, "level": each.level, "kept": each.kept} for each in seen.levels]
        print_json(said | {"layers": layers})
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; --sparsity threshold takes for zeros what is below")
    print("layer  level    above it")
    for each in seen.levels:
        print(f"  {each.layer:3}  {each.level:7.4f}  {each.kept[0]:8.1%}")


def _tell_neurons(seen: Profile, said: dict[str, object], note_kept: str | None) -> None:
    """As JSON, or after a note as a table."""
    from penstock.planner.firing import measured
    from penstock.spec.profile import FIRED_TOGETHER, hottest_share

    together = measured(seen)
    assert together is not None
    hot = [hottest_share(layer.counted(), _HOT) for layer in seen.neurons]
    if note_kept is None:
        layers = [
            {"layer": each.layer, "fired": each.fired[0], "hot_80": share}
            for each, share in zip(seen.neurons, hot, strict=True)
        ]
        print_json(said | {"fired": dict(zip(FIRED_TOGETHER, together.shares, strict=True)), "layers": layers})
        return
    note(note_kept)
    print(f"{seen.tokens} tokens; a token fires {together.shares[0]:.1%} of the neurons, and so many tokens in a row")
    for tokens, share in zip(FIRED_TOGETHER[1:], together.shares[1:], strict=True):
        print(f"  {tokens:4} tokens  {share:.1%}")
    print("layer  fires  of its neurons make 80 %")
    for each, share in zip(seen.neurons, hot, strict=True):
        print(f"  {each.layer:3}  {each.fired[0]:5.1%}  {share:5.1%}")
