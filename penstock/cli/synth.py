"""`penstock synth`: writes a packed model of a real shape with random weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from typer import Argument, Option

from penstock.cli.options import Json, Weights, as_path, quiet_blas
from penstock.cli.output import note, print_json, progress
from penstock.units import format_bytes


def synth(
    config: Annotated[str, Argument(metavar="CONFIG", help="A model's config.json, its folder, or a bundled shape.")],
    dst: Annotated[str, Argument(metavar="DST", help="The new folder of the packed model.")],
    weights: Weights = None,
    seed: Annotated[int, Option("--seed", metavar="N", min=0, help="The same seed gives the same bytes.")] = 0,
    activation_rate: Annotated[
        str | None,
        Option(
            "--activation-rate",
            metavar="RATES",
            help="Of a model with ReLU: how often its neurons fire. zipf:S is a law of exponent S with a mean of 3 %;"
            " with 1.03 26 % of neurons make 80 % of activations. A file has a rate from 0 to 1 on each line, for a"
            " layer's neurons or for all layers'.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """A packed model of a real shape with random weights.

    It has a byte tokenizer and serves to measure without a download.
    """
    quiet_blas()
    from penstock.models import own_weights
    from penstock.serve import firing_rates
    from penstock.serve.shapes import locate
    from penstock.spec.format import parse_format
    from penstock.store.packed import open_packed, read_config
    from penstock.store.synth import synth as synthesize

    folder = as_path(dst)
    fmt = parse_format(weights) if weights else None
    source, shifts, fired = locate(as_path(config)), None, None
    with progress() as tell:
        if activation_rate is not None:
            config_keys, spec = read_config(source)
            rates = firing_rates.parse_rates(activation_rate, spec)
            shifts, layers = firing_rates.find_shifts(
                spec, fmt or own_weights(config_keys, spec, str(source)), seed, rates, tell
            )
            fired = firing_rates.together(layers)
        synthesize(
            source,
            folder,
            fmt,
            seed=seed,
            progress=lambda done, total, key: tell(f"writing {key}", done, total),
            shifts=shifts,
        )
    packed = open_packed(folder)
    if as_json:
        of_neurons = {} if fired is None else {"fires": dataclasses.asdict(fired)}
        print_json({"folder": str(folder), "weights": packed.weights.name, "bytes": packed.total_bytes, **of_neurons})
        return
    note(f"{folder}: {format_bytes(packed.total_bytes)} in {packed.weights.name}, random weights")
    if fired is not None:
        note(
            f"measured on random tokens: {fired.active:.1%} of neurons fire for a token, the hottest"
            f" {fired.hot:.0%} of a layer make {fired.made:.0%} of its activations, and {fired.alike:.0%} of those that"
            " fire for a token fired for the one before"
        )
