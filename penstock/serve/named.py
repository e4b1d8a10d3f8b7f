"""From a MODEL argument to the files that it means.

In this order: a name that begins with the Hub's address, a path that is here, the bundled model or a bundled shape,
`ollama:…` and `lmstudio:…`, any other name on the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import BadRequest
from penstock.hubs.names import HubName, hub_name
from penstock.hubs.where import Tell, Where
from penstock.runtime.host import available_bytes
from penstock.serve import shapes
from penstock.store.naming import naming
from penstock.units import MIB

if TYPE_CHECKING:
    from penstock.hubs.found import Found

# A run that downloads peaks 11.0 MiB above the next one: httpx2, its TLS, and what was read ahead.
_CLIENT_BYTES = 14 * MIB


@dataclass(frozen=True)
class Located:
    """The files that MODEL means. `path`: a folder, a GGUF file, or whatever path the user named. `name`: what its
    packed copy is called; None: as the path. `beside_bytes`: memory that this process has taken to download it.
    `called`: what the user named, where that is no path."""

    path: Path
    name: str | None = None
    beside_bytes: int = 0
    called: str = ""

    def naming(self) -> AbstractContextManager[None]:
        """In this block errors say what the user named, and no path in Ollama's store or in the Hub's cache."""
        return naming(self.called, self.path) if self.called else nullcontext()


def locate(
    model: str, where: Where, tell: Tell | None = None, check: Callable[[Path], object] | None = None
) -> Located:
    """The files of MODEL, with weights. A model of the Hub is downloaded, unless it is here. `check`: is called before
    a download with a folder that a plan may read in the model's place. It raises if the model would be of no use.
    Raises BadRequest if there is no such model; UnsupportedModel, BrokenModel, StorageFailed."""
    located = _kept(model, where, tell)
    if located is not None:
        if "snapshots" in located.path.absolute().parts:  # seldom true, and huggingface_hub takes long to import
            from penstock.hubs.transfer import pin_path

            pin_path(located.path)
        return located
    name = hub_name(model)
    if name is None:
        raise BadRequest(_not_there(model))
    from penstock.hubs import pull  # with huggingface_hub

    pulled, beside_bytes = pull.find(name, where), 0
    if pulled is None:
        pulled, beside_bytes = pull.pull(name, where, tell, available_bytes(), check), _CLIENT_BYTES
    # A snapshot's folder is called by its commit.
    return Located(pulled.path, None if pulled.choice.main else name.repo.rpartition("/")[2], beside_bytes, model)


@contextmanager
def to_plan(model: str, where: Where, tell: Tell | None = None) -> Iterator[Path]:
    """Yields a path that has what a plan needs of MODEL. Of a model of the Hub that is not here only headers are read.
    Raises as `locate`."""
    located = _kept(model, where, tell)
    name = hub_name(model) if located is None else None
    if located is not None or name is None:
        with nullcontext() if located is None else located.naming():
            yield located.path if located is not None else _path(model)
        return
    from penstock.hubs import headers, pull  # with huggingface_hub

    pulled = pull.find(name, where)
    if pulled is not None:
        with naming(model, pulled.path):
            yield pulled.path
        return
    with headers.peek(name, where, tell, available_bytes()) as peeked:
        if tell is not None:
            tell(headers.told(peeked, name), 0, 0)
        yield peeked.path


def named_on_the_hub(model: str) -> HubName:
    """The model of the Hub that MODEL names. Raises BadRequest where it is a path that is here, or no such name."""
    name = hub_name(model)
    if name is None:
        raise BadRequest(
            f"{model:.200} is no name on the Hub: write org/name[:revision][/file.gguf] or org/name:Q4_K_M"
        )
    if not name.sure and _path(model).exists():
        raise BadRequest(f"{model:.200} is here, a path: hf.co/{name} names the Hub's")
    return name


def _kept(model: str, where: Where, tell: Tell | None) -> Located | None:
    """The files that MODEL means without the Hub; None if only the Hub may have them. Raises BadRequest."""
    name, path = hub_name(model), _path(model)
    if name is not None and name.sure:
        return None
    if path.exists():
        return Located(path)
    if (bundled := shapes.find_model(model)) is not None:
        return Located(bundled)
    if shapes.find(model) is not None:
        return Located(Path(model))
    from penstock.hubs import lm_studio, ollama  # seldom asked, and 10 ms of a start

    for program in (ollama, lm_studio):
        if model.startswith(program.SCHEME):
            found = program.find(model, where)
            _tell_left_out(found, tell)
            assert found.path is not None
            return Located(found.path, found.short, called=model)
    return None


def _not_there(model: str) -> str:
    if len(Path(model).parts) != 1:
        return f"{model} is not there"
    kinds = "MODEL is a folder, a GGUF file, org/name on the Hub, or what `penstock import` lists"
    return f"{model} is not there: {kinds}; {shapes.MODEL.name} is bundled"


def _tell_left_out(listed: Found, tell: Tell | None) -> None:
    if listed.left_out and tell is not None:
        tell(f"{listed.name}: not used of what Ollama has beside it: {listed.left_out}", 0, 0)


def _path(model: str) -> Path:
    return Path(os.path.expanduser(model))
