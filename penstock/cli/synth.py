"""`penstock synth`: writes a packed model of a real shape with random weights."""

from __future__ import annotations

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
    as_json: Json = False,
) -> None:
    """A packed model of a real shape with random weights.

    It has a byte tokenizer and serves to measure without a download.
    """
    quiet_blas()
    from penstock.serve.shapes import locate
    from penstock.spec.format import parse_format
    from penstock.store.packed import open_packed
    from penstock.store.synth import synth as synthesize

    folder = as_path(dst)
    fmt = parse_format(weights) if weights else None
    with progress() as tell:
        synthesize(
            locate(as_path(config)),
            folder,
            fmt,
            seed=seed,
            progress=lambda done, total, key: tell(f"writing {key}", done, total),
        )
    packed = open_packed(folder)
    if as_json:
        print_json({"folder": str(folder), "weights": packed.weights.name, "bytes": packed.total_bytes})
        return
    note(f"{folder}: {format_bytes(packed.total_bytes)} in {packed.weights.name}, random weights")
