"""`penstock pull`: downloads a model from the Hub."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from penstock.cli.options import Json, quiet_blas, where
from penstock.cli.output import note, print_json, progress
from penstock.units import format_bytes


def pull(
    model: Annotated[
        str, Argument(metavar="MODEL", help="On the Hub: org/name[:revision][/file.gguf], or org/name:Q4_K_M.")
    ],
    as_json: Json = False,
) -> None:
    """Downloads a model from the Hub, as it is there now.

    Only the files that are needed: config, tokenizer and safetensors, or one GGUF file; never pickles or code. A model
    that penstock cannot run is refused before its weights come. They lie in the cache of huggingface_hub (HF_HOME).
    Interrupted, the same command goes on where it stopped. Gated models need `hf auth login`. Other commands download
    too, but take a model that is here as it is, without asking the Hub.
    """
    quiet_blas()
    from penstock.runtime.host import available_bytes
    from penstock.serve.named import named_on_the_hub

    name = named_on_the_hub(model)
    from penstock.hubs.pull import pull as bring
    from penstock.serve.planning import describe

    with progress() as tell:
        pulled = bring(name, where(), tell, available_bytes(), describe)
    if as_json:
        print_json(
            {
                "path": str(pulled.path),
                "commit": pulled.commit,
                "files": [file.name for file in pulled.choice.files],
                "bytes": pulled.choice.nbytes,
                "downloaded_bytes": pulled.brought_bytes,
            }
        )
        return
    how = f"{format_bytes(pulled.brought_bytes)} downloaded" if pulled.brought_bytes else "all of it was here"
    note(f"{name} at {pulled.commit[:12]}: {format_bytes(pulled.choice.nbytes)} in {pulled.path}; {how}")
