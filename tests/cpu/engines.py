"""Engines of small models for tests: made on a made-up machine, resident or streaming granule by granule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.engine import Engine
from penstock.serve.loading import Loading
from penstock.serve.sampling import SamplingParams
from penstock.spec.ask import Ask
from penstock.spec.format import parse_format
from penstock.spec.plan import Plan, Unit
from penstock.store.packed import Packed
from penstock.store.synth import synth
from tests.cpu.commands import MACHINE, ROOT
from tests.cpu.configs import TINY_CONFIGS
from tests.plans import make_plan

STORIES = ROOT.parent / "shared" / "models" / "stories-260k"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the model stories-260k is not on this machine")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def make_model(folder: Path, name: str, weights: str) -> Path:
    """A random model by name of its tiny config and format, made once."""
    target = folder / f"{name}-{weights}"
    if not target.exists():
        (folder / f"{name}.json").write_text(TINY_CONFIGS[name])
        synth(folder / f"{name}.json", target, parse_format(weights))
    return target


def load(folder: Path, plan: Plan | None = None, **ask: Any) -> Any:
    """An engine on a made-up machine, closed at the end of a `with`."""
    return closing(Engine.load(folder, Ask(**ask), Loading(machine=MACHINE, plan=plan)))


def streaming(packed: Packed, keep: Sequence[str] = ("norms", "edges"), ring: int = 3, **fields: Any) -> Plan:
    """Units of one granule; all but the kinds in `keep` on disk. `ring`: how many of the largest it holds."""
    units = [
        Unit(part.key, lo, lo + 1, "host" if part.kind in keep else "disk0", "host", "host")
        for part in packed.parts.values()
        for lo in range(part.granules)
    ]
    ring_bytes = {"host": ring * max(part.granule_bytes for part in packed.parts.values())}
    return make_plan(packed.spec, packed.weights, units, ring_bytes=ring_bytes, **fields)
