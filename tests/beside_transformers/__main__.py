"""`python -m tests.beside_transformers`: random folders of models as wide as real ones, beside transformers.

The other side is transformers in float32, of the same numbers: what a config says, in any of the ways in which it may
be said, must mean the same here. With exact activations logits must be the same but for rounding; by default, with
rounded ones, they may be as far off as ROUNDED says. Where a router's scores nearly tie, transformers is made to choose
as we did (`near_ties`). With rounded activations other experts are chosen now and then, so the median row counts there.

    --cases N | --minutes M    how much (2 minutes)
    --first N                  begin with this case
    --case N                   this one alone

The last line is one JSON object; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.runtime import host
from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.spec.ask import Ask
from penstock.store.pack import pack
from tests.beside_transformers.draws import ROOM, VOCABULARY, Case, draw
from tests.beside_transformers.folders import make
from tests.cpu.commands import MACHINE
from tests.cpu.near_ties import choosing, heard
from tests.cpu.oracle import Oracle
from tests.numbered import search
from tests.steps import PROMPTS, STEPS, answers, distance, prompts

EXACT = 1e-4  # root mean square of what differs, over that of the logits; float32 alone gives up to 5e-5
ROUNDED = 0.15

Array = NDArray[Any]


def differences(case: Case, folder: Path) -> tuple[list[str], dict[str, float]]:
    """What is too far off, and the largest distances."""
    torch.set_num_threads(host.usable_cpus())
    model, wide = make(case, folder)
    oracle, ids = Oracle(wide), prompts(VOCABULARY, PROMPTS)
    expected = [_rows(oracle, each) for each in ids]
    packed = pack(model, folder / "packed")
    found, largest = list[str](), {"exact": 0.0, "rounded": 0.0}
    ask = Ask(context=ROOM, kv="float32", prompt_tokens=64, output_tokens=8)
    for name, limit in (("exact", EXACT), ("rounded", ROUNDED)):
        how = Loading(machine=MACHINE, device="none", exact=name == "exact")
        with closing(Engine.load(packed, ask, how)) as engine:
            off = [_distances(engine, each, there) for each, there in zip(ids, expected, strict=True)]
            if engine.plan.target.spec.is_routed:
                off = _of_experts(engine, oracle, ids, off) if name == "exact" else [[float(np.median(off))]]
        for each, rows in zip(ids, off, strict=False):
            largest[name] = max(largest[name], *rows)
            far = [f"{one:.2g} after {len(each) - STEPS} + {at}" for at, one in enumerate(rows) if one > limit]
            found += [f"{name}: {', '.join(far)} tokens"] if far else []
    return found, largest


def _rows(oracle: Oracle, ids: Array) -> Array:
    """Logits of the last row of a prompt and of each step behind it, float32 [1 + STEPS, V]."""
    return oracle.logits(ids.tolist())[-STEPS - 1 :]


def _distances(engine: Engine, ids: Array, expected: Array) -> list[float]:
    return [distance(here, there) for here, there in zip(answers(engine, ids), expected, strict=True)]


def _of_experts(engine: Engine, oracle: Oracle, ids: list[Array], off: list[list[float]]) -> list[list[float]]:
    """The distances where transformers chooses as we did in near ties."""
    found = []
    for each, rows in zip(ids, off, strict=True):
        if max(rows) > EXACT:
            with heard(engine) as said:
                ours = answers(engine, each)
            with choosing(oracle.model, said):
                rows = [distance(here, there) for here, there in zip(ours, _rows(oracle, each), strict=True)]
        found.append(rows)
    return found


def judged(number: int) -> tuple[str, list[str]]:
    case = draw(number)
    with tempfile.TemporaryDirectory(prefix="penstock-beside-transformers-") as folder:
        try:
            found, largest = differences(case, Path(folder))
        except Exception as error:  # a refusal too: transformers runs all of these
            found, largest = [f"{type(error).__name__}: {error}"], {}
    return f"{case} ({', '.join(f'{name} {off:.2g}' for name, off in largest.items())})", found


if __name__ == "__main__":
    sys.exit(search(__doc__ or "", judged))
