"""The folders in which LM Studio keeps models: the one that its user chose, and those beside its settings.

    ~/.lmstudio-home-pointer     its first line names LM Studio's home, where that is a chosen one
    HOME/settings.json           `downloadsFolder` names the folder of models
    HOME/models                  the folder of models where nothing else is named

Source: LM Studio's command line `lms` (src/modelsFolder.ts, src/lmstudioPaths.ts). Both files are other people's: they
are bounded, and one that is damaged, or names no absolute path, counts as if it were not there.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import PenstockError
from penstock.store.files import read_json, read_text

_POINTER, _SETTINGS, _CHOSEN = ".lmstudio-home-pointer", "settings.json", "downloadsFolder"
_HOMES = (".lmstudio", ".cache/lm-studio")  # that of now, and that of versions before 0.3.5
_MAX_POINTER_BYTES, _MAX_SETTINGS_BYTES = 4096, 1 << 20


def model_folders(user: Path) -> tuple[Path, ...]:
    """Folders that may hold models, of the user with this home folder. The one that was chosen comes first. Whether
    they are there is not looked at."""
    homes = (_named_home(user), *(user / each for each in _HOMES))
    folders = [folder for home in homes if home for folder in (_chosen(home), home / "models") if folder]
    return tuple(dict.fromkeys(folders))


def _named_home(user: Path) -> Path | None:
    try:
        lines = read_text(user / _POINTER, _MAX_POINTER_BYTES).splitlines()
    except (PenstockError, OSError):
        return None
    return _folder(lines[0].strip() if lines else None)


def _chosen(home: Path) -> Path | None:
    try:
        return _folder(read_json(home / _SETTINGS, _MAX_SETTINGS_BYTES).get(_CHOSEN))
    except (PenstockError, OSError):
        return None


def _folder(named: object) -> Path | None:
    """The folder of an absolute path; None for anything else."""
    if not isinstance(named, str) or not os.path.isabs(named) or "\0" in named:
        return None
    try:
        os.fsencode(named)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold
        return None
    return Path(named)
