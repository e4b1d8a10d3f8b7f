"""`penstock pack`: makes a packed model of a checkpoint, or verifies one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.cli.options import Json, Weights, as_path, quiet_blas, where
from penstock.cli.output import note, print_json, progress
from penstock.errors import BadRequest
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.store.packed import Packed


def pack(
    src: Annotated[
        str, Argument(metavar="SRC", help="A MODEL that is not packed, as of `run`; with --verify alone, a packed one.")
    ],
    dst: Annotated[str | None, Argument(metavar="DST", help="The new folder of the packed model.")] = None,
    weights: Weights = None,
    spread: Annotated[
        str | None,
        Option("--spread", metavar="DIR", help="Put half of the bytes under DIR, on a second disk: both read at once."),
    ] = None,
    profile: Annotated[
        str | None,
        Option(
            "--profile",
            metavar="FILE",
            help="The profile.json of a ReLU model (`penstock profile`): neurons lie hot to cold. SRC may be packed;"
            " its predictors come along.",
        ),
    ] = None,
    check: Annotated[
        bool, Option("--verify", help="Compare every byte of the packed model with its checksum.")
    ] = False,
    as_json: Json = False,
) -> None:
    """A checkpoint to a packed model.

    A packed model loads in a few large reads. Interrupted, the same command goes on where it stopped.
    """
    if dst is None:
        _require_checking(check, {"weights": weights, "spread": spread, "profile": profile})
    quiet_blas()
    from penstock.serve.before_packing import check_text_files
    from penstock.serve.named import Located, locate
    from penstock.serve.planning import describe
    from penstock.spec.format import parse_format
    from penstock.store.pack import pack as pack_checkpoint
    from penstock.store.packed import is_packed, open_packed, read_config
    from penstock.store.profile_file import read as read_profile
    from penstock.store.reorder import reorder
    from penstock.store.verify import verify

    fmt, located = parse_format(weights) if weights else None, Located(as_path(src))
    if dst is not None:
        with progress() as tell:
            located = locate(src, where(), tell, lambda path: describe(path, fmt))
    source = located.path
    folder, beside = as_path(dst or src), as_path(spread) if spread else None
    by = read_profile(as_path(profile), read_config(source)[1]) if profile else None
    with progress() as tell, located.naming():

        def packing(done: int, total: int, key: str) -> None:
            tell(f"packing {key}", done, total)

        if dst is not None and by is not None and is_packed(source):
            reorder(source, folder, by, fmt, packing, spread=beside, say=note)
        elif dst is not None:
            check_texts = partial(check_text_files, chat=True, whole=False)
            pack_checkpoint(source, folder, fmt, packing, spread=beside, profile=by, check=check_texts)
        if check:
            verify(folder, lambda done, total, key: tell(f"verifying {key}", done, total))
    _print_packed(folder, open_packed(folder), check, as_json)


def _require_checking(check: bool, packing: dict[str, str | None]) -> None:
    """Raises BadRequest where SRC stands alone without --verify, or beside a flag that is for packing."""
    if not check:
        raise BadRequest("pack needs SRC and DST; `penstock pack --verify SRC` checks a packed model")
    for name, value in packing.items():
        if value is not None:
            raise BadRequest(f"--{name} is for packing: name DST too")


def _print_packed(folder: Path, packed: Packed, verified: bool, as_json: bool) -> None:
    from penstock.store.predictors import FILE

    foretold = (folder / FILE).is_file()
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "weights": packed.weights.name,
                "bytes": packed.total_bytes,
                "ordered": bool(packed.orders),
                "predictors": foretold,
                "verified": verified,
            }
        )
        return
    how = f"{', neurons hot to cold' if packed.orders else ''}{', with predictors' if foretold else ''}"
    how += ", verified" if verified else ""
    note(f"{folder}: {format_bytes(packed.total_bytes)} in {packed.weights.name}{how}")
