"""`penstock import`: lists the models that Ollama and LM Studio keep on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from penstock.cli.options import Json, quiet_blas, where
from penstock.cli.output import note, one_line, print_json, table
from penstock.errors import BadRequest, PenstockError
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.hubs.found import Found

_HEAD = ("name", "format", "size", "runs")


def import_(
    program: Annotated[str | None, Argument(metavar="PROGRAM", help="ollama or lmstudio; default both.")] = None,
    as_json: Json = False,
) -> None:
    """The models that Ollama and LM Studio keep on this machine, by the names that MODEL takes.

    Nothing is copied: `penstock run ollama:llama3.2:1b` reads Ollama's own file. Looks where OLLAMA_MODELS says, in
    ~/.ollama/models and /usr/share/ollama/.ollama/models; in the models folder of LM Studio's settings, in
    ~/.lmstudio/models and ~/.cache/lm-studio/models.
    """
    quiet_blas()
    from penstock.hubs import lm_studio, ollama
    from penstock.hubs.where import lm_studio_folders, ollama_folders

    programs = {"ollama": ollama, "lmstudio": lm_studio}
    if program is not None and program not in programs:
        raise BadRequest(f"{program:.100} keeps no models that penstock knows of: {' or '.join(programs)}")
    places, wanted = where(), [program] if program is not None else list(programs)
    models = [each for name in wanted for each in programs[name].listed(places)]
    formats = [_format(each) for each in models]
    if as_json:
        print_json({"models": [_report(each, *how) for each, how in zip(models, formats, strict=True)]})
        return
    if not models:
        folders = {"ollama": ollama_folders(places), "lmstudio": lm_studio_folders(places)}
        looked = ", ".join(str(folder) for name in wanted for folder in folders[name])
        note(f"no models in {looked}")
        return
    rows = [_HEAD]
    for each, (fmt, why) in zip(models, formats, strict=True):
        runs = one_line(f"no: {why}") if why else "yes"
        rows.append((one_line(each.name), one_line(fmt) or "–", format_bytes(each.nbytes), runs))
    print(table(rows, right=[2]))


def _format(model: Found) -> tuple[str, str]:
    """The format of a model's weights, and why the model does not run; "" if it runs."""
    from penstock.serve.planning import describe
    from penstock.store.naming import naming
    from penstock.store.own import own_format

    if model.path is None:
        return "", model.why
    try:
        with naming(model.name, model.path):
            describe(model.path)
            return own_format(model.path).name, ""
    except PenstockError as error:
        return "", error.message


def _report(model: Found, fmt: str, why: str) -> dict[str, object]:
    path: Path | None = model.path
    return {
        "name": model.name,
        "format": fmt or None,
        "bytes": model.nbytes,
        "path": None if path is None else str(path),
        "runs": not why,
        "why": why or None,
        "not_used": model.left_out or None,
    }
