"""`penstock pack`: makes a packed model of a checkpoint, or verifies one."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from typer import Argument, Option

from penstock.cli.options import Json, Weights, as_path, quiet_blas
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest
from penstock.units import format_bytes


def pack(
    src: Annotated[str, Argument(metavar="SRC", help="A checkpoint's folder; with --verify alone, a packed model.")],
    dst: Annotated[str | None, Argument(metavar="DST", help="The new folder of the packed model.")] = None,
    weights: Weights = None,
    spread: Annotated[
        str | None,
        Option("--spread", metavar="DIR", help="Put half of the bytes under DIR, on a second disk: both read at once."),
    ] = None,
    check: Annotated[
        bool, Option("--verify", help="Compare every byte of the packed model with its checksum.")
    ] = False,
    as_json: Json = False,
) -> None:
    """A checkpoint to a packed model.

    A packed model loads in a few large reads. Interrupted, the same command goes on where it stopped.
    """
    if dst is None and not check:
        raise BadRequest("pack needs SRC and DST; `penstock pack --verify SRC` checks a packed model")
    if dst is None and weights is not None:
        raise BadRequest("--weights is for packing: name DST too")
    if dst is None and spread is not None:
        raise BadRequest("--spread is for packing: name DST too")
    quiet_blas()
    from penstock.serve.before_packing import check_text_files
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack as pack_checkpoint
    from penstock.store.packed import open_packed
    from penstock.store.verify import verify

    fmt = parse_format(weights) if weights else None
    folder = as_path(dst or src)
    with progress() as tell:
        if dst is not None:
            pack_checkpoint(
                as_path(src),
                folder,
                fmt,
                progress=lambda done, total, key: tell(f"packing {key}", done, total),
                spread=as_path(spread) if spread else None,
                check=partial(check_text_files, chat=True, whole=False),
            )
        if check:
            verify(folder, lambda done, total, key: tell(f"verifying {key}", done, total))
    packed = open_packed(folder)
    if as_json:
        report = {"folder": str(folder), "weights": packed.weights.name, "bytes": packed.total_bytes, "verified": check}
        print_json(report)
        return
    note(f"{folder}: {format_bytes(packed.total_bytes)} in {packed.weights.name}{', verified' if check else ''}")
